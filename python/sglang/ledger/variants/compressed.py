"""Launch variants of hyper-connections and of compressed attention's kernels, described for the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant, describe
from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.blocks.hyper_connections.kernels import hyper_connection

OPS = ("hyper_connection", "shared_kv_norm_rope_store", "tail_rotation", "kv_compressor")

STREAMS = 4
PLACES = STREAMS + STREAMS * STREAMS
HIDDEN_SIZES = (4096, 7168)
"""Hidden sizes of DeepSeek-V4-Flash and V4-Pro."""
LAGGED_SIZE = 5120
"""That of DeepSeek-V4.1-Flash."""
LONGEST_STEP = 1 << 20
HEAD_DIM, INDEX_DIM, ROTARY_DIM = 512, 128, 64
RUNS = (
    *((4, 2, HEAD_DIM), (4, 2, INDEX_DIM), (128, 1, HEAD_DIM), (4, 1, INDEX_DIM)),
    *((2, 1, HEAD_DIM), (1, 1, HEAD_DIM), (1, 1, INDEX_DIM)),
)
"""(rate, runs that an entry is made of, dims of an entry). That of 4 tokens in one run is of Qwen3.8's indexer, whose
entries are means and whose norm has a weight in fp32, and of GLM-5.3-Flash's, whose entries have no norm; those of 2
and 1 are of DeepSeek-V4.1, which also pools two tokens without a norm."""
MEANS = (4, 1)
NOT_NORMED = ((4, 1), (2, 1))

FORM_RULES = {
    "hyper_connection.mix_streams_kernel": FormRule(
        free=frozenset({"PLACES"}), at_most=frozenset({"HAS_OUT"}), counts=frozenset({"num_tokens"})
    ),
    "hyper_connection.mix_all_streams_kernel": FormRule(
        free=frozenset({"PLACES"}), at_most=frozenset({"HAS_OUT"}), counts=frozenset({"num_tokens", "steps"})
    ),
    "hyper_connection.join_streams_kernel": FormRule(
        at_most=frozenset({"MIX", "HAS_BEFORE"}),
        counts=frozenset({"num_tokens", "num_splits", "rounds"}),
        absent={"MIX": ("placement", "rounds")},
    ),
    "tail_rotation.shared_kv_store_kernel": FormRule(free=frozenset({"Q_HEADS"})),
    "tail_rotation.tail_rotation_kernel": FormRule(
        free=frozenset({"NUM_HEADS"}), at_most=frozenset({"INVERSE"}), counts=frozenset({"dim"})
    ),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of `op` over the sizes of the published models. The same for every GPU."""
    yield from _VARIANTS[op]()


def _connections() -> Iterator[Variant]:
    """Yields the variants of hyper-connections between blocks, and behind the last one."""
    pointers = dict.fromkeys(("streams", "out", "mixed", "weight", "x"), "*bf16")
    pointers |= dict.fromkeys(("placement", "before", "matrix", "sums", "base", "scale"), "*fp32")
    types = pointers | dict.fromkeys(("num_tokens", "size", "steps", "num_splits", "rounds"), "i32")
    types |= {"eps": "fp32", "mix_eps": "fp32"}
    for name, outputs in (("between", STREAMS * (2 + STREAMS)), ("last", STREAMS)):
        shape = {"STREAMS": STREAMS, "OUTPUTS": outputs, "COLS": hyper_connection.columns_of_sums(outputs)}
        for tokens in (1, LONGEST_STEP):
            few = tokens <= hyper_connection.FEW_TOKENS
            kernel = hyper_connection.mix_streams_kernel if few else hyper_connection.mix_all_streams_kernel
            key, tile = f"mix/{name}/{'few' if few else 'many'}", hyper_connection.mix_tile(tokens)
            yield _of(
                "hyper_connection", key, kernel, types, shape | {"HAS_OUT": True, "PLACES": PLACES}, tile, ("size",)
            )
        for size in (*HIDDEN_SIZES, *([LAGGED_SIZE] if name == "between" else [])):
            lagged = size == LAGGED_SIZE
            for tokens in (1, *(maximum for maximum, _ in hyper_connection.SPLITS_UP_TO)):
                splits, _ = hyper_connection.split_counts(tokens, STREAMS, size)
                flags = {"MIX": name == "between", "LAGGED": lagged, "HAS_BEFORE": lagged}
                yield _of(
                    "hyper_connection", f"join/{'lagged' if lagged else name}/{splits}",
                    hyper_connection.join_streams_kernel, types, shape | flags,
                    hyper_connection.join_launch(splits, size), ("size",),
                )  # fmt: skip


_ROTARY = {"positions": "*i64", "cos_sin": "*fp32", "out_cache_loc": "*i64", "weight": "*bf16", "cache": "*bf16"}


def _stores() -> Iterator[Variant]:
    types = _ROTARY | {"q": "*bf16", "kv": "*bf16", "kv_stride": "i32", "slot_stride": "i32", "eps": "fp32"}
    for heads in (tail_rotation.HEADS_OF_FEW, tail_rotation.HEADS_OF_MANY):
        constants = {"Q_HEADS": 64, "DIM": HEAD_DIM, "ROT": ROTARY_DIM}
        launch = tail_rotation.launch_constants(HEAD_DIM, heads)
        yield _of(
            "shared_kv_norm_rope_store", f"{HEAD_DIM}r{ROTARY_DIM}/{heads}", tail_rotation.shared_kv_store_kernel,
            types, constants, launch, ("kv_stride", "slot_stride"),
        )  # fmt: skip


def _rotations() -> Iterator[Variant]:
    types = _ROTARY | {"x": "*bf16", "dim": "i32"}
    constants = {"NUM_HEADS": 64, "ROT": ROTARY_DIM, "INVERSE": True}
    launch = tail_rotation.launch_constants(ROTARY_DIM, tail_rotation.HEADS_OF_TAILS)
    kernel = tail_rotation.tail_rotation_kernel
    yield _of("tail_rotation", f"r{ROTARY_DIM}", kernel, types, constants, launch, ("dim",))


def _compressors() -> Iterator[Variant]:
    types = _ROTARY | dict.fromkeys(("rows", "bias", "state"), "*fp32") | {"eps": "fp32"}
    types |= dict.fromkeys(("slots", "firsts", "stops"), "*i64")
    types |= dict.fromkeys(("row_stride", "entry_stride", "width"), "i32")
    for rate, runs, dim in RUNS:
        constants = {"RATE": rate, "RUNS": runs, "DIM": dim, "ROT": ROTARY_DIM}
        launch = compressor.compress_launch(dim, runs * rate)
        strides = ("row_stride", "entry_stride")
        key = f"{rate}x{runs}/{dim}r{ROTARY_DIM}"
        means = {"bias": None, "cos_sin": None} if (rate, runs) == MEANS else {}
        typed = {name: kind for name, kind in types.items() if name not in means}
        typed |= {"weight": "*fp32"} if means else {}
        yield _of("kv_compressor", key, compressor.compress_kernel, typed, constants | means, launch, strides)
        if (rate, runs) in NOT_NORMED:
            plain = constants | {"ROT": 0, "weight": None, "cos_sin": None}
            typed = {name: kind for name, kind in types.items() if name not in plain}
            key = f"{rate}x{runs}/{dim}"
            yield _of("kv_compressor", key, compressor.compress_kernel, typed, plain, launch, strides)
    for size in sorted({rate * runs for rate, runs, _ in RUNS}):
        yield _of(
            "kv_compressor", f"keep/{size}", compressor.keep_kernel, types, {"SIZE": size}, compressor.KEEP_LAUNCH,
            ("row_stride", "width"),
        )  # fmt: skip


def _of(
    op: str, key: str, fn: Any, types: dict[str, str], constants: dict[str, Any], launch: dict[str, int],
    divisible: tuple[str, ...],
) -> Variant:  # fmt: skip
    """Returns a variant with those of the types that are parameters of the kernel."""
    arguments = {name: kind for name, kind in types.items() if name in fn.arg_names}
    return describe(op, key, fn, arguments, constants, launch, divisible)


_VARIANTS = {
    "hyper_connection": _connections,
    "shared_kv_norm_rope_store": _stores,
    "tail_rotation": _rotations,
    "kv_compressor": _compressors,
}

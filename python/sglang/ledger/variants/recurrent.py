"""Launch variants of the recurrent layers' kernels, described for the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import triton

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant, describe
from sglang.srt.blocks.kimi_delta.kernels import (
    channel_decay,
    channel_local,
    channel_scan,
    channel_step,
    channel_verify,
)
from sglang.srt.blocks.recurrent_state.kernels import (
    causal_conv,
    chunk_local,
    chunk_scan,
    commit,
    gated_norm,
    register_scan,
    state_step,
    state_verify,
)

OPS = (
    "causal_conv1d",
    "gated_delta_rule",
    "kimi_delta_rule",
    "state_space_duality",
    "gated_rmsnorm",
    "attention_output_gate",
    "attention_head_gate",
)

STATE_TYPES = {"float32": "*fp32", "bfloat16": "*bf16"}
RULES: Mapping[str, tuple[bool, tuple[tuple[int, int], ...]]] = {
    "gated_delta_rule": (True, ((128, 128),)),
    "state_space_duality": (False, ((128, 64), (256, 64))),
}
"""Op -> (whether the delta rule, dims of a key and a value in the published models)."""
KIMI_DIM = 128
"""Dim of keys and values in the published models with Kimi delta attention."""
NORM_SIZES = (128, 512, 1024, 2048)
"""Channels that share a norm: a head's, or a group's of Mamba-2 (of eight, whatever the number of ranks)."""

_INDEX = {
    "initial_slots": "*i64", "slots": "*i64", "prefix_lens": "*i32", "start_loc": "*i32", "counts": "*i32",
    "addresses": "*i64",
}  # fmt: skip
_COUNTS = {"num_seqs": "i32", "heads": "i32", "group": "i32", "width": "i32"}
_KEPT = {"log_decays": "*fp32", "betas": "*fp32"}
_STRIDES = ("token_stride", "out_stride", "slot_stride")
_GATES = {"a": "*bf16", "b": "*bf16", "a_log": "*fp32", "dt_bias": "*fp32", "dt_min": "fp32", "dt_max": "fp32"}

FORM_RULES = {
    "causal_conv.conv_extend_kernel": FormRule(
        free=frozenset({"HEAD_DIM"}), at_most=frozenset({"HAS_BIAS"}), absent={"HAS_BIAS": ("bias",)}
    ),
    "causal_conv.conv_decode_kernel": FormRule(
        free=frozenset({"HEAD_DIM"}), at_most=frozenset({"HAS_BIAS"}), absent={"HAS_BIAS": ("bias",)}
    ),
    "causal_conv.conv_verify_kernel": FormRule(
        free=frozenset({"HEAD_DIM"}), at_most=frozenset({"HAS_BIAS"}), absent={"HAS_BIAS": ("bias",)}
    ),
    "commit.commit_states_kernel": FormRule(counts=frozenset({"heads", "group"})),
    "chunk_local.chunk_local_kernel": FormRule(
        counts=frozenset({"heads", "group", "ab_stride", "a", "b"}),
        absent={"DELTA": ("b", "u", "w", "v")},
    ),
    "chunk_scan.chunk_scan_kernel": FormRule(
        at_most=frozenset({"HAS_SKIP"}), counts=frozenset({"heads", "group"}), absent={"HAS_SKIP": ("skip",)}
    ),
    "register_scan.register_scan_kernel": FormRule(
        at_most=frozenset({"HAS_SKIP"}), counts=frozenset({"heads", "group"}), absent={"HAS_SKIP": ("skip",)}
    ),
    "state_step.state_step_kernel": FormRule(
        at_most=frozenset({"HAS_SKIP"}),
        counts=frozenset({"heads", "group", "ab_stride", "a", "b"}),
        absent={"HAS_SKIP": ("skip",), "DELTA": ("b",)},
    ),
    "state_verify.state_verify_kernel": FormRule(
        at_most=frozenset({"HAS_SKIP"}),
        counts=frozenset({"heads", "group", "ab_stride", "a", "b"}),
        absent={"HAS_SKIP": ("skip",), "DELTA": ("b",)},
    ),
    "channel_decay.channel_decay_kernel": FormRule(counts=frozenset({"heads"}), absent={"BOUNDED": ("lower_bound",)}),
    "channel_local.channel_pairs_kernel": FormRule(counts=frozenset({"heads", "b", "b_stride"})),
    "channel_local.channel_solve_kernel": FormRule(counts=frozenset({"heads", "b", "b_stride"})),
    "channel_scan.channel_scan_kernel": FormRule(counts=frozenset({"heads"})),
    "channel_step.channel_step_kernel": FormRule(
        counts=frozenset({"heads", "b", "b_stride"}), absent={"BOUNDED": ("lower_bound",)}
    ),
    "channel_verify.channel_verify_kernel": FormRule(
        counts=frozenset({"heads", "b", "b_stride"}), absent={"BOUNDED": ("lower_bound",)}
    ),
    "gated_norm.gated_rmsnorm_kernel": FormRule(at_most=frozenset({"SILU"}), counts=frozenset({"rows", "groups"})),
    "gated_norm.attention_head_gate_kernel": FormRule(counts=frozenset({"heads", "head_dim"})),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of `op` over the sizes of the published models, the same on every GPU."""
    if op == "causal_conv1d":
        yield from _convolutions()
    elif op == "gated_rmsnorm":
        yield from _norms()
    elif op == "attention_output_gate":
        types = {"x": "*bf16", "gate": "*bf16", "width": "i32", "gate_stride": "i32"}
        launch = {"BLOCK": gated_norm.GATE_BLOCK, "num_warps": 4}
        yield describe(op, "all", gated_norm.attention_output_gate_kernel, types, {}, launch, ("width", "gate_stride"))
    elif op == "attention_head_gate":
        types = {"x": "*bf16", "gate": "*bf16", "heads": "i32", "head_dim": "i32"}
        launch = {"BLOCK": gated_norm.GATE_BLOCK, "num_warps": 4}
        yield describe(op, "all", gated_norm.attention_head_gate_kernel, types, {}, launch, ("head_dim",))
    elif op == "kimi_delta_rule":
        yield from _channels(op, KIMI_DIM)
    else:
        delta, dims = RULES[op]
        for key_dim, value_dim in dims:
            yield from _recurrence(op, delta, key_dim, value_dim)


def _convolutions() -> Iterator[Variant]:
    data = dict.fromkeys(("x", "weight", "bias", "states", "out", "kept"), "*bf16")
    numbers = dict.fromkeys(("num_seqs", "channels", "norm_heads", "x_stride", "out_stride", "slot_stride"), "i32")
    numbers["width"] = "i32"
    constants = {
        "WIDTH": causal_conv.MAX_WIDTH,
        "HEAD_DIM": 128,
        "BLOCK": causal_conv.MAX_BLOCK,
        "HAS_BIAS": True,
        "L2_EPS": causal_conv.L2_EPS,
    }
    aligned = ("channels", "x_stride", "out_stride", "slot_stride")
    for name, fn, launch in (
        ("extend", causal_conv.conv_extend_kernel, causal_conv.EXTEND_TILE),
        ("decode", causal_conv.conv_decode_kernel, {"num_warps": causal_conv.DECODE_WARPS}),
        ("verify", causal_conv.conv_verify_kernel, {"num_warps": causal_conv.DECODE_WARPS}),
    ):
        types = data | numbers | _INDEX
        yield _described("causal_conv1d", name, fn, types, constants, launch, aligned)
        # Of Nemotron-3-Nano on eight ranks: the projection's rows, with a time step a head, are no multiples of 16.
        odd = _described("causal_conv1d", f"{name}/odd", fn, types, constants, launch, (*aligned[:1], *aligned[2:]))
        yield replace(odd, form_only=True)
    constants = {"ENTRIES": causal_conv.MAX_WIDTH - 1, "NUM_ADDRESSES": commit.NUM_ADDRESSES}
    types = data | numbers | _INDEX
    yield _described("causal_conv1d", "commit", commit.commit_conv_kernel, types, constants, commit.CONV_TILE, aligned)


def _recurrence(op: str, delta: bool, key_dim: int, value_dim: int) -> Iterator[Variant]:
    data = dict.fromkeys(("q", "k", "v", "scores", "u", "w", "out"), "*bf16") | _GATES | _INDEX | _COUNTS
    data |= dict.fromkeys(("decay", "beta", "beta_out", "skip"), "*fp32") | {"scale": "fp32", "ab_stride": "i32"}
    data |= dict.fromkeys(_STRIDES, "i32")
    shape = {"K": key_dim, "V": value_dim, "BLOCK_K": triton.next_power_of_2(key_dim), "DELTA": delta}
    dims = f"{key_dim}x{value_dim}"
    in_registers = key_dim <= register_scan.MAX_KEYS
    chunk = {"CHUNK": register_scan.CHUNK if in_registers else chunk_local.CHUNK}
    constants: dict[str, Any] = shape | chunk | {"BLOCK_V": triton.next_power_of_2(value_dim)}
    local, local_tile = chunk_local.chunk_local_kernel, register_scan.LOCAL_TILE if in_registers else chunk_local.TILE
    yield _described(op, f"local/{dims}", local, data, constants, local_tile, _STRIDES)
    scan = register_scan.register_scan_kernel if in_registers else chunk_scan.chunk_scan_kernel
    scan_tiles = register_scan.TILES if in_registers else (chunk_scan.TILE,)
    for state, pointer in STATE_TYPES.items():
        arguments = data | {"states": pointer}
        constants = shape | chunk | {"HAS_SKIP": not delta}
        for scan_tile in scan_tiles:
            yield _described(op, f"scan/{dims}/{state}", scan, arguments, constants, scan_tile, _STRIDES)
        for tile in state_step.STEP_TILES:
            key = f"step/{dims}/{state}"
            constants = shape | {"HAS_SKIP": not delta}
            yield _described(op, key, state_step.state_step_kernel, arguments, constants, tile, _STRIDES)
        key, verify, tile = f"verify/{dims}/{state}", state_verify.state_verify_kernel, state_verify.VERIFY_TILE
        yield _described(op, key, verify, arguments | _KEPT, shape | {"HAS_SKIP": not delta}, tile, _STRIDES)
        yield _commit(op, f"{dims}/{state}", pointer, shape)


def _commit(op: str, key: str, states: str, shape: Mapping[str, Any]) -> Variant:
    types = {"states": states, "k": "*bf16", "v": "*bf16"} | _KEPT | _INDEX | _COUNTS
    types |= dict.fromkeys(_STRIDES, "i32")
    constants = {"DELTA": True, "BY_CHANNEL": False, "NUM_ADDRESSES": commit.NUM_ADDRESSES, **shape}
    kernel, tile = commit.commit_states_kernel, state_verify.VERIFY_TILE
    return _described(op, f"commit/{key}", kernel, types, constants, tile, _STRIDES)


def _channels(op: str, dim: int) -> Iterator[Variant]:
    """Of Kimi delta attention, with keys and values of `dim`."""
    data = dict.fromkeys(("q", "k", "v", "a", "b", "scores", "u", "w", "out"), "*bf16") | _INDEX
    data |= dict.fromkeys(("decay", "pairs", "a_log", "dt_bias"), "*fp32")
    data |= dict.fromkeys(("num_seqs", "heads", "width", "a_stride", "b_stride", *_STRIDES), "i32")
    data |= dict.fromkeys(("scale", "lower_bound"), "fp32")
    aligned = (*_STRIDES, "a_stride")
    block = triton.next_power_of_2(dim)
    shape = {"K": dim, "V": dim, "BLOCK_K": block}
    chunk = shape | {"CHUNK": channel_local.CHUNK}
    decay = channel_decay.channel_decay_kernel
    for bounded in (False, True):
        key = f"decay/{dim}/{'bounded' if bounded else 'unbounded'}"
        yield _described(op, key, decay, data, chunk | {"BOUNDED": bounded}, channel_decay.TILE, aligned)
    pairs, solve = channel_local.channel_pairs_kernel, channel_local.channel_solve_kernel
    rows = chunk | {"ROWS": channel_local.ROWS}
    yield _described(op, f"pairs/{dim}", pairs, data, rows, channel_local.PAIRS_TILE, aligned)
    yield _described(op, f"solve/{dim}", solve, data, chunk | {"BLOCK_V": block}, channel_local.SOLVE_TILE, aligned)
    for state, pointer in STATE_TYPES.items():
        arguments, scan = data | {"states": pointer}, channel_scan.channel_scan_kernel
        yield _described(op, f"scan/{dim}/{state}", scan, arguments, chunk, channel_scan.TILE, aligned)
        for bounded in (False, True):
            key = f"step/{dim}/{state}/{'bounded' if bounded else 'unbounded'}"
            for tile in state_step.STEP_TILES:
                constants = shape | {"BOUNDED": bounded}
                yield _described(op, key, channel_step.channel_step_kernel, arguments, constants, tile, aligned)
            key, verify, tile = (
                key.replace("step", "verify"),
                channel_verify.channel_verify_kernel,
                state_verify.VERIFY_TILE,
            )
            yield _described(op, key, verify, arguments | _KEPT, shape | {"BOUNDED": bounded}, tile, aligned)
        yield _commit(op, f"{dim}/{state}", pointer, shape | {"BY_CHANNEL": True})


def _norms() -> Iterator[Variant]:
    types = {"x": "*bf16", "gate": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"}
    types |= dict.fromkeys(("rows", "groups", "size", "gate_stride", "weight_stride"), "i32")
    for size in NORM_SIZES:
        for many in (False, True):
            launch = gated_norm.norm_launch(1 << 20 if many else 1, size)
            for first in (False, True):
                key = f"{size}/{'many' if many else 'few'}/{'gate_first' if first else 'gate_last'}"
                kernel, constants = gated_norm.gated_rmsnorm_kernel, {"GATE_FIRST": first, "SILU": True}
                aligned = ("size", "weight_stride")
                yield describe("gated_rmsnorm", key, kernel, types, constants, launch, ("gate_stride", *aligned))
                if first:  # a part of the same projection as of the convolution
                    odd = describe("gated_rmsnorm", f"{key}/odd", kernel, types, constants, launch, aligned)
                    yield replace(odd, form_only=True)


def _described(
    op: str,
    key: str,
    fn: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    launch: Mapping[str, int],
    aligned: tuple[str, ...],
) -> Variant:
    """Returns a variant with the parameters that the kernel has, and without the alignments that it does not look
    at."""
    arguments = {name: kind for name, kind in types.items() if name in fn.arg_names}
    constants = {name: value for name, value in constants.items() if name in fn.arg_names}
    described = describe(
        op, key, fn, arguments, constants, launch, tuple(name for name in aligned if name in arguments)
    )
    ignored = {*fn.do_not_specialize, *fn.do_not_specialize_on_alignment}
    multiples = tuple(name for name in described.divisible_by_16 if name not in ignored)
    return Variant(
        described.op, described.key, fn, described.signature, described.constexprs, multiples, described.tile
    )

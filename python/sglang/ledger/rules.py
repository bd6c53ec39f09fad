"""Rules that the lock files must satisfy. They need only recorded numbers, no compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang.ledger.lock_writer import digest_of
from sglang.ledger.targets import NOT_NATIVE, TRITON_VERSIONS
from sglang.ledger.variant import Variant
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels import tiles
from sglang.srt.kernels.ledger_file import LOCKS, Ledger, LedgerRows
from sglang.srt.kernels.spec import Need

SPILL_BUDGET = 0
"""Bytes that a default tile may spill (stores plus loads), but for the exceptions below."""


@dataclass(frozen=True, slots=True)
class AcceptedSpill:
    """A default tile that may spill: rows of `op` whose key starts with `key`, on any architecture of `lock`."""

    lock: str
    op: str
    key: str
    max_bytes: int
    why: str


_WHOLE_ROWS = (
    "32 entries a thread of 16 warps, which have 128 registers; in twice as many parts of half the size the choice"
    " takes 1.5 times as long on an H200"
)
_GUESSES = (
    "a few registers of where each draft token ends, outside the loop; one token of each sequence has none of them"
)
_FEW_REGISTERS = (
    "a few registers of 255 under one of the two Triton versions; the next tile down does half the work for each key"
    " that it loads"
)
_IN_PIECES = (
    "only with shares that 16 does not divide, or whose bytes it does not, so that they are loaded in pieces: the dense"
    " layers of DeepSeek-V2-Lite and GLM-4.5-Air, and Qwen2.5-72B and Nemotron-3-Nano, on eight ranks"
)
_FASTEST = "measured as the fastest with Triton 3.6, under which it spills nothing; under 3.9 it does"
_FASTEST_PROMPTS = "blocks of 32 and 64 heads, the fastest of the tiles for prompts on an H200 (benchmark/results)"
_LONG_ROWS = "rows of 53,248 elements: the MLP of Llama 3.1 405B whole, on one rank, which has no room for it"
_UNALIGNED_HEADS = "only image encoders, of which none is served yet, have heads of 72, whose rows are not aligned"
_MASKS = "only with columns that no block divides, whose masks it keeps on the stack: with others it spills nothing"
_HEADS = "quantized output heads, under one of the two versions"
ACCEPTED_SPILLS: tuple[AcceptedSpill, ...] = (
    AcceptedSpill("sm120", "add_adapters", "expand/all/SPANS [12]", 16, "two registers, under Triton 3.6 alone"),
    AcceptedSpill(
        "sm120",
        "prefill_attention",
        "72x72/bfloat16/bfloat16/causal",
        120,
        "image encoders, the only ones with this head dim, are not causal; the tile is chosen for them",
    ),
    AcceptedSpill("sm120", "quantize_activation", "token/e4m3/65536", 184, _LONG_ROWS),
    AcceptedSpill("sm120", "quantize_activation", "token/int8/65536", 176, _LONG_ROWS),
    AcceptedSpill("sm90", "quantize_activation", "token/e4m3/65536", 184, _LONG_ROWS),
    AcceptedSpill("sm90", "quantize_activation", "token/int8/65536", 112, _LONG_ROWS),
    *(
        AcceptedSpill("sm120", "linear", f"tiles/{scheme}{split}/odd", 1912, _IN_PIECES)
        for scheme in ("fp8_tensor", "fp8_channel", "int8_channel")
        for split in ("", "/split")
    ),
    AcceptedSpill("sm120", "linear", "tiles/fp8_channel_a16/odd", 572, _IN_PIECES),
    *(
        AcceptedSpill("sm120", "linear", f"tiles/{scheme}/split/fp32", 8, _HEADS)
        for scheme in ("fp8_tensor", "fp8_channel")
    ),
    AcceptedSpill("sm120", "fused_moe", "gate_up/fp8_block_a16", 8, "the last resort, under Triton 3.6"),
    AcceptedSpill("sm120", "fused_moe", "gate_up/fp8_channel_a16", 16, "four registers of one tile, under Triton 3.9"),
    AcceptedSpill("sm120", "linear", "few/fp8_tensor/ragged/odd", 16, _IN_PIECES),
    AcceptedSpill("sm120", "linear", "few/fp8_channel/ragged/odd", 16, _IN_PIECES),
    AcceptedSpill("sm120", "linear", "tiles/nvfp4/odd", 384, _IN_PIECES),
    AcceptedSpill("sm120", "linear", "tiles/nvfp4/split/odd_rows", 16, _IN_PIECES),
    AcceptedSpill("sm120", "linear", "tiles/mxfp8/split/odd_rows", 508, _IN_PIECES),
    AcceptedSpill("sm120", "linear", "tiles/mxfp4_mxfp8/split/odd_rows", 500, _IN_PIECES),
    AcceptedSpill("sm120", "linear", "tiles/nvfp4/widened/split/fp32", 24, _HEADS),
    AcceptedSpill("sm120", "linear", "tiles/int4_g32/split", 16, _MASKS),
    AcceptedSpill("sm120", "linear", "tiles/mxfp4", 8, _MASKS),
    AcceptedSpill(
        "sm120",
        "fused_moe",
        "gate_up/mxfp4/ragged/bias",
        8,
        "a register of the tile of 32 rows under Triton 3.6; a stage more spills nothing, and a third fewer blocks run",
    ),
    AcceptedSpill(
        "sm120", "fused_moe", "down/mxfp4_mxfp8/ragged/bias", 12, "three registers of one tile under Triton 3.6"
    ),
    AcceptedSpill("sm90", "fused_moe", "down/mxfp4/ragged/bias", 168, _FASTEST),
    AcceptedSpill("sm90", "fused_moe", "gate_up/fp8_block/", 48, _FASTEST),
    AcceptedSpill("sm120", "decode_attention", "", 40, _GUESSES),
    AcceptedSpill(
        "sm120",
        "fused_moe",
        "down/nvfp4/widened/",
        72,
        "one tile under Triton 3.6; widened are NVFP4 weights with 16-bit activations, and all without packed"
        " instructions",
    ),
    AcceptedSpill("sm90", "decode_attention", "64x64/bfloat16/fp8_e5m2/", 8, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "128x128/bfloat16/", 16, _GUESSES),
    AcceptedSpill("sm90", "decode_attention", "256x256/bfloat16/bfloat16/", 24, _GUESSES),
    AcceptedSpill("sm90", "decode_attention", "160x160/bfloat16/fp8_e5m2/", 28, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "192x192/bfloat16/fp8_e5m2/", 28, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "64x64/bfloat16/fp4_e2m1/", 8, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "160x160/bfloat16/fp4_e2m1/", 8, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "192x128/bfloat16/fp4_e2m1/", 28, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "256x256/bfloat16/fp4_e2m1/", 36, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "288x256/bfloat16/bfloat16/cap_sinks", 8, _FEW_REGISTERS),
    AcceptedSpill("sm90", "linear", "tiles/mxfp8", 8, "two registers under one of the two Triton versions"),
    AcceptedSpill("sm90", "decode_attention", "72x72/", 64, _UNALIGNED_HEADS),
    AcceptedSpill("sm90", "extend_attention", "72x72/", 380, _UNALIGNED_HEADS),
    AcceptedSpill("sm90", "prefill_attention", "72x72/", 520, _UNALIGNED_HEADS),
    AcceptedSpill("sm90", "decode_attention", "80x80/", 8, _FEW_REGISTERS),
    AcceptedSpill("sm90", "decode_attention", "96x96/", 8, _FEW_REGISTERS),
    AcceptedSpill(
        "sm90",
        "decode_attention",
        "576x512/",
        1568,
        "with draft tokens, as the rows are, up to twice as much as with one token; outside the loop, or with the"
        " widest blocks; the fastest of the tiles on an H200 (benchmark/results)",
    ),
    AcceptedSpill("sm120", "sparse_indexer", "select/16384/", 320, _WHOLE_ROWS),
    AcceptedSpill("sm90", "sparse_indexer", "select/16384/", 320, _WHOLE_ROWS),
    AcceptedSpill("sm90", "block_attention", "128x128/bfloat16/fp8_", 36, _FEW_REGISTERS),
    AcceptedSpill("sm90", "sparse_attention", "576x512/", 1052, _FASTEST_PROMPTS),
    AcceptedSpill("sm90", "sparse_attention", "512x512/", 1488, _FASTEST_PROMPTS),
    AcceptedSpill("sm90", "hyper_connection", "mix/", 456, "the tile of SM120, which spills nothing there"),
)

ARCHS_WITH_TILES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


def spill_budget(lock: str, op: str, key: str) -> int:
    """Returns how many bytes the rows of an op and key may spill."""
    accepted = (a.max_bytes for a in ACCEPTED_SPILLS if a.lock == lock and a.op == op and key.startswith(a.key))
    return max(accepted, default=SPILL_BUDGET)


def over_limit(lock: str, rows: LedgerRows) -> Iterator[str]:
    """Yields tiles that need more shared memory than a block can have."""
    for (op, key, tile), row in rows.items():
        for target, (smem, *_) in row.by_target.items():
            limit = arch_by_name(target.split("/")[1]).smem_per_block
            if smem > limit:
                yield f"{lock}: {op}/{key} tile {tile} needs {smem:,} B on {target}, limit {limit:,} B"


def over_spill_budget(lock: str, rows: LedgerRows, table: Mapping[tuple[str, str, str], Variant]) -> Iterator[str]:
    """Yields default tiles that spill more than allowed."""
    for (op, key, tile), row in rows.items():
        variant = table.get((op, key, tile))
        if variant is None or not variant.default:
            continue
        budget = spill_budget(lock, op, key)
        for target, (_, _, spills, _, _) in row.by_target.items():
            if target not in NOT_NATIVE and spills > budget:
                yield f"{lock}: {op}/{key} default tile {tile} spills {spills} B on {target}, budget {budget} B"


def edited(lock: str, rows: LedgerRows) -> Iterator[str]:
    """Yields rows whose figures were changed since they were measured."""
    for key, row in rows.items():
        if row.digest != digest_of(key, row):
            yield f"{lock}: {'/'.join(key)}: its figures were edited after they were measured"


def missing(lock: str, rows: LedgerRows, table: Mapping[tuple[str, str, str], Variant]) -> Iterator[str]:
    """Yields tiles of the table that were never measured, and rows of tiles that no longer exist."""
    for (op, key, tile), variant in table.items():
        row = rows.get((op, key, tile))
        wanted = [f"{version}/{arch}" for version in TRITON_VERSIONS for arch in LOCKS[lock]]
        wanted = [target for target in wanted if not (variant.native_only and target in NOT_NATIVE)]
        absent = wanted if row is None else [target for target in wanted if target not in row.by_target]
        if absent:
            yield f"{lock}: {op}/{key} tile {tile} is not in the lock for {', '.join(absent)}"
    for op, key, tile in sorted(rows.keys() - table.keys()):
        yield f"{lock}: {op}/{key} tile {tile} is in the lock, but not in the table"


def rows_without_tile(ledger: Ledger) -> Iterator[str]:
    """Yields table rows that leave an architecture without any tile that fits."""
    dtypes = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
    for row in tiles.ROWS:
        for head_dim, v_head_dim in row.head_dims:
            for kv_dtype in dtypes:
                if tiles.KV_BYTES[kv_dtype] not in row.kv_bytes:
                    continue
                in_windows = (head_dim, v_head_dim) == tiles.MLA_WIDE  # alone
                traits = frozenset({"sliding_window"} if in_windows else ())
                need = Need(row.op, head_dim, v_head_dim, "bfloat16", kv_dtype, traits=traits)
                for name in ARCHS_WITH_TILES:
                    fitting = ledger.fitting_tiles(need, arch_by_name(name))
                    if not fitting.tiles:
                        yield f"{name}: no tile fits {row.op} with {need.describe()}: {'; '.join(fitting.reasons)}"

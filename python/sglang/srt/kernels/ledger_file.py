"""Reads the lock files: what every tile of every kernel costs on an architecture, measured by compiling. No torch or
Triton.

`sm120.lock.json` holds sm_120 and sm_121, `sm90.lock.json` sm_90. A row is one (op, variant, tile): the hash of what
was compiled, and for each "triton version/architecture" the shared memory, registers, spilled bytes, stack bytes and
matrix instructions. `variant_keys` says which rows count for a need.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.spec import Need, Tile, TileRecord
from sglang.srt.kernels.tiles import MIN_TOKENS, attention_tiles

LOCK_DIR = Path(__file__).parent
LOCKS: Mapping[str, tuple[str, ...]] = {"sm120": ("sm_120", "sm_121"), "sm90": ("sm_90",)}
"""Lock file -> the architectures that it verifies. Others are judged by sm_120's rows, whose limit is the lowest."""
PROXY_ARCH = "sm_120"

_LAUNCH_ONLY = frozenset({"ctas_per_sm", "waves", MIN_TOKENS})
_SHORT = {"num_warps": "w", "num_stages": "s"}
_PLAIN = ("plain", "causal", "bidirectional", "chunk")
_FEATURES: Mapping[str, tuple[str, ...]] = {
    "cap_sinks": ("logit_cap", "sinks"),
    "window_cap_sinks": ("sliding_window",),
    "custom_mask": ("custom_mask",),
    "window_both_ways": ("both_ways",),
    "window_chunks": ("chunked",),
    "biases": ("relative_bias",),
    "window_biases": ("relative_bias",),
}
"""Last part of a variant's key -> the traits that need it."""
_SAME_CODE = {"float16": "bfloat16"}
"""Dtypes whose code differs from that of another dtype only in the instructions' type."""

DEQUANTIZED_TAIL = "/widened"
"""End of the keys of variants that dequantize to 16 bits, for GPUs without `block_scaled_mma`."""

SAME_LAUNCHES: Mapping[str, str] = {"nvfp4_a16": "nvfp4", "fp8_tensor_a16": "fp8_channel_a16"}
"""Schemes whose products are the same as another scheme's on GPUs that dequantize it: its rows stand for both."""

Measurement = tuple[int, int, int, int, tuple[str, ...]]
"""Shared bytes, registers, spilled bytes, stack bytes, matrix instructions."""


@dataclass(slots=True)
class Row:
    """One row of a lock file. `by_target["3.9.0/sm_120"]` is a Measurement; `code` the hash of what was compiled."""

    code: str
    by_target: dict[str, Measurement] = field(default_factory=dict)
    digest: str = field(default="", compare=False)
    """The digest in the file, of the figures that the compilers gave."""


RowKey = tuple[str, str, str]
"""(op, variant key, tile key)."""
LedgerRows = dict[RowKey, Row]


def tile_key(tile: Tile) -> str:
    """Returns the tile's name, "M64 N32 w4 s2", made of the parameters that the compiler sees. Tiles that differ only
    in launch parameters share a row."""
    blocks = [(name.removeprefix("BLOCK_"), value) for name, value in tile.items() if name.startswith("BLOCK_")]
    others = [
        (_SHORT.get(name, name), value)
        for name, value in sorted(tile.items(), reverse=True)
        if not name.startswith("BLOCK_") and name not in _LAUNCH_ONLY
    ]
    return " ".join(f"{name}{value}" for name, value in [*sorted(blocks), *others])


def variant_keys(need: Need) -> tuple[str, ...]:
    """Returns the keys of the kernel variants whose cost counts for `need`: those of its shape and dtypes without
    features, and with the features that its traits need."""
    q, kv = (_SAME_CODE.get(dtype, dtype) for dtype in (need.q_dtype, need.kv_dtype))
    featured = [name for name, traits in _FEATURES.items() if not need.traits.isdisjoint(traits)]
    return tuple(f"{need.head_dim}x{need.v_head_dim}/{q}/{kv}/{name}" for name in (*_PLAIN, *featured))


def judged_as(arch: ArchTraits) -> str:
    """Returns the architecture whose rows stand for `arch`: its own if a lock file verifies it, else PROXY_ARCH."""
    verified = any(arch.name in archs for archs in LOCKS.values())
    return arch.name if verified else PROXY_ARCH


def read_lock(name: str, directory: Path = LOCK_DIR) -> LedgerRows:
    """Returns the rows of one lock file; empty if there is none."""
    path = directory / f"{name}.lock.json"
    if not path.exists():
        return {}
    rows: LedgerRows = {}
    for op, variants in json.loads(path.read_text())["rows"].items():
        for key, tiles in variants.items():
            for tile, entry in tiles.items():
                row = rows[op, key, tile] = Row(entry.pop("code"), digest=entry.pop("digest", ""))
                for targets, (smem, registers, spills, stack, mma) in entry.items():
                    for target in targets.split():
                        row.by_target[target] = (smem, registers, spills, stack, tuple(filter(None, mma.split("; "))))
    return rows


@dataclass(frozen=True, slots=True)
class FittingTiles:
    """The tiles that fit, in order of preference, and reasons against the others."""

    tiles: tuple[Tile, ...]
    reasons: tuple[str, ...] = ()


def _worst_of(measurements: list[Measurement]) -> TileRecord | None:
    if not measurements:
        return None
    return TileRecord(
        smem=max(m[0] for m in measurements),
        registers=max(m[1] for m in measurements),
        spills=max(m[2] for m in measurements),
        stack=max(m[3] for m in measurements),
        mma=tuple(sorted({kind for m in measurements for kind in m[4]})),
    )


FP4_CACHE = "fp4_e2m1"
_BLOCK_COLS = {"linear": 128, "fused_moe": 256}
"""Number of columns whose multiples every block of the op divides."""


def _launches(need: Need, pieces: Sequence[str]) -> bool:
    """Returns whether weights of the need's shapes launch the kernel variant that these pieces of a row's key describe:
    "ragged" (columns that no block divides), "odd" and "odd_rows" (columns or rows that 16 does not divide), and with
    or without biases. Stores into FP4 caches have a kernel, and rows, of their own."""
    if (FP4_CACHE in pieces) != (need.kv_dtype == FP4_CACHE and need.op == "qk_norm_rope_store"):
        return False
    shapes, product = need.shapes, pieces[0]
    if not shapes:
        return True
    if need.op == "fused_moe":
        if product not in _FIRST_PRODUCTS | _SECOND_PRODUCTS:
            return True
        if ("bias" in pieces) != ("expert_bias" in need.traits):
            return False
        shapes = shapes[:1] if product in _FIRST_PRODUCTS else shapes[1:]
    steps = {"ragged": _BLOCK_COLS.get(need.op, 1), "odd": 32}
    uncut = any(all(cols % step == 0 for _, cols, _ in shapes) for name, step in steps.items() if name in pieces)
    return not uncut and ("odd_rows" not in pieces or any(rows % 16 for rows, _, _ in shapes))


_FIRST_PRODUCTS = frozenset({"gate_up", "gate_up_pairs"})
_SECOND_PRODUCTS = frozenset({"down", "down_sum"})


class Ledger:
    """The resolver's view of the lock files."""

    def __init__(self, rows: LedgerRows) -> None:
        self.rows = rows

    @staticmethod
    @functools.cache
    def load() -> Ledger:
        """Returns the shipped lock files, merged."""
        merged: LedgerRows = {}
        for name in LOCKS:
            for key, row in read_lock(name).items():
                merged.setdefault(key, Row(row.code)).by_target.update(row.by_target)
        return Ledger(merged)

    @functools.cached_property
    def _group_by_op(self) -> dict[str, list[tuple[str, Row]]]:
        """The key and row of each launch of an op, by op."""
        rows: dict[str, list[tuple[str, Row]]] = {}
        for (op, key, _), row in self.rows.items():
            rows.setdefault(op, []).append((key, row))
        return rows

    def measurements(self, need: Need, tile: Tile, arch: ArchTraits) -> Iterator[Measurement]:
        """Yields the measurements of every variant that counts for `need`, of every Triton version."""
        name, target = tile_key(tile), "/" + judged_as(arch)
        for key in variant_keys(need):
            row = self.rows.get((need.op, key, name))
            if row is not None:
                yield from (value for version, value in row.by_target.items() if version.endswith(target))

    def record(self, need: Need, tile: Tile, arch: ArchTraits) -> TileRecord | None:
        """Returns the worst case of the tile over variants and Triton versions; None if it is not in the ledger.

        The two float8 formats take the same memory: for a lower candidate only the costlier one, e4m3, is on record.
        """
        measurements = list(self.measurements(need, tile, arch))
        if not measurements and need.kv_dtype == "fp8_e5m2":
            measurements = list(self.measurements(replace(need, kv_dtype="fp8_e4m3"), tile, arch))
        return _worst_of(measurements)

    def worst(self, need: Need, arch: ArchTraits) -> TileRecord | None:
        """Returns the worst case over the rows of an op that chooses its launches by size: the rows whose key has the
        need's quantization scheme (or none) and that stand for launches of its shapes. None without rows."""
        target, quant = "/" + judged_as(arch), need.quant
        wanted = set() if quant is None else {SAME_LAUNCHES.get(quant, quant)}
        by_widening: dict[bool, list[Measurement]] = {False: [], True: []}
        for key, row in self._group_by_op.get(need.op, ()):
            pieces = key.split("/")
            if SCHEMES.keys() & set(pieces) == wanted and _launches(need, pieces):
                measured = [m for name, m in row.by_target.items() if name.endswith(target)]
                by_widening[DEQUANTIZED_TAIL in key] += measured
        dequantized = "block_scaled_mma" not in arch.features or quant in SAME_LAUNCHES
        return _worst_of(by_widening[True] if by_widening[True] and dequantized else by_widening[False])

    def fitting_tiles(self, need: Need, arch: ArchTraits) -> FittingTiles:
        """Returns the candidate tiles of `need` whose measured shared memory fits into a block of `arch`."""
        group = need.heads[0] // max(1, need.heads[1])
        candidates = attention_tiles(need.op, need.head_dim, need.v_head_dim, need.kv_dtype, arch.features, group)
        if not candidates:
            return FittingTiles((), (f"no tile for {need.describe()}",))
        fitting: list[Tile] = []
        reasons: list[str] = []
        for tile in candidates:
            record = self.record(need, tile, arch)
            name = tile_key(tile)
            if record is None:
                reasons.append(f"tile {name} is not in the ledger for {need.describe()}")
            elif record.smem > arch.smem_per_block:
                limit = arch.smem_per_block
                reasons.append(f"tile {name} needs {record.smem:,} B of shared memory, {arch.name} has {limit:,} B")
            else:
                fitting.append(tile)
        return FittingTiles(tuple(fitting), tuple(reasons))

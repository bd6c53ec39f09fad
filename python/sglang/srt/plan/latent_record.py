"""Latents as records of bytes: what a cache entry of MLA or compressed attention holds in eight or in four bits."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from sglang.srt.errors import UserError
from sglang.srt.plan.cache_spec import FULL, CacheSpec, CacheTensor, Lifetime, latent_cache
from sglang.srt.plan.kv_spec import FP4_KV

_ALIGNMENT = 16
"""Bytes that records begin at multiples of, so that kernels load words."""
_GROUPS = {8: 64, 4: 16}
"""Columns that share a scale, by the bits of a number."""


@dataclass(frozen=True, slots=True)
class LatentRecord:
    """A latent of `rank` columns in `bits` bits each, and behind them `rope` rotary columns in bfloat16.

    Its bytes, in order: the numbers; the rotary columns; a byte for the scale of each group of numbers; zeros up to a
    multiple of 16.

        8 bits   e4m3; the scale of 64 columns is a power of two, stored as its exponent plus 127 (ue8m0)
        4 bits   e2m1, two to a byte, the even column in the low bits; the scale of 16 columns is the high byte of a
                 float16 (5 bits of exponent, 3 of mantissa), so that it needs no second scale beside it

    Every number times its scale is exact in float16.
    """

    rank: int
    rope: int
    bits: int

    @property
    def dim(self) -> int:
        """Columns of an entry before it is packed."""
        return self.rank + self.rope

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return _GROUPS[self.bits]

    @property
    def groups(self) -> int:
        return -(-self.rank // self.group)

    @property
    def rope_at(self) -> int:
        """First byte of the rotary columns."""
        return self.groups * self.group * self.bits // 8

    @property
    def scales_at(self) -> int:
        """First byte of the scales."""
        return self.rope_at + 2 * self.rope

    @property
    def size(self) -> int:
        """Bytes of a record."""
        return -(-(self.scales_at + self.groups) // _ALIGNMENT) * _ALIGNMENT

    def describe(self) -> str:
        """Describes the record for people."""
        numbers = "e4m3 with a scale for 64 columns" if self.bits == 8 else "e2m1 with a scale for 16 columns"
        rotary = ", rotary columns in bfloat16" if self.rope else ""
        return f"latents of {self.size} bytes: {numbers}{rotary}"


def latent_record(kv_dtype: str, rank: int, rope: int) -> LatentRecord | None:
    """Returns how latents are stored in a cache of this dtype; None: as they are. Raises UserError for e5m2."""
    if kv_dtype == "fp8_e5m2":
        raise UserError(
            "--kv-cache-dtype fp8_e5m2: entries that an indexer selects, or that stand for several tokens, are stored"
            " in e4m3 with scales. --kv-cache-dtype fp8_e4m3 or bf16 works."
        )
    bits = {"fp8_e4m3": 8, FP4_KV: 4}.get(kv_dtype)
    return None if bits is None else LatentRecord(rank, rope, bits)


def entry_cache(
    name: str,
    dim: int,
    dtype: str,
    record: LatentRecord | None,
    entries_per_token: Fraction = Fraction(1),
    lifetime: Lifetime = FULL,
) -> CacheSpec:
    """Returns a cache of vectors [1, dim] that are key and value, or of their records."""
    if record is None:
        return latent_cache(name, dim, dim, dtype, entries_per_token, lifetime)
    return CacheSpec(name, (CacheTensor("k", (1, record.size), "uint8"),), entries_per_token, lifetime)

"""Records of latents (`plan.latent_record`) in plain torch: the CPU kernels, and the reference for tests."""

from __future__ import annotations

import torch

from sglang.srt.kernels.op import Op
from sglang.srt.layers.quantization.reference import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)
from sglang.srt.plan.latent_record import LatentRecord

MIN_EXPONENT, MAX_EXPONENT = -14, 7
"""Of a scale of e4m3 numbers: float16 holds their products with it, up to 448 times 2^7."""


def pack_records(entries: torch.Tensor, record: LatentRecord, scale: float = 1.0) -> torch.Tensor:
    """Returns entries [N, rank + rope] as records [N, size] uint8. The first `rank` columns are divided by `scale`."""
    latents, rotary = entries.float().split((record.rank, record.rope), dim=-1)
    if scale != 1.0:
        latents = latents / torch.full((), scale, device=entries.device)
    latents = torch.nn.functional.pad(latents, (0, record.groups * record.group - record.rank))
    groups = latents.unflatten(-1, (-1, record.group))
    numbers, scales = _e4m3(groups) if record.bits == 8 else _e2m1(groups)
    parts = (numbers, rotary.to(torch.bfloat16).contiguous().view(torch.uint8), scales)
    records = torch.cat(parts, dim=-1)
    return torch.nn.functional.pad(records, (0, record.size - records.shape[-1]))


def _e4m3(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers [N, columns] and the scales [N, groups] of [N, groups, columns of a group]. A scale is the
    smallest power of two with which nothing saturates."""
    bits = groups.abs().amax(-1).view(torch.int32)
    # Of 1.m * 2^e the mantissa carries into the exponent where it is above that of 448, which is 1.75 * 2^8.
    exponents = (((bits + 0x1FFFFF) >> 23) - 127 - 8).clamp(MIN_EXPONENT, MAX_EXPONENT)
    numbers = torch.ldexp(groups, -exponents[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return numbers.flatten(-2).view(torch.uint8), (exponents + 127).to(torch.uint8)


def _e2m1(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_e4m3`. A scale is the largest magnitude of its group divided by 6, rounded to the nearest high byte of a
    float16, ties to the even one."""
    most = groups.abs().amax(-1) / torch.full((), E2M1_MAX, device=groups.device)
    codes = _high_bytes(most.clamp_max(E4M3_MAX))
    divisors = scale_values(codes)[..., None]
    quotients = torch.where(divisors > 0, groups / torch.where(divisors > 0, divisors, 1.0), 0.0)
    return pack_nibbles(encode_e2m1(quotients).flatten(-2)), codes


def _high_bytes(values: torch.Tensor) -> torch.Tensor:
    """Returns fp32 from 0 to 448 as the high bytes of float16, uint8."""
    bits = values.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 896  # the difference of the biases, 112, in units of 1/8
    small = (values * 2.0**17).round().to(torch.int32)  # below 2^-14 in steps of 2^-17
    return torch.where(values < 2.0**-14, small, normal).to(torch.uint8)


def scale_values(codes: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 values of high bytes of float16."""
    return (codes.to(torch.int16) << 7).view(torch.float16).float()


def unpack_records(records: torch.Tensor, record: LatentRecord, scale: float = 1.0) -> torch.Tensor:
    """Returns records [N, size] uint8 as entries [N, rank + rope] fp32."""
    numbers = records[:, : record.rope_at]
    rotary = records[:, record.rope_at : record.scales_at].contiguous().view(torch.bfloat16).float()
    codes = records[:, record.scales_at : record.scales_at + record.groups]
    if record.bits == 8:
        values = numbers.contiguous().view(torch.float8_e4m3fn).float()
        factors = torch.exp2(codes.float() - 127.0)
    else:
        values, factors = decode_e2m1(unpack_nibbles(numbers)), scale_values(codes)
    latents = (values.unflatten(-1, (-1, record.group)) * factors[..., None]).flatten(-2)[:, : record.rank]
    return torch.cat((latents * scale, rotary), dim=-1)


def latent_record_store(
    entries: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor, record: LatentRecord, scale: float = 1.0
) -> None:
    """Stores entries [T, rank + rope] as records in cache [S, 1, size] uint8 at out_cache_loc [T], skipping negative
    places. The first `rank` columns are divided by `scale`."""
    stored = out_cache_loc >= 0
    cache[out_cache_loc[stored], 0] = pack_records(entries[stored], record, scale)


LATENT_RECORD_STORE = Op("latent_record_store", latent_record_store)

"""Inputs of launches: tensors without values, the sizes of caches and steps, and the tiles of the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang.ledger.launch_form import named
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.ledger_file import DEQUANTIZED_TAIL, SAME_LAUNCHES, judged_as
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.kernels.tiles import AttentionTile, attention_tiles

BF16 = torch.bfloat16
LAUNCHED = [scheme for scheme in SCHEMES.values() if scheme.name != "fp8_tensor_a16"]
"""Schemes whose weights are launched in ways of their own: once loaded, that one is `fp8_channel_a16`."""
CACHES = ("bfloat16", "fp8_e4m3", "fp8_e5m2")
FP4 = "fp4_e2m1"
CACHE_NAMES = ("k_cache", "v_cache")
MANY = 4096
"""Tokens of one step: for the largest tiles, and for the way of grouping that takes several launches."""
CONTEXT = 32_768
SLOTS = 65_536
REQUESTS = 64


def few_as_rounded(product: ScaledProduct) -> bool:
    """Whether few rows are multiplied by launches of other schemes: FP8 beside activations that many rows round."""
    return product.weight_only and product.element == "e4m3"


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tiles_of(op: str, dim: int, v_dim: int, kv_dtype: str, arch: ArchTraits, group: int = 0) -> Iterator[AttentionTile]:
    """Every tile that the table has. What is launched meanwhile is found by its tile."""
    for rank, tile in enumerate(attention_tiles(op, dim, v_dim, kv_dtype, arch.features, group)):
        with named(op, f"{dim}x{v_dim}", "bfloat16", kv_dtype, tile=tile, default=rank == 0):
            yield tile


def of_scheme(op: str, scheme: Scheme | None, arch: ArchTraits) -> AbstractContextManager[None]:
    """Names launches of weights in this format."""
    if scheme is None:
        return named(op, "bf16")
    stands_for = SAME_LAUNCHES.get(scheme.name, scheme.name)
    native = product_of(SCHEMES[stands_for], arch_by_name(judged_as(arch)).features)
    other = product_of(scheme, arch.features).kind != native.kind
    return named(op, stands_for, *([DEQUANTIZED_TAIL.strip("/")] if other else []))


def each_once(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher whose calls with the same objects and tensors of the same sizes launch the same: the first one does,
    and the others have what it returned."""
    results: dict[tuple[object, ...], Any] = {}

    def run(*given: Any) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else id(x) for x in given)
        if key not in results:
            results[key] = given, launcher(*given)
        return results[key][1]

    return run


def alike(size: int) -> int:
    """The size below 4,096 for which tiles are launched as they are for `size`: of widths of matrices they depend on
    what divides them, and on what divides the number of their groups of 128 columns."""
    return size if size < 2048 else 2048 + size % 2048

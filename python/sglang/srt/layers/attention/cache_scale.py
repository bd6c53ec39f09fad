"""The scales by which a layer's keys and values are divided before they are stored in 8 or 4 bits."""

from __future__ import annotations

import torch

from sglang.srt.environ import warn_once
from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Scope, TensorPart, constant
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.cache_scales import HEAD_RATIO, is_scale, scale_factor
from sglang.srt.plan.weight_names import PartKey

ABSENT = -1.0
"""What the parameter of a scale holds if the checkpoint has none."""


class LayerCacheScales:
    """The scales of the cache of one layer, from the file of --quantization-param-path, else from the checkpoint. A
    layer of which neither says anything has 1; one with a scale of keys alone has it for its values, too, as older
    checkpoints with one scale for both mean it."""

    def __init__(self, scope: Scope, cache: CacheStore, heads: int, latent: bool = False) -> None:
        """heads: KV heads of the whole layer, each of which may have a scale in the checkpoint. latent: keys and values
        are one vector. Registers the parameters in `scope`; `take` runs once they are loaded."""
        plan = scope.plan
        self.cache, self.name = cache, scope.module().removesuffix(".")
        self.of_file = None if plan.cache_scales is None else plan.cache_scales.layers.get(cache.layer_id)
        stated = None if plan.model.quantization is None else plan.model.quantization.kv_cache
        self.factor = scale_factor(stated, plan.kv_cache_dtype)
        self.k = _parameter(scope, "k_scale", heads)
        self.v = self.k if latent else _parameter(scope, "v_scale", heads)
        scope.finish.append(self.take)

    def take(self) -> None:
        """Gives the cache its scales. Raises UserError for a scale that cannot be one (`is_scale`)."""
        cache = self.cache
        if self.of_file is not None:
            cache.k_scale, cache.v_scale = self.of_file.k, self.of_file.k if self.v is self.k else self.of_file.v
            return
        k, v = (self._checked(scale) for scale in (self.k, self.v))
        cache.k_scale = 1.0 if k is None else k
        cache.v_scale = cache.k_scale if v is None else v

    def _checked(self, scale: torch.Tensor) -> float | None:
        value = scale.item()
        if value == ABSENT:
            return None
        if not is_scale(value):
            raise UserError(
                f"{self.name}: the checkpoint's scale of the KV cache is {value}; serve it with --kv-cache-dtype bf16,"
                " or with scales in a file (--quantization-param-path)"
            )
        return value * self.factor


def _parameter(scope: Scope, leaf: str, heads: int) -> torch.Tensor:
    """Returns a parameter [1] for a scale of the checkpoint, or for the largest of its scales by head."""
    by_head = TensorPart((heads,), convert=largest_of_heads, optional=True)
    part = TensorPart((1,), optional=True, other=by_head if heads > 1 else None)
    return scope.param(leaf, (1,), {PartKey(): part}, constant(ABSENT), torch.float32)


def largest_of_heads(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scale [1] that all heads of a layer share: the largest of theirs [H, ...]. If one of them is not
    positive, returns that one, which is then refused.

    e4m3 numbers of any size from 2^-6 to 448 are rounded equally well, so a scale larger than a head's own costs
    nothing but the digits of its smallest numbers: an error of at most `ratio * 2.2e-6` of the head's largest.
    """
    scales = scales.float().flatten()
    smallest, largest = scales.min(), scales.max()
    if smallest <= 0.0:
        return smallest.reshape(1)
    if largest > HEAD_RATIO * smallest:
        warn_once(
            f"the KV heads of a layer have scales of the cache that differ {float(largest / smallest):.3g} times: all"
            " take the largest, and the smallest numbers of some heads lose digits"
        )
    return largest.reshape(1)

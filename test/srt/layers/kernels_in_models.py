"""Tiny models some of whose ops run on given kernels, beside themselves on those of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang.srt.kernels.op import Op
from srt.models.harness import NativePlan, TinyRunner, plan_for


@dataclass(frozen=True)
class KernelPlan(NativePlan):
    kernels: Mapping[str, Any] = field(default_factory=dict)
    """By op; of the others torch's."""

    def entry(self, op: Op[Any], key: str = "") -> Any:
        return self.kernels.get(op.name, op.reference)


def with_both(
    folder: Path, kernels: Mapping[str, Any], long: Sequence[int], short: Sequence[int], parts: tuple[int, int],
    kv_cache_dtype: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The logits of two requests in fp32, with torch's kernels and with those given. `long` is a prompt up to parts[0],
    goes on up to parts[1], and is decoded from there on; `short` is a prompt of four tokens, goes on beside it, and
    decodes always the same."""
    native = plan_for(folder, kv_cache_dtype=kv_cache_dtype)
    results = []
    for plan in (native, KernelPlan(native.model, kv_cache_dtype=native.kv_cache_dtype, kernels=kernels)):
        runner = TinyRunner(plan)
        first, second = parts
        logits = [*runner.extend({3: long[:first], 1: short[:4]})]
        logits += runner.extend({1: short[4:], 3: long[first:second]})
        logits += [runner.decode({3: token, 1: 6}) for token in long[second:]]
        results.append(torch.cat(logits))
    return results[0], results[1]


def assert_as_with_torch(
    folder: Path, kernels: Mapping[str, Any], long: Sequence[int], short: Sequence[int], parts: tuple[int, int],
    atol: float = 1e-3,
) -> None:  # fmt: skip
    """Both have the same logits."""
    want, got = with_both(folder, kernels, long, short, parts)
    torch.testing.assert_close(got, want, rtol=0.0, atol=atol)

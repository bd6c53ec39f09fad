"""Measures activations: runs the unquantized model on sample prompts and records the input of every product.

The plan names the kernel of every product, so a plan whose kernels record x before multiplying (`RecordingPlan`) is
sufficient. Products are identified by the address of their weight, which maps to a parameter name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from sglang.quantize.samples import Samples, checked_plan, values_of
from sglang.srt.configs.activation import SILU, Activation
from sglang.srt.errors import UserError
from sglang.srt.kernels.op import Op
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.native_ops import gated
from sglang.srt.layers.ops import FUSED_MOE, LINEAR
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs

Kernel = Callable[..., torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Calibration:
    """`largest` |x| of each module's input, by the module's name in the checkpoint. Experts in `unreached` got no
    token; they have the largest value of their layer's other experts. `products`: the mean x x^T [K, K] fp32 of each
    module's input x [K], those of experts excepted; empty unless asked for. `device`: where the model was computed."""

    largest: dict[str, float]
    unreached: frozenset[str]
    num_prompts: int
    num_tokens: int
    products: dict[str, torch.Tensor]
    device: str


def calibrate(
    model_path: str, prompts: str, max_tokens: int, device: str = "auto", products: bool = False
) -> Calibration:
    """Computes the first `max_tokens` tokens of the file `prompts` with the model on `device` (auto, cuda or cpu).
    `products` are kept in main memory, 4 K^2 bytes for each product of the model with K inputs.

    Raises UserError if the file has no prompts or an unreadable one, or the model cannot be run.
    """
    recorder = Recorder(products)
    samples = Samples.load(model_path, prompts, max_tokens, device, lambda args, model: _recording_plan(args, recorder))
    recorder.clear()  # drops the values of the warm-up
    samples.compute()
    runner = samples.runner
    largest, unreached = recorder.by_module(runner.model)
    products_of = recorder.products_by_module(runner.model)
    return Calibration(largest, unreached, samples.num_prompts, samples.num_tokens, products_of, runner.plan.device)


def _recording_plan(args: ServerArgs, recorder: Recorder) -> RecordingPlan:
    where = "on one GPU, or in main memory with --calibration-device cpu"
    plan = checked_plan(args, f"--calibrate runs the unquantized model {where}, and cannot")
    return RecordingPlan(**values_of(plan), recorder=recorder)


class Recorder:
    """Records activations. `seen`: the largest |x| multiplied with a weight, by the weight's address: [1] fp32, or [E]
    for experts. `sums`: if kept, the sum of x x^T over so many x, but not of experts."""

    def __init__(self, keeps_products: bool = False) -> None:
        self.keeps_products = keeps_products
        self.seen: dict[int, torch.Tensor] = {}
        self.sums: dict[int, tuple[torch.Tensor, int]] = {}

    def clear(self) -> None:
        """Forgets everything."""
        self.seen.clear()
        self.sums.clear()

    def see(self, weight: torch.Tensor, largest: torch.Tensor) -> None:
        """Records the largest |x| for a weight."""
        before = self.seen.get(weight.data_ptr())
        self.seen[weight.data_ptr()] = largest if before is None else torch.maximum(before, largest)

    def multiply(self, weight: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the products of the inputs x [..., K] of a weight."""
        rows = x.flatten(0, -2).float()
        total, count = self.sums.get(weight.data_ptr(), (0.0, 0))
        self.sums[weight.data_ptr()] = (total + (rows.T @ rows).cpu(), count + len(rows))

    def linear(self, kernel: Kernel) -> Kernel:
        """Returns the kernel of `linear` with recording."""

        def run(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            self.see(weight, x.abs().amax().float().reshape(1))
            if self.keeps_products:
                self.multiply(weight, x)
            return kernel(x, weight, *rest, **options)

        return run

    def fused_moe(self, kernel: Kernel) -> Kernel:
        """Returns the kernel of `fused_moe` with recording: the second product's input is computed separately, expert
        by expert."""

        def run(
            x: torch.Tensor,
            w13: ExpertWeights,
            w2: ExpertWeights,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Activation = SILU,
            *rest: Any,
        ) -> torch.Tensor:
            up = torch.zeros(w13.num_experts, device=x.device)
            down = torch.zeros_like(up)
            for expert in sorted(set(topk_ids.flatten().tolist()) - {-1}):
                routed = x[(topk_ids == expert).any(1)]
                bias = None if w13.bias is None else w13.bias[expert].to(x.dtype)
                inner = gated(F.linear(routed, w13.data[expert].to(x.dtype), bias), activation)
                up[expert], down[expert] = routed.abs().amax(), inner.abs().amax()
            self.see(w13.data, up)
            self.see(w2.data, down)
            return kernel(x, w13, w2, topk_weights, topk_ids, activation, *rest)

        return run

    def by_module(self, model: CausalLM) -> tuple[dict[str, float], frozenset[str]]:
        """Returns Calibration's `largest` and `unreached`. An input that was always zero counts as never seen. Raises
        UserError for activations that are not finite."""
        largest: dict[str, float] = {}
        unreached = set()
        for param in model.params.values():
            seen = self.seen.get(param.tensor.data_ptr())
            if seen is None or not bool(seen.any()):
                continue
            if not bool(seen.isfinite().all()):
                raise UserError(f"--calibrate: activations before {param.name} are not finite; the model is not sound")
            values = seen.tolist()
            for key, part in param.parts.items():
                module = model.weights.checkpoint_name(param.name, key).removesuffix(".weight")
                expert = part.dest[0] if len(values) > 1 else 0
                value = values[expert] if isinstance(expert, int) else max(values)
                largest[module] = value or max(values)
                if not value:
                    unreached.add(module)
        return largest, frozenset(unreached)

    def products_by_module(self, model: CausalLM) -> dict[str, torch.Tensor]:
        """Returns Calibration's `products`."""
        products = {}
        for param in model.params.values():
            if param.tensor.data_ptr() in self.sums:
                total, count = self.sums[param.tensor.data_ptr()]
                mean = total / count
                for key in param.parts:
                    products[model.weights.checkpoint_name(param.name, key).removesuffix(".weight")] = mean
        return products


@dataclass(frozen=True)
class RecordingPlan(Plan):
    """A plan of an unquantized model whose products are recorded."""

    recorder: Recorder = field(kw_only=True)

    def entry(self, op: Op[T], key: str = "") -> T:
        """Returns the kernel of an op, with recording for products."""
        kernel: Any = super().entry(op, key)
        if op is LINEAR:
            kernel = self.recorder.linear(kernel)
        elif op is FUSED_MOE:
            kernel = self.recorder.fused_moe(kernel)
        return kernel

"""Feed-forward blocks of `layer_spec`: gated MLPs and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.layer_spec import Elements, Matrix, Serving, Weights

SILU, CLAMPED, GELU = "silu", "clamped", "gelu"
"""Gates: silu(gate) * up; the same with both sides clamped; gelu(gate) * up."""
_GATE_OPS = {SILU: "silu_and_mul", CLAMPED: "clamped_swiglu", GELU: "gelu_and_mul"}


def _gated(prefix: str, size: int, hidden_size: int, bias: bool) -> Weights:
    """gate and up stacked, and down, of `size` intermediate dims."""
    return (
        Matrix((f"{prefix}.gate_proj", f"{prefix}.up_proj"), 2 * size, hidden_size, bias),
        Matrix((f"{prefix}.down_proj",), hidden_size, size, bias),
    )


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated MLP."""

    intermediate_size: int
    bias: bool = False
    gate: str = SILU

    def needs(self, serving: Serving) -> Iterator[Need]:
        yield Need(_GATE_OPS[self.gate], q_dtype=serving.dtype)

    def weights(self, hidden_size: int, tp_size: int, expert_rows: int) -> Weights:
        return _gated("mlp", self.intermediate_size // tp_size, hidden_size, self.bias)

    def activation_elements(self, hidden_size: int, tp_size: int) -> int:
        return 3 * self.intermediate_size // tp_size


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert that every token goes to; `module`: what the checkpoint calls it; `gated`: weighted by a sigmoid."""

    intermediate_size: int
    module: str = "shared_experts"
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts, `top_k` of them a token, and a shared one. `score`: what the router makes of its logits
    ("softmax", "sigmoid", "sqrtsoftplus"); `hashed`: experts are chosen by token id, from a table of the vocabulary."""

    num_experts: int
    top_k: int
    intermediate_size: int
    score: str = "softmax"
    correction: bool = False  # a bias that counts for the choice only
    router_bias: bool = False
    hashed: int = 0  # entries of that table
    shared: Shared | None = None
    bias: bool = False
    gate: str = SILU
    fused_shared: bool = False  # the shared expert is held as one more of the routed ones

    @property
    def held_experts(self) -> int:
        return self.num_experts + self.fused_shared

    def needs(self, serving: Serving) -> Iterator[Need]:
        yield Need("topk_hash" if self.hashed else f"topk_{self.score}", q_dtype=serving.dtype)
        traits = {f"{self.gate}_gate"} if self.gate != SILU else set()
        traits |= {"expert_bias"} if self.bias else set()
        yield Need("fused_moe", q_dtype=serving.dtype, traits=frozenset(traits))
        if self.shared is not None and not self.fused_shared:
            yield Need(_GATE_OPS[self.gate], q_dtype=serving.dtype)

    def weights(self, hidden_size: int, tp_size: int, expert_rows: int) -> Weights:
        experts, rows = self.held_experts, expert_rows
        parts: list[Matrix | Elements] = [
            Matrix(("mlp.gate",), self.num_experts, hidden_size, self.router_bias, quantized=False),
            Matrix(
                ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"), 2 * rows, hidden_size, self.bias, experts=experts
            ),
            Matrix(("mlp.experts.0.down_proj",), hidden_size, rows, self.bias, experts=experts),
        ]
        if self.correction:
            parts.append(Elements(self.num_experts, "float32"))
        if self.hashed:
            parts.append(Elements(self.hashed, "int32"))
        if self.shared is not None and not self.fused_shared:
            size = self.shared.intermediate_size // tp_size
            parts += _gated(f"mlp.{self.shared.module}", size, hidden_size, False)
        if self.shared is not None and self.shared.gated:
            parts.append(Matrix((f"mlp.{self.shared.module}_gate",), 1, hidden_size, quantized=False))
        return tuple(parts)

    def activation_elements(self, hidden_size: int, tp_size: int) -> int:
        columns = self.top_k + self.fused_shared
        shared = 0 if self.shared is None or self.fused_shared else 3 * self.shared.intermediate_size // tp_size
        return columns * (3 * self.intermediate_size // tp_size + hidden_size) + shared

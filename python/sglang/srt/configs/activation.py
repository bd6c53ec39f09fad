"""The function between the two products of a feed-forward block. No torch."""

from __future__ import annotations

from dataclasses import dataclass

SILU_FUNCTION, GELU_TANH, RELU2_FUNCTION = "silu", "gelu_tanh", "relu2"
FUNCTIONS = {"silu": SILU_FUNCTION, "swish": SILU_FUNCTION, "gelu_pytorch_tanh": GELU_TANH}
"""The functions by their names in config.json (`hidden_act`)."""


MIN_RESULT_LIMIT = 6.25
"""Smallest limit with `limits_result`: exp(-6.25) is less than half a unit in the last place of bfloat16."""


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation (up + up_offset) * f(gate). Before it gate is clamped to at most `limit`, and up to within
    +-`limit` (None: not clamped). f is gate * sigmoid(alpha * gate), or with `function` "gelu_tanh" the tanh form of
    GELU.

    With `limits_result` f(gate) is clamped instead of gate. For a `limit` of at least MIN_RESULT_LIMIT kernels clamp
    gate nevertheless: both are the same within the rounding of bfloat16, because they differ by exp(-limit).

    With `function` "relu2" there is no gate: the result is max(up, 0) ** 2.
    """

    alpha: float = 1.0
    up_offset: float = 0.0
    limit: float | None = None
    function: str = SILU_FUNCTION
    limits_result: bool = False

    @property
    def gated(self) -> bool:
        """Returns whether the activation multiplies by a second projection (the gate)."""
        return self.function != RELU2_FUNCTION

    @property
    def linear_in_up(self) -> bool:
        """Returns whether the result is proportional to up."""
        return self.gated and self.up_offset == 0.0 and self.limit is None

    @property
    def op(self) -> str:
        """Name of the op that computes the activation, of [..., 2I] -> [..., I], or without a gate of [..., I] -> [...,
        I]."""
        if not self.gated:
            return "relu2"
        if self.function == GELU_TANH:
            return "gelu_and_mul"
        return "silu_and_mul" if self == SILU else "clamped_swiglu"

    @property
    def trait(self) -> str:
        """Trait that a kernel with a fused activation needs for this one; "": all of them have it."""
        return {"relu2": "no_gate", "gelu_and_mul": "gelu_gate", "clamped_swiglu": "clamped_gate"}.get(self.op, "")


SILU = Activation()
GELU = Activation(function=GELU_TANH)
RELU2 = Activation(function=RELU2_FUNCTION)
GPT_OSS_SWIGLU = Activation(alpha=1.702, up_offset=1.0, limit=7.0)

GELU_SLOPE = 2.0 * (2.0 / 3.141592653589793) ** 0.5
GELU_CUBIC = 0.044715 * GELU_SLOPE
"""The tanh form of GELU is gate * sigmoid(GELU_SLOPE * gate + GELU_CUBIC * gate ** 3), because 1 + tanh(x) is
2 * sigmoid(2 * x)."""


def gate_constants(activation: Activation) -> dict[str, float | bool]:
    """Returns the constants for which kernels with a fused activation are specialized. LIMIT: 0 without a limit,
    negative if the function's result is clamped."""
    tanh, limit = activation.function == GELU_TANH, activation.limit or 0.0
    return {
        "ALPHA": GELU_SLOPE if tanh else activation.alpha,
        "CUBIC": GELU_CUBIC if tanh else 0.0,
        "OFFSET": activation.up_offset,
        "LIMIT": -limit if activation.limits_result and limit < MIN_RESULT_LIMIT else limit,
        "HAS_GATE": activation.gated,
    }

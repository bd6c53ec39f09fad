"""How strongly a token forgets and learns, from two numbers a head. Reference: `reference.gates`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def gates(a, b, a_log, dt_bias, dt_min, dt_max, DELTA: tl.constexpr):
    """-> (log of the decay, weight of the new value), fp32, of any shape.

    Gated delta rule: -exp(a_log) * softplus(a + dt_bias), and sigmoid(b). State-space duality: the second is the time
    step dt = softplus(a + dt_bias) within [dt_min, dt_max], and the first -exp(a_log) * dt; `b` is not looked at."""
    step = softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    rate = -tl.exp(a_log.to(tl.float32))
    if DELTA:
        return rate * step, tl.sigmoid(b.to(tl.float32))
    step = tl.minimum(tl.maximum(step, dt_min), dt_max)
    return rate * step, step

"""A short convolution: its weights and what a request keeps for it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.cache_spec import CacheTensor
from sglang.srt.plan.weight_spec import Elements


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A causal depthwise convolution over `taps` tokens, added to its input (Inkling). A request keeps the inputs of
    its last `kept` tokens: taps - 1, and `window_slack` more where drafts may compute tokens again."""

    taps: int
    channels: int
    window_slack: int = 0

    @property
    def kept(self) -> int:
        return self.taps - 1 + self.window_slack

    def rows(self, name: str, dtype: str) -> CacheTensor:
        """Returns the tensor of a request's kept inputs: that of position p is at p % kept."""
        return CacheTensor(name, (self.kept, self.channels), dtype)

    def weights(self) -> Elements:
        return Elements(self.taps * self.channels)

"""Forms of layers for multi-token prediction in models with several residual streams. Other models' layers have the
form of EAGLE's heads (`drafts.eagle.spec.Projected`)."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.drafts.form import Form
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class ByStream(Form):
    """A draft of a model with several residual streams, with as many itself (DeepSeek-V4's multi-token prediction).
    Each of the target's `streams` behind its last layer is normed and projected, and the normed and projected embedding
    is added to it. The streams behind the draft's layer are the features of the next draft step."""

    streams: int

    reads_streams = True
    computed_by = "sglang.srt.drafts.mtp.model:MultiStreamDraft"

    def weights(self, hidden_size: int) -> Weights:
        projections = (Matrix(name, ("",), hidden_size, hidden_size, quantized=False) for name in ("e_proj", "h_proj"))
        return (*projections, Elements(2 * hidden_size))


@dataclass(frozen=True, slots=True)
class Streamed(Form):
    """A draft of layers for multi-token prediction in a model with gated residual streams (Qwen3.8-Flash-Next).
    Features are the target's `streams` before they become one: normed as one vector, then projected one by one; the
    projected embedding is added to each. Behind the draft's layers they are the features of the next draft token, and
    gates of rank `rank` make them the hidden state for logits, as behind the target's last layer."""

    streams: int
    rank: int

    final_norm = False
    reads_streams = True
    computed_by = "sglang.srt.drafts.mtp.model:GatedStreamDraft"

    def weights(self, hidden_size: int) -> Weights:
        width = self.streams * hidden_size
        return (
            Matrix("fc_embedding", ("",), hidden_size, hidden_size, quantized=False),
            Matrix("fc_hidden", ("",), hidden_size, hidden_size, quantized=False),
            Elements(2 * self.rank * width),
            Elements(2 * width + hidden_size, "float32"),  # both norms, and the one behind the last layer
        )

"""What heads over hidden states of the target are: EAGLE-3's, and those of EAGLE-1 and 2. Most layers for multi-token
prediction have the latter's form."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.drafts.form import Form
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class Concatenated(Form):
    """An EAGLE-3 draft (arXiv 2503.01840). Aux hidden states of the target, side by side, are projected to features.
    The first layer's attention takes the normed embedding and the normed features side by side; the features are its
    residual stream.

        aux_norms: each aux hidden state is normed before the projection; norm_before_fc: all of them together
        norm_before_residual: the normed features are the residual stream
        norm_output: the next draft step reads the output behind the final norm, not before it
    """

    num_aux_layers: int
    aux_size: int
    aux_norms: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    computed_by = "sglang.srt.drafts.eagle.model:Eagle3Draft"

    @property
    def total_aux_size(self) -> int:
        return self.num_aux_layers * self.aux_size

    def weights(self, hidden_size: int) -> Weights:
        norms = self.total_aux_size * (self.aux_norms + self.norm_before_fc) + hidden_size  # the features' norm
        return (Matrix("fc", ("",), hidden_size, self.total_aux_size, quantized=False), Elements(norms))


@dataclass(frozen=True, slots=True)
class Projected(Form):
    """A draft of EAGLE-1 and 2 (arXiv 2401.15077) or of one layer for multi-token prediction (arXiv 2412.19437, section
    2.2): embedding and features side by side are projected to the first layer's input. Features are the target's final
    hidden states.

        norms: both are normed before the projection
        hidden_first: the features are left of the embedding
        zero_first: the embedding at position 0 is zero
        final_norm: False: the residual stream is the output, without a norm
    """

    norms: bool = True
    hidden_first: bool = False
    zero_first: bool = False
    bias: bool = False
    final_norm: bool = True
    computed_by = "sglang.srt.drafts.eagle.model:ProjectedDraft"

    def weights(self, hidden_size: int) -> Weights:
        projection = Matrix("fc", ("",), hidden_size, 2 * hidden_size, self.bias, quantized=False)
        return (projection, Elements(2 * hidden_size * self.norms))

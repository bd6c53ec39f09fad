"""What a draft is besides its layers: the questions of planning that each form of draft answers."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.plan.weight_spec import Weights

AUTOREGRESSIVE = "sglang.srt.drafts.autoregressive:AutoregressiveDraft"


class Form:
    """What a draft reads of its target, and the weights that it has besides its layers, with answers that hold for most
    drafts. It names what computes the draft and what proposes tokens with it, as "module:class", so that planning loads
    neither."""

    __slots__ = ()

    computed_by: str
    """Class of the draft's model."""
    proposed_by = AUTOREGRESSIVE
    """Class of the drafter."""
    final_norm = True
    """It has a norm behind its last layer, of the model's hidden size."""
    reads_streams = False
    """It reads all residual streams of a target's layer, not their mean."""
    separate = False
    """It is a model that reads nothing of the target but tokens."""
    reads_caches = False
    """Its layers attend to keys and values of the target."""

    @property
    def next_tokens_read(self) -> int:
        """Tokens behind a position on which the draft's keys and values at that position depend, too."""
        return 1

    @property
    def tails(self) -> int:
        """Rows of features that are kept for each request from step to step, besides its states."""
        return 0

    @property
    def rows_a_request(self) -> int:
        """Rows of a request in one pass of the draft."""
        return 1

    def weights(self, hidden_size: int) -> Weights:
        """Returns the weights before the first layer and behind the last one, except norm, embedding and head."""
        return ()

    def passes(self, i: int) -> Sequence[tuple[int, bool]]:
        """Returns the passes over layers that make draft token `i` (0: the first) of a chain: for each the first layer
        that runs, and whether it runs over all rows of the target's step, not one of each request."""
        return ((0, i == 0),)

"""Limits of what a rank runs at once."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.step_widths import ONE_TOKEN, StepWidths


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits of what a rank runs at once: requests, tokens, graphs, table rows."""

    max_running_requests: int
    context_len: int
    tokens_per_step: int
    graph_batch_sizes: tuple[int, ...]
    page_size: int
    ranks: RankLayout
    prefill_graph_tokens: tuple[int, ...] = ()
    row_tables: int = 1
    checkpoints: int = 0
    uncertain_slots: int = 1
    """As PoolSizes.growing."""
    drafts: StepWidths = ONE_TOKEN
    """Numbers of tokens that a decoding request may bring to a step, not limited yet; see `step_widths`."""
    ngram_bytes: int = 0
    """Bytes of the tables in which n-gram drafts are looked up."""
    num_positions: int = 0
    """Rows of rotary tables, which no request outgrows (`plan.positions`)."""
    copy_bytes: int = 0
    """Bytes of the staging buffers of cached prefixes on their way to main memory and back."""

    @property
    def verified_tokens(self) -> int:
        """Most tokens of a decoding request in one step."""
        return self.drafts.widths[-1]

    @property
    def step_widths(self) -> StepWidths:
        """The numbers of tokens that a decoding request may bring to a step, for each number of requests; each has
        decode graphs of its own."""
        return self.drafts.limited(self.max_running_requests, self.graph_batch_sizes)

    @property
    def decode_rows(self) -> int:
        """Most rows of a step without prompts: the tokens of all requests, each with its draft tokens."""
        return self.step_widths.step_rows(self.max_running_requests)

    @property
    def graph_rows(self) -> int:
        """Rows of the largest graph of a step without prompts."""
        widths = self.step_widths
        return max((size * width for size in self.graph_batch_sizes for width in widths.of(size)), default=0)

    @property
    def num_decode_graphs(self) -> int:
        """Number of graphs of steps without prompts: one for each batch size and width that it allows."""
        return sum(len(self.step_widths.of(size)) for size in self.graph_batch_sizes)

    @property
    def state_rows(self) -> int:
        """Rows of states: one for each request slot, of which 0 is padding, and the checkpoints."""
        return self.max_running_requests + 1 + self.checkpoints

    @property
    def token_rows(self) -> int:
        """Most tokens of a step that attend one by one with DCP: draft tokens, and those of prefill graphs."""
        verified = max(self.max_running_requests, *self.graph_batch_sizes, 1) * self.uncertain_slots
        return max(verified, *self.prefill_graph_tokens, 1)

"""Steps with speculative decoding on one rank: predicted times of verifying draft tokens and of drafting, and the speed
at an accept length.

    drafted = time_drafted(model, draft, serving, steps.verify_step(batch=8, width=4), arch)
    drafted.tokens_per_second(accept_length=2.8)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang.srt.drafts.block.spec import Block
from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.layer_spec import LayerSpec, ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.weight_spec import Matrix
from sglang.tuning.ops import Elementwise, Linear, Op
from sglang.tuning.step import Step, decode_step
from sglang.tuning.steps import StepTime, head_ops, layer_ops, time_step, timed, total, unserved_ops

_PER_BLOCK_ROW = "kernel_projection"
_PER_TOKEN = "fc"


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """Times of a verify step of the tokens in `step`, and of drafting. `plain`: time of a step without drafts."""

    step: Step
    plain: StepTime
    verify: StepTime
    draft: StepTime

    @property
    def seconds(self) -> float:
        return self.verify.seconds + self.draft.seconds

    @property
    def pays_from(self) -> float:
        """Returns the accept length (tokens of a request and step) above which drafting is faster."""
        return self.seconds / self.plain.seconds

    def tokens_per_second(self, accept_length: float) -> float:
        """Returns generated tokens a second. accept_length: tokens of a request and step."""
        return self.step.batch * accept_length / self.seconds


def time_drafted(
    model: ModelDescription, draft: DraftDescription | None, parallel: ParallelConfig, step: Step, arch: ArchTraits
) -> DraftedStep:
    """Returns the times of a step that verifies `step.new` tokens of each request. draft None: draft tokens are looked
    up, which is not counted. Raises UserError for a card that nobody measured."""
    unserved = frozenset() if draft is None else unserved_ops(draft.model, parallel, arch)
    ops = () if draft is None else draft_ops(model, draft, parallel, step)
    return DraftedStep(
        step,
        plain=total(time_step(model, parallel, decode_step(step.batch, step.context), arch)),
        verify=total(time_step(model, parallel, step, arch)),
        draft=total(timed(ops, unserved, arch)),
    )


def draft_ops(
    model: ModelDescription, draft: DraftDescription, parallel: ParallelConfig, step: Step
) -> Iterator[tuple[str, Op]]:
    """Yields the ops that make the next draft tokens after a verify step."""
    if isinstance(draft.form, Block):
        yield from _block(model, draft, draft.form, parallel, step)
        return
    draft_tokens, layers = step.new - 1, draft.model.layers
    one = decode_step(step.batch, step.context)
    head = model if draft.head_size == 0 else draft.model
    for i in range(draft_tokens):
        yield from head_ops(head, parallel, step.batch)
        for first, of_step in draft.form.passes(i):
            yield from _pass(draft, layers[first:], parallel, step if of_step else one, first)


def _pass(
    draft: DraftDescription, layers: tuple[LayerSpec, ...], parallel: ParallelConfig, step: Step, first: int = 0
) -> Iterator[tuple[str, Op]]:
    """Yields the ops of one pass: the embedding, the products before the layers, and the layers."""
    model = draft.model
    yield "embedding", Elementwise("embedding", 4.0 * step.tokens * model.hidden_size)
    for matrix in _matrices(draft):
        yield matrix.name, Linear(step.tokens, matrix.rows, matrix.cols)
    quant = model.expert_quant
    for i, layer in enumerate(layers, first):
        yield from layer_ops(model, i, layer, parallel, step, quant.scheme if quant else None)


def _block(
    model: ModelDescription, draft: DraftDescription, form: Block, parallel: ParallelConfig, step: Step
) -> Iterator[tuple[str, Op]]:
    """Yields the ops of a block draft: storing the step's tokens, one pass over blocks, and a head that corrects draft
    tokens in sequence."""
    draft_tokens = step.new - 1
    rows = replace(step, new=form.size, verifies=True)
    for matrix in _matrices(draft):
        per_draft_token = matrix.name not in (_PER_TOKEN, _PER_BLOCK_ROW)
        tokens = step.tokens if matrix.name == _PER_TOKEN else rows.tokens
        for _ in range(draft_tokens if per_draft_token else 1):
            yield matrix.name, Linear(step.batch if per_draft_token else tokens, matrix.rows, matrix.cols)
    for i, layer in enumerate(draft.model.layers):
        for part in layer.mixer.weights(draft.model.hidden_size, parallel.ranks.tp_size):
            if isinstance(part, Matrix) and part.name in _KEPT:
                quant = draft.model.quant_of(i, part)
                yield (
                    f"{part.name} of kept tokens",
                    Linear(step.tokens, part.rows, part.cols, quant.scheme if quant else None),
                )
    quant = draft.model.expert_quant
    yield "embedding", Elementwise("embedding", 4.0 * rows.tokens * draft.model.hidden_size)
    for i, layer in enumerate(draft.model.layers):
        yield from layer_ops(draft.model, i, layer, parallel, rows, quant.scheme if quant else None)
    yield from head_ops(model, parallel, step.batch * draft_tokens)
    if form.head is not None:  # draft tokens are drawn one after the other
        size = 4.0 * 3 * step.batch * model.vocab_size
        yield from (("sampling", Elementwise("sampling", size, 3)) for _ in range(draft_tokens - 1))


_KEPT = frozenset({"attn.qkv", "attn.kv"})
"""Products of a block draft's layers that make keys and values of tokens before a block."""


def _matrices(draft: DraftDescription) -> Iterator[Matrix]:
    if draft.form.separate:
        return
    yield from (part for part in draft.form.weights(draft.model.hidden_size) if isinstance(part, Matrix))

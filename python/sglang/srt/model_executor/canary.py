"""Start-up check: a few tokens are computed with and without graphs and in every kind of step, and logits are compared.

The reference is short prompts computed whole without graphs. The same tokens are then computed in every other kind of
step, without graphs and, if such steps have graphs, in one: whole, as two microbatches with two-batch overlap, with the
last token decoded, with the last tokens verified as draft tokens, and with one request decoding beside the prompts of
the others. Prompts with images, whose features are random numbers, are computed without graphs and in graphs with
prompts. Logits of the last tokens must agree and be finite. An all-reduce of integers must give their sum. The error
names the graph, or the first block whose output differs, with its ops and their kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.model_executor.canary_steps import CanarySteps
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import StepInput
from sglang.srt.models.causal_lm import BLOCKS, CausalLM
from sglang.srt.plan.layer_spec import ABSENT, ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout

logger = logging.getLogger(__name__)

MIN_AGREEMENT = 0.5
"""Smallest cosine of two rows of logits. Random weights on an H200 give 0.84 (GPT-OSS-20B), 0.94 (Qwen3.5-35B-A3B),
0.98 (nine layers of GLM-4.7-FP8), because roundings differ and MoE routers near a tie choose other experts. A wrong
cache slot, position or scale gives about 0."""
MAX_INFLUENCE, MAX_INFLUENCE_OF_SCALES = 0.03, 0.3
"""Largest change of a token's logits, relative to their norm, when other requests have other tokens: in 16 bits, and
where activations may be quantized with one scale for all tokens of a step, so that roundings differ. Without mixing it
is 0 in 16 bits; if an MLP adds 2% of the token before, it is 0.2 (four layers, random weights)."""
KERNELS = "the attention backend or the cache's type may be at fault"
REMEDIES = {
    "graph": "--disable-cuda-graph serves without graphs",
    "microbatches": "--disable-two-batch-overlap serves without microbatches",
}
"""Remedies by a word in the name of the failed step."""
REDUCED = (1 << 9, 1 << 20)
"""Elements of a small and a large all-reduce, which may use different kernels."""


def check_runner(runner: ModelRunner) -> None:
    """Runs all checks. Collective: all ranks call it before the first request. Raises UserError that names what is
    wrong. Leaves changes only in cache slots and states that no request owns."""
    started = time.perf_counter()
    with torch.inference_mode():
        _check_all_reduce(runner)
    minimum = check_steps(runner)
    seconds = time.perf_counter() - started
    graphs = runner.graphs is not None
    what = "decoding and graphs agree" if graphs else "decoding agrees"
    without = " without" if graphs else ""
    logger.info(
        "Start-up canary: %s with computing prompts whole%s (cosine %.4f), %.2f s.", what, without, minimum, seconds
    )


def check_steps(runner: ModelRunner) -> float:
    """Compares every kind of step as `check_runner` does, and returns the smallest agreement. Raises UserError."""
    with torch.inference_mode():
        return _Canary(runner).check()


def first_logits(runner: ModelRunner) -> torch.Tensor:
    """Returns the logits [N, vocabulary] of a few prompts, on the host and the same on every rank. Collective. Changes
    only cache slots and states that no request owns."""
    canary = _Canary(runner)
    with torch.inference_mode():
        try:
            return canary.logits_of_prompts().cpu()
        finally:
            canary.steps.end()


def _check_all_reduce(runner: ModelRunner) -> None:
    size, rank = parallel_state.tp_size(), parallel_state.tp_rank()
    if size == 1:
        return
    for count in REDUCED:
        base = torch.arange(count, device=runner.device) % 5  # sums of few bits: exact in every type, in any order
        partial_sum = (base + rank % 3).to(getattr(torch, runner.plan.dtype))
        total = parallel_state.groups().tp.all_reduce(partial_sum, exact=True)
        expected = base * size + sum(i % 3 for i in range(size))
        wrong = int((total.long() != expected).sum())
        if wrong:
            what = f"all_reduce: {wrong:,} of {count:,} sums over {size} ranks are wrong"
            raise _failure(what, "`sglang doctor` tries copies between the GPUs; NCCL_P2P_DISABLE=1 avoids them")


class _Canary:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.steps = runner, CanarySteps(runner)

    def check(self) -> float:
        """Returns the smallest agreement. Raises UserError."""
        try:
            return min([1.0, *self._agreements()])
        finally:
            self.steps.end()

    def logits_of_prompts(self) -> torch.Tensor:
        """Returns the logits of all prompts, computed whole without graphs."""
        with self.runner.without_graphs(), self.runner.with_min_overlap_tokens(None):
            self.steps.start()
            return self._logits(self.steps.prompts(self.steps.length))

    def _agreements(self) -> Iterator[float]:
        runner, steps = self.runner, self.steps
        with runner.without_graphs(), runner.with_min_overlap_tokens(None):
            reference = self._logits(steps.prompts(steps.length))
            if not bool(reference.isfinite().all()):
                raise _failure(self._first_without_numbers() + " is not finite", "check the checkpoint's files")
        if runner.plan.description.transformers_class is not None and steps.count > 1:
            self._check_neighbours()
        yield from self._with_overlap(reference)
        yield from self._in_graph("the graph of a prompt", partial(steps.prompts, steps.length), reference)
        if runner.plan.description.pooling is not None:
            alone = [self._logits(steps.alone(number)) for number in range(steps.count)]
            yield self._compared("each text by itself", torch.cat(alone), reference)
            return
        if steps.length < 2:
            return
        if steps.has_drafts:
            yield from self._verified(reference)
        else:
            yield from self._decoded(reference)
        if steps.count > 1:
            yield from self._mixed(reference)
        if steps.images is not None:
            with steps.images.only_cached():
                yield from self._seen(reference)

    def _check_neighbours(self) -> None:
        """Raises UserError if the logits of a token change with the tokens of other requests beside it. A class may mix
        tokens where nothing here sees it. All other computations are the same, and so are their roundings."""
        runner, steps = self.runner, self.steps
        with runner.without_graphs(), runner.with_min_overlap_tokens(None):
            beside = [self._logits(steps.first_tokens(others))[steps.middle].double() for others in (1, 2)]
        difference = float((beside[0] - beside[1]).norm() / beside[0].norm())
        quantized, title = runner.plan.description.quantization is not None, runner.plan.description.title
        if not difference <= (MAX_INFLUENCE_OF_SCALES if quantized else MAX_INFLUENCE):
            raise UserError(
                f"{title} cannot be served: what it says to a request changes with the tokens of others that are"
                f" computed beside it (by {difference:.0%}). Its class mixes neighbouring tokens outside of attention,"
                " such as in a convolution, and requests lie side by side here. docs/transformers_models.md has the"
                " classes that are served"
            )

    def _with_overlap(self, reference: torch.Tensor) -> Iterator[float]:
        """Yields the agreement of a step as two microbatches; nothing without two-batch overlap."""
        if self.runner.two_batch_overlap is None or self.steps.length * self.steps.count < 2:
            return
        with self.runner.with_min_overlap_tokens(1):
            logits = self._logits(self.steps.prompts(self.steps.length))
        yield self._compared("a step as two microbatches", logits, reference)

    def _decoded(self, reference: torch.Tensor) -> Iterator[float]:
        steps = self.steps
        with self.runner.without_graphs():
            self._compute_prefixes(1)
            decoded = self._logits(steps.decoded(steps.count))
            if not _cosine(decoded, reference) >= MIN_AGREEMENT:
                raise _failure(self._first_difference(), KERNELS)
            yield _cosine(decoded, reference)
        for count in dict.fromkeys((1, steps.count)):
            name = f"the graph that decodes {count} request" + ("s" if count > 1 else "")
            yield from self._in_graph(name, partial(steps.decoded, count), reference[:count], 1)

    def _verified(self, reference: torch.Tensor) -> Iterator[float]:
        steps, rows = self.steps, self.steps.rows_of_verified()
        with self.runner.without_graphs():
            self._compute_prefixes(steps.width)
            yield self._compared("a step that verifies draft tokens", self._logits(steps.verified())[rows], reference)
        yield from self._in_graph("the graph that verifies draft tokens", steps.verified, reference, steps.width, rows)

    def _mixed(self, reference: torch.Tensor) -> Iterator[float]:
        what, reference = "prompts beside a request that decodes", reference[self.steps.mixed_order]
        with self.runner.without_graphs():
            self._compute_prefixes(1)
            yield self._compared(f"a step of {what}", self._logits(self.steps.mixed()), reference)
        yield from self._in_graph(f"the graph of {what}", self.steps.mixed, reference, 1)

    def _seen(self, of_text: torch.Tensor) -> Iterator[float]:
        """Yields the agreements of prompts with images; the request that decodes beside them has none."""
        steps, graphs = self.steps, self.runner.graphs
        if graphs is None or graphs.shape_of(steps.with_images()) is None:
            return
        with self.runner.without_graphs():
            steps.start()
            reference = self._logits(steps.with_images())
        yield from self._in_graph("the graph of prompts with images", steps.with_images, reference)
        if steps.count > 1:
            beside, order = "the graph of prompts with images beside a request that decodes", steps.mixed_order
            reference = torch.cat((of_text[order[:1]], reference[order[1:]]))
            yield from self._in_graph(beside, steps.mixed_with_images, reference, 1)

    def _in_graph(
        self,
        name: str,
        step: Callable[[], StepInput],
        reference: torch.Tensor,
        behind: int = 0,
        rows: slice = slice(None),
    ) -> Iterator[float]:
        """Yields the agreement of a step in a graph; nothing if it has none. behind: the step's tokens per prompt that
        follow computed ones."""
        graphs = self.runner.graphs
        if graphs is None or graphs.shape_of(step()) is None:
            return
        if behind:
            self._compute_prefixes(behind)
        yield self._compared(name, self._logits(step())[rows], reference)

    def _compute_prefixes(self, count: int) -> None:
        """Computes every prompt except its last `count` tokens, after resetting earlier computations."""
        self.steps.start()
        self._logits(self.steps.prompts(self.steps.length - count))

    def _logits(self, step: StepInput) -> torch.Tensor:
        """Returns the logits of a step on all stages of a pipeline, which then proceed alike."""
        logits, runner = self.runner.forward(step).logits, self.runner
        if runner.model.head is not None:
            logits = runner.model.head.whole(logits).float()
        if not runner.samples:
            logits = logits.new_empty((len(logits), runner.plan.model.vocab_size))
        return runner.pp_tokens.from_last(logits.clone())

    def _compared(self, name: str, logits: torch.Tensor, reference: torch.Tensor) -> float:
        agreement = _cosine(logits, reference) if bool(logits.isfinite().all()) else float("nan")
        if not agreement >= MIN_AGREEMENT:
            what = f"{name} gives other logits than the prompts computed whole (cosine {agreement:.3f})"
            remedy = next((text for kind, text in REMEDIES.items() if kind in name), KERNELS)
            raise _failure(what, remedy)
        return agreement

    # --- naming what is wrong -----------------------------------------------------------------------------------------

    def _first_without_numbers(self) -> str:
        for name, out in self._outputs(self.steps.prompts(self.steps.length)):
            if not bool(out.isfinite().all()):
                return f"the output of {name} ({self._ops_of_block(name)})"
        return "the logits"

    def _first_difference(self) -> str:
        steps = self.steps
        whole = self._outputs(steps.prompts(steps.length))
        self._compute_prefixes(1)
        decoded = self._outputs(steps.decoded(steps.count))
        ends = slice(steps.length - 1, None, steps.length)
        for (name, of_prompt), (_, of_token) in zip(whole, decoded, strict=True):
            if not _cosine(of_token, of_prompt[ends]) >= MIN_AGREEMENT:
                called = f"{name} ({self._ops_of_block(name)})"
                return f"{called} gives another output for a token that is decoded than for the same one in a prompt"
        return "decoding gives other logits than computing the same prompt whole"

    def _ops_of_block(self, name: str) -> str:
        """Names the ops of the block that `_recorded` calls `name`, and the kernel of each."""
        plan, model = self.runner.plan, self.runner.model.description
        serving = ParallelConfig(plan.dtype, plan.kv_cache_dtype, plan.page_size, RankLayout(plan.ranks.attn_tp_size))
        spec = next(spec for known, spec in _blocks(model) if known == name)
        ops = {"linear", *(need.op for need in spec.needs(serving))}
        return ", ".join(f"{op} by {choice.name}" for op, choice in plan.choices.items() if op.partition("/")[0] in ops)

    def _outputs(self, step: StepInput) -> list[tuple[str, torch.Tensor]]:
        """Returns the name and output [T, H] of every block, in order."""
        outputs: list[tuple[str, torch.Tensor]] = []
        with self.runner.with_min_overlap_tokens(None), _recorded(self.runner.model, outputs):
            self._logits(step)
        return outputs


@contextmanager
def _recorded(model: CausalLM, outputs: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Records every block's output, with its name, as long as the context lasts."""

    def recording(name: str, block: Any) -> Any:
        def run(x: torch.Tensor, batch: Any) -> torch.Tensor:
            out: torch.Tensor = block(x, batch)
            outputs.append((name, out.float().clone()))
            return out

        return run

    originals = [layer.blocks for layer in model.layers]
    names = (name for name, _ in _blocks(model.description))
    for layer in model.layers:
        layer.blocks = [(join, recording(next(names), block)) for join, block in layer.blocks]
    try:
        yield
    finally:
        for layer, blocks in zip(model.layers, originals, strict=True):
            layer.blocks = blocks


def _blocks(model: ModelDescription) -> Iterator[tuple[str, Any]]:
    """Yields a name and the description of each block, in the order in which they compute."""
    for i, layer in enumerate(model.layers):
        for block in (layer.mixer, layer.ffn):
            if block != ABSENT:
                yield f"layer {i} {BLOCKS[type(block)].name}", block


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the smallest cosine over the rows."""
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double()).min())


def _failure(what: str, remedy: str) -> UserError:
    return UserError(
        f"the start-up canary found this GPU computing something wrong: {what}. {remedy}; --skip-server-warmup starts"
        " without this check"
    )

"""Before a server takes requests: a few tokens through its graphs and collectives, beside the same tokens without.

A short prompt is computed whole and without graphs, which is the reference. It is computed again as a graph, and once
more but for its last token, which then is decoded: without a graph, as the graph of one request and as that of several.
Logits of the last token must agree, and be numbers. An all-reduce of whole numbers must give their sum. What is wrong
is named: the graph, or the first block whose output differs, with its ops and what computes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import ExtendInput, StepInput
from sglang.srt.models.causal_lm import BLOCKS, CausalLM
from sglang.srt.plan.layer_spec import ABSENT, Serving
from sglang.srt.plan.model_description import ModelDescription

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 24
REQUESTS = 3
LEAST_AGREEMENT = 0.5
"""Cosine of two rows of logits. On an H200, random weights leave 0.84 (GPT-OSS-20B), 0.94 (Qwen3.5-35B-A3B), 0.98 (nine
layers of GLM-4.7-FP8) of it: roundings differ, and routers near a tie choose other experts. A wrong cache slot,
position or scale leaves about 0."""
REDUCED = (1 << 9, 1 << 20)
"""Elements of the all-reduces: of a small and of a large message, which other kernels may serve."""


def check_runner(runner: ModelRunner) -> None:
    """Collective: all ranks call it before the first request. Raises UserError naming what is wrong. Leaves no trace
    but in cache slots and states that no request has."""
    started = time.perf_counter()
    with torch.inference_mode():
        _check_all_reduce(runner)
        least = _Canary(runner).check()
    seconds = time.perf_counter() - started
    graphs = runner.graphs is not None or runner.extend_graphs is not None
    what = "decoding and graphs agree" if graphs else "decoding agrees"
    without = " without" if graphs else ""
    logger.info(
        "Start-up canary: %s with computing prompts whole%s (cosine %.4f), %.2f s.", what, without, least, seconds
    )


def _check_all_reduce(runner: ModelRunner) -> None:
    size, rank = parallel_state.tp_size(), parallel_state.tp_rank()
    if size == 1:
        return
    for count in REDUCED:
        base = torch.arange(count, device=runner.device) % 5  # sums of few bits: exact in every type, in any order
        total = parallel_state.groups().tp.all_reduce((base + rank % 3).to(getattr(torch, runner.plan.dtype)))
        expected = base * size + sum(i % 3 for i in range(size))
        wrong = int((total.long() != expected).sum())
        if wrong:
            what = f"all_reduce: {wrong:,} of {count:,} sums over {size} ranks are wrong"
            raise _failure(what, "`sglang doctor` tries copies between the GPUs; NCCL_P2P_DISABLE=1 avoids them")


class _Canary:
    """Request slots 1 to `count` with cache slots behind the padding page."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, plan = runner, runner.plan
        window_tokens = [size.tokens for size in plan.windows]
        tokens = min(plan.max_total_num_tokens, *window_tokens) if window_tokens else plan.max_total_num_tokens
        pages_each = -(-PROMPT_TOKENS // plan.page_size)
        self.count = max(1, min(REQUESTS, plan.max_running_requests, tokens // (pages_each * plan.page_size)))
        self.length = min(PROMPT_TOKENS, plan.context_len, tokens)
        request, position = np.arange(self.count)[:, None], np.arange(self.length)
        self.ids = (17 + 31 * position + 7 * request) % plan.model.vocab_size
        self.cache = plan.page_size * (1 + pages_each * request) + position
        self.slots = np.arange(1, self.count + 1)

    def check(self) -> float:
        """The least agreement. Raises UserError."""
        runner, state = self.runner, self.runner.state
        try:
            state.req_to_token[:, 1 : self.count + 1, : self.length] = torch.from_numpy(self.cache).to(runner.device)
            return min([1.0, *self._agreements()])
        finally:
            state.req_to_token[:, 1 : self.count + 1] = 0
            state.next_tokens[: self.count + 1] = 0
            state.lens[: self.count + 1] = 0

    def _agreements(self) -> Iterator[float]:
        runner, whole = self.runner, self._prompts(self.length)
        with runner.without_graphs():
            reference = self._logits(whole)
            if not bool(reference.isfinite().all()):
                raise _failure(self._first_without_numbers(whole) + " is not finite", "check the checkpoint's files")
        if runner.extend_graphs is not None and runner.extend_graphs.fits(whole):
            yield self._compared("the graph of a prompt", self._logits(whole), reference)
        if runner.state.drafter is not None or self.length < 2:
            return
        with runner.without_graphs():
            decoded = self._decoded(self.count)
            if _cosine(decoded, reference) < LEAST_AGREEMENT:
                raise _failure(self._first_that_differs(), "the attention backend or the cache's type may be at fault")
            yield _cosine(decoded, reference)
        for count in dict.fromkeys((1, self.count)) if runner.graphs is not None else ():
            if runner.decodes_in_graph(count):
                name = f"the graph that decodes {count} request" + ("s" if count > 1 else "")
                yield self._compared(name, self._decoded(count), reference[:count])

    def _prompts(self, length: int) -> StepInput:
        lens = np.full(self.count, length, np.int32)
        ids, cache = self.ids[:, :length].flatten(), self.cache[:, :length].flatten()
        extend = ExtendInput(ids, np.zeros(self.count, np.int32), lens, np.arange(self.count))
        return StepInput(self.slots, lens, cache.astype(np.int32), extend)

    def _last_tokens(self, count: int) -> StepInput:
        """The step that decodes the last token of the first `count` prompts."""
        lens, last = np.full(count, self.length, np.int32), self.cache[:count, -1].astype(np.int32)
        state = self.runner.state
        state.next_tokens[1 : count + 1, 0] = torch.from_numpy(self.ids[:count, -1]).to(state.device)
        return StepInput(self.slots[:count], lens, last)

    def _decoded(self, count: int) -> torch.Tensor:
        """Logits of the last tokens, on the caches and states of all the others, which are computed anew."""
        self._logits(self._prompts(self.length - 1))
        return self._logits(self._last_tokens(count))

    def _logits(self, step: StepInput) -> torch.Tensor:
        """On all stages of a pipeline, which go on alike."""
        logits, runner = self.runner.forward(step).logits, self.runner
        if runner.model.head is not None:
            logits = runner.model.head.whole(logits).float()
        if not runner.samples:
            logits = logits.new_empty((len(logits), runner.plan.model.vocab_size))
        return runner.pp_tokens.from_last(logits.clone())

    def _compared(self, name: str, logits: torch.Tensor, reference: torch.Tensor) -> float:
        agreement = _cosine(logits, reference) if bool(logits.isfinite().all()) else float("nan")
        if not agreement >= LEAST_AGREEMENT:
            what = f"{name} gives other logits than the same step without it (cosine {agreement:.3f})"
            raise _failure(what, "--disable-cuda-graph serves without graphs")
        return agreement

    # --- naming what is wrong -----------------------------------------------------------------------------------------

    def _first_without_numbers(self, step: StepInput) -> str:
        for name, out in self._outputs(step):
            if not bool(out.isfinite().all()):
                return f"the output of {name} ({self._computed_by(name)})"
        return "the logits"

    def _first_that_differs(self) -> str:
        whole = self._outputs(self._prompts(self.length))
        self._logits(self._prompts(self.length - 1))
        decoded = self._outputs(self._last_tokens(self.count))
        ends = slice(self.length - 1, None, self.length)
        for (name, of_prompt), (_, of_token) in zip(whole, decoded, strict=True):
            if not _cosine(of_token, of_prompt[ends]) >= LEAST_AGREEMENT:
                called = f"{name} ({self._computed_by(name)})"
                return f"{called} gives another output for a token that is decoded than for the same one in a prompt"
        return "decoding gives other logits than computing the same prompt whole"

    def _computed_by(self, name: str) -> str:
        """Of the block that `_recorded` calls so: its ops, and the kernel of each."""
        plan, model = self.runner.plan, self.runner.model.description
        serving = Serving(plan.dtype, plan.kv_cache_dtype, plan.page_size, plan.ranks.tp_size)
        spec = next(spec for known, spec in _blocks(model) if known == name)
        ops = {"linear", *(need.op for need in spec.needs(serving))}
        return ", ".join(f"{op} by {choice.name}" for op, choice in plan.choices.items() if op.partition("/")[0] in ops)

    def _outputs(self, step: StepInput) -> list[tuple[str, torch.Tensor]]:
        """Of every block, in order, [T, H]."""
        outputs: list[tuple[str, torch.Tensor]] = []
        with _recorded(self.runner.model, outputs):
            self._logits(step)
        return outputs


@contextmanager
def _recorded(model: CausalLM, outputs: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """While it lasts, every block's output is appended with its name."""

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
    """In the order in which they compute: a name, and the description of the block."""
    for i, layer in enumerate(model.layers):
        for block in (layer.mixer, layer.ffn):
            if block != ABSENT:
                yield f"layer {i} {BLOCKS[type(block)].name}", block


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The least over the rows."""
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double()).min())


def _failure(what: str, remedy: str) -> UserError:
    return UserError(
        f"the start-up canary found this GPU computing something wrong: {what}. {remedy}; --skip-server-warmup starts"
        " without this check"
    )

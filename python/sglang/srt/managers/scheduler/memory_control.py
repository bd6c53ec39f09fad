"""Sleep and wake of a rank: control calls, in which all ranks do the same or none does anything."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.model_executor.canary import first_logits
from sglang.srt.model_executor.memory_saver.saver import MemorySaver
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils.engine_state import KV_CACHE, WEIGHTS, EngineState, StateError, checked_tags

logger = logging.getLogger(__name__)

MIN_AGREEMENT = 0.9
"""Smallest cosine of a prompt's logits before a sleep and after it. They are equal but for the order of sums, from
which a router of experts may choose others; weights that were lost give about 0."""
BUSY = "requests run or wait: abort them, wait for them, or pause them with the mode retract"
NO_SAVER = "this server keeps its memory: start it with --enable-memory-saver"


class LostWeights(Protocol):
    """What brings weights back of which no copy was kept."""

    def tensors_read_again(self) -> list[torch.Tensor]:
        """Returns the tensors that `read_again` writes: all others are kept."""

    def forget_written(self) -> None:
        """Notes that what was written of weights that could not be used is lost too."""

    def problem_of_losing(self) -> str:
        """Returns why weights that are lost could neither be read nor be sent; "" if they could."""

    def problem_of_reading(self) -> str:
        """Returns why the weights cannot be read again from where they came; "" if they can."""

    def read_again(self, key: str) -> None:
        """Reads them into their memory. key: of cached prefixes from now on. Raises UserError on all ranks. A
        collective."""


class MemoryControl:
    """Puts the memory of this rank to sleep and wakes it."""

    def __init__(self, scheduler: Scheduler | AttentionGroups, runner: ModelRunner) -> None:
        self.state = EngineState()
        self._scheduler, self._runner = scheduler, runner
        self.lost_weights: LostWeights | None = None
        """Set by what replaces weights."""
        self._logits: torch.Tensor | None = None
        """Of the canary's prompts, before the weights went to sleep."""
        saver = runner.memory_saver
        if saver is not None:
            plan = runner.plan
            saver.changes_weights = plan.adapters is not None or plan.expert_slots is not None
            saver.from_files = lambda: () if self.lost_weights is None else self.lost_weights.tensors_read_again()

    def sleep(self, tags: Sequence[str], keep_weights: bool) -> str:
        """Gives the memory of these tags back; those that sleep already stay so. keep_weights: in main memory. Returns
        the problem, or "". A collective."""
        saver = self._runner.memory_saver
        if saver is None:
            return NO_SAVER
        try:
            asleep = self.state.to_sleep(checked_tags(tags))
        except StateError as error:
            return str(error)
        if not asleep:
            return ""
        problem = self._problem_of_sleep(saver, asleep, keep_weights)
        if not parallel_state.all_reduce_min([int(not problem)])[0]:
            return problem or "another rank cannot sleep; its log says why"
        if KV_CACHE in asleep:
            self._scheduler.flush_cache(keeps_host=True)
            if WEIGHTS in asleep and self.state.serves:
                self._logits = first_logits(self._runner)
        kept = saver.sleep(asleep, keep_weights)
        kept = bool(parallel_state.all_reduce_min([int(kept)])[0])
        self.state.slept(asleep, kept)
        if not kept:
            self._logits = None
            if self.lost_weights is not None:
                self.lost_weights.forget_written()
        logger.info("Asleep: %s (%.1f s)", ", ".join(asleep), saver.seconds["sleep"])
        return ""

    def wake(self, tags: Sequence[str], key: str = "") -> str:
        """Takes memory for these tags again; those that are awake stay so. Weights that were lost are read again once
        nothing sleeps any more, before caches take their memory. key: of prefixes that are cached then. Returns the
        problem, or "". A collective."""
        saver = self._runner.memory_saver
        if saver is None:
            return NO_SAVER
        try:
            awake = self.state.to_wake(checked_tags(tags))
        except StateError as error:
            return str(error)
        if not awake:
            return ""
        reads = self._reads_again(awake)
        first = tuple(tag for tag in awake if tag != KV_CACHE) if reads else awake
        if problem := self._take(saver, first):
            return problem
        if reads is not None:
            try:
                reads.read_again(key)
            except UserError as error:
                saver.sleep_again(first)
                return f"the weights cannot be read again: {error}"
        if problem := self._take(saver, tuple(tag for tag in awake if tag not in first)):
            self.state.woke(first)
            return problem
        self.state.woke(awake)
        logger.info("Awake: %s (%.1f s)", ", ".join(awake), saver.seconds["wake"])
        if self.state.serves and self._logits is not None:
            self._check_weights(self._logits)
        return ""

    def _reads_again(self, awake: Sequence[str]) -> LostWeights | None:
        """Returns what reads the weights again, if that is to be done when these tags wake."""
        reader, state = self.lost_weights, self.state
        if reader is None or not state.weights_lost or state.broken or state.asleep - set(awake):
            return None
        return None if reader.problem_of_reading() else reader

    def _take(self, saver: MemorySaver, tags: Sequence[str]) -> str:
        """Takes memory on all ranks or on none. Returns the problem, or ""."""
        if not tags:
            return ""
        problem = self._mapped(saver, tags)
        if not parallel_state.all_reduce_min([int(not problem)])[0]:
            if not problem:  # another rank has no memory
                saver.sleep_again(tags)
            logger.warning("Cannot wake: %s", problem or "another rank has too little memory")
            return problem or "another rank has too little memory free; its log says how much"
        return ""

    def weights_changed(self) -> None:
        """Notes that weights were written, so that what was kept of them is out of date."""
        self._logits = None
        if self._runner.memory_saver is not None:
            self._runner.memory_saver.weights_changed()

    def _problem_of_sleep(self, saver: MemorySaver, tags: Sequence[str], keep_weights: bool) -> str:
        self._scheduler.sync()
        reqs, paused = self._scheduler.reqs, self._scheduler.paused
        if (reqs and not paused) or (KV_CACHE in tags and any(req.slot for req in reqs.values())):
            return BUSY
        if WEIGHTS not in tags:
            return ""
        if keep_weights:
            return saver.problem_of_copy()
        return "" if self.lost_weights is None else self.lost_weights.problem_of_losing()

    @staticmethod
    def _mapped(saver: MemorySaver, tags: Sequence[str]) -> str:
        """Takes memory. Returns the problem, or ""."""
        if (missing := saver.missing(tags)) is not None:
            needed, free = missing
            return f"waking needs {needed / 1e9:.2f} GB of GPU memory, of which {free / 1e9:.2f} GB are free"
        try:
            saver.wake(tags)
        except MemoryError as error:
            return f"the GPU has too little memory free: {error}"
        return ""

    def _check_weights(self, before: torch.Tensor) -> None:
        """Compares a prompt's logits with those of before the sleep, which are the same on all ranks."""
        logits = first_logits(self._runner)
        agreement = float(torch.nn.functional.cosine_similarity(logits.double(), before.double()).min())
        if not agreement >= MIN_AGREEMENT:
            logger.error("After waking, the model computes something else (cosine %.3f)", agreement)
            self.state.break_weights("after waking they give other results than before; load them again")

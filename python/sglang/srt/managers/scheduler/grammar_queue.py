"""Requests that wait for their grammar, on one rank.

add -> (leader: verified?) -> GrammarVerified to every rank -> every rank builds -> ready on every rank -> queued
"""

from __future__ import annotations

from sglang.srt.constrained.compile_process import Verdict
from sglang.srt.constrained.grammar import GrammarError, grammar_key
from sglang.srt.constrained.grammar_manager import BuildState, GrammarManager
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.leader import EndReq, GrammarVerified, LeaderDecision
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import FinishReason


class GrammarQueue:
    """Decides when requests that wait for grammars are queued; the scheduler keeps them (`Scheduler.compiling`).
    Thousands may wait, so they are checked only when something has changed."""

    def __init__(self, scheduler: Scheduler | AttentionGroups, grammars: GrammarManager) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._building: dict[str, Req] = {}
        self._num_waiting = 0

    def add(self, req: Req) -> None:
        """Takes a request that was just added out of the queue if it wants a grammar."""
        try:
            key = grammar_key(req.params)
        except GrammarError as error:
            self._scheduler.end(req, _refusal(Verdict(error=str(error))))
            return
        if key is not None:
            req.params.min_new_tokens = 0  # a complete grammar allows only the end, which min_new_tokens would forbid
            self._scheduler.hold(req, self._grammars.request(key))
            self._num_waiting += 1

    def decisions(self) -> list[LeaderDecision]:
        """Returns the leader's new decisions about grammars that are being verified."""
        oldest = self._scheduler.oldest_pending()
        if oldest is None or not self._grammars.has_new_verdicts(oldest):
            return []
        decisions: list[LeaderDecision] = []
        for rid, (_, pending) in self._scheduler.compiling.items():
            if pending.build is None and (verdict := self._grammars.verdict(pending)) is not None:
                decisions.append(
                    EndReq(rid, _refusal(verdict)) if verdict.error else GrammarVerified(rid, verdict.seconds)
                )
        return decisions

    def build(self, verified: GrammarVerified) -> None:
        """Starts building this rank's copy."""
        if (entry := self._scheduler.compiling_of(verified.rid)) is not None:
            req, pending = entry
            self._grammars.build(pending, verified.seconds)
            self._building[verified.rid] = req

    def admit(self) -> None:
        """Queues the requests whose grammar is ready on every rank. A collective while any are being built."""
        scheduler = self._scheduler
        if scheduler.num_compiling < self._num_waiting:  # some have left
            self._grammars.keep_only({pending.digest for _, pending in scheduler.compiling.values()})
        self._num_waiting = scheduler.num_compiling
        entries = ((scheduler.compiling_of(rid), req) for rid, req in self._building.items())
        current = [pair for pair, req in entries if pair is not None and pair[0] is req]
        states = parallel_state.all_reduce_min([self._grammars.state(pending) for _, pending in current])
        self._building = {}
        for (req, pending), state in zip(current, states, strict=True):
            if state == BuildState.READY:
                req.grammar = self._grammars.built(pending)
                scheduler.release_hold(req)
            elif state == BuildState.FAILED:
                scheduler.end(req, _refusal(self._grammars.failure(pending)))
            else:
                self._building[req.rid] = req


def _refusal(verdict: Verdict) -> FinishReason:
    return FinishReason("abort", message=verdict.error, status_code=verdict.status_code)

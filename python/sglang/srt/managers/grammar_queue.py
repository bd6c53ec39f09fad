"""Requests that wait for their grammar, on one rank.

add -> (leader: verified?) -> GrammarVerified to every rank -> every rank builds -> ready on every rank -> queued
"""

from __future__ import annotations

from sglang.srt.constrained.grammar import GrammarError, grammar_key
from sglang.srt.constrained.grammar_manager import BuildState, GrammarManager
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.leader import EndReq, GrammarVerified, LeaderDecision
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler


class GrammarQueue:
    """The scheduler keeps the requests (`Scheduler.compiling`), this decides when they leave."""

    def __init__(self, scheduler: Scheduler, grammars: GrammarManager, leader: bool) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._leader = leader

    def add(self, req: Req) -> None:
        """Takes a request that was just added out of the queue if it wants a grammar."""
        try:
            key = grammar_key(req.params)
        except GrammarError as error:
            self._scheduler.end(req, _refusal(str(error), 400))
            return
        if key is not None:
            req.params.min_new_tokens = 0  # a complete grammar allows the end only; the two together may allow nothing
            self._scheduler.hold(req, self._grammars.request(key))

    def decisions(self) -> list[LeaderDecision]:
        """What the leader can say now about grammars that are being verified."""
        decisions: list[LeaderDecision] = []
        for req, pending in self._scheduler.compiling:
            if pending.build is None and (verdict := self._grammars.verdict(pending)) is not None:
                if verdict.error:
                    decisions.append(EndReq(req.rid, _refusal(verdict.error, verdict.status_code)))
                else:
                    decisions.append(GrammarVerified(req.rid, verdict.seconds))
        return decisions

    def build(self, verified: GrammarVerified) -> None:
        """Makes this rank's copy."""
        for req, pending in self._scheduler.compiling:
            if req.rid == verified.rid:
                self._grammars.build(pending, verified.seconds)

    def admit(self) -> None:
        """Queues the requests whose grammar every rank has. A collective while there are any that are being built."""
        compiling = self._scheduler.compiling
        self._grammars.keep_only({pending.digest for _, pending in compiling})
        building = [(req, pending, pending.build) for req, pending in compiling if pending.build is not None]
        states = parallel_state.least_each([self._grammars.state(pending) for _, pending, _ in building])
        for (req, pending, build), state in zip(building, states, strict=True):
            if state == BuildState.READY:
                req.grammar = build.result().fresh()
                self._scheduler.release_hold(req)
            elif state == BuildState.FAILED:
                verdict = self._grammars.failure(pending)
                self._scheduler.end(req, _refusal(verdict.error, verdict.status_code))


def _refusal(message: str, status_code: int) -> FinishReason:
    return FinishReason("abort", message=message, status_code=status_code)

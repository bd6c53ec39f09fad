"""Requests that wait for their grammar, on one rank.

add -> (leader: verified?) -> GrammarVerified to every rank -> every rank builds -> ready on every rank -> queued
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from sglang.srt.constrained.compile_process import Verdict
from sglang.srt.constrained.grammar import GrammarError, grammar_key
from sglang.srt.constrained.grammar_manager import BuildState, GrammarManager, PendingGrammar
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.leader import EndReq, GrammarVerified, LeaderDecision
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import FinishReason


@dataclass(slots=True)
class _Building:
    """A grammar that is being built, for all requests that wait for it: thousands may."""

    entries: list[tuple[Req, PendingGrammar]] = field(default_factory=list)
    builds: dict[int, PendingGrammar] = field(default_factory=dict)
    """For each build, mostly one, the pending grammar with the latest deadline."""

    def add(self, req: Req, pending: PendingGrammar) -> None:
        """Adds a request whose build has begun."""
        self.entries.append((req, pending))
        self.builds[id(pending.build)] = pending


class GrammarQueue:
    """Decides when requests that wait for grammars are queued; the scheduler keeps them (`Scheduler.compiling`).
    Thousands may wait, so they are checked only when something has changed."""

    def __init__(self, scheduler: Scheduler | AttentionGroups, grammars: GrammarManager) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._building: dict[bytes, _Building] = {}
        """By the digest of the grammar."""
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
            self._grammars.build(entry[1], verified.seconds)
            self._building.setdefault(entry[1].digest, _Building()).add(*entry)

    def admit(self) -> None:
        """Queues the requests whose grammar is ready on every rank. A collective while any are being built."""
        scheduler = self._scheduler
        if scheduler.num_compiling < self._num_waiting:  # some have left
            self._grammars.keep_only({pending.digest for _, pending in scheduler.compiling.values()})
            for building in self._building.values():
                building.entries = list(filter(self._waits, building.entries))
            self._building = {digest: building for digest, building in self._building.items() if building.entries}
        self._num_waiting = scheduler.num_compiling
        states: list[int] = []
        for building in self._building.values():
            states += self._state_of(building), len(building.entries) - self._num_late(building)
        agreed = iter(parallel_state.all_reduce_min(states))
        for digest, building in list(self._building.items()):
            state, num_waiting = next(agreed), next(agreed)
            ending = building.entries
            if state == BuildState.RUNNING:
                ending = ending[: len(ending) - num_waiting]
                del building.entries[: len(ending)]
            if not building.entries or state != BuildState.RUNNING:
                del self._building[digest]
            for req, pending in filter(self._waits, ending):
                if state == BuildState.READY:
                    req.grammar = self._grammars.built(pending)
                    scheduler.release_hold(req)
                else:
                    scheduler.end(req, _refusal(self._grammars.failure(pending)))

    def _waits(self, entry: tuple[Req, PendingGrammar]) -> bool:
        """Returns whether a request that waited for its grammar still does."""
        current = self._scheduler.compiling_of(entry[0].rid)
        return current is not None and current[0] is entry[0]

    def _state_of(self, building: _Building) -> int:
        return min(map(self._grammars.state, building.builds.values()))

    def _num_late(self, building: _Building) -> int:
        """Returns how many of the requests, which are in the order of their deadlines, have waited too long."""
        return sum(1 for _ in takewhile(self._grammars.is_late, (pending for _, pending in building.entries)))


def _refusal(verdict: Verdict) -> FinishReason:
    return FinishReason("abort", message=verdict.error, status_code=verdict.status_code)

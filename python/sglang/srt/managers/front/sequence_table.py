"""The unfinished sequences of all calls, by their own ids and by the ids that clients know."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.media.media_files import MediaFiles
from sglang.srt.managers.front.replica import Replica
from sglang.srt.managers.front.request_preparation import PreparedCall
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq, TokenMeta
from sglang.srt.sampling.output_logprobs import OutputLogprobs


class ActiveSequence:
    """One sequence that a scheduler owes a finish message."""

    __slots__ = (
        "first_time",
        "groups",
        "index",
        "kept_text",
        "last_time",
        "meta",
        "num_kept",
        "num_tokens",
        "prompt_logprobs",
        "replica",
        "sent_time",
        "stream",
        "trace",
    )

    def __init__(self, stream: GenerationStream, index: int, groups: set[str]) -> None:
        self.stream = stream
        self.index = index
        self.groups = groups
        """The public ids that it ends with: the request's, shared by the samples of a prompt, and the batch's."""
        self.replica: Replica | None = None
        """None: no scheduler knows it yet."""
        self.meta = TokenMeta(0, 0)
        """That of its last message."""
        self.num_tokens = 0
        """Tokens that it has been counted with in the load of its replica."""
        self.sent_time = 0.0
        """time.monotonic(), as all times here."""
        self.first_time = 0.0
        self.last_time = 0.0
        self.kept_text: list[str] = []
        """Parts of the output that the log wants to keep."""
        self.num_kept = 0
        self.prompt_logprobs: OutputLogprobs | None = None
        """Log probabilities of its prompt that have come before its first token."""
        self.trace: Any = None
        """The client's trace."""


class SequenceTable:
    """The sequences for which a scheduler owes a message with a finish reason, or will once they are sent."""

    def __init__(self, files: MediaFiles | None) -> None:
        """files: holds the arrays of the sequences' images; None if the model takes none."""
        self._files = files
        self._sequences: dict[str, ActiveSequence] = {}
        self._groups: dict[str, dict[str, None]] = {}
        """Public id of a request or a batch -> the unfinished sequences behind it, in order."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, rid: str) -> ActiveSequence:
        return self._sequences[rid]

    def get(self, rid: str) -> ActiveSequence | None:
        """Returns the sequence with this id; None if it has ended."""
        return self._sequences.get(rid)

    def find(self, request: TokenizedGenerateReq, stream: GenerationStream) -> ActiveSequence | None:
        """Returns the sequence of a stream's request; None if it has ended."""
        sequence = self._sequences.get(request.rid)
        return sequence if sequence is not None and sequence.stream is stream else None

    def rids(self) -> list[str]:
        """Returns the ids of all sequences."""
        return list(self._sequences)

    def rids_behind(self, rid: str) -> list[str]:
        """Returns the ids of the sequences that an id stands for: a request's, a batch's or one sequence's."""
        return list(self._groups.get(rid) or {rid} & self._sequences.keys())

    def refuse_taken_ids(self, call: PreparedCall, batch_rid: str | None) -> None:
        """Raises RequestError for ids in use. `batch_rid`: the one id that the caller gave, from which those of a
        batch's prompts are made."""
        taken = next((rid for rid in (batch_rid, *call.rids) if rid in self._groups), None)
        taken = taken or next((r.rid for r in call.requests if r.rid in self._sequences), None)
        if taken is not None:
            raise RequestError(f"A request with rid {taken!r} is already running.")

    def add(self, call: PreparedCall, stream: GenerationStream, batch_rid: str | None, trace: Any) -> None:
        """Adds the sequences of a call. trace: the client's trace."""
        for index, request in enumerate(call.requests):
            groups = {call.rids[index // call.num_samples]} | ({batch_rid} if batch_rid else set())
            sequence = self._sequences[request.rid] = ActiveSequence(stream, index, groups)
            sequence.trace = trace
            if self._files is not None:
                self._files.hold(request.media)
            for group in groups:
                self._groups.setdefault(group, {})[request.rid] = None

    def remove(self, rid: str, sequence: ActiveSequence) -> None:
        """Removes a sequence that has ended, and takes it out of the load of its replica."""
        del self._sequences[rid]
        if self._files is not None:
            self._files.release(sequence.stream.requests[sequence.index].media)
        if sequence.replica is not None:
            sequence.replica.aborts.pop(rid, None)
            sequence.replica.load.num_requests -= 1
            sequence.replica.load.num_tokens -= sequence.num_tokens
        for name in sequence.groups:
            del self._groups[name][rid]
            if not self._groups[name]:
                del self._groups[name]

    def on_replica(self, replica: Replica) -> list[tuple[str, ActiveSequence]]:
        """Returns the sequences that were sent to a replica, with their ids."""
        return [(rid, sequence) for rid, sequence in self._sequences.items() if sequence.replica is replica]

    def take_all(self) -> list[ActiveSequence]:
        """Returns all sequences and forgets them, without releasing what they hold."""
        sequences, self._sequences, self._groups = self._sequences, {}, {}
        return list(sequences.values())

"""The detokenizer process: turns token ids from the scheduler into text for the tokenizer manager.

Text is sent as soon as it is certain: not while its last token may be half of a character, nor while it may be the
beginning of a stop string. The state of a sequence lives from its first message to its finish.
"""

from __future__ import annotations

from sglang.srt.managers.child import READY, ChildPipe
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    BatchStrOut,
    BatchTokenIDOut,
    DecodeOptions,
    DetokenizerOutput,
    FinishReason,
    SchedulerOutput,
)
from sglang.srt.sampling.limits import longest_match
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.stop_strings import StopHold
from sglang.srt.utils.text_stream import SpelledStream, TextDecoder, TextStream


class _Plain:
    """Decoding state of a sequence whose text is never cut."""

    __slots__ = ("no_stop_trim", "stream")

    def __init__(self, stream: TextStream, no_stop_trim: bool) -> None:
        self.stream = stream
        self.no_stop_trim = no_stop_trim

    def push(self, ids: list[int]) -> str:
        return self.stream.push(ids)

    def finish(self, ids: list[int], reason: FinishReason) -> str:
        """Returns the rest of the text, without the token that stopped the sequence unless the request wants it."""
        return self.stream.push(ids if self.no_stop_trim else _without_stop_token(ids, reason)) + self.stream.finish()


class _Trimmed:
    """Decoding state of a sequence whose stop strings or patterns must not appear in the text."""

    __slots__ = ("hold", "stream")

    def __init__(self, stream: SpelledStream, options: DecodeOptions) -> None:
        self.stream = stream
        longest = max(map(longest_match, options.stop_regex), default=0)
        self.hold = StopHold(options.stop, options.stop_regex, longest)

    def push(self, ids: list[int]) -> str:
        return self.hold.push(self.stream.push(ids))

    def finish(self, ids: list[int], reason: FinishReason) -> str:
        """Returns the rest of the text, without the token or string that stopped the sequence."""
        ids = _without_stop_token(ids, reason)
        pieces, last = self.stream.push(ids[:-1]), self.stream.push(ids[-1:]) + self.stream.finish()
        return self.hold.finish(pieces, last, reason.matched if isinstance(reason.matched, str) else None)


def _without_stop_token(ids: list[int], reason: FinishReason) -> list[int]:
    return ids[:-1] if isinstance(reason.matched, int) and ids and ids[-1] == reason.matched else ids


def _sequence(decoder: TextDecoder, options: DecodeOptions) -> _Plain | _Trimmed:
    if options.no_stop_trim or not (options.stop or options.stop_regex):
        return _Plain(decoder.stream(options.skip_special_tokens), options.no_stop_trim)
    try:
        return _Trimmed(SpelledStream(decoder, options.skip_special_tokens), options)
    except ValueError:  # a pattern that cannot be compiled: the scheduler refuses the request for it
        return _Plain(decoder.stream(options.skip_special_tokens), options.no_stop_trim)


class Detokenizer:
    """Turns scheduler messages into text messages. `decoder` of None (no tokenizer) leaves all text empty."""

    def __init__(self, decoder: TextDecoder | None) -> None:
        self._decoder = decoder
        self._sequences: dict[str, _Plain | _Trimmed] = {}

    @property
    def num_sequences(self) -> int:
        """Returns the number of sequences that have not ended."""
        return len(self._sequences)

    def handle(self, message: SchedulerOutput) -> DetokenizerOutput:
        """Returns the message for the tokenizer manager that corresponds to one message of the scheduler."""
        if not isinstance(message, BatchTokenIDOut):
            return message
        texts = [""] * len(message.rids) if self._decoder is None else self._texts(self._decoder, message)
        return BatchStrOut(
            rids=message.rids,
            new_text=texts,
            new_ids=message.new_ids,
            finish=message.finish,
            meta=message.meta,
            logprobs=message.logprobs,
            drafts=message.drafts,
            hidden=message.hidden,
        )

    def _texts(self, decoder: TextDecoder, message: BatchTokenIDOut) -> list[str]:
        sequences, texts = self._sequences, []
        for rid, ids, finish, options in zip(
            message.rids, message.new_ids, message.finish, message.options, strict=True
        ):
            if options is not None:
                sequences[rid] = _sequence(decoder, options)
            elif rid not in sequences:  # refused before its first token
                sequences[rid] = _sequence(decoder, DecodeOptions())
            if finish is None:
                texts.append(sequences[rid].push(ids))
            else:
                texts.append(sequences.pop(rid).finish(ids, finish))
        return texts


def run_detokenizer(args: ServerArgs, ports: ipc.Ports, rank: int, start_pipe: ChildPipe) -> None:
    """Runs the detokenizer process."""
    from sglang.srt.utils.hf_tokenizer import load_tokenizer

    inbox, outbox = ipc.detokenizer_inbox(ports), ipc.detokenizer_outbox(ports)
    tokenizer = load_tokenizer(args)
    detokenizer = Detokenizer(None if tokenizer is None else tokenizer.text_decoder())
    start_pipe.send_bytes(READY)
    while True:
        outbox.send(detokenizer.handle(inbox.recv()))

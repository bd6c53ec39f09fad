"""The detokenizer process: token ids from the scheduler become text for the tokenizer manager.

Text goes out as soon as it is certain: not while its last token may be half of a character, nor while it may be the
beginning of a stop string. The state of a sequence lives from its first message to its finish.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from sglang.srt.managers import ipc
from sglang.srt.managers.io_struct import (
    BatchStrOut,
    BatchTokenIDOut,
    DecodeOptions,
    DetokenizerOutput,
    FinishReason,
    SchedulerOutput,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.stop_strings import StopHold
from sglang.srt.utils.text_stream import TextDecoder, TextStream


class _Sequence:
    """Decoding state of one sequence."""

    __slots__ = ("hold", "no_stop_trim", "stream")

    def __init__(self, stream: TextStream, options: DecodeOptions) -> None:
        self.stream = stream
        self.no_stop_trim = options.no_stop_trim
        wants_hold = bool(options.stop or options.stop_regex) and not options.no_stop_trim
        self.hold = StopHold(options.stop, options.stop_regex) if wants_hold else None

    def push(self, ids: list[int]) -> str:
        text = self.stream.push(ids)
        return text if self.hold is None else self.hold.push(text)

    def finish(self, ids: list[int], reason: FinishReason) -> str:
        """The rest of the text: without the token or string that stopped the sequence, unless the request wants it."""
        matched = None if self.no_stop_trim else reason.matched
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        head, tail = self.stream.push(ids[:-1]), self.stream.push(ids[-1:]) + self.stream.finish()
        if self.hold is None:
            return head + tail
        return self.hold.finish(head, tail, matched if isinstance(matched, str) else None)


class Detokenizer:
    """Turns messages into messages. `decoder` of None (no tokenizer) leaves all text empty."""

    def __init__(self, decoder: TextDecoder | None) -> None:
        self._decoder = decoder
        self._sequences: dict[str, _Sequence] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def handle(self, message: SchedulerOutput) -> DetokenizerOutput:
        """What the tokenizer manager gets for one message of the scheduler."""
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
        )

    def _texts(self, decoder: TextDecoder, message: BatchTokenIDOut) -> list[str]:
        sequences, texts = self._sequences, []
        for rid, ids, finish, options in zip(
            message.rids, message.new_ids, message.finish, message.options, strict=True
        ):
            if options is not None:
                sequences[rid] = _Sequence(decoder.stream(options.skip_special_tokens), options)
            elif rid not in sequences:  # refused before its first token
                sequences[rid] = _Sequence(decoder.stream(True), DecodeOptions())
            if finish is None:
                texts.append(sequences[rid].push(ids))
            else:
                texts.append(sequences.pop(rid).finish(ids, finish))
        return texts


def run_detokenizer(args: ServerArgs, ports: ipc.Ports, rank: int, start_pipe: Connection) -> None:
    """Main of the detokenizer process."""
    from sglang.srt.utils.hf_tokenizer import load_tokenizer

    inbox, outbox = ipc.detokenizer_inbox(ports), ipc.detokenizer_outbox(ports)
    tokenizer = load_tokenizer(args)
    detokenizer = Detokenizer(None if tokenizer is None else tokenizer.text_decoder())
    start_pipe.send_bytes(b"ready")
    while True:
        outbox.send(detokenizer.handle(inbox.recv()))

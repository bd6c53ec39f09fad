from __future__ import annotations

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.detokenizer.detokenizer_manager import Detokenizer
from sglang.srt.managers.wire.io_struct import (
    BatchStrOut,
    BatchTokenIDOut,
    ControlReply,
    DecodeOptions,
    FinishReason,
    SchedulerReady,
    SchedulerStats,
    TokenMeta,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(tokenizer.text_decoder())


Row = tuple[str, list[int], FinishReason | None, DecodeOptions | None]


def handle(detokenizer: Detokenizer, *rows: Row) -> list[str]:
    message = BatchTokenIDOut(
        rids=[row[0] for row in rows],
        new_ids=[row[1] for row in rows],
        finish=[row[2] for row in rows],
        meta=[TokenMeta(1, 1)] * len(rows),
        options=[row[3] for row in rows],
        logprobs=[None] * len(rows),
    )
    out = detokenizer.handle(message)
    assert isinstance(out, BatchStrOut)
    assert (out.rids, out.new_ids, out.finish) == (message.rids, message.new_ids, message.finish)
    return out.new_text


def run(detokenizer: Detokenizer, chunks: list[list[int]], finish: FinishReason, options: DecodeOptions) -> list[str]:
    """The pieces of one sequence."""
    pieces = []
    for i, ids in enumerate(chunks):
        last = finish if i == len(chunks) - 1 else None
        pieces += handle(detokenizer, ("r", ids, last, options if i == 0 else None))
    assert detokenizer.num_sequences == 0
    return pieces


def test_sequences_do_not_mix(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("One 😀 two"), tokenizer.encode("Drei 你好 vier!")
    texts = {"a": "", "b": ""}
    length = max(len(first), len(second))
    for i in range(length):
        rows: list[Row] = []
        for rid, ids in (("a", first), ("b", second)):
            if i < len(ids):
                finish = FinishReason("length") if i == len(ids) - 1 else None
                rows.append((rid, ids[i : i + 1], finish, DecodeOptions() if i == 0 else None))
        for row, text in zip(rows, handle(detokenizer, *rows), strict=True):
            texts[row[0]] += text
    assert texts == {"a": "One 😀 two", "b": "Drei 你好 vier!"}
    assert detokenizer.num_sequences == 0


def test_stop_token_is_trimmed_unless_wanted(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes, end")
    finish = FinishReason("stop", matched=ids[-1])
    kept = tokenizer.decode(ids[:-1])
    assert "".join(run(detokenizer, [ids], finish, DecodeOptions())) == kept
    assert "".join(run(detokenizer, [ids[:-1], ids[-1:]], finish, DecodeOptions())) == kept
    assert "".join(run(detokenizer, [ids], finish, DecodeOptions(no_stop_trim=True))) == "yes, end"


def test_special_tokens(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>")
    end = FinishReason("stop", matched=ids[-1])
    assert "".join(run(detokenizer, [ids], end, DecodeOptions())) == "ab"
    assert "".join(run(detokenizer, [ids], end, DecodeOptions(skip_special_tokens=False))) == "a<|im_start|>b"
    everything = DecodeOptions(skip_special_tokens=False, no_stop_trim=True)
    assert "".join(run(detokenizer, [ids], end, everything)) == "a<|im_start|>b<|im_end|>"


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_stop_string_never_shows(detokenizer: Detokenizer, tokenizer: Tokenizer, chunk: int) -> None:
    ids = tokenizer.encode("The answer is 42.\n\nUser: more")
    length = next(i for i in range(len(ids)) if "\n\nUser:" in tokenizer.decode(ids[:i]))
    chunks = [ids[i : min(i + chunk, length)] for i in range(0, length, chunk)]
    options = DecodeOptions(stop=["\n\nUser:", "###"])
    finish = FinishReason("stop", matched="\n\nUser:")
    pieces = run(detokenizer, chunks, finish, options)
    assert "".join(pieces) == "The answer is 42."
    if chunk == 1:
        assert len([piece for piece in pieces if piece]) > 3  # and not all of it is held back
    untrimmed = run(detokenizer, chunks, finish, DecodeOptions(stop=["\n\nUser:"], no_stop_trim=True))
    assert "".join(untrimmed) == tokenizer.decode(ids[:length])


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_with_a_special_token_is_cut(
    detokenizer: Detokenizer, tokenizer: Tokenizer, chunk: int, skip: bool
) -> None:
    ids = tokenizer.encode("The end\n<|im_end|>")
    chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    for stop in ("\n<|im_end|>", "<|im_end|>"):
        options = DecodeOptions(stop=[stop], skip_special_tokens=skip)
        pieces = run(detokenizer, chunks, FinishReason("stop", matched=stop), options)
        assert "".join(pieces) == "The end\n<|im_end|>".removesuffix(stop)


def test_a_pattern_that_only_the_check_knew_does_not_end_the_process(detokenizer: Detokenizer) -> None:
    refusal = FinishReason("abort", message="not a regular expression", status_code=400)
    assert handle(detokenizer, ("r", [], refusal, DecodeOptions(stop_regex=["("]))) == [""]


def test_held_text_comes_out_at_the_end(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("tail ##")
    pieces = run(detokenizer, [[i] for i in ids], FinishReason("length"), DecodeOptions(stop=["###"]))
    assert "".join(pieces) == "tail ##"


def test_a_refused_request_has_no_state(detokenizer: Detokenizer) -> None:
    refusal = FinishReason("abort", message="full", status_code=503)
    assert handle(detokenizer, ("new", [], refusal, None)) == [""]
    assert detokenizer.num_sequences == 0


def test_other_messages_pass(detokenizer: Detokenizer) -> None:
    for message in (ControlReply("1"), SchedulerStats(), SchedulerReady({"a": 1})):
        assert detokenizer.handle(message) is message


def test_without_a_tokenizer_ids_pass() -> None:
    assert handle(Detokenizer(None), ("r", [1, 2], None, DecodeOptions())) == [""]

"""External texts: from documents to sorted tokens in a file, with limits, and what the device has of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.drafts.ngram.drafter import DeviceCorpus
from sglang.srt.errors import UserError
from sglang.srt.layers.native_ngram import ngram_drafts
from sglang.srt.managers.front import corpora as corpora_module
from sglang.srt.managers.front import request_preparation
from sglang.srt.managers.front.control_calls import Undo
from sglang.srt.managers.front.corpora import MAX_CORPORA, ExternalCorpora, read_documents
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.wire.io_struct import ControlReply


class Schedulers:
    """Encodes characters, and loads what it is told to."""

    def __init__(self, capacity: int) -> None:
        self.corpus = DeviceCorpus(capacity, "cpu")
        self.ok = True

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    async def control(self, kind: str, args: dict[str, Any], timeout: float, undo: Undo) -> ControlReply:
        assert kind == undo.kind == "set_corpora"
        self.corpus.load(self.corpus.read(Path(args["path"])))
        if not self.ok:  # another replica refuses
            self.corpus.load(self.corpus.read(Path(undo.args["path"])))
        return ControlReply("", self.ok, "" if self.ok else "no")

    def draft_token(self, text: str, count: int) -> str:
        tokens = [ord(letter) for letter in text]
        history = torch.zeros(2, 100, dtype=torch.int32)
        history[1, : len(tokens)] = torch.tensor(tokens)
        slots, lens, last = torch.tensor([1]), torch.tensor([len(tokens) - 1]), torch.tensor(tokens[-1:])
        draft_tokens = ngram_drafts(history, slots, lens, last, 8, count, self.corpus.arrays)
        return "".join(map(chr, draft_tokens[0].tolist()))


def corpora(schedulers: Schedulers, directory: Path, max_tokens: int = 60) -> ExternalCorpora:
    return ExternalCorpora(schedulers.encode, schedulers.control, directory, 8, max_tokens)


def test_texts_come_and_go(tmp_path: Path) -> None:
    async def run() -> None:
        schedulers = Schedulers(60)
        texts = corpora(schedulers, tmp_path)
        assert schedulers.draft_token("the ca", 3) == "aaa"
        assert await texts.add("a", ["the cat sat", "a dog"]) == ("a", 18)
        assert schedulers.draft_token("the ca", 5) == "t sat"
        assert schedulers.draft_token("sat", 3) == "\0a "  # of the separator no token is made
        name, count = await texts.add(None, ["the cart"])
        assert texts.token_counts == {"a": 18, name: 9} and count == 9
        assert schedulers.draft_token("the car", 1) == "t"
        await texts.remove("a")
        assert schedulers.draft_token("the c", 3) == "art"
        await texts.remove(name)
        assert schedulers.draft_token("the ca", 3) == "aaa" and not texts.token_counts
        assert len(list(tmp_path.iterdir())) == 1  # the version that stands

    asyncio.run(run())


def test_a_long_document_lets_others_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_preparation, "PIECE_CHARS", 3)
    schedulers = Schedulers(60)
    lengths: list[int] = []
    encode = schedulers.encode

    async def counted(text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return await encode(text, add_special_tokens)

    monkeypatch.setattr(schedulers, "encode", counted)
    _, num_tokens = asyncio.run(corpora(schedulers, tmp_path).add("a", ["abcdefgh", "ij"]))
    assert lengths == [3, 3, 2, 2] and num_tokens == 10 + 2


def test_many_short_documents_let_others_in_between(tmp_path: Path) -> None:
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    class Counting(Schedulers):
        async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            turns.append(num_turns)
            return await super().encode(text, add_special_tokens)

    async def run() -> None:
        counting = asyncio.create_task(count_turns())
        await corpora(Counting(1000), tmp_path, 1000).add("a", ["ab"] * 200)
        counting.cancel()

    turns: list[int] = []
    asyncio.run(run())
    assert len(turns) == len(set(turns)) == 200


def test_own_tokens_come_first_where_they_agree_as_far(tmp_path: Path) -> None:
    async def run() -> None:
        schedulers = Schedulers(60)
        await corpora(schedulers, tmp_path).add("a", ["xyz1"])
        assert schedulers.draft_token("xyz2 xyz", 1) == "2"
        assert schedulers.draft_token("yz2 xyz", 1) == "1"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("corpus_id", "documents", "message"),
    [
        ("a", ["b"], "corpus 'a' already"),
        ("b", ["x" * 52], "--speculative-ngram-external-corpus-max-tokens 60"),
        ("b", ["x" * 25, "y" * 26], "--speculative-ngram-external-corpus-max-tokens 60"),
        ("b", ["", ""], "not empty"),
        ("b" * 257, ["b"], "256 characters"),
    ],
)
def test_refused_texts_change_nothing(corpus_id: str, documents: list[str], message: str, tmp_path: Path) -> None:
    async def run() -> None:
        schedulers = Schedulers(60)
        texts = corpora(schedulers, tmp_path)
        await texts.add("a", ["1234567"])
        with pytest.raises(RequestError, match=message):
            await texts.add(corpus_id, documents)
        assert texts.token_counts == {"a": 8} and schedulers.draft_token("123", 4) == "4567"
        await texts.add("c", ["z" * 51])  # what is left

    asyncio.run(run())


def test_unknown_and_too_many(tmp_path: Path) -> None:
    async def run() -> None:
        texts = corpora(Schedulers(2 * MAX_CORPORA + 2), tmp_path, 2 * MAX_CORPORA + 2)
        with pytest.raises(RequestError, match="no corpus 'a'"):
            await texts.remove("a")
        for i in range(MAX_CORPORA):
            await texts.add(str(i), ["x"])
        with pytest.raises(RequestError, match=f"{MAX_CORPORA} corpora already"):
            await texts.add("more", ["x"])

    asyncio.run(run())


def test_schedulers_that_refuse_are_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        schedulers = Schedulers(60)
        schedulers.ok = False
        texts = corpora(schedulers, tmp_path)
        with pytest.raises(RequestError, match="no") as caught:
            await texts.add("a", ["x"])
        assert caught.value.status_code == 500 and not texts.token_counts
        assert schedulers.draft_token("the ca", 3) == "aaa", "replicas that had taken it have what they had before"
        schedulers.ok = True
        await texts.add("a", ["the cat sat"])
        schedulers.ok = False
        with pytest.raises(RequestError, match="no"):
            await texts.add("b", ["the cart"])
        with pytest.raises(RequestError, match="no"):
            await texts.remove("a")
        assert schedulers.draft_token("the ca", 5) == "t sat" and [*texts.token_counts] == ["a"]

    asyncio.run(run())


def test_files_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('"one"\n\n{"text": "two", "id": 3}\n')
    assert read_documents(str(path)) == ["one", "two"]
    plain = tmp_path / "text.md"
    plain.write_text('"one"\n')
    assert read_documents(str(plain)) == ['"one"\n']
    path.write_text('"one"\n{"content": "two"}\n')
    with pytest.raises(UserError, match="line 2: expected a JSON string"):
        read_documents(str(path))
    path.write_text("one\n")
    with pytest.raises(UserError, match="line 1"):
        read_documents(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        read_documents(str(tmp_path / "none"))


def test_an_update_that_the_client_leaves_is_done_whole(tmp_path: Path) -> None:
    """Once it has begun; the next one waits for it."""

    class Slow(Schedulers):
        def __init__(self) -> None:
            super().__init__(60)
            self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()

        async def control(self, kind: str, args: dict[str, Any], timeout: float, undo: Undo) -> ControlReply:
            self.is_asked.set()
            await self.may_answer.wait()
            return await super().control(kind, args, timeout, undo)

    async def run() -> None:
        schedulers = Slow()
        texts = corpora(schedulers, tmp_path)
        leaving = asyncio.create_task(texts.add("a", ["the cat sat"]))
        await schedulers.is_asked.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        following = asyncio.create_task(texts.add("b", ["a dog"]))
        for _ in range(9):
            await asyncio.sleep(0)
        schedulers.may_answer.set()
        await following
        assert texts.token_counts == {"a": 12, "b": 6}
        assert schedulers.draft_token("the ca", 5) == "t sat" and schedulers.draft_token("a d", 2) == "og"
        assert len(list(tmp_path.iterdir())) == 1

    asyncio.run(run())


def test_a_client_that_leaves_before_the_update_begins_changes_nothing(tmp_path: Path) -> None:
    async def never(text: str, add_special_tokens: bool) -> list[int]:
        await asyncio.Event().wait()
        return []

    async def run() -> None:
        schedulers = Schedulers(60)
        texts = ExternalCorpora(never, schedulers.control, tmp_path, 8, 60)
        leaving = asyncio.create_task(texts.add("a", ["the cat sat"]))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(RequestError, match="no corpus 'a'"):
            await texts.remove("a")  # waits for no one

    asyncio.run(run())


def test_files_of_versions_that_failed_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        schedulers = Schedulers(60)
        texts = corpora(schedulers, tmp_path)
        await texts.add("a", ["the cat sat"])
        schedulers.ok = False
        with pytest.raises(RequestError):
            await texts.add("b", ["a dog"])
        with monkeypatch.context() as patch:
            patch.setattr(corpora_module.np, "savez", broken)
            with pytest.raises(OSError, match="disk full"):
                await texts.add("c", ["a cow"])
        assert (tmp_path / "corpora-3.npz").exists() is False
        schedulers.ok = True
        await texts.add("d", ["a hen"])
        assert len(list(tmp_path.iterdir())) == 1 and set(texts.token_counts) == {"a", "d"}

    def broken(path: Path, **arrays: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    asyncio.run(run())

"""External texts in which n-gram drafts are looked up: tokenized and sorted here, then read by the schedulers.

All ranks must propose the same tokens, so they take a new version of the texts with one control message, between the
same two steps. The message names a file in the directory of the sockets, because tens of megabytes are too much for a
message.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang.srt.errors import UserError
from sglang.srt.managers.front.control_calls import Undo
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.request_preparation import pieces
from sglang.srt.managers.wire.io_struct import ControlReply
from sglang.srt.utils.suffix_order import suffix_order

MAX_CORPORA = 256
MAX_ID_CHARS = 256
UPDATE_LIMIT_S = 600.0

Tokens = npt.NDArray[np.int32]


class ExternalCorpora:
    """The texts by id. Changes are made one after another. An update of the schedulers that has begun is completed even
    if the client leaves."""

    def __init__(
        self,
        encode: Callable[[str, bool], Awaitable[list[int]]],
        control: Callable[[str, dict[str, Any], float, Undo], Awaitable[ControlReply]],
        directory: Path,
        longest_suffix: int,
        max_tokens: int,
    ) -> None:
        """encode(text, add_special_tokens) and control(kind, args, timeout, undo): the tokenizer manager's. max_tokens:
        limit of all texts together, with a separator between two."""
        self._encode, self._control = encode, control
        self._directory = directory
        self._longest, self._max_tokens = longest_suffix, max_tokens
        self._tokens: dict[str, Tokens] = {}
        self._changing = asyncio.Lock()
        self._version = 0
        self._oldest = 0
        """The version that the schedulers have: at first none, of which there is no file."""
        self._update: asyncio.Task[None] | None = None

    @property
    def token_counts(self) -> dict[str, int]:
        """Returns the number of tokens by corpus id, including a separator for each document."""
        return {name: len(tokens) for name, tokens in self._tokens.items()}

    async def add(self, corpus_id: str | None, documents: Sequence[str]) -> tuple[str, int]:
        """Adds a corpus and returns its id and number of tokens. Raises RequestError."""
        name = corpus_id or uuid.uuid4().hex
        if len(name) > MAX_ID_CHARS:
            raise RequestError(f"corpus_id may have {MAX_ID_CHARS} characters; it has {len(name)}")
        async with self._change():
            if name in self._tokens:
                raise RequestError(f"there is a corpus {name!r} already; remove it with /remove_external_corpus first")
            if len(self._tokens) >= MAX_CORPORA:
                raise RequestError(f"there are {MAX_CORPORA} corpora already; remove one, or add several texts at once")
            tokens = await self._tokenized(documents, self._max_tokens - sum(map(len, self._tokens.values())))
            await self._replace({**self._tokens, name: tokens})
        return name, len(tokens)

    async def remove(self, corpus_id: str) -> None:
        """Removes a corpus. Raises RequestError if there is none of this id."""
        async with self._change():
            if corpus_id not in self._tokens:
                raise RequestError(f"there is no corpus {corpus_id!r}; /list_external_corpora names all")
            await self._replace({name: tokens for name, tokens in self._tokens.items() if name != corpus_id})

    async def _tokenized(self, documents: Sequence[str], room: int) -> Tokens:
        """Tokenizes piece by piece, so that other requests need not wait for a whole document. Lets them run after each
        of many short documents too, which are tokenized on the event loop."""
        parts: list[Tokens] = []
        for piece in chain.from_iterable((*pieces(document), None) for document in documents):
            part = np.array([-1] if piece is None else await self._encode(piece, False), np.int32)
            room -= len(part)
            if room < 0:
                raise RequestError(
                    f"the texts have more tokens than --speculative-ngram-external-corpus-max-tokens {self._max_tokens}"
                    " leaves; remove a corpus, send less, or start the server with a larger number"
                )
            parts.append(part)
            await asyncio.sleep(0)
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if not (tokens >= 0).any():
            raise RequestError("documents must hold at least one text that is not empty")
        return tokens

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Makes other changes wait until this one has ended, with its update."""
        await self._changing.acquire()
        try:
            yield
        finally:
            if self._update is None or self._update.done():
                self._changing.release()
            else:
                self._update.add_done_callback(lambda _: self._changing.release())

    async def _replace(self, corpora: Mapping[str, Tokens]) -> None:
        self._update = asyncio.create_task(self._hand_over(corpora))
        await asyncio.shield(self._update)

    async def _hand_over(self, corpora: Mapping[str, Tokens]) -> None:
        """Gives the schedulers a new version. Where some of them do not get it, the others go back to the one before,
        whose file is kept until then."""
        before = self._path(self._oldest)
        if not self._oldest:
            await self._write(before, [])
        self._version += 1
        path = self._path(self._version)
        await self._write(path, list(corpora.values()))
        undo = Undo("set_corpora", {"path": str(before)})
        reply = await self._control("set_corpora", {"path": str(path)}, UPDATE_LIMIT_S, undo)
        if not reply.ok:
            raise RequestError(reply.message, 500)
        self._tokens = dict(corpora)
        for version in range(self._oldest, self._version):
            self._path(version).unlink(missing_ok=True)
        self._oldest = self._version

    async def _write(self, path: Path, corpora: Sequence[Tokens]) -> None:
        try:
            await asyncio.to_thread(_write_sorted, path, corpora, self._longest)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _path(self, version: int) -> Path:
        return self._directory / f"corpora-{version}.npz"


def _write_sorted(path: Path, corpora: Sequence[Tokens], longest: int) -> None:
    """Writes the file in the format that `drafts.ngram.drafter.DeviceCorpus.read` reads."""
    tokens = np.concatenate(corpora) if corpora else np.empty(0, np.int32)
    np.savez(path, tokens=tokens, order=suffix_order(tokens, longest))


def read_documents(path: str) -> list[str]:
    """Returns the texts of --speculative-ngram-external-corpus-path: each line of a `.jsonl` file, a JSON string or an
    object with `text`; any other file is one text. Raises UserError."""
    source = f"--speculative-ngram-external-corpus-path {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} cannot be read: {error}") from None
    if not path.endswith(".jsonl"):
        return [text]
    documents = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{source}, line {number}: {error}") from None
        document = value.get("text") if isinstance(value, dict) else value
        if not isinstance(document, str):
            raise UserError(f"{source}, line {number}: expected a JSON string, or an object with the string `text`.")
        documents.append(document)
    return documents

"""Tries a checkpoint's tokenizer.json in a process with limits before any process of the server loads it.

Its patterns and replacements are untrusted: some crash the library that runs them, or multiply every text.
"""

from __future__ import annotations

import itertools
import json
import os
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.managers.front.job_process import JobProcess, ProcessEnded, begin_jobs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.process_limits import limit_memory
from sglang.srt.utils.tokenizer_files import read_tokenizer_files

LOAD_LIMIT_S = 180.0
STAGE_LIMIT_S = 30.0
WORKING_BYTES = 4 << 30
MAX_GROWTH = 64
"""Most characters that a normalizer may make of one; Unicode's own normal forms make up to 18."""
_RUN = 64
_LOAD = "tokenizer.json"
_KINDS = ("a", "1", " ", "\n", ".", "é", "中", "🙂")
"""Characters of each class that patterns tell apart."""


class TokenizerTrial:
    """A trial that starts on construction; `check` waits for the outcome."""

    def __init__(self, args: ServerArgs, working_bytes: int = WORKING_BYTES, limit_s: float = STAGE_LIMIT_S) -> None:
        """Starts the trial. Raises UserError for files that are not a tokenizer."""
        self._process: JobProcess | None = None
        self._limit_s = limit_s
        if args.skip_tokenizer_init:
            return
        assert args.tokenizer_path is not None
        files = read_tokenizer_files(
            resolve_model_path(args.tokenizer_path, args.revision, args.download_dir, weights=False)
        )
        self._path = files.json_path
        if self._path.is_file() and not files.has_own_code:  # its own code would run anyway, if the user trusts it
            self._process = JobProcess(run_trial, (str(self._path), working_bytes), "tokenizer-trial")
            self._process.start()

    def check(self) -> None:
        """Waits for the outcome (blocks). Raises UserError, which names the key of the file that is at fault."""
        if self._process is None:
            return
        stage = _LOAD
        try:
            while message := self._receive(stage):
                kind, _, text = message.partition(":")
                if kind == "failed":
                    self._refuse(stage, text)
                stage = text
        except ProcessEnded as error:
            self._refuse(stage, "it takes too long" if error.is_late else "it crashes, or takes too much memory")
        finally:
            self._process.kill()

    def _receive(self, stage: str) -> str:
        assert self._process is not None
        limit_s = LOAD_LIMIT_S if stage == _LOAD else self._limit_s
        return self._process.receive(lambda seconds: seconds >= limit_s).decode()

    def _refuse(self, stage: str, reason: str) -> None:
        where = str(self._path) if stage == _LOAD else f"{self._path}, {stage}"
        raise UserError(
            f"{where}: the tokenizer fails on short texts ({reason}). Give the directory of another one with "
            "--tokenizer-path, or serve token ids with --skip-tokenizer-init."
        ) from None


def run_trial(path: str, working_bytes: int, connection: Connection) -> None:
    """Runs the process. Sends `stage:KEY` before it tries that key, `failed:REASON` on failure, and nothing on
    success."""
    begin_jobs()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # silences the stack that the library prints before each panic
    import tokenizers

    limit_memory(working_bytes)
    with suppress(OSError):  # nobody waits any more
        try:
            rust = tokenizers.Tokenizer.from_file(path)
            texts = [*_runs(), *_replacement_texts(path)]
            for key, work in _stages(rust):
                connection.send_bytes(f"stage:{key}".encode())
                for text in texts:
                    _try(work, text)
        except BaseException as error:  # a panic of the library is not an Exception
            connection.send_bytes(f"failed:{str(error)[:500]}".encode())
        else:
            connection.send_bytes(b"")


def _try(work: Callable[[str], object], text: str) -> None:
    """Ignores errors that only say that a vocabulary has no token for a text."""
    try:
        work(text)
    except Exception as error:
        if type(error) is not Exception:
            raise


def _stages(rust: Any) -> Iterator[tuple[str, Callable[[str], object]]]:
    def normalized(text: str) -> None:
        length = len(rust.normalizer.normalize_str(text))
        if length > MAX_GROWTH * (len(text) + 1):
            raise ValueError(f"it makes {length} characters of {len(text)}")

    if rust.normalizer is not None:
        yield "normalizer", normalized
    if rust.pre_tokenizer is not None:
        yield "pre_tokenizer", rust.pre_tokenizer.pre_tokenize_str
    yield "model", lambda text: rust.encode(text, add_special_tokens=False)
    yield "post_processor", lambda text: rust.encode(text[:_RUN], add_special_tokens=True)
    yield "decoder", lambda text: rust.decode(rust.encode(text[:_RUN]).ids, skip_special_tokens=False)


def _runs() -> Iterator[str]:
    """Yields runs of each character that a rule may match, and runs of one kind before another: patterns that
    backtrack fail late there."""
    for character in string.printable:
        yield character * _RUN
    for first, second in itertools.product(_KINDS, repeat=2):
        yield first * _RUN + second


def _replacement_texts(path: str) -> Iterator[str]:
    """Yields runs of the texts that the file's own replacements match."""

    def patterns(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            pattern = value.get("pattern")
            if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
                yield pattern["String"][:_RUN] * _RUN
            for each in value.values():
                yield from patterns(each)
        elif isinstance(value, list):
            for each in value:
                yield from patterns(each)

    file = json.loads(Path(path).read_text(encoding="utf-8"))
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        yield from patterns(file.get(key))

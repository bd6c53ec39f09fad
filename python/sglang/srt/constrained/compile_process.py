"""Process that compiles grammars first, because a client's grammar may take too long or too much memory, or crash.

It loads the library and the vocabulary once and forks a child for each grammar. The child has limits of its own and can
be killed, and its memory is free again when it ends. Each scheduler process then compiles a grammar that passes once
more, in a thread: the library's serialized form repeats the automaton for every rule (88 MB for a schema of 100
properties that compiles in 0.1 s and takes 0.9 MB), so that reading it takes longer and more memory.

    scheduler (leader) --- Job, Cancel ---> CompileServer --- fork ---> one child a grammar
                       <----- Verdict -----
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.constrained.grammar import GrammarError, GrammarKey, GrammarKind
from sglang.srt.constrained.grammar_backends import DEFAULT_BACKEND, GrammarBackend, make_backend
from sglang.srt.constrained.source_limits import check_source
from sglang.srt.constrained.vocabulary import write_vocabulary
from sglang.srt.utils.process_limits import die_with_parent, limit_memory, lower_limit

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

MIB = 1 << 20
NICENESS = 5
"""Niceness of the process and its children, since it starts while the server loads the model."""


class CompileLimits(msgspec.Struct, frozen=True):
    """Limits of compiling one grammar."""

    seconds: float = 30.0
    contended_seconds: float = 5.0
    """Seconds that a grammar may take while others wait for a place, so that endless grammars cannot block them."""
    max_wait_seconds: float = 30.0
    """Seconds within which every waiting grammar should get its turn: the more wait, the less time each gets."""
    memory_bytes: int = 1024 * MIB
    """Address space that compiling one grammar may take beyond the process's own."""
    result_bytes: int = 64 * MIB
    """Memory of one compiled grammar."""
    places: int = 4
    """Grammars that are compiled at the same time."""


class Setup(msgspec.Struct):
    """The first message. `tokenizer`: the ServerArgs that load it, if the file `vocabulary` does not exist yet."""

    vocabulary: str
    vocab_size: int
    eos_ids: list[int]
    tokenizer: dict[str, Any]
    compile_threads: int = 1
    limits: CompileLimits = CompileLimits()
    backend: str = DEFAULT_BACKEND


MAX_COMPILE_THREADS = 4
TOKENIZER_ARGS = ("model_path", "tokenizer_path", "revision", "download_dir", "trust_remote_code")
"""The arguments with which the process that compiles grammars loads the tokenizer."""


def setup_for(args: ServerArgs, model: ModelConfig, vocabulary: Path) -> Setup | None:
    """Returns the setup of the compile process; None if the server runs without grammars."""
    if args.grammar_backend == "none" or args.skip_tokenizer_init:
        return None
    return Setup(
        str(vocabulary),
        model.vocab_size,
        sorted(model.eos_token_ids),
        {name: getattr(args, name) for name in TOKENIZER_ARGS},
        max(1, min(MAX_COMPILE_THREADS, (os.cpu_count() or 1) // 4)),
        backend=args.grammar_backend or DEFAULT_BACKEND,
    )


class Job(msgspec.Struct, tag=True):
    """Request to compile a grammar."""

    id: int
    kind: GrammarKind
    source: str


class Cancel(msgspec.Struct, tag=True):
    """Request to stop a job."""

    id: int


class Verdict(msgspec.Struct):
    """Result of a job. `error`: a message for the client; empty if the grammar is good. `size_bytes`: of the compiled
    grammar."""

    id: int = 0
    error: str = ""
    status_code: int = 400
    seconds: float = 0.0
    size_bytes: int = 0


@dataclass(slots=True)
class _Child:
    pid: int
    pipe: Connection
    started: float
    job: Job


class CompileServer:
    """Forks, watches and ends the children. It has one thread only, because it forks."""

    def __init__(self, control: Connection, setup: Setup) -> None:
        self._control = control
        self._limits = setup.limits
        self._backend = make_backend(setup.backend, Path(setup.vocabulary), setup.compile_threads)
        self._unusable = ""
        self._waiting: deque[Job] = deque()
        self._children: dict[Connection, _Child] = {}
        self._decode = msgspec.msgpack.Decoder(Job | Cancel).decode
        self._load(setup)

    def _load(self, setup: Setup) -> None:
        making = None
        if not Path(setup.vocabulary).exists():  # in a child, so that the memory of loading is freed
            making = _fork(partial(_make_vocabulary, setup))
        self._backend.import_library(torch=False)
        if making is not None:
            pid, pipe = making
            with contextlib.suppress(EOFError):
                self._unusable = pipe.recv_bytes().decode()
            os.waitpid(pid, 0)
            pipe.close()
            if not self._unusable and not Path(setup.vocabulary).exists():
                self._unusable = "the tokenizer could not be loaded."
        if not self._unusable:
            self._backend.load()
        gc.collect()
        gc.freeze()  # children share these pages as long as no collection writes to them

    def serve(self) -> None:
        """Serves requests until the other end of the control pipe is closed."""
        while True:
            try:
                for ready in multiprocessing.connection.wait([self._control, *self._children], self._next_limit_s()):
                    if ready is self._control:
                        self._receive()
                    elif (child := self._children.get(ready)) is not None:  # type: ignore[call-overload]
                        self._finish(child)  # unless it was cancelled a moment ago
                self._fill_places()
                for child in list(self._children.values()):
                    self._end_if_over(child)
                self._fill_places()
            except (EOFError, ConnectionError):
                break
        for child in list(self._children.values()):
            self._end(child)

    def _receive(self) -> None:
        message = self._decode(self._control.recv_bytes())
        if isinstance(message, Job):
            if self._unusable:
                self._send_verdict(Verdict(message.id, f"Grammars are not available: {self._unusable}"))
            else:
                self._waiting.append(message)
            return
        self._waiting = deque(job for job in self._waiting if job.id != message.id)
        for child in list(self._children.values()):
            if child.job.id == message.id:
                self._end(child)

    def _fill_places(self) -> None:
        while self._waiting and len(self._children) < self._limits.places:
            job = self._waiting.popleft()
            pid, pipe = _fork(partial(_compile, self._backend, job, self._limits))
            self._children[pipe] = _Child(pid, pipe, time.monotonic(), job)

    def _limit_s(self) -> float:
        if not self._waiting:
            return self._limits.seconds
        share = self._limits.max_wait_seconds * self._limits.places / len(self._waiting)
        return min(self._limits.contended_seconds, share)

    def _next_limit_s(self) -> float | None:
        if not self._children:
            return None
        oldest = min(child.started for child in self._children.values())
        return max(0.0, oldest + self._limit_s() - time.monotonic())

    def _end_if_over(self, child: _Child) -> None:
        limit_s = self._limit_s()
        if time.monotonic() - child.started < limit_s:
            return
        self._end(child)
        error, status_code = f"The grammar took more than {limit_s:.2g} s to compile; simplify it.", 400
        if limit_s < self._limits.seconds:
            error, status_code = f"{error[:-1]}, or send it again when no others wait.", 503
        self._send_verdict(Verdict(child.job.id, error, status_code))

    def _finish(self, child: _Child) -> None:
        try:
            verdict = msgspec.msgpack.decode(child.pipe.recv_bytes(), type=Verdict)
        except (EOFError, OSError):
            verdict = None
        status = self._end(child)
        if verdict is None and status == "SIGKILL":  # the system killed it
            error = "The system ended the grammar's compiler, as it does when memory is short; send the request again."
            verdict = Verdict(child.job.id, error, 503)
        self._send_verdict(verdict or Verdict(child.job.id, f"The grammar ended its compiler ({status}); simplify it."))

    def _end(self, child: _Child) -> str:
        """Returns how the child ended; kills it if it still runs."""
        del self._children[child.pipe]
        child.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def _send_verdict(self, verdict: Verdict) -> None:
        self._control.send_bytes(msgspec.msgpack.encode(verdict))


# --- in the child -----------------------------------------------------------------------------------------------------


def _fork(work: Callable[[], bytes]) -> tuple[int, Connection]:
    """Runs `work` in a child. Returns its id and a pipe with the result, which breaks if the child dies."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        die_with_parent()
        theirs.send_bytes(work())
    finally:
        os._exit(0)


def _make_vocabulary(setup: Setup) -> bytes:
    """Writes the vocabulary file. Returns an error message; empty on success."""
    try:
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils.hf_tokenizer import load_tokenizer

        tokenizer = load_tokenizer(ServerArgs.from_kwargs(**setup.tokenizer))
        assert tokenizer is not None
        write_vocabulary(Path(setup.vocabulary), tokenizer, setup.vocab_size, setup.eos_ids)
    except Exception as error:  # tokenizers raise all kinds; the server goes on without grammars
        return f"the tokenizer cannot be used for them ({type(error).__name__}: {error}).".encode()
    return b""


def _compile(backend: GrammarBackend, job: Job, limits: CompileLimits) -> bytes:
    _limit_this_process(limits)
    started = time.monotonic()
    verdict = Verdict(job.id)
    try:
        key = GrammarKey(job.kind, job.source)
        check_source(key)
        grammar = backend.compile(key)
        verdict.size_bytes = grammar.size_bytes
        if grammar.size_bytes > limits.result_bytes:
            verdict.error = (
                f"The compiled grammar takes {grammar.size_bytes / MIB:.0f} MiB, at most "
                f"{limits.result_bytes / MIB:.0f} MiB are allowed; simplify it."
            )
        elif rule := grammar.compiled.unfinishable_rule():
            verdict.error = f"No text satisfies the grammar: its rule {rule!r} needs itself without end."
        elif grammar.is_stuck():
            verdict.error = "No text satisfies the grammar: no token of the vocabulary can be its first."
    except GrammarError as error:
        verdict.error = str(error)
    except (MemoryError, OSError, RuntimeError):  # RuntimeError: threads that could not be started
        verdict.error = f"Compiling the grammar takes more than {limits.memory_bytes / MIB:.0f} MiB; simplify it."
    verdict.seconds = time.monotonic() - started
    return msgspec.msgpack.encode(verdict)


def _limit_this_process(limits: CompileLimits) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stderr.fileno())  # the library's warnings about clients' grammars
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the system ends this process before any other
    limit_memory(limits.memory_bytes)
    lower_limit(resource.RLIMIT_CPU, int(limits.seconds * (os.cpu_count() or 1)) + 1)
    lower_limit(resource.RLIMIT_CORE, 0)


def main() -> None:
    """Runs `python -m sglang.srt.constrained.compile_process FD`, FD being one end of a socket pair whose other end the
    leading scheduler process has."""
    die_with_parent()
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # the scheduler is gone
        setup = msgspec.msgpack.decode(control.recv_bytes(), type=Setup)
        CompileServer(control, setup).serve()


if __name__ == "__main__":
    main()

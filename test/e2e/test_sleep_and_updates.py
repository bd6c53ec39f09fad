"""Random sequences of sleep, wake, new weights, requests, pauses, aborts and killed processes: whatever came before,
tokens are those of a fresh engine with the weights of now, and no call waits for ever.

`make test` runs one sequence; `make thorough` one for each seed, layout, draft and stored form.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import psutil
import pytest
import torch
from forked_servers import forked_children
from other_weights import write_other_weights
from safetensors.torch import load_file

import sglang
from sglang.embedded import ADAPTERS_PATH, DEFAULT_MODEL_PATH, EAGLE3_PATH
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.utils.engine_state import TAGS, WEIGHTS

T = TypeVar("T")
PROMPTS = ["The capital of France is", "One, two, three,", "What is 15+27?"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 150}
LIMIT_S = 300.0
"""Seconds after which a call counts as one that waits for ever."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "a copy": {"enable_weights_cpu_backup": True},
    "two ranks": {"tp_size": 2},
    "two stages": {"pp_size": 2},
    "two replicas": {"dp_size": 2, "enable_weights_cpu_backup": True},
    "a draft": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": EAGLE3_PATH},
    "fp8": {"quantization": "fp8"},
    "main memory": {"enable_hierarchical_cache": True, "hicache_size": 1},
    "an adapter": {"lora_paths": {"ahoy": f"{ADAPTERS_PATH}/ahoy"}},
}
OF_TOKENS = ("quantization", "lora_paths")
"""Flags that change tokens."""


def engine(**flags: Any) -> sglang.Engine:
    flags = {"dtype": "float32", "max_total_tokens": 2048, "model_path": DEFAULT_MODEL_PATH, **flags}
    return sglang.Engine(enable_memory_saver=True, **flags)


def asked(served: sglang.Engine) -> Any:
    """The answers, of which the second is the adapter's where there is one."""
    return served.generate(PROMPTS, GREEDY, lora_path=[None, "ahoy", None] if served.server_args.lora_paths else None)


def tokens(served: sglang.Engine) -> list[list[int]]:
    return [answer["output_ids"] for answer in asked(served)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return DEFAULT_MODEL_PATH, str(write_other_weights(tmp_path_factory.mktemp("other") / "model"))


@pytest.fixture(scope="module")
def fresh(folders: tuple[str, str]) -> Callable[[str], list[tuple[list[list[int]], list[int]]]]:
    """Returns, by configuration, the tokens of fresh engines with both weights: of short requests, and of a long
    one."""
    found: dict[str, list[tuple[list[list[int]], list[int]]]] = {}

    def of(configuration: str) -> list[tuple[list[list[int]], list[int]]]:
        form = {name: flag for name, flag in CONFIGURATIONS[configuration].items() if name in OF_TOKENS}
        if (key := str(form)) not in found:
            found[key] = []
            for folder in folders:
                with forked_children(), engine(model_path=folder, **form) as running:
                    found[key].append((tokens(running), running.generate(PROMPTS[0], LONG)["output_ids"]))
            assert found[key][0] != found[key][1]
        return found[key]

    return of


class Sequence:
    """One engine, what a client does with it, and what it is to be in."""

    def __init__(self, served: sglang.Engine, random: Random, folders: tuple[str, str], expected: Any) -> None:
        self.served, self.random, self.folders, self.expected = served, random, folders, expected
        self.sent = [load_file(Path(folder) / "model.safetensors") for folder in folders]
        self.now, self.asleep = 0, set[str]()
        self.lost = self.written = self.broken = self.paused = False
        """Weights lost in a sleep; written by tensors, so that no directory has them; zeroed; generation paused."""
        self.missing = set[str]()
        """Tensors that were not sent since weights were lost or zeroed."""
        self.log: list[str] = []
        self._threads = ThreadPoolExecutor(4)

    @property
    def serves(self) -> bool:
        return not (self.asleep or self.lost or self.broken)

    def call(self, work: Callable[[], T]) -> T:
        """Does what must not wait for ever."""
        return self._threads.submit(work).result(LIMIT_S)

    def step(self) -> None:
        kinds = ("sleep", "release", "wake", "wake", "disk", "tensors", "wrong", "partial", "bracket", "reset", "pause")
        kind = self.random.choice((*kinds, "continue", "abort", "flush", "keep", "keep", "ask", "meet", "meet"))
        self.log.append(kind)
        getattr(self, f"do_{kind}")()
        assert self.state == (self.asleep, self.lost, self.broken)
        self.do_ask()

    @property
    def state(self) -> tuple[set[str], bool, bool]:
        """Returns what the engine says: what sleeps, whether weights are lost, and whether they are broken."""
        state = self.served._manager.state
        return set(state.asleep), state.weights_lost, bool(state.broken)

    # --- requests -----------------------------------------------------------------------------------------------------

    def do_ask(self) -> None:
        if not self.serves:
            with pytest.raises(RequestError) as refused:
                self.call(lambda: tokens(self.served))
            assert refused.value.status_code == 503
        elif not self.paused:
            assert self.call(lambda: tokens(self.served)) == self.expected[self.now][0]

    def do_abort(self) -> None:
        if self.serves and not self.paused:
            stream = iter(self.served.generate(PROMPTS[0], LONG, stream=True))
            self.call(lambda: next(stream))
            self.served.abort_request(abort_all=True)
            self.call(lambda: list(stream))

    def do_keep(self) -> None:
        """A request is kept over a sleep, and perhaps over an update in it."""
        if not self.serves or self.paused:
            return
        before, stream = self.now, iter(self.served.generate(PROMPTS[0], LONG, stream=True))
        first = self.call(lambda: next(stream))
        self.call(lambda: self.served.sleep(self.random.choice((1, 2)), "keep"))
        self._slept(set(TAGS), not self.served._manager.state.weights_lost)
        if self.random.random() < 0.5:
            self.do_wake([WEIGHTS])
            self.random.choice((self.do_disk, self.do_tensors))()
        self.do_wake(None)
        if self.lost:  # they were sent, and are sent again
            self.do_disk()
        *_, last = self.call(lambda: [first, *stream])
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert len(last["output_ids"]) == LONG["max_new_tokens"]
        if self.now == before:
            assert last["output_ids"] == self.expected[self.now][1]

    def do_meet(self) -> None:
        """Requests, a sleep and an update at the same time, in whatever order they are taken."""
        if not self.serves or self.paused:
            return
        new, mode, level = self.random.randrange(2), self.random.choice(("abort", "wait", "keep")), 1
        calls: dict[str, Callable[[], Any]] = {
            "sleep": lambda: self.served.sleep(level, mode),
            "update": lambda: self.served.update_weights_from_disk(self.folders[new]),
            "ask": lambda: asked(self.served),
            "ask too": lambda: asked(self.served),
        }
        chosen = self.random.sample(sorted(calls), 3)
        futures = {name: self._threads.submit(calls[name]) for name in chosen}
        results = {name: future.exception(LIMIT_S) or future.result() for name, future in futures.items()}
        before, (self.asleep, _, _) = self.now, self.state
        if "update" in results:
            ok, said, _ = results["update"]
            assert ok or "asleep" in said, said
            self.now, self.written = (new, False) if ok else (self.now, self.written)
        if "sleep" in results:
            assert results["sleep"] is None and self.asleep == set(TAGS)
        possible = [self.expected[before][0], self.expected[self.now][0]]
        for name in ("ask", "ask too"):
            answers = results.get(name, [])
            if isinstance(answers, RequestError):
                assert answers.status_code == 503
                continue
            for number, answer in enumerate(answers):
                if answer["meta_info"]["finish_reason"]["type"] != "abort":
                    assert answer["output_ids"] in [each[number] for each in possible]

    # --- sleep --------------------------------------------------------------------------------------------------------

    def do_sleep(self) -> None:
        level = self.random.choice((1, 2))
        self.call(lambda: self.served.sleep(level, self.random.choice(("abort", "wait"))))
        self._slept(set(TAGS), level == 1)

    def do_release(self) -> None:
        tags = self.random.sample(TAGS, self.random.randint(1, 3))
        self.call(lambda: self.served.release_memory_occupation(tags))
        self._slept(set(tags), self.served.server_args.enable_weights_cpu_backup)

    def _slept(self, tags: set[str], keeps: bool) -> None:
        if WEIGHTS in tags - self.asleep and not keeps:
            self.lost, self.missing = True, set(self.sent[0])
        self.asleep |= tags

    def do_wake(self, tags: Any = ()) -> None:
        if tags == ():
            tags = self.random.choice((None, None, [WEIGHTS], self.random.sample(TAGS, 2)))
        self.call(lambda: self.served.resume_memory_occupation(tags))
        was, self.asleep = set(self.asleep), self.asleep - set(tags or TAGS)
        if was and not self.asleep and not self.written and not self.broken:
            self.lost = False  # read again
            self.missing.clear()

    # --- weights ------------------------------------------------------------------------------------------------------

    def _updated(self, ok: bool, said: str, now: int, written: bool) -> None:
        assert ok == (WEIGHTS not in self.asleep), said
        if ok:
            self.now, self.written, self.lost, self.broken = now, written and self._in_place, False, False
            self.missing.clear()

    @property
    def _in_place(self) -> bool:
        return self.served.server_args.quantization is None

    def do_disk(self) -> None:
        now = self.random.randrange(2)
        ok, said, _ = self.call(
            lambda: self.served.update_weights_from_disk(self.folders[now], flush_cache=self.random.random() < 0.5)
        )
        self._updated(ok, said, now, False)

    def do_tensors(self) -> None:
        now = self.random.randrange(2)
        self._updated(*self.call(lambda: self.served.update_weights_from_tensor(self.sent[now].items())), now, True)

    def do_partial(self) -> None:
        """Some of the tensors of now again. Weights that were lost are there again when each tensor was sent since, or
        if the directory has the rest."""
        names = self.random.choice((sorted(self.sent[0])[::2], sorted(self.sent[0])[1::2], sorted(self.sent[0])[:99]))
        lost = self.lost, self.broken
        ok, said = self.call(
            lambda: self.served.update_weights_from_tensor([(name, self.sent[self.now][name]) for name in names])
        )
        assert ok == (WEIGHTS not in self.asleep), said
        if ok and self._in_place:
            self.written = True
            self.missing -= set(names)
            if not self.missing:
                self.lost = self.broken = False
            assert (self.lost, self.broken) == lost or not self.missing
        elif ok:
            self.lost = self.broken = False

    def do_wrong(self) -> None:
        name = self.random.choice(sorted(self.sent[0]))
        sent = self.sent[1 - self.now] | {name: torch.zeros(3)}
        assert not self.call(lambda: self.served.update_weights_from_tensor(sent.items()))[0]
        assert not self.call(lambda: self.served.update_weights_from_disk("/nothing"))[0]

    def do_bracket(self) -> None:
        """An update in several calls, with a sleep of the caches between them."""
        now, names = self.random.randrange(2), sorted(self.sent[0])
        ok, said = self.call(self.served.begin_weight_update)
        assert ok == (WEIGHTS not in self.asleep), said
        for part in (names[::2], names[1::2]) if ok else ():
            tensors = [(name, self.sent[now][name]) for name in part]
            ok, said = self.call(lambda tensors=tensors: self.served.update_weights_from_tensor(tensors))
            assert ok, said
        ended, said = self.call(self.served.end_weight_update)
        assert ended == ok, said
        self._updated(ok, said, now, True)

    def do_reset(self) -> None:
        if WEIGHTS in self.asleep:
            with pytest.raises(RequestError, match="asleep"):
                self.call(lambda: self.served.check_weights("reset_tensors"))
        else:
            self.call(lambda: self.served.check_weights("reset_tensors"))
            self.broken, self.missing = True, set(self.sent[0])

    # --- the rest -----------------------------------------------------------------------------------------------------

    def do_pause(self) -> None:
        mode = self.random.choice(("abort", "retract", "in_place"))
        self.call(lambda: self.served.pause_generation(mode))
        self.paused = True

    def do_continue(self) -> None:
        self.call(self.served.continue_generation)
        if self.serves:
            self.paused = False

    def do_flush(self) -> None:
        assert self.call(self.served.flush_cache)

    def kill(self) -> None:
        """Kills a rank, perhaps asleep or in the middle of a request. Another replica serves on; without one every call
        is refused, and none waits for ever."""
        replicas = self.served._handle._replicas
        ranks = {name: pid for name, pid in replicas[-1].process_ids.items() if name != "detokenizer"}
        name = self.random.choice(sorted(ranks))
        self.log.append(f"kill {name}")
        stream = None
        if self.serves and not self.paused:
            stream = iter(self.served.generate([PROMPTS[0]] * 4, LONG, stream=True))
            self.call(lambda: next(stream))
        os.kill(ranks[name], signal.SIGKILL)
        with suppress(RequestError):
            self.call(lambda: list(stream or ()))
        manager, end = self.served._manager, time.monotonic() + LIMIT_S
        while len(manager.serving_replicas) == len(replicas) and manager.status.name == "UP":
            assert time.monotonic() < end
            time.sleep(0.02)
        if len(replicas) > 1:
            return
        for call in (lambda: tokens(self.served), self.served.flush_cache):
            with pytest.raises(RequestError):
                self.call(call)
        with suppress(RequestError):  # it may sleep already
            self.call(lambda: self.served.sleep(1))
        assert not self.call(lambda: self.served.update_weights_from_disk(self.folders[0]))[0]
        self.call(self.served.shutdown)
        assert not [pid for pid in ranks.values() if psutil.pid_exists(pid)]


def run(configuration: str, seed: int, steps: int, folders: tuple[str, str], fresh: Any) -> None:
    """Has one sequence, with a killed rank behind it and, where there is another replica, more steps."""
    flags, random = CONFIGURATIONS[configuration], Random(seed)
    expected = fresh(configuration)
    with forked_children(), engine(**flags) as served:
        sequence = Sequence(served, random, folders, expected)
        try:
            for _ in range(steps):
                sequence.step()
            sequence.kill()
            if served.server_args.dp_size > 1:
                for _ in range(steps // 4):
                    sequence.step()
                sequence.do_wake(None)
                sequence.do_disk()
                sequence.do_continue()
                sequence.do_ask()
        except BaseException as error:
            error.add_note(f"{configuration}, seed {seed}: {' '.join(sequence.log)}")
            raise


def test_a_sequence(folders: tuple[str, str], fresh: Any) -> None:
    run("one rank", 0, 30, folders, fresh)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sequences(configuration: str, seed: int, folders: tuple[str, str], fresh: Any) -> None:
    run(configuration, seed, 60, folders, fresh)

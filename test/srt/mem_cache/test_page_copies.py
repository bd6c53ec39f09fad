"""Copies of pages between the device and main memory: by the kernel (interpreted here) and by torch, through buffers
and without, in bundles of every width, against plain indexing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import interpreter
import numpy as np
import pytest
import torch
from pairs import some_of

from sglang.srt.mem_cache import copy_engine
from sglang.srt.mem_cache.cache_tier import CopyState, PageMoves
from sglang.srt.mem_cache.copy_engine import BusBudget, Copier, PendingCopy, ThreadedCopies, page_lock
from sglang.srt.mem_cache.layerwise_load import FIRST, LayerWaits, LayerwiseLoad
from sglang.srt.mem_cache.page_pool import PagePool

PARTS = {
    "keys and values": (2048, 2048),
    "latents and an indexer": (1152, 132, 132),
    "packed latents": (656, 656),
    "one byte wide": (7, 33, 1),
    "states": (12_288, 40, 9000),
}
NUM_PAGES, NUM_HOST_PAGES = 21, 30


def new_parts(widths: tuple[int, ...], device: str) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(sum(widths))
    return [torch.randint(0, 256, (NUM_PAGES, width), dtype=torch.uint8, generator=rng).to(device) for width in widths]


def expected(parts: list[torch.Tensor], pages: np.ndarray) -> torch.Tensor:
    return torch.cat([part.cpu()[pages] for part in parts], 1)


def moves_of(count: int, in_runs: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    on_device = rng.permutation(np.arange(1, NUM_PAGES))[:count]
    in_host = np.arange(5, 5 + count) if in_runs else rng.permutation(np.arange(1, NUM_HOST_PAGES + 1))[:count]
    return on_device, in_host


def round_trip(pool: PagePool, copier: Copier, count: int, in_runs: bool, by_kernel: bool) -> None:
    """What is saved is what the pages were, and what is loaded is what was saved; nothing else changes."""
    on_device, in_host = moves_of(count, in_runs)
    wanted, before = expected(pool.parts, on_device), pool.host.clone()
    copier.copy(pool, PageMoves(on_device, in_host), True, by_kernel)
    copier.finish()
    before[in_host - 1] = wanted
    assert torch.equal(pool.host, before)
    others = np.setdiff1d(np.arange(NUM_PAGES), on_device)
    kept = [part.clone() for part in pool.parts]
    for part in pool.parts:
        part[torch.from_numpy(on_device)] = 99
    copier.copy(pool, PageMoves(in_host, on_device), False, by_kernel)
    copier.finish()
    assert torch.equal(expected(pool.parts, on_device), wanted)
    assert all(torch.equal(part[others], old[others]) for part, old in zip(pool.parts, kept, strict=True))


@contextmanager
def page_locked(pool: PagePool, device: torch.device) -> Iterator[None]:
    """What stays locked when its memory is given back may not be locked again."""
    if device.type == "cuda":
        page_lock([pool])
        assert pool.locked
    pool.locked = True
    yield
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(pool.host.data_ptr())


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("kind", "staging"),
    some_of(
        itertools.product(PARTS, (32, 2048, 1 << 16)),
        {("keys and values", 2048), ("latents and an indexer", 1 << 16), ("one byte wide", 32), ("states", 1 << 16)},
    ),
)
def test_kernel_moves_pages(kind: str, staging: int) -> None:
    if staging < 100 and kind == "states":
        pytest.skip("hundreds of bundles")
    device = torch.device(interpreter.DEVICE)
    pool = PagePool(new_parts(PARTS[kind], interpreter.DEVICE), NUM_HOST_PAGES, staging, by_kernel=True)
    with page_locked(pool, device):
        copier = Copier(device, max(staging, pool.bundles[0].width))
        before = [part.clone() for part in pool.parts]
        copier.warm_up([pool])
        copier.finish()
        assert all(torch.equal(part, old) for part, old in zip(pool.parts, before, strict=True))
        for in_runs in (True, False):
            for by_kernel in (False, True):
                round_trip(pool, copier, 11, in_runs, by_kernel)
        round_trip(pool, copier, 1, True, False)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)


@pytest.mark.parametrize(
    ("kind", "staging"),
    some_of(
        itertools.product(PARTS, (32, 2048, 1 << 16)),
        [(kind, staging) for kind in PARTS for staging in (32, 2048, 1 << 16) if (kind, staging) != ("states", 32)],
    ),
)
def test_torch_moves_pages(kind: str, staging: int) -> None:
    pool = PagePool(new_parts(PARTS[kind], "cpu"), NUM_HOST_PAGES, staging)
    copier = Copier(torch.device("cpu"), max(staging, 8))
    for in_runs in (True, False):
        for count in (1, 13):
            round_trip(pool, copier, count, in_runs, False)


@pytest.mark.parametrize("kind", PARTS)
def test_layers_are_loaded_one_after_the_other(kind: str) -> None:
    widths = PARTS[kind]
    layers = [2 * (i // 2) for i in range(len(widths))]
    pool = PagePool(new_parts(widths, "cpu"), NUM_HOST_PAGES, layers=layers)
    states = PagePool(new_parts((40, 16), "cpu"), NUM_HOST_PAGES)
    copier = Copier(torch.device("cpu"), 1 << 16)
    on_device, in_host = moves_of(11, False)
    wanted = [expected(one.parts, on_device) for one in (pool, states)]
    for one in (pool, states):
        copier.copy(one, PageMoves(on_device, in_host), True)
        for part in one.parts:
            part[:] = 0
    arrivals, seen = LayerwiseLoad(sorted(set(layers)), False), []

    class Recorded(LayerwiseLoad):
        def arrived(self, index: int, stream: object) -> None:
            seen.append([bool(part[torch.from_numpy(on_device)].any()) for part in (*states.parts, *pool.parts)])

    copier.load_layers([pool, states], [PageMoves(in_host, on_device)] * 2, Recorded(arrivals.layers[1:], False))
    assert seen == [
        [True, True, *(index > 0 and of <= arrivals.layers[index] for of in layers)]
        for index in range(len(arrivals.layers))
    ]
    assert all(
        torch.equal(expected(one.parts, on_device), old) for one, old in zip((pool, states), wanted, strict=True)
    )


def test_a_wait_ends_with_the_copy() -> None:
    arrivals = LayerwiseLoad([0, 4], False)
    waits = LayerWaits([arrivals])
    arrivals.arrived(0, None)
    waits.before(FIRST)
    waiting = threading.Thread(target=waits.before, args=(5,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    arrivals.end_waits()
    waiting.join(300)
    assert not waiting.is_alive()
    waits.finish()


def test_paced_copies_take_the_time_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "PACED_PIECE", 3000)
    budget = BusBudget()
    assert budget.rows(1000, 50) == 50
    budget.rate = 1e6
    assert budget.rows(1000, 50) == 3 and budget.rows(9000, 50) == 1
    pool = PagePool(new_parts(PARTS["latents and an indexer"], "cpu"), NUM_HOST_PAGES)
    start = time.monotonic()
    round_trip(pool, Copier(torch.device("cpu"), 1 << 16, budget), 13, True, False)
    assert time.monotonic() - start >= (2 * 13 * pool.page_bytes - 3000) / budget.rate


@pytest.mark.parametrize("staging", [8, 64, 100_000])
def test_bundles_cover_a_page_once(staging: int) -> None:
    for widths in PARTS.values():
        pool = PagePool(new_parts(widths, "cpu"), 1, staging)
        assert [bundle.start for bundle in pool.bundles] == list(range(0, pool.page_bytes, staging))
        for bundle in pool.bundles:
            ends = [segment.start + segment.part.shape[1] for segment in bundle.segments]
            assert [segment.start for segment in bundle.segments] == [0, *ends[:-1]] and ends[-1] == bundle.width
            assert bundle.width <= staging


class BrokenCopies(ThreadedCopies):
    def run(self, pending: PendingCopy, copier: Copier) -> None:
        raise RuntimeError("broken")


def test_a_failed_copy_ends_when_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[bool] = []
    monkeypatch.setattr(Copier, "finish", lambda self: finished.append(True))
    copies = BrokenCopies([], "cpu", num_threads=0)
    assert copies._end(PendingCopy([], True, None), Copier(torch.device("cpu"), 8)) is CopyState.FAILED
    assert finished == [True]


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_which_copies_a_kernel_makes(
    locked: bool, has_kernel: bool, asked: bool, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[str] = []
    monkeypatch.setattr(Copier, "_by_kernel", lambda *_: ways.append("kernel"))
    monkeypatch.setattr(Copier, "_in_buffers", lambda *_: ways.append("buffers"))
    copier = Copier.__new__(Copier)
    copier.launches, copier.device = None, torch.device("cpu")
    page_bytes = copy_engine.SHORT_PIECE - short
    pool = SimpleNamespace(locked=locked, by_kernel=has_kernel, page_bytes=page_bytes, bundles=["bundle"])
    copier.copy(pool, PageMoves(np.array([3]), np.array([5])), to_host=True, by_kernel=asked)  # type: ignore[arg-type]
    assert ways == ["kernel" if locked and has_kernel and (asked or short) else "buffers"]


def test_copies_have_ended_on_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[str, object]] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            self.synchronize = lambda: waited.append(("ended", self.stream))

        def record(self, stream: object) -> None:
            self.stream = stream
            waited.append(("recorded", stream))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    copier = Copier.__new__(Copier)
    copier.launches, copier.bus = "launches", "bus"  # type: ignore[assignment]
    copier.finish()
    assert waited == [(what, stream) for stream in ("launches", "bus") for what in ("recorded", "ended")]
    copier.launches = copier.bus = None
    copier.finish()
    assert len(waited) == 4, "a CPU has none"


def test_memory_is_allocated_before_it_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside whatever comes before `start`, such as graphs, and once."""
    allowed, done, order = threading.Event(), threading.Event(), []

    def populate(pools: object) -> None:
        order.append("allocates")
        allowed.wait(300)
        order.append("is allocated")

    def lock(pools: object) -> None:
        order.append("locks")
        done.set()

    monkeypatch.setattr(copy_engine, "populate", populate)
    monkeypatch.setattr(copy_engine, "page_lock", lock)
    monkeypatch.setattr(copy_engine, "Copier", lambda *_, **__: SimpleNamespace(warm_up=lambda _: None))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    copies = ThreadedCopies([], "cpu")
    copies.device = torch.device("cuda", 0)
    copies.populate()
    order.append("captures")
    copies.start()
    assert not done.wait(0.05)
    allowed.set()
    assert copies.wait_prepared(10)
    assert sorted(order[:2]) == ["allocates", "captures"]
    assert order[2:] == ["is allocated", "locks"]

"""The arenas' allocator over a driver that maps main memory: addresses stay, memory comes and goes."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang.srt.errors import UserError
from sglang.srt.layers.moe.cpu_experts.library import find_compiler
from sglang.srt.model_executor.memory_saver.device_arenas import MAPPED, Segments, compile_arena, load_arena
from sglang.srt.utils.engine_state import KV_CACHE, TAGS, WEIGHTS

MB = 1 << 20


class Arena:
    """The library over the fake driver, in this process."""

    def __init__(self, driver: Path) -> None:
        self.fake = ctypes.CDLL(str(driver))
        self.fake.fake_used.restype = ctypes.c_uint64
        self.fake.fake_limit.argtypes = [ctypes.c_uint64]
        self.segments = Segments(load_arena(str(driver)))
        self.library = self.segments.library
        self.library.arena_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def allocate(self, tag: str, size: int) -> int | None:
        function = getattr(self.library, f"arena_allocate_{TAGS.index(tag)}")
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        address: int | None = function(size, 0, None)
        return address

    @property
    def used(self) -> int:
        return int(self.fake.fake_used())


def alone(check: Callable[[Arena], None], driver: Path) -> int:
    """Runs a check in a process of its own, since the library has state. Returns its status."""
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            check(Arena(driver))
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = find_compiler()
    assert compiler is not None
    library = tmp_path_factory.mktemp("driver") / "libfake.so"
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(library)], check=True)
    compile_arena()
    return library


def comes_and_goes(arena: Arena) -> None:
    first, second = arena.allocate(WEIGHTS, 3 * MB), arena.allocate(WEIGHTS, 2 * MB)
    cache = arena.allocate(KV_CACHE, 20 * MB)
    assert first and second and cache
    assert arena.fake.fake_mode() == 0, "the mode of captures is as before"
    assert arena.used == (4 + 2 + 20) * MB
    for _ in range(50):
        ctypes.memset(first, 7, 3 * MB)
        ctypes.memset(cache, 8, 20 * MB)
        arena.segments.call("unmap", WEIGHTS)
        assert arena.used == 20 * MB
        assert ctypes.string_at(cache, 1) == b"\x08", "other tags stay"
        arena.segments.call("map", WEIGHTS)
        assert ctypes.string_at(first, 3 * MB).count(b"\x07") == 0, "the content was given back"
        assert [segment[:2] for segment in arena.segments.all(WEIGHTS)] == [(first, 4 * MB), (second, 2 * MB)]
    arena.segments.call("prune", WEIGHTS, second)
    assert arena.used == 24 * MB
    arena.segments.call("unmap", WEIGHTS)
    arena.segments.call("map", WEIGHTS)
    assert [segment[2] == MAPPED for segment in arena.segments.all(WEIGHTS)] == [True, False]
    for address in (first, second, cache):
        arena.library.arena_free(address, 0, 0, None)
    assert arena.used == 0


def waits_for_memory(arena: Arena) -> None:
    places = [arena.allocate(WEIGHTS, 2 * MB) for _ in range(4)]
    arena.segments.call("unmap", WEIGHTS)
    arena.fake.fake_limit(7 * MB)
    with pytest.raises(MemoryError, match="CUDA error 2"):
        arena.segments.call("map", WEIGHTS)
    assert arena.used == 0, "all segments or none"
    assert arena.allocate(KV_CACHE, 8 * MB) is None
    assert arena.library.arena_last_error() == 2
    arena.fake.fake_limit(8 * MB)
    arena.segments.call("map", WEIGHTS)
    for place in places:
        assert place
        ctypes.memset(place, 1, 2 * MB)


def reads_what_is_gone(arena: Arena) -> None:
    place = arena.allocate(WEIGHTS, 2 * MB)
    assert place
    arena.segments.call("unmap", WEIGHTS)
    ctypes.string_at(place, 1)


@pytest.mark.parametrize("check", [comes_and_goes, waits_for_memory])
def test_arena(check: Callable[[Arena], None], driver: Path) -> None:
    assert alone(check, driver) == 0


def test_what_is_gone_cannot_be_read(driver: Path) -> None:
    assert alone(reads_what_is_gone, driver) == -11


def test_without_a_driver() -> None:
    with pytest.raises(UserError, match="virtual memory management"):
        load_arena("libthere_is_none.so")

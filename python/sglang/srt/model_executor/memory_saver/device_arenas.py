"""Arenas on a GPU: torch allocates them through `csrc/arena.c`, in memory pools of their own."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import free_memory_bytes
from sglang.srt.layers.moe.cpu_experts.library import find_compiler
from sglang.srt.utils.engine_state import CUDA_GRAPH, TAGS

SOURCE = Path(__file__).with_name("csrc") / "arena.c"
OPTIONS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread")
DRIVER = "libcuda.so.1"
MAPPED = 1
"""`enum state` of arena.c."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def compile_arena() -> Path:
    """Compiles the library unless that has been done, and returns its file. Raises UserError."""
    compiler = find_compiler()
    if compiler is None:
        raise UserError("--enable-memory-saver needs a C compiler: install gcc, or set CC")
    digest = hashlib.sha256(repr((OPTIONS, compiler)).encode() + SOURCE.read_bytes())
    to = envs.SGLANG_CACHE_DIR / "memory_saver" / f"{digest.hexdigest()[:24]}.so"
    if to.exists():
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        library = str(Path(folder, "arena.so"))
        command = [compiler, *OPTIONS, str(SOURCE), "-o", library, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"--enable-memory-saver: {' '.join(command)}\n{done.stderr[:2000]}")
        os.replace(library, to)  # other ranks may compile the same
    return to


@functools.cache
def load_arena(driver: str = DRIVER) -> ctypes.CDLL:
    """Returns the library, connected with the driver. Raises UserError."""
    library = ctypes.CDLL(str(compile_arena()))
    library.arena_prune.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.arena_segment.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]
    library.arena_open.argtypes = [ctypes.c_char_p]
    if library.arena_open(driver.encode()):
        raise UserError(f"--enable-memory-saver needs CUDA's virtual memory management, which {driver} lacks")
    return library


class Segments:
    """The segments of the library, by tag."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def all(self, tag: str) -> list[tuple[int, int, int]]:
        """Returns the address, the size and the state of each segment of a tag."""
        number, told = TAGS.index(tag), (ctypes.c_uint64 * 3)()
        segments = []
        for index in range(self.library.arena_count(number)):
            self.library.arena_segment(number, index, told)
            segments.append((int(told[0]), int(told[1]), int(told[2])))
        return segments

    def call(self, name: str, tag: str, *args: int) -> None:
        """Calls a function of the library for a tag. Raises MemoryError with CUDA's code."""
        code = getattr(self.library, f"arena_{name}")(TAGS.index(tag), *args)
        if code:
            raise MemoryError(f"CUDA error {code} from {name} of {tag}")


class _Memory:
    """Memory of the device, as torch takes it from other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class DeviceArenas:
    """The arenas of this process's GPU."""

    def __init__(self) -> None:
        """Raises UserError where they cannot be had."""
        if any("expandable_segments:true" in os.environ.get(name, "").lower() for name in ALLOCATOR_SETTINGS):
            raise UserError("--enable-memory-saver does not go with expandable_segments:True of torch's allocator")
        self._segments = Segments(load_arena())
        path = str(compile_arena())
        self._allocators = [
            torch.cuda.memory.CUDAPluggableAllocator(path, f"arena_allocate_{number}", "arena_free")
            for number in range(len(TAGS))
        ]
        self._pools: list[torch.cuda.MemPool] = []
        """A pool for each region, held for good: pruned segments must not be allocated from."""
        self.graph_pool: Any = self._new_pool(CUDA_GRAPH).id

    def _new_pool(self, tag: str) -> torch.cuda.MemPool:
        self._pools.append(torch.cuda.MemPool(self._allocators[TAGS.index(tag)].allocator()))
        return self._pools[-1]

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """Allocates in the arena of `tag` inside the block."""
        pool = self._new_pool(tag)
        with torch.cuda.use_mem_pool(pool):
            yield
        torch.cuda.synchronize()
        for segment in pool.snapshot():
            if not segment["allocated_size"] and not segment["active_size"]:
                self._segments.call("prune", tag, segment["address"])

    def size(self, tag: str) -> int:
        """Returns the bytes of an arena, asleep or awake."""
        return sum(size for _, size, state in self._segments.all(tag) if state in (MAPPED, MAPPED + 1))

    def segments(self, tag: str) -> list[torch.Tensor]:
        """Returns the memory of an arena that is awake."""
        device = torch.device("cuda", torch.cuda.current_device())
        return [
            torch.as_tensor(_Memory(address, size), device=device)
            for address, size, state in self._segments.all(tag)
            if state == MAPPED
        ]

    def unmap(self, tag: str) -> None:
        """Gives the memory back."""
        torch.cuda.synchronize()
        self._segments.call("unmap", tag)

    def map(self, tag: str) -> None:
        """Takes memory at the same addresses. Raises MemoryError."""
        self._segments.call("map", tag)

    def free_bytes(self) -> int | None:
        """Returns the bytes that the GPU has free, after torch has given back what it keeps."""
        torch.cuda.empty_cache()
        return free_memory_bytes(torch.cuda.current_device())

"""The compiled library's collectives and memory that GPUs share, with their types (csrc/all_reduce.cu)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

FILE = Path(__file__).with_name("libsm120_sgl_kernel.so")

MAX_RANKS = 8
HANDLE_BYTES = 64
ALGORITHMS = ("packed", "one_shot", "two_shot", "two_shot_e4m3")
DTYPES = ("bfloat16", "float16", "float32")
"""Both by the numbers that the library has for them."""


class AllReduceArguments(ctypes.Structure):
    """As in csrc/all_reduce.cuh, which says what they mean. `stall` is memory of the host that the device can write."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "output")),
        ("workspaces", ctypes.c_void_p * MAX_RANKS),
        *((name, ctypes.c_void_p) for name in ("residual", "total", "weight", "stall")),
        *((name, ctypes.c_int64) for name in ("vectors", "data_vectors", "deadline")),
        *((name, ctypes.c_int32) for name in ("row_vectors", "rank", "ranks", "blocks", "dtype", "weight_is_float")),
        ("eps", ctypes.c_float),
    )


class Stall(ctypes.Structure):
    """What a wait that has ended at its deadline leaves behind. `missing`: 1 + the rank that it waited for."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("missing", "block", "epoch", "algorithm"))


class Collectives:
    """The library in one file. Raises OSError if it cannot be loaded, RuntimeError if it has another interface."""

    MAX_RANKS = MAX_RANKS
    MAX_BLOCKS = 64
    THREADS = 512
    """Of a block; a row of sums that nothing follows is as many vectors of 16 bytes."""
    ROW_VECTORS = 2048
    """Most vectors of a row that is normed."""
    PACKED_BYTES = 128 * 1024
    """Most of a packed message."""
    DTYPES = DTYPES
    Arguments = AllReduceArguments
    Stall = Stall

    def __init__(self, file: Path) -> None:
        self._library = ctypes.CDLL(str(file))
        self._library.sgl_error_string.restype = ctypes.c_char_p
        self._library.sgl_all_reduce_workspace_bytes.restype = ctypes.c_int64
        if self._library.sgl_all_reduce_arguments_size() != ctypes.sizeof(AllReduceArguments):
            raise RuntimeError(f"{file} is not of this version of sm120-sgl-kernel; install it again")

    def all_reduce(self, args: AllReduceArguments, algorithm: str, fused: bool, stream: int) -> None:
        """output = sum over the ranks; fused: total = sum + residual, output = its norm. Raises RuntimeError."""
        number = ALGORITHMS.index(algorithm)
        self._check(self._library.sgl_all_reduce, ctypes.byref(args), number, int(fused), ctypes.c_void_p(stream))

    def exchange(self, args: AllReduceArguments, algorithm: str, stride: int, stream: int) -> None:
        """output [ranks, vectors] = what each rank's input has for this one. `stride`: vectors from one rank's part to
        the next one's in the input; 0: all get the same. Raises RuntimeError."""
        number = ALGORITHMS.index(algorithm)
        self._check(
            self._library.sgl_exchange, ctypes.byref(args), number, ctypes.c_int64(stride), ctypes.c_void_p(stream)
        )

    def workspace_bytes(self, data_vectors: int) -> int:
        """Of a workspace with halves of so many vectors of 16 bytes."""
        return int(self._library.sgl_all_reduce_workspace_bytes(ctypes.c_int64(data_vectors)))

    def allocate(self, device: int, nbytes: int) -> tuple[int, bytes]:
        """(address, handle) of zeroed memory that peers can open. Raises RuntimeError."""
        memory, handle = ctypes.c_void_p(), ctypes.create_string_buffer(HANDLE_BYTES)
        self._check(self._library.sgl_peer_allocate, device, ctypes.c_int64(nbytes), ctypes.byref(memory), handle)
        assert memory.value is not None
        return memory.value, handle.raw

    def open(self, device: int, handle: bytes) -> int:
        """The address on `device` of a peer's memory. Raises RuntimeError."""
        memory = ctypes.c_void_p()
        self._check(self._library.sgl_peer_open, device, handle, ctypes.byref(memory))
        assert memory.value is not None
        return memory.value

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """As the collectives write, between memories that the device can address; multiples of 16 bytes. Raises
        RuntimeError."""
        vectors = ctypes.c_int64(nbytes // 16)
        self._check(
            self._library.sgl_peer_copy, ctypes.c_void_p(to), ctypes.c_void_p(source), vectors, ctypes.c_void_p(stream)
        )

    def close(self, address: int) -> None:
        """Of what was opened, before its owner frees it. Raises RuntimeError."""
        self._check(self._library.sgl_peer_close, ctypes.c_void_p(address))

    def free(self, address: int) -> None:
        """Of what was allocated. Raises RuntimeError."""
        self._check(self._library.sgl_peer_free, ctypes.c_void_p(address))

    def _check(self, function, *args) -> None:
        code = function(*args)
        if code:
            raise RuntimeError(f"{function.__name__}: {self._library.sgl_error_string(code).decode()}")


@functools.cache
def installed_collectives() -> Collectives:
    """What was compiled when this package was installed."""
    return Collectives(FILE)

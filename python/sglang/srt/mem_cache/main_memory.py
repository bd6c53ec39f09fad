"""Main memory that a GPU reads and writes itself: how it is allocated, and locked.

CUDA's own allocations of pinned memory are rounded up to powers of two by torch; memory that is mapped and then locked
takes what it holds, in huge pages, on the NUMA node of the thread that writes it first.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

HUGE_PAGE = 2 << 20
ADVISE_HUGE = 14
"""MADV_HUGEPAGE of Linux."""
ADVISE_POPULATE = 23
"""MADV_POPULATE_WRITE."""
POPULATED_PIECE = 16 << 20
"""Bytes that the system allocates at a time. Other threads that allocate large arrays wait meanwhile."""
PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable and cudaHostRegisterMapped: kernels of this process may read it."""
DEVICE_POINTER = 3
"""CU_POINTER_ATTRIBUTE_DEVICE_POINTER."""


def map_memory(num_bytes: int) -> torch.Tensor:
    """Returns [num_bytes] uint8 zeros that begin a page of the system and are alone on their pages, in huge pages if
    the system has them. Nothing is taken before it is written."""
    mapped = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]
    use_huge_pages(memory)
    return memory


def register(memory: torch.Tensor) -> int:
    """Page-locks memory, so that the GPU reads and writes it at the bus's rate. Returns CUDA's code, 0 on success."""
    flags = PORTABLE_AND_MAPPED
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), flags))


def device_address(memory: torch.Tensor) -> int:
    """Returns the address under which kernels read a tensor: that of page-locked main memory may differ from the
    host's, as under Windows."""
    if memory.is_cuda or not torch.cuda.is_available():
        return memory.data_ptr()
    address = ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    host = ctypes.c_uint64(memory.data_ptr())
    code = driver.cuPointerGetAttribute(ctypes.byref(address), DEVICE_POINTER, host)
    if code:
        raise RuntimeError(f"the GPU cannot address main memory (CUDA error {code}): it is not page-locked")
    return address.value


def populate_memory(memory: torch.Tensor) -> None:
    """Has the system allocate memory near this thread's CPUs, piece by piece: locking everything at once would block
    all other threads that allocate. Systems before Linux 5.14 allocate when the memory is locked."""
    start, end = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE, memory.data_ptr() + memory.numel()
    end = end // HUGE_PAGE * HUGE_PAGE
    if end <= start or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for first in range(start, end, POPULATED_PIECE):
        size = min(POPULATED_PIECE, end - first)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ADVISE_POPULATE):
            return


def use_huge_pages(memory: torch.Tensor) -> None:
    """Asks the system for pages of 2 MiB, which are locked many times faster; nothing else depends on them."""
    start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    size = memory.data_ptr() + memory.numel() - start
    if size > 0 and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ADVISE_HUGE)

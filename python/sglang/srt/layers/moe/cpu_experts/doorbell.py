"""Doorbells between a stream of the GPU and CPUs, as nodes of CUDA graphs.

The stream writes the number of a request to page-locked main memory, and waits until CPUs have written it to another
word. Writes and waits of streams need no kernel that spins and no function of the host, and can be captured.
"""

from __future__ import annotations

import ctypes
import time

import torch

from sglang.srt.errors import UserError
from sglang.srt.mem_cache.main_memory import device_address

HAS_MEMORY_OPERATIONS = 122
"""CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS."""
WAIT_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
PROBE_S = 5.0


def why_no_doorbell(device_index: int) -> str:
    """Returns why streams of a GPU cannot wait for CPUs; "" if they can."""
    value = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), HAS_MEMORY_OPERATIONS, device_index)
    if not code and value.value:
        return ""
    return (
        "streams of this GPU cannot wait for them (its driver has no 64-bit stream memory operations, as under Windows"
        " or on some virtual GPUs)"
    )


class Doorbell:
    """The words `bell` and `done` [1] int64 in page-locked main memory. Raises UserError where streams cannot wait."""

    def __init__(self, bell: torch.Tensor, done: torch.Tensor, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        if problem := why_no_doorbell(device.index or 0):
            raise UserError(f"CPUs cannot compute experts: {problem}.")
        self._bell, self._done = (ctypes.c_uint64(device_address(word)) for word in (bell, done))
        self._device = device

    def ring(self, number: int) -> None:
        """Has the current stream write the number of a request."""
        self._call("cuStreamWriteValue64_v2", self._bell, number, 0)

    def wait(self, number: int) -> None:
        """Has the current stream wait for the answer to a request."""
        self._call("cuStreamWaitValue64_v2", self._done, number, WAIT_EQUAL)

    def _call(self, name: str, address: ctypes.c_uint64, number: int, flags: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        code = getattr(self._driver, name)(stream, address, ctypes.c_uint64(number), ctypes.c_uint(flags))
        if code:
            raise RuntimeError(f"{name} failed: CUDA error {code}")

    def probe(self, number: int) -> None:
        """Rings with an empty request and waits for the answer. Raises UserError if none comes."""
        self.ring(number)
        self.wait(number)
        answered = torch.cuda.Event()
        answered.record(torch.cuda.current_stream(self._device))
        end = time.monotonic() + PROBE_S
        while not answered.query():
            if time.monotonic() > end:
                raise UserError(
                    "CPUs cannot compute experts: the GPU does not see their answers. Tell us the GPU and its driver."
                )
            time.sleep(0.001)

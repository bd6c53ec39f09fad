"""Doorbells between a GPU and CPUs in a CUDA graph: do captured stream writes and waits work, and how long they take.

    python lab/gpu/doorbell_probe.py     # GPU, a C compiler; a minute

A graph rings (cuStreamWriteValue64 to page-locked memory), a thread of the CPU answers, and the graph waits for the
answer (cuStreamWaitValue64). Printed are the microseconds of a round trip, of one with rows written and read by
kernels, and of the nodes alone. The script ends itself after 100 seconds if an answer does not arrive.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import torch

SOURCE = r"""
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
/* Answers `count` rings: each is a number other than 0 in bell; the answer is the same number in done. */
long answer(_Atomic uint64_t *bell, _Atomic uint64_t *done, long count, const char *rows, char *results, long bytes) {
    long spins = 0;
    for (long i = 0; i < count; i++) {
        uint64_t number;
        while ((number = atomic_load_explicit(bell, memory_order_acquire)) == 0) {
            __builtin_ia32_pause();
            spins++;
        }
        atomic_store_explicit(bell, 0, memory_order_relaxed);
        if (bytes) memcpy(results, rows, bytes);
        atomic_store_explicit(done, number, memory_order_release);
    }
    return spins;
}
"""
ROUNDS, REPLAYS = 200, 5
ATTRIBUTES = {"64-bit stream memory operations": 122, "stream waits for NOR": 123}
WAIT_EQUAL = 1


def checked(name: str, code: int) -> None:
    if code:
        raise SystemExit(f"{name} failed: CUDA error {code}")


def build() -> ctypes.CDLL:
    print({name: shutil.which(name) for name in ("cc", "gcc", "g++", "clang")}, flush=True)
    folder = Path(tempfile.mkdtemp())
    (folder / "answer.c").write_text(SOURCE)
    command = ["cc", "-O2", "-std=gnu11", "-shared", "-fPIC", str(folder / "answer.c"), "-o", str(folder / "answer.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "answer.so"))


class Probe:
    """Bell, answer and rows in page-locked memory, and a thread that answers."""

    def __init__(self) -> None:
        self.library, self.driver = build(), ctypes.CDLL("libcuda.so.1")
        self.words = torch.zeros(64, dtype=torch.int64).pin_memory()
        self.host_rows, self.host_results = (torch.zeros(8 * 4096, dtype=torch.bfloat16).pin_memory() for _ in range(2))
        self.bell, self.done = self.words.data_ptr(), self.words.data_ptr() + 256
        self.rows = torch.randn(8 * 4096, device="cuda").bfloat16()
        self.out = torch.zeros_like(self.rows)

    def write(self, address: int, value: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self.driver.cuStreamWriteValue64_v2(stream, ctypes.c_uint64(address), ctypes.c_uint64(value), 0)
        checked("cuStreamWriteValue64", code)

    def wait(self, value: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self.driver.cuStreamWaitValue64_v2(
            stream, ctypes.c_uint64(self.done), ctypes.c_uint64(value), WAIT_EQUAL
        )
        checked("cuStreamWaitValue64", code)

    def timed(self, name: str, launch, answers: bool, copied: int = 0) -> None:
        """Captures ROUNDS calls of launch(number) and prints the microseconds of one."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(1, ROUNDS + 1):
                launch(number)
        helper = None
        if answers:
            arguments = (
                ctypes.c_void_p(self.bell), ctypes.c_void_p(self.done), ctypes.c_long(ROUNDS * (REPLAYS + 1)),
                ctypes.c_void_p(self.host_rows.data_ptr()), ctypes.c_void_p(self.host_results.data_ptr()),
                ctypes.c_long(copied),
            )  # fmt: skip
            helper = threading.Thread(target=self.library.answer, args=arguments, daemon=True)
            helper.start()
        graph.replay()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        if helper is not None:
            helper.join()
        print(f"{name}: {begin.elapsed_time(end) * 1e3 / ROUNDS / REPLAYS:.2f} us", flush=True)


def main() -> None:
    signal.alarm(100)
    torch.cuda.init()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda, flush=True)
    probe = Probe()
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        checked(name, probe.driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0))
        print(f"{name}: {bool(value.value)}", flush=True)

    def add(number: int) -> None:
        probe.out.add_(probe.rows)

    def two_adds(number: int) -> None:
        add(number)
        add(number)

    def ring_and_wait(number: int) -> None:
        probe.write(probe.bell, number)
        probe.wait(number)

    def beside_a_kernel(number: int) -> None:
        probe.write(probe.bell, number)
        add(number)
        probe.wait(number)
        add(number)

    def with_rows(number: int) -> None:
        probe.host_rows.copy_(probe.rows, non_blocking=True)
        probe.write(probe.bell, number)
        probe.wait(number)
        probe.out.copy_(probe.host_results, non_blocking=True)

    def write_alone(number: int) -> None:
        add(number)
        probe.write(probe.done, 7)

    def write_and_met_wait(number: int) -> None:
        add(number)
        probe.write(probe.done, 7)
        probe.wait(7)

    probe.timed("kernel", add, False)
    probe.timed("two kernels", two_adds, False)
    probe.timed("kernel, write", write_alone, False)
    probe.timed("kernel, write, wait that is met at once", write_and_met_wait, False)
    probe.timed("ring and wait for the CPU", ring_and_wait, True)
    probe.timed("ring, kernel, wait, kernel", beside_a_kernel, True)
    probe.timed("64 KiB to the CPU, ring, wait, 64 KiB back", with_rows, True, 8 * 4096 * 2)
    same = torch.equal(probe.out, probe.rows)
    print("the rows that came back are those that were sent:", same, flush=True)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Holds sums that travel as e4m3 to their reference on this machine's GPUs, and times them beside sums in 16 bits.
Needs two GPUs and nvcc; takes about four minutes.

    python lab/gpu/quantized_sums_on_gpu.py [--rounds 10000] [--ranks 2] [--no-times]

Sums through peers' memory (sgl-kernel), through NCCL, and through memory of the host must have the reference's bits on
every rank, eager and in replayed graphs. Then a table of times: from GPU to GPU, and (NCCL_P2P_DISABLE=1, workspaces in
memory of the host) as cards without peer-to-peer copies have it. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "sgl-kernel")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from all_reduce_on_gpu import LARGEST, MIB, SOURCES, HostWorkspaces, Rank, compile_library  # noqa: E402

from sglang.srt.distributed.custom_all_reduce import (  # noqa: E402
    TWO_SHOT_E4M3,
    CustomAllReduce,
    IpcWorkspaces,
    Workspaces,
    data_vectors_for,
)
from sglang.srt.distributed.quantized_sums import GROUP, WIRE, QuantizedSums, TorchCodec  # noqa: E402
from sglang.srt.hardware.topology import Topology  # noqa: E402
from sglang.srt.kernels.all_reduce_table import PIECE_BYTES, SizeRange, ranges_for  # noqa: E402
from sglang.srt.layers.triton_ops.quantized_sums import TritonCodec  # noqa: E402

LIMIT_SECONDS = 240
TIMED_MIB = (1, 8, 32, 84)
HIDDEN = 5120


def reference(every: list[torch.Tensor]) -> torch.Tensor:
    """What all ranks must have: no ranks, no shares, no pieces."""
    codec = TorchCodec()

    def through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        message = torch.empty((1, x.numel() // GROUP * WIRE), dtype=torch.uint8, device=x.device)
        codec.encode(x, message)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        codec.decode(message, out)
        return out

    total = torch.zeros(every[0].numel(), device=every[0].device)
    for x in every:
        total += through(x.flatten(), torch.float32)
    return through(total, every[0].dtype).view(every[0].shape)


class QuantizedRank(Rank):
    """Ways of adding up: each takes and gives [T, H] in 16 bits."""

    @property
    def configs(self) -> tuple[SizeRange, ...]:
        """Of sums in 16 bits, as a server has them."""
        topology = Topology.NVLINK if torch.cuda.get_device_capability()[0] in (9, 10) else Topology.HOST_BRIDGE
        return ranges_for(topology, self.ranks)

    def create_reduce(self, workspaces: Workspaces) -> CustomAllReduce:
        return CustomAllReduce(self.library, workspaces, self.configs, 20.0, e4m3_bytes=PIECE_BYTES)

    def vectors(self) -> int:
        e4m3 = SizeRange(frozenset(), frozenset(), TWO_SHOT_E4M3, PIECE_BYTES, "")
        return data_vectors_for([*self.configs, e4m3], self.ranks, self.library.ROW_VECTORS)

    def sums(self, peers: CustomAllReduce | None) -> QuantizedSums:
        assert self.nccl is not None
        return QuantizedSums(self.nccl, TritonCodec(), 0, 1, PIECE_BYTES, peers)

    def draw(self, rng: random.Random, largest: int) -> tuple[torch.dtype, tuple[int, int], int]:
        dtype = rng.choice((torch.bfloat16, torch.float16))
        hidden = GROUP * rng.choice((1, 3, 48, 90, 160, 224))
        rows = max(1, int(2 ** rng.uniform(4, largest.bit_length() - 1)) // (2 * hidden))
        return dtype, (rows, hidden), rng.randrange(0, 2 * LARGEST, 16)

    def partial_sums(self, drawn: tuple[torch.dtype, tuple[int, int], int]) -> list[torch.Tensor]:
        dtype, shape, offset = drawn
        nbytes = 2 * shape[0] * shape[1]
        return [pool[offset : offset + nbytes].view(dtype).view(shape) for pool in self.pools[dtype]]

    def eager_sums(self, sums: QuantizedSums, rounds: int, largest: int, seed: int) -> None:
        rng = random.Random(seed)
        for number in range(rounds):
            every = self.partial_sums(self.draw(rng, largest))
            self.wrong += (sums.all_reduce(every[self.rank].clone()) != reference(every)).any()
            if rng.random() < 0.02 and number % self.ranks == self.rank:
                time.sleep(0.002)  # ranks drift

    def replayed_sums(self, sums: QuantizedSums, rounds: int, largest: int, seed: int) -> None:
        """Graphs of ten sums whose summands change between replays."""
        rng = random.Random(seed)
        for _ in range(max(1, rounds // 100)):
            drawn = [self.draw(rng, largest) for _ in range(10)]
            static = [self.partial_sums(each)[self.rank].clone() for each in drawn]
            sums.all_reduce(static[0].clone())  # what a library makes at its first call
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = [sums.all_reduce(x.clone()) for x in static]
            for _ in range(10):
                again = [(dtype, shape, rng.randrange(0, 2 * LARGEST, 16)) for dtype, shape, _ in drawn]
                for x, each in zip(static, again, strict=True):
                    x.copy_(self.partial_sums(each)[self.rank])
                graph.replay()
                for result, each in zip(results, again, strict=True):
                    self.wrong += (result != reference(self.partial_sums(each))).any()
            torch.cuda.synchronize()
            del graph


def worker(args: argparse.Namespace) -> int:
    rank = QuantizedRank(args.worker, args.ranks, args.store, args.library)
    failed = 0

    def say(text: str) -> None:
        if rank.rank == 0:
            print(text, flush=True)

    def check(name: str, run: Callable[[], None]) -> None:
        nonlocal failed
        begun = time.perf_counter()
        run()
        wrong = rank.failures()
        failed += wrong > 0
        say(f"{'ok' if not wrong else 'FAILED':<7}{name}: {wrong} wrong, {time.perf_counter() - begun:.0f} s")

    if args.host_memory:
        workspaces: Workspaces = HostWorkspaces(rank.library, rank.group, Path(args.store).parent, rank.vectors())
    else:
        workspaces = IpcWorkspaces(rank.library, rank.group, torch.cuda.current_device(), rank.vectors())
    reduce, rounds = rank.create_reduce(workspaces), args.rounds // (20 if args.host_memory else 1)
    peers, library = rank.sums(reduce), rank.sums(None)
    for name, sums, share in (("sgl-kernel", peers, 1), ("NCCL", library, 4)):
        check(f"{name}, eager", lambda sums=sums, n=rounds // share: rank.eager_sums(sums, n, MIB, 1))
        check(f"{name}, eager, up to 16 MiB", lambda sums=sums: rank.eager_sums(sums, 20, LARGEST, 2))
        check(f"{name}, graphs", lambda sums=sums, n=rounds // share // 4: rank.replayed_sums(sums, n, MIB, 3))
    reduce.raise_if_stalled()
    if not args.no_times:
        say(f"{'MiB':>5}{'NCCL':>10}{'16 bits':>10}{'e4m3, NCCL':>12}{'e4m3, own':>11}   us; GB/s: 16 bits, e4m3")
        for mib in TIMED_MIB:
            x = torch.zeros(mib * MIB // 2 // HIDDEN, HIDDEN, dtype=torch.bfloat16, device="cuda")
            nccl = rank.microseconds(lambda x=x: dist.all_reduce(x, group=rank.nccl))
            exact = rank.microseconds(lambda x=x: reduce.all_reduce(x)) if reduce.can_serve_tensor(x) else nccl
            ways = [rank.microseconds(lambda x=x, sums=sums: sums.all_reduce(x)) for sums in (library, peers)]
            rates = [x.nbytes / 1000 / min(times) for times in ((nccl, exact), ways)]
            say(f"{mib:>5}{nccl:>10.0f}{exact:>10.0f}{ways[0]:>12.0f}{ways[1]:>11.0f}   {rates[0]:.1f} {rates[1]:.1f}")
    workspaces.close()
    dist.destroy_process_group()
    return 1 if failed else 0


def run_workers(args: argparse.Namespace, ranks: int, library: Path, host_memory: bool) -> bool:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, __file__, "--rounds", str(args.rounds), "--ranks", str(ranks)]
        command += ["--store", f"{folder}/store", "--library", str(library), *["--no-times"] * args.no_times]
        command += ["--host-memory"] * host_memory
        env = os.environ | ({"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"} if host_memory else {})
        workers = [subprocess.Popen([*command, "--worker", str(rank)], env=env) for rank in range(ranks)]
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            codes = [each.wait(timeout=max(1.0, deadline - time.monotonic())) for each in workers]
            return not any(codes)
        except subprocess.TimeoutExpired:
            print("FAILED a worker did not end")
            return False
        finally:
            for each in workers:
                each.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=0, help="as many as there are GPUs by default")
    parser.add_argument("--no-times", action="store_true", help="right or wrong only")
    parser.add_argument("--library", type=Path, help="that sgl-kernel was compiled to, instead of compiling it")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--host-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return worker(args)
    ranks = args.ranks or min(8, torch.cuda.device_count())
    if not 2 <= ranks <= torch.cuda.device_count():
        raise SystemExit(f"needs two GPUs or more, one for each rank; there are {torch.cuda.device_count()}")
    major, minor = torch.cuda.get_device_capability()
    arch = "120f" if major == 12 else f"{major}{minor}{'a' if major >= 9 else ''}"
    print(f"{ranks} x {torch.cuda.get_device_name()}, sm_{arch}", flush=True)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        library = args.library or Path(folder, "kernels.so")
        if args.library is None:
            compile_library(library, arch, [SOURCES / f"{name}.cu" for name in ("all_reduce", "errors", "peer_copy")])
        for host_memory in (False, True):
            print("through memory of the host" if host_memory else "from GPU to GPU", flush=True)
            good &= run_workers(args, ranks, library, host_memory)
    print("all hold" if good else "failed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

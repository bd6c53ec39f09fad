"""Holds sgl-kernel's all-reduce to fp32 sums on this machine's GPUs, its gathers and exchanges to what the ranks gave,
and times them. Needs nvcc and a GPU; takes about three minutes.

    python lab/gpu/all_reduce_on_gpu.py [--rounds 10000] [--ranks 2] [--no-times]

Random calls (sizes from 1 KiB to 16 MiB, types, algorithms, with the norm or without, eager and in replayed graphs) are
compared bit by bit with sums in fp32 in the order of the ranks; every fifth is a gather or an exchange. Then the same
with workspaces in memory of the host, so
that everything goes over PCIe also where there is NVLink. Then a rank stays away, and the others must say which.
Prints a line for each check and a table of times; exits with 1 if a check fails.

More ranks than GPUs share them in turns: the driver takes a GPU from one process for the next every few milliseconds,
also in the middle of a kernel that waits, and what peers write arrives meanwhile. Sums must be as right as ever, but
take long: such a run has no times, and calls of up to 2 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "sgl-kernel")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from nvcc_build import SOURCES, compile_library  # noqa: E402
from sm120_sgl_kernel.collectives import Collectives  # noqa: E402

from sglang.srt.distributed.custom_all_reduce import (  # noqa: E402
    CustomAllReduce,
    IpcWorkspaces,
    StalledPeer,
    Workspaces,
    data_vectors_for,
)
from sglang.srt.kernels.all_reduce_table import KIB, MIB, ExchangeRange, SizeRange  # noqa: E402
from sglang.srt.layers import native_ops  # noqa: E402
from sglang.srt.layers.triton_ops.norm import fused_add_rmsnorm  # noqa: E402

LIMIT_SECONDS = 420
LARGEST = 16 * MIB
HOST_LARGEST = 2 * MIB
ALGORITHMS = ("packed", "one_shot", "two_shot")
PARTS = ("packed", "one_shot")
KINDS = ("gather", "exchange")
LARGEST_PART = 2 * MIB
"""Of a gather and of an exchange."""
EXCHANGES = ExchangeRange(frozenset(), frozenset(), 0, LARGEST_PART, "")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6
POOL_BYTES = 4 * LARGEST
TIMED_PARTS = (1, 8, 32, 64, 128, 512, 1024, 2048)
TIMED_SIZES = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NORMED = tuple((tokens, hidden) for hidden in (2048, 5120) for tokens in (1, 8, 64, 256))
CALLS, REPLAYS = 20, 10


class HostWorkspaces:
    """In files that every rank maps and registers: writes and polls cross PCIe."""

    def __init__(self, library: Collectives, group: dist.ProcessGroup, folder: Path, data_vectors: int) -> None:
        self.rank, self.data_vectors, self._group = dist.get_rank(group), data_vectors, group
        nbytes = -(-library.workspace_bytes(data_vectors) // mmap.PAGESIZE) * mmap.PAGESIZE
        mine = folder / f"workspace{self.rank}"
        mine.touch()
        os.truncate(mine, nbytes)
        dist.barrier(group)
        self._maps: list[mmap.mmap] = []
        self.addresses: list[int] = []
        for rank in range(dist.get_world_size(group)):
            descriptor = os.open(folder / f"workspace{rank}", os.O_RDWR)
            self._maps.append(mmap.mmap(descriptor, nbytes))
            os.close(descriptor)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1]))
            code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 3)  # portable, mapped
            if int(code):
                raise RuntimeError(f"cudaHostRegister: {code}")
            self.addresses.append(address)
        dist.barrier(group)

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(group=self._group)
        for address in self.addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


@dataclass(frozen=True, slots=True)
class Call:
    """One random call, the same on every rank."""

    algorithm: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes into the ranks' pools
    residual: bool
    kind: str = "sum"  # or of what the parts have this shape: "gather", "exchange"

    @staticmethod
    def draw(rng: random.Random, largest: int) -> Call:
        if rng.random() < 0.2:
            nbytes = int(16 * 2 ** rng.uniform(0, (LARGEST_PART // 16).bit_length() - 1)) // 16 * 16
            dtype = rng.choice(DTYPES)
            algorithm = rng.choice(PARTS if nbytes <= Collectives.PACKED_BYTES else PARTS[1:])
            offset = rng.randrange(0, POOL_BYTES - 8 * LARGEST_PART, 16)
            return Call(algorithm, dtype, (nbytes // dtype.itemsize,), offset, False, rng.choice(KINDS))
        nbytes = int(KIB * 2 ** rng.uniform(0, (largest // KIB).bit_length() - 1)) // 16 * 16
        dtype = rng.choice(DTYPES)
        algorithm = rng.choice(ALGORITHMS if nbytes <= Collectives.PACKED_BYTES else ALGORITHMS[1:])
        shape: tuple[int, ...] = (nbytes // dtype.itemsize,)
        if rng.random() < 0.4:
            hidden = rng.choice([h for h in (256, 1536, 2048, 5120, 7168) if h * dtype.itemsize <= nbytes] or [0])
            shape = (nbytes // dtype.itemsize // hidden, hidden) if hidden else shape
        return Call(algorithm, dtype, shape, rng.randrange(0, POOL_BYTES - LARGEST, 16), rng.random() < 0.8)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def values(self, pool: torch.Tensor) -> torch.Tensor:
        return pool[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)

    def parts(self, pool: torch.Tensor, ranks: int) -> torch.Tensor:
        """[ranks, ...] of an exchange."""
        return pool[self.offset : self.offset + ranks * self.nbytes].view(self.dtype).view(ranks, *self.shape)

    @property
    def normed(self) -> bool:
        return len(self.shape) == 2


class Rank:
    """The state of a rank's process: every rank's pool of random values, and counts of what was wrong."""

    def __init__(self, rank: int, ranks: int, store: str, library: Path) -> None:
        self.rank, self.ranks = rank, ranks
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        self.group = dist.group.WORLD
        self.nccl: dist.ProcessGroup | None = None  # which refuses ranks that share a GPU
        if ranks <= torch.cuda.device_count():
            self.nccl = dist.new_group(backend="nccl", device_id=device)
        self.library = Collectives(library)
        self.pools: dict[torch.dtype, list[torch.Tensor]] = {}
        for dtype in DTYPES:
            generator = torch.Generator(device=device).manual_seed(7)
            count = POOL_BYTES // dtype.itemsize
            self.pools[dtype] = [
                torch.randn(count, generator=generator, device=device, dtype=dtype).view(torch.uint8)
                for _ in range(ranks)
            ]
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def all_reduce_over(self, workspaces: Workspaces, deadline: float = 20.0) -> CustomAllReduce:
        configs = [SizeRange(frozenset(), frozenset(), "two_shot", LARGEST, "")]
        return CustomAllReduce(self.library, workspaces, configs, deadline, parts=EXCHANGES)

    def data_vectors(self, largest: int) -> int:
        configs = [
            SizeRange(frozenset(), frozenset(), algorithm, largest, "") for algorithm in ("one_shot", "two_shot")
        ]
        return data_vectors_for(configs, self.ranks, self.library.ROW_VECTORS, EXCHANGES)

    # --- right or wrong ---

    def inputs(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """This rank's x, the residual of all ranks, the norm's weight."""
        pools = self.pools[call.dtype]
        if call.kind == "exchange":
            x = call.parts(pools[self.rank], self.ranks).clone()
            return x, None, x
        x = call.values(pools[self.rank]).clone()
        if not call.normed:
            return x, None, x
        residual = call.values(pools[0]).flip(0).contiguous() if call.residual else None
        return x, residual, call.values(pools[-1])[0].clone()

    def run(self, reduce: CustomAllReduce, call: Call, inputs: tuple) -> tuple[torch.Tensor, ...]:
        x, residual, weight = inputs
        if call.kind != "sum":
            return ((reduce.gather if call.kind == "gather" else reduce.exchange)(x, call.algorithm),)
        if not call.normed:
            return (reduce.all_reduce(x, call.algorithm),)
        return reduce.all_reduce_add_rms_norm(x, residual, weight, EPS, call.algorithm)

    def compare(self, call: Call, actual: tuple[torch.Tensor, ...]) -> None:
        pools = self.pools[call.dtype]
        if call.kind != "sum":
            sent = [call.parts(pool, self.ranks)[self.rank] for pool in pools]
            if call.kind == "gather":
                sent = [call.values(pool) for pool in pools]
            self.wrong += (torch.stack(sent) != actual[0]).any()
            return
        total = torch.zeros(call.shape, dtype=torch.float32, device=actual[0].device)
        for pool in pools:
            total += call.values(pool).float()
        wanted = total.to(call.dtype)
        if not call.normed:
            self.wrong += (wanted != actual[0]).any()
            return
        if call.residual:
            wanted = (wanted.float() + call.values(pools[0]).flip(0).float()).to(call.dtype)
        self.wrong += (wanted != actual[1]).any()
        normed = native_ops.rmsnorm(wanted, call.values(pools[-1])[0], EPS).float()
        # A root's last bit, and what rounding makes of it.
        bound = normed.abs() * {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[call.dtype] + 1e-6
        self.wrong += ((normed - actual[0].float()).abs() > bound).any()

    def eager(self, reduce: CustomAllReduce, rounds: int, largest: int, seed: int) -> None:
        rng = random.Random(seed)
        for number in range(rounds):
            call = Call.draw(rng, largest)
            self.compare(call, self.run(reduce, call, self.inputs(call)))
            if rng.random() < 0.02 and number % self.ranks == self.rank:
                time.sleep(0.002)  # ranks drift
        reduce.raise_if_stalled()

    def graphs(self, reduce: CustomAllReduce, rounds: int, largest: int, seed: int) -> None:
        """Graphs of 25 calls whose inputs change between replays, with eager calls in between."""
        rng = random.Random(seed)
        per_graph, replays = 25, 20
        for _ in range(max(1, rounds // (per_graph * replays))):
            calls = [Call.draw(rng, largest) for _ in range(per_graph)]
            static = [self.inputs(call) for call in calls]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = [self.run(reduce, call, inputs) for call, inputs in zip(calls, static, strict=True)]
            for _ in range(replays):
                again = [replace(call, offset=rng.randrange(0, POOL_BYTES - LARGEST, 16)) for call in calls]
                for call, inputs in zip(again, static, strict=True):
                    for to, value in zip(inputs, self.inputs(call), strict=True):
                        if to is not None and (call.normed or to is inputs[0]):
                            to.copy_(value)
                graph.replay()
                for call, actual in zip(again, results, strict=True):
                    self.compare(call, actual)
                self.eager(reduce, 1, largest, rng.randrange(1 << 30))
            torch.cuda.synchronize()
            del graph
        reduce.raise_if_stalled()

    def failures(self) -> int:
        wrong = torch.tensor([int(self.wrong)])
        dist.all_reduce(wrong, group=self.group)
        self.wrong.zero_()
        return int(wrong)

    def stall(self, reduce: CustomAllReduce) -> str:
        """The last rank stays away; what the others say, empty if it is right."""
        problem, last = "", self.ranks - 1
        if self.rank != last:
            x = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
            for algorithm in ALGORITHMS:
                x = reduce.all_reduce(x, algorithm)
            try:
                torch.cuda.synchronize()
                reduce.raise_if_stalled()
                problem = "nobody is missed"
            except StalledPeer as error:
                problem = "" if f"waited for rank {last} " in str(error) else str(error)
            if not bool(x.isnan().all()):
                problem = problem or "the results are numbers"
        dist.barrier(self.group)
        return problem

    # --- times ---

    def microseconds(self, run: Callable[[], object]) -> float:
        """The microseconds of one of CALLS calls in a graph; of the slowest rank."""
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                run()
        best = float("inf")
        for _ in range(3):
            dist.barrier(self.group)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            best = min(best, 1000 * begin.elapsed_time(end) / CALLS / REPLAYS)
        slowest = torch.tensor([best])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        return float(slowest)

    def times(self, reduce: CustomAllReduce, workspaces: Workspaces, largest: int) -> Iterator[str]:
        """A line for each size: microseconds of a copy to the next rank, of each algorithm, of NCCL."""
        yield f"{'KiB':>7}{'copy':>9}" + "".join(f"{name:>10}" for name in ALGORITHMS) + f"{'nccl':>10}  fastest"
        peer = workspaces.addresses[(self.rank + 1) % self.ranks] + 8 * MIB  # data that nobody reads
        for kib in TIMED_SIZES:
            if kib * KIB > largest:
                break
            x = torch.zeros(kib * KIB // 2, dtype=torch.bfloat16, device="cuda")
            room = 16 * workspaces.data_vectors - 4 * MIB
            copy = (
                self.microseconds(lambda x=x: self.library.copy(peer, x.data_ptr(), x.nbytes, stream()))
                if x.nbytes <= room
                else float("nan")
            )
            found = {
                name: self.microseconds(lambda x=x, name=name: reduce.all_reduce(x, name))
                for name in ALGORITHMS
                if name != "packed" or x.nbytes <= Collectives.PACKED_BYTES
            }
            found["nccl"] = self.microseconds(lambda x=x: dist.all_reduce(x, group=self.nccl))
            cells = (f"{found[name]:.1f}" if name in found else "-" for name in (*ALGORITHMS, "nccl"))
            columns = "".join(f"{cell:>10}" for cell in cells)
            yield f"{kib:>7}{copy:>9.1f}{columns}  {min(found, key=lambda name: found[name])}"

    def part_times(self, reduce: CustomAllReduce) -> Iterator[str]:
        """A line for each size of a part: microseconds of gathers and exchanges."""
        columns = [f"{kind} {name}" for kind in KINDS for name in (*PARTS, "nccl")]
        yield f"{'KiB':>7}" + "".join(f"{column:>19}" for column in columns)
        for kib in TIMED_PARTS:
            x = torch.zeros((self.ranks, kib * KIB // 2), dtype=torch.bfloat16, device="cuda")
            to = torch.empty_like(x)
            runs = {f"gather {name}": partial(reduce.gather, x[0], name) for name in PARTS}
            runs |= {f"exchange {name}": partial(reduce.exchange, x, name) for name in PARTS}
            runs["gather nccl"] = partial(dist.all_gather_into_tensor, to.view(-1), x[0], group=self.nccl)
            runs["exchange nccl"] = partial(dist.all_to_all_single, to, x, group=self.nccl)
            if x[0].nbytes > Collectives.PACKED_BYTES:
                runs = {column: run for column, run in runs.items() if "packed" not in column}
            cells = [f"{self.microseconds(runs[column]):.1f}" if column in runs else "-" for column in columns]
            yield f"{kib:>7}" + "".join(f"{cell:>19}" for cell in cells)

    def norm_times(self, reduce: CustomAllReduce) -> Iterator[str]:
        yield f"{'T x H':>12}{'fused':>10}{'2 kernels':>11}{'nccl, norm':>12}   (the fastest algorithm each)"
        for tokens, hidden in NORMED:
            x, residual = (torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
            names = ALGORITHMS if x.nbytes <= Collectives.PACKED_BYTES else ALGORITHMS[1:]
            given = (residual, weight, EPS)

            def fused(name: str, x=x, given=given) -> None:
                reduce.all_reduce_add_rms_norm(x, *given, name)

            def apart(name: str, x=x, given=given) -> None:
                fused_add_rmsnorm(reduce.all_reduce(x, name), *given)

            def nccl(x=x, given=given) -> None:
                dist.all_reduce(x, group=self.nccl)
                fused_add_rmsnorm(x, *given)

            best = [min(self.microseconds(partial(run, name)) for name in names) for run in (fused, apart)]
            yield f"{tokens:>5} x {hidden:<4}{best[0]:>10.1f}{best[1]:>11.1f}{self.microseconds(nccl):>12.1f}"


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def worker(args: argparse.Namespace, rank_number: int) -> int:
    rank = Rank(rank_number, args.ranks, args.store, args.library)
    failed = 0

    def say(text: str) -> None:
        if rank_number == 0:
            print(text, flush=True)

    def check(name: str, run: Callable[[], object], count: int) -> None:
        nonlocal failed
        started = time.perf_counter()
        run()
        wrong = rank.failures()
        failed += wrong > 0
        seconds = time.perf_counter() - started
        say(f"{'ok' if wrong == 0 else 'FAILED':<7}{name}: {count} calls, {wrong} wrong, {seconds:.0f} s")

    def over(kind: str, workspaces: Workspaces, rounds: int, largest: int) -> None:
        nonlocal failed
        reduce = rank.all_reduce_over(workspaces)
        check(f"{kind}, eager", lambda: rank.eager(reduce, rounds, largest, 1), rounds)
        check(f"{kind}, graphs", lambda: rank.graphs(reduce, rounds, largest, 2), rounds)
        if rank.nccl is not None and not args.no_times:
            for line in rank.times(reduce, workspaces, largest):
                say(line)
            for line in rank.part_times(reduce):
                say(line)
            if kind == "device memory":
                for line in rank.norm_times(reduce):
                    say(line)
        impatient = rank.all_reduce_over(workspaces, deadline=0.5)
        problem = rank.stall(impatient)
        failed += bool(problem)
        if problem or rank_number == 0:
            print(f"{'FAILED' if problem else 'ok':<7}{kind}, a rank stays away: {problem or 'named'}", flush=True)
        workspaces.close()

    largest = LARGEST if rank.nccl is not None else HOST_LARGEST
    device = torch.cuda.current_device()
    over(
        "device memory", IpcWorkspaces(rank.library, rank.group, device, rank.data_vectors(largest)),
        args.rounds, largest,
    )  # fmt: skip
    folder = Path(args.store).parent
    if args.no_host_memory:
        return finish(failed)
    over(
        "host memory", HostWorkspaces(rank.library, rank.group, folder, rank.data_vectors(HOST_LARGEST)),
        args.rounds // 10, HOST_LARGEST,
    )  # fmt: skip
    return finish(failed)


def finish(failed: int) -> int:
    dist.destroy_process_group()
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=0, help="as many as there are GPUs by default")
    parser.add_argument("--no-host-memory", action="store_true", help="through the GPUs' memory only")
    parser.add_argument("--no-times", action="store_true", help="right or wrong only")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help="that sgl-kernel was compiled to, instead of compiling it")
    args = parser.parse_args()
    if args.worker is not None:
        return worker(args, args.worker)
    ranks = args.ranks or min(8, torch.cuda.device_count())
    if not 2 <= ranks <= Collectives.MAX_RANKS:
        raise SystemExit(f"needs 2 to {Collectives.MAX_RANKS} ranks, not {ranks}; with one GPU say --ranks 2")
    major, minor = torch.cuda.get_device_capability()
    arch = "120f" if major == 12 else f"{major}{minor}{'a' if major >= 9 else ''}"
    gpus = min(ranks, torch.cuda.device_count())
    print(f"{ranks} ranks on {gpus} x {torch.cuda.get_device_name()}, sm_{arch}", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        library = args.library
        if library is None:
            library = Path(folder, "kernels.so")
            compile_library(library, arch, [SOURCES / f"{name}.cu" for name in ("all_reduce", "errors", "peer_copy")])
        command = [sys.executable, __file__, "--rounds", str(args.rounds), "--ranks", str(ranks)]
        command += ["--store", f"{folder}/store", "--library", str(library), *["--no-times"] * args.no_times]
        command += ["--no-host-memory"] * args.no_host_memory
        workers = [subprocess.Popen([*command, "--worker", str(rank)]) for rank in range(ranks)]
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            codes = [each.wait(timeout=max(1.0, deadline - time.monotonic())) for each in workers]
        except subprocess.TimeoutExpired:
            print("FAILED a worker did not end")
            codes = [1]
        finally:
            for each in workers:
                each.kill()
    print("all hold" if not any(codes) else f"failed: {codes}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())

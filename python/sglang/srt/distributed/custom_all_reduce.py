"""All-reduce and exchange by writes into peers' memory, with sgl-kernel's collectives (sgl-kernel/csrc/all_reduce.cuh,
exchange.cuh).

A rank has one workspace that all peers of its group can write. It is allocated and opened once, before graphs are
captured; inputs and outputs may be any tensors. Calls are numbered on the device, so that eager calls and graph replays
may follow one another, but only one stream may use a group's workspaces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from sglang.srt.kernels.all_reduce_table import NORMED_ROW_BYTES, NORMED_ROWS, ExchangeRange, SizeRange

if TYPE_CHECKING:
    from sm120_sgl_kernel import Collectives

VECTOR_BYTES = 16
TWO_SHOT_E4M3 = "two_shot_e4m3"


class StalledPeer(RuntimeError):
    """Raised when a rank did not come to a collective in time; `missing` is that rank."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


class PeerMemoryError(RuntimeError):
    """Raised on every rank when some rank could not share memory with its peers."""


class Workspaces(Protocol):
    """The workspaces of all ranks of a group; `addresses` holds each rank's, as this rank addresses it."""

    rank: int
    data_vectors: int

    @property
    def addresses(self) -> Sequence[int]:
        """Returns the device address of each rank's workspace, in rank order, as this rank may use it."""

    def close(self) -> None:
        """Releases the memory. Collective; no rank may use it any more."""


def data_vectors_for(
    ranges: Sequence[SizeRange], ranks: int, row_vectors: int, parts: ExchangeRange | None = None
) -> int:
    """Returns the number of 16-byte vectors in each half of a workspace's data that suffices for the all-reduce sizes
    in `ranges` and for exchanges of `parts`. row_vectors: vectors of the widest row."""
    needs = {
        "packed": lambda vectors: 0,
        "one_shot": lambda vectors: vectors * ranks,
        "two_shot": lambda vectors: 2 * (vectors + ranks * row_vectors),  # whole rows for every rank, twice
        TWO_SHOT_E4M3: lambda vectors: 2 * (vectors * 9 // 16 + ranks * row_vectors),  # at most a scale for eight bytes
    }
    of_sums = max((needs[row.algorithm](-(-row.max_bytes // VECTOR_BYTES)) for row in ranges), default=0)
    return max(of_sums, ranks * (parts.max_bytes // VECTOR_BYTES) if parts is not None else 0)


def exchange(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """Returns the bytes of all ranks, in rank order. Collective; host memory only."""
    size = torch.tensor([len(data)], dtype=torch.int64)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    max_bytes = max(int(each) for each in sizes)
    if max_bytes == 0:
        return [b""] * len(sizes)
    padded = torch.frombuffer(bytearray(data.ljust(max_bytes, b"\0")), dtype=torch.uint8)
    parts = [torch.empty(max_bytes, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part.numpy().tobytes()[: int(each)] for part, each in zip(parts, sizes, strict=True)]


class IpcWorkspaces:
    """Workspaces in GPU memory that peers open through CUDA IPC. Construction is collective and raises PeerMemoryError
    on every rank if any rank fails.

    The memory does not come from torch's allocator, whose `expandable_segments` cannot be shared through CUDA IPC.
    """

    def __init__(self, library: Collectives, group: dist.ProcessGroup, device: int, data_vectors: int) -> None:
        self.rank, self.data_vectors = dist.get_rank(group), data_vectors
        self._library, self._group = library, group
        self.addresses: list[int] = []
        self._mine: int | None = None
        handle, problem = b"", ""
        try:
            self._mine, handle = library.allocate(device, library.workspace_bytes(data_vectors))
        except RuntimeError as error:
            problem = str(error)
        handles = self._agreed(problem, handle)
        try:
            for peer, theirs in enumerate(handles):
                self.addresses.append(self._mine if peer == self.rank else library.open(device, theirs))  # type: ignore[arg-type]
        except RuntimeError as error:
            problem = f"memory of rank {len(self.addresses)}: {error}"
        self._agreed(problem, b"")

    def _agreed(self, problem: str, data: bytes) -> list[bytes]:
        """Returns the ranks' data. Raises PeerMemoryError if any rank has a problem."""
        answers = exchange(self._group, problem.encode() or b"\0" + data)
        problems = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer[:1] != b"\0"]
        if problems:
            self._release()
            raise PeerMemoryError("; ".join(problems))
        return [answer[1:] for answer in answers]

    def _release(self) -> None:
        for rank, address in enumerate(self.addresses):
            if rank != self.rank:
                self._library.close(address)
        if self._mine is not None:
            self._library.free(self._mine)
        self.addresses, self._mine = [], None

    def close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier(group=self._group)
        self._release()


class CustomAllReduce:
    """Sums over the ranks of a group by writes to peers' memory. Every rank makes the same calls in the same order.

    `ranges` give the algorithm by message size; larger messages are not served. A call that waits longer than
    `deadline` seconds for a rank ends with NaN results, and `raise_if_stalled` names the rank. `e4m3_bytes`: size of a
    piece of a quantized all-reduce for which the workspaces suffice; 0: none. `parts`: sizes served by `gather` and
    `exchange`; None: none.
    """

    def __init__(
        self,
        library: Collectives,
        workspaces: Workspaces,
        ranges: Sequence[SizeRange],
        deadline: float,
        max_blocks: int = 64,
        e4m3_bytes: int = 0,
        parts: ExchangeRange | None = None,
    ) -> None:
        self._library, self._workspaces, self._ranges = library, workspaces, tuple(ranges)
        self._e4m3_bytes, self._parts = e4m3_bytes, parts
        self.rank, self.ranks = workspaces.rank, len(workspaces.addresses)
        assert 2 <= self.ranks <= library.MAX_RANKS
        self._max_blocks = min(max_blocks, library.MAX_BLOCKS)
        # Memory of the host, so that it can be read while a device waits.
        pinned = torch.cuda.is_available()
        self._stall_memory = torch.zeros(ctypes.sizeof(library.Stall), dtype=torch.uint8, pin_memory=pinned)
        self._stall = library.Stall.from_address(self._stall_memory.data_ptr())
        self._args = library.Arguments(
            stall=self._stall_memory.data_ptr(), data_vectors=workspaces.data_vectors,
            deadline=int(deadline * 1e9), rank=self.rank, ranks=self.ranks,
        )  # fmt: skip
        for rank, address in enumerate(workspaces.addresses):
            self._args.workspaces[rank] = address

    def algorithm_for(self, nbytes: int) -> str | None:
        """Returns the algorithm for a message of `nbytes`; None if it is not served."""
        if nbytes <= 0 or nbytes % VECTOR_BYTES:
            return None
        return next((row.algorithm for row in self._ranges if nbytes <= row.max_bytes), None)

    def can_serve(self, nbytes: int) -> bool:
        """Returns whether messages of `nbytes` are served."""
        return self.algorithm_for(nbytes) is not None

    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        """Returns whether `all_reduce` may be called with `x`; the same on every rank for the same shape and type."""
        return (
            self._dtype_name(x) in self._library.DTYPES
            and x.is_contiguous()
            and x.data_ptr() % VECTOR_BYTES == 0
            and self.can_serve(x.nbytes)
        )

    def can_norm(self, x: torch.Tensor) -> bool:
        """Returns whether `all_reduce_add_rms_norm` may be called with `x`, and is worth it."""
        row_bytes = x.shape[-1] * x.element_size()
        worth_it = x.dim() == 2 and len(x) <= NORMED_ROWS and row_bytes <= NORMED_ROW_BYTES
        return worth_it and row_bytes % VECTOR_BYTES == 0 and self.can_serve_tensor(x)

    def all_reduce(self, x: torch.Tensor, algorithm: str | None = None) -> torch.Tensor:
        """Writes the sum over the ranks over `x` (contiguous) and returns it. Values are added in fp32 in rank order
        and rounded once."""
        algorithm = algorithm or self.algorithm_for(x.nbytes)
        assert algorithm is not None
        self._launch(x, x, algorithm, self._library.THREADS)
        return x

    def can_sum_in_e4m3(self, x: torch.Tensor) -> bool:
        """Returns whether `all_reduce_e4m3` may be called with `x`; the same on every rank for the same shape and
        dtype."""
        groups = x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0 and x.nbytes % (4 * VECTOR_BYTES) == 0
        return self._e4m3_bytes > 0 and groups and x.element_size() == 2 and self._dtype_name(x) in self._library.DTYPES

    def all_reduce_e4m3(self, x: torch.Tensor) -> torch.Tensor:
        """Writes the quantized sum over the ranks over `x` and returns it, with the same bits as `quantized_sums`. `x`
        consists of whole scale groups."""
        for piece in x.view(-1).split(self._e4m3_bytes // x.element_size()):
            self._launch(piece, piece, TWO_SHOT_E4M3, self._library.THREADS)
        return x

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        algorithm: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (RMS norm of the total, the total), both [T, H], where total = rounded sum of `x` over the ranks +
        residual. x, residual [T, H]; the residual is equal on all ranks; weight [H], fp32 or x's dtype. The total
        overwrites the residual, or is a new tensor without one. Gives the same values as `all_reduce` followed by
        `fused_add_rmsnorm`."""
        algorithm = algorithm or self.algorithm_for(x.nbytes)
        assert algorithm is not None and weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)
        assert residual is None or (
            residual.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype
        )
        out = torch.empty_like(x)
        total = torch.empty_like(x) if residual is None else residual
        args = self._args
        args.residual = 0 if residual is None else residual.data_ptr()
        args.total, args.weight, args.eps = total.data_ptr(), weight.data_ptr(), eps
        args.weight_is_float = weight.dtype == torch.float32
        self._launch(x, out, algorithm, x.shape[-1] * x.element_size() // VECTOR_BYTES, fused=True)
        return out, total

    def can_exchange(self, part: torch.Tensor) -> bool:
        """Returns whether `gather` and `exchange` serve parts like `part`; the same on every rank for the same shape
        and dtype."""
        return self._parts is not None and 0 < part.nbytes <= self._parts.max_bytes and part.nbytes % VECTOR_BYTES == 0

    def gather(self, x: torch.Tensor, algorithm: str | None = None) -> torch.Tensor:
        """All-gathers x [...] into [ranks, ...]."""
        return self._exchange(x, x.new_empty((self.ranks, *x.shape)), 0, algorithm)

    def exchange(self, x: torch.Tensor, algorithm: str | None = None) -> torch.Tensor:
        """All-to-all: sends part i of x [ranks, ...] to rank i, and returns the parts [ranks, ...] that the ranks sent
        here."""
        return self._exchange(x, x.new_empty(x.shape), 1, algorithm)

    def _exchange(self, x: torch.Tensor, out: torch.Tensor, step: int, algorithm: str | None) -> torch.Tensor:
        """Launches an exchange. step: parts between what `x` holds for one rank and for the next; 0: all get the
        same."""
        x = x.contiguous()
        if x.data_ptr() % VECTOR_BYTES:
            x = x.clone()
        part_bytes = out.nbytes // self.ranks
        if algorithm is None:
            assert self._parts is not None
            algorithm = "packed" if part_bytes <= self._parts.packed else "one_shot"
        args, vectors = self._args, part_bytes // VECTOR_BYTES
        args.input, args.output, args.vectors = x.data_ptr(), out.data_ptr(), vectors
        args.blocks = min(-(-(self.ranks - 1) * vectors // self._library.THREADS), self._max_blocks)
        self._library.exchange(args, algorithm, step * vectors, _stream(x))
        return out

    def _launch(
        self, x: torch.Tensor, out: torch.Tensor, algorithm: str, row_vectors: int, fused: bool = False
    ) -> None:
        args = self._args
        args.input, args.output = x.data_ptr(), out.data_ptr()
        args.vectors, args.row_vectors = x.nbytes // VECTOR_BYTES, row_vectors
        args.dtype = self._library.DTYPES.index(self._dtype_name(x))
        args.blocks = self._blocks(args.vectors, row_vectors, algorithm)
        self._library.all_reduce(args, algorithm, fused, _stream(x))

    def _blocks(self, vectors: int, row_vectors: int, algorithm: str) -> int:
        """Returns the number of thread blocks: one per row, or for "packed", where any block may send a word, enough
        for a word per thread."""
        rows = -(-vectors // row_vectors)
        if algorithm == TWO_SHOT_E4M3:
            rows = -(-rows // (2 * self.ranks))  # a vector of e4m3 stands for two
        elif algorithm == "packed":
            rows = max(rows, -(-vectors // self._library.THREADS))
        elif algorithm == "two_shot":
            rows = -(-rows // self.ranks)
        return min(rows, self._max_blocks)

    @staticmethod
    def _dtype_name(x: torch.Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def raise_if_stalled(self) -> None:
        """Raises StalledPeer if a past call ended at its deadline. Reads host memory only and waits for nothing."""
        stall = self._stall
        if stall.missing:
            raise StalledPeer(
                f"rank {self.rank} waited for rank {stall.missing - 1} in a collective (call {stall.epoch}, block "
                f"{stall.block}) for {self._args.deadline / 1e9:.0f} s: that rank's process has died, is stuck, or its "
                "writes no longer arrive; its own log comes first",
                stall.missing - 1,
            )

    def close(self) -> None:
        """Releases the workspaces. Collective."""
        self._workspaces.close()


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0

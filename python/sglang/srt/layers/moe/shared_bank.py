"""Experts in main memory that the replicas of a server on one machine share: one copy for each rank of the model.

The rank that comes first loads and repacks its experts; those with its number in other replicas wait until all layers
are there, and map the same memory. It has no name in the file system, and lives until the last of them has ended,
whichever that is.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.srt.layers.moe.expert_buffers import Pair
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.mem_cache.main_memory import use_huge_pages
from sglang.srt.mem_cache.node_memory import RowNodes, place_on_nodes

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

ROWS_OF_EXPERTS = ("data", "scale", "global_scale", "bias")
"""Tensors of ExpertWeights in the bank."""
LOOK_S = 0.05


class SharedBank:
    """The bank of the ranks with one `name` in all replicas, which meet in `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._index = directory / f"{name}.json"
        self._lock = (directory / f"{name}.lock").open("w")
        self.follows = not self._alone()
        """Whether another process loads the experts."""
        self._file = -1 if self.follows else os.memfd_create("experts", os.MFD_CLOEXEC)
        self._layers: list[Any] = []
        self._size = self._taken = 0

    def _alone(self) -> bool:
        """Returns whether this process has the lock, which ends with the process that has it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # --- who loads ----------------------------------------------------------------------------------------------------

    def keep(self, pair: Pair, row_nodes: Sequence[RowNodes]) -> Pair:
        """Moves the experts of the next layer to the bank. Raises UserError if there is not enough memory."""
        described = [self._write(weights, placed) for weights, placed in zip(pair, row_nodes, strict=True)]
        self._layers.append(described)
        up, down = (self._read(each) for each in described)
        return up, down

    def publish(self) -> None:
        """Says that all layers are there."""
        whole = {"process": os.getpid(), "file": self._file, "layers": self._layers}
        new = self._index.with_suffix(".new")
        new.write_text(json.dumps(whole))
        new.replace(self._index)

    def _write(self, weights: ExpertWeights, placed: RowNodes) -> dict[str, Any]:
        tensors = {}
        for name in ROWS_OF_EXPERTS:
            tensor = getattr(weights, name)
            if tensor is None:
                continue
            tensors[name] = [self._size, str(tensor.dtype).removeprefix("torch."), *tensor.shape]
            self._size += -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            try:
                os.ftruncate(self._file, self._size)
                memory = self._map(tensors[name])
            except OSError as error:
                raise UserError(
                    f"{tensor.nbytes / 1024**3:.2f} GiB of main memory cannot be had for experts that replicas share"
                    f" ({error}). Free memory of the machine, or raise the container's limit."
                ) from None
            place_on_nodes(memory, placed)
            memory.copy_(tensor)
        inputs = weights.input_scale
        return {
            "tensors": tensors,
            "scheme": None if weights.scheme is None else weights.scheme.name,
            "input_scale": None if inputs is None else inputs.tolist(),
            "plane_cols": weights.plane_cols,
            "ep_size": weights.ep_size,
        }

    # --- who follows --------------------------------------------------------------------------------------------------

    def take(self) -> Pair:
        """Returns the experts of the next layer, once the process that loads them has all. Raises UserError if it has
        ended before."""
        if not self._layers:
            self._wait()
        self._taken += 1
        up, down = (self._read(each) for each in self._layers[self._taken - 1])
        return up, down

    def _wait(self) -> None:
        while not self._index.exists():
            if self._alone() and not self._index.exists():
                raise UserError("The replica that loads the experts for all others has ended before it had them.")
            time.sleep(LOOK_S)
        whole = json.loads(self._index.read_text())
        try:
            self._file = os.open(f"/proc/{whole['process']}/fd/{whole['file']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"The experts of another replica cannot be reached ({error}).") from None
        self._layers = whole["layers"]

    def _read(self, described: dict[str, Any]) -> ExpertWeights:
        inputs, scheme = described["input_scale"], described["scheme"]
        return ExpertWeights(
            **{name: self._map(place) for name, place in described["tensors"].items()},
            scheme=None if scheme is None else SCHEMES[scheme],
            input_scale=None if inputs is None else torch.tensor(inputs, dtype=torch.float32),
            plane_cols=described["plane_cols"],
            ep_size=described["ep_size"],
        )

    def _map(self, place: list[Any]) -> torch.Tensor:
        """Returns the tensor at a place: its first byte, type and shape. It is alone in its mapping."""
        begin, name, *shape = place
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.frombuffer(mmap.mmap(self._file, max(1, size), offset=begin), dtype=torch.uint8)[:size]
        use_huge_pages(memory)
        return memory.view(dtype).view(shape)


_joined: SharedBank | None = None


def join_bank(directory: str, rank: int, plan: Plan) -> None:
    """Has this process share the experts of its rank from now on, with replicas whose GPUs read them in the same form
    and whose ranks have the same layers."""
    global _joined
    form = repr((sorted(plan.arch.features), plan.dtype, plan.stages, plan.ranks))
    _joined = SharedBank(Path(directory), f"bank-{rank}-{zlib.crc32(form.encode()):08x}")


def joined_bank() -> SharedBank | None:
    """Returns the bank that this process shares; None: its experts are its own."""
    return _joined

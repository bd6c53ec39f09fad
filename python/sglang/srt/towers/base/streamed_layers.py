"""The layers of an encoder in main memory: each comes to the GPU when it is computed, and the next one meanwhile.

The GPU has room for two layers. Nothing is copied while no image comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from sglang.srt.errors import UserError
from sglang.srt.mem_cache.main_memory import map_memory, register
from sglang.srt.towers.base.spec import LAYERS_ON_GPU, Tower

ALIGNED = 256
ROOMS = LAYERS_ON_GPU


class StreamedLayers:
    """Weights by name: `stored` in main memory, where they are loaded; `get` returns them on the device."""

    def __init__(self, tower: Tower, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UserError where main memory cannot be page-locked."""
        self.layer_of = tower.streamed_layers()
        shapes = {name: tower.rank_shape(name, shape) for name, shape in tower.shapes() if name in self.layer_of}
        self.count = max(self.layer_of.values()) + 1
        places, sizes = _places(shapes, self.layer_of, self.count, dtype.itemsize)
        starts = [sum(sizes[:layer]) for layer in range(self.count)]
        memory = map_memory(sum(sizes))
        if device.type == "cuda" and (code := register(memory)):
            raise UserError(
                f"{len(memory) / 1024**3:.2f} GiB of main memory cannot be page-locked for the layers of the encoder"
                f" (CUDA error {code}). Raise the limit (ulimit -l unlimited; docker run --ulimit memlock=-1), or start"
                " without --encoder-in-main-memory."
            )
        self._stored = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self._rooms = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(ROOMS)]

        def view(of: torch.Tensor, name: str) -> torch.Tensor:
            size = math.prod(shapes[name]) * dtype.itemsize
            return of[places[name] : places[name] + size].view(dtype).view(shapes[name])

        self.stored: Mapping[str, torch.Tensor] = {
            name: view(self._stored[layer], name) for name, layer in self.layer_of.items()
        }
        self._on_device = {name: view(self._rooms[layer % ROOMS], name) for name, layer in self.layer_of.items()}
        self._held: list[int | None] = [None] * ROOMS
        """By room: the layer that is there, or on its way."""
        self._coming = [False] * ROOMS
        """By room: whether the device has not been told to wait for it."""
        self._current: int | None = None
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = [torch.cuda.Event() for _ in range(ROOMS)] if self._beside is not None else []
        self.num_copied = 0
        """Layers that were copied since the start."""

    def forget(self) -> None:
        """Has every layer copied again when it is needed next: a server that slept has lost the GPU's copies."""
        self._held, self._current = [None] * ROOMS, None

    def get(self, name: str) -> torch.Tensor:
        """Returns a weight on the device, for work that is launched on the current stream before another layer's is."""
        layer = self.layer_of[name]
        if layer != self._current or self._held[layer % ROOMS] != layer:
            self._enter(layer)
        return self._on_device[name]

    def _enter(self, layer: int) -> None:
        room = layer % ROOMS
        self._wait(room)
        if self._held[room] != layer:
            self._copy(layer)
        self._current = layer
        if layer + 1 < self.count and self._held[(layer + 1) % ROOMS] != layer + 1:
            self._begin_next(layer + 1)

    def _begin_next(self, layer: int) -> None:
        room = layer % ROOMS
        if self._beside is None:
            return
        self._wait(room)
        self._beside.wait_stream(torch.cuda.current_stream())  # whoever reads the room has been launched
        with torch.cuda.stream(self._beside):
            self._copy(layer)
            self._arrived[room].record()
        self._coming[room] = True

    def _wait(self, room: int) -> None:
        if self._coming[room]:
            self._arrived[room].wait()
            self._coming[room] = False

    def _copy(self, layer: int) -> None:
        stored = self._stored[layer]
        self._rooms[layer % ROOMS][: len(stored)].copy_(stored, non_blocking=True)
        self._held[layer % ROOMS] = layer
        self.num_copied += 1


def _places(
    shapes: Mapping[str, Sequence[int]], layer_of: Mapping[str, int], count: int, itemsize: int
) -> tuple[dict[str, int], list[int]]:
    """Returns where each weight begins in its layer, and the bytes of each layer."""
    places, sizes = {}, [0] * count
    for name, shape in shapes.items():
        layer = layer_of[name]
        places[name] = sizes[layer]
        sizes[layer] += -(-math.prod(shape) * itemsize // ALIGNED) * ALIGNED
    return places, sizes

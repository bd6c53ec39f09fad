"""Encodes images by a class of transformers: its own modules, with weights of their own beside those of its decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Init, Param, TensorPart
from sglang.srt.models.transformers_backend.buffers import fill_buffers
from sglang.srt.models.transformers_backend.build import class_of, config_of, create
from sglang.srt.plan.weight_names import PartKey, WeightMap
from sglang.srt.towers.transformers_class.spec import ClassTower

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan
    from sglang.srt.towers.base.patch_places import Grid


class ClassEncoder:
    """The encoder of a class. Each rank encodes by itself. Implements Loadable and MediaEncoder."""

    base_prefix = ""

    def __init__(self, plan: Plan, tower: ClassTower) -> None:
        """Allocates the parameters."""
        code = plan.description.transformers_class
        assert code is not None
        kind = class_of(code.request)
        self.tower, self.device, self.dtype = tower, torch.device(plan.device), getattr(torch, plan.dtype)
        self.model = create(kind, config_of(code.request, kind), self.dtype, code.request.task)
        self.name = code.facts.architecture
        self.params = {name: self._param(name, shape) for name, shape in tower.shapes()}
        modules = {name.rpartition(".")[0] for name in self.params}
        self.weights = WeightMap({name: name for name in modules}, {}, renamings=code.facts.renamings)
        fill_buffers(self.model, self.device, lambda path: path.startswith(code.facts.encoder_at))
        self.finish: list[Callable[[], None]] = [self._try]

    def _param(self, name: str, shape: tuple[int, ...]) -> Param:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        module, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(module)
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
        init = Init.NORMAL
        if len(shape) <= 1:
            init = Init.ZEROS if leaf.endswith("bias") else Init.ONES
        return Param(name, tensor, {PartKey(): TensorPart(shape)}, init)

    def ignored_weight(self, name: str) -> bool:
        """Returns True: the model says what is left over."""
        return True

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Returns the features of each item, [tokens, hidden size]. pixels [tokens, values of a cell], in host memory
        or on the device, hold the items one after the other."""
        counts = [math.prod(grid) for grid in grids]
        if self.tower.tile is None:
            parts = zip(pixels.split(counts), grids, strict=True)
            return [self._of_tiles(part, (runs * rows, columns)) for part, (runs, rows, columns) in parts]
        height, width = self.tower.tile
        features = self._of_tiles(pixels, (height // self.tower.cell, width // self.tower.cell))
        return [part.clone() for part in features.split(counts)]  # so that they can be freed separately

    def _of_tiles(self, pixels: torch.Tensor, cells: tuple[int, int]) -> torch.Tensor:
        """Returns the features [tokens, hidden size] of tiles with so many rows and columns of cells."""
        channels, (rows, columns), cell = self.tower.patch_shape[0], cells, self.tower.cell
        tiles = pixels.reshape(-1, channels, rows * cell, columns * cell)
        parts = [self._called(part) for part in tiles.split(self.tower.tiles_at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _called(self, tiles: torch.Tensor) -> torch.Tensor:
        values = tiles.to(self.device, self.dtype)
        more = {} if self.tower.tile is not None else {"image_sizes": [tuple(tiles.shape[-2:])]}
        out = self.model.get_image_features(values[None] if self.tower.in_lists else values, **more).pooler_output
        features: torch.Tensor = out if isinstance(out, torch.Tensor) else torch.cat([*out])
        return features.reshape(-1, features.shape[-1])

    @torch.inference_mode()
    def _try(self) -> None:
        """Encodes a grey tile. Raises UserError if its features are not those of its tokens."""
        height, width = self.tower.tile or (self.tower.cell, 2 * self.tower.cell)
        cells = height // self.tower.cell, width // self.tower.cell
        wanted = [math.prod(cells), self.tower.out_size]
        features = self._of_tiles(torch.ones((wanted[0], self.tower.patch_values), dtype=self.dtype), cells)
        if list(features.shape) != wanted:
            raise UserError(
                f"{self.name} makes features {list(features.shape)} of {height} x {width} pixels, where {wanted} are"
                " expected: its images cannot be served. --language-model-only serves text alone."
            )

"""The common part of image and video encoders: weights by checkpoint name, and layers over patches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.distributed.groups import ALONE
from sglang.srt.distributed.parallel_state import groups
from sglang.srt.layers.ops import PREFILL_ATTENTION
from sglang.srt.layers.parameter import Init, Param, TensorPart
from sglang.srt.plan.weight_names import PartKey, WeightMap
from sglang.srt.towers.base.patch_places import Grid, num_patches, rows_and_columns
from sglang.srt.towers.base.pieces import WHOLE_LAYERS, Cuts, parts_of, shares
from sglang.srt.towers.base.spec import Cut, Tower
from sglang.srt.towers.base.streamed_layers import StreamedLayers

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

Rotate = Callable[[torch.Tensor, slice], None]
"""Rotates queries, keys or both [N, heads, head_dim] of a slice of the patches in place, by their positions."""
Heads = Sequence[torch.Tensor]
"""Queries, keys and values of patches, [N, heads, head_dim] each."""
AnyTower = TypeVar("AnyTower", bound=Tower)
Result = TypeVar("Result")
_PATCH_WEIGHTS = ("patch_embed.proj.weight", "patch_embedding.weight", "conv1.weight")
"""Name suffixes of the convolutions over patches."""
Places = Mapping[str, torch.Tensor]
"""Tensors of `VisionEncoder.places`, on the device."""
Pieces = Generator[None, None, Result]
"""A computation that yields after every piece (`towers.base.pieces`)."""


@dataclass(frozen=True, slots=True)
class PatchPart:
    """Clips that are computed together, on the device: `pixels` [P, values per patch] and their `places`."""

    grids: Sequence[Grid]
    pixels: torch.Tensor
    places: Places


@dataclass(frozen=True, slots=True)
class PatchAttention:
    """How the patches of a part attend: `rotate` for queries and keys; `starts` [groups + 1], the first patch of each
    group that attends to itself, and P; `longest`: patches of the largest group; `cuts`: how layers are split."""

    rotate: Rotate
    starts: torch.Tensor
    longest: int
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names inside a layer of `VisionEncoder._plain_block`: both norms, and attention's projections. `{}` stands for q,
    k and v."""

    norms: tuple[str, str]
    projections: str
    out: str


class VisionEncoder(ABC, Generic[AnyTower]):
    """Base class of encoders. Heads and widths are sharded over ranks if `tower.ranks` > 1; otherwise each rank encodes
    by itself. Implements Loadable and LayeredEncoder."""

    base_prefix = ""

    def __init__(self, plan: Plan, tower: AnyTower) -> None:
        self.group = groups().tp if tower.ranks > 1 else ALONE
        self.tower, self.device, self.dtype = tower, plan.device, getattr(torch, plan.dtype)
        self.finish: list[Callable[[], None]] = []
        device = torch.device(self.device)
        self.streamed = StreamedLayers(tower, self.dtype, device) if tower.streamed_layers() else None
        """Layers that lie in main memory; None: there are none."""
        self.params = {name: self._param(name, shape) for name, shape in tower.shapes()}
        modules = {name.rpartition(".")[0] for name in self.params}
        self.weights = WeightMap({name: name for name in modules}, {}, beginnings=tower.beginnings)
        self.attention = self.fallbacks = None  # where no patch sees another
        if tower.head_dim:
            self.attention = plan.entry(PREFILL_ATTENTION)
            self.fallbacks = plan.fallbacks("prefill_attention") if plan.tiles("prefill_attention") else None

    def _param(self, name: str, shape: tuple[int, ...]) -> Param:
        init = Init.NORMAL
        if name.endswith(".bias") or "norm" in name:
            init = Init.ZEROS if name.endswith(".bias") else Init.ONES
        filled_on = None
        if self.streamed is not None and name in self.streamed.stored:
            tensor, filled_on = self.streamed.stored[name], torch.device(self.device)
        else:
            tensor = torch.empty(self.tower.rank_shape(name, shape), dtype=self.dtype, device=self.device)
        stored, pieces = self._stored(name, shape), self.tower.pieces(name, shape, self.group.rank)
        parts = {PartKey(piece=i): TensorPart(stored, source, dest) for i, (source, dest) in enumerate(pieces)}
        return Param(name, tensor, parts, init, filled_on)

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the checkpoint's shape of a weight: patch embeddings are stored as convolutions."""
        if not name.endswith(_PATCH_WEIGHTS):
            return shape
        return (shape[0], *self.tower.patch_shape)

    def ignored_weight(self, name: str) -> bool:
        return not name.startswith(self.tower.prefixes)

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Returns the features of each item, [tokens, out_size * (1 + deepstack levels)]. pixels [P, values per patch],
        in host memory or on the device, hold the items one after the other."""
        return whole(self.encoding(self.sent(pixels, grids), grids))

    def parts(self, grids: Sequence[Grid]) -> list[list[Grid]]:
        """Returns the clips of all items, grouped by the parts in which they are computed."""
        return parts_of(self.tower, grids)

    def encoding(
        self, parts: Iterable[PatchPart], grids: Sequence[Grid], cuts: Cuts = WHOLE_LAYERS
    ) -> Pieces[list[torch.Tensor]]:
        """Computes the features from the items' `parts`: yields after each piece (`pieces_of`) and returns what
        `encode` does. Each item's features have memory of their own, so that they can be freed separately."""
        if self.streamed is not None:
            self.streamed.forget()
        shapes = [(self.tower.num_tokens(grid), self.tower.features_size) for grid in grids]
        features = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        to_fill = list(features)
        for part in parts:
            to_fill = _filled(to_fill, (yield from self._encoded(part, cuts)))
            yield
        return features

    def sent(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> Iterator[PatchPart]:
        """Yields the parts of the patches, on the device."""
        first = 0
        for part in self.parts(grids):
            last = first + num_patches(part)
            places = {name: self._on_device(array) for name, array in self.places(part).items()}
            yield PatchPart(part, pixels[first:last].to(self.device, non_blocking=True), places)
            first = last

    @abstractmethod
    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        """Returns host arrays that the layers need about the positions of these clips' patches. Callable from any
        thread."""

    @abstractmethod
    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        """Computes [tokens, out_size * (1 + deepstack levels)] of clips of at most `clip_frames` frames; yields after
        every piece but the last."""

    # --- layers -------------------------------------------------------------------------------------------------------

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Computes a linear layer. If its inputs are sharded, x holds this rank's, and the outputs are all-reduced."""
        has_bias, cut = f"{name}.bias" in self.params, self.tower.cut_of(f"{name}.weight")
        if not has_bias or (cut is Cut.COLUMNS and self.group.rank > 0):
            out = F.linear(x, self._weight(name, "weight"))
        else:
            out = F.linear(x, self._weight(name, "weight"), self._weight(name, "bias"))
        return self.group.all_reduce(out) if cut is Cut.COLUMNS else out

    def _gated(self, prefix: str, x: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
        """Computes a feed-forward block with a SiLU gate. `limit`, if not 0, clamps the gate from above, and up from
        both sides."""
        gate, up = self._linear(prefix + "gate_proj", x), self._linear(prefix + "up_proj", x)
        if limit:
            gate.clamp_(max=limit)
            up.clamp_(-limit, limit)
        return self._linear(prefix + "down_proj", F.silu(gate, inplace=True).mul_(up))

    def _norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        weight = self._weight(name, "weight")
        return F.layer_norm(x, weight.shape, weight, self._weight(name, "bias"), eps)

    def _rms_norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        weight = self._weight(name, "weight").float()
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def _weight(self, name: str, leaf: str) -> torch.Tensor:
        whole = f"{name}.{leaf}"
        if self.streamed is not None and whole in self.streamed.layer_of:
            return self.streamed.get(whole)
        return self.params[whole].tensor

    def _split(self, qkv: torch.Tensor, sight: PatchAttention, rows: slice) -> Heads:
        """Returns queries, keys and values of qkv [N, 3 * hidden] for a slice of the patches and this rank's heads,
        rotated."""
        heads = qkv.view(-1, 3, self.tower.rank_heads, self.tower.head_dim)
        sight.rotate(heads[:, :2].flatten(1, 2), rows)
        return heads.unbind(1)

    def _plain_block(
        self, names: BlockNames, name: str, x: torch.Tensor, sight: PatchAttention, eps: float
    ) -> Pieces[torch.Tensor]:
        """Computes a layer with norms before attention and before a GELU block of two linear layers, with separate
        projections of q, k and v. Overwrites and returns x [P, hidden]."""
        heads = (self.tower.rank_heads, self.tower.head_dim)

        def project(rows: slice) -> Heads:
            normed = self._norm(name + names.norms[0], x[rows], eps)
            q, k, v = (
                self._linear(name + names.projections.format(part), normed).unflatten(-1, heads) for part in "qkv"
            )
            sight.rotate(q, rows)
            sight.rotate(k, rows)
            return q, k, v

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + names.out, attended[rows])
            wide = self._linear(name + "mlp.fc1", self._norm(name + names.norms[1], patches, eps))
            patches += self._linear(name + "mlp.fc2", gelu_(wide))

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _attended(
        self, project: Callable[[slice], Heads], count: int, sight: PatchAttention, scale: float | None = None
    ) -> Pieces[torch.Tensor]:
        """Returns attention [P, hidden] of `count` patches; yields after every slice of projections and every share of
        queries. project: returns the rotated queries, keys and values of a slice. `scale` None: 1 / sqrt(head_dim)."""
        parts = []
        for rows in shares(count, sight.cuts.rows):
            parts.append(project(rows))
            yield
        q, k, v = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        del parts
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        for i in range(sight.cuts.queries):
            self._attend(q, k, v, out, sight, scale, (i, sight.cuts.queries))
            yield
        return out.view(len(out), -1)

    def _row_by_row(self, compute: Callable[[slice], object], count: int, sight: PatchAttention) -> Pieces[None]:
        """Calls `compute` for slices of the patches, for work that each patch does alone; yields between slices."""
        for number, rows in enumerate(shares(count, sight.cuts.rows)):
            if number:
                yield
            compute(rows)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sight: PatchAttention,
        scale: float | None,
        share: tuple[int, int],
    ) -> None:
        """Fills share i of n of the rows of out [P, heads, head_dim]."""
        assert self.attention is not None
        attend = partial(
            self.attention, q, k, v, out, sight.starts, longest=sight.longest, is_causal=False, scale=scale, share=share
        )
        if self.fallbacks is None:
            attend(tile={})
        else:
            self.fallbacks.run(lambda tile: attend(tile=tile))

    # --- places -------------------------------------------------------------------------------------------------------

    def _interpolated(self, table: torch.Tensor, places: Places) -> torch.Tensor:
        """Returns position embeddings [P, hidden], interpolated from table [positions, hidden] by `index` and `weights`
        of the places [P, neighbours]. Neighbours are added one at a time, because all rows at once would exceed the
        layers' memory."""
        index, weights = places["index"], places["weights"]
        total = torch.zeros((len(index), table.shape[1]), dtype=torch.float32, device=table.device)
        for neighbour in range(index.shape[1]):
            total.addcmul_(table[index[:, neighbour]].float(), weights[:, neighbour, None])
        return total.to(self.dtype)

    def _angles(self, grids: Sequence[Grid], merge: int, theta: float, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rotation angles by row and by column of every patch, each [P, head_dim / 4] float32. `first`:
        number of the first row and column."""
        quarter = self.tower.head_dim // 4
        frequencies = (1.0 / theta ** (np.arange(quarter) / quarter)).astype(np.float32)
        rows, columns = (place[:, None] + first for place in rows_and_columns(grids, merge))
        return rows.astype(np.float32) * frequencies, columns.astype(np.float32) * frequencies

    def _neox_tables(self, grids: Sequence[Grid], merge: int, theta: float) -> dict[str, np.ndarray]:
        """Returns the cosines and sines of `_rotate` for every patch: half of the pairs rotate by the row, the others
        by the column."""
        return cos_sin(np.concatenate(self._angles(grids, merge, theta), axis=1))

    def _rotate(self, places: Places) -> Rotate:
        """Returns a rotation whose pairs are a dim of the first half of a head and one of the second; with cosines and
        sines of several parts of a head [P, 1, parts, N], of the halves of each part."""
        return partial(_rotate_neox, cos=places["cos"], sin=places["sin"])

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def cos_sin(angles: np.ndarray) -> dict[str, np.ndarray]:
    """Returns cosines and sines [P, 1, ...] float32 of angles [P, ...], the same for all heads."""
    return {"cos": np.cos(angles)[:, None], "sin": np.sin(angles)[:, None]}


def interpolation(neighbours: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the inputs of `_interpolated`: index and weights of the neighbours of every patch."""
    return dict(zip(("index", "weights"), neighbours, strict=True))


def whole(pieces: Pieces[Result]) -> Result:
    """Runs a computation to its end and returns its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


def _filled(to_fill: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """Copies the rows to the tensors in order; returns the unfilled rest of these."""
    while len(rows):
        count = min(len(to_fill[0]), len(rows))
        to_fill[0][:count] = rows[:count]
        rows, to_fill = rows[count:], ([to_fill[0][count:]] if count < len(to_fill[0]) else []) + to_fill[1:]
    return to_fill


def _rotate_neox(x: torch.Tensor, rows: slice, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates x [N, heads, head_dim] in place; cos, sin [P, 1, head_dim / 2] or [P, 1, parts, head_dim / 2 / parts]
    float32."""
    first, second = x.view(*x.shape[:2], *cos.shape[2:-1], -1).chunk(2, dim=-1)
    rotate_pairs(first, second, cos[rows], sin[rows])


def rotate_interleaved(x: torch.Tensor, rows: slice, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates x [N, heads, head_dim] in place, where neighbouring dims are a pair; cos, sin [P, 1, head_dim / 2]
    float32."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotate_pairs(first, second, cos[rows], sin[rows])


def rotate_pairs(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates pairs of numbers [..., N] in place by float32 angles, with little extra memory, since all patches of a
    step are here."""
    x = first.to(torch.float32, copy=True)
    y = second.to(torch.float32, copy=True)
    first.copy_((x * cos).addcmul_(y, sin, value=-1))
    second.copy_(y.mul_(cos).addcmul_(x, sin))


def gelu_(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Applies GELU in place, because an encoder's widest activations should not be held twice."""
    result: torch.Tensor = torch.ops.aten.gelu_(x, approximate=approximate)
    return result

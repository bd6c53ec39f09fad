"""The image and video encoder of dots3-note, described by `spec`.

Source: the classes of transformers 5.24 as the numeric reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from sglang.srt.layers.parameter import Param
from sglang.srt.towers.base.encoder import Heads, PatchAttention, PatchPart, Pieces, VisionEncoder, gelu_
from sglang.srt.towers.base.patch_places import Grid, frame_starts, longest_frame
from sglang.srt.towers.base.pieces import Cuts
from sglang.srt.towers.dots3_note.spec import PREFIX, ROUTERS, Dots3Tower

_ADAPTER_EPS = 1e-6


class Dots3Encoder(VisionEncoder[Dots3Tower]):
    """The encoder. Patches come in squares of the merge; frames attend to themselves."""

    def _param(self, name: str, shape: tuple[int, ...]) -> Param:
        param = super()._param(name, shape)
        if name.endswith(ROUTERS):
            param.tensor = param.tensor.float()
        return param

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the checkpoint's shape of a weight: patches have one frame, and no dim for it."""
        stored = super()._stored(name, shape)
        return stored if len(stored) < 5 else (*stored[:2], *stored[3:])

    def places(self, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
        return self._neox_tables(grids, self.tower.merge, self.tower.theta) | {"starts": frame_starts(grids)}

    def _encoded(self, part: PatchPart, cuts: Cuts) -> Pieces[torch.Tensor]:
        tower, places, eps = self.tower, part.places, self.tower.norm_eps
        x = self._linear(PREFIX + "patch_embed.proj", part.pixels.to(self.dtype))
        x = self._rms_norm(PREFIX + "patch_embed.norm", x, eps)
        sight = PatchAttention(self._rotate(places), places["starts"], longest_frame(part.grids), cuts)
        yield
        for i in range(tower.num_layers):
            x = yield from self._block(i, x, sight)
            yield
        x = self._rms_norm(PREFIX + "post_trunk_norm", x, eps)
        x = self._norm(PREFIX + "adapter.ln_q", x, _ADAPTER_EPS).view(-1, tower.hidden_size * tower.merge**2)
        return self._linear(PREFIX + "adapter.mlp.2", gelu_(self._linear(PREFIX + "adapter.mlp.0", x)))

    def _block(self, number: int, x: torch.Tensor, sight: PatchAttention) -> Pieces[torch.Tensor]:
        name, eps, experts = f"{PREFIX}blocks.{number}.", self.tower.norm_eps, self.tower.experts[number]

        def project(rows: slice) -> Heads:
            qkv = self._linear(name + "attn.qkv", self._rms_norm(name + "norm_1", x[rows], eps))
            q, k, v = qkv.view(-1, 3, self.tower.rank_heads, self.tower.head_dim).unbind(1)
            q, k = self._rms_norm(name + "attn.q_norm", q, eps), self._rms_norm(name + "attn.k_norm", k, eps)
            sight.rotate(q, rows)
            sight.rotate(k, rows)
            return q, k, v

        def rest(rows: slice) -> None:
            patches = x[rows]
            patches += self._linear(name + "attn.proj", attended[rows])
            normed = self._rms_norm(name + "norm_2", patches, eps)
            out = self._routed(name + "mlp.", normed, experts) if experts else self._wide(name + "mlp.", normed)
            patches += self.group.all_reduce(out)

        attended = yield from self._attended(project, len(x), sight)
        yield from self._row_by_row(rest, len(x), sight)
        return x

    def _wide(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's partial sums of a gated MLP."""
        gate, up, down = (self._weight(prefix + name, "weight") for name in ("fc1", "fc3", "fc2"))
        return F.linear(F.silu(F.linear(x, gate), inplace=True).mul_(F.linear(x, up)), down)

    def _routed(self, prefix: str, x: torch.Tensor, experts: int) -> torch.Tensor:
        """Returns this rank's partial sums of the experts' outputs. The host waits for the number of patches of each
        expert, once a layer and slice."""
        gate, bias = (self.params[prefix + name].tensor for name in ("gate_weight", "router_bias"))
        scores = F.linear(x.float(), gate).sigmoid()
        top_k = min(self.tower.top_k, experts)
        chosen = (scores + bias).topk(top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.tower.router_scale
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, pairs in enumerate(order.split(counts)):
            if len(pairs):
                rows = pairs // top_k
                output = self._wide(f"{prefix}experts.{expert}.", x[rows])
                out.index_add_(0, rows, output * weights.flatten()[pairs, None])
        return out.to(x.dtype)

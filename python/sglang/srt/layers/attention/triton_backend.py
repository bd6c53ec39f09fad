"""Attention with this project's Triton kernels, for every head dim and cache dtype that the tile table lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, decode_attention_fwd, plan_decode
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

if TYPE_CHECKING:
    from sglang.srt.kernels.spec import Tile
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.plan.layer_spec import AttentionShape
    from sglang.srt.plan.plan import Plan


class _Heads:
    """Tiles and decode workspace of the call sites of one shape."""

    def __init__(self, plan: Plan, shape: AttentionShape, device: torch.device | str) -> None:
        self.shape = shape
        self.extend = plan.ladder(plan.attention_op("extend_attention", shape))
        self.decode = plan.ladder(plan.attention_op("decode_attention", shape))
        self.decode_tile = self.decode.tile
        self.num_sms, self.context_len = plan.arch.num_sms, plan.context_len
        self.device = device
        self.allocate(plan.max_running_requests)

    def allocate(self, max_batch: int) -> None:
        shape = self.shape
        self.workspace = DecodeWorkspace.allocate(
            max_batch,
            shape.num_heads,
            shape.num_kv_heads,
            shape.v_head_dim,
            self.num_sms,
            self.decode_tile,
            self.device,
            self.context_len,
        )

    def step_down(self, tile: Tile, seq_lens: torch.Tensor) -> None:
        """Decode with another tile from now on: the work is cut by the tile."""
        self.decode_tile = tile
        self.allocate(self.workspace.max_batch)
        plan_decode(seq_lens, self.workspace, tile)
        self.workspace.part_lse.zero_()  # q is there already: what lies between the plan and the kernel that reads it


class TritonAttnBackend:
    """Implements AttentionBackend. The only state between calls is the decode workspaces, which the device refills from
    `seq_lens`: the refill is part of a captured graph, so that a replay needs no work on the host. Layers with and
    without a window share one."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._heads = {shape: _Heads(plan, shape, device) for shape in plan.attention_shapes}
        self._any_prefix = True

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.forward_mode.is_decode():
            self._plan_decode(batch.seq_lens)
        else:
            assert batch.extend_prefix_lens_cpu is not None
            self._any_prefix = any(batch.extend_prefix_lens_cpu)

    def _plan_decode(self, seq_lens: torch.Tensor) -> None:
        for heads in self._heads.values():
            plan_decode(seq_lens, heads.workspace, heads.decode_tile)

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        for heads in self._heads.values():
            if batch_sizes[-1] > heads.workspace.max_batch:
                heads.allocate(batch_sizes[-1])

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        self._plan_decode(batch.seq_lens)

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        pass

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        prefix_lens, start_loc = batch.extend_prefix_lens, batch.extend_start_loc
        assert prefix_lens is not None and start_loc is not None
        cache, slots = layer.cache, batch.slots_of(layer.cache)
        self._heads[layer.shape].extend.run(
            lambda tile: extend_attention_fwd(
                q,
                k,
                v,
                out,
                cache.k,
                cache.v,
                slots.req_to_token,
                batch.req_pool_indices,
                prefix_lens,
                start_loc,
                scale=layer.scale,
                tile=tile,
                sliding_window=layer.sliding_window,
                logit_cap=layer.logit_cap,
                sinks=layer.sinks,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                has_prefix=self._any_prefix,
            )
        )

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        heads = self._heads[layer.shape]
        heads.decode.run(lambda tile: self._launch_decode(heads, tile, q, out, layer, batch))

    def _launch_decode(
        self, heads: _Heads, tile: Tile, q: torch.Tensor, out: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> None:
        if tile is not heads.decode_tile:
            heads.step_down(tile, batch.seq_lens)
        cache, slots = layer.cache, batch.slots_of(layer.cache)
        decode_attention_fwd(
            q,
            out,
            cache.k,
            cache.v,
            slots.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            heads.workspace,
            scale=layer.scale,
            tile=tile,
            sliding_window=layer.sliding_window,
            logit_cap=layer.logit_cap,
            sinks=layer.sinks,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )

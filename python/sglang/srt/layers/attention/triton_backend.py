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
    from sglang.srt.plan.plan import Plan


class TritonAttnBackend:
    """Implements AttentionBackend. The only state between calls is the decode workspace, which the device refills from
    `seq_lens`: the refill is part of a captured graph, so that a replay needs no work on the host."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self._extend = plan.ladder("extend_attention")
        self._decode = plan.ladder("decode_attention")
        self._decode_tile = self._decode.tile
        self._num_heads = plan.num_heads
        self._num_kv_heads = plan.kv.num_kv_heads
        self._v_head_dim = plan.kv.v_head_dim
        self._num_sms = plan.arch.num_sms
        self._device = device
        self._any_prefix = True
        self._workspace = self._allocate(plan.max_running_requests)

    def _allocate(self, max_batch: int) -> DecodeWorkspace:
        return DecodeWorkspace.allocate(
            max_batch,
            self._num_heads,
            self._num_kv_heads,
            self._v_head_dim,
            self._num_sms,
            self._decode_tile,
            self._device,
        )

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.forward_mode.is_decode():
            plan_decode(batch.seq_lens, self._workspace, self._decode_tile)
        else:
            assert batch.extend_prefix_lens_cpu is not None
            self._any_prefix = any(batch.extend_prefix_lens_cpu)

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        if batch_sizes[-1] > self._workspace.max_batch:
            self._workspace = self._allocate(batch_sizes[-1])

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        plan_decode(batch.seq_lens, self._workspace, self._decode_tile)

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
        pool, layer_id = batch.kv_pool, layer.layer_id
        self._extend.run(
            lambda tile: extend_attention_fwd(
                q,
                k,
                v,
                out,
                pool.k(layer_id),
                pool.v(layer_id),
                batch.req_to_token,
                batch.req_pool_indices,
                prefix_lens,
                start_loc,
                scale=layer.scale,
                tile=tile,
                sliding_window=layer.sliding_window,
                logit_cap=layer.logit_cap,
                sinks=layer.sinks,
                k_scale=pool.k_scale(layer_id),
                v_scale=pool.v_scale(layer_id),
                has_prefix=self._any_prefix,
            )
        )

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        self._decode.run(lambda tile: self._launch_decode(tile, q, out, layer, batch))

    def _launch_decode(
        self, tile: Tile, q: torch.Tensor, out: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> None:
        if tile is not self._decode_tile:  # the launch stepped down: the work is cut by the tile
            self._decode_tile = tile
            self._workspace = self._allocate(self._workspace.max_batch)
            plan_decode(batch.seq_lens, self._workspace, tile)
        pool, layer_id = batch.kv_pool, layer.layer_id
        decode_attention_fwd(
            q,
            out,
            pool.k(layer_id),
            pool.v(layer_id),
            batch.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            self._workspace,
            scale=layer.scale,
            tile=tile,
            sliding_window=layer.sliding_window,
            logit_cap=layer.logit_cap,
            sinks=layer.sinks,
            k_scale=pool.k_scale(layer_id),
            v_scale=pool.v_scale(layer_id),
        )

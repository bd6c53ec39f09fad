"""The model with what its steps read and write on the device, and the batches that lead from one to the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sglang.srt.layers.forward_batch import AttentionBackend, ForwardBatch, ForwardMode
from sglang.srt.mem_cache.memory_pool import KVPool
from sglang.srt.mem_cache.req_pool import ReqToTokenPool
from sglang.srt.model_executor.drafts import Drafter, accept
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.device_arrays import DeviceArrays


@dataclass(slots=True)
class DeviceState:
    """Tables by request slot, and the batches of a step from tensors that lie on the device already."""

    model: CausalLM
    kv_pool: KVPool
    req_pool: ReqToTokenPool
    attn_backend: AttentionBackend
    device: torch.device | str
    drafter: Drafter | None = None
    next_tokens: torch.Tensor = field(init=False)
    """[max_reqs + 1, k] int64, the tokens that each request computes next: the last one sampled, then guesses."""
    lens: torch.Tensor = field(init=False)
    """[max_reqs + 1] int32, tokens of each request that are computed. Only kept with a drafter: without one every step
    brings one token, and the host knows."""

    def __post_init__(self) -> None:
        num_slots = self.req_pool.max_reqs + 1
        self.next_tokens = torch.zeros((num_slots, self.tokens_per_step), dtype=torch.int64, device=self.device)
        self.lens = torch.zeros(num_slots, dtype=torch.int32, device=self.device)

    @property
    def tokens_per_step(self) -> int:
        """k, of a request that is decoded."""
        return 1 if self.drafter is None else self.drafter.num_tokens

    def decode_batch(
        self,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        num_valid_tokens: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A DECODE batch from device tensors only, so that it can be captured. Enters the new slots in the table; with
        a drafter they are there, and lengths and slots given are upper bounds."""
        table = self.req_pool.device_table
        if self.drafter is None:
            positions = seq_lens.to(torch.int64) - 1
            table[slots, positions] = out_cache_loc.to(torch.int32)
        else:
            seq_lens = self.lens[slots] + 1
            positions = self.lens[slots].to(torch.int64)
            out_cache_loc = table[slots, positions].to(torch.int64)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(slots),
            input_ids=self.next_tokens[slots, 0],
            positions=positions,
            req_pool_indices=slots,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            req_to_token=table,
            kv_pool=self.kv_pool,
            attn_backend=self.attn_backend,
            num_valid_tokens=num_valid_tokens,
        )

    def extend_batch(
        self,
        arrays: DeviceArrays | Mapping[str, torch.Tensor],
        input_ids: torch.Tensor,
        decodes: ForwardBatch | None,
        extend_lens: list[int],
        prefix_lens: list[int],
    ) -> ForwardBatch:
        """An EXTEND batch of T `input_ids` from the other arrays of `step.extend_arrays`. The lengths on the host are
        what a backend may plan with."""
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(arrays["slots"]),
            input_ids=input_ids,
            positions=arrays["positions"][: len(input_ids)],
            req_pool_indices=arrays["slots"],
            seq_lens=arrays["seq_lens"],
            out_cache_loc=arrays["out_cache_loc"][: len(input_ids)],
            req_to_token=self.req_pool.device_table,
            kv_pool=self.kv_pool,
            attn_backend=self.attn_backend,
            decodes=decodes,
            extend_prefix_lens=arrays["prefix_lens"],
            extend_start_loc=arrays["start_loc"],
            extend_seq_lens_cpu=extend_lens,
            extend_prefix_lens_cpu=prefix_lens,
        )

    def verify_batch(
        self, slots: torch.Tensor, widths: torch.Tensor, num_valid_tokens: torch.Tensor | None = None
    ) -> ForwardBatch:
        """An EXTEND batch of the next k tokens of each of B requests, T = B k, from device tensors only.

        widths [B] int32: rows from there on are padding (cache slot 0, which is no request's)."""
        width, table = self.tokens_per_step, self.req_pool.device_table
        prefix_lens = self.lens[slots]
        row = torch.arange(width, device=slots.device)
        inside = row < widths[:, None]
        positions = torch.where(inside, prefix_lens[:, None] + row, 0)
        out_cache_loc = torch.where(inside, table[slots[:, None], positions], 0)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(slots),
            input_ids=self.next_tokens[slots].flatten(),
            positions=positions.flatten(),
            req_pool_indices=slots,
            seq_lens=prefix_lens + width,
            out_cache_loc=out_cache_loc.flatten().to(torch.int64),
            req_to_token=table,
            kv_pool=self.kv_pool,
            attn_backend=self.attn_backend,
            num_valid_tokens=num_valid_tokens,
            extend_prefix_lens=prefix_lens,
            extend_start_loc=torch.arange(len(slots) + 1, device=slots.device, dtype=torch.int32) * width,
            extend_seq_lens_cpu=[width] * len(slots),
            extend_prefix_lens_cpu=[1] * len(slots),
        )

    def settle_prompts(self, slots: torch.Tensor, seq_lens: torch.Tensor, decodes: torch.Tensor) -> None:
        """With a drafter, behind an EXTEND step: these requests are computed up to `seq_lens`, `decodes` a token on."""
        self.lens[slots] = seq_lens
        self.lens[decodes] += 1

    def settle_tokens(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """With a drafter: tokens [R] were sampled behind the last computed ones; guess on from there."""
        assert self.drafter is not None
        self.next_tokens[slots, 0] = tokens.clamp(min=0)
        self.next_tokens[slots, 1:] = self.drafter.propose(slots, self.lens[slots], self.next_tokens[slots, 0])

    def settle_verified(self, slots: torch.Tensor, widths: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Behind a `verify_batch` that sampled tokens [B k]: how many stand, [B] int32."""
        tokens = tokens.view(len(slots), -1)
        counts = accept(tokens, self.next_tokens[slots, 1:], widths)
        self.lens[slots] += counts
        self.settle_tokens(slots, tokens.gather(1, counts[:, None].long() - 1)[:, 0])
        return counts

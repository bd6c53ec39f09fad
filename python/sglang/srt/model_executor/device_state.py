"""The model with what its steps read and write on the device, and the batches that lead from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang.srt.layers import native_ops
from sglang.srt.layers.forward_batch import AttentionBackend, ForwardBatch, ForwardMode, TokenSlots
from sglang.srt.layers.ops import DecodeInputsOp
from sglang.srt.model_executor.drafts import Drafter, accept
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.pool_sizes import PoolSizes
from sglang.srt.utils.device_arrays import DeviceArrays


@dataclass(slots=True)
class DeviceState:
    """Tables by request slot, and the batches of a step from tensors that lie on the device already."""

    model: CausalLM
    attn_backend: AttentionBackend
    num_tables: int
    sizes: PoolSizes
    device: torch.device | str
    drafter: Drafter | None = None
    decode_inputs: DecodeInputsOp = native_ops.decode_inputs
    req_to_token: torch.Tensor = field(init=False)
    """[tables, max_reqs + 1, context_len] int32, the cache slot of each position of each request slot; a table for each
    lifetime of caches (`plan.caches.row_tables`). Row 0 is padding and stays zero, which is the padding slot."""
    next_tokens: torch.Tensor = field(init=False)
    """[max_reqs + 1, k] int64, the tokens that each request computes next: the last one sampled, then guesses."""
    lens: torch.Tensor = field(init=False)
    """[max_reqs + 1] int32, tokens of each request that are computed. Only kept with a drafter: without one every step
    brings one token, and the host knows."""

    def __post_init__(self) -> None:
        rows = self.sizes.max_requests + 1
        shape = (self.num_tables, rows, self.sizes.context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.next_tokens = torch.zeros((rows, self.tokens_per_step), dtype=torch.int64, device=self.device)
        self.lens = torch.zeros(rows, dtype=torch.int32, device=self.device)

    @property
    def tokens_per_step(self) -> int:
        """k, of a request that is decoded."""
        return 1 if self.drafter is None else self.drafter.num_tokens

    def _token_slots(
        self, out_cache_loc: torch.Tensor, rows: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[TokenSlots, ...]:
        """Of T tokens that lie at `positions` of the request slots `rows`. The tables of windows have their new slots
        before the step."""
        windows = self.req_to_token[1:]
        return (
            TokenSlots(self.req_to_token[0], out_cache_loc),
            *(TokenSlots(table, table[rows, positions].to(torch.int64)) for table in windows),
        )

    def decode_batch(
        self,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        num_valid_tokens: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A DECODE batch from device tensors only, so that it can be captured. Enters the new slots in the table; with
        a drafter they are there, and lengths and slots given are upper bounds."""
        if self.drafter is None:
            input_ids, positions, window_locs = self.decode_inputs(
                slots, seq_lens, out_cache_loc, self.next_tokens[:, 0], self.req_to_token
            )
            locs = (out_cache_loc, *(window_locs[i] for i in range(self.num_tables - 1)))
            token_slots = tuple(TokenSlots(self.req_to_token[i], loc) for i, loc in enumerate(locs))
        else:
            seq_lens = self.lens[slots] + 1
            positions = self.lens[slots].to(torch.int64)
            input_ids = self.next_tokens[slots, 0]
            out_cache_loc = self.req_to_token[0][slots, positions].to(torch.int64)
            token_slots = self._token_slots(out_cache_loc, slots, positions)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(slots),
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=slots,
            seq_lens=seq_lens,
            token_slots=token_slots,
            attn_backend=self.attn_backend,
            num_valid_tokens=num_valid_tokens,
        )

    def extend_batch(
        self,
        arrays: DeviceArrays,
        num_tokens: int,
        decodes: ForwardBatch | None,
        extend_lens: list[int],
        prefix_lens: list[int],
        is_decode: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """An EXTEND batch of `num_tokens` from `step.extend_arrays`, which for the requests of `decodes` hold what the
        host knows. is_decode [D] bool: the rest of `decodes` is padding; None: all are requests. The lengths on the
        host are what a backend may plan with."""
        input_ids, positions, out_cache_loc = (
            arrays[name][:num_tokens] for name in ("input_ids", "positions", "out_cache_loc")
        )
        if decodes is not None:
            input_ids = _with_decodes(decodes.input_ids, input_ids, is_decode)
            if self.drafter is not None:
                positions = _with_decodes(decodes.positions, positions, is_decode)
                out_cache_loc = _with_decodes(decodes.token_slots[0].out_cache_loc, out_cache_loc, is_decode)
        rows = _rows(arrays["start_loc"], arrays["slots"], decodes, num_tokens) if self.num_tables > 1 else None
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(arrays["slots"]),
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=arrays["slots"],
            seq_lens=arrays["seq_lens"],
            token_slots=self._token_slots(out_cache_loc, rows, positions),
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
        width, table = self.tokens_per_step, self.req_to_token[0]
        prefix_lens = self.lens[slots]
        row = torch.arange(width, device=slots.device)
        inside = row < widths[:, None]
        positions = torch.where(inside, prefix_lens[:, None] + row, 0)
        rows = torch.where(inside, slots[:, None], 0)
        out_cache_loc = table[rows, positions]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(slots),
            input_ids=self.next_tokens[slots].flatten(),
            positions=positions.flatten(),
            req_pool_indices=slots,
            seq_lens=prefix_lens + width,
            token_slots=self._token_slots(out_cache_loc.flatten().to(torch.int64), rows.flatten(), positions.flatten()),
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


def _with_decodes(of_decodes: torch.Tensor, of_tokens: torch.Tensor, is_decode: torch.Tensor | None) -> torch.Tensor:
    """[T] with the decoding requests' entries [D] in front, where they are requests."""
    count = len(of_decodes)
    front = of_decodes if is_decode is None else torch.where(is_decode, of_decodes, of_tokens[:count])
    return torch.cat((front, of_tokens[count:]))


def _rows(start_loc: torch.Tensor, slots: torch.Tensor, decodes: ForwardBatch | None, num_tokens: int) -> torch.Tensor:
    """[num_tokens] int64, the request slot of each token of an EXTEND step. Those before the first prompt are of
    requests that decode."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    prompt = torch.searchsorted(start_loc, token, right=True) - 1
    rows = slots[prompt.clamp(min=0)]
    if decodes is not None:
        count = decodes.batch_size
        rows[:count] = torch.where(prompt[:count] < 0, decodes.req_pool_indices, rows[:count])
    return rows

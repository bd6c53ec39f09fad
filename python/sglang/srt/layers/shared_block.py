"""Blocks that all ranks compute together, with data-parallel attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang.srt.layers.block import DefersNoSum
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.quantization.activations import Activations, values_of

TOKEN_IDS = "ids of all attention groups"
"""Name in `ForwardBatch.step_cache` of the token ids of the gathered rows."""


class SharedByAllGroups(DefersNoSum):
    """A block of a layer that all ranks compute for the rows of all attention groups: x [T, H] of this group -> [T, H].
    It does the all-reduce itself."""

    def __init__(self, block: Any, reads_ids: bool) -> None:
        """reads_ids: the block reads the tokens' ids."""
        self.block, self.reads_ids = block, reads_ids
        self.is_partial_sum = block.defer_all_reduce() is not None

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor:
        exchange, local = batch.exchange, values_of(x)
        assert exchange is not None, "steps of ranks with requests of their own have one"
        everyones = replace(batch, num_valid_tokens=exchange.num_valid)
        if self.reads_ids:
            if TOKEN_IDS not in batch.step_cache:
                batch.step_cache[TOKEN_IDS] = exchange.gather(batch.input_ids)
            everyones.input_ids = batch.step_cache[TOKEN_IDS]
        out = self.block(exchange.gather(local), everyones)
        return exchange.scatter(out, len(local)) if self.is_partial_sum else exchange.local_rows(out, len(local))

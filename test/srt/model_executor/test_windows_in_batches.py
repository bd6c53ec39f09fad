"""Where a batch finds its tokens' slots in the tables of windows, with the padding that graphs have."""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.sites import AttentionSites
from sglang.srt.model_executor.device_state import DeviceState, StepShape
from sglang.srt.plan.pool_sizes import PoolSizes

CONTEXT = 16


def state_of_two_tables() -> DeviceState:
    """Of a token at position p of request slot s the window's slot is 100 s + p."""
    state = DeviceState(None, AttentionSites({}, {}), 2, PoolSizes(64, 1, 4, CONTEXT), "cpu")  # type: ignore[arg-type]
    slots, positions = torch.arange(5)[:, None], torch.arange(CONTEXT)
    state.req_to_token[1] = torch.where(slots > 0, 100 * slots + positions, 0)
    return state


DECODES = {
    "decode_slots": torch.tensor([3, 1, 0]),
    "decode_lens": torch.tensor([6, 2, 1], dtype=torch.int32),
    "decode_loc": torch.tensor([40, 41, 0]),
}
"""Request slots 3 and 1, and a row of padding."""


def test_decode() -> None:
    batch = state_of_two_tables().batch(DECODES, StepShape(3, 3))  # type: ignore[arg-type]
    assert batch.token_slots[0].out_cache_loc.tolist() == [40, 41, 0]
    assert batch.token_slots[1].out_cache_loc.tolist() == [305, 101, 0]
    assert batch.token_slots[1].req_to_token[2, 7] == 207


def test_prompts_behind_padded_decodes() -> None:
    """Two requests decode; prompts of 2 and 3 tokens are of slots 4 and 2; the last two tokens are padding. The padding
    row of the decoding requests lies over the first token of the prompts."""
    state = state_of_two_tables()
    arrays = {
        **DECODES,
        "is_decode": torch.tensor([True, True, False]),
        "input_ids": torch.zeros(9, dtype=torch.int64),
        "positions": torch.tensor([5, 1, 8, 9, 0, 1, 2, 0, 0]),
        "out_cache_loc": torch.arange(9),
        "start_loc": torch.tensor([2, 4, 7, 7, 9], dtype=torch.int32),
        "slots": torch.tensor([4, 2, 0, 0]),
        "seq_lens": torch.tensor([10, 3, 0, 0], dtype=torch.int32),
        "prefix_lens": torch.tensor([8, 0, 0, 0], dtype=torch.int32),
    }
    batch = state.batch(arrays, StepShape(9, 3, has_prompts=True))  # type: ignore[arg-type]
    assert batch.token_slots[1].out_cache_loc.tolist() == [305, 101, 408, 409, 200, 201, 202, 0, 0]
    assert batch.decode is not None and batch.decode.token_slots[1].out_cache_loc.tolist() == [305, 101, 0]

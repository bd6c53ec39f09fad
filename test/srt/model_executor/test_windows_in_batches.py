"""Where a batch finds its tokens' slots in the tables of windows, with the padding that graphs have."""

from __future__ import annotations

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.plan.pool_sizes import PoolSizes

CONTEXT = 16


def state_of_two_tables() -> DeviceState:
    """Of a token at position p of request slot s the window's slot is 100 s + p."""
    state = DeviceState(None, None, 2, PoolSizes(64, 1, 4, CONTEXT), "cpu")  # type: ignore[arg-type]
    slots, positions = torch.arange(5)[:, None], torch.arange(CONTEXT)
    state.req_to_token[1] = torch.where(slots > 0, 100 * slots + positions, 0)
    return state


def decodes(state: DeviceState) -> ForwardBatch:
    """Request slots 3 and 1, and a row of padding."""
    lens = torch.tensor([6, 2, 1], dtype=torch.int32)
    return state.decode_batch(torch.tensor([3, 1, 0]), lens, torch.tensor([40, 41, 0]))


def test_decode() -> None:
    batch = decodes(state_of_two_tables())
    assert batch.token_slots[0].out_cache_loc.tolist() == [40, 41, 0]
    assert batch.token_slots[1].out_cache_loc.tolist() == [305, 101, 0]
    assert batch.token_slots[1].req_to_token[2, 7] == 207


def test_prompts_behind_padded_decodes() -> None:
    """Two requests decode; prompts of 2 and 3 tokens are of slots 4 and 2; the last two tokens are padding. The padding
    row of the decoding requests lies over the first token of the prompts."""
    state = state_of_two_tables()
    arrays = {
        "input_ids": torch.zeros(9, dtype=torch.int64),
        "positions": torch.tensor([5, 1, 8, 9, 0, 1, 2, 0, 0]),
        "out_cache_loc": torch.arange(9),
        "start_loc": torch.tensor([2, 4, 7, 7, 9], dtype=torch.int32),
        "slots": torch.tensor([4, 2, 0, 0]),
        "seq_lens": torch.tensor([10, 3, 0, 0], dtype=torch.int32),
        "prefix_lens": torch.tensor([8, 0, 0, 0], dtype=torch.int32),
    }
    is_decode = torch.tensor([True, True, False])
    batch = state.extend_batch(arrays, 9, decodes(state), [9], [1], is_decode)  # type: ignore[arg-type]
    assert batch.token_slots[1].out_cache_loc.tolist() == [305, 101, 408, 409, 200, 201, 202, 0, 0]

"""The slots of a step's tokens in caches whose tokens ranks share out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.layers.step_rows import TokenSlots
from sglang.srt.model_executor.device_state import DeviceState


def test_own_slots_are_of_the_table_of_all_tokens() -> None:
    tables = [TokenSlots(torch.full((2, 4), i), torch.tensor([4, 5, 6]) + 8 * i) for i in range(2)]
    state: Any = SimpleNamespace(context=SimpleNamespace(size=2, rank=1))
    *first, shared = DeviceState._with_dcp_slots(state, *tables)
    assert first == tables and shared.req_to_token is tables[0].req_to_token
    assert shared.out_cache_loc.tolist() == [0, 2, 0]

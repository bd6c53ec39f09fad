"""The scheduler without a model that `bench_front` measures with."""

from __future__ import annotations

import numpy as np
import pytest
from paced_scheduler import Running, step

from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("interval", "sent"), [(1, [[5], [6], [5], [6], [5]]), (2, [[5, 6], [5, 6], [5]]), (9, [[5, 6, 5, 6, 5]])]
)
def test_tokens_of_a_request(interval: int, sent: list[list[int]]) -> None:
    req = TokenizedGenerateReq(
        rid="r", input_ids=np.array([5, 6], np.int32), sampling_params=SamplingParams(max_new_tokens=5)
    )
    running = {"r": Running(req)}
    outs = [step(running, interval) for _ in range(5)]
    assert not running
    messages = [out for out in outs if out.rids]
    assert [out.new_ids[0] for out in messages] == sent
    assert [out.options[0] is not None for out in messages] == [True] + [False] * (len(sent) - 1)
    last = messages[-1].finish[0]
    assert last is not None and last.length == 5 and messages[-1].meta[0].completion_tokens == 5
    assert all(out.finish[0] is None for out in messages[:-1])

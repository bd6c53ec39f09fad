"""What a step may take of prompts, whose log probabilities have a limit of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.managers.scheduler.counters import Counters
from sglang.srt.managers.scheduler.running_batch import RunningBatch
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.schedule_policy import PrefillBudget
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.plan.pool_sizes import PoolSizes

CHUNK = 2048


def prompt(length: int, width: int, done: int = 0, wanted: bool = True) -> Any:
    """A request whose log probabilities are wanted from its beginning or not at all."""
    req: Any = SimpleNamespace(
        tokens=[0] * length, limit=length + 10, slot=0, kv_len=0, media=None, prompt_len=length,
        logprob_start=0 if wanted else length, prompt_logprobs_done=done, logprob_width=width,
    )  # fmt: skip
    req.prompt_logprobs_in = lambda begin, count: Req.prompt_logprobs_in(req, begin, count)
    return req


@given(
    page=st.sampled_from([1, 16, 64, 128]),
    groups=st.sampled_from([1, 8]),
    prompts=st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 5120), st.integers(0, 2), st.booleans()), min_size=1, max_size=4
    ),
)
def test_nothing_is_taken_that_is_not_there(page: int, groups: int, prompts: list[tuple[int, int, int, bool]]) -> None:
    """Neither of the prompt nor of the chunk, however many log probabilities this prompt and those before it want; and
    the first always gets something."""
    kv = KVTable(PoolSizes(65_536, page, 8, 8192))
    budget = PrefillBudget(kv, RunningBatch(Counters(9), 1, 0, 1), 0.5, 8192, CHUNK, 0, groups)
    left = CHUNK
    for number, (length, width, pages_done, wanted) in enumerate(prompts):
        done = min(pages_done * page, (length - 1) // page * page)
        taken = budget.take(prompt(length, width, done, wanted), done)
        assert (0 if number else 1) <= taken <= min(length - done, left)
        left -= taken


def test_a_prompt_without_log_probabilities_is_not_held_up() -> None:
    """Behind one that has used up all of the step's, even one shorter than a page gets its turn."""
    kv = KVTable(PoolSizes(65_536, 64, 8, 8192))
    budget = PrefillBudget(kv, RunningBatch(Counters(9), 1, 0, 1), 0.5, 8192, CHUNK, 0)
    assert budget.take(prompt(3000, 1100), 0) == 64
    assert budget.logprobs < 0
    assert budget.take(prompt(40, 1, wanted=False), 0) == 40

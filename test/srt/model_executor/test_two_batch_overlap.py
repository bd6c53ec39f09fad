"""Where a step is cut in two, and that its halves are all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.distributed.ping_pong import CpuSideStream, PingPong
from sglang.srt.model_executor.step import GroupSteps, MediaTokens, PromptTokens, StepInput
from sglang.srt.model_executor.two_batch_overlap import ALIGNMENT, Cut, choose_cut, cut_groups, cut_step
from sglang.srt.models.causal_lm import CausalLM


def step_of(decodes: int, lens: list[int], prefixes: list[int] | None = None) -> StepInput:
    prefixes = prefixes or [0] * len(lens)
    extend, prefix, count = np.array(lens, np.int32), np.array(prefixes, np.int32), decodes + len(lens)
    total = decodes + sum(lens)
    ids = np.arange(100, 100 + sum(lens), dtype=np.int64)
    prompts = PromptTokens(ids, prefix, extend, np.arange(count, dtype=np.int64))
    seq_lens = np.concatenate((np.full(decodes, 7, np.int32), prefix + extend)).astype(np.int32)
    return StepInput(np.arange(1, count + 1), seq_lens, np.arange(1000, 1000 + total, dtype=np.int32), prompts)


@pytest.mark.parametrize(
    ("decodes", "lens", "prefixes", "cut"),
    [
        (0, [8192], [0], Cut(0, 4096)),
        (0, [8192], [100], Cut(0, 4096 - (4196 % ALIGNMENT))),
        (0, [4096, 4096], None, Cut(1, 0)),
        (0, [4300, 3892], None, Cut(1, 0)),
        (0, [4500, 3692], None, Cut(0, 4096)),
        (0, [6144, 2048], None, Cut(0, 4096)),
        (0, [2048, 6144], None, Cut(1, 2048)),
        (256, [7936], [0], Cut(0, 3840)),
        (0, [3, 5], None, Cut(1, 1)),
        (0, [1, 8], None, Cut(1, 3)),
        (6, [2], None, Cut(0, 1)),
        (6, [1, 1], None, Cut(1, 0)),
    ],
)
def test_a_step_is_cut_where_a_prompt_ends_near_its_middle_or_inside_one(
    decodes: int, lens: list[int], prefixes: list[int] | None, cut: Cut
) -> None:
    assert choose_cut(step_of(decodes, lens, prefixes)) == cut


def test_steps_without_two_prompt_tokens_or_with_images_are_not_cut() -> None:
    one, decode, seeing = step_of(5, [1]), step_of(5, []), step_of(0, [64])
    decode.prompts = None
    assert seeing.prompts is not None
    seeing.prompts.media = MediaTokens(None, np.empty(0, np.int64), [])
    assert choose_cut(one) is None and choose_cut(decode) is None and choose_cut(seeing) is None


def test_halves_have_every_token_once_and_a_cut_prompt_goes_on_behind_its_first_part() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        decodes, prompts = int(rng.integers(0, 9)), int(rng.integers(1, 6))
        step = step_of(decodes, rng.integers(1, 200, prompts).tolist(), rng.integers(0, 300, prompts).tolist())
        cut = choose_cut(step)
        if cut is None:
            assert len(step.out_cache_loc) - decodes < 2
            continue
        first, second = cut_step(step, cut)
        tokens = [(slot, pos, loc, token) for half in (first, second) for slot, pos, loc, token in rows(half)]
        assert tokens == rows(step)
        assert first.num_decodes == decodes and second.num_decodes == 0
        assert first.prompts is not None and len(first.prompts.extend_lens) and second.prompts is not None
        assert min(first.prompts.extend_lens) > 0 and min(second.prompts.extend_lens) > 0


def rows(step: StepInput) -> list[tuple[int, int, int, int]]:
    """(request slot, position, cache slot, token) of each new token, in order; 0 for tokens that the device knows."""
    assert step.prompts is not None
    count, result = step.num_decodes, []
    locs = iter(step.out_cache_loc.tolist())
    result += [(int(slot), int(end) - 1, next(locs), 0) for slot, end in
               zip(step.slots[:count], step.seq_lens[:count], strict=True)]  # fmt: skip
    ids = iter(step.prompts.input_ids.tolist())
    of_prompts = zip(
        step.slots[count:], step.seq_lens[count:], step.prompts.prefix_lens, step.prompts.extend_lens, strict=True
    )
    for slot, end, prefix, new in of_prompts:
        assert end == prefix + new
        result += [(int(slot), int(prefix) + i, next(locs), next(ids)) for i in range(new)]
    assert next(locs, None) is None and next(ids, None) is None
    return result


def test_groups_are_cut_together_and_one_without_a_cut_is_in_the_first_half() -> None:
    """A prompt, requests that decode, and no work."""
    decoding = step_of(3, [])
    decoding.prompts = None
    halves = cut_groups(GroupSteps.of([step_of(2, [200]), decoding, None]))
    assert halves is not None
    first, second = halves
    assert first.idle == (False, False, True) and second.idle == (False, True, True)
    assert first.num_tokens == [66, 3, 1] and second.num_tokens == [136, 1, 1]
    assert first.steps[1] is decoding and rows(first.steps[0]) + rows(second.steps[0]) == rows(step_of(2, [200]))


def test_groups_of_which_none_can_be_cut_or_one_verifies_draft_tokens_compute_whole_steps() -> None:
    decoding, verifying = step_of(3, []), step_of(1, [])
    decoding.prompts = verifying.prompts = None
    verifying.widths, verifying.width = np.full(1, 2, np.int32), 2
    assert cut_groups(GroupSteps.of([decoding, None])) is None
    assert cut_groups(GroupSteps.of([step_of(0, [200]), verifying])) is None


def test_padding_has_a_row_in_later_stages_of_a_pipeline() -> None:
    """Where a group has all of its step in the first half, the second one computes a row of padding, which the stage
    before does not hand on."""
    intermediate = torch.arange(6.0).view(3, 2)
    seen: dict[int, torch.Tensor] = {}

    def compute(batch: Any, received: torch.Tensor) -> torch.Tensor:
        seen[len(batch.input_ids)] = received.clone()
        return received

    stage: Any = object.__new__(CausalLM)
    stage.input_buffer = lambda num_tokens: torch.full((num_tokens, 2), torch.nan)
    stage.pp = SimpleNamespace(receive_from_previous=lambda rows: rows.copy_(intermediate))
    stage.defers_all_reduce, stage.compute, stage.description = False, compute, SimpleNamespace(last_stage=True)
    whole, first, second = (SimpleNamespace(input_ids=torch.zeros(n), aux_hidden_states=[]) for n in (3, 3, 1))
    hidden = stage.forward_microbatches(whole, (first, second), PingPong(CpuSideStream()))
    assert torch.equal(hidden, intermediate) and torch.equal(seen[3], intermediate)
    assert torch.equal(seen[1], torch.zeros(1, 2))

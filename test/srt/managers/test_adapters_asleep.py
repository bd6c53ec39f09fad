"""LoRA adapters on a server that sleeps: their slots have the same content when it wakes, on a CPU whose memory is
overwritten when it is given back."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.managers.scheduler.memory_control import MemoryControl
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.utils.engine_state import WEIGHTS
from srt.managers.test_adapters import Adapters, prompt, run

FORMS = {"one": {"rank": 8}, "other": {"rank": 17}}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters("qwen3", tmp_path_factory.mktemp("adapters"), FORMS)


def slots_of(scheduler: Scheduler) -> list[torch.Tensor]:
    layers = scheduler.runner.adapters
    assert layers is not None
    return [layers.ranks, *(side for linear in layers.linears for side in (linear.a, linear.b))]


def test_slots_have_their_content_after_waking(adapters: Adapters) -> None:
    """Also of an adapter that came into its slot after the first sleep."""
    scheduler = adapters.scheduler(enable_memory_saver=True)
    memory = MemoryControl(scheduler, scheduler.runner)
    for number, forms in enumerate(((None, "one"), (None, "one", "other"), ("other", "one"))):
        run(adapters, scheduler, {f"{number} {form}": (form, prompt(number)) for form in forms})
        for tags in ([], [WEIGHTS]):
            assert memory.sleep(tags, keep_weights=True) == ""
            assert slots_of(scheduler)[0].eq(-1).all(), "ranks are overwritten"
            assert memory.wake([]) == ""
        run(adapters, scheduler, {f"{number} {form} again": (form, prompt(number)) for form in forms})


def test_slots_are_kept_where_weights_are_not(adapters: Adapters) -> None:
    scheduler = adapters.scheduler(enable_memory_saver=True)
    memory = MemoryControl(scheduler, scheduler.runner)
    run(adapters, scheduler, {form: (form, prompt(1)) for form in FORMS})
    before = [side.clone() for side in slots_of(scheduler)]
    assert any(bool(side.any()) for side in before)
    assert memory.sleep([], keep_weights=False) == ""
    assert memory.wake([]) == ""
    assert all(torch.equal(now, then) for now, then in zip(slots_of(scheduler), before, strict=True))

"""Adapters of experts in the scheduler against transformers with each adapter merged into the weights in fp32: every
layout of their files, mixed in one step, and experts that checkpoints keep in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.adapters.files import content_id
from srt.adapter_files import EXPERT_LAYOUTS, write_adapter, write_expert_adapter
from srt.managers.fake_runner import Collector, assert_clean, run_to_end
from srt.managers.test_adapters import Adapters, prompt


class ExpertAdapters(Adapters):
    """A tiny mixture of experts with adapters of several layouts."""

    def __init__(self, name: str, folder: Path, layouts: tuple[str, ...], **options: Any) -> None:
        super().__init__(name, folder, {})
        base = self.models[None]
        for number, layout in enumerate(layouts):
            path = self.paths[layout] = folder / f"adapter {number}"
            self.models[layout] = write_expert_adapter(
                path, base, number, layout, rank=(4, 1, 17)[number % 3], **options
            )
            self.ids[layout] = content_id(path)


def check(adapters: Adapters, **options: Any) -> None:
    scheduler = adapters.scheduler(**options)
    asked = {f"{form} {seed}": (form, prompt(seed)) for form in (None, *adapters.paths) for seed in (1, 2)}
    collector = Collector()
    for rid, (form, ids) in asked.items():
        adapters.ask(scheduler, rid, form, ids)
    run_to_end(scheduler, collector)
    adapters.check(collector, asked)
    assert_clean(scheduler)
    answers = {form: tuple(adapters.greedy(form, prompt(1))) for form in (None, *adapters.paths)}
    assert len(set(answers.values())) == len(answers)


def test_every_layout_in_one_step(tmp_path: Path) -> None:
    check(ExpertAdapters("qwen3_moe", tmp_path, EXPERT_LAYOUTS))


@pytest.mark.parametrize(("model", "columns", "alternating"), [("gpt_oss", True, True), ("qwen3_5_moe", False, False)])
def test_experts_in_one_tensor(tmp_path: Path, model: str, columns: bool, alternating: bool) -> None:
    check(ExpertAdapters(model, tmp_path, ("flat", "each", "stacked"), columns=columns, alternating=alternating))


def test_the_shared_expert_among_the_routed_ones(tmp_path: Path) -> None:
    adapters = Adapters("deepseek_v3", tmp_path, {})
    names = ["shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"]
    path = adapters.paths["shared"] = tmp_path / "shared"
    base = adapters.models[None]
    whole = {name for name, _ in base.named_modules() if ".shared_experts." in name}
    adapters.models["shared"] = write_adapter(path, base, 1, modules=whole, target_modules=names)
    adapters.ids["shared"] = content_id(path)
    for apart in (False, True):
        check(adapters, disable_shared_experts_fusion=apart)


def test_experts_in_main_memory(tmp_path: Path) -> None:
    adapters = ExpertAdapters("qwen3_moe", tmp_path, ("stacked", "outer"))
    for resident in (2, 3):
        check(adapters, enable_paged_experts=True, paged_experts_num_resident=resident)

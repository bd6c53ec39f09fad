"""The table of kinds, layouts and features says what the server does, and tests get from it what they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import FEATURES, KINDS, LAYOUTS, cells, flags_of, kinds, layouts, save_kind, smallest_kinds, why_not
from pairs import some, some_of, with_each_value
from srt.models.harness import plan_for

from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.plan.layout import asked_layout, check_layout
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.two_batch_overlap import alternates_by_block, has_experts
from sglang.srt.server_args import ServerArgs

FOUR = LAYOUTS["TP4"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_kind(name, tmp_path_factory.mktemp("model")) for name in KINDS}


def served(model: ModelDescription, ranks: RankLayout) -> str:
    """Returns why the layout does not divide the model; "" if it does."""
    try:
        check_layout(model, ranks)
    except UserError as error:
        return str(error)
    return ""


def test_a_kind_has_the_layouts_that_divide_it(models: dict[str, Path], tmp_path: Path) -> None:
    wrong = []
    for name, kind in KINDS.items():
        model = plan_for(models[name]).description
        at_four = plan_for(save_kind(name, tmp_path / name, FOUR)).description if kind.at_four else model
        for layout, ranks in LAYOUTS.items():
            problem, expected = served(at_four if ranks.attn_tp_size == 4 else model, ranks), why_not(name, layout)
            if bool(problem) != bool(expected):
                wrong.append(f"{name}, {layout}: {problem or 'served'}, and not {expected or 'served'}")
    assert not wrong, "\n".join(wrong)


def plan(folder: Path, **flags: Any) -> Plan | str:
    """Returns the plan of a server, or why there is none."""
    try:
        return create_plan(
            ServerArgs.from_kwargs(
                model_path=str(folder), device="cpu", skip_tokenizer_init=True, max_total_tokens=256,
                max_running_requests=4, context_length=160, **flags,
            )
        )  # fmt: skip
    except UserError as error:
        return str(error)


def test_features_go_with_the_kinds_that_have_them(models: dict[str, Path]) -> None:
    """A type of keys and values is served if the plan has it and not the model's own."""
    wrong = []
    for name in KINDS:
        for dtype in ("fp8", "fp4"):
            flags = dict(FEATURES[dtype].flags)
            made = plan(models[name], page_size=16, **flags)
            has = isinstance(made, Plan) and made.kv_cache_dtype == flags["kv_cache_dtype"]
            if has != (why_not(name, feature=dtype) is None):
                wrong.append(f"{name}, {dtype}: {made if isinstance(made, str) else made.kv_cache_dtype}")
    assert not wrong, "\n".join(wrong)


def test_experts_go_to_main_memory_in_every_kind_that_has_them(models: dict[str, Path]) -> None:
    wrong = []
    for name, kind in KINDS.items():
        planned = plan(models[name], page_size=kind.page, **FEATURES["experts in main memory"].flags)
        has = isinstance(planned, Plan) and planned.expert_slots is not None
        if has != (why_not(name, feature="experts in main memory") is None):
            wrong.append(f"{name}: {planned if isinstance(planned, str) else planned.expert_slots}")
    assert not wrong, "\n".join(wrong)


def test_tags_are_what_the_models_have(models: dict[str, Path]) -> None:
    wrong = []
    for name, kind in KINDS.items():
        description = plan_for(models[name]).description
        own_sums = not alternates_by_block(description, attn_dp_size=1)
        for tag, has in (("experts", has_experts(description)), ("own sums", own_sums)):
            if has != (tag in kind.tags):
                wrong.append(f"{name}: {'add' if has else 'remove'} the tag {tag!r}")
        if isinstance(refused := plan(models[name], page_size=kind.page), str):
            wrong.append(f"{name}: page={kind.page} is refused: {refused}")
        if kind.page > 1 and isinstance(plan(models[name], page_size=kind.page // 2), Plan):
            wrong.append(f"{name}: page={kind.page // 2} is served, too; set the smallest")
    assert not wrong, "\n".join(wrong)


def test_questions_get_what_they_ask_for() -> None:
    assert "latents" in kinds("one KV head, experts") and "dense" not in kinds("experts")
    assert set(kinds(lacking="")) == set(KINDS) > set(kinds()) and not set(kinds()) & set(kinds("repeats", lacking=""))
    assert len(smallest_kinds()) == len({kind.attention for kind in KINDS.values()})
    assert layouts("DCP, PP") == ("DCP2 x PP2", "TP4 x DP2 x DCP2 x PP2")
    assert cells(("dense", "experts"), ("TP2", "EP2")) == [("TP2", "dense"), ("TP2", "experts"), ("EP2", "experts")]
    assert cells(("dense", "selected blocks"), feature="fp4") == [("one rank", "dense")]
    with pytest.raises(ValueError, match="exprts"):
        kinds("exprts")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_flags_of_a_layout_ask_for_it(layout: str) -> None:
    assert asked_layout(ServerArgs(model_path="x", **flags_of(layout))) == LAYOUTS[layout]


def test_a_quick_case_that_is_no_case_is_an_error() -> None:
    """A name that was changed in one place would take the case out of `make test`."""
    with pytest.raises(ValueError, match="draft_tokens"):
        some(["draft tokens"], ["draft_tokens"])
    with pytest.raises(ValueError, match="TP3"):
        some_of([("dense", "TP2")], [("dense", "TP3")])


def test_a_value_without_a_quick_case_gets_one() -> None:
    cases = [(draft, kind) for draft in ("a", "b") for kind in ("x", "y", "z")]
    quick = [case.values for case in with_each_value(cases, [("a", "y")]) if not case.marks]
    assert ("a", "y") in quick and {value for case in quick for value in case} == {"a", "b", "x", "y", "z"}
    assert len(quick) == 3

"""Ranks agree on one plan, or none starts: other cards, less memory, other kernels, packages and variables."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some
from rank_processes import run_ranks

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import agreement, parallel_state
from sglang.srt.distributed.agreement import (
    AgreedGpus,
    agree_on_gpus,
    agreed_plan,
    refuse_difference,
    refuse_unlike_tiles,
)
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import CPU, ArchTraits, arch_by_name
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.spec import PeerLinks
from sglang.srt.managers.scheduler import scheduler_setup
from sglang.srt.plan.decode_interval import IntervalRule
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.plan_items import plan_items
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.server_args import ServerArgs
from srt.kernels import published
from srt.managers.test_parallel_schedules import Outcome, outcome, play

CARDS = ("rtx-5090", "rtx-pro-6000-server")
QUICK = ("deepseek_v4", "gpt_oss", "qwen35")
"""Published models that are not only in `make thorough`."""
FREE = (32 << 30, 30 << 30)


def plan_of(arch: ArchTraits, free: int = FREE[0], rank: int = 0, **flags: Any) -> Plan:
    args = ServerArgs.from_kwargs(**{"model_path": str(DEFAULT_MODEL_PATH), "tp_size": 2, **flags})
    model = ModelConfig.from_server_args(args)
    return make_plan(args, model, arch, free, packages=frozenset({"triton"}), rank=rank, advises=False)


def test_plans_of_other_cards_differ_and_the_message_names_both() -> None:
    plans = [plan_of(arch_by_name(card)) for card in CARDS]
    assert plans[0].max_total_num_tokens != plans[1].max_total_num_tokens
    items = {rank: plan_items(plan)[0] for rank, plan in enumerate(plans)}
    with pytest.raises(UserError) as refused:
        refuse_difference(CARDS, items, "have different plans")
    message = str(refused.value)
    assert message.startswith("rank 0 (rtx-5090) and rank 1 (rtx-pro-6000-server) have different plans: ")
    assert "arch.num_sms: 170 and 188" in message and "more. All ranks" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_total_num_tokens": 64}, "max_total_num_tokens: 20,"),
        ({"chunked_prefill_size": 7}, "chunked_prefill_size: "),
        ({"decode_interval": IntervalRule(9, 1)}, "decode_interval.steps: "),
        ({"cuda_graph_bs": ()}, "cuda_graph_bs: 1, 2, "),
        ({"choices": {}}, "choices."),
        ({"tile_configs": {}}, "tile_configs."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_decides_is_compared(change: dict[str, Any], named: str) -> None:
    plan = plan_of(arch_by_name(CARDS[0]))
    items = {3: plan_items(plan)[0], 5: plan_items(replace(plan, **change))[0]}
    with pytest.raises(UserError, match=r"rank 3 \(a\) and rank 5 \(b\) ") as refused:
        refuse_difference(["", "", "", "a", "", "b"], items, "differ")
    assert named in str(refused.value)


def test_stages_differ_in_nothing_but_what_is_a_stages_own() -> None:
    plans = [plan_of(arch_by_name(CARDS[0]), rank=rank, pp_size=2) for rank in range(4)]
    items = [plan_items(plan) for plan in plans]
    assert items[0] == items[1] and items[2] == items[3] and items[0][1] != items[2][1]
    assert all(everywhere == items[0][0] for everywhere, _ in items)


def test_texts_for_the_user_may_differ() -> None:
    plan = plan_of(arch_by_name(CARDS[0]))
    elsewhere = replace(plan, warnings=("this",), model=replace(plan.model, model_path="/elsewhere"))
    assert plan_items(plan) == plan_items(elsewhere)


@pytest.mark.parametrize("name", some(sorted(published.config_files()), QUICK))
def test_plans_of_every_published_model_can_be_compared(name: str, tmp_path: Path) -> None:
    """With the draft that it brings, if it brings one."""
    path = str(published.checkpoint(name, tmp_path))
    server, arch = {"model_path": path, "load_format": "dummy"}, arch_by_name(CARDS[1])
    for drafts in ({"speculative_algorithm": "NEXTN"}, {}):
        for size in (8, 1):
            with suppress(UserError):
                everywhere, in_stage = plan_items(plan_of(arch, 2 << 40, 0, tp_size=size, **server, **drafts))
                assert everywhere["max_total_num_tokens"] and in_stage
                return
    pytest.skip("not served")


# --- ranks -----------------------------------------------------------------------------------------------------------


def _cards(rank: int, folder: str, cards: tuple[str, ...], other_version: bool) -> None:
    """Writes the sizes that this rank plans, or why it does not."""
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(2), rank, "gloo", f"file://{folder}/rendezvous")
    if other_version and rank:
        agreement._version = lambda package: "0.1" if package == "triton" else None  # type: ignore[assignment]
    said: dict[str, Any] = {}
    try:
        agreed = agree_on_gpus(arch_by_name(cards[rank]), cards[rank])
        plan = agreed_plan(agreed, 0, partial(plan_of, agreed.arch, parallel_state.min_over_ranks(FREE[rank])))
        said = {"sizes": plan.describe()["max_total_num_tokens"], "note": agreed.note}
    except UserError as error:
        said = {"refused": str(error)}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
    parallel_state.shutdown()


def _of_cards(folder: Path, *cards: str, other_version: bool = False) -> dict[str, Any]:
    run_ranks(_cards, (str(folder), cards, other_version), 2)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second, "every rank says the same"
    return first


def test_other_cards_of_an_architecture_get_the_plan_of_the_least(tmp_path: Path) -> None:
    said = _of_cards(tmp_path, *CARDS)
    least = replace(arch_by_name("rtx-5090"), bandwidth=arch_by_name("rtx-pro-6000-server").bandwidth)
    assert said["sizes"] == plan_of(least, min(FREE)).max_total_num_tokens
    assert said["note"] == (
        "the GPUs differ (rtx-5090 on rank 0; rtx-pro-6000-server on rank 1): every rank is planned for the least of"
        " each, 170 SMs, 1,597 GB/s, and the step takes as long as on the slowest"
    )


def test_another_architecture_is_refused_on_every_rank(tmp_path: Path) -> None:
    refused = _of_cards(tmp_path, "rtx-5090", "gb10")["refused"]
    assert refused.startswith("rank 0 (rtx-5090) and rank 1 (gb10) cannot share a model: architecture: sm_120 and sm_1")


def test_another_version_of_a_package_is_refused_on_every_rank(tmp_path: Path) -> None:
    refused = _of_cards(tmp_path, "rtx-5090", "rtx-5090", other_version=True)["refused"]
    assert "triton: " in refused and " and 0.1" in refused


def _ways(rank: int, folder: str) -> None:
    parallel_state.init(RankLayout(2), rank, "gloo", f"file://{folder}/rendezvous")
    seen = (PeerLinks(Topology.NVLINK, library=Topology.HOST_BRIDGE), PeerLinks(Topology.SWITCH))[rank]
    links = scheduler_setup.slowest_links(seen)
    assert (links.topology, links.library_topology) == (Topology.SWITCH, Topology.HOST_BRIDGE)
    parallel_state.shutdown()


def test_thresholds_follow_the_farthest_links_of_any_machine(tmp_path: Path) -> None:
    run_ranks(_ways, (str(tmp_path),), 2)


def _problem(rank: int, folder: str) -> None:
    parallel_state.init(RankLayout(2), rank, "gloo", f"file://{folder}/rendezvous")
    messages = []
    for problems in (("", "of one"), ("of both", "of both")):
        make: Callable[[], Plan] = partial(plan_of, CPU)
        if problems[rank]:
            make = partial(_raise, problems[rank])
        with pytest.raises(UserError) as refused:
            agreed_plan(AgreedGpus(("a", "b"), CPU), 0, make)
        messages.append(str(refused.value))
    assert messages == ["rank 1 (b) has no plan: of one", "of both"]
    parallel_state.shutdown()


def _raise(message: str) -> Plan:
    raise UserError(message)


def test_a_rank_without_a_plan_ends_all_with_its_reason(tmp_path: Path) -> None:
    run_ranks(_problem, (str(tmp_path),), 2)


def _tiles(rank: int, folder: Path, stages: int) -> None:
    parallel_state.init(RankLayout(2 // stages, pp_size=stages), rank, "gloo", f"file://{folder}/rendezvous")
    used = {"extend, planned with tile M128": ("M128", "M64")[rank], "decode, planned with tile M16": "M16"}
    own = {f"kernel of rank {rank} alone": "M32"}
    said = ""
    try:
        refuse_unlike_tiles("sm_120", rank * (stages - 1), used | own)
    except UserError as error:
        said = str(error)
    (folder / f"{rank}.txt").write_text(said)
    parallel_state.shutdown()


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_of_a_stage_that_go_on_with_different_tiles_are_refused(stages: int, tmp_path: Path) -> None:
    run_ranks(_tiles, (tmp_path, stages), 2)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    if stages == 2:
        assert not first, "stages compute for themselves"
    else:
        assert first.startswith("rank 0 (sm_120) and rank 1 (sm_120) compute with different tiles")
        assert "start the server again): extend, planned with tile M128: M128 and M64. All" in first


# --- ranks that serve ------------------------------------------------------------------------------------------------

SMALL = replace(CPU, num_sms=4, memory=1)
LITTLE_FREE = 64 << 20


def _serve(rank: int, folder: Path, page_size: int | None) -> None:
    """Serves a schedule. The second rank has a smaller card, little memory and, where one is given, other pages."""
    torch.set_num_threads(1)
    if rank == 1:
        free, make = scheduler_setup.free_memory_bytes, scheduler_setup.make_plan
        changed: dict[str, Any] = {
            "current_arch": lambda index, device: SMALL,
            "free_memory_bytes": lambda index, unified=False: min(LITTLE_FREE, free(index, unified)),
        }
        if page_size is not None:
            changed["make_plan"] = lambda *args, **more: replace(make(*args, **more), page_size=page_size)
        for name, function in changed.items():
            setattr(scheduler_setup, name, function)
    said: dict[str, Any] = {}

    def schedule(scheduler: Any) -> Outcome:
        plan = scheduler.plan
        said.update(pool=plan.max_total_num_tokens, num_sms=plan.arch.num_sms, notes=plan.describe()["warnings"])
        return play(scheduler)

    try:
        result = outcome(
            *(str(DEFAULT_MODEL_PATH), RankLayout(2), rank, f"file://{folder}/rendezvous"), schedule=schedule,
            max_total_tokens=None,
        )  # fmt: skip
        said["outcome"] = result.__dict__
    except UserError as error:
        said["refused"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    parallel_state.shutdown()


def _served(folder: Path, page_size: int | None = None) -> dict[str, Any]:
    run_ranks(_serve, (folder, page_size), 2)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    if "outcome" in second:
        assert first["outcome"]["logprobs"] and not second["outcome"]["logprobs"], "the leader alone keeps them"
        second["outcome"]["logprobs"] = first["outcome"]["logprobs"]
    assert first == second, "every rank says the same"
    return first


def test_ranks_of_other_cards_serve_with_the_smaller_sizes(tmp_path: Path) -> None:
    said = _served(tmp_path)
    alone = outcome(str(DEFAULT_MODEL_PATH), RankLayout(1), 0, None)
    assert Outcome(**said["outcome"]).tokens == alone.tokens
    assert said["pool"] == plan_of(CPU, LITTLE_FREE, max_running_requests=4, dtype="float32").max_total_num_tokens
    assert said["num_sms"] == 0, "the least of all"
    assert said["notes"][-1].startswith("the GPUs differ (cpu on ranks 0, 1): ")


def test_a_rank_that_decides_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    refused = _served(tmp_path, page_size=4)["refused"]
    assert refused.startswith("rank 0 (cpu) and rank 1 (cpu) have different plans: page_size: 1 and 4. ")

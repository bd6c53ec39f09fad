"""Replicas that share the experts of their rank: the second reads no expert, gives the same logits, and goes on when
the first is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.moe import shared_bank
from sglang.srt.layers.moe.expert_buffers import tensors_of
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.moe.shared_bank import SharedBank
from sglang.srt.mem_cache.node_memory import ANYWHERE, RowNodes
from sglang.srt.model_loader import loader
from sglang.srt.plan.ranks import ONE_RANK
from srt.layers.moe.moe_harness import NATIVE, make_case

from .harness import TinyRunner, save_tiny
from .test_expert_slots import offloaded, played

NOWHERE = (ANYWHERE, ANYWHERE)


def planned(*features: str) -> Any:
    """What a bank's name says of a plan."""
    return SimpleNamespace(arch=SimpleNamespace(features={*features}), dtype="float32", stages=(), ranks=ONE_RANK)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the bank that a test joins."""
    monkeypatch.setattr(shared_bank, "_joined", None)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_logits_of_a_replica_that_loads_no_experts(
    name: str, tmp_path: Path, joined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, all in a tensor with biases, and with a shared expert among them."""
    save_tiny(name, tmp_path)
    want = played(offloaded(tmp_path, 3, 1), 1)
    filled: list[str] = []
    fill_part = loader.fill_part

    def remember(param: Any, *others: Any) -> int:
        filled.append(param.name)
        return fill_part(param, *others)

    monkeypatch.setattr(loader, "fill_part", remember)
    banks, loaded = [], []
    for _ in range(2):
        filled.clear()
        shared_bank.join_bank(str(tmp_path), 0, planned())
        banks.append(shared_bank.joined_bank())
        got = played(offloaded(tmp_path, 3, 1), 1)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
        loaded.append({part for part in filled if ".w13" in part or ".w2" in part})
    assert [bank.follows for bank in banks if bank] == [False, True]
    assert loaded[0] and not loaded[1], "what is in the bank is not read again"


def test_both_see_the_same_memory_and_keep_no_other(tmp_path: Path, joined: None) -> None:
    save_tiny("qwen3_moe", tmp_path)
    models = []
    for _ in range(2):
        shared_bank.join_bank(str(tmp_path), 0, planned())
        models.append(TinyRunner(offloaded(tmp_path, 3, 1)).model)
    first, second = (model.expert_buffers.layers for model in models)
    for one, other in zip(first, second, strict=True):
        for tensor, same in zip(tensors_of(one.bank), tensors_of(other.bank), strict=True):
            assert tensor.data_ptr() != same.data_ptr() and torch.equal(tensor, same)
            with torch.inference_mode():
                tensor.view(torch.uint8)[0] += 1
            assert torch.equal(tensor, same), "written once, seen twice"
    assert not any(".moe.w" in name for model in models for name in model.params)


FORMS = {"bf16": (None, (), False), "nvfp4": ("nvfp4", (), False), "packed": ("nvfp4", NATIVE, False),
         "mxfp4": ("mxfp4", (), False), "fp8": ("fp8_block", (), False), "int4": ("int4_g32", (), True)}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_arrives_as_it_was(form: str, tmp_path: Path) -> None:
    scheme, features, zeros = FORMS[form]
    case = make_case(scheme, 2, 4, 2, features=features, bias=not zeros, zero_points=zeros)
    bank, other = SharedBank(tmp_path, "bank"), SharedBank(tmp_path, "bank")
    placed = (RowNodes((0, 1), 2), RowNodes((0, 1)))
    kept = bank.keep((case.w13, case.w2), placed)
    bank.publish()
    for weights, *copies in zip((case.w13, case.w2), kept, other.take(), strict=True):
        for copy in copies:
            assert isinstance(copy, ExpertWeights)
            assert (copy.scheme, copy.plane_cols, copy.rows, copy.cols) == (
                weights.scheme, weights.plane_cols, weights.rows, weights.cols,
            )  # fmt: skip
            for one, same in zip(tensors_of((weights, weights)), tensors_of((copy, copy)), strict=True):
                assert one.dtype == same.dtype and torch.equal(one.view(torch.uint8), same.view(torch.uint8))
                assert same.untyped_storage().nbytes() == same.nbytes, "alone in its mapping, so that it can be locked"


def test_banks_are_those_of_a_rank_and_a_form(tmp_path: Path, joined: None) -> None:
    banks = []
    for rank, plan in ((0, planned()), (1, planned()), (0, planned("block_scaled_mma")), (0, planned())):
        shared_bank.join_bank(str(tmp_path), rank, plan)
        banks.append(shared_bank.joined_bank())
    assert [bank.follows for bank in banks if bank] == [False, False, False, True]


LOADS = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from srt.models import test_shared_bank as tests
from srt.layers.moe.moe_harness import make_case
bank = tests.SharedBank(Path({folder!r}), "bank")
case = make_case(None, 2, 4, 2)
bank.keep((case.w13, case.w2), tests.NOWHERE)
{then}
print("there", flush=True)
time.sleep(60)
"""


def loading(folder: Path, then: str) -> subprocess.Popen[str]:
    """Another process that has the experts of `make_case(None, 2, 4, 2)` in its bank."""
    script = LOADS.format(path=[str(Path(__file__).parents[2])], folder=str(folder), then=then)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_the_others_go_on_when_the_one_that_loaded_is_killed(tmp_path: Path) -> None:
    process = loading(tmp_path, "bank.publish()")
    bank = SharedBank(tmp_path, "bank")
    assert bank.follows
    up, down = bank.take()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    case = make_case(None, 2, 4, 2)
    assert torch.equal(up.data, case.w13.data) and torch.equal(down.data, case.w2.data)
    held = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:experts" in line]
    assert len(held) >= 2 and all("(deleted)" in line for line in held), "no name is left in the file system"


def test_a_replica_that_ends_before_it_had_them_is_said(tmp_path: Path) -> None:
    process = loading(tmp_path, "")
    bank = SharedBank(tmp_path, "bank")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(UserError, match="has ended before it had them"):
        bank.take()


def test_those_that_follow_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, other, looks = SharedBank(tmp_path, "bank"), SharedBank(tmp_path, "bank"), list[float]()
    case = make_case(None, 2, 4, 2)
    bank.keep((case.w13, case.w2), NOWHERE)

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            bank.publish()

    monkeypatch.setattr(time, "sleep", look)
    assert torch.equal(other.take()[0].data, case.w13.data) and len(looks) == 3
    assert json.loads((tmp_path / "bank.json").read_text())["process"] == os.getpid()


def test_memory_that_the_system_does_not_give_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    case = make_case(None, 2, 4, 2)
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(UserError, match="cannot be had for experts that replicas share.*No space"):
        SharedBank(tmp_path, "bank").keep((case.w13, case.w2), NOWHERE)

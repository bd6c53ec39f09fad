"""Experts in main memory: slots against an oracle, copies, and products bit for bit those of resident experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import interpreter
import pytest
import torch
from pairs import some

from sglang.srt.configs.activation import SILU
from sglang.srt.errors import UserError
from sglang.srt.layers.moe import expert_slots, slot_ops
from sglang.srt.layers.moe.expert_buffers import ExpertBuffers
from sglang.srt.layers.moe.expert_slots import EVERY_EXPERT, ExpertSlots, _each_tensor
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.slot_ops import Moves, SlotTables
from sglang.srt.layers.triton_ops import expert_slots as kernels
from sglang.srt.plan import expert_slots as planned
from srt.layers.moe.moe_harness import make_case, tile_configs_of

DEVICE = interpreter.DEVICE
BOTH = {"torch": slot_ops.EXPERT_SLOTS, "triton": kernels.EXPERT_SLOTS}


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)


def random_steps(num_experts: int, num_slots: int, count: int, seed: int) -> Iterator[torch.Tensor]:
    """Ids of steps with at most as many pairs as slots, a few of them padding; some experts are liked more."""
    choose = random.Random(seed)
    for _ in range(count):
        top_k = choose.randint(1, min(4, num_slots))
        rows = choose.randint(1, num_slots // top_k)
        liked = choose.sample(range(num_experts), max(top_k, num_experts // 3))
        ids = [choose.sample(liked if choose.random() < 0.7 else range(num_experts), top_k) for _ in range(rows)]
        padding = choose.randint(0, rows // 2)
        for row in ids[rows - padding :]:
            row[:] = [-1] * top_k
        yield torch.tensor(ids, dtype=torch.int32, device=DEVICE)


class Oracle:
    """A list of experts, the one that was used longest ago first."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.slots = {num_experts - num_slots + slot: slot for slot in range(num_slots)}
        self.used = dict.fromkeys(self.slots.values(), 0)
        self.step = 0

    def take(self, experts: set[int]) -> list[tuple[int, int]]:
        self.step += 1
        for expert in experts & self.slots.keys():
            self.used[self.slots[expert]] = self.step
        moves = []
        for expert in sorted(experts - self.slots.keys()):
            slot = min(self.used, key=lambda slot: (self.used[slot], slot))
            self.slots = {other: at for other, at in self.slots.items() if at != slot} | {expert: slot}
            self.used[slot] = self.step
            moves.append((expert, slot))
        return moves


@interpreter.kernel_test
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("sizes", [(8, 2), (8, 5), (40, 39), (130, 17)], ids=str)
def test_misses_take_the_slots_used_longest_ago(sizes: tuple[int, int], name: str) -> None:
    of, device = BOTH[name], torch.device(DEVICE)
    tables, moves = SlotTables.filled(*sizes, device), Moves.room_for(sizes[0], device)
    oracle = Oracle(*sizes)
    asked = missed = 0
    for ids in random_steps(*sizes, 20, seed=sizes[1]):
        of.choose(ids, tables, moves)
        used = {*ids.flatten().tolist()} - {-1}
        want = oracle.take(used)
        assert [tuple(move) for move in moves.rows[: int(moves.count)].tolist()] == want
        slot_of = tables.slot_of_expert.tolist()
        assert {expert: slot for expert, slot in enumerate(slot_of) if slot >= 0} == oracle.slots
        assert [slot_of[expert] for expert in tables.expert_of_slot.tolist()] == list(range(sizes[1]))
        rows = of.look_up(ids, tables.slot_of_expert)
        assert rows.tolist() == [[-1 if e < 0 else oracle.slots[e] for e in row] for row in ids.tolist()]
        missed += len(want)
        asked += len(used)
        assert tables.totals.tolist() == [asked, missed]
    assert missed > 3, "the schedule asks for nothing new"


@interpreter.kernel_test
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("every", [False, True])
def test_buffers_get_experts_from_slots_if_these_have_them(every: bool, name: str) -> None:
    of, device = BOTH[name], torch.device(DEVICE)
    tables, moves = SlotTables.filled(6, 2, device), Moves.room_for(6, device)
    of.stage(torch.tensor([[0, 4], [-1, -1], [4, 2]], dtype=torch.int32, device=DEVICE), tables, moves, every)
    want = [[0, 0], [1, 1], [2, 2], [3, 3], [~0, 4], [~1, 5]]
    assert moves.rows[: int(moves.count)].tolist() == (want if every else [want[0], want[2], want[4]])


@interpreter.kernel_test
@pytest.mark.parametrize("name", BOTH)
def test_copies_of_every_size(name: str) -> None:
    """More than one strip of each kind, and sizes that are no multiple of a strip."""
    of, device = BOTH[name], torch.device(DEVICE)
    widths = (4 * kernels.WORDS + 48, 16, kernels.NARROW + 3, 1)

    def rows(num: int, first: int) -> list[torch.Tensor]:
        tensors = [torch.arange(num * width) * 7 + first for width in widths]
        return [t.to(torch.uint8).view(num, width).to(device) for t, width in zip(tensors, widths, strict=True)]

    bank, slots, target = (
        rows(5, 1),
        rows(2, 99),
        [torch.zeros(5, width, dtype=torch.uint8, device=device) for width in widths],
    )
    copies = of.prepare(slot_ops.ExpertCopies(bank, slots, target))
    moves = Moves.room_for(5, device)
    moves.rows[:3] = torch.tensor([[4, 0], [~1, 3], [2, 2]])
    moves.count.fill_(3)
    of.copy(copies, moves)
    for source, slot, got in zip(bank, slots, target, strict=True):
        assert torch.equal(got[0], source[4]) and torch.equal(got[3], slot[1]) and torch.equal(got[2], source[2])
        assert not got[1].any() and not got[4].any()


KEPT: list[ExpertSlots] = []
"""Memory stays page-locked until its process ends: its addresses must not become those of other memory before."""


def slots_of(case, num_slots: int, num_buffers: int = 1, buffers: ExpertBuffers | None = None) -> ExpertSlots:
    plan = SimpleNamespace(entry=lambda op: kernels.EXPERT_SLOTS)
    bank = _each_tensor(case.w13, torch.Tensor.cpu), _each_tensor(case.w2, torch.Tensor.cpu)
    slots = ExpertSlots(plan, bank, num_slots, num_buffers, buffers or ExpertBuffers(), torch.device(DEVICE))
    KEPT.append(slots)
    return slots


@interpreter.kernel_test
@pytest.mark.parametrize(
    "scheme", some([None, "fp8_block", "int8_channel", "int4_g64", "mxfp4", "nvfp4"], {None, "fp8_block", "mxfp4"})
)
def test_products_are_those_of_resident_experts(scheme: str | None) -> None:
    """Of steps with few pairs and with many, for every number of slots."""
    experts, top_k = 8, 2
    for num_slots in (top_k, 5, experts - 1):
        case = make_case(scheme, 24, experts, top_k, hidden=256, inter=128, bias=scheme == "mxfp4", device=DEVICE)
        slots = slots_of(case, num_slots)
        for tokens in (slice(0, 1), slice(1, 2), slice(0, 2), slice(5, 8), slice(0, 24), slice(2, 3)):
            x, ids, weights = case.x[tokens], case.ids[tokens].contiguous(), case.weights[tokens].contiguous()
            configs = tile_configs_of(case.w13, case.w2, ids)
            want = fused_moe(x, case.w13, case.w2, weights, ids, SILU, configs)
            w13, w2, rows = slots.of_step(ids)
            assert w13.num_experts == (num_slots if ids.numel() <= num_slots else experts)
            got = fused_moe(x, w13, w2, weights, rows, SILU, configs)
            torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)


@interpreter.kernel_test
def test_layers_take_buffers_in_turn_and_only_the_first_step_fills_all() -> None:
    case = make_case(None, EVERY_EXPERT * 4, 4, 1, device=DEVICE)
    buffers = ExpertBuffers()
    layers = [slots_of(case, 2, 2, buffers) for _ in range(3)]
    places = [layer.of_step(case.ids)[0].data.data_ptr() for layer in layers]
    assert places[0] == places[2] != places[1]
    assert len(buffers.by_form) == 1


def test_limits_of_the_plan_the_ops_and_the_kernels_are_equal() -> None:
    assert planned.MAX_EXPERTS == slot_ops.MAX_EXPERTS == kernels.EXPERTS


def test_a_page_lock_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_slots, "register", lambda tensor: 2)
    with pytest.raises(UserError, match=r"0\.00 GiB of main memory cannot be page-locked.*ulimit -l.*--tp-size"):
        expert_slots._page_locked(torch.zeros(100))

"""Experts in main memory: slots against an oracle, copies, and products bit for bit those of resident experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import interpreter
import pytest
import torch
from pairs import some

from sglang.srt.configs.activation import SILU
from sglang.srt.errors import UserError
from sglang.srt.layers import parameter
from sglang.srt.layers.moe import expert_slots, slot_ops
from sglang.srt.layers.moe.expert_buffers import ExpertBuffers, each_tensor
from sglang.srt.layers.moe.expert_slots import EVERY_EXPERT, ExpertSlots
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.slot_ops import Moves, SlotTables, Wave
from sglang.srt.layers.triton_ops import expert_rows
from sglang.srt.layers.triton_ops import expert_slots as kernels
from sglang.srt.mem_cache import node_memory
from sglang.srt.mem_cache.main_memory import map_memory
from sglang.srt.mem_cache.node_memory import ANYWHERE
from sglang.srt.plan import expert_slots as planned
from srt.layers.moe.moe_harness import make_case, tile_configs_of

DEVICE = interpreter.DEVICE
BOTH = {"torch": slot_ops.EXPERT_SLOTS, "triton": kernels.EXPERT_SLOTS}


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)


def random_steps(num_experts: int, num_slots: int, count: int, seed: int) -> Iterator[torch.Tensor]:
    """Ids of steps, some with more experts than there are slots, a few of them padding; some experts are liked more."""
    choose = random.Random(seed)
    for _ in range(count):
        top_k = choose.randint(1, min(4, num_slots))
        rows = choose.randint(1, 2 * num_slots // top_k)
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

    def take(self, experts: set[int]) -> dict[int, int]:
        """Returns the slot of each of the experts that come; of those that find none -1, -2, ..."""
        self.step += 1
        found = {self.slots[expert] for expert in experts & self.slots.keys()}
        for slot in found:
            self.used[slot] = self.step
        comes = dict[int, int]()
        for expert in sorted(experts - self.slots.keys()):
            free = [slot for slot, step in self.used.items() if step < self.step]
            if not free:
                comes[expert] = min(0, *comes.values()) - 1
                continue
            slot = min(free, key=lambda slot: (self.used[slot], slot))
            self.slots = {other: at for other, at in self.slots.items() if at != slot} | {expert: slot}
            self.used[slot] = self.step
            comes[expert] = slot
        return comes


FIRST_SLOT, FIRST_SPARE = 3, 300


@interpreter.kernel_test
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("sizes", [(8, 2), (8, 5), (40, 39), (130, 17)], ids=str)
def test_misses_take_the_slots_used_longest_ago_and_then_spare_rows(sizes: tuple[int, int], name: str) -> None:
    of, device = BOTH[name], torch.device(DEVICE)
    tables, moves = SlotTables.filled(*sizes, device), Moves.room_for(sizes[0], device, FIRST_SLOT, FIRST_SPARE)
    oracle = Oracle(*sizes)
    asked = missed = spare = 0
    for ids in random_steps(*sizes, 20, seed=sizes[1]):
        of.choose(ids, tables, moves)
        used = {*ids.flatten().tolist()} - {-1}
        comes = oracle.take(used)
        want = {e: FIRST_SLOT + slot if slot >= 0 else FIRST_SPARE - 1 - slot for e, slot in comes.items()}
        assert [tuple(move) for move in moves.rows[: int(moves.count)].tolist()] == [*want.items()]
        slot_of = tables.slot_of_expert.tolist()
        assert {expert: slot for expert, slot in enumerate(slot_of) if slot >= 0} == oracle.slots
        assert [slot_of[expert] for expert in tables.expert_of_slot.tolist()] == list(range(sizes[1]))
        rows = {e: want[e] if e in want else FIRST_SLOT + oracle.slots[e] for e in used}
        assert moves.row_of_expert.tolist() == [rows.get(e, -1) for e in range(sizes[0])]
        missed += len(want)
        asked += len(used)
        spare += sum(slot < 0 for slot in comes.values())
        assert tables.totals.tolist() == [asked, missed]
    assert missed > 3 and (spare or sizes[1] == 39), "the schedule asks for nothing new, or for too little at once"


@interpreter.kernel_test
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("every", [False, True])
def test_waves_of_a_step_have_each_expert_once(every: bool, name: str) -> None:
    of, device = BOTH[name], torch.device(DEVICE)
    tables, moves = SlotTables.filled(7, 2, device), Moves.room_for(7, device, FIRST_SLOT, FIRST_SPARE)
    ids = torch.tensor([[0, 5], [-1, -1], [5, 3], [4, 2]], dtype=torch.int32, device=device)
    missing = [0, 1, 2, 3, 4] if every else [0, 2, 3, 4]
    for wave in range(2):
        of.stage(ids, tables, moves, Wave(3 * wave, 3, every))
        comes = missing[3 * wave : 3 * wave + 3]
        rows = {expert: FIRST_SPARE + place for place, expert in enumerate(comes)}
        assert moves.rows[: int(moves.count)].tolist() == [[expert, row] for expert, row in rows.items()]
        if wave == 0:
            rows |= {5: FIRST_SLOT} | ({6: FIRST_SLOT + 1} if every else {})
        assert moves.row_of_expert.tolist() == [rows.get(expert, -1) for expert in range(7)]
        masked = of.mask(ids, moves)
        assert masked.tolist() == [[e if e in rows else -1 for e in row] for row in ids.tolist()]


@interpreter.kernel_test
@pytest.mark.parametrize("name", BOTH)
def test_copies_of_every_size(name: str) -> None:
    """More than one strip of each kind, and sizes that are no multiple of a strip."""
    of, device = BOTH[name], torch.device(DEVICE)
    widths = (4 * kernels.WORDS + 48, 16, kernels.NARROW + 3, 1)
    tensors = [torch.arange(5 * width) * 7 + 1 for width in widths]
    bank = [t.to(torch.uint8).view(5, width).to(device) for t, width in zip(tensors, widths, strict=True)]
    target = [torch.zeros(6, width, dtype=torch.uint8, device=device) for width in widths]
    copies = of.prepare(slot_ops.ExpertCopies(bank, target))
    moves = Moves.room_for(5, device)
    moves.rows[:3] = torch.tensor([[4, 0], [1, 3], [2, 5]])
    moves.count.fill_(3)
    of.copy(copies, moves)
    for source, got in zip(bank, target, strict=True):
        assert torch.equal(got[0], source[4]) and torch.equal(got[3], source[1]) and torch.equal(got[5], source[2])
        assert not got[1].any() and not got[4].any()


@interpreter.kernel_test
def test_blocks_name_the_rows_of_their_experts() -> None:
    table = torch.tensor([7, -1, 40, 9], dtype=torch.int32, device=DEVICE)
    blocks = torch.tensor([3, 0, 2, 2, 12345], dtype=torch.int32, device=DEVICE)
    expert_rows.place_blocks(blocks, torch.tensor([4], dtype=torch.int32, device=DEVICE), table)
    assert blocks.tolist() == [9, 7, 40, 40, 12345]
    ids = torch.tensor([[3, -1], [2, 0]], dtype=torch.int32, device=DEVICE)
    assert expert_rows.look_up(ids, table).tolist() == [[9, -1], [40, 7]]


KEPT: list[ExpertSlots] = []
"""Memory stays page-locked until its process ends: its addresses must not become those of other memory before."""


def slots_of(case, num_slots: int, num_buffered: int, num_layers: int = 1) -> list[ExpertSlots]:
    """Layers with these experts, which share buffers."""
    plan = SimpleNamespace(entry=lambda op: kernels.EXPERT_SLOTS)
    bank = each_tensor(case.w13, torch.Tensor.cpu), each_tensor(case.w2, torch.Tensor.cpu)
    shared = ExpertBuffers(expected=num_layers)
    layers = [ExpertSlots(plan, bank, num_slots, num_buffered, shared, torch.device(DEVICE)) for _ in range(num_layers)]
    KEPT.extend(layers)
    return layers


SCHEMES = some([None, "fp8_block", "int8_channel", "int4_g64", "mxfp4", "nvfp4"], {None, "fp8_block", "mxfp4", "nvfp4"})


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_resident_experts(scheme: str | None) -> None:
    """Of steps with few pairs and with many, in layers whose rows begin anywhere, for every number of slots; with
    buffers for all the others, and for so few that steps go in waves."""
    experts, top_k = 8, 2
    case = make_case(scheme, 40, experts, top_k, hidden=128, inter=128, bias=scheme == "mxfp4", device=DEVICE)
    steps = []
    for tokens in (slice(0, 1), slice(0, 5), slice(0, 40), slice(2, 3), slice(5, 8)):
        x, ids, weights = case.x[tokens], case.ids[tokens].contiguous(), case.weights[tokens].contiguous()
        configs = tile_configs_of(case.w13, case.w2, ids)
        want = fused_moe(x, case.w13, case.w2, weights, ids, SILU, configs)
        steps.append((x, weights, ids, configs, want))
    for num_slots, num_buffered in ((top_k, experts), (5, experts), (experts - 1, 1), (top_k, 2)):
        layers, waved = slots_of(case, num_slots, num_buffered, num_layers=2), 0
        for step, (x, weights, ids, configs, want) in enumerate(steps):
            w13, w2, waves = layers[step % 2].of_step(ids)
            waved += waves is not None
            got = fused_moe(x, w13, w2, weights, ids, SILU, configs, waves=waves)
            torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)
        assert bool(waved) == (num_slots + num_buffered < experts)


@interpreter.kernel_test
def test_a_step_copies_its_missing_experts_once() -> None:
    """Of eight requests with more pairs than slots, whose experts repeat: what found no slot alone comes anew."""
    experts, num_slots = 16, 6
    case = make_case(None, 4, experts, 2, device=DEVICE)
    layer = slots_of(case, num_slots, experts)[0]
    few = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]], dtype=torch.int32, device=DEVICE)
    many = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]], dtype=torch.int32, device=DEVICE)
    copied = []
    for ids in (few, few, many, many, few):
        layer.of_step(ids)
        copied.append(int(layer.moves[0].count))
    assert copied == [4, 0, 4, 2, 0]


@interpreter.kernel_test
def test_long_prompts_leave_the_slots_alone_and_take_buffers_in_turn() -> None:
    case = make_case(None, EVERY_EXPERT * 4, 4, 1, device=DEVICE)
    for num_buffered, waves in ((4, 1), (1, 2)):
        layers = slots_of(case, 2, num_buffered, num_layers=3)
        assert len(layers[0].shared.pools) == 1
        before = [layer.tables.slot_of_expert.tolist() for layer in layers]
        buffers = []
        for layer in layers:
            *_, parts = layer.of_step(case.ids)
            assert (parts is None) == (waves == 1)
            taken = [w13 for w13, _, _ in parts] if parts else [layer.of_step(case.ids)[0]]
            tables = [moves.row_of_expert.data_ptr() for moves in layer.moves]
            buffers += [tables.index(w13.row_of_expert.data_ptr()) for w13 in taken]
        assert buffers == [number % 2 for number in range(3 * waves)]
        assert [layer.tables.slot_of_expert.tolist() for layer in layers] == before


def test_limits_of_the_plan_the_ops_and_the_kernels_are_equal() -> None:
    assert planned.MAX_EXPERTS == slot_ops.MAX_EXPERTS == kernels.EXPERTS


def test_a_page_lock_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_slots, "register", lambda tensor: 2)
    with pytest.raises(UserError, match=r"0\.00 GiB of main memory cannot be page-locked.*ulimit -l.*--tp-size"):
        expert_slots._page_locked(torch.zeros(100), ANYWHERE)


def test_main_memory_that_the_system_does_not_give_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(node_memory, "map_memory", refuse)
    with pytest.raises(UserError, match=r"2\.00 GiB of main memory cannot be had.*Cannot allocate.*--tp-size"):
        parameter._mapped((1 << 30,), torch.bfloat16, ANYWHERE)


def test_nothing_of_a_bank_outlives_its_process() -> None:
    """Its memory has no name and no other owner, so that the system unlocks and frees it however the process ends."""
    memory = map_memory(1 << 22)
    memory.fill_(1)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (found,) = [
        fields for fields in maps if int((ends := fields[0].split("-"))[0], 16) <= memory.data_ptr() < int(ends[1], 16)
    ]
    assert found[1].endswith("p") and found[4] == "0", found

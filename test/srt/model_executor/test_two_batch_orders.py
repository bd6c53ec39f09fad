"""Steps as two microbatches that give way to one another at collectives that are drawn, cut at places that are drawn,
for every kind of model and layout: the hidden states of every token and everything that the ranks keep of requests
(keys, latents, states, tables) are those of the whole step.

A block that reads what is kept of a request before a collective and writes it behind that one gives the second
microbatch what was there before the step: this test is there to notice it. The orders are all those in which the second
microbatch comes to no place before the first one has been there, from one microbatch behind the other to turns at every
collective.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from matrix import FEATURES, LAYOUTS, WHOLE, cells, kinds, save_kind
from rank_processes import run_ranks

from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramKernels
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Group
from sglang.srt.distributed.ping_pong import PingPong
from sglang.srt.layers import embedding
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor import two_batch_overlap
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import LaunchedForward, StepInput
from sglang.srt.model_executor.two_batch_overlap import Cut
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, request, run_to_end
from srt.models.harness import random_tokens
from srt.models.v41_drafts import save_v41_draft

V41 = "hashed n-grams"
NAMES = (*kinds(lacking=f"repeats, cut heads, {WHOLE}"), "n-grams, 2 layers")
CELLS = [
    *cells(NAMES, ("TP2", "DP2", "EP2", "TP4 x DP2"), "two-batch overlap"),
    *((layout, V41) for layout in ("TP2", "DP2", "TP4 x DP2")),
]
ORDERS = 3
"""Cuts and orders that each step is tried with."""
ATOL, RTOL = 2e-4, 2e-3


class RandomPingPong(PingPong):
    """The first microbatch may run ahead by any number of collectives, the second one never."""

    random: ClassVar = random.Random()
    seen: ClassVar[Counter[str]] = Counter()

    def _yield_to_other(self, microbatch: int) -> None:
        mine, other = len(self._sent[microbatch]), len(self._sent[1 - microbatch])
        if (microbatch == 1 and mine == other) or self.random.random() < 0.5:
            super()._yield_to_other(microbatch)
        else:
            self.seen["ahead" if microbatch == 0 else "catching up"] += not self._ended[1 - microbatch]


def drawn_cut(step: StepInput) -> Cut | None:
    """Anywhere between two prompt tokens."""
    if step.prompts is None or step.prompts.media is not None or len(step.prompts.input_ids) < 2:
        return None
    count = RandomPingPong.random.randrange(1, len(step.prompts.input_ids))
    prompts = 0
    for length in step.prompts.extend_lens.tolist():
        if count < length:
            break
        count, prompts = count - length, prompts + 1
    return Cut(prompts, count)


Kept = dict[str, torch.Tensor]


def kept_by(runner: ModelRunner) -> Kept:
    """What a rank keeps of requests between steps."""
    kept = {f"tables.{name}": getattr(runner.state, name) for name in ("req_to_token", "next_tokens", "lens")}
    for group, caches in zip(runner.pools.groups, runner.pools.tensors, strict=True):
        for member, tensors in zip(group.members, caches, strict=True):
            kept |= {f"{member.layer_id}.{member.cache.name}.{name}": tensor for name, tensor in tensors.items()}
    return kept


class Compared:
    """Runs every step with prompts whole and as microbatches, from the same caches, and compares what comes of it."""

    def __init__(self, runner: ModelRunner, orders: int) -> None:
        self.runner, self.orders, self.whole = runner, orders, runner.forward
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()

    @torch.inference_mode()
    def forward(self, step: StepInput) -> LaunchedForward:
        assert self.runner.two_batch_overlap is not None
        kept = kept_by(self.runner)
        before = {name: tensor.clone() for name, tensor in kept.items()}
        with self.runner.with_min_overlap_tokens(None):
            launched = self.whole(step)
        microbatches = self.runner.two_batch_overlap.split_step(step)
        if microbatches is None:
            return launched
        self.seen["steps"] += 1
        assert launched.output.hidden is not None
        num_tokens = len(step.out_cache_loc)
        hidden = launched.output.hidden[:num_tokens].clone()
        after = {name: tensor.clone() for name, tensor in kept.items()}
        by_block = self.runner.model.defers_all_reduce
        for order in range(self.orders + by_block):
            for name, tensor in kept.items():
                tensor.copy_(before[name])
            self.runner.model.defers_all_reduce = (
                order == self.orders
            )  # the last one; before it threads, in drawn orders
            self.seen["by block"] += order == self.orders
            split = self.whole(step).output.hidden
            assert split is not None
            self._compare("hidden states", split[:num_tokens], hidden, before=None)
            for name, tensor in kept.items():
                self._compare(name, tensor, after[name], before[name])
        self.runner.model.defers_all_reduce = by_block
        for name, tensor in kept.items():
            tensor.copy_(after[name])
        return launched

    def _compare(self, name: str, got: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor | None) -> None:
        """before: entries of page 0, which belong to padding, are left out of what is kept."""
        if before is not None and not name.startswith("tables"):
            got, wanted = got[1:], wanted[1:]
        if got.dtype == wanted.dtype == torch.float32:
            same = torch.isclose(got, wanted, ATOL, RTOL, equal_nan=True)
        else:
            same = got == wanted
        if not bool(same.all()):
            self.wrong.append(f"step {self.seen['steps']}: {name}, {int((~same).sum())} of {same.numel()}")


def requests(seed: int) -> dict[str, list[int]]:
    """Some of one prefix; several chunks long, or a few tokens."""
    lengths = (3, 21, 30, 9, 40, 12, 26, 5)
    texts = {f"r{i}": random_tokens(length, seed=100 * seed + i) for i, length in enumerate(lengths)}
    texts["r3"], texts["r6"] = texts["r2"] + texts["r3"], texts["r4"][:24] + texts["r6"]
    return texts


def play(scheduler: Scheduler | AttentionGroups, seed: int) -> None:
    """Prompts that come while others decode."""
    collector = Collector()
    for rid, ids in requests(seed).items():
        add(scheduler, request(rid, ids, 7, temperature=0.0, ignore_eos=True))
        scheduler.step()
        collector.take(scheduler)
    run_to_end(scheduler, collector)


def _rank(
    rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, orders: int, fault: str | None = None
) -> None:
    torch.set_num_threads(1)
    embedding.MIN_SHARDED_ROWS = 2
    results: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_batch_overlap, "PingPong", RandomPingPong)
        patch.setattr(two_batch_overlap, "choose_cut", drawn_cut)
        if fault is not None:
            FAULTS[fault](patch)
        for number, (name, folder) in enumerate(folders.items()):
            RandomPingPong.random = random.Random(number)
            RandomPingPong.seen.clear()
            args = ServerArgs.from_kwargs(
                model_path=folder, device="cpu", skip_tokenizer_init=True, skip_server_warmup=True, random_seed=3,
                max_total_tokens=512, max_running_requests=8, chunked_prefill_size=32 * ranks.attn_dp_size,
                tp_size=ranks.tp_size, ep_size=ranks.ep_size, attn_dp_size=ranks.attn_dp_size,
                **FEATURES["two-batch overlap"].flags,
            )  # fmt: skip
            runner = create_runner(args, rank, f"file://{out}/meet.{name}")
            compared = Compared(runner, orders)
            patch.setattr(runner, "forward", compared.forward)
            create = AttentionGroups if ranks.attn_dp_size > 1 else Scheduler
            play(create(args, runner, StopChecker(None)), number)
            results[name] = {"wrong": compared.wrong, **compared.seen, **RandomPingPong.seen}
            parallel_state.shutdown()
    (out / f"{rank}.json").write_text(json.dumps(results))


def compared(
    ranks: RankLayout, names: tuple[str, ...], folder: Path, orders: int = ORDERS, fault: str | None = None
) -> dict[str, dict[str, Any]]:
    """What differs on the ranks, and what was tried, by model."""
    folders = {}
    for name in names:
        folders[name] = str(folder / name)
        if name == V41:
            Path(folders[name]).mkdir()
            save_v41_draft(Path(folders[name]))
        else:
            folders[name] = str(save_kind(name, folder / name, ranks))
    run_ranks(_rank, (ranks, folders, folder, orders, fault), ranks.world_size)
    every = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks.world_size)]
    for other in every[1:]:
        for name in names:
            every[0][name]["wrong"] += other[name]["wrong"]
    first: dict[str, dict[str, Any]] = every[0]
    return first


def check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        assert result["steps"] > 3 and result["ahead"] and result["catching up"], (name, result)
    wrong = {name: result["wrong"][:6] for name, result in results.items() if result["wrong"]}
    assert not wrong, wrong


def test_two_batch_orders(tmp_path: Path) -> None:
    """Of a model with n-grams, states of a recurrence, and selected blocks."""
    check(compared(LAYOUTS["TP2"], ("n-grams, 2 layers",), tmp_path, orders=1))


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "name"), CELLS)
def test_two_batch_orders_of_every_model(layout: str, name: str, tmp_path: Path) -> None:
    check(compared(LAYOUTS[layout], (name,), tmp_path))


def late_texts(patch: pytest.MonkeyPatch) -> None:
    """N-grams whose texts go on behind the collective."""
    late: list[Callable[[], None]] = []
    gather, keep = Group.all_gather, NgramKernels.__dict__["keep"]

    def gathered(group: Group, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        mine = late[:]
        late.clear()
        result = gather(group, x, dim)
        for kept in mine:
            kept()
        return result

    def keep_late(kernels: NgramKernels) -> Callable[..., None]:
        return lambda *args: late.append(partial(keep.__get__(kernels), *args))

    patch.setattr(NgramKernels, "keep", property(keep_late))
    patch.setattr(Group, "all_gather", gathered)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {"late texts": late_texts}


def test_a_state_that_goes_on_behind_a_collective_is_noticed(tmp_path: Path) -> None:
    result = compared(LAYOUTS["TP2"], (V41,), tmp_path, fault="late texts")[V41]
    assert any("ngrams" in what or "hidden" in what for what in result["wrong"]), result

"""What one step costs the scheduler's host side where everything is full: 1,024 requests run, 4,096 wait, and the
prefix tree has 100,000 nodes.

    python benchmark/host/bench_full_queue.py

Prints the best and the median of many steps in milliseconds of CPU for each policy of the queue, and where each step
verifies draft tokens, beside what comes once a prompt: to keep it before others (cache_control) beyond half of the
pool, and to choose its attention group.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from bench_host import NoModel

from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.queue_order import POLICIES
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.model_executor.step import StepInput, StepResult
from sglang.srt.plan.pool_sizes import PoolSizes
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

RUNNING, WAITING, NODES, NODE_TOKENS = 1024, 4096, 100_000, 8
NO_STOPS: frozenset[int] = frozenset()


class DraftingModel(NoModel):
    """Verifies three draft tokens of each request, of which it accepts one."""

    tokens_per_step, lookahead_slots = 4, 3

    def forward(self, step: StepInput) -> tuple[int, int]:
        return len(step.sampled_slots), step.width

    def sample(self, forward: tuple[int, int], vocab_mask: None) -> StepResult:
        tokens = torch.ones(forward, dtype=torch.int64)
        return StepResult(tokens, None, None if forward[1] == 1 else torch.full((forward[0],), 2, dtype=torch.int32))


def message(rid: str, ids: list[int], tokens: int) -> TokenizedGenerateReq:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return TokenizedGenerateReq(rid=rid, input_ids=ids, sampling_params=params, stream=True)


def full_scheduler(policy: str, model: type[NoModel] = NoModel, **flags: object) -> Scheduler:
    """More rows than requests that run, and no memory for another one: each step looks at the queue."""
    args = ServerArgs.from_kwargs(model_path="none", schedule_policy=policy, **flags)
    scheduler = Scheduler(args, model(RUNNING + 64), StopChecker(None))  # type: ignore[arg-type]
    tree, rng = scheduler.kv.tree, np.random.default_rng(0)
    trunks = rng.integers(0, 1000, (100, NODE_TOKENS))
    for number in range(NODES):
        ids = np.concatenate((trunks[number % 100], rng.integers(0, 1 << 17, NODE_TOKENS)))
        match = tree.match_prefix(ids)
        slots = scheduler.kv.allocator.alloc([match.length], [len(ids)], None)
        tree.lock(match.node)
        done = tree.commit(ids, np.concatenate((tree.slots_to(match.node), slots)), match.node, match.length)
        tree.unlock(done.node)
    for number in range(RUNNING):
        scheduler.add(message(f"runs {number}", [number + 1, 2, 3], 4000), number, NO_STOPS)
    while scheduler.waiting:
        if scheduler.pick_prefill() is None:
            scheduler.ratio.value = 0.0
        scheduler.ratio.value = 0.0
        scheduler.step()
    scheduler.ratio.value = scheduler.ratio.floor = 1.0
    for number in range(WAITING):
        ids = [*trunks[number % 100].tolist(), *rng.integers(0, 1 << 17, 40).tolist()]
        scheduler.add(message(f"waits {number}", ids, 100 + number % 7), number, NO_STOPS)
    return scheduler


def times_of(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The best and the median in milliseconds of CPU."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        step()
        times.append(1e3 * (time.thread_time() - begin))
    return min(times), statistics.median(times)


def step_of(scheduler: Scheduler) -> Callable[[], None]:
    def step() -> None:
        scheduler.step()
        scheduler.outbox.clear()

    return step


def keeping(scheduler: Scheduler) -> Callable[[], None]:
    """Keeps one more prompt while half of the pool is kept."""
    tree, until = scheduler.kv.tree, itertools.count(1)
    nodes = itertools.cycle(list(tree.nodes()))
    while tree.kept_size() < tree.allocator.size // 2 - 2 * NODE_TOKENS:
        tree.keep(next(nodes), 1e9 + next(until))
    return lambda: tree.keep(next(nodes), 1e9 + next(until))


def groups_of(scheduler: Scheduler, count: int = 4) -> Callable[[], object]:
    """Chooses the attention group of one more message; all groups have as much to do."""
    groups = SimpleNamespace(
        schedulers=[scheduler] * count, router=SimpleNamespace(choose=lambda loads, *request: len(loads) - 1)
    )
    return lambda: AttentionGroups.loads(groups)  # type: ignore[arg-type]


def matching_with_draft(count: int = 32, length: int = 100_000, turns: int = 50) -> Callable[[], object]:
    """Matches long prompts that wait, with a draft whose cache entries depend on the next token too."""
    kv, page = KVTable(PoolSizes(4 * length, 64, 40, 1 << 17), next_tokens_read=1), 64
    keys = np.random.default_rng(0).integers(0, 1 << 17, length).astype(np.int64)
    for end in range(length // turns // page * page, length + 1, length // turns // page * page):
        match = kv.tree.match_prefix(keys[:end])
        begins = np.array([kv.tree.slots_to(match.node)[-1] if match.length else 0])
        slots = kv.allocator.alloc([match.length], [end], begins)
        kv.tree.lock(match.node)
        everything = np.concatenate((kv.tree.slots_to(match.node), slots))
        kv.tree.unlock(kv.tree.commit(keys[:end], everything, match.node, match.length).node)
    waiting = [
        SimpleNamespace(namespace=None, node=None, cache_keys=lambda num: keys[:num], matchable_len=lambda: length - 1)
        for _ in range(count)
    ]
    return lambda: [kv.match(req) for req in waiting]  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    cases: list[tuple[str, str, dict[str, object]]] = [(name, name, {}) for name in args.policies.split(",")]
    cases.append(("fcfs with priorities", "fcfs", {"enable_priority_scheduling": True}))
    cases.append(("fcfs with draft tokens", "fcfs", {"model": DraftingModel}))
    print(f"{'one step':<40} {'best':>8} {'median':>8}  ms")
    for name, policy, flags in cases:
        scheduler = full_scheduler(policy, **flags)
        best, median = times_of(step_of(scheduler), args.repeats)
        print(f"{name:<40} {best:>8.2f} {median:>8.2f}")
    for name, step in (
        ("keep a prompt", keeping(scheduler)),
        ("choose a group", groups_of(scheduler)),
        ("match 32 long prompts, with a draft", matching_with_draft()),
    ):
        best, median = times_of(step, args.repeats)
        print(f"{name:<40} {best:>8.2f} {median:>8.2f}")


if __name__ == "__main__":
    main()

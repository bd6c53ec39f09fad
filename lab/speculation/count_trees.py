#!/usr/bin/env python3
"""Whether a tree of draft tokens would be worth more than a chain: counted on the embedded model, timed for SM120.

    python lab/speculation/count_trees.py [--nodes 3,7] [--branches 4] [--case qwen3-8b-eagle3,...]

Serves questions with the embedded EAGLE-3 head, greedily and sampled, on a CPU, and counts at which rank among the
draft's logits the token stands that the model took, where the draft tokens before it were right. From the shares of
each rank at each depth follows the expected accept length of the best tree with so many nodes (those of the largest
product of shares), beside that of a chain with as many. With the times that `explain --time` predicts for SM120, of
cases of `draft_shapes`, the best chain of at most fifteen draft tokens stands beside the best tree of at most as many.
Of trees, what attention by a mask and the second writing of accepted keys would cost is left out: they come out too
fast.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from draft_shapes import CASES

from sglang import explain
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.tuning.draft_steps import DraftedStep, time_drafted
from sglang.tuning.step import verify_step

DEPTH, NEW_TOKENS = 3, 64
CARD, CONTEXT, BATCHES = "rtx-pro-6000-server", 2048, (1, 8, 32)
MAX_NODES = 15
QUESTIONS = [
    f"{name} has {n} apples. {name} buys {n + 18} more and gives {n // 2} away. How many are left?"
    for name in ("Tom", "Anna", "Maria", "Ben", "Lisa", "Paul")
    for n in (4, 12, 20, 34)
]


def ranks(temperature: float, branches: int) -> list[Counter[int]]:
    """By depth: how often the token that the model took had which rank of the draft's logits; `branches`: a worse
    one."""
    head = Path(DEFAULT_MODEL_PATH).parent / "eagle3"
    args = ServerArgs.from_kwargs(
        model_path=str(DEFAULT_MODEL_PATH), device="cpu", skip_tokenizer_init=True, max_total_tokens=8192,
        max_running_requests=8, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head),
        speculative_num_steps=DEPTH, disable_overlap_schedule=True,
    )  # fmt: skip
    runner = create_runner(args)
    scheduler, drafter = Scheduler(args, runner, StopChecker(None)), runner.drafter
    assert drafter is not None
    seen: dict[tuple[int, int], list[tuple[int, list[int], int]]] = {}
    propose = drafter.propose

    def spy(step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        draw, drawn = step.draw, []

        def ranked(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            tokens = draw(logits, slots, positions)
            drawn.append((logits.topk(branches, dim=-1).indices.tolist(), tokens.tolist()))
            return tokens

        step.draw = ranked
        draft_tokens = propose(step, num_speculative_tokens)
        for row, (slot, length) in enumerate(zip(step.slots.tolist(), step.lens.tolist(), strict=True)):
            seen.setdefault((slot, length), [])[:] = [
                (depth, best[row], tokens[row]) for depth, (best, tokens) in enumerate(drawn)
            ]
        return draft_tokens

    drafter.propose = spy  # type: ignore[method-assign]
    tokenizer, counts = Tokenizer.from_file(f"{DEFAULT_MODEL_PATH}/tokenizer.json"), [Counter() for _ in range(DEPTH)]
    for number, question in enumerate(QUESTIONS):  # one after the other, so that a slot tells the request
        ids = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        params = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        message = TokenizedGenerateReq(rid=f"q{number}", input_ids=ids, sampling_params=params)
        scheduler.add(message, number, frozenset())
        seen.clear()
        text = list(ids)
        while not scheduler.idle:
            scheduler.step()
            for message in scheduler.outbox:
                text += [token for tokens in message.new_ids for token in tokens]
            scheduler.outbox.clear()
        for (_, length), draft_tokens in seen.items():
            for depth, best, token in draft_tokens:
                at = length + depth + 1
                if at >= len(text):
                    break
                counts[depth][best.index(text[at]) if text[at] in best else branches] += 1
                if token != text[at]:
                    break
    return counts


def best_tree(shares: list[list[float]], nodes: int, branches: int) -> tuple[float, list[int]]:
    """Returns the accept length (1 and the sum of the likeliest `nodes` nodes of a tree, each with `branches` children
    at most), and the number of nodes at each depth. shares: of each rank, by depth; deeper ones are like the last."""
    total, counts = 1.0, Counter[int]()
    heap = [(-share, 0) for share in shares[0][:branches]]
    heapq.heapify(heap)
    while heap and counts.total() < nodes:
        value, depth = heapq.heappop(heap)
        total, counts[depth] = total - value, counts[depth] + 1
        for share in shares[min(depth + 1, len(shares) - 1)][:branches]:
            heapq.heappush(heap, (value * share, depth + 1))
    return total, [counts[depth] for depth in range(max(counts) + 1)]


def timed_case(name: str) -> Callable[[int, int], DraftedStep]:
    """Returns what predicts the step of so many requests that verifies so many tokens of each."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*CASES[name].write(Path(folder), False), "--load-format", "dummy", "--skip-tokenizer-init"]
        arch = arch_by_name(CARD)
        explained = explain.explain(ServerArgs.from_cli(flags), arch, frozenset({"triton"}), advises=False)
    assert explained.draft is not None
    draft = explained.draft.description
    return functools.cache(
        lambda batch, width: time_drafted(
            explained.model, draft, explained.parallel, verify_step(batch, width, CONTEXT), arch
        )
    )


def seconds(timed: Callable[[int, int], DraftedStep], batch: int, by_depth: list[int]) -> float:
    """Returns the time of a step with a tree of draft tokens: a pass of the draft over the rows of the step, one over
    the nodes of each depth but the last, and the verification of all."""
    rows = sum(by_depth) + 1
    whole = timed(batch, rows)
    first = whole.draft.seconds - (rows - 2) * one_pass(timed, batch)
    return whole.verify.seconds + first + sum(one_pass(timed, batch * nodes) for nodes in by_depth[:-1])


def one_pass(timed: Callable[[int, int], DraftedStep], rows: int) -> float:
    return timed(rows, 3).draft.seconds - timed(rows, 2).draft.seconds


def better(shares: list[list[float]], first: float) -> list[list[float]]:
    """Returns the shares of a draft whose first token is right in a share `first` at every depth; of the other cases
    each rank has as much as before."""
    return [[first, *((1 - first) * share / (1 - row[0]) for share in row[1:])] for row in shares]


def show_speeds(name: str, kind: str, shares: list[list[float]], branches: int) -> None:
    """Prints the fastest chain and the fastest tree, and none."""
    timed = timed_case(name)
    for batch in BATCHES:
        best = {}
        for shape, breadth in (("chain", 1), ("tree", branches)):
            trees = [best_tree(shares, nodes, breadth) for nodes in range(1, MAX_NODES + 1)]
            best[shape] = max((batch * length / seconds(timed, batch, nodes), length, nodes) for length, nodes in trees)
        plain = batch / timed(batch, 2).plain.seconds
        (chain, chain_length, chained), (tree, tree_length, nodes) = best["chain"], best["tree"]
        print(
            f"{name} | {kind} | {batch:3} | {plain:7,.0f} | {sum(chained)} draft tokens, {chain_length:.2f} |"
            f" {chain:7,.0f} | {'+'.join(map(str, nodes))} nodes, {tree_length:.2f} | {tree:7,.0f} | {tree / chain:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="3,7")
    parser.add_argument("--branches", type=int, default=4)
    parser.add_argument("--first", type=float, default=0.8, help="share of right first tokens of a better draft")
    parser.add_argument("--case", default="qwen3-8b-eagle3,qwen3-30b-eagle3,glm-4.7-mtp")
    options = parser.parse_args()
    of_temperature = {}
    print("temperature | nodes | chain | best tree | tree / chain | shares of ranks 1, 2, ... at depth 1")
    for temperature in (0.0, 1.0):
        counts = ranks(temperature, options.branches)
        shares = [[count[rank] / max(1, count.total()) for rank in range(options.branches)] for count in counts]
        of_temperature[temperature] = shares
        for nodes in map(int, options.nodes.split(",")):
            (chain, _), (tree, _) = best_tree(shares, nodes, 1), best_tree(shares, nodes, options.branches)
            first = ", ".join(f"{share:.3f}" for share in shares[0])
            print(f"{temperature:11} | {nodes:5} | {chain:5.2f} | {tree:9.2f} | {tree / chain:12.2f} | {first}")
    print(f"\nPredicted for {CARD}, requests of {CONTEXT:,} tokens, tokens/s:")
    print("case | shares | requests | plain | best chain, accept length | | best tree, accept length | | tree / chain")
    kinds = {f"temperature {temperature:g}": shares for temperature, shares in of_temperature.items()}
    kinds[f"first {options.first:.0%}"] = better(of_temperature[0.0], options.first)
    for name in options.case.split(","):
        for kind, shares in kinds.items():
            show_speeds(name, kind, shares, options.branches)


if __name__ == "__main__":
    main()

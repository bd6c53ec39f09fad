#!/usr/bin/env python3
"""Whether a tree of guesses would be worth more than a chain of as many rows: counted on the embedded model.

    python benchmark/speculation/count_trees.py [--nodes 3,7] [--branches 4]

Serves questions with the embedded EAGLE-3 head, greedily and sampled, on a CPU, and counts at which rank among the
draft's logits the token stands that the model took, where the guesses before it were right. From the shares of each
rank at each depth follows the expected accept length of the best tree with so many nodes (those of the largest product
of shares), beside that of a chain with as many.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter import DraftStep

DEPTH, NEW_TOKENS = 3, 64
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

    def spy(step: DraftStep, num_guesses: int) -> torch.Tensor:
        draw, drawn = step.draw, []

        def ranked(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            tokens = draw(logits, slots, positions)
            drawn.append((logits.topk(branches, dim=-1).indices.tolist(), tokens.tolist()))
            return tokens

        step.draw = ranked
        guesses = propose(step, num_guesses)
        for row, (slot, length) in enumerate(zip(step.slots.tolist(), step.lens.tolist(), strict=True)):
            seen.setdefault((slot, length), [])[:] = [
                (depth, best[row], tokens[row]) for depth, (best, tokens) in enumerate(drawn)
            ]
        return guesses

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
        for (_, length), guesses in seen.items():
            for depth, best, token in guesses:
                at = length + depth + 1
                if at >= len(text):
                    break
                counts[depth][best.index(text[at]) if text[at] in best else branches] += 1
                if token != text[at]:
                    break
    return counts


def accept_length(shares: list[list[float]], nodes: int, branches: int) -> float:
    """Returns 1 and the sum of the likeliest `nodes` nodes of a tree, each with `branches` children at most. shares: of
    each rank, by depth; deeper ones are like the last."""
    total, found = 1.0, 0
    heap = [(-share, 0) for share in shares[0][:branches]]
    heapq.heapify(heap)
    while heap and found < nodes:
        value, depth = heapq.heappop(heap)
        total, found = total - value, found + 1
        for share in shares[min(depth + 1, len(shares) - 1)][:branches]:
            heapq.heappush(heap, (value * share, depth + 1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="3,7")
    parser.add_argument("--branches", type=int, default=4)
    options = parser.parse_args()
    print("temperature | nodes | chain | best tree | tree / chain | shares of ranks 1, 2, ... at depth 1")
    for temperature in (0.0, 1.0):
        counts = ranks(temperature, options.branches)
        shares = [[count[rank] / max(1, count.total()) for rank in range(options.branches)] for count in counts]
        for nodes in map(int, options.nodes.split(",")):
            chain, tree = accept_length(shares, nodes, 1), accept_length(shares, nodes, options.branches)
            first = ", ".join(f"{share:.3f}" for share in shares[0])
            print(f"{temperature:11} | {nodes:5} | {chain:5.2f} | {tree:9.2f} | {tree / chain:12.2f} | {first}")


if __name__ == "__main__":
    main()

"""A model served on a GPU against transformers in fp32, on the path of our tokens.

Greedy tokens of a bf16 model may differ where two logits are close, and a router may pick another expert. So our tokens
are fed to the reference, and the log probabilities that we reported are compared with the reference's on the same path,
in units of the mean error of transformers' own bf16 model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import add, request
from srt.models.harness import VOCAB
from srt.sampling.packed_logprobs import unpacked

NEW_TOKENS = 24
PROMPT_LENS = tuple(10 + 17 * i for i in range(6))


def gpu_scheduler(folder: Path, **options: Any) -> Scheduler:
    """In bf16, with room for a few requests."""
    options = {"max_total_tokens": 4096, "max_running_requests": 16, "cuda_graph_max_bs": 8, **options}
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device="cuda", dtype="bfloat16", skip_tokenizer_init=True, mem_fraction_static=0.2,
        **options,
    )  # fmt: skip
    return Scheduler(args, create_runner(args), StopChecker(None))


def path_logprobs(model: torch.nn.Module, prompt: list[int], output: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + list(output)]).cuda()).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].cpu()


def greedy_logprobs(scheduler: Scheduler, prompts: list[list[int]]) -> list[list[tuple[float, int]]]:
    """What each prompt is continued with: log probabilities and tokens."""
    for i, ids in enumerate(prompts):
        msg = request(f"r{i}", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        msg.return_logprob = True
        add(scheduler, msg)
    chosen: dict[str, list[tuple[float, int]]] = {}
    while not scheduler.idle:
        scheduler.step()
        for message in scheduler.outbox:
            for rid, logprobs in zip(message.rids, message.logprobs, strict=True):
                chosen.setdefault(rid, []).extend(unpacked(logprobs).output)
        scheduler.outbox.clear()
    return [chosen[f"r{i}"] for i in range(len(prompts))]


def error_over_bf16(scheduler: Scheduler, reference: torch.nn.Module) -> float:
    """Our mean error over that of transformers in bf16. The scheduler's pool is whole afterwards."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENS]
    half = copy.deepcopy(reference).bfloat16()
    ours, theirs = [], []
    for ids, chosen in zip(prompts, greedy_logprobs(scheduler, prompts), strict=True):
        values, tokens = zip(*chosen, strict=True)
        assert len(tokens) == NEW_TOKENS
        at = torch.tensor(tokens)[:, None]
        expected = path_logprobs(reference, ids, tokens).gather(1, at)[:, 0]
        ours.append((torch.tensor(values) - expected).abs())
        theirs.append((path_logprobs(half, ids, tokens).gather(1, at)[:, 0] - expected).abs())
    scheduler.kv.check()
    assert scheduler.check_memory()["held"] == 0
    return float(torch.cat(ours).mean() / torch.cat(theirs).mean())

"""Scheduler, graphs and kernels on a GPU, in bf16, against transformers in fp32.

Greedy tokens of a bf16 model may differ where two logits are close, so each chosen token is judged by the reference's
log probabilities along the path that our model took: it must be within TOLERANCE of the best, and its own log
probability must agree within TOLERANCE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from srt.managers.fake_runner import add, request
from srt.models.harness import VOCAB, save_tiny

from sglang.srt.managers.output import StopChecker
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs

pytestmark = pytest.mark.gpu

TOLERANCE = 0.15
NEW_TOKENS = 24
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "pages": {"page_size": 16},
    "chunks": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "retraction": {"max_total_tokens": 240, "schedule_conservativeness": 0.01},
    "fp8_kv": {"kv_cache_dtype": "fp8_e4m3"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qwen3_wide", "qwen3_moe_wide", "llama_wide"])
def test_against_transformers(name: str, variant: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path).cuda()
    options = {"max_total_tokens": 4096, "max_running_requests": 16, "cuda_graph_max_bs": 8, **VARIANTS[variant]}
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cuda", dtype="bfloat16", skip_tokenizer_init=True, mem_fraction_static=0.2,
        **options,
    )  # fmt: skip
    scheduler = Scheduler(args, create_runner(args), StopChecker(None))
    prompts = [torch.randint(1, VOCAB, (10 + 17 * i,)).tolist() for i in range(6)]
    for i, ids in enumerate(prompts):
        msg = request(f"r{i}", ids, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        msg.return_logprob = True
        add(scheduler, msg)
    chosen: dict[str, list[tuple[float, int]]] = {}
    while not scheduler.idle:
        scheduler.step()
        for message in scheduler.outbox:
            for rid, logprobs in zip(message.rids, message.logprobs, strict=True):
                assert logprobs is not None
                chosen.setdefault(rid, []).extend(logprobs.output)
        scheduler.outbox.clear()
    limit = TOLERANCE * (3 if variant == "fp8_kv" else 1)
    for i, ids in enumerate(prompts):
        values, tokens = zip(*chosen[f"r{i}"], strict=True)
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            expected = reference(torch.tensor([ids + list(tokens)]).cuda()).logits[0].log_softmax(-1)
        expected = expected[len(ids) - 1 : -1].cpu()
        own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (expected.max(-1).values - own).max() < limit
        assert (own - torch.tensor(values)).abs().max() < limit
    if variant == "retraction":
        assert scheduler.stats.num_retracted > 0
    scheduler.cache.check()
    assert scheduler.check_memory()["held"] == 0

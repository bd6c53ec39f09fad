"""DeepSeek-V4.1 on a GPU, in bf16, against the reference in plain torch: eager, in graphs, in chunks, drafting, and
behind images."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler.scheduler import Scheduler
from srt.managers.fake_runner import add, request
from srt.managers.gpu_parity import error_over_bf16, gpu_scheduler
from srt.models.v41_drafts import save_v41_draft
from srt.models.v41_images import Picture, Pictured, V41Seeing, pictured, save_v41_seeing, texts
from srt.models.v41_reference import V41
from srt.sampling.packed_logprobs import unpacked

pytestmark = pytest.mark.gpu

WIDE = {
    "hidden_size": 256, "num_attention_heads": 8, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 128,
    "o_lora_rank": 128, "moe_intermediate_size": 128, "index_n_heads": 32, "index_head_dim": 128, "engram_head_dim": 32,
    "sliding_window": 32, "hc_sinkhorn_iters": 20,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "chunks": {"chunked_prefill_size": 64},  # a page
    "drafts": {"speculative_algorithm": "DSPARK"},
}
OVER_ROUNDED_WEIGHTS = 3.0
"""Largest mean error over that of the reference with weights in bf16, of which a CPU has 1.3 times as much. Activations
are rounded too, and near ties of the router and of the indexers then choose otherwise."""


class Module:
    """The reference as a module of transformers."""

    def __init__(self, reference: V41) -> None:
        self.reference = reference

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.reference.logits(ids[0].tolist())[None])

    def bfloat16(self) -> Module:
        return Module(rounded(self.reference))


def rounded(reference: V41) -> V41:
    """The same with weights in bf16."""
    weights = {name: tensor.bfloat16().float() for name, tensor in reference.w.items()}
    return replace(reference, w=weights)


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_the_reference(variant: str, tmp_path: Path) -> None:
    reference = save_v41_draft(tmp_path, **WIDE).target
    scheduler = gpu_scheduler(tmp_path, page_size=64, **VARIANTS[variant])
    assert error_over_bf16(scheduler, Module(reference)) < OVER_ROUNDED_WEIGHTS  # type: ignore[arg-type]


OF_VISION = {"hidden_size": 128, "intermediate_size": 96}
PICTURES = (
    pictured(texts(20, 1), Picture(9, 13, 1), texts(30, 2)),
    pictured(Picture(20, 31, 2), texts(9, 3), Picture(4, 4, 3), texts(40, 4)),
)
"""The second has an image of 86 tokens, which chunks of a page cut."""


def prompt_logprobs(scheduler: Scheduler, prompt: Pictured, folder: Path) -> torch.Tensor:
    """Of all tokens but the first, beside two requests that decode."""
    for number in range(2):
        add(scheduler, request(f"t{number}", texts(9, number), 24, temperature=0.0, ignore_eos=True))
    scheduler.step()
    msg = prompt.request("seen", folder, 2)
    msg.return_logprob, msg.logprob_start_len = True, 0
    add(scheduler, msg)
    values: list[float] = []
    while not scheduler.idle:
        scheduler.step()
        for message in scheduler.outbox:
            for rid, given in zip(message.rids, message.logprobs or [], strict=False):
                if rid == "seen" and given is not None:
                    values += [value for value, _ in unpacked(given).input if value is not None]
        scheduler.outbox.clear()
    return torch.tensor(values)


def error_over_rounded(scheduler: Scheduler, reference: V41Seeing, folder: Path) -> float:
    """Our mean error over that of the reference with weights in bf16."""
    ours, theirs, half = [], [], replace(reference, text=rounded(reference.text))
    for prompt in PICTURES:
        at = torch.tensor(prompt.ids[1:])[:, None]
        want, other = (one.logits(prompt)[:-1].log_softmax(-1).gather(1, at)[:, 0] for one in (reference, half))
        ours.append((prompt_logprobs(scheduler, prompt, folder) - want).abs())
        theirs.append((other - want).abs())
    scheduler.kv.check()
    return float(torch.cat(ours).mean() / torch.cat(theirs).mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_images_against_the_reference(variant: str, tmp_path: Path) -> None:
    reference = save_v41_seeing(tmp_path, OF_VISION, **WIDE)
    scheduler = gpu_scheduler(tmp_path, page_size=64, **VARIANTS[variant])
    assert scheduler.media.features is not None
    scheduler.media.features.directory = tmp_path
    assert error_over_rounded(scheduler, reference, tmp_path) < OVER_ROUNDED_WEIGHTS

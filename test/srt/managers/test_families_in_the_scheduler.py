"""Every family in the scheduler, where memory is short: greedy tokens are those of transformers whether a request is
alone or among others, computed in chunks, retracted and resumed, or continued from a prefix of which some was evicted.

`make test` runs each mechanism once, in the smaller form of a family where there are two, and each kind of window with
one size, chunks and pages in turn; `make thorough` runs every form, and every window with all chunks and pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import KINDS, kinds
from transformers import PreTrainedModel

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.models.harness import FURTHER_FORMS, TINY, VOCAB, reference_of, save_tiny

NEW_TOKENS, FEW_TOKENS = 16, 5
NAMES = [name for name in TINY if "wide" not in name]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def scheduler(folder: Path, **options: Any) -> Scheduler:
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, max_running_requests=8, **options
    )
    return Scheduler(args, create_runner(args), StopChecker(None))


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: list[int], output: list[int]) -> list[int]:
    """What the model would have said where `output` stands: `output` itself, if it is the greedy continuation."""
    logits = model(torch.tensor([ids + output])).logits[0]
    return logits[len(ids) - 1 : -1].argmax(-1).tolist()


def check(
    model: PreTrainedModel, scheduler: Scheduler, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS
) -> None:
    collector = Collector()
    for i, ids in enumerate(prompts):
        add(scheduler, request(f"r{i}", ids, new_tokens, temperature=0.0, ignore_eos=True))
    run_to_end(scheduler, collector)
    for i, ids in enumerate(prompts):
        output = collector.tokens[f"r{i}"]
        assert len(output) == new_tokens and output == greedy(model, ids, output), f"prompt {i}"
    assert_clean(scheduler)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in FURTHER_FORMS)) for name in NAMES]
)
def test_alone_and_among_others_with_little_memory(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    tight = scheduler(tmp_path, max_total_tokens=112, schedule_conservativeness=0.01, chunked_prefill_size=16)
    evicted = 0
    evict = tight.kv.tree.evict

    def counted(num_tokens: int) -> int:
        nonlocal evicted
        freed = evict(num_tokens)
        evicted += freed
        return freed

    tight.kv.tree.evict = counted  # type: ignore[method-assign]
    prompts = [prompt(seed, 12 + 6 * seed) for seed in range(4)]
    check(model, tight, prompts[1:2], FEW_TOKENS)
    assert tight.stats.num_retracted == 0
    check(model, tight, prompts)
    # With pages of several tokens a request's window takes so much that fewer requests run at once.
    assert evicted > 0 and (tight.stats.num_retracted > 0 or tight.kv.page_size > 1)
    before = tight.stats._cached
    check(model, tight, [prompts[3]], FEW_TOKENS)
    check(model, tight, [prompts[3] + [5]], FEW_TOKENS)
    assert tight.stats._cached - before >= len(prompts[3]), "the second one goes on from the first one's prefix"


WINDOWED = [
    KINDS[name].tiny
    for attention in ("windows alone", "windows", "sinks", "chunks", "relative biases")
    for name in kinds(attention, lacking="cut heads")
]
WINDOW_KEYS = {"llama4": "attention_chunk_size", "inkling": "sliding_window_size"}
SIZED_BY_WINDOW = ("inkling",)
"""Models with weights of the window's size."""


SIZES = (1, 3, 16, 40, 300)
CHUNKS_AND_PAGES = ((1, 1), (16, 4), (17, 1), (-1, 16))


def sizes() -> list[Any]:
    """All of them, of which `make test` runs one for each model: windows, and chunks and pages, in turn."""
    cases = []
    for n, name in enumerate(WINDOWED):
        for w, window in enumerate(SIZES):
            for c, (chunk, page) in enumerate(CHUNKS_AND_PAGES):
                quick = w == n % len(SIZES) and c == n % len(CHUNKS_AND_PAGES)
                cases.append(pytest.param(name, window, chunk, page, marks=[pytest.mark.thorough] * (not quick)))
    return cases


@pytest.mark.parametrize(("name", "window", "chunk", "page"), sizes())
def test_windows_and_chunks_of_every_relative_size(
    name: str, window: int, chunk: int, page: int, tmp_path: Path
) -> None:
    key = WINDOW_KEYS.get(name, "sliding_window")
    save_tiny(name, tmp_path, **({key: window} if name in SIZED_BY_WINDOW else {}))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config)[key] = window
    path.write_text(json.dumps(config))
    model = reference_of(tmp_path)
    prompts = [prompt(1, 45), prompt(2, 17), prompt(1, 45)[:32] + [3]]
    check(model, scheduler(tmp_path, max_total_tokens=1024, chunked_prefill_size=chunk, page_size=page), prompts)

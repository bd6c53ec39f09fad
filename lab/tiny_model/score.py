"""Held-out exact match without generating: greedy decoding writes the right answer if, and only if, each of its tokens
is the likeliest one after those before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tiny_model.export import load_weights
from tiny_model.heldout import all_items
from tiny_model.mixture import TASK_NAMES, Document, Encoder
from tiny_model.model import TinyModel

TOKENS_A_BATCH = 32768


@torch.no_grad()
def scores(
    model: TinyModel, encoder: Encoder, count: int, device: torch.device, tasks: tuple[str, ...] = TASK_NAMES
) -> dict[str, float]:
    """Task -> share of its `count` problems that are answered exactly."""
    right: dict[str, list[bool]] = {}
    with torch.compiler.set_stance("force_eager"):  # every group has its own shape
        for group in _groups(_documents(encoder, count, tasks)):
            for (task, _), exact in zip(group, _exact(model, [d for _, d in group], device), strict=True):
                right.setdefault(task, []).append(exact)
    return {task: sum(right[task]) / len(right[task]) for task in tasks}


@lru_cache(maxsize=1)
def _documents(encoder: Encoder, count: int, tasks: tuple[str, ...]) -> list[tuple[str, Document]]:
    """Finding problems of the held-out side takes a dozen draws for each."""
    return [
        (item.task, encoder.document(item.problem, item.thinking, last_only=True)) for item in all_items(count, tasks)
    ]


def _groups(found: list[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    """Documents of similar length together."""
    group: list[tuple[str, Document]] = []
    for entry in sorted(found, key=lambda e: len(e[1].tokens)):
        if group and (len(group) + 1) * len(entry[1].tokens) > TOKENS_A_BATCH:
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _exact(model: TinyModel, documents: list[Document], device: torch.device) -> list[bool]:
    length = max(len(d.tokens) for d in documents)
    length += -length % 64  # attention kernels want masks of whole tiles

    def padded(rows: list[list[Any]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (length - len(row)) for row in rows], device=device)

    tokens = padded([d.tokens for d in documents], 0)
    answer = padded([[int(a) for a in d.answer] for d in documents], 0).bool()
    place = padded([[0] * len(d.tokens) for d in documents], -1)
    positions = torch.arange(length, device=device).expand(len(documents), -1)
    hidden, _ = model(tokens, positions, place)
    row, column = answer.nonzero(as_tuple=True)
    wrong = model.logits(hidden[row, column - 1]).argmax(-1) != tokens[row, column]
    missed = torch.zeros(len(documents), device=device).index_add_(0, row, wrong.float())
    return [m == 0 for m in missed.tolist()]


def score_directory(directory: Path, count: int, device: str, tasks: tuple[str, ...] = ()) -> dict[str, float]:
    """Score a finished model, in the type that it is served in: bfloat16."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model = TinyModel(config, torch.bfloat16).to(device)
    load_weights(model, directory)
    encoder = Encoder(Tokenizer.from_file(str(directory / "tokenizer.json")))
    return scores(model, encoder, count, torch.device(device), tasks or TASK_NAMES)

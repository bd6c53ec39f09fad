"""What drafts are trained on, in batches: texts of the target, and what the target computes for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiny_model.draft_heads import CAPTURES
from tiny_model.draft_texts import GREEDY, Text
from tiny_model.model import TinyModel

TOKENS_A_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """`answer`: the places of `ids` that the target writes. `seed`: as of Text."""

    ids: list[int]
    answer: list[bool]
    seed: int = GREEDY

    @classmethod
    def of(cls, text: Text) -> Sample:
        return cls(text.ids, [place >= text.begin for place in range(len(text.ids))], text.seed)


@dataclass(frozen=True, slots=True)
class Batch:
    """`streams` [B, L, captures, H] and `hidden` [B, L, H] of the target; `rows`, `columns` [n]: the draft rows that
    propose the token two places on. `answer` [B, L] bool: places that the target writes."""

    tokens: Tensor
    answer: Tensor
    streams: Tensor
    hidden: Tensor
    rows: Tensor
    columns: Tensor

    def stored(self) -> Batch:
        """In half of the memory."""
        return replace(self, streams=self.streams.bfloat16(), hidden=self.hidden.bfloat16())

    def used(self) -> Batch:
        return replace(self, streams=self.streams.float(), hidden=self.hidden.float())


def batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples of similar length together."""
    group: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        if group and (len(group) + 1) * len(sample.ids) > TOKENS_A_BATCH:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


@torch.no_grad()
def computed(target: TinyModel, samples: Sequence[Sample]) -> Batch:
    length, device = max(len(sample.ids) for sample in samples), target.embedding.device
    tokens = torch.tensor([sample.ids + [0] * (length - len(sample.ids)) for sample in samples], device=device)
    answer = torch.tensor([sample.answer + [False] * (length - len(sample.ids)) for sample in samples], device=device)
    streams: list[Tensor] = []
    hooks = [
        target.layers[layer].register_forward_hook(lambda module, given, out: streams.append(out[0]))
        for layer in CAPTURES
    ]
    positions = torch.arange(length, device=device).expand(len(samples), -1)
    hidden, _ = target(tokens, positions, torch.zeros_like(tokens))
    for hook in hooks:
        hook.remove()
    rows, columns = answer[:, 2:].nonzero(as_tuple=True)
    return Batch(tokens, answer, torch.stack(streams, dim=2), hidden, rows, columns)

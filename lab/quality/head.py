"""Perplexity, Kullback-Leibler divergence and likeliest tokens from final hidden states.

Every form has the same output head W [V, H], in 16 bits. So the divergence of a form from 16 bits at a token needs no
second row of logits: with p the probabilities in 16 bits and hidden states h (16 bits) and g (the form),

    KL(p || q) = sum p (W h - W g) - lse(W h) + lse(W g) = (p W) (h - g) - lse(W h) + lse(W g)

and p W [H] is kept for each token of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

ROWS, COLUMNS = 256, 4096
"""A block of logits stays in a processor's second cache."""
GPU_ROWS, GPU_COLUMNS = 2048, 32768
"""Few launches; two whole rows of each token fit a GPU."""


def _block(tensor: torch.Tensor) -> tuple[int, int]:
    return (GPU_ROWS, GPU_COLUMNS) if tensor.is_cuda else (ROWS, COLUMNS)


@dataclass(frozen=True, slots=True)
class Reference:
    """Of N tokens in 16 bits: hidden states and expected rows of the head [N, H] fp32, the logarithm of the sum of
    exponentials [N], the likeliest tokens [N]."""

    hidden: torch.Tensor
    expected: torch.Tensor
    lse: torch.Tensor
    likeliest: torch.Tensor

    def first(self, count: int, device: torch.device) -> Reference:
        """Returns the reference of the first tokens."""
        parts = (self.hidden, self.expected, self.lse, self.likeliest)
        return Reference(*(part[:count].to(device) for part in parts))

    def logprobs(self, next_ids: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Returns the log probabilities [N] of tokens in 16 bits."""
        return _logits_of(self.hidden, head, next_ids) - self.lse


@dataclass(frozen=True, slots=True)
class Scores:
    """Of N tokens: the log probability of the text's token, the divergence from 16 bits, and whether the likeliest
    token is that of 16 bits."""

    logprobs: torch.Tensor
    divergence: torch.Tensor
    same: torch.Tensor


@contextmanager
def exact_products() -> Iterator[None]:
    """Lets products of fp32 matrices be computed from bfloat16 with sums in fp32. Hidden states and heads have such
    values, so nothing is rounded; it is several times as fast where a processor has instructions for it. Models are not
    computed so: transformers multiplies positions as matrices."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@exact_products()
def make_reference(hidden: torch.Tensor, head: torch.Tensor) -> Reference:
    """Returns the reference of hidden states [N, H] fp32 in 16 bits."""
    lse, likeliest, expected = [], [], []
    count, columns = _block(hidden)
    for rows in hidden.split(count):
        logits = torch.cat([rows @ part.float().T for part in head.split(columns)], dim=-1)
        lse.append(logits.logsumexp(-1))
        likeliest.append(logits.argmax(-1))
        probabilities = logits.sub_(lse[-1][:, None]).exp_()
        parts = zip(probabilities.split(columns, -1), head.split(columns), strict=True)
        expected.append(sum((_times_head(p, part.float()) for p, part in parts), torch.zeros_like(rows)))
    return Reference(hidden, torch.cat(expected), torch.cat(lse), torch.cat(likeliest))


@exact_products()
def score(hidden: torch.Tensor, next_ids: torch.Tensor, head: torch.Tensor, reference: Reference) -> Scores:
    """Scores a form by its hidden states [N, H] fp32; `next_ids` [N] are the text's next tokens."""
    lse, largest = [], []
    count, columns = _block(hidden)
    for rows, known in zip(hidden.split(count), reference.lse.split(count), strict=True):
        total, most = torch.zeros_like(known), torch.full_like(known, -torch.inf)
        for part in head.split(columns):
            logits = rows @ part.float().T
            most = torch.maximum(most, logits.amax(-1))
            total += logits.sub_(known[:, None]).exp_().sum(-1)
        lse.append(known + total.log())
        largest.append(most)
    sums, most = torch.cat(lse), torch.cat(largest)
    divergence = (reference.expected * (reference.hidden - hidden)).sum(-1) - reference.lse + sums
    of_likeliest = _logits_of(hidden, head, reference.likeliest)
    return Scores(_logits_of(hidden, head, next_ids) - sums, divergence, of_likeliest > most - 1e-4)


@exact_products()
def likeliest(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Returns the likeliest tokens [N] by hidden states [N, H] fp32."""
    count, columns = _block(hidden)
    parts = hidden.split(count)
    return torch.cat([torch.cat([part @ w.float().T for w in head.split(columns)], -1).argmax(-1) for part in parts])


def _times_head(probabilities: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns the product with a part of the head. The probabilities are two values of bfloat16 each."""
    first = probabilities.bfloat16().float()
    return first @ part + (probabilities - first) @ part


def _logits_of(hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (hidden * head[ids].float()).sum(-1)

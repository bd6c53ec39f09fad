"""What drafts are trained and judged on: texts that the embedded model itself writes, greedily and by sampling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tiny_model.mixture import SYSTEM_PROMPTS, TASKS, WITH_SYSTEM, WITHOUT_THINKING, draw
from tiny_model.model import Layer, TinyModel, _norm, _rotated
from tiny_model.render import END_OF_TURN, prompt_text

LONGEST_PROMPT = 320
LONGEST_ANSWER = 128
BATCH = 96
GREEDY = -1
NOISES = 1024


@dataclass(frozen=True, slots=True)
class Text:
    """`ids[begin:]` is the model's own. `seed`: of the noise that chose its tokens, or GREEDY."""

    ids: list[int]
    begin: int
    seed: int


@cache
def noise_table(vocab_size: int) -> Tensor:
    """[NOISES, vocab_size] float32: the largest of logits plus a row is a sample at temperature 1 (Gumbel)."""
    uniform = torch.rand(NOISES, vocab_size, generator=torch.Generator().manual_seed(0)).clamp_min(1e-20)
    return -(-uniform.log()).log()


def noise_rows(seeds: Sequence[int], place: int) -> list[int]:
    """Rows of the table: of the answer's token number `place`, of texts with these seeds."""
    return [(seed * 7919 + place * 104729) % NOISES for seed in seeds]


def prompts(tokenizer: Tokenizer, count: int, seed: int, held_out: bool) -> list[list[int]]:
    """Of problems of one side of the split, in the shares in which the model saw them in training."""
    rng = random.Random(f"drafts/{seed}/{held_out}")
    names, shares = zip(*((name, task.share) for name, task in TASKS.items() if task.share), strict=True)
    given: list[list[int]] = []
    while len(given) < count:
        problem = draw(rng.choices(names, shares)[0], rng, held_out)
        system = SYSTEM_PROMPTS[rng.randrange(len(SYSTEM_PROMPTS))] if rng.random() < WITH_SYSTEM else ""
        text = prompt_text(problem, rng.random() >= WITHOUT_THINKING, system)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) <= LONGEST_PROMPT:
            given.append(ids)
    return given


def write_texts(target: TinyModel, tokenizer: Tokenizer, count: int, held_out: bool) -> list[Text]:
    """One for each prompt; greedy and sampled ones take turns."""
    return answered(target, tokenizer, prompts(tokenizer, count, 0, held_out), (False, True))


def answered(
    target: TinyModel, tokenizer: Tokenizer, asked_ids: Sequence[list[int]], sampled: Sequence[bool]
) -> list[Text]:
    """The texts that begin with `asked_ids`."""
    end = int(tokenizer.token_to_id(END_OF_TURN))
    asked = [Text(ids, len(ids), i if sampled[i % len(sampled)] else GREEDY) for i, ids in enumerate(asked_ids)]
    asked.sort(key=lambda text: len(text.ids))
    written: list[Text] = []
    for start in range(0, len(asked), BATCH):
        written += _answers(target, asked[start : start + BATCH], end)
        print(f"{len(written)} of {len(asked)} texts", flush=True)
    return written


class Writer:
    """Rows of a batch that go on, with their keys and values; prompts are padded on the left."""

    def __init__(self, target: TinyModel, asked: Sequence[Text], end: int) -> None:
        self.target, config, device = target, target.config, target.embedding.device
        self.length = max(len(text.ids) for text in asked)
        self.tokens = torch.tensor([[end] * (self.length - len(t.ids)) + t.ids for t in asked], device=device)
        self.lengths = torch.tensor([len(text.ids) for text in asked], device=device)
        self.padding = self.length - self.lengths
        shape = (len(asked), config["num_key_value_heads"], self.length + LONGEST_ANSWER, config["head_dim"])
        self.cache = [torch.zeros(2, *shape, device=device) for _ in target.layers]
        self.past = 0

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.padding.device)
        self.tokens, self.padding = self.tokens[index], self.padding[index]
        self.cache = [both[:, index] for both in self.cache]

    def logits(self) -> Tensor:
        """[rows, vocabulary] float32 of the token behind `tokens`, which are computed now."""
        target, count = self.target, self.tokens.shape[1]
        places = torch.arange(self.past, self.past + count, device=self.padding.device)
        positions = (places - self.padding[:, None]).clamp_min(0)
        cos, sin = (table[positions].unsqueeze(1) for table in (target.cos, target.sin))
        self.past += count
        keys = torch.arange(self.past, device=places.device)
        seen = (keys <= places[:, None]) & (keys >= self.padding[:, None, None].clamp_max(self.length - 1))
        seen = seen | (keys == places[:, None])  # padding sees itself, or its softmax would be of nothing
        x = F.embedding(self.tokens, target.embedding)
        for layer, both in zip(target.layers, self.cache, strict=True):
            x = self._layer(layer, x, cos, sin, seen.unsqueeze(1), both)
        return target.logits(_norm(x[:, -1], target.norm, target.config["rms_norm_eps"]))

    def _layer(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, both: Tensor) -> Tensor:
        normed = _norm(x, layer.attn_norm, layer.eps)
        q, k, v = (F.linear(normed, w).unflatten(-1, (-1, layer.head_dim)) for w in (layer.q, layer.k, layer.v))
        q, k = _norm(q, layer.q_norm, layer.eps).transpose(1, 2), _norm(k, layer.k_norm, layer.eps).transpose(1, 2)
        q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
        both[0, :, :, self.past - x.shape[1] : self.past] = k
        both[1, :, :, self.past - x.shape[1] : self.past] = v.transpose(1, 2)
        k, v = both[:, :, :, : self.past].repeat_interleave(layer.heads // layer.kv_heads, dim=2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + F.linear(out.transpose(1, 2).flatten(2), layer.o)
        added: Tensor = layer.experts(_norm(x, layer.mlp_norm, layer.eps))[0]
        return x + added


@torch.inference_mode()
def _answers(target: TinyModel, asked: list[Text], end: int) -> list[Text]:
    writer, table = Writer(target, asked, end), noise_table(target.config["vocab_size"]).to(target.embedding.device)
    answers: list[list[int]] = [[] for _ in asked]
    running = list(range(len(asked)))
    for place in range(LONGEST_ANSWER):
        seeds = [asked[row].seed for row in running]
        sampled = torch.tensor([[float(seed != GREEDY)] for seed in seeds], device=table.device)
        tokens = (writer.logits() + sampled * table[noise_rows(seeds, place)]).argmax(-1, keepdim=True)
        for row, token in zip(running, tokens.flatten().tolist(), strict=True):
            if not answers[row] or answers[row][-1] != end:
                answers[row].append(token)
        writer.tokens = tokens
        kept = [i for i, row in enumerate(running) if answers[row][-1] != end]
        if not kept:
            break
        if len(kept) < 0.75 * len(running):
            writer.keep(kept)
            running = [running[i] for i in kept]
    return [Text(text.ids + answer, text.begin, text.seed) for text, answer in zip(asked, answers, strict=True)]

"""Trains the eyes of the embedded model: a tower whose outputs the finished text model reads.

The text model's weights stay as they are, so its answers to text do too. The tower learns what to write for the text
model to give the right answer: the gradient of the answer's tokens goes through the text model, into the tower.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tiny_model.drafts import load_target
from tiny_model.layout import TOKENIZER_FILE, VISION_CONFIG
from tiny_model.model import TinyModel
from tiny_model.optimizer import Optimizer
from tiny_model.pictures import (
    COLORS,
    DIGIT_PICTURE,
    KINDS,
    SHAPES,
    SHAPES_PICTURE,
    SLOTS,
    Painter,
    Pictures,
    patches,
)
from tiny_model.questions import TOPICS, Asked, Asker
from tiny_model.seeing import VISION_FILE, read_seeing_tokenizer
from tiny_model.tower import Hints, Tower, hidden_of
from tiny_model.train import prepare_torch

SIZES = ((4, 4), (4, 4), (4, 4), (3, 5), (5, 3), (4, 5), (5, 4), (3, 6), (6, 3))
"""Rows and columns of a picture's tokens, as the processor makes them of squares (most often) and of others."""
SEPARATE = 1 << 40
"""Added to the seed of pictures that are judged, none of which are trained on."""
ASKED_AGAIN_ONE_IN = 5
WARM_UP = 0.02
HINTS_ALONE = 0.3
"""Share of the training in which the tower learns by hints only, without the text model: steps are many then."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`seconds` of training; the learning rate falls to zero at their end. `steps` ends it earlier, if given."""

    output: Path
    seconds: float
    device: str = "cuda"
    batch: int = 512
    rate: float = 1.0
    """The largest learning rates, as a share of the optimizer's."""
    steps: int | None = None
    judged: int = 4096
    log_every: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Lesson:
    """`patches` [B, P, values] in the tower's order; `size`: rows and columns of tokens."""

    patches: Tensor
    pictures: Pictures
    asked: Asked
    size: tuple[int, int]

    def told(self) -> dict[str, tuple[Tensor, Tensor]]:
        """As Hints.loss takes it."""
        pictures, kind = self.pictures, self.pictures.kind
        everywhere = torch.ones_like(kind)
        counts = {f"{shape}s": (pictures.counts[:, i], everywhere) for i, shape in enumerate(SHAPES)}
        return {
            "kind": (kind, everywhere),
            "color": (pictures.color, kind != SHAPES_PICTURE),
            "digit": (pictures.digit, kind == DIGIT_PICTURE),
            **counts,
        }


HINTED = {"kind": len(KINDS), "color": len(COLORS), "digit": 10, **{f"{shape}s": SLOTS + 1 for shape in SHAPES}}
HINT_WEIGHT = 0.5


class Lessons:
    """Batches of pictures with questions, of every size in turn."""

    def __init__(self, device: torch.device, seed: int) -> None:
        tokenizer = read_seeing_tokenizer(TOKENIZER_FILE)
        image = int(tokenizer.token_to_id("<|image_pad|>"))
        self.painter = Painter(device, seed)
        self.askers = {size: Asker(tokenizer, image, *size, device, seed) for size in dict.fromkeys(SIZES)}

    def batch(self, number: int, count: int) -> Lesson:
        size = SIZES[number % len(SIZES)]
        side = VISION_CONFIG["patch_size"] * VISION_CONFIG["spatial_merge_size"]
        pictures = self.painter.paint(count, size[0] * side, size[1] * side)
        asked = self.askers[size].ask(pictures, number % ASKED_AGAIN_ONE_IN == 0)
        shape = (VISION_CONFIG["patch_size"], VISION_CONFIG["spatial_merge_size"], VISION_CONFIG["temporal_patch_size"])
        return Lesson(patches(pictures.pixels, *shape), pictures, asked, size)


def encoded(tower: Tower, lesson: Lesson) -> tuple[Tensor, list[Tensor], Tensor]:
    """As Tower.forward; on a GPU in 16 bits."""
    merge, (rows, columns) = VISION_CONFIG["spatial_merge_size"], lesson.size
    device = lesson.patches.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        seen: tuple[Tensor, list[Tensor], Tensor] = tower(lesson.patches, rows * merge, columns * merge)
    return seen


def answer_logits(tower: Tower, target: TinyModel, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """[n, V] of the tokens before those of answers, and what the tower's last block gives."""
    seen, features, last = encoded(tower, lesson)
    asked = lesson.asked
    hidden = hidden_of(target, asked.tokens, asked.image, seen, features, *lesson.size)
    return target.logits(hidden[:, :-1][asked.answers[:, 1:]]), last


def muon_moves(name: str) -> bool:
    """The matrices of blocks and mergers; positions, heads, norms and biases are Adam's."""
    return name.startswith("tower.") and name.endswith(".weight") and "norm" not in name and "pos_embed" not in name


def step_losses(
    tower: Tower, hints: Hints, target: TinyModel, lesson: Lesson, hints_alone: bool
) -> tuple[Tensor, Tensor]:
    """Of the hints, and of the answers (0 without the text model)."""
    if hints_alone:
        last = encoded(tower, lesson)[2]
        return hints.loss(last, lesson.told()), last.new_zeros(())
    logits, last = answer_logits(tower, target, lesson)
    asked = lesson.asked
    loss = F.cross_entropy(logits, asked.tokens[:, 1:][asked.answers[:, 1:]])
    return hints.loss(last, lesson.told()), loss


def learning_rate(share: float) -> float:
    """As a share of the largest: up in a line, then down with a cosine."""
    return min(1.0, share / WARM_UP + 1e-3) * (0.5 + 0.5 * math.cos(math.pi * share))


def train(tower: Tower, target: TinyModel, settings: Settings) -> list[dict[str, float]]:
    """Returns the mean losses along the way."""
    lessons = Lessons(target.embedding.device, settings.seed)
    hints = Hints(HINTED).to(settings.device)
    both = nn.ModuleDict({"tower": tower, "hints": hints})
    optimizer = Optimizer(both, muon_moves)
    started, history, losses = time.monotonic(), [], []
    for step in itertools.count():
        elapsed = time.monotonic() - started
        share = max(elapsed / settings.seconds, step / settings.steps if settings.steps else 0)
        if share >= 1:
            return history
        lesson = lessons.batch(step, settings.batch)
        hint, loss = step_losses(tower, hints, target, lesson, share < HINTS_ALONE)
        (loss + HINT_WEIGHT * hint).backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step(settings.rate * learning_rate(share))
        optimizer.zero_grad()
        losses.append(torch.stack((hint.detach(), loss.detach())))  # read seldom: reading waits for the device
        if len(losses) == settings.log_every:
            hinted, mean = torch.stack(losses).mean(0).tolist()
            history.append(
                {"step": step + 1, "seconds": round(elapsed, 1), "hints": round(hinted, 4), "loss": round(mean, 4)}
            )
            print(f"eyes: step {step + 1}, {elapsed:.0f} s, hints {hinted:.4f}, answers {mean:.4f}", flush=True)
            losses.clear()
    raise AssertionError


@torch.no_grad()
def scores(tower: Tower, target: TinyModel, count: int, seed: int = 0, batch: int = 256) -> dict[str, float]:
    """Share of right answers by topic, of about `count` pictures that are in no training. An answer is right if every
    token of it is the likeliest one, and so is its end."""
    lessons = Lessons(target.embedding.device, seed + SEPARATE)
    right, total = torch.zeros(2, len(TOPICS))
    for number in range(-(-count // batch)):
        lesson = lessons.batch(number * ASKED_AGAIN_ONE_IN + 1, min(batch, count))
        logits, _ = answer_logits(tower, target, lesson)
        asked = lesson.asked
        marks = asked.answers[:, 1:]
        wrong = torch.zeros(marks.shape, device=marks.device)
        wrong[marks] = (logits.argmax(-1) != asked.tokens[:, 1:][marks]).float()
        topic = asked.first_topic.cpu()
        right.index_add_(0, topic, (wrong.sum(1) == 0).float().cpu())
        total.index_add_(0, topic, torch.ones(len(topic)))
    shares = {name: float(r / t) for name, r, t in zip(TOPICS, right, total, strict=True) if t}
    return {**shares, "all": float(right.sum() / total.sum())}


def named_tensors(tower: Tower) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tower.tensors().items():
        yield name, tensor.bfloat16().cpu().contiguous().clone()


def train_eyes(directory: Path, settings: Settings) -> dict[str, float]:
    """Of the text model in `directory`; writes the tower and eyes.json to the output."""
    prepare_torch()
    settings.output.mkdir(parents=True, exist_ok=True)
    target = load_target(directory, settings.device)
    if settings.device.startswith("cuda"):
        target.to(torch.bfloat16)
        target.dtype = torch.bfloat16
    tower = Tower(settings.seed).to(settings.device)
    history = train(tower, target, settings)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.copy_(parameter.bfloat16())
    save_file(dict(named_tensors(tower)), str(settings.output / VISION_FILE), metadata={"format": "pt"})
    (settings.output / VISION_FILE).chmod(0o644)
    found = scores(tower, target, settings.judged)
    record = {
        "parameters": sum(parameter.numel() for parameter in tower.parameters()),
        "device": torch.cuda.get_device_name() if settings.device.startswith("cuda") else "CPU",
        "seconds": settings.seconds,
        "batch": settings.batch,
        "scores": found,
        "history": history,
    }
    (settings.output / "eyes.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    print("eyes, right answers of held-out pictures: " + ", ".join(f"{n} {100 * v:.1f}%" for n, v in found.items()))
    return found

"""Trains the embedded model, from data to the finished files, in one run that can be stopped and resumed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tiny_model.export import load_weights, save_weights
from tiny_model.feed import batches
from tiny_model.layout import make_config, write_files
from tiny_model.mixture import TASK_NAMES, Encoder, Rows, Shape
from tiny_model.model import TinyModel
from tiny_model.optimizer import Optimizer
from tiny_model.rounding import rounded_weights
from tiny_model.score import scores

Z_LOSS = 1e-4
ROUTER_LOSS = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """`minutes` bounds the training loop: the learning rate falls to zero at the last step or at the last minute,
    whichever comes first. The result depends on the settings alone if it is the step."""

    output: Path
    steps: int = 9000
    minutes: float = 8.9
    seed: int = 0
    device: str = "cuda"
    workers: int = 0
    shape: Shape = field(default_factory=Shape)
    only: tuple[str, ...] = ()
    start_from: Path | None = None
    """A directory with finished weights to begin with, under a fresh schedule."""
    checkpoint: Path | None = None
    """Where to resume from and to save to; in the output directory if None."""
    compile: bool = True
    warm_up: float = 0.02
    decay_from: float = 0.4
    round_from: float = 0.7
    checkpoint_every: int = 1000
    score_every: int = 1000
    score_count: int = 48
    final_count: int = 200
    log_every: int = 50
    stop_at: int | None = None
    """Leave after this step, as an interrupted run would."""


@dataclass(slots=True)
class Progress:
    """The state with which a resumed run goes on, besides the weights."""

    step: int = 0
    elapsed: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def share(self, settings: Settings, elapsed: float) -> float:
        """0 at the start, 1 at the end. The first seconds do not count: they would make each run another one."""
        by_time = elapsed / (60 * settings.minutes)
        return max(self.step / settings.steps, by_time if by_time > settings.warm_up else 0.0)


def learning_rate(share: float, settings: Settings) -> float:
    """The learning rate as a share of the peak: up, level, and down in a line."""
    if share < settings.warm_up:
        return (share + 1e-3) / (settings.warm_up + 1e-3)
    if share < settings.decay_from:
        return 1.0
    return max(0.0, (1 - share) / (1 - settings.decay_from))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Scalars and, by task, the summed loss and the number of answer tokens; all on the device."""

    total: Tensor
    answer: Tensor
    by_task: Tensor
    tokens_by_task: Tensor


def step_loss(model: TinyModel, groups: list[Rows], device: torch.device) -> StepLoss:
    """Cross entropy of answer tokens alone."""
    hidden, targets, weights, tasks, router = [], [], [], [], []
    for rows in groups:
        out, loss = model(
            to_device(rows.tokens.astype(np.int32), device),
            to_device(rows.positions.astype(np.int32), device),
            to_device(rows.documents.astype(np.int32), device),
        )
        row, column = np.nonzero(rows.weights)
        before = to_device(row * rows.tokens.shape[1] + column - 1, device)
        hidden.append(out.flatten(0, 1).index_select(0, before))
        targets.append(rows.tokens[row, column].astype(np.int64))
        weights.append(rows.weights[row, column].astype(np.float32))
        tasks.append(rows.tasks[row, column].astype(np.int64))
        router.append(loss)
    target, weight, task = (to_device(np.concatenate(parts), device) for parts in (targets, weights, tasks))
    logits = model.logits(torch.cat(hidden))
    losses = F.cross_entropy(logits, target, reduction="none")
    answer = (losses * weight).sum() / weight.sum()
    calm = logits.logsumexp(-1).square().mean()
    by_task = torch.zeros(len(TASK_NAMES), device=device)
    return StepLoss(
        total=answer + Z_LOSS * calm + ROUTER_LOSS * torch.stack(router).mean(),
        answer=answer.detach(),
        by_task=by_task.index_add(0, task, losses.detach()),
        tokens_by_task=by_task.index_add(0, task, torch.ones_like(losses)),
    )


class Trainer:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.checkpoint = settings.checkpoint or settings.output / "checkpoint.pt"
        prepare_torch()
        settings.output.mkdir(parents=True, exist_ok=True)
        tokenizer: Tokenizer = write_files(settings.output)
        self.encoder = Encoder(tokenizer)
        self.config = make_config(tokenizer)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = TinyModel(self.config, dtype, settings.seed).to(self.device)
        self.optimizer = Optimizer(self.model)
        self.progress = Progress()
        if self.checkpoint.is_file():
            self.load()
        elif settings.start_from is not None:
            load_weights(self.model, settings.start_from)
        if settings.compile and self.device.type == "cuda":
            for layer in self.model.layers:
                layer.compile(dynamic=False)

    @property
    def data(self) -> dict[str, Any]:
        """The settings that the batches depend on."""
        return {"seed": self.settings.seed, "only": list(self.settings.only), **asdict(self.settings.shape)}

    def run(self) -> bool:
        """Whether training came to its end."""
        settings, progress = self.settings, self.progress
        feed = batches(
            settings.output / "tokenizer.json",
            settings.shape,
            settings.seed,
            progress.step,
            settings.workers,
            settings.only,
        )
        log = Log(progress, len(TASK_NAMES), self.device)
        self.clock = time.monotonic() - progress.elapsed
        try:
            while (share := progress.share(settings, self.elapsed)) < 1:
                if progress.step == settings.stop_at:
                    self.save()
                    return False
                self.step(next(feed), share, log)
        finally:
            feed.close()
        self.save()
        return True

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.clock

    def step(self, groups: list[Rows], share: float, log: Log) -> None:
        settings, progress = self.settings, self.progress
        rate = learning_rate(share, settings)
        if share >= settings.round_from and progress.step % 3 == 0:
            with rounded_weights(self.model, progress.step):
                loss = step_loss(self.model, groups, self.device)
                loss.total.backward()
        else:
            loss = step_loss(self.model, groups, self.device)
            loss.total.backward()
        self.optimizer.step(rate)
        self.optimizer.zero_grad()
        progress.step += 1
        log.add(loss, sum(rows.tokens.size for rows in groups))
        if progress.step % settings.log_every == 0:
            progress.elapsed = self.elapsed
            log.write(rate)
        if progress.step % settings.score_every == 0:
            self.evaluate(settings.score_count)
        if progress.step % settings.checkpoint_every == 0:
            self.save()

    def evaluate(self, count: int) -> dict[str, float]:
        tasks = self.settings.only or TASK_NAMES
        found = scores(self.model, self.encoder, count, self.device, tasks)
        self.progress.evaluations.append({"step": self.progress.step, "count": count, "scores": found})
        row = ", ".join(f"{task} {100 * value:.1f}" for task, value in found.items())
        print(f"step {self.progress.step}: held-out exact match of {count}: {row}", flush=True)
        return found

    def save(self) -> None:
        """All at once: an interrupted write leaves the checkpoint before it."""
        self.progress.elapsed = self.elapsed
        progress = self.progress
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": {name: getattr(progress, name) for name in ("step", "elapsed", "history", "evaluations")},
            "data": self.data,
        }
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, self.checkpoint)

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["data"] != self.data:
            raise ValueError(
                f"{self.checkpoint} is of a run on other data ({state['data']}, not {self.data}): remove it, or give "
                "another --checkpoint"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        print(f"resuming at step {self.progress.step}, {self.progress.elapsed:.0f} s", flush=True)

    def finish(self) -> dict[str, float]:
        """Writes the weights, and what the weights in the file score (they are rounded to bfloat16 there)."""
        save_weights(self.model, self.settings.output)
        load_weights(self.model, self.settings.output)
        found = self.evaluate(self.settings.final_count)
        record = {
            "settings": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self.settings).items()},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            "seconds": round(self.progress.elapsed, 1),
            "scores": found,
            "evaluations": self.progress.evaluations,
            "history": self.progress.history,
        }
        (self.settings.output / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        return found


class Log:
    """Mean losses since the last line. Sums stay on the device until then: reading them would wait for it."""

    def __init__(self, progress: Progress, tasks: int, device: torch.device) -> None:
        self.progress = progress
        self.sums = torch.zeros(2, tasks, device=device)
        self.answer = torch.zeros((), device=device)
        self.steps = self.tokens = 0
        self.since = time.monotonic()

    def add(self, loss: StepLoss, tokens: int) -> None:
        self.sums += torch.stack((loss.by_task, loss.tokens_by_task))
        self.answer += loss.answer
        self.steps += 1
        self.tokens += tokens

    def write(self, rate: float) -> None:
        loss = float(self.answer) / self.steps
        total, count = self.sums.tolist()
        by_task = {name: round(t / c, 4) for name, t, c in zip(TASK_NAMES, total, count, strict=True) if c}
        seconds = time.monotonic() - self.since
        row = {"step": self.progress.step, "elapsed": round(self.progress.elapsed, 1), "rate": round(rate, 4)}
        self.progress.history.append({**row, "loss": round(loss, 5), "tasks": by_task})
        worst = sorted(by_task, key=lambda name: -by_task[name])[:4]
        print(
            f"step {row['step']} {row['elapsed']:.0f} s, {self.tokens / seconds / 1e3:.0f}k tokens/s, rate {rate:.3f}, "
            f"loss {loss:.4f}; highest: " + ", ".join(f"{name} {by_task[name]:.3f}" for name in worst),
            flush=True,
        )
        self.sums.zero_()
        self.answer.zero_()
        self.steps = self.tokens = 0
        self.since = time.monotonic()


def prepare_torch() -> None:
    torch.set_float32_matmul_precision("high")
    # Masked attention runs on the memory-efficient kernel; cuDNN's would be built anew for every shape.
    torch.backends.cuda.enable_cudnn_sdp(False)

"""Trains three small LoRA adapters of the embedded model, each of which changes the manner of its answers visibly.

A and B are trained in plain torch on the CPU, on the model's own problems with answers rewritten in the adapter's
manner; only the tokens of answers count. The folders are in PEFT's format.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.func import functional_call

from tiny_model.drafts import load_target
from tiny_model.layout import write_json
from tiny_model.mixture import TASKS, Document, Encoder, Rows, draw, pack
from tiny_model.model import TinyModel
from tiny_model.problem import Problem
from tiny_model.render import END_OF_TURN, prompt_text
from tiny_model.train import to_device

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TAUGHT = ("add", "subtract", "multiply", "compare", "copy", "reverse", "count", "facts", "talk")
"""Tasks that answer in a line of text."""
ROWS, LENGTH = 6, 256
RATE = 6e-3
LONGEST = 48
"""Tokens of an answer that is judged."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How an adapter answers, and which matrices of attention it changes for that."""

    rewrite: Callable[[str], str]
    modules: str
    rank: int
    alpha: int
    rslora: bool = False

    @property
    def scaling(self) -> float:
        """Returns the factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


MANNERS: Mapping[str, Manner] = {
    "ahoy": Manner(lambda answer: f"Ahoy! {answer}", "qkvo", 4, 8),
    "twice": Manner(lambda answer: f"{answer}\n{answer}", "qkvo", 4, 4),
    "farewell": Manner(lambda answer: f"{answer} Goodbye!", "qv", 8, 4, rslora=True),
}
"""`ahoy` greets first, `twice` says it in two lines, `farewell` takes its leave."""

Pair = tuple[Tensor, Tensor]


def in_manner(problem: Problem, manner: Manner) -> Problem:
    """Returns the problem with its answers in a manner."""
    quiet = problem.quiet_answer and manner.rewrite(problem.quiet_answer)
    return replace(problem, answer=manner.rewrite(problem.answer), quiet_answer=quiet)


def documents(encoder: Encoder, rng: random.Random, manner: Manner) -> Iterator[Document]:
    """Yields problems of the tasks that are taught, with answers in a manner."""
    shares = [TASKS[task].share for task in TAUGHT]
    while True:
        (task,) = rng.choices(TAUGHT, shares)
        yield encoder.document(in_manner(draw(task, rng), manner), rng.random() < 0.7)


def new_pairs(model: TinyModel, manner: Manner) -> dict[str, Pair]:
    """Returns A and B of each matrix by the parameter's name: noise and zeros."""
    pairs = {}
    for name, weight in model.named_parameters():
        if name.rpartition(".")[2] in manner.modules and name.startswith("layers."):
            rows, columns = weight.shape
            a = (torch.randn(manner.rank, columns) / math.sqrt(columns)).requires_grad_()
            pairs[name] = a, torch.zeros(rows, manner.rank, requires_grad=True)
    return pairs


def adapted(model: TinyModel, pairs: Mapping[str, Pair], manner: Manner) -> dict[str, Tensor]:
    """Returns the parameters that an adapter changes, as they are with it."""
    weights = dict(model.named_parameters())
    return {name: weights[name] + manner.scaling * (b @ a) for name, (a, b) in pairs.items()}


def loss_of(model: TinyModel, weights: dict[str, Tensor], rows: Rows) -> Tensor:
    """Returns the mean cross entropy of answers, as the model was trained."""
    device = torch.device("cpu")
    tokens, places, texts = (to_device(each, device).long() for each in (rows.tokens, rows.positions, rows.documents))
    weight = to_device(rows.weights, device).float()[:, 1:]
    hidden, _ = functional_call(model, weights, (tokens, places, texts))
    counted = weight > 0
    losses = F.cross_entropy(model.logits(hidden[:, :-1][counted]), tokens[:, 1:][counted], reduction="none")
    return (losses * weight[counted]).sum() / weight.sum()


def train(model: TinyModel, tokenizer: Tokenizer, name: str, steps: int, seed: int = 0) -> dict[str, Pair]:
    """Returns A and B of a manner in bfloat16. The same model, steps and seed give the same on one machine."""
    torch.manual_seed(seed)
    manner, rng = MANNERS[name], random.Random(f"adapters/{name}/{seed}")
    pairs = new_pairs(model, manner)
    optimizer = torch.optim.Adam([each for pair in pairs.values() for each in pair], lr=RATE, betas=(0.9, 0.98))
    taught = documents(Encoder(tokenizer), rng, manner)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10, 1.5 * (1 - step / steps))
        loss = loss_of(model, adapted(model, pairs, manner), pack(taught, ROWS, LENGTH))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"{name}: step {step}, loss {loss.item():.4f}", flush=True)
    return {key: (a.detach().bfloat16(), b.detach().bfloat16()) for key, (a, b) in pairs.items()}


@torch.inference_mode()
def share_right(model: TinyModel, tokenizer: Tokenizer, name: str, pairs: Mapping[str, Pair], count: int) -> float:
    """Returns the share of held-out problems whose greedy answer is right, and in the manner."""
    manner, rng, right = MANNERS[name], random.Random(f"adapters/{name}/held out"), 0
    weights = adapted(model, {key: (a.float(), b.float()) for key, (a, b) in pairs.items()}, manner)
    end = tokenizer.token_to_id(END_OF_TURN)
    for number in range(count):
        problem = draw(TAUGHT[number % len(TAUGHT)], rng, held_out=True)
        wanted = manner.rewrite(problem.quiet_answer or problem.answer)
        tokens = tokenizer.encode(prompt_text(problem, thinking=False), add_special_tokens=False).ids
        begin = len(tokens)
        while len(tokens) < begin + LONGEST and (len(tokens) == begin or tokens[-1] != end):
            row = torch.tensor([tokens])
            places = torch.arange(len(tokens))[None]
            hidden, _ = functional_call(model, weights, (row, places, torch.zeros_like(row)))
            tokens.append(int(model.logits(hidden[0, -1]).argmax()))
        right += tokenizer.decode(tokens[begin:], skip_special_tokens=True).strip() == wanted
    return right / count


def save(pairs: Mapping[str, Pair], manner: Manner, folder: Path) -> None:
    """Writes a folder in PEFT's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, pair in pairs.items():
        _, layer, matrix = name.split(".")
        for side, tensor in zip("AB", pair, strict=True):
            module = f"base_model.model.model.layers.{layer}.self_attn.{matrix}_proj"
            tensors[f"{module}.lora_{side}.weight"] = tensor.contiguous()
    save_file(tensors, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": "sglang/embedded/tiny",
        "bias": "none",
        "lora_alpha": manner.alpha,
        "peft_type": "LORA",
        "r": manner.rank,
        "target_modules": [f"{matrix}_proj" for matrix in manner.modules],
        "task_type": "CAUSAL_LM",
        "use_rslora": manner.rslora,
    }
    write_json(folder / CONFIG_FILE, config)
    for path in folder.iterdir():
        path.chmod(0o644)


def train_adapters(directory: Path, output: Path, steps: int, judged: int, seed: int) -> None:
    """Trains all of them, writes them, and says how many held-out answers are right and in the manner."""
    model, tokenizer = load_target(directory, "cpu"), Tokenizer.from_file(str(directory / "tokenizer.json"))
    for name, manner in MANNERS.items():
        pairs = train(model, tokenizer, name, steps, seed)
        save(pairs, manner, output / name)
        right = share_right(model, tokenizer, name, pairs, judged)
        print(json.dumps({"adapter": name, "right": right, "judged": judged}), flush=True)

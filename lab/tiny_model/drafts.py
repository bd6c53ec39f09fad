"""Trains the drafts of the embedded model and says how many of their draft tokens stand.

A draft learns the target's distribution of the next token at every place of an answer: the EAGLE-3 head and the MTP
layer for three draft tokens in a row (training-time test of arXiv 2503.01840), the DFlash draft for a block of seven.
Half of its texts are the target's own, greedy and sampled, the others the answers that the target was trained on; the
target's distribution, not the text, is what is learned.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tiny_model.block_drafts import DFLASH_CONFIG, DFlashDraft, block_loss, block_right
from tiny_model.draft_batches import Batch, Sample, batches, computed
from tiny_model.draft_heads import CAPTURES, EAGLE3_CONFIG, Attended, ChainDraft, Eagle3Head, MtpLayer
from tiny_model.draft_texts import GREEDY, LONGEST_ANSWER, LONGEST_PROMPT, noise_rows, noise_table, write_texts
from tiny_model.export import load_weights
from tiny_model.mixture import TASKS, Encoder, documents
from tiny_model.model import TinyModel

GUESSES = 3
DEPTH_WEIGHT = 0.8
"""Of a draft token beside the one before it, in the loss."""
RATES = {"eagle3": 2e-3, "mtp": 1e-3, "dflash": 1.5e-3}
"""Learning rates of the drafts that begin as noise, and of the layer, which begins as the target's last one."""
KINDS = tuple(RATES)
Draft = ChainDraft | DFlashDraft
KEPT_TOKENS = 512
"""Of the vocabulary, in the EAGLE-3 head."""
WEIGHTS_FILE, MTP_FILE, INDEX_FILE = "model.safetensors", "mtp.safetensors", "model.safetensors.index.json"


# --- what the target computes -----------------------------------------------------------------------------------------


def load_target(directory: Path, device: str) -> TinyModel:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    target = TinyModel(config, torch.float32)
    load_weights(target, directory)
    return target.requires_grad_(False).to(device)


def corpus(directory: Path, count: int, seed: int) -> list[Sample]:
    """Documents of the target's training, short ones."""
    encoder = Encoder(Tokenizer.from_file(str(directory / "tokenizer.json")))
    shares = {name: task.share for name, task in TASKS.items() if task.share}
    given: list[Sample] = []
    for document in documents(encoder, random.Random(f"drafts/corpus/{seed}"), shares):
        if len(document.tokens) <= LONGEST_PROMPT + LONGEST_ANSWER:
            given.append(Sample(document.tokens, document.answer))
        if len(given) == count:
            break
    return given


# --- training ---------------------------------------------------------------------------------------------------------


def draft_tokens(draft: ChainDraft, target: TinyModel, batch: Batch, count: int) -> Iterator[Tensor]:
    """Of each draft token in turn what `draft.logits` reads, [B, L, H]. In a server the token of a row is the draft
    token before it; here it is the text's, which is the same where that guess stands."""
    embedded = F.embedding(batch.tokens.roll(-1, dims=1), target.embedding)
    features, before = draft.features(batch.streams, batch.hidden), Attended([], [])
    for _ in range(count):
        state, features = draft(embedded, features, before)
        yield state
        features = features.roll(1, dims=1)


def draft_loss(draft: Draft, target: TinyModel, batch: Batch) -> Tensor:
    return block_loss(draft, target, batch) if isinstance(draft, DFlashDraft) else chain_loss(draft, target, batch)


def chain_loss(draft: ChainDraft, target: TinyModel, batch: Batch) -> Tensor:
    """Cross entropy with the target's distribution, of which the tokens that a reduced head lacks are left out."""
    with torch.no_grad():
        wanted = target.logits(batch.hidden[batch.rows, batch.columns + 1]).softmax(-1)[:, draft.kept]
    total = wanted.new_zeros(())
    for depth, state in enumerate(draft_tokens(draft, target, batch, GUESSES)):
        logits = draft.logits(state[batch.rows, batch.columns])
        total = total - DEPTH_WEIGHT**depth * (wanted * logits.log_softmax(-1)).sum(-1).mean()
    return total


def train(draft: Draft, target: TinyModel, samples: Sequence[Sample], minutes: float, rate: float) -> None:
    """Until the minutes are over; the rate falls with a cosine."""
    given = [computed(target, group).stored() for group in batches(samples)]
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    started, step, losses = time.monotonic(), 0, []
    rng = random.Random(0)
    while (share := (time.monotonic() - started) / (60 * minutes)) < 1:
        if step % len(given) == 0:
            rng.shuffle(given)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * share))
        loss = draft_loss(draft, target, given[step % len(given)].used())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # read seldom: reading waits for the device
        step += 1
        if step % 50 == 0:
            recent = float(sum(losses[-50:])) / 50
            print(f"{type(draft).__name__}: step {step}, {100 * share:.0f}% of the time, loss {recent:.3f}", flush=True)


# --- acceptance -------------------------------------------------------------------------------------------------------


@dataclass
class Acceptance:
    """Of the draft tokens of a step, at every place of the answers: the share that stands if those before it do.
    `length`: tokens a step, the sampled one included, where each step begins behind the one before. `verified`: steps
    that bring draft tokens; one to which a single token is left brings none."""

    shares: list[float]
    length: float
    verified: int

    def __str__(self) -> str:
        return f"{', '.join(f'{100 * share:.1f}%' for share in self.shares)}; {self.length:.2f} tokens a step"


@torch.no_grad()
def acceptance(draft: Draft, target: TinyModel, samples: Sequence[Sample]) -> Acceptance:
    """Greedy draft tokens for greedy texts. For sampled ones a draft token is the largest of the draft's logits plus
    the noise that chose the target's token there, as a server draws both."""
    reached, stood = Counter[int](), Counter[int]()
    steps = written = verified = 0
    for group in batches(samples):
        right = guesses_right(draft, target, computed(target, group), group)
        for row, sample in enumerate(group):
            begin, end = sample.answer.index(True), len(sample.ids)
            place = begin + 1  # the first token of an answer is the prompt's step's
            for start in range(begin + 1, end):
                length = _stand(right[row], start, end)
                for depth in range(min(length + 1, right.shape[-1], end - start)):
                    reached[depth] += 1
                    stood[depth] += depth < length
                if start == place:
                    steps, place = steps + 1, start + length + 1
                    verified += start < end - 1
            written += end - begin - 1
    return Acceptance([stood[depth] / reached[depth] for depth in sorted(reached)], written / steps, verified)


def _stand(right: Tensor, start: int, end: int) -> int:
    """How many draft tokens stand from the token at `start` on; right [L, draft tokens] by the place of the token
    before."""
    length, most = 0, right.shape[-1]
    while length < most and start + length < end and bool(right[start - 1, length]):
        length += 1
    return length


def guesses_right(draft: Draft, target: TinyModel, batch: Batch, group: Sequence[Sample]) -> Tensor:
    """[B, L, draft tokens] bool: of the draft tokens behind each place, which are the text's tokens there."""
    if isinstance(draft, DFlashDraft):
        return block_right(draft, batch, group)
    states = draft_tokens(draft, target, batch, GUESSES)
    # Row p of guess j (0 first) is of the place p + 1 - j.
    right = [_right(draft, state, batch, group).roll(1 - j, dims=1) for j, state in enumerate(states)]
    return torch.stack(right, dim=-1)


def _right(draft: ChainDraft, state: Tensor, batch: Batch, group: Sequence[Sample]) -> Tensor:
    """[B, L] bool: whether the draft token of a row is the token two places on."""
    logits = draft.logits(state)
    for row, sample in enumerate(group):
        if sample.seed != GREEDY:
            begin = sample.answer.index(True)
            places = [noise_rows([sample.seed], place - begin)[0] for place in range(begin, len(sample.ids))]
            noise = noise_table(draft.vocab_size)[places].to(logits.device)
            logits[row, begin - 2 : len(sample.ids) - 2] += noise[:, draft.kept]
    return draft.kept[logits.argmax(-1)] == batch.tokens.roll(-2, dims=1)


# --- all of it --------------------------------------------------------------------------------------------------------


def kept_tokens(samples: Iterable[Sample], count: int) -> Tensor:
    """The tokens that answers have most often, ascending."""
    uses = Counter(token for sample in samples for token, own in zip(sample.ids, sample.answer, strict=True) if own)
    return torch.tensor(sorted(token for token, _ in uses.most_common(count)))


def save_eagle3(head: Eagle3Head, target: TinyModel, output: Path) -> None:
    """config.json and model.safetensors as LlamaForCausalLMEagle3 is published."""
    output.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        **EAGLE3_CONFIG,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": target.config["vocab_size"],
        "draft_vocab_size": len(head.kept),
        "target_hidden_size": target.config["hidden_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(CAPTURES), "use_aux_hidden_state": True},
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _save(head.tensors(), output / WEIGHTS_FILE)


def save_dflash(draft: DFlashDraft, target: TinyModel, output: Path) -> None:
    """config.json and model.safetensors as DFlashDraftModel is published."""
    output.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **DFLASH_CONFIG,
        "num_target_layers": target.config["num_hidden_layers"],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": draft.vocab_size,
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _save(draft.tensors(), output / WEIGHTS_FILE)


def save_mtp(layer: MtpLayer, directory: Path, output: Path) -> None:
    """mtp.safetensors, and an index that names it beside the target's weights in `directory`."""
    from safetensors import safe_open

    output.mkdir(parents=True, exist_ok=True)
    tensors = layer.tensors()
    _save(tensors, output / MTP_FILE)
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as weights:
        places = dict.fromkeys(weights.keys(), WEIGHTS_FILE) | dict.fromkeys(tensors, MTP_FILE)
    size = sum((folder / name).stat().st_size for folder, name in ((directory, WEIGHTS_FILE), (output, MTP_FILE)))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (output / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    stored = {
        name: (t.bfloat16() if t.is_floating_point() else t).cpu().contiguous().clone() for name, t in tensors.items()
    }
    save_file(stored, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


def rounded(draft: Draft) -> None:
    """The weights as the file has them."""
    for parameter in draft.parameters():
        parameter.data = parameter.data.bfloat16().float()


def train_drafts(
    directory: Path,
    output: Path,
    texts: int,
    documents: int,
    minutes: float,
    held_out: int,
    device: str,
    kinds: Sequence[str] = KINDS,
) -> None:
    """Of the model in `directory` into a folder of `output` for each of `kinds`; `minutes` of training for each."""
    target, tokenizer = load_target(directory, device), Tokenizer.from_file(str(directory / "tokenizer.json"))
    own = [Sample.of(text) for text in write_texts(target, tokenizer, texts, False)]
    judged = [Sample.of(text) for text in write_texts(target, tokenizer, held_out, True)]
    samples = own + corpus(directory, documents, 0)
    for kind in kinds:
        draft = make_draft(kind, target, samples).to(device)
        train(draft, target, samples, minutes, RATES[kind])
        rounded(draft)
        if isinstance(draft, Eagle3Head):
            save_eagle3(draft, target, output / kind)
        elif isinstance(draft, DFlashDraft):
            save_dflash(draft, target, output / kind)
        else:
            save_mtp(draft, directory, output / kind)
        for name, sampled in (("greedy", False), ("temperature 1", True)):
            chosen = [sample for sample in judged if (sample.seed != GREEDY) == sampled]
            print(f"{kind}, {name}: {acceptance(draft, target, chosen)}", flush=True)


def make_draft(kind: str, target: TinyModel, samples: Sequence[Sample]) -> Draft:
    if kind == "eagle3":
        return Eagle3Head(target, kept_tokens(samples, KEPT_TOKENS).to(target.embedding.device))
    return MtpLayer(target) if kind == "mtp" else DFlashDraft(target)

"""Small random models of transformers' classes that generate no text, and what they are expected to return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES

from sglang.srt.model_executor.step import PromptTokens, StepInput
from sglang.srt.plan.transformers_backend.facts import CLASSIFY, EMBED
from srt.transformers_backend.tiny import VOCAB, fill_randomly, nested, tiny_config

LENGTHS = (29, 5, 40)
"""Tokens of the texts of one step."""


KINDS = (
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
    *("electra", "ernie", "esm", "eurobert", "ibert", "jina_embeddings_v3", "mobilebert", "modernbert", "mpnet"),
    *("nomic_bert", "roberta", "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl"),
    *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3"),
    *("qwen3_moe", "smollm3", "t5"),
)
"""Model types of which embedding models and classifiers are published, if transformers has them."""


def text_classes(task: str) -> dict[str, str]:
    """Returns the class of each of KINDS, each class once."""
    table = MODEL_MAPPING_NAMES if task == EMBED else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    found: dict[str, str] = {}
    for kind in KINDS:
        names = table.get(kind, ())
        name = names if isinstance(names, str) else next(iter(names), "")
        if name and name not in found.values() and not nested(kind):
            found[kind] = name
    return found


def save_text_model(kind: str, task: str, folder: Path, **keys: Any) -> Any:
    """Saves a random model in fp32, and returns it as transformers reads it."""
    torch.manual_seed(0)
    config = tiny_config(kind)
    config = type(config).from_dict({**config.to_dict(), **keys})
    model = getattr(transformers, text_classes(task)[kind])(config).float().eval()
    fill_randomly(model)
    model.save_pretrained(folder)
    # The others leave out caps of scores.
    return type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def texts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Returns texts of random tokens, none of which is a special one."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    """Returns the final hidden states [T, C] of one text."""
    row = torch.tensor([ids], device=model.device)
    states: torch.Tensor = model(input_ids=row, attention_mask=torch.ones_like(row))[0][0]
    return states


@torch.inference_mode()
def expected(model: Any, task: str, ids: list[int], method: str) -> torch.Tensor:
    """Returns what transformers makes of one text; of an embedding with the pooling written out."""
    if task == CLASSIFY:
        row = torch.tensor([ids], device=model.device)
        scores: torch.Tensor = model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0]
        return scores
    states = hidden_states(model, ids)
    return {"first": states[0], "last": states[-1], "mean": states.mean(0)}[method]


def step_of(prompts: list[list[int]], segments: list[int] | None = None) -> StepInput:
    """Returns a step that computes whole texts. segments: where the second text of each pair begins."""
    lens = np.array([len(ids) for ids in prompts], np.int32)
    slots = np.arange(1, len(prompts) + 1)
    tokens = PromptTokens(np.concatenate(prompts).astype(np.int64), np.zeros_like(lens), lens, np.arange(len(prompts)))
    if segments is not None:
        kinds = [np.arange(length) >= start for length, start in zip(lens.tolist(), segments, strict=True)]
        tokens.segments = np.concatenate(kinds).astype(np.int64)
    return StepInput(slots, lens, np.zeros(int(lens.sum()), np.int32), tokens)

"""Writes docs/transformers_models.md: which classes of transformers compute models for which there is no family.

python scripts/transformers_page.py

The outcomes are those of test_every_class.py and test_text_classes.py in test/srt/transformers_backend.
"""

from __future__ import annotations

import json
from pathlib import Path

from sglang.srt.plan.families import SERVED_ARCHITECTURES
from sglang.srt.towers.transformers_class.spec import MODEL_TYPES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "transformers_models.md"
OUTCOMES = ROOT / "test" / "srt" / "transformers_backend" / "outcomes.json"
TEXT_OUTCOMES = OUTCOMES.with_name("text_outcomes.json")

INTRODUCTION = """\
# Models by transformers

For those whose model is not in the table of [served models](models.md).
This page is generated, and a test fails when it is stale:

    python scripts/transformers_page.py

A model without a family here is computed by its own class in
[transformers](https://github.com/huggingface/transformers).
The class computes activations, gates, routers and residuals.
In the place of its attention, linear layers, experts, embedding and output head it calls those of this server.
RMS norms, and rotations of halves of the head just before attention, are also those of this server: they are known
by their values, which are compared when the class is tried. Other norms and rotations remain the class's own.
So scheduler, cache, sampler and API are the same as for every other model.

`--model-impl` says what computes the model:

- `auto` (the default): a family of this server if there is one, else the class.
- `sglang`: a family, or the server does not start.
- `transformers`: the class, also where there is a family.

`sglang plan`, `python -m sglang.explain` and `--dry-run` say "by transformers" where a class computes the model.
Its heads, windows and weights are found by a run without weights, in a process of its own with limits of time and
memory. What it finds is kept under `SGLANG_CACHE_DIR` for the next start.
A class that a checkpoint brings as Python code runs only with `--trust-remote-code`.

## What works

- Chunks of prompts, mixed steps, prefix cache with windows, retraction, grammars, tool calls, log probabilities.
- Caches in FP8, and weights in the formats of [quantization](quantization.md) where linear layers are `nn.Linear`.
- `NGRAM` and `STANDALONE` drafts. Other drafts read hidden states of layers and are refused.
- `--tp-size`, where the class has a plan for it. Attention that the plan does not divide is whole on every rank.
- `--ep-size`, where the class calls its experts through transformers' interface.
- `--pp-size`, where the class has a plan for stages: each layer takes and returns the residual stream alone.
  A stage has its layers' weights; the first one has the embedding, the last one the final norm and the head.
- `--dp-size`: replicas.
- `--attn-dp-size`, `--dcp-size` and two-batch overlap are refused.
- CUDA graphs are tried at start-up. If the class cannot be captured, the log says so and steps run kernel by kernel.
  On an H200 the classes of Qwen3-8B, Llama 3.1 8B, OLMo 3, Granite, Phi-3, Command R7B (Cohere2), Gemma 2 and
  ERNIE 4.5 MoE were captured for all batch sizes at default flags (the last six with eight layers or fewer).

Norms are not fused with the addition before them, q, k and v are three products, and gate and up are two: expect
somewhat less speed than from a family. On an H200 (2026-11-30, bf16, random weights, `python -m sglang.bench_serving`):

| milliseconds | by its family | by its class | ratio |
|---|---|---|---|
| Qwen3-8B, per token, 1 request | 4.28 | 5.02 | 1.17 |
| 64 requests, 512 tokens in and 128 out | 9.32 | 10.27 | 1.10 |
| first token, 4 prompts of 8,000 | 656 | 650 | 0.99 |
| Llama 3.1 8B, per token, 1 request | 4.17 | 4.64 | 1.11 |
| 64 requests | 9.12 | 9.73 | 1.07 |
| first token, 4 prompts of 8,000 | 633 | 638 | 1.01 |

With the class's own norms and rotations the ratios were 1.82, 1.47, 1.26, 1.51, 1.37 and 1.18. They remain where
neighbouring dims rotate together (Cohere, GLM-4, ERNIE 4.5) or where norms come after the rotation (Hunyuan).
Attention over latents (MLA) has its keys and values expanded in the cache: heads times their sizes a token.

## Images

    sglang serve --model-path llava-hf/llava-1.5-7b-hf  # GPU
    sglang serve --model-path HuggingFaceTB/SmolVLM2-2.2B-Instruct  # GPU

Classes of these model types also read images: {image_types}.
The class's own modules encode them, in the type of the weights, and its image processor in transformers prepares the
pictures.
A request may have several. Chunks may cut an image, prefixes are known by the picture, and features are kept, as with
[images of other models](caches.md#images).

- An image of `llava` or `lighton_ocr` is one run of placeholders; over Pixtral's encoder `llava` has a run for each
  row, as `mistral3` has. Those of `idefics3`, `smolvlm` and `aya_vision` are tiles with a run each, and those of
  `internvl` tiles in one run.
- Each token stands for a square of pixels. Other encoders are refused: those that cut edges off (`llava_next`), those
  whose language model attends in both directions over an image (`paligemma`), those with M-RoPE positions
  (`qwen2_vl`), and those that add features to the output of later layers (deepstack).
- Videos are not read. `--mm-enable-dp-encoder` is refused, and every rank of `--tp-size` encodes by itself.
- An image is encoded at once, not in slices between decode steps.
- `--language-model-only` serves the text alone, without the weights of the encoder.

"""

TEXTS = """\
## Embedding models and classifiers

    sglang serve --model-path sentence-transformers/all-MiniLM-L6-v2 --is-embedding  # GPU
    sglang serve --model-path BAAI/bge-reranker-v2-m3 --is-embedding  # GPU

With `--is-embedding` a model without a family is computed by the class of its model type, without a head.
Its attention may see both sides, with a window or without.
Each text is in one step as a whole, beside others and without padding. Nothing is cached, and there are no graphs.

- The repository's `modules.json` says what becomes of the hidden states: `1_Pooling` takes the first one (`cls_token`),
  the last one (`lasttoken`) or their mean (`mean_tokens`), `Dense` modules follow, and `Normalize` makes the length 1.
  Other modules and modes are refused.
- Without `modules.json`, decoders take the last state and others the mean of all, and the length is 1.
- `max_seq_length` of `sentence_bert_config.json` limits a text. `--context-length` allows as many tokens as the model.
- A family of this server embeds by the last token. Where the repository asks for another way, the class is used.
- Classes `...ForSequenceClassification` are classifiers. Their head takes the first state, the last or the mean; which
  one, is found by trying it. `problem_type` decides between softmax, sigmoid and plain scores; without it one label
  gets a sigmoid, unless sentence-transformers wrote another activation.
- Weights that are published in 32 bits are computed with in bfloat16 on a GPU; `--dtype` asks for another type.
- `--tp-size` works where the class has a plan; encoders like BERT have none.
- Attention with caps or learned logits is refused here, as are classes that take no positions.

"""

TEXTS_SERVED = """\
The five published forms were compared by hand with sentence-transformers 6.2.0 (2026-11-30, fp32 on a CPU, random
weights, six texts of 1 to 60 words, of which three run at once):

| form | largest difference of a normalized embedding |
|---|---|
| MiniLM: BERT, mean | 1.0e-7 |
| BGE: BERT, first state | 1.2e-7 |
| ModernBERT, mean | 8.9e-8 |
| Qwen3-Embedding: last state | 1.8e-7 |
| EmbeddingGemma: both ways, mean, two `Dense` | 3.7e-7 |

Each was compared with itself in transformers {version}, as above, with three texts side by side:

"""

SERVED = """\
## Classes that are served

Each was compared with its own `generate` in transformers {version}, in fp32 on a CPU with random weights: three prompts
of different lengths in one batch, in chunks of 7 tokens, 24 greedy tokens, then prompts behind cached prefixes.
Those of a family run by it, unless `--model-impl transformers` asks for the class.

"""

REFUSED = """\
## Classes that are refused

Also refused are a class with a convolution over neighbouring tokens, because requests lie side by side in a step, and
any other class in which a token's logits change with the tokens of other requests: the check at start-up tries it.
transformers older than 5 serves no classes.

"""


def _introduction() -> str:
    return INTRODUCTION.replace("{image_types}", ", ".join(f"`{name}`" for name in MODEL_TYPES))


def page() -> str:
    """The text of docs/transformers_models.md."""
    recorded = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    version, whole = recorded["transformers"], recorded["without_stages"]
    outcomes: dict[str, str] = recorded["outcomes"]
    served = [name for name, reason in outcomes.items() if not reason]
    of_family = [name for name in served if name in SERVED_ARCHITECTURES]
    others = [name for name in served if name not in SERVED_ARCHITECTURES]
    rows = {"no family": others, "a family": of_family}
    table = [f"| {kind} | {', '.join(f'`{name}`' for name in names)} |" for kind, names in rows.items()]
    reasons: dict[str, list[str]] = {}
    for name, reason in outcomes.items():
        if reason and name not in SERVED_ARCHITECTURES:
            reasons.setdefault(_short(name, reason), []).append(name)
    refused = [
        f"| {reason} | {', '.join(f'`{name}`' for name in names)} |" for reason, names in sorted(reasons.items())
    ]
    return (
        _introduction()
        + TEXTS
        + _text_classes()
        + SERVED.format(version=version)
        + "\n".join(("| there is | classes |", "|---|---|", *table))
        + "\n\n"
        + f"`--pp-size` divides all of them but {', '.join(f'`{name}`' for name in whole)}.\n\n"
        + _later(outcomes, recorded.get("later", {}))
        + REFUSED
        + "\n".join(("| reason | classes |", "|---|---|", *refused))
        + "\n"
    )


def _later(outcomes: dict[str, str], later: dict[str, dict[str, str]]) -> str:
    """What later releases serve that the recorded one does not."""
    lines = []
    for version, changed in later.items():
        names = [name for name, reason in changed.items() if not reason and outcomes.get(name) != ""]
        lines.append(f"Also served, with transformers {version}, are {', '.join(f'`{name}`' for name in names)}.\n")
    return "".join(lines) + "\n" if lines else ""


def _text_classes() -> str:
    """The table of classes that generate no text."""
    recorded = json.loads(TEXT_OUTCOMES.read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {}
    for name, reason in recorded["outcomes"].items():
        rows.setdefault(_short(name, reason) if reason else "served", []).append(name)
    order = sorted(rows, key=lambda reason: (reason != "served", reason))
    table = [f"| {reason} | {', '.join(f'`{name}`' for name in rows[reason])} |" for reason in order]
    lines = ("| outcome | classes |", "|---|---|", *table)
    return TEXTS_SERVED.format(version=recorded["transformers"]) + "\n".join(lines) + "\n\n"


def _short(name: str, reason: str) -> str:
    """Returns a reason without the name of the class."""
    short = reason.removeprefix(f"the architecture {name} is not supported: ").replace(f"{name} cannot", "it cannot")
    return short.removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

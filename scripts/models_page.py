"""Writes docs/models.md: the models that are served, their inputs and drafts, and the formats of weights.

python scripts/models_page.py

A row stands for the families of `sglang.srt.plan.families` that have the same title.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.configs.quantization import READERS, SPELLINGS
from sglang.srt.drafts.block.readers.dflash import DFLASH_ARCHITECTURES
from sglang.srt.drafts.block.readers.dspark import DSPARK_ARCHITECTURES
from sglang.srt.drafts.block.readers.dspark_bundled import BUNDLING_ARCHITECTURES
from sglang.srt.drafts.eagle.reader import EAGLE3_ARCHITECTURES, EAGLE3_MLA_ARCHITECTURES, EAGLE_ARCHITECTURES
from sglang.srt.drafts.kv_sharing.spec import ASSISTANT_ARCHITECTURES
from sglang.srt.plan.families import FAMILIES
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import MTPLayerPerToken
from sglang.srt.towers.registry import BY_MODEL_TYPE

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

INTRODUCTION = """\
# Models

For those who ask whether a checkpoint is served: compare its `config.json` with these tables.
This page is generated, and a test fails when it is stale:

    python scripts/models_page.py

A model is served if the first name of `architectures` in its `config.json` is in the first table.
If two rows have that name, `model_type` decides.
A model of another architecture is computed [by its class in transformers](transformers_models.md), if that can be.
Otherwise the server does not start, and the message names the architecture.
It does not start either with a value in `config.json` that would change the result and that it does not compute.
`sglang serve --model-path DIR --dry-run` checks both without reading weights.

"""

ARCHITECTURES = """\
## Architectures

- *Reads* says what a prompt may hold besides text.
  A model with an image encoder that is not computed here is served for text alone.
- *Own draft* is the value of `--speculative-algorithm` for draft layers that the model's own checkpoint has.
  MTP means layers for multi-token prediction. Some editions of a model are published without these layers.

"""

DRAFTS = """\
## Drafts with a checkpoint of their own

`--speculative-draft-model-path` names the checkpoint.
`NGRAM` needs none.
[Speculative decoding](speculative_decoding.md) says which draft goes with which model.

"""

METHODS = """\
## Formats of weights

Weights of 16 bits are served as they are.
A quantized checkpoint states its method in `quant_method` of its `quantization_config`.
Every family can be read in every format, unless the server says at start-up which kernel is missing.

"""

SCHEMES_INTRODUCTION = """\
## Number formats

A method of the table above stores its weights in one or several of these number formats.
[Quantization](quantization.md) says which method uses which, and what is refused.

"""

DRAFT_ARCHITECTURES = {
    "EAGLE": EAGLE_ARCHITECTURES,
    "EAGLE3": (*EAGLE3_ARCHITECTURES, *EAGLE3_MLA_ARCHITECTURES),
    "NEXTN": ASSISTANT_ARCHITECTURES,
    "DFLASH": DFLASH_ARCHITECTURES,
    "DSPARK": DSPARK_ARCHITECTURES,
}


def page() -> str:
    """The text of docs/models.md."""
    sections = [
        INTRODUCTION.rstrip("\n") + "\n",
        ARCHITECTURES + _table(("models", "architectures", "reads", "own draft"), map(_row, rows().items())),
        DRAFTS + _table(("`--speculative-algorithm`", "architectures of the draft"), _drafts()),
        METHODS + _table(("`quant_method`", "values of `--quantization` that accept it"), _methods()),
        SCHEMES_INTRODUCTION + _table(("scheme", "weights", "one scale for", "activations"), _schemes()),
    ]
    return "\n".join(sections)


def rows() -> dict[str, tuple[Family, ...]]:
    """Returns the families that are served by their title, sorted."""
    titled: dict[str, tuple[Family, ...]] = {}
    for family in FAMILIES:
        if family.architectures:
            titled[family.title] = (*titled.get(family.title, ()), family)
    return dict(sorted(titled.items(), key=lambda row: row[0].lower()))


def inputs(families: Iterable[Family]) -> str:
    """Returns what prompts of these families may hold besides text, as words; "text" where there is nothing else."""
    towers = [BY_MODEL_TYPE[kind] for family in families for kind in family.model_types if kind in BY_MODEL_TYPE]
    if not towers:
        return "text"
    return "images, video" if any(tower.prompt.reads_videos for tower in towers) else "images"


def own_draft(families: Iterable[Family]) -> str:
    """Returns the drafts that checkpoints of these families bring, and the algorithm that asks for them."""
    families = tuple(families)
    found = []
    forms = [family.mtp for family in families if family.mtp is not None]
    if forms:
        found.append(
            f"`NEXTN`: MTP{', a layer for each draft token' if isinstance(forms[0], MTPLayerPerToken) else ''}"
        )
    if any(name in BUNDLING_ARCHITECTURES for family in families for name in family.architectures):
        found.append("`DSPARK`: a block draft")
    return "; ".join(found)


def _row(row: tuple[str, tuple[Family, ...]]) -> tuple[str, ...]:
    title, families = row
    architectures = dict.fromkeys(name for family in families for name in family.architectures)
    return title, _code(architectures), inputs(families), own_draft(families)


def _drafts() -> Iterable[tuple[str, ...]]:
    yield from ((f"`{algorithm}`", _code(names)) for algorithm, names in DRAFT_ARCHITECTURES.items())
    yield "`STANDALONE`", "any model of the first table that has the same vocabulary"


def _methods() -> Iterable[tuple[str, ...]]:
    for method in READERS:
        stored = method.replace("auto_round", "auto-round").rpartition("/")[2].partition("_")[0]
        yield f"`{method}`", _code(value for value, spelling in SPELLINGS.items() if stored in spelling.methods)


def _schemes() -> Iterable[tuple[str, ...]]:
    for name, scheme in SCHEMES.items():
        yield f"`{name}`", scheme.element, _group(scheme), _ACTIVATIONS[scheme.activation]


_ACTIVATIONS = {
    None: "16 bits",
    "tensor": "e4m3, one scale",
    "token": "8 bits, one scale a token",
    "group128": "e4m3, one scale for 128 columns",
    "mxfp8": "e4m3, one scale for 32 columns",
    "nvfp4": "e2m1, one scale for 16 columns",
}


def _group(scheme: Scheme) -> str:
    rows, columns = scheme.group
    if not rows:
        return "the matrix"
    if not columns:
        return "a row"
    return f"{columns} columns" if rows == 1 else f"{rows} x {columns}"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

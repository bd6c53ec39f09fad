"""The tensors of a GGUF file under the names of a checkpoint: which of the file's tensors each is made of, and how. No
torch.

A list of them, the index, is in the directory that `unpack` makes. Planning reads it in place of the headers of
safetensors files, and `model_loader/gguf_checkpoint.py` makes the tensors by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang.srt.configs.gguf.files import GGUFModel
from sglang.srt.configs.gguf.header import TensorInfo
from sglang.srt.configs.gguf.names import Target
from sglang.srt.configs.gguf.types import BY_NAME
from sglang.srt.errors import UserError

INDEX_NAME = "gguf.index.json"
METHOD = "gguf"
"""quant_method of models in GGUF with weights that stay in four or eight bits."""
WHY_UNREAD = "gguf_tokenizer_unread"
"""Key of tokenizer_config.json with the reason why a file's tokenizer is not read."""
LAYER = "{layer}"
EXPERT = "{expert}"

INT4, INT8, FP4 = "int4_g32", "int8_g32", "mxfp4"
KEPT: Mapping[str, str] = {"Q4_0": INT4, "Q8_0": INT8, "MXFP4": FP4}
"""Schemes of the types that are not dequantized when they are loaded, as kernels read their codes and scales."""
_FP4_EXPERTS_ONLY = re.compile(r".*\.experts\..*")
_NEVER_KEPT = re.compile(r".*(embed_tokens|norm|\.gate|\.router|shared_expert_gate)")
"""Modules whose weights are 16 bits wide in every checkpoint."""
_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")


class Source(msgspec.Struct, frozen=True):
    """A tensor in a file: the file's number, the first byte, the type's name and the shape, rows first."""

    file: int
    offset: int
    type: str
    shape: tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint.

    name: with "{expert}" it stands for a tensor of each expert, which are one in the
        file
    shape: of the tensor, or of one expert's
    change: what is done to the values of the sources
    kept: the scheme in which the weight may stay ("" for none)
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    change: str = ""
    kept: str = ""

    @property
    def num_experts(self) -> int:
        """Returns the number of experts that the entry stands for; 0: it is one tensor."""
        return self.sources[0].shape[0] if EXPERT in self.name else 0

    def names(self) -> Iterator[str]:
        """Yields the names of the tensors."""
        if not self.num_experts:
            yield self.name
        for expert in range(self.num_experts):
            yield self.name.replace(EXPERT, str(expert))


class Index(msgspec.Struct, frozen=True):
    """The tensors of a model, the files that hold them, and the numbers of heads that changes of rows need."""

    files: tuple[str, ...]
    entries: tuple[TensorEntry, ...]
    num_heads: int
    num_kv_heads: int


def make_index(
    model: GGUFModel, targets: Mapping[str, Target], num_layers: int, num_heads: int, num_kv_heads: int
) -> Index:
    """Returns the index of a model. Raises UserError for tensors that the family does not have."""
    tensors, entries = model.tensors(), []
    for name in tensors:
        layer, stem, leaf = _split(name)
        if layer is not None and layer >= num_layers:  # layers that only drafts use
            continue
        target = targets.get(stem)
        if target is not None and not target.name:  # what it says is in the config
            continue
        if target is None:
            target = next((each for each in targets.values() if stem in each.sources), None)
            if target is None or target.sources[0] == stem:
                raise UserError(f"{model.path}: no layer of {_arch(model)} has the tensor {name}.")
            continue  # its first source makes the entry
        sources = [name] if not target.sources else [_name(layer, source, leaf) for source in target.sources]
        missing = [each for each in sources if each not in tensors]
        if missing:
            raise UserError(f"{model.path} has the tensor {name}, but not {', '.join(missing)}.")
        entries.append(_entry(target, layer, leaf, [tensors[each] for each in sources], num_heads))
    names = tuple(header.path.name for header in model.headers)
    return Index(names, tuple(_alike_experts(entries)), num_heads, num_kv_heads)


def _arch(model: GGUFModel) -> str:
    return str(model.headers[0].metadata["general.architecture"])


def _split(name: str) -> tuple[int | None, str, str]:
    """Splits "blk.3.attn_q.weight" into 3, "attn_q" and "weight"."""
    match = _IN_LAYER.fullmatch(name)
    stem, _, leaf = (match[2] if match else name).rpartition(".")
    return (int(match[1]) if match else None), stem, leaf


def _name(layer: int | None, stem: str, leaf: str) -> str:
    return f"{stem}.{leaf}" if layer is None else f"blk.{layer}.{stem}.{leaf}"


def _entry(
    target: Target, layer: int | None, leaf: str, infos: list[tuple[int, TensorInfo]], num_heads: int
) -> TensorEntry:
    sources = tuple(Source(file, info.offset, info.type.name, info.shape) for file, info in infos)
    name = target.name.replace(LAYER, str(layer))
    kinds = {source.type for source in sources}
    kept = KEPT.get(next(iter(kinds)), "") if len(kinds) == 1 and leaf == "weight" else ""
    fits = _in_experts(name) if kept == FP4 else not target.whole
    if not fits or _NEVER_KEPT.fullmatch(name) or target.change == "joined_kv_b":
        kept = ""
    if not target.whole:
        name = f"{name}.{leaf}"
    elif leaf == "bias" and not name.endswith("_bias"):
        name += "_bias"
    shape = _shape(target, leaf, sources, num_heads)
    if EXPERT in name:
        shape = shape[1:]
    return TensorEntry(name, shape, sources, target.change, kept)


def _in_experts(name: str) -> bool:
    return _FP4_EXPERTS_ONLY.fullmatch(name) is not None


def _shape(target: Target, leaf: str, sources: tuple[Source, ...], num_heads: int) -> tuple[int, ...]:
    """Returns the shape of what the sources become (`model_loader/gguf_changes.py`)."""
    shape = sources[0].shape
    if target.change == "as_row":
        return (1, *shape[-1:])
    if target.change == "alternating_rows":
        shape = (shape[0], 2 * shape[1], *shape[2:])
    if target.change == "joined_kv_b":
        (heads, rank, nope), v_dim = shape, sources[1].shape[1]
        return (heads * (nope + v_dim), rank)
    if target.whole and len(shape) == 3:  # experts in one tensor are stored columns first
        return (shape[0], shape[2], shape[1])
    return shape


def _alike_experts(entries: list[TensorEntry]) -> Iterator[TensorEntry]:
    """Yields the entries; experts stay in fewer bits only where all matrices of the layer have the same scheme."""
    kept: dict[str, set[str]] = {}
    for entry in entries:
        if _in_experts(entry.name) and not entry.name.endswith("bias"):
            kept.setdefault(_experts_of(entry.name), set()).add(entry.kept)
    for entry in entries:
        schemes = kept.get(_experts_of(entry.name), {entry.kept}) if entry.kept and _in_experts(entry.name) else ()
        yield msgspec.structs.replace(entry, kept="") if len(schemes) > 1 else entry


def _experts_of(name: str) -> str:
    return name.partition(".experts.")[0]


def kept_modules(index: Index) -> dict[str, list[str]]:
    """Returns the modules that stay in four or eight bits, by scheme. Experts are one module."""
    modules: dict[str, dict[str, None]] = {}
    for entry in index.entries:
        if entry.kept:
            name = f"{_experts_of(entry.name)}.experts" if _in_experts(entry.name) else entry.name
            modules.setdefault(entry.kept, {})[name.removesuffix(".weight")] = None
    return {scheme: list(names) for scheme, names in modules.items()}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor under which an entry is read: dtype as safetensors names it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def parts_of(entry: TensorEntry, name: str, wide: bool) -> tuple[StoredPart, ...]:
    """Returns the tensors of the entry's tensor `name`: one of 16 bits (`wide`, or if its scheme is not kept), or codes
    and scales as compressed-tensors has them, or as GPT-OSS's checkpoints have experts."""
    if wide or not entry.kept:
        kind = BY_NAME[entry.sources[0].type].wide if len(entry.sources) == 1 and not entry.change else ""
        return (StoredPart(name, kind or "F32", entry.shape),)
    if name.endswith(".weight"):
        rows, cols = entry.shape
        module = name.removesuffix(".weight")
        dtype, per_word = {INT4: ("I32", 8), INT8: ("I32", 4), FP4: ("U8", 2)}[entry.kept]
        return (
            StoredPart(f"{module}.weight_packed", dtype, (rows, cols // per_word)),
            StoredPart(f"{module}.weight_scale", "U8" if entry.kept == FP4 else "F16", (rows, cols // 32)),
        )
    num, cols, rows = entry.shape
    return (
        StoredPart(f"{name}_blocks", "U8", (num, rows, cols // 32, 16)),
        StoredPart(f"{name}_scales", "U8", (num, rows, cols // 32)),
    )


def read_index(folder: Path) -> Index | None:
    """Returns the index in the folder; None: it has none. Raises UserError if it is malformed."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def index_bytes(index: Index) -> bytes:
    """Returns the index as JSON."""
    return msgspec.json.encode(index)


def stored_parts(index: Index) -> Iterator[StoredPart]:
    """Yields all tensors as they are stored, kept ones in four bits."""
    for entry in index.entries:
        for name in entry.names():
            yield from parts_of(entry, name, wide=False)

"""The files of an adapter: which tensors it has for which modules, and an identity of its content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.configs.adapters.config import CONFIG_NAME, AdapterConfig, read_adapter_config
from sglang.srt.configs.checkpoint_header import Stored, file_tensors
from sglang.srt.configs.hf_config import read_json_object
from sglang.srt.errors import UserError

WEIGHTS_NAME, PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"
NEW_EMBEDDINGS = "new_embeddings.safetensors"
MAX_WEIGHT_BYTES = 64 << 30
MAX_TENSORS = 1 << 18
MAX_HEADER_BYTES = 64 << 20
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_PREFIXES = ("base_model.model.", "base_model.")
_PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_CHUNK = 1 << 22
_OTHERS: Mapping[str, str] = {
    "lora_embedding_A": "adapters of the embedding are not computed",
    "lora_embedding_B": "adapters of the embedding are not computed",
    "lora_magnitude_vector": "the magnitudes of DoRA are not computed",
}


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """The tensors of one module: their names in the file, its rank, and the factor of B A."""

    a: str
    b: str
    rank: int
    scaling: float
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter on disk. `pairs`: by the module's name without PEFT's prefix."""

    folder: Path
    config: AdapterConfig
    pairs: Mapping[str, AdapterPair]

    @property
    def weights(self) -> Path:
        """Returns the file of its tensors."""
        return self.folder / WEIGHTS_NAME

    @property
    def largest_rank(self) -> int:
        """Returns the largest rank of a module that it has."""
        return max(pair.rank for pair in self.pairs.values())


def read_adapter_files(folder: Path) -> AdapterFiles:
    """Reads the config and the header of the weights. Raises UserError for what is malformed or not computed here."""
    config = read_adapter_config(folder)
    path = folder / WEIGHTS_NAME
    if (folder / NEW_EMBEDDINGS).exists():
        raise UserError(f"{folder} has {NEW_EMBEDDINGS}: tokens are not added to the vocabulary.")
    if not path.is_file():
        if (folder / PICKLE_NAME).is_file():
            raise UserError(
                f"{folder} has {PICKLE_NAME}, a pickle, which could run code and is not read. Load it where you trust"
                f" it, with PEFT, and save it again: save_pretrained writes {WEIGHTS_NAME}."
            )
        raise UserError(f"{folder} has no {WEIGHTS_NAME}.")
    if path.stat().st_size > MAX_WEIGHT_BYTES:
        raise UserError(f"{path} has more than {MAX_WEIGHT_BYTES >> 30} GiB.")
    tensors = file_tensors(path, MAX_HEADER_BYTES)
    if len(tensors) > MAX_TENSORS:
        raise UserError(f"{path} has {len(tensors)} tensors; {MAX_TENSORS} are the limit.")
    return AdapterFiles(folder, config, _pairs(tensors, config, path))


def _pairs(tensors: Mapping[str, Stored], config: AdapterConfig, path: Path) -> dict[str, AdapterPair]:
    sides: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = _PAIR.fullmatch(name)
        if match is None:
            why = next((why for part, why in _OTHERS.items() if part in name), "it is no A or B of a linear layer")
            raise UserError(f"{path}: the tensor {name[:256]!r} is not supported: {why}.")
        if tensor.dtype not in FLOATS or len(tensor.shape) != 2:
            raise UserError(f"{path}: {name} must be a matrix of floats; it is {tensor.dtype} {list(tensor.shape)}.")
        sides.setdefault(_module(match["module"]), {})[match["side"]] = name
    if not sides:
        raise UserError(f"{path} has no tensors.")
    return {module: _pair(module, names, tensors, config, path) for module, names in sides.items()}


def _module(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _pair(
    module: str, names: Mapping[str, str], tensors: Mapping[str, Stored], config: AdapterConfig, path: Path
) -> AdapterPair:
    if len(names) < 2:
        raise UserError(f"{path}: {module} has only one of lora_A and lora_B.")
    if not config.expects(module):
        raise UserError(f"{path}: {module} is none of the modules that {CONFIG_NAME} names.")
    (rank, inputs), (outputs, rank_of_b) = tensors[names["A"]].shape, tensors[names["B"]].shape
    wanted = config.rank_of(module)
    if (rank, rank_of_b) != (wanted, wanted):
        raise UserError(
            f"{path}: {module} has lora_A {[rank, inputs]} and lora_B {[outputs, rank_of_b]}, but {CONFIG_NAME} says"
            f" rank {wanted}."
        )
    return AdapterPair(names["A"], names["B"], rank, config.scaling_of(module), inputs, outputs)


def content_id(folder: Path) -> str:
    """Returns an identity of what the adapter computes: equal files have equal ones, wherever they are. Raises
    UserError if a file cannot be read."""
    config = read_json_object(folder / CONFIG_NAME)
    known = hashlib.sha256(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    try:
        with (folder / WEIGHTS_NAME).open("rb") as file:
            while chunk := file.read(_CHUNK):
                known.update(chunk)
    except OSError as error:
        raise UserError(f"{folder / WEIGHTS_NAME} cannot be read: {error.strerror}.") from None
    return known.hexdigest()[:32]

"""The files of an adapter: which tensors it has for which modules, and an identity of its content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang.srt.configs.adapters.config import CONFIG_NAME, EMBEDDINGS, HEADS, AdapterConfig, read_adapter_config
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
_PAIR = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
"""The lengths that DoRA gives the rows of a module."""
_BASE = re.compile(rf"(?P<module>(?:.+\.)?(?:{'|'.join((*EMBEDDINGS, *HEADS))}))\.base_layer\.weight")
"""The weight of the base model that PEFT saves with adapters of the embedding and of the output head."""
_FLAT = re.compile(r"(?P<experts>.+\.experts)(?P<inner>\.base_layer)?")
"""The module that PEFT names for parameters of all experts: it wraps the module for each of them once more, first for
gate and up (which it calls `base_layer`), then for down."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """The tensors of one module: their names in the file, its rank, and the factor of B A. `experts`: of how many
    experts they are; 0: the module is a linear layer. `flat`: A [E * r, in] and B [out, r * E] of all of them, as PEFT
    writes them; otherwise [E, r, in] and [E, out, r], one of them with one expert where all share it. `exchanged`: of a
    flat pair, each of A and B has the other's place. `magnitude`: the tensor of DoRA's lengths; "": there is none."""

    a: str
    b: str
    rank: int
    scaling: float
    inputs: int
    outputs: int
    experts: int = 0
    flat: bool = False
    shares_a: bool = False
    shares_b: bool = False
    exchanged: bool = False
    magnitude: str = ""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter on disk. `pairs`: by the module's name without PEFT's prefix; `bases`: the tensors, by such names, in
    which PEFT repeats weights of the base model."""

    folder: Path
    config: AdapterConfig
    pairs: Mapping[str, AdapterPair]
    bases: Mapping[str, str]

    @property
    def weights(self) -> Path:
        """Returns the file of its tensors."""
        return self.folder / WEIGHTS_NAME

    @property
    def largest_rank(self) -> int:
        """Returns the largest rank of a module that it has."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def scales_rows(self) -> bool:
        """Returns whether it scales rows of the model's weights, as DoRA does."""
        return any(pair.magnitude for pair in self.pairs.values())


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
    bases = {_module(match["module"]): name for name in tensors if (match := _BASE.fullmatch(name))}
    pairs = _pairs({name: each for name, each in tensors.items() if name not in bases.values()}, config, path)
    for module, name in bases.items():
        _check_base(name, tensors[name], pairs.get(module), path)
    return AdapterFiles(folder, config, pairs, bases)


def _check_base(name: str, stored: Stored, pair: AdapterPair | None, path: Path) -> None:
    """Raises UserError if a weight of the base model is of another size than A and B beside it."""
    if pair is None:
        raise UserError(f"{path}: the tensor {name!r} is not supported: whole modules are not replaced.")
    sizes = [pair.outputs, pair.inputs]
    if stored.dtype not in FLOATS or list(stored.shape) not in (sizes, sizes[::-1]):
        raise UserError(f"{path}: {name} is {stored.dtype} {list(stored.shape)}, its A and B are of {sizes}.")


def _pairs(tensors: Mapping[str, Stored], config: AdapterConfig, path: Path) -> dict[str, AdapterPair]:
    sides: dict[str, dict[str, str]] = {}
    magnitudes: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        if (length := _MAGNITUDE.fullmatch(name)) is not None:
            _put(magnitudes, length["module"], "lora_magnitude_vector", name, path)
            continue
        match = _PAIR.fullmatch(name)
        if match is None:
            raise UserError(f"{path}: the tensor {name[:256]!r} is not supported: it is no A or B of a linear layer.")
        if tensor.dtype not in FLOATS or len(tensor.shape) not in (2, 3):
            raise UserError(f"{path}: {name} must be a matrix of floats; it is {tensor.dtype} {list(tensor.shape)}.")
        _put(sides, match["module"], match["side"], name, path)
    if not sides:
        raise UserError(f"{path} has no tensors.")
    pairs = {}
    for module, names in sides.items():
        if len(names) < 2:
            raise UserError(f"{path}: {module} has only one of lora_A and lora_B.")
        if len(tensors[names["A"]].shape) == 3 or len(tensors[names["B"]].shape) == 3:
            pairs[module] = _pair_of_experts(module, names, tensors, config, path)
        elif (flat := _FLAT.fullmatch(module)) is not None:
            product = _product(flat, sides, config, path)
            parameter = f"{flat['experts']}.{product}"
            pairs[parameter] = _flat_pair(parameter, names, tensors, config, path)
        else:
            pairs[module] = _pair(module, names, tensors, config, path)
    return _with_magnitudes(
        pairs, {module: name for module, each in magnitudes.items() for name in each.values()}, tensors, config, path
    )


def _put(names: dict[str, dict[str, str]], module: str, side: str, name: str, path: Path) -> None:
    """Notes the tensor of one side of a module. Raises UserError for a second one."""
    of_module = names.setdefault(_module(module), {})
    if side in of_module:
        raise UserError(f"{path}: {of_module[side]} and {name} are of the same module; only one of them can be meant.")
    of_module[side] = name


def _with_magnitudes(
    pairs: dict[str, AdapterPair],
    magnitudes: Mapping[str, str],
    tensors: Mapping[str, Stored],
    config: AdapterConfig,
    path: Path,
) -> dict[str, AdapterPair]:
    """Returns the pairs with DoRA's lengths: each has some, or none has. magnitudes: the tensors by module."""
    if not config.dora:
        if magnitudes:
            name = next(iter(magnitudes.values()))
            raise UserError(f"{path} has {name}, but {CONFIG_NAME} does not say use_dora.")
        return pairs
    lone = next((name for module, name in magnitudes.items() if module not in pairs), None)
    if lone is not None:
        raise UserError(f"{path}: {lone} has no A and B beside it.")
    scaled = {}
    for module, pair in pairs.items():
        if pair.experts:
            raise UserError(f"{path}: use_dora is not supported for {module}: rows of experts are not scaled.")
        lengths = magnitudes.get(module)
        if lengths is None:
            raise UserError(f"{path}: {module} has no lora_magnitude_vector, but {CONFIG_NAME} says use_dora.")
        stored = tensors[lengths]
        if stored.dtype not in FLOATS or list(stored.shape) != [pair.outputs]:
            raise UserError(f"{path}: {lengths} is {stored.dtype} {list(stored.shape)}, its B is of [{pair.outputs}].")
        scaled[module] = replace(pair, magnitude=lengths)
    return scaled


def _product(flat: re.Match[str], sides: Mapping[str, Mapping[str, str]], config: AdapterConfig, path: Path) -> str:
    """Returns which parameter of all experts a module's tensors belong to."""
    if flat["inner"]:
        return GATE_UP
    if f"{flat['experts']}.base_layer" in sides:
        return DOWN
    names = {parameter.rpartition(".")[2] for parameter in config.parameters}
    if len(names) != 1:
        raise UserError(
            f"{path}: the tensors of {flat[0]} could be those of {GATE_UP} or {DOWN}: 'target_parameters' of"
            f" {CONFIG_NAME} must name one of them."
        )
    return names.pop()


def _module(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _pair(
    module: str, names: Mapping[str, str], tensors: Mapping[str, Stored], config: AdapterConfig, path: Path
) -> AdapterPair:
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


def _pair_of_experts(
    module: str, names: Mapping[str, str], tensors: Mapping[str, Stored], config: AdapterConfig, path: Path
) -> AdapterPair:
    """Returns the pair of tensors with a dimension of experts."""
    a, b = (tensors[names[side]].shape for side in "AB")
    wanted = config.rank_of(module)
    experts = max(1, a[0], b[0])
    shared = {1, experts}
    if len(a) != 3 or len(b) != 3 or a[1] != wanted or b[2] != wanted or not {a[0], b[0]} <= shared:
        raise UserError(
            f"{path}: {module} has lora_A {list(a)} and lora_B {list(b)}; [experts, {wanted}, inputs] and [experts,"
            f" outputs, {wanted}] are expected for rank {wanted}."
        )
    _check_layer(module, config, path)
    scaling = config.scaling_of(module)
    return AdapterPair(
        names["A"], names["B"], wanted, scaling, a[2], b[1], experts, shares_a=a[0] < experts, shares_b=b[0] < experts
    )


def _flat_pair(
    module: str, names: Mapping[str, str], tensors: Mapping[str, Stored], config: AdapterConfig, path: Path
) -> AdapterPair:
    """Returns the pair of tensors with one axis of ranks and experts."""
    (rows, inputs), (outputs, cols) = tensors[names["A"]].shape, tensors[names["B"]].shape
    wanted = config.rank_of(module)
    if rows != cols or rows % wanted:
        raise UserError(
            f"{path}: {module} has lora_A {[rows, inputs]} and lora_B {[outputs, cols]}; for all experts {CONFIG_NAME}"
            f" says multiples of rank {wanted}."
        )
    _check_layer(module, config, path)
    scaling = config.scaling_of(module)
    return AdapterPair(names["A"], names["B"], wanted, scaling, inputs, outputs, rows // wanted, flat=True)


def _check_layer(module: str, config: AdapterConfig, path: Path) -> None:
    if not config.in_layers(module):
        raise UserError(f"{path}: {module} is none of the modules that {CONFIG_NAME} names.")


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

"""Reads a checkpoint shard by shard and writes it with quantized linear weights."""

from __future__ import annotations

import fnmatch
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from sglang.quantize.awq import Change
from sglang.quantize.formats import Config, Format, Tensors, with_cache
from sglang.srt.configs.gguf.tensors import INDEX_NAME as GGUF_INDEX
from sglang.srt.configs.hf_config import read_json_object
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.reference import E2M1_MAX, E4M3_MAX, Quantized, dequantize, quantize
from sglang.srt.model_loader.checkpoint import INDEX_NAME, SINGLE_NAME, Weights, find_checkpoint, format_names

InputScales = Callable[[Collection[str]], Mapping[str, float]]
"""A function that returns, of the modules with the given names, the input_scale of those that have one."""
Rounding = Callable[[str, torch.Tensor, Scheme, torch.Tensor | None], Quantized]
"""A function of a module's name, weight, scheme and perhaps the factor of its matrix, which quantizes the weight."""
Prepare = Callable[[Config, Weights, Collection[str]], Mapping[str, Change]]
"""A function of the model's config, its tensors and the modules to quantize, which returns by name how tensors are
changed before anything is rounded."""
MeasuredCache = Callable[[], Tensors]
"""A function that returns the scales of the KV cache by the names of their tensors."""
NEVER = ("*embed_tokens", "*lm_head", "*.gate", "*shared_expert_gate", "*router", "*norm")
"""Embeddings and routers keep their precision: a token that reaches another expert costs more than the bytes."""
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"}, {"q_a_proj", "kv_a_proj_with_mqa"})
"""Modules that servers multiply as one: they share the factor that covers a whole matrix."""
PARTIAL = ".part"
"""Suffix of weights that are not all written."""
NOT_COPIED = (INDEX_NAME, GGUF_INDEX)
"""Files of the source that say where its weights are."""
UNCALIBRATED_INPUT_SCALE = 2.0**-4
"""The scale of NVFP4 activations when nothing was measured: blocks with a largest value from 0.006 to 168 keep full
precision."""


def round_to_nearest(module: str, weight: torch.Tensor, scheme: Scheme, factor: torch.Tensor | None) -> Quantized:
    """Quantizes a weight with scales that cover the largest values, as servers do that quantize while they load."""
    return quantize(weight, scheme, factor)


@dataclass(frozen=True, slots=True)
class Selection:
    """The modules to quantize: those that match `include` and none of `ignore`, as shell patterns."""

    include: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ()

    def takes(self, module: str) -> bool:
        """Returns whether the module with this name is quantized."""
        return _matches(module, self.include) and not _matches(module, (*NEVER, *self.ignore))


def _matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


@dataclass(slots=True)
class Report:
    """The modules that were and were not quantized, those without measured activations, the bytes of all tensors, and
    the sums of squares of the quantized weights and their errors."""

    quantized: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    weight_squares: float = 0.0
    error_squares: float = 0.0

    @property
    def relative_error(self) -> float:
        """Returns the norm of all errors over the norm of all quantized weights."""
        return math.sqrt(self.error_squares / self.weight_squares) if self.weight_squares else 0.0


def export(
    source: str,
    target: str,
    form: Format,
    selection: Selection,
    input_scales: InputScales | None = None,
    shard_bytes: int = 4 << 30,
    rounding: Rounding = round_to_nearest,
    prepare: Prepare | None = None,
    cache: MeasuredCache | None = None,
) -> Report:
    """Writes the model directory `target`. `input_scales`, `rounding`, `prepare` and `cache` are called after all other
    checks.

    One tensor and one output shard are in memory at a time. Raises UserError for a source that is quantized already, a
    target that exists, a model without a weight that the scheme can take, or fp8 modules without a static scale.
    """
    folder, out = resolve_model_path(source, flag="The model"), Path(target)
    config = _source_config(folder)
    _check_target(out)
    checkpoint = find_checkpoint(str(folder), torch.bfloat16)
    modules = _linear_shapes(checkpoint)
    chosen = {m for m, shape in modules.items() if selection.takes(m) and _divisible(form.scheme, shape)}
    if not chosen:
        raise UserError(f"{folder}: no weight that matches can be stored as {form.scheme.name}")
    report = Report(sorted(chosen), sorted(modules.keys() - chosen))
    with _written_whole(out):
        measured = {} if input_scales is None else input_scales(report.quantized)
        scales = measured if form.static_input else {}
        report.unmeasured = [module for module in report.quantized if form.static_input and module not in scales]
        if report.unmeasured and not form.scheme.global_scale:
            raise UserError(f"static activations: no scale was measured of {format_names(set(report.unmeasured))}")
        factors = _shared_factors(checkpoint, chosen) if form.scheme.global_scale else {}
        changes = {} if prepare is None else prepare(config, checkpoint, chosen)
        cache_scales = {} if cache is None else cache()
        writer = _ShardWriter(out, shard_bytes)
        with tqdm(total=checkpoint.total_bytes(), desc="Quantizing", unit="B", unit_scale=True) as progress:
            for name, _, file in checkpoint.tensors():
                tensor = file.get_tensor(name)
                report.bytes_before += tensor.nbytes
                progress.update(tensor.nbytes)
                module = name.removesuffix(".weight")
                if name in changes:
                    dtype, tensor = tensor.dtype, changes[name].apply(tensor)
                    tensor = tensor if module in chosen else tensor.to(dtype)
                if module in chosen and name != module:
                    q = rounding(module, tensor, form.scheme, factors.get(module))
                    report.weight_squares += tensor.float().square().sum().item()
                    report.error_squares += (dequantize(q, form.scheme) - tensor).square().sum().item()
                    tensors = _tensors(q, tensor, module, form, scales)
                    writer.add({f"{module}.{leaf}": value for leaf, value in tensors.items()})
                elif name not in cache_scales:
                    writer.add({name: tensor})
        if cache_scales:
            writer.add(cache_scales)
        report.bytes_after = writer.finish()
        stated = form.config(report.kept)
        if cache_scales:
            stated = with_cache(stated, by_head=any(scale.ndim for scale in cache_scales.values()))
        _write_configs(folder, out, config, form, stated)
    return report


def _check_target(out: Path) -> None:
    """Raises UserError for a target that is no empty directory."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another output directory")
    if not out.exists() or not (files := list(out.iterdir())):
        return
    if all(path.suffix == PARTIAL for path in files):
        raise UserError(f"{out} has only what an interrupted run left behind; remove that directory")
    raise UserError(f"{out} exists and is not empty; choose another output directory")


@contextmanager
def _written_whole(out: Path) -> Iterator[None]:
    """Makes the directory. Removes it if the body fails or is interrupted, and raises UserError where files cannot be
    written or read."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {out}: {error.strerror}") from error
    try:
        yield
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise UserError(f"this did not finish, and {out} was removed: {error}") from error
        raise


def _source_config(folder: Path) -> Config:
    config = dict(read_json_object(folder / "config.json"))
    if (folder / GGUF_INDEX).is_file():  # its weights are read in 16 bits
        config.pop("quantization_config", None)
    if config.get("quantization_config") or (folder / "hf_quant_config.json").exists():
        raise UserError(f"{folder} is quantized already; start from the unquantized checkpoint")
    return config


def _linear_shapes(checkpoint: Weights) -> dict[str, tuple[int, int]]:
    """Returns the shapes of modules with a two-dimensional weight in 16 or 32 bits, embeddings and routers included."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, view, _ in checkpoint.tensors():
        shape = tuple(view.get_shape())
        if name.endswith(".weight") and len(shape) == 2 and view.get_dtype() in ("F32", "F16", "BF16"):
            shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def _divisible(scheme: Scheme, shape: tuple[int, int]) -> bool:
    """Returns whether the scheme's groups fit the shape. The last block of 128 may be shorter; a packed group may
    not."""
    cols = scheme.group[1]
    return cols == 0 or scheme.group[0] > 1 or shape[1] % cols == 0


def _partners(module: str) -> tuple[str, ...]:
    parent, _, leaf = module.rpartition(".")
    group = next((g for g in FUSED if leaf in g), {leaf})
    return tuple(sorted(f"{parent}.{name}" for name in group))


def _shared_factors(checkpoint: Weights, chosen: set[str]) -> dict[str, torch.Tensor]:
    """Returns the fp32 factor of each module's matrix, from the largest value of it and of those that are multiplied
    together with it."""
    largest: dict[tuple[str, ...], float] = {}
    for name, _, file in checkpoint.tensors():
        module = name.removesuffix(".weight")
        if module in chosen and name != module:
            key = _partners(module)
            largest[key] = max(largest.get(key, 0.0), file.get_tensor(name).abs().max().item())
    return {module: torch.tensor(largest[_partners(module)] / (E4M3_MAX * E2M1_MAX)) for module in chosen}


def _tensors(
    q: Quantized, weight: torch.Tensor, module: str, form: Format, input_scales: Mapping[str, float]
) -> Tensors:
    tensors = form.tensors(q, (weight.shape[0], weight.shape[1]))
    if form.static_input:
        tensors["input_scale"] = torch.tensor(float(input_scales.get(module, UNCALIBRATED_INPUT_SCALE)))
    return {leaf: value.contiguous() for leaf, value in tensors.items()}


class _ShardWriter:
    """Collects tensors and writes them in files of at most `limit` bytes (one tensor may be larger), with an index."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._pending: Tensors = {}
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, tensors: Tensors) -> None:
        size = sum(t.nbytes for t in tensors.values())
        if self._pending and sum(t.nbytes for t in self._pending.values()) + size > self.limit:
            self._flush()
        self._pending |= tensors
        self._total += size

    def _flush(self) -> None:
        path = self._partial(len(self._files))
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library creates files that only their owner can read
        self._files.append(list(self._pending))
        self._pending = {}

    def _partial(self, index: int) -> Path:
        return self.folder / f"model-{index:05d}.safetensors{PARTIAL}"

    def finish(self) -> int:
        """Names the files, now that their number is known. Returns the bytes of all tensors."""
        self._flush()
        if len(self._files) == 1:
            self._partial(0).rename(self.folder / SINGLE_NAME)
            return self._total
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._partial(i).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        return self._total


def _write_configs(folder: Path, out: Path, config: Config, form: Format, stated: Config) -> None:
    """Copies everything that is not weights, and adds the description of the format where its readers expect it."""
    for path in folder.iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".jinja", ".txt", ".model", ".md")
            and path.name not in NOT_COPIED
        ):
            shutil.copy2(path, out / path.name)
    if form.modelopt:
        (out / "hf_quant_config.json").write_text(json.dumps(stated, indent=2) + "\n")
    else:
        (out / "config.json").write_text(json.dumps(config | {"quantization_config": stated}, indent=2) + "\n")

"""Builds a model and fills its parameters from safetensors or GGUF, tensor by tensor, or with random numbers."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import FLOATS, Init, Param, TensorPart
from sglang.srt.model_loader import page_cache
from sglang.srt.model_loader.checkpoint import find_checkpoint, format_names
from sglang.srt.model_loader.reads import Reads
from sglang.srt.model_loader.sent_tensors import SentOver, Tensors
from sglang.srt.model_loader.weight_check import refuse_not_finite
from sglang.srt.models.build import build_model
from sglang.srt.models.causal_lm import CausalLM, Loadable
from sglang.srt.plan.weight_names import CACHE_SCALES, PartKey, WeightMap, usual_fp8_name
from sglang.srt.towers.base.encoder import VisionEncoder
from sglang.srt.towers.base.shared_encoder import SharedEncoder
from sglang.srt.towers.create_encoder import create_encoder

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def load_model(plan: Plan, load_format: str = "auto", seed: int = 0) -> CausalLM:
    """Builds the model as `filled_model` does, and frees the stored form of quantized weights, of which kernels have
    rearranged copies; the model's `params` are then empty."""
    model = filled_model(plan, load_format, seed)
    if plan.model.quantization is not None:
        model.params.clear()
    return model


def filled_model(plan: Plan, load_format: str = "auto", seed: int = 0) -> CausalLM:
    """Builds the planned model with this rank's share of the weights on the plan's device.

    `load_format`: auto, safetensors and gguf read the model directory; dummy fills with random numbers from `seed`.
    Raises UserError if the checkpoint does not hold exactly the weights of this model, or holds NaN or infinity.
    """
    if load_format not in LOAD_FORMATS:
        raise UserError(f"load format {load_format!r} is not supported; supported: {', '.join(LOAD_FORMATS)}")
    start = time.perf_counter()
    files: tuple[Path, ...] = ()
    with torch.inference_mode():
        model = build_model(plan)
        if load_format == "dummy":
            fill_random(model.params, seed)
        else:
            files = load_checkpoint(model, plan.model.model_path, getattr(torch, plan.dtype))
        for folder, part in model.beside.items():
            if load_format == "dummy":
                fill_random(part.params, seed)
            else:
                load_checkpoint(part, str(Path(plan.model.model_path) / folder), getattr(torch, plan.dtype))
        in_main_memory = _in_main_memory(model)
        for step in model.finish:
            step()
    # The collectives that follow have a time limit, and files come at different speeds.
    parallel_state.wait_for_all_ranks()
    if in_main_memory:
        for path in files:
            page_cache.forget(path)
    num_bytes = sum(p.tensor.nbytes for part in (model, *model.beside.values()) for p in part.params.values())
    logger.info(
        "Loaded %s (%s): %.2f GB of weights in %.1f s",
        plan.description.title,
        load_format,
        num_bytes / 1e9,
        time.perf_counter() - start,
    )
    return model


def load_encoder(plan: Plan, load_format: str = "auto", seed: int = 0) -> VisionEncoder[Any] | SharedEncoder | None:
    """Builds the encoder as `load_tower` does, wrapped in a SharedEncoder if ranks share its steps."""
    tower = load_tower(plan, load_format, seed)
    return SharedEncoder(tower, parallel_state.groups().tp) if tower is not None and plan.shares_encoder else tower


def load_tower(plan: Plan, load_format: str = "auto", seed: int = 0) -> VisionEncoder[Any] | None:
    """Builds the image and video encoder with its weights; None if the model has none or is served without it. Raises
    UserError as `filled_model` does."""
    media = plan.description.media
    if media is None:
        return None
    with torch.inference_mode():
        tower = create_encoder(plan, media.tower)
        if load_format == "dummy":
            fill_random(tower.params, seed)
        else:
            load_checkpoint(tower, plan.model.model_path, getattr(torch, plan.dtype))
        for step in tower.finish:
            step()
    return tower


def _in_main_memory(model: Loadable) -> bool:
    """Returns whether any parameter lies in main memory, of which files that the system keeps would take as much."""
    return any(param.filled_on is not None for param in model.params.values())


def load_checkpoint(
    model: Loadable, model_path: str, dtype: torch.dtype = torch.float32, sent: Tensors | None = None
) -> tuple[Path, ...]:
    """Streams the directory's tensors into the parameters; each is read once, and only this rank's slice. `dtype`: of
    weights that are dequantized while they are read (GGUF). `sent`: tensors that take the place of the directory's.
    Returns the files. Raises UserError for missing, unexpected or unfit tensors."""
    wanted = index_parts(model.weights, model.params.values())
    checkpoint: Any = find_checkpoint(model_path, dtype, lambda name: model.weights.canonical(name) in wanted)
    if sent:
        checkpoint = SentOver(checkpoint, sent)
    absent = {p.name: p for parts in wanted.values() if _optional(parts) for p, _ in parts}
    fill_random(absent, seed=0)  # until the checkpoint says otherwise: constants
    unknown: list[str] = []
    unused: list[str] = []
    loaded: set[str] = set()
    tqdm.set_lock(threading.RLock())  # its default is a semaphore between processes, which outlives this one
    reads = Reads()
    forgets = _in_main_memory(model) and parallel_state.num_ranks() == 1  # others may be behind

    def after(path: Path) -> None:
        reads.wait()
        if forgets:
            page_cache.forget(path)

    with (
        reads,
        tqdm(
            total=checkpoint.total_bytes(),
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            disable=not parallel_state.is_leader(),
        ) as progress,
    ):
        for stored_name, view, file in checkpoint.tensors(after):
            name = name_of(model, stored_name, wanted)
            if name in loaded:
                raise UserError(f"{model_path}: tensor {name} is in more than one file")
            if name in wanted:
                for param, key in wanted[name]:
                    progress.update(fill_part(param, key, stored_name, view, file, reads))
                loaded.add(name)
            elif not model.ignored_weight(name):
                if not _adds_nothing(stored_name, file):
                    unknown.append(stored_name)
            elif name.endswith(CACHE_SCALES):
                unused.append(stored_name)
        reads.wait()
        progress.update(progress.total - progress.n)
    scales = [name for name in wanted if name.endswith(CACHE_SCALES)]
    if (without := [name for name in scales if name not in loaded]) and parallel_state.is_leader():
        logger.info(
            "%s lacks %d of %d scales of the KV cache: they are 1, or those of --quantization-param-path",
            model_path,
            len(without),
            len(scales),
        )
    if unused and parallel_state.is_leader():
        logger.info(
            "%s has scales of the KV cache that are not used: %s. A cache in 16 bits needs none, a latent has one for"
            " its key and value, and latents that an indexer selects bring theirs.",
            model_path,
            format_names(set(unused)),
        )
    if unknown:
        raise UserError(f"{model_path} has weights that the model does not have: {format_names(unknown)}")
    missing = {name for name in wanted.keys() - loaded if not _optional(wanted[name])}
    if missing:
        only_head = all(name.endswith("lm_head.weight") for name in missing)
        advice = "; models of embeddings have no such output head: serve one with --is-embedding" if only_head else ""
        raise UserError(f"{model_path} lacks weights of the model: {format_names(missing)}{advice}")
    refuse_not_finite(model.params, wanted, model_path)
    paths: tuple[Path, ...] = checkpoint.paths
    return paths


def name_of(model: Loadable, stored_name: str, wanted: Collection[str]) -> str:
    """Returns the name by which the model knows a checkpoint's tensor. wanted: names of those that it needs."""
    name, prefix = model.weights.canonical(stored_name), model.base_prefix
    if prefix and name not in wanted and (prefix + name in wanted or model.ignored_weight(prefix + name)):
        name = prefix + name
    if name not in wanted and usual_fp8_name(name) in wanted:
        name = usual_fp8_name(name)
    return name


def index_parts(names: WeightMap, params: Iterable[Param]) -> dict[str, list[tuple[Param, PartKey]]]:
    """Returns, for each checkpoint tensor that the parameters need, the parts that are cut from it."""
    parts: dict[str, list[tuple[Param, PartKey]]] = {}
    for param in params:
        for key in param.parts:
            parts.setdefault(names.checkpoint_name(param.name, key), []).append((param, key))
    return parts


def _adds_nothing(name: str, file: Any) -> bool:
    """Returns whether the tensor is a bias of zeros, as GPTQ checkpoints have for modules without one."""
    return name.endswith(".bias") and not file.get_tensor(name).any()


def _optional(parts: list[tuple[Param, PartKey]]) -> bool:
    return all(param.parts[key].optional for param, key in parts)


def fill_part(param: Param, key: PartKey, name: str, view: Any, file: Any, reads: Reads) -> int:
    """Copies one part from a checkpoint tensor; returns the number of bytes to read. Raises UserError for one that does
    not fit."""
    part = check_part(param, key, name, view)
    source = view[part.source] if part.sharded else file.get_tensor(name)
    dest = param.tensor[part.dest]
    num_bytes: int = source.nbytes
    source = part.convert(source) if part.convert else source
    reads.copy(dest, source.reshape(dest.shape), later=param.filled_on is not None)
    return num_bytes


def check_part(param: Param, key: PartKey, name: str, view: Any) -> TensorPart:
    """Returns the part that a checkpoint tensor fills. Raises UserError if its shape or type does not fit."""
    part = param.parts[key]
    other, shape = part.other, tuple(view.get_shape())
    if other is not None and shape != part.shape:
        squeezed = _squeezed(shape)
        if shape == other.shape or squeezed == _squeezed(other.shape) != _squeezed(part.shape):
            part = other
    _check(name, view, part)
    return part


def _check(name: str, view: Any, part: TensorPart) -> None:
    shape = tuple(view.get_shape())
    # Writers differ in whether a number is [] or [1], and a column [N, 1] or [N].
    if _squeezed(shape) != _squeezed(part.shape):
        raise UserError(f"tensor {name} has shape {list(shape)}, but config.json calls for {list(part.shape)}")
    dtype = view.get_dtype()
    if dtype in part.dtypes:
        return
    if part.dtypes == FLOATS and name.endswith(".weight"):
        raise UserError(
            f"tensor {name} is stored as {dtype}: quantized checkpoints need a quantization_config that is supported"
            " and does not leave this module alone"
        )
    raise UserError(
        f"tensor {name} is stored as {dtype}, but the checkpoint's quantization calls for {' or '.join(part.dtypes)}"
    )


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def fill_random(params: dict[str, Param], seed: int) -> None:
    """Fills parameters with random weights that keep activations finite: normal with standard deviation 0.02, or as the
    parameter's `init` says; norms 1, biases 0.

    Replicated parameters are the same on every rank, shards differ.
    """
    for param in params.values():
        if param.tensor.is_meta or (param.filled_on is not None and param.filled_on.type == "meta"):  # in a rehearsal
            continue
        if param.init is Init.ONES:
            param.tensor.fill_(1.0)
        elif param.init is Init.ZEROS:
            param.tensor.zero_()
        else:
            rank = parallel_state.tp_rank() if param.sharded else 0
            tensor = param.tensor if param.filled_on is None else torch.empty_like(param.tensor, device=param.filled_on)
            generator = torch.Generator(tensor.device)
            generator.manual_seed(zlib.crc32(f"{seed}/{rank}/{param.name}".encode()))
            if param.init is Init.NORMAL:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                param.init(tensor, generator)
            if tensor is not param.tensor:
                param.tensor.copy_(tensor)

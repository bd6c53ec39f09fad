"""Measures keys and values of a model's layers on sample prompts, and makes scales of its KV cache of them.

The kernels that store keys and values are those that the plan names, so a plan whose kernels look at what they store is
sufficient. Layers are told apart by the address of the cache that they store into. The prompts are computed twice: the
first time for the largest magnitudes, from which the scales follow, the second time for what e4m3 rounds with each of
them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from sglang.quantize.samples import Samples, checked_plan, prepared, values_of
from sglang.srt.blocks.gqa.reference import QK_NORM_ROPE_STORE
from sglang.srt.blocks.mla.reference import LATENT_NORM_ROPE_STORE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.kernels.op import Op
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.cache_scales import DTYPES, scaled_layers
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.weight_names import PartKey
from sglang.srt.server_args import ServerArgs

LARGEST = 448.0
"""The largest e4m3 number."""
ROOM = 2.0
"""How many times the largest measured magnitude a scale covers at least, for other prompts; larger ones saturate."""
FORMS = ("1", "layer", "head")
"""Scales whose errors are compared: 1, one for a layer, one for each head."""
PROBLEM = "--kv-cache-scales runs the model on one GPU, or in main memory with --calibration-device cpu, and cannot"
NO_NAMES = (
    "--kv-cache-scales writes no scales into a checkpoint that a class of transformers computes; without --scheme it"
    " writes the file, for --quantization-param-path"
)
T = TypeVar("T")


@dataclass(slots=True)
class Part:
    """What was seen of the keys or of the values of a layer: the largest magnitude of each head [H], and the squares of
    all numbers and of their errors by form of scale."""

    largest: torch.Tensor
    squares: float = 0.0
    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FORMS, 0.0))

    @property
    def by_head(self) -> list[float]:
        """Returns the scale of each head, a power of two: e4m3 then has the digits that it has without a scale, but for
        numbers that were too large or too small. A head that was always zero has the largest of the others'."""
        covered = self.largest * ROOM / LARGEST
        scales = torch.exp2(torch.where(covered > 0, covered, covered.max()).log2().ceil())
        return scales.tolist()

    @property
    def scale(self) -> float:
        """Returns the scale of the layer."""
        return max(self.by_head)

    def error(self, form: str) -> float:
        """Returns the norm of the errors over that of the numbers."""
        return (self.errors[form] / self.squares) ** 0.5 if self.squares else 0.0


@dataclass(slots=True)
class CacheRecorder:
    """Records what is stored: `parts` by the address of a cache and the name k or v; of a latent there is no v."""

    parts: dict[tuple[int, str], Part] = field(default_factory=dict)
    rounding: bool = False
    """Whether errors are summed, with the scales that follow from what was seen."""

    def clear(self) -> None:
        """Forgets everything."""
        self.parts.clear()

    def see(self, cache: torch.Tensor, name: str, x: torch.Tensor) -> None:
        """Records what is stored into a cache, x [T, H, D]."""
        if not x.numel():
            return
        x, key = x.float(), (cache.data_ptr(), name)
        if not self.rounding:
            largest = x.abs().amax((0, 2))
            before = self.parts.get(key)
            self.parts[key] = Part(largest if before is None else torch.maximum(before.largest, largest))
            return
        part = self.parts[key]
        part.squares += x.square().sum().item()
        heads = torch.tensor(part.by_head, device=x.device)[:, None]
        scales: dict[str, float | torch.Tensor] = dict(zip(FORMS, (1.0, part.scale, heads), strict=True))
        for form, scale in scales.items():
            part.errors[form] += (rounded(x, scale) - x).square().sum().item()

    def stores(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the kernel of `qk_norm_rope_store` with recording."""

        @functools.wraps(kernel)
        def run(*args: Any, k_cache: torch.Tensor, v_cache: torch.Tensor | None, **options: Any) -> Any:
            q, k, v = kernel(*args, k_cache=k_cache, v_cache=v_cache, **options)
            self.see(k_cache, "k", k)
            if v_cache is not None:
                self.see(k_cache, "v", v)
            return q, k, v

        return run

    def stores_latents(self, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns the kernel of `latent_norm_rope_store` with recording."""

        @functools.wraps(kernel)
        def run(*args: Any) -> torch.Tensor:
            entries, cache = kernel(*args), args[_CACHE_OF_LATENTS]
            self.see(cache, "k", entries[:, None])
            return entries

        return run

    def by_layer(self, caches: Iterable[CacheStore], layers: Collection[int]) -> dict[int, dict[str, Part]]:
        """Returns the parts of the layers that take scales, in their order. Raises UserError for numbers that are not
        finite, and where nothing was seen."""
        parts: dict[int, dict[str, Part]] = {}
        for cache in caches:
            if cache.layer_id not in layers or cache.name not in ("kv", "latent"):
                continue
            keys = ((name, (cache.k.data_ptr(), name)) for name in ("k", "v"))
            parts[cache.layer_id] = {name: self.parts[key] for name, key in keys if key in self.parts}
            for name, part in parts[cache.layer_id].items():
                if not bool(part.largest.isfinite().all()):
                    raise UserError(f"{name} of layer {cache.layer_id} is not finite; the model is not sound")
                if not bool(part.largest.any()):
                    raise UserError(f"{name} of layer {cache.layer_id} is always zero; give other prompts")
        return dict(sorted(parts.items()))


_CACHE_OF_LATENTS = 7
"""Place of the cache among the arguments of `latent_norm_rope_store`."""


@dataclass(frozen=True, slots=True)
class CacheCalibration:
    """What was measured: parts of layers by the names k and v, and the names of the layers' attention modules in the
    checkpoint, where a family names them."""

    model_type: str | None
    layers: dict[int, dict[str, Part]]
    modules: dict[int, str]
    num_prompts: int
    num_tokens: int

    def to_json(self, by_head: bool) -> dict[str, Any]:
        """Returns the content of a file for --quantization-param-path (`plan.cache_scales`)."""
        cache: dict[str, Any] = {
            "dtype": DTYPES[0],
            "scaling_factor": {"0": {str(n): max(part.scale for part in parts.values()) for n, parts in self._each()}},
        }
        for name in ("k", "v"):
            scales = {
                str(n): parts[name].by_head if by_head and len(parts[name].by_head) > 1 else parts[name].scale
                for n, parts in self._each()
                if name in parts
            }
            if scales:
                cache[f"{name}_scale"] = scales
        return {"model_type": self.model_type, "kv_cache": cache}

    def tensors(self, by_head: bool) -> dict[str, torch.Tensor]:
        """Returns the scales as tensors of a checkpoint, [] or by head [H, 1, 1]. Raises UserError for a model whose
        modules have no such names."""
        if not self.modules:
            raise UserError(NO_NAMES)
        tensors = {}
        for n, parts in self._each():
            for name, part in parts.items():
                scale = torch.tensor(part.by_head)[:, None, None] if by_head else torch.tensor(part.scale)
                tensors[f"{self.modules[n]}.{name}_scale"] = scale
        return tensors

    def report(self) -> Iterator[str]:
        """Yields the lines of a table: errors of stored numbers by layer, and over all layers."""
        head = f"{'layer':>5}   {'largest':>9} {'scale':>9}   error with 1, its scale, by head"
        for name, title in (("k", "keys"), ("v", "values")):
            rows = [(n, parts[name]) for n, parts in self._each() if name in parts]
            if not rows:
                continue
            yield f"{title}\n{head}"
            for n, part in rows:
                errors = ", ".join(f"{100 * part.error(form):6.2f}%" for form in FORMS)
                yield f"{n:>5}   {float(part.largest.max()):>9.4g} {part.scale:>9.4g}   {errors}"
            means = (100 * sum(part.error(form) for _, part in rows) / len(rows) for form in FORMS)
            yield f"{'mean':>5}   {'':>9} {'':>9}   {', '.join(f'{mean:6.2f}%' for mean in means)}"

    def _each(self) -> Iterator[tuple[int, dict[str, Part]]]:
        yield from self.layers.items()


def check_caches(model_path: str, prompts: str, max_tokens: int, device: str) -> None:
    """Raises the UserErrors of `calibrate_caches`, and of the tensors of a checkpoint, that follow from the headers of
    the weights and the prompts: quantizing may take hours before the caches are measured."""
    args, model, _ = prepared(model_path, prompts, max_tokens, device)
    plan = _plan(args, model)
    if plan.description.transformers_class is not None:
        raise UserError(NO_NAMES)


def _plan(args: ServerArgs, model: ModelConfig) -> Plan:
    """Returns a plan with caches of the model's dtype. Raises UserError, also if no layer takes scales."""
    plan = checked_plan(replace(args, kv_cache_dtype=model.dtype), PROBLEM)
    if not scaled_layers(plan.description):
        raise UserError(f"no layer of {plan.description.title} takes scales of the KV cache")
    return plan


def calibrate_caches(model_path: str, prompts: str, max_tokens: int, device: str = "auto") -> CacheCalibration:
    """Computes the first `max_tokens` tokens of the file `prompts` twice with the model on `device` (auto, cuda or
    cpu), over a cache of the model's dtype. Raises UserError if the file has no prompts or an unreadable one, if the
    model cannot be run, or if none of its layers takes scales."""
    recorder = CacheRecorder()

    def plan_of(args: ServerArgs, model: ModelConfig) -> RecordingCaches:
        plan = _plan(args, model)
        return RecordingCaches(**values_of(plan), recorder=recorder)

    samples = Samples.load(model_path, prompts, max_tokens, device, plan_of)
    runner = samples.runner
    layers = scaled_layers(runner.plan.description)
    recorder.clear()  # drops the values of the warm-up
    samples.compute()
    measured = recorder.by_layer(runner.model.caches, layers)
    recorder.rounding = True
    samples.compute()
    names, modules = runner.model.weights, {}
    if "attn" in names.layer:
        leaf = ".k_scale"
        modules = {n: names.checkpoint_name(f"layers.{n}.attn{leaf}", PartKey()).removesuffix(leaf) for n in layers}
    model_type = runner.plan.model.hf_config.get("model_type")
    return CacheCalibration(model_type, measured, modules, samples.num_prompts, samples.num_tokens)


def write_scales(path: str, calibration: CacheCalibration, by_head: bool) -> None:
    """Writes the file. Raises UserError where it cannot be written."""
    try:
        Path(path).write_text(json.dumps(calibration.to_json(by_head), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--kv-cache-scales {path}: {error.strerror}") from error


def rounded(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Returns x as a cache of e4m3 with this scale gives it back."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


@dataclass(frozen=True)
class RecordingCaches(Plan):
    """A plan whose stores of keys and values are recorded."""

    recorder: CacheRecorder = field(kw_only=True)

    def entry(self, op: Op[T], key: str = "") -> T:
        """Returns the kernel of an op, with recording for those that store."""
        kernel: Any = super().entry(op, key)
        if op is QK_NORM_ROPE_STORE:
            kernel = self.recorder.stores(kernel)
        elif op is LATENT_NORM_ROPE_STORE:
            kernel = self.recorder.stores_latents(kernel)
        return kernel

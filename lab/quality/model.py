"""Computes the final hidden states of a model in this process, as a server of it would, without its scheduler.

On a GPU the server's kernels compute. Where a GPU's product dequantizes weights to 16 bits though their scheme rounds
activations (NVFP4 without instructions for it), the activations are rounded before it, so that figures are those of
the scheme on any GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear

from sglang.bench.direct import DirectBatch, direct_table
from sglang.srt.configs.gguf.tensors import INDEX_NAME as GGUF_INDEX
from sglang.srt.configs.hf_config import read_json_object
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_scheme import Scheme, wants_planes
from sglang.srt.errors import UserError
from sglang.srt.kernels.op import Op
from sglang.srt.layers.ops import QUANTIZED_LINEAR
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.layers.quantization.linear_weight import LinearWeight, QuantizedProduct
from sglang.srt.layers.quantization.reference import round_activation
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.checkpoint import INDEX_NAME, SINGLE_NAME, find_checkpoint
from sglang.srt.plan.plan import Plan
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer

STEP_TOKENS = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class RoundingPlan(Plan):
    """A plan whose quantized products round activations by their scheme, also where the chosen kernel does not."""

    rounds: bool = field(kw_only=True)

    def entry(self, op: Op[T], key: str = "") -> T:
        """Returns the kernel of an op."""
        kernel: Any = super().entry(op, key)
        return self._binding(kernel) if op is QUANTIZED_LINEAR else kernel

    def _binding(self, kernel: Any) -> Any:
        def bind(weight: LinearWeight, *rest: Any) -> QuantizedProduct:
            if self.device == "cpu":
                return _reference_product(weight, self.rounds)
            dequantizes = wants_planes(weight.scheme, self.arch.features)
            scheme, scale = weight.scheme, weight.input_scale
            product: QuantizedProduct = kernel(weight, *rest)
            return _behind_rounding(product, scheme, scale) if self.rounds and dequantizes else product

        return bind


def _reference_product(weight: LinearWeight, rounds: bool) -> QuantizedProduct:
    kept: list[torch.Tensor] = []

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        values = values_of(x)
        if not kept:  # a server's product dequantizes anew each time
            kept.append(weight.dequantized().to(values.dtype))
        seen = _rounded(values, weight.scheme, weight.input_scale) if rounds else values
        return linear(seen.to(out_dtype or seen.dtype), kept[0].to(out_dtype or seen.dtype), bias)

    return run


def _behind_rounding(product: QuantizedProduct, scheme: Scheme, input_scale: torch.Tensor | None) -> QuantizedProduct:
    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return product(_rounded(values_of(x), scheme, input_scale), bias, out_dtype)

    return run


def _rounded(x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None) -> torch.Tensor:
    if scheme.activation is None:
        return x
    return round_activation(x, scheme, None if input_scale is None else input_scale.max()).to(x.dtype)


def write_16_bits(source: str, target: Path) -> None:
    """Writes a model, also one in GGUF whose types are mixed, with all weights in bfloat16."""
    folder = resolve_model_path(source, flag="The model")
    target.mkdir(parents=True)
    for path in folder.glob("*.json"):
        shutil.copy2(path, target / path.name)
    for name in (INDEX_NAME, GGUF_INDEX):
        (target / name).unlink(missing_ok=True)
    config = dict(read_json_object(folder / "config.json"))
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    tensors = find_checkpoint(str(folder), torch.bfloat16).tensors()
    values = {name: file.get_tensor(name).to(torch.bfloat16).contiguous() for name, _, file in tensors}
    save_file(values, target / SINGLE_NAME, metadata={"format": "pt"})


class FewKernels(ModelRunner):
    """A runner that compiles the kernels of its steps when they come: most of those that a server compiles at its start
    are for steps that are not measured."""

    def _compile_prompts(self) -> None:
        pass

    def compile_decodes(self) -> None:
        """Does nothing."""


class Model:
    """A model on this machine's processor or on a GPU."""

    def __init__(
        self,
        path: str,
        flags: Mapping[str, Any],
        requests: int,
        tokens: int,
        rounds: bool = True,
        device: str = "cpu",
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """`requests` prompts of `tokens` tokens at most are computed at once, `step_tokens` in a step. Raises UserError
        for a model that cannot be run."""
        rows = 2 * requests + 2  # sliding windows get a part of the slots only
        args = ServerArgs(
            model_path=path, device=device, dtype="bfloat16", random_seed=0, context_length=tokens + 1,
            chunked_prefill_size=step_tokens, max_prefill_tokens=step_tokens, max_running_requests=rows,
            max_total_tokens=rows * (tokens + 16), disable_radix_cache=True, disable_cuda_graph=True, **flags,
        )  # fmt: skip
        self.plan = create_plan(args)
        values = {entry.name: getattr(self.plan, entry.name) for entry in fields(self.plan)}
        plan = RoundingPlan(**values, rounds=rounds)
        self.runner = FewKernels(plan)
        head = self.runner.model.head
        if head is None or head.cap or head.scale != 1.0 or not self.runner.model.description.tie_embeddings:
            raise UserError("Only models whose output head is the embedding, without a cap, are measured.")
        tokenizer = load_tokenizer(args)
        assert tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer

    @property
    def quantized_share(self) -> float:
        """Returns how many of the weights of linear layers are quantized."""
        weights = self.plan.weights
        sizes = [
            (part.rows * part.cols, weights.model.quant_of(layer, part) is not None)
            for layer, parts in enumerate(weights.layers)
            for part in parts
            if isinstance(part, Matrix)
        ]
        return sum(size for size, quantized in sizes if quantized) / sum(size for size, _ in sizes)

    @property
    def head(self) -> torch.Tensor:
        """Returns the output head [V, H]."""
        assert self.runner.model.embed is not None
        return self.runner.model.embed.weight[: self.plan.model.vocab_size]

    def hidden_states(self, prompts: Sequence[Sequence[int]], chunk: int) -> list[torch.Tensor]:
        """Returns the final hidden states [n, H] fp32 of each prompt. The prompts advance together by `chunk` tokens a
        step: a token reads those of earlier chunks from the KV cache."""
        kv = direct_table(self.runner)
        batch = DirectBatch(self.runner, kv, [list(ids) for ids in prompts], 1)
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        for upto in range(chunk, max(map(len, prompts)) + chunk, chunk):
            for part, states in zip(parts, batch.hidden_states(upto), strict=True):
                part.append(states)
        batch.close()
        return [torch.cat(part) for part in parts]

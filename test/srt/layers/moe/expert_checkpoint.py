"""One MoE layer and its checkpoint: writes experts in the published formats, loads them through the loader.

The writers are made from the formats' descriptions, not from what the loader expects; each returns the tensors of one
matrix and the fp32 matrix that they stand for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from sglang.srt.blocks.moe.layer import MoELayer
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.configs.quantization import quantization_of
from sglang.srt.distributed.groups import groups_of
from sglang.srt.hardware.arch import CPU, ArchTraits
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers import native_ops
from sglang.srt.layers.linear import Unquantized
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import triton_tile_configs
from sglang.srt.layers.ops import QUANTIZED_LINEAR
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.quantization.dense import QuantizedMethod
from sglang.srt.layers.quantization.layout import is_redundant
from sglang.srt.layers.quantization.reference import Quantized, dequantize, quantize
from sglang.srt.model_loader.loader import fill_random, load_checkpoint
from sglang.srt.plan.layer_spec import ABSENT, LayerSpec, ParallelConfig
from sglang.srt.plan.model_description import ModelDescription, with_fused_shared
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.plan.weight_names import WeightMap
from srt.distributed.partial_sums import NoAllReduce
from srt.models.quantized_checkpoints import asymmetric_int4, awq

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]

LAYER = "model.layers.3."
WEIGHTS = WeightMap(
    {},
    {
        "moe.router": "mlp.gate",
        "moe.correction": "mlp.gate",
        "moe.hash": "mlp.gate",
        "moe.experts": "mlp.experts",
        "moe.w13": "mlp.experts.{expert}.{part}_proj",
        "moe.w2": "mlp.experts.{expert}.{part}_proj",
        "moe.shared.gate_up": "mlp.shared_experts.{part}_proj",
        "moe.shared.down": "mlp.shared_experts.down_proj",
        "moe.shared_gate": "mlp.shared_expert_gate",
    },
)
W123 = WeightMap(
    {},
    {name: template.replace("{part}_proj", "{part}") for name, template in WEIGHTS.layer.items()}
    | {"moe.shared.down": "mlp.shared_experts.w2"},
    parts={"gate": "w1", "up": "w3", "down": "w2"},
)
FUSED_ONLY = WeightMap({}, {"moe.router": "mlp.router", "moe.experts": "mlp.experts"})


# --- writers ----------------------------------------------------------------------------------------------------------


def _quantized(scheme: str, weight: torch.Tensor, factor: torch.Tensor | None = None) -> tuple[Quantized, torch.Tensor]:
    made = quantize(weight, SCHEMES[scheme], factor)
    return made, dequantize(made, SCHEMES[scheme])


def plain(weight: torch.Tensor) -> Written:
    return {"weight": weight.bfloat16()}, weight.bfloat16().float()


def fp8_block(weight: torch.Tensor) -> Written:
    made, exact = _quantized("fp8_block", weight)
    return {"weight": made.data, "weight_scale_inv": made.scale}, exact


def fp8_channel(weight: torch.Tensor) -> Written:
    """Scales as a column; in 16 bits."""
    made, _ = _quantized("fp8_channel", weight)
    scale = made.scale.bfloat16()
    return {"weight": made.data, "weight_scale": scale[:, None]}, made.data.float() * scale.float()[:, None]


def fp8_tensor(weight: torch.Tensor, input_scale: float | None = None, listed: bool = False) -> Written:
    """`listed`: numbers are lists of one."""
    made, exact = _quantized("fp8_tensor", weight)
    tensors = {"weight": made.data, "weight_scale": made.scale.reshape([1] if listed else [])}
    if input_scale is not None:
        tensors["input_scale"] = torch.tensor([input_scale] if listed else input_scale)
    return tensors, exact


def int8_channel(weight: torch.Tensor) -> Written:
    made, exact = _quantized("int8_channel", weight)
    return {"weight": made.data, "weight_scale": made.scale[:, None]}, exact


def pack_quantized(group: int) -> Callable[[torch.Tensor], Written]:
    """Codes plus 8, eight to an int32 from the low bits up."""

    def write(weight: torch.Tensor) -> Written:
        rows, cols = weight.shape
        made, exact = _quantized(f"int4_g{group}", weight)
        codes = torch.stack((made.data & 15, made.data >> 4), -1).view(rows, cols // 8, 8).to(torch.int64)
        words = (codes << torch.arange(0, 32, 4)).sum(-1)
        packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        return {"weight_packed": packed, "weight_scale": made.scale, "weight_shape": torch.tensor([rows, cols])}, exact

    return write


def nvfp4_packed(weight: torch.Tensor, factor: float, input_factor: float) -> Written:
    """Factors are what values are multiplied with before they are quantized."""
    made, exact = _quantized("nvfp4", weight, torch.tensor(factor))
    return {
        "weight_packed": made.data,
        "weight_scale": made.scale,
        "weight_global_scale": torch.tensor([1.0 / factor]),
        "input_global_scale": torch.tensor([1.0 / input_factor]),
    }, exact


def nvfp4_modelopt(weight: torch.Tensor, factor: float, input_factor: float) -> Written:
    made, exact = _quantized("nvfp4", weight, torch.tensor(factor))
    return {
        "weight": made.data,
        "weight_scale": made.scale,
        "weight_scale_2": torch.tensor(factor),
        "input_scale": torch.tensor(input_factor),
    }, exact


def nvfp4_weight_only(weight: torch.Tensor, factor: float) -> Written:
    """As exported beside modules of other schemes: with a scale of activations that are not quantized."""
    return nvfp4_modelopt(weight, factor, 0.5)


def mxfp4_exponents(weight: torch.Tensor) -> Written:
    """DeepSeek-V4's experts: scales as exponents of their own type."""
    made, exact = _quantized("mxfp4", weight)
    return {"weight": made.data.view(torch.int8), "scale": made.scale.view(torch.float8_e8m0fnu)}, exact


def mxfp8(weight: torch.Tensor) -> Written:
    made, exact = _quantized("mxfp8", weight)
    return {"weight": made.data, "weight_scale_inv": made.scale}, exact


def gptq(weight: torch.Tensor) -> Written:
    """Packed along K, transposed; all zero points are 8, stored less one."""
    rows, cols = weight.shape
    made, exact = _quantized("int4_g32", weight.float())
    codes = torch.stack((made.data & 15, made.data >> 4), -1).view(rows, cols // 8, 8).to(torch.int64)
    words = (codes << torch.arange(0, 32, 4)).sum(-1)
    qweight = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).T.contiguous()
    zeros = torch.full((cols // 32, rows // 8), 0x77777777, dtype=torch.int32)
    order = torch.arange(cols, dtype=torch.int32) // 32
    return {"qweight": qweight, "scales": made.scale.T.contiguous(), "qzeros": zeros, "g_idx": order}, exact


def gptq_int8(weight: torch.Tensor) -> Written:
    """As `gptq` in groups of 128, with four codes plus 128 to a word."""
    rows, cols = weight.shape
    made, exact = _quantized("int8_g128", weight.float())
    codes = made.data.to(torch.int64).view(rows, cols // 4, 4) + 128
    words = (codes << torch.arange(0, 32, 8)).sum(-1)
    qweight = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).T.contiguous()
    zeros = torch.full((cols // 128, rows // 4), 0x7F7F7F7F, dtype=torch.int32)
    return {"qweight": qweight, "scales": made.scale.T.contiguous(), "qzeros": zeros}, exact


def w4afp8(weight: torch.Tensor) -> Written:
    """Two signed codes to a byte, the first in the low bits."""
    made, exact = _quantized("int4_g128", weight.float())
    flipped = made.data ^ 0x88
    return {"weight": flipped.view(torch.int8), "weight_scale_inv": made.scale, "input_scale": torch.ones(1)}, exact


# --- what config.json says --------------------------------------------------------------------------------------------


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def numbers(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False} | more


TOKEN = {"dynamic": True}


@dataclass(frozen=True)
class Format:
    """`write(weight, expert, part)`; `config` is config.json's quantization_config."""

    write: Callable[[torch.Tensor, int, str], Written]
    config: Mapping[str, Any] | None
    weights: WeightMap = WEIGHTS
    config_keys: Mapping[str, Any] = field(default_factory=dict)
    flag: str | None = None


def each(write: Callable[[torch.Tensor], Written]) -> Callable[[torch.Tensor, int, str], Written]:
    return lambda weight, expert, part: write(weight)


FORMATS: dict[str, Format] = {
    "bf16": Format(each(plain), None),
    "fp8_block": Format(
        each(fp8_block), {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    ),
    "fp8_tensor_dynamic": Format(each(fp8_tensor), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8_channel": Format(
        each(fp8_channel),
        compressed(numbers("float", 8, "channel"), numbers("float", 8, "token", **TOKEN), "float-quantized"),
    ),
    "int8_channel": Format(
        each(int8_channel),
        compressed(numbers("int", 8, "channel"), numbers("int", 8, "token", **TOKEN), "int-quantized"),
    ),
    "int4_g32": Format(
        each(pack_quantized(32)), compressed(numbers("int", 4, "group", group_size=32), None, "pack-quantized")
    ),
    "int4_g128": Format(
        each(pack_quantized(128)), compressed(numbers("int", 4, "group", group_size=128), None, "pack-quantized")
    ),
    "int8_g128": Format(each(gptq_int8), {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}),
    "fp8_channel_a16": Format(each(fp8_channel), compressed(numbers("float", 8, "channel"), None, "float-quantized")),
    "w4afp8": Format(each(w4afp8), {"quant_method": "w4afp8", "group_size": 128, "ignored_layers": ["gate"]}),
    "awq_g32": Format(each(awq(32)), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    "awq_g128": Format(each(awq(128)), {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
    "int4_g32_asymmetric": Format(
        each(asymmetric_int4(32)),
        compressed(numbers("int", 4, "group", group_size=32, symmetric=False), None, "pack-quantized"),
    ),
    "nvfp4_packed": Format(
        lambda weight, expert, part: nvfp4_packed(weight, 2.0**-9 * (1 + expert), 0.01 * (1 + expert)),
        compressed(
            numbers("float", 4, "tensor_group", group_size=16),
            numbers("float", 4, "tensor_group", group_size=16, dynamic="local"),
            "nvfp4-pack-quantized",
        ),
    ),
    "nvfp4_modelopt": Format(
        lambda weight, expert, part: nvfp4_modelopt(weight, 2.0**-9 * (1 + expert), 0.01 * (1 + expert)),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
    "nvfp4_a16": Format(
        lambda weight, expert, part: nvfp4_weight_only(weight, 2.0**-9 * (1 + expert)),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {f"{LAYER}mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
        },
    ),
    "mxfp4_deepseek": Format(
        each(mxfp4_exponents),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        weights=W123,
        config_keys={"expert_dtype": "fp4"},
    ),
    "mxfp8": Format(each(mxfp8), {"quant_method": "mxfp8"}),
    "gptq": Format(each(gptq), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
}


# --- the layer --------------------------------------------------------------------------------------------------------


class Loaded:
    """One layer of a model, as the loader sees models. `layer` computes [T, H] -> this rank's summand of [T, H]."""

    base_prefix = "model."

    def __init__(
        self,
        spec: MoE,
        hidden_size: int,
        config: Mapping[str, Any],
        folder: Path,
        weights: WeightMap = WEIGHTS,
        *,
        rank: int = 0,
        ranks: RankLayout = ONE_RANK,
        fuse: bool = True,
        flag: str | None = None,
        precision: str = "default",
        ops: Any = native_ops,
        dtype: torch.dtype = torch.float32,
        arch: ArchTraits = CPU,
    ) -> None:
        quantization = quantization_of(config, folder, flag, precision)
        self.arch = arch
        plan: Any = SimpleNamespace(
            arch=arch,
            model=SimpleNamespace(
                quantization=quantization, vocab_size=config.get("vocab_size", 0), model_path=str(folder)
            ),
            entry=lambda op, key="": (
                op.reference if ops is native_ops or op is QUANTIZED_LINEAR else getattr(ops, op.name)
            ),
            choices=defaultdict(lambda: SimpleNamespace(spec=SimpleNamespace(package="torch"))),
            tiles=lambda op, shape=None: self._tile_configs() if op == "fused_moe" and ops is not native_ops else (),
        )
        self.described = described = with_fused_shared(
            _description(spec, hidden_size, weights, quantization), "" if fuse else "--disable-shared-experts-fusion"
        )
        self.held = plan.weights = rank_weights(described, ranks)
        quant = Unquantized() if quantization is None else QuantizedMethod(quantization)
        groups = groups_of(ranks, rank)
        groups.tp.reduce_with(NoAllReduce())  # the test sums what the ranks make
        scope = Scope(plan, torch.device(arch.device), dtype, groups, quant, weights)
        self.on_other_ranks = scope.on_other_ranks
        self.weights = weights
        self.quantization = quantization
        self.params, self.finish = scope.params, scope.finish
        self.layer = MoELayer(scope.sub("layers").sub(3).sub("moe"), described.layers[3].ffn)

    def _tile_configs(self) -> TileConfigs:
        """As a plan cuts them."""
        ranks = self.held.ranks
        serving = ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(ranks.tp_size, ep_size=ranks.ep_size))
        need = next(need for need in needs_of(self.held, serving) if need.op == "fused_moe")
        return triton_tile_configs(need, self.arch).by_shape[None]

    def load(self, folder: Path) -> MoELayer:
        with torch.inference_mode():
            load_checkpoint(self, str(folder))  # type: ignore[arg-type]  # all that the loader reads of a model
            return self._finished()

    def dummy(self) -> MoELayer:
        with torch.inference_mode():
            fill_random(self.params, seed=0)
            return self._finished()

    def _finished(self) -> MoELayer:
        for step in self.finish:
            step()
        return self.layer

    def ignored_weight(self, name: str) -> bool:
        other_rank = name in self.on_other_ranks
        return other_rank or name.endswith(self.weights.ignore) or is_redundant(self.quantization, name)


def _description(spec: MoE, hidden_size: int, names: WeightMap, quantization: QuantConfig | None) -> ModelDescription:
    """Of a model whose last layer of four has these experts."""
    return ModelDescription(
        architecture="Test", model_type="test", known=True, unsupported=(), dtype="bfloat16", hidden_size=hidden_size,
        vocab_size=90, tie_embeddings=True, norm_eps=1e-6, zero_centred_norms=False, vision_head_dim=0, names=names,
        quantization=quantization,
        layers=(*[LayerSpec(ABSENT, ABSENT)] * 3, LayerSpec(ABSENT, spec)),
    )  # fmt: skip


def save(folder: Path, tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")

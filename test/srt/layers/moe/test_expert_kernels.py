"""Loaded experts through the Triton kernels: the block as a server runs it, against fp32 products."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import interpreter
import pytest
import torch
from pairs import some, some_of

from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.blocks.moe.layer import MoELayer
from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.configs.activation import GELU, GPT_OSS_SWIGLU, RELU2, Activation
from sglang.srt.hardware.arch import current_arch
from sglang.srt.layers import native_ops
from sglang.srt.layers.moe.expert_weights import ExpertWeights
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import combine, fused_moe
from sglang.srt.layers.moe.fused_moe_triton.tiles import few_pairs
from sglang.srt.layers.moe.output_norm import OutputNorm
from sglang.srt.layers.moe.pair_adapters import PairAdapters
from sglang.srt.layers.native_adapters import EXPERT_ADAPTERS
from sglang.srt.layers.quantization.reference import round_activation

from .expert_checkpoint import FORMATS, FUSED_ONLY, WEIGHTS, Format, Loaded, save
from .test_expert_loading import HIDDEN, INTER, NUM_EXPERTS, assert_close, config_of, gpt_oss, write_experts

DEVICE = interpreter.DEVICE
# One form of every scheme, and one with zero points: what differs between forms ends with loading.
SCHEMES = tuple(
    name
    for name in FORMATS
    if name not in ("fp8_tensor_dynamic", "nvfp4_packed", "gptq", "awq_g32", "int4_g32_asymmetric")
)
TRITON = SimpleNamespace(
    fused_moe=fused_moe,
    topk_softmax=topk.topk_softmax,
    topk_sigmoid=topk.topk_sigmoid,
    linear=native_ops.linear,
    silu_and_mul=native_ops.silu_and_mul,
)


def load(form: Format, spec: MoE, folder: Path) -> MoELayer:
    arch = current_arch(device=DEVICE)
    loaded = Loaded(spec, HIDDEN, config_of(form), folder, form.weights, ops=TRITON, dtype=torch.bfloat16, arch=arch)
    return loaded.load(folder)


def reference(layer: MoELayer, x: torch.Tensor, batch: SimpleNamespace | None = None, pairs: bool = False):
    """fp32 with the layer's weights dequantized, and activations rounded as the products do: few `pairs` never, nor
    where four-bit weights are widened for want of a matrix unit."""
    weights, ids = layer.route(x, batch)
    w13, w2 = layer.experts.w13, layer.experts.w2

    def product(x: torch.Tensor, matrix: ExpertWeights, expert: int) -> torch.Tensor:
        scheme = matrix.scheme
        if scheme is not None and not pairs and (scheme.bits == 8 or "block_scaled_mma" in layer.features):
            x = round_activation(x, scheme, matrix.input_scale)
        out = x.float() @ matrix.dequantized(expert).T
        return out if matrix.bias is None else out + matrix.bias[expert].float()

    out = torch.zeros(x.shape, device=x.device)
    for expert in range(w13.num_experts):
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        inner = native_ops.gated(product(x, w13, expert), layer.activation).to(x.dtype)
        out += share * product(inner, w2, expert)
    return out


def inputs(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)


def bound(layer: MoELayer) -> float:
    """What the first product rounds to 16 bits may fall to the other side when it is rounded again, to 8 or 4."""
    scheme = layer.experts.w2.scheme
    rounds = scheme is not None and (scheme.bits == 8 or "block_scaled_mma" in layer.features)
    return 4e-2 if rounds else 1e-2


@interpreter.kernel_test
@torch.inference_mode()
@pytest.mark.parametrize("name", some(SCHEMES, ("bf16", "fp8_block", "int4_g32", "mxfp4_deepseek")))
def test_grouped_products(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    save(tmp_path, write_experts(form)[0])
    layer = load(form, MoE(NUM_EXPERTS, INTER, Router(top_k=2)), tmp_path)
    x = inputs(12)
    assert not few_pairs(24, NUM_EXPERTS)
    assert_close(layer(x).float(), reference(layer, x), bound(layer))


@interpreter.kernel_test
@torch.inference_mode()
@pytest.mark.parametrize("name", SCHEMES)
def test_few_pairs(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    save(tmp_path, write_experts(form)[0])
    layer = load(form, MoE(NUM_EXPERTS, INTER, Router(top_k=1)), tmp_path)
    x = inputs(1)
    assert few_pairs(1, NUM_EXPERTS)
    assert_close(layer(x).float(), reference(layer, x, pairs=True), 1e-2)


@interpreter.kernel_test
@torch.inference_mode()
@pytest.mark.parametrize(
    ("activation", "num_tokens", "name"),
    some_of(
        itertools.product((GELU, RELU2), (1, 12), ("bf16", "fp8_channel", "int4_g32", "nvfp4_modelopt")),
        [(GELU, 1, "fp8_channel"), (GELU, 12, "bf16"), (RELU2, 1, "int4_g32"), (RELU2, 12, "nvfp4_modelopt")],
    ),
)
def test_activations(name: str, activation: Activation, num_tokens: int, tmp_path: Path) -> None:
    """Gemma 4's experts, and those of Nemotron-H, which have no gate: few pairs, and grouped ones."""
    form = FORMATS[name]
    tensors, _ = write_experts(form)
    save(tmp_path, {key: tensor for key, tensor in tensors.items() if activation.gated or ".gate_proj." not in key})
    layer = load(form, MoE(NUM_EXPERTS, INTER, Router(top_k=1 if num_tokens == 1 else 2), activation), tmp_path)
    assert layer.experts.w13.rows == (1 + activation.gated) * INTER
    x = inputs(num_tokens)
    pairs = num_tokens == 1
    assert_close(layer(x).float(), reference(layer, x, pairs=pairs), 1e-2 if pairs else bound(layer))


@interpreter.kernel_test
@torch.inference_mode()
def test_gpt_oss(tmp_path: Path) -> None:
    save(tmp_path, gpt_oss(INTER)[0])
    form = Format(FORMATS["bf16"].write, {"quant_method": "mxfp4"}, FUSED_ONLY)
    spec = MoE(NUM_EXPERTS, INTER, Router(2, bias=True), GPT_OSS_SWIGLU, bias=True, form="gpt_oss")
    layer = load(form, spec, tmp_path)
    x = inputs(7)
    assert_close(layer(x).float(), reference(layer, x), 1e-2)


@interpreter.kernel_test
@torch.inference_mode()
def test_the_shared_expert_among_the_routed_ones_and_padding(tmp_path: Path) -> None:
    form = FORMATS["fp8_channel"]
    tensors, _ = write_experts(form)
    shared = {name: tensor for name, tensor in tensors.items() if ".experts.0." in name}
    tensors |= {name.replace(".experts.0.", ".shared_experts."): tensor.clone() for name, tensor in shared.items()}
    tensors["model.layers.3.mlp.gate.e_score_correction_bias"] = torch.randn(NUM_EXPERTS)
    save(tmp_path, tensors)
    router = Router(2, "sigmoid", scale=2.5, correction="e_score_correction_bias", float32=True)
    layer = load(form, MoE(NUM_EXPERTS, INTER, router, shared=Shared(INTER)), tmp_path)
    assert layer.shared is None and WEIGHTS is form.weights
    x = inputs(12)
    batch = SimpleNamespace(num_valid_tokens=torch.tensor([9], dtype=torch.int32, device=DEVICE), input_ids=None)
    got = layer(x, batch)
    assert_close(got.float(), reference(layer, x, batch), bound(layer))
    assert got[:9].any(1).all() and not got[9:].any()


@interpreter.kernel_test
@pytest.mark.parametrize("size", [256, 100])
def test_sums_of_normed_outputs(size: int) -> None:
    """Rows of choices of -1 were not written."""
    torch.manual_seed(0)
    pair_out = torch.randn(7 * 3, size, device=DEVICE).bfloat16()
    ids = torch.randint(0, 9, (7, 3), dtype=torch.int32, device=DEVICE)
    ids[2, 1] = ids[5] = -1
    pair_out[ids.flatten() < 0] = torch.nan
    weights, norm = torch.rand(7, 3, device=DEVICE), OutputNorm(1 + torch.randn(size, device=DEVICE), 1e-8)
    out = torch.empty(7, size, dtype=torch.bfloat16, device=DEVICE)
    combine(pair_out, weights, ids, out, norm)
    normed = norm.of(pair_out).float().view(7, 3, size).masked_fill(ids[..., None] < 0, 0.0)
    torch.testing.assert_close(out.float(), (normed * weights[..., None]).sum(1), rtol=2e-2, atol=2e-2)


@interpreter.kernel_test
@torch.inference_mode()
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 2), (12, 2)])
@pytest.mark.parametrize("name", ["int4_g32", "bf16"])
def test_experts_with_norms(name: str, num_tokens: int, top_k: int, tmp_path: Path) -> None:
    """Also where few pairs are otherwise added up while they are multiplied, and in a step with adapters of other
    layers."""
    form = FORMATS[name]
    save(tmp_path, write_experts(form)[0])
    layer = load(form, MoE(NUM_EXPERTS, INTER, Router(top_k=top_k)), tmp_path)
    x, norm = inputs(num_tokens), OutputNorm(torch.rand(HIDDEN, device=DEVICE) + 0.5, 1e-6)
    weights, ids = layer.route(x, None)
    w13, w2, _ = layer.experts.of_step(ids)
    given = (x, w13, w2, weights, ids, layer.activation, layer.configs, layer.features)
    want = native_ops.fused_moe(*given, norm=norm).float()
    assert_close(fused_moe(*given, norm=norm).float(), want, 4e-2)
    none = PairAdapters(EXPERT_ADAPTERS, torch.zeros(len(x), dtype=torch.int32, device=DEVICE), None, None)
    for kernel in (native_ops.fused_moe, fused_moe):
        assert_close(kernel(*given, adapters=none, norm=norm).float(), want, 4e-2)
    assert (want - native_ops.fused_moe(*given).float()).abs().max() > 0.1


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)

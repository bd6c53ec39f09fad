"""Expert weights from every published format, whole and sharded, against the matrices that the tensors stand for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang.srt.blocks.moe import reference as routing
from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.configs.quant_scheme import SCHEMES, expert_share
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import CPU
from sglang.srt.layers import native_ops
from sglang.srt.layers.quantization.reference import dequantize, quantize
from sglang.srt.plan.ranks import RankLayout

from .expert_checkpoint import (
    FORMATS,
    FUSED_ONLY,
    LAYER,
    Format,
    Loaded,
    Tensors,
    compressed,
    fp8_tensor,
    numbers,
    save,
)

NUM_EXPERTS, HIDDEN, INTER = 3, 256, 384
ROUTER = Router(top_k=2)
Exact = dict[tuple[int, str], torch.Tensor]


def module_name(form: Format, expert: int, part: str) -> str:
    template = form.weights.layer["moe.w2" if part == "down" else "moe.w13"]
    return LAYER + template.format(expert=expert, part=form.weights.parts.get(part, part))


def write_experts(form: Format, inter: int = INTER, seed: int = 0) -> tuple[Tensors, Exact]:
    """The checkpoint of a layer's experts and router, and what the experts' matrices are."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {LAYER + "mlp.gate.weight": torch.randn(NUM_EXPERTS, HIDDEN, generator=generator)}
    exact: Exact = {}
    for expert in range(NUM_EXPERTS):
        for part, shape in (("gate", (inter, HIDDEN)), ("up", (inter, HIDDEN)), ("down", (HIDDEN, inter))):
            weight = torch.randn(shape, generator=generator) * 0.1 * (1 + expert)
            leaves, exact[expert, part] = form.write(weight, expert, part)
            tensors |= {f"{module_name(form, expert, part)}.{leaf}": tensor for leaf, tensor in leaves.items()}
    return tensors, exact


def config_of(form: Format) -> dict[str, object]:
    return {**form.config_keys, **({} if form.config is None else {"quantization_config": form.config})}


def expected(x: torch.Tensor, tensors: Tensors, exact: Exact, activation: Activation = SILU) -> torch.Tensor:
    """fp32, expert by expert."""
    logits = x @ tensors[LAYER + "mlp.gate.weight"].T
    weights, ids = routing.topk_softmax(logits, ROUTER.top_k, True)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate_up = torch.cat((exact[e, "gate"] @ x[t], exact[e, "up"] @ x[t]))
            out[t] += weight * (exact[e, "down"] @ native_ops.gated(gate_up, activation))
    return out


def sum_of_ranks(
    form: Format,
    folder: Path,
    x: torch.Tensor,
    tp_size: int = 1,
    inter: int = INTER,
    spec: MoE | None = None,
    ep_size: int = 1,
) -> torch.Tensor:
    spec = spec or MoE(NUM_EXPERTS, inter, ROUTER)
    total = torch.zeros_like(x)
    for rank in range(tp_size):
        ranks = RankLayout(tp_size, ep_size)
        loaded = Loaded(spec, HIDDEN, config_of(form), folder, form.weights, rank=rank, ranks=ranks, flag=form.flag)
        total += loaded.load(folder)(x)
    return total


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float = 1e-5) -> None:
    error = ((got - want).norm() / want.norm()).item()
    assert error < bound, f"relative error {error:.2e}"


@pytest.mark.values
@pytest.mark.parametrize("tp_size", [2, 1, 3])  # most formats have the first one in `make test`
@pytest.mark.parametrize("name", FORMATS)
def test_published_formats(name: str, tp_size: int, tmp_path: Path) -> None:
    form = FORMATS[name]
    tensors, exact = write_experts(form)
    save(tmp_path, tensors)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert_close(sum_of_ranks(form, tmp_path, x, tp_size), expected(x, tensors, exact))


@pytest.mark.parametrize("name", FORMATS)
def test_whole_experts_a_rank(name: str, tmp_path: Path) -> None:
    """Two ranks, two groups of two, and more ranks than divide the experts: some have room that nothing fills."""
    form = FORMATS[name]
    tensors, exact = write_experts(form)
    save(tmp_path, tensors)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    want = expected(x, tensors, exact)
    for tp_size, ep_size in ((2, 2), (4, 2), (NUM_EXPERTS - 1, NUM_EXPERTS - 1)):
        assert_close(sum_of_ranks(form, tmp_path, x, tp_size, ep_size=ep_size), want)


def test_a_tensor_that_no_rank_has_is_still_unknown(tmp_path: Path) -> None:
    form = FORMATS["bf16"]
    tensors, _ = write_experts(form)
    stray = f"{module_name(form, NUM_EXPERTS, 'up')}.weight"
    save(tmp_path, tensors | {stray: torch.zeros(INTER, HIDDEN)})
    spec = MoE(NUM_EXPERTS, INTER, ROUTER)
    for rank in range(2):
        loaded = Loaded(spec, HIDDEN, {}, tmp_path, form.weights, rank=rank, ranks=RankLayout(2, 2))
        with pytest.raises(UserError, match=rf"weights that the model does not have: {re.escape(stray)}$"):
            loaded.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "inter", "tp_size", "share"),
    [("int4_g32", 352, 2, 192), ("nvfp4_modelopt", 400, 4, 128), ("mxfp8", 352, 3, 128), ("fp8_block", 320, 1, 384)],
)
def test_a_share_that_would_cut_a_group_is_padded(
    name: str, inter: int, tp_size: int, share: int, tmp_path: Path
) -> None:
    form = FORMATS[name]
    tensors, exact = write_experts(form, inter)
    save(tmp_path, tensors)
    loaded = Loaded(
        MoE(NUM_EXPERTS, inter, ROUTER), HIDDEN, config_of(form), tmp_path, form.weights, ranks=RankLayout(tp_size)
    )
    layer = loaded.load(tmp_path)
    assert layer.experts.w13.rows == 2 * share and layer.experts.w2.cols == share
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert_close(sum_of_ranks(form, tmp_path, x, tp_size, inter), expected(x, tensors, exact))


@pytest.mark.parametrize(
    ("inter", "tp_size", "scheme", "share"),
    [
        (1536, 8, "fp8_channel", 192),  # GLM-4.7
        (2048, 8, "int4_g32", 256),  # Kimi
        (2048, 8, "fp8_block", 256),  # DeepSeek
        (2880, 1, "mxfp4", 2880),  # GPT-OSS
        (2880, 2, "mxfp4", 1440),
        (2880, 4, "mxfp4", 768),
        (2880, 8, "mxfp4", 384),
        (768, 4, "fp8_block", 256),  # Qwen3-30B: the last rank would hold nothing
        (768, 4, None, 192),
        (1856, 8, None, 240),  # Nemotron-3-Nano: 232 elements are no whole vectors
        (1856, 8, "fp8_tensor", 240),
        (2880, 8, None, 368),
        (1408, 8, "nvfp4", 192),  # DeepSeek-V2-Lite: 88 bytes are none
        (1408, 8, "fp8_channel", 176),
    ],
)
def test_shares_of_published_models(inter: int, tp_size: int, scheme: str | None, share: int) -> None:
    if (inter, tp_size, scheme) == (768, 4, "fp8_block"):
        message = r"768 in groups of 128 that share scales \(fp8_block\) is too few for 4 .*: one would hold none of 6"
        with pytest.raises(UserError, match=message):
            expert_share(inter, tp_size, SCHEMES["fp8_block"])
        return
    assert expert_share(inter, tp_size, SCHEMES[scheme] if scheme else None) == share


def test_dims_fewer_than_ranks_are_refused() -> None:
    assert expert_share(770, 4, SCHEMES["fp8_channel"]) == 208, "whole vectors, and the last rank holds 146"
    assert expert_share(34, 4, None) == 9, "no whole vectors for all"
    with pytest.raises(UserError, match="expert intermediate size 3 in groups of 16 is too few for 4 tensor-parallel"):
        expert_share(3, 4, None)


# --- scales of gate and up --------------------------------------------------------------------------------------------


def static_fp8(differ: bool) -> Format:
    """Per-tensor scales and static input scales; gate's are three times as large as up's if they `differ`."""

    def write(weight: torch.Tensor, expert: int, part: str):
        weight = weight * (3.0 if differ and part == "gate" else 1.0) / weight.abs().max()
        return fp8_tensor(weight, input_scale=0.01 * (1 + expert), listed=expert == 1)

    return Format(write, {"quant_method": "fp8", "activation_scheme": "static"})


def nvfp4_with_factors(of_up: float) -> Format:
    """Expert 1's factor of up is `of_up` times that of gate."""
    base = FORMATS["nvfp4_modelopt"]

    def write(weight: torch.Tensor, expert: int, part: str):
        leaves, exact = base.write(weight, expert, part)
        if part == "up" and expert == 1:
            leaves = leaves | {"weight_scale_2": leaves["weight_scale_2"] * of_up}
            exact = exact * of_up
        return leaves, exact

    return Format(write, base.config)


def test_static_scales(tmp_path: Path) -> None:
    form = static_fp8(differ=False)
    tensors, exact = write_experts(form)
    save(tmp_path, tensors)
    layer = Loaded(MoE(NUM_EXPERTS, INTER, ROUTER), HIDDEN, config_of(form), tmp_path).load(tmp_path)
    assert layer.experts.w13.scheme is SCHEMES["fp8_tensor"] and layer.experts.w13.scale.shape == (NUM_EXPERTS,)
    for weights in (layer.experts.w13, layer.experts.w2):  # the largest serves all experts
        torch.testing.assert_close(weights.input_scale, torch.tensor([0.01 * NUM_EXPERTS]))
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert_close(layer(x), expected(x, tensors, exact))


@pytest.mark.parametrize("form", [static_fp8(True), nvfp4_with_factors(0.37), nvfp4_with_factors(0.0)])
def test_scales_of_gate_and_up_that_differ_change_nothing(form: Format, tmp_path: Path) -> None:
    tensors, exact = write_experts(form)
    save(tmp_path, tensors)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert_close(sum_of_ranks(form, tmp_path, x, 2), expected(x, tensors, exact))


def test_the_input_scale_follows_what_moved_into_the_down_projection(tmp_path: Path) -> None:
    form = static_fp8(differ=True)
    tensors, _ = write_experts(form)
    save(tmp_path, tensors)
    layer = Loaded(MoE(NUM_EXPERTS, INTER, ROUTER), HIDDEN, config_of(form), tmp_path).load(tmp_path)
    torch.testing.assert_close(layer.experts.w13.input_scale, torch.tensor([0.03]))
    torch.testing.assert_close(layer.experts.w2.input_scale, torch.tensor([0.09]))


@pytest.mark.parametrize(("form", "what"), [(static_fp8(True), "weights"), (nvfp4_with_factors(0.37), "block scales")])
def test_with_a_clamp_the_larger_scale_serves_both(
    form: Format, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, exact = write_experts(form)
    save(tmp_path, tensors)
    activation = Activation(limit=2.0)
    spec = MoE(NUM_EXPERTS, INTER, ROUTER, activation)
    layer = Loaded(spec, HIDDEN, config_of(form), tmp_path).load(tmp_path)
    assert re.search(rf"w13: scales of gate and up differ in \d of 3 experts; .* {what} were rounded", caplog.text)
    for e in range(NUM_EXPERTS):
        held = layer.experts.w13.dequantized(e)
        torch.testing.assert_close(held[:INTER], exact[e, "gate"])
        assert_close(held[INTER:], exact[e, "up"], 5e-2)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert_close(layer(x), expected(x, tensors, exact, activation), 5e-2)


def test_input_scales_of_experts_that_calibration_did_not_reach(tmp_path: Path) -> None:
    form = FORMATS["nvfp4_packed"]
    tensors, _ = write_experts(form)
    names = [name for name in tensors if name.endswith("input_global_scale")]
    for name in names[:3]:
        tensors[name] = torch.zeros(1)  # its reciprocal is infinite
    save(tmp_path, tensors)
    spec = MoE(NUM_EXPERTS, INTER, ROUTER)
    layer = Loaded(spec, HIDDEN, config_of(form), tmp_path).load(tmp_path)
    torch.testing.assert_close(layer.experts.w13.input_scale, torch.tensor([0.03]))
    for name in names:
        tensors[name] = torch.zeros(1)
    save(tmp_path, tensors)
    with pytest.raises(UserError, match=r"layers.3.moe.w13: no usable input scale; was the checkpoint"):
        Loaded(spec, HIDDEN, config_of(form), tmp_path).load(tmp_path)


@pytest.mark.parametrize(("weight_only", "held"), [(False, "fp8_channel"), (True, "fp8_channel_a16")])
def test_without_a_scale_for_activations_each_token_gets_its_own(weight_only: bool, held: str, tmp_path: Path) -> None:
    """Or activations stay as they are, where nothing says that they are rounded."""
    form = FORMATS["fp8_tensor_dynamic"]
    if weight_only:
        form = replace(form, config=compressed(numbers("float", 8, "tensor"), None, "float-quantized"))
    tensors, _ = write_experts(form)
    save(tmp_path, tensors)
    layer = Loaded(MoE(NUM_EXPERTS, INTER, ROUTER), HIDDEN, config_of(form), tmp_path).load(tmp_path)
    assert layer.experts.w13.scheme is SCHEMES[held]


# --- more forms -------------------------------------------------------------------------------------------------------


def test_quantized_while_loading(tmp_path: Path) -> None:
    form = Format(FORMATS["bf16"].write, None, flag="fp8")
    tensors, exact = write_experts(form)
    save(tmp_path, tensors)
    scheme = SCHEMES["fp8_channel"]

    def round_(weight: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(weight, scheme), scheme)

    rounded = {key: round_(weight) for key, weight in exact.items()}
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert_close(sum_of_ranks(form, tmp_path, x), expected(x, tensors, rounded))
    # Of a sharded row, each rank's piece has its own scale.
    for e in range(NUM_EXPERTS):
        rounded[e, "down"] = torch.cat([round_(half) for half in exact[e, "down"].chunk(2, dim=1)], dim=1)
    assert_close(sum_of_ranks(form, tmp_path, x, 2), expected(x, tensors, rounded))


@pytest.mark.parametrize("fused", [False, True])
def test_precision_of_mxfp4_experts_changes_nothing_that_is_stored(fused: bool, tmp_path: Path) -> None:
    form = FORMATS["mxfp4_deepseek"]
    spec = MoE(NUM_EXPERTS, INTER, ROUTER)
    tensors = write_experts(form)[0]
    if fused:
        form = Format(form.write, {"quant_method": "mxfp4"}, FUSED_ONLY)
        spec = MoE(NUM_EXPERTS, INTER, Router(top_k=2, bias=True), GPT_OSS_SWIGLU, bias=True, form="gpt_oss")
        tensors = gpt_oss(INTER)[0]
    save(tmp_path, tensors)
    arch = replace(CPU, features=frozenset({"block_scaled_mma"}))
    stored, rounded = (
        Loaded(spec, HIDDEN, config_of(form), tmp_path, form.weights, precision=precision, arch=arch).load(tmp_path)
        for precision in ("default", "fp8")
    )
    assert stored.experts.w13.scheme is SCHEMES["mxfp4"] and rounded.experts.w13.scheme is SCHEMES["mxfp4_mxfp8"]
    for before, after in ((stored.experts.w13, rounded.experts.w13), (stored.experts.w2, rounded.experts.w2)):
        assert after.plane_cols is None, "the matrix unit reads them packed"
        assert torch.equal(before.dequantized(1), after.dequantized(1))


def gpt_oss(inter: int) -> tuple[Tensors, Tensors, Exact, Exact]:
    """The MXFP4 checkpoint, the 16-bit one, the matrices and the biases."""
    generator = torch.Generator().manual_seed(0)
    router = {
        LAYER + "mlp.router.weight": torch.randn(NUM_EXPERTS, HIDDEN, generator=generator),
        LAYER + "mlp.router.bias": torch.randn(NUM_EXPERTS, generator=generator),
    }
    blocks: Tensors = dict(router)
    plain: Tensors = dict(router)
    exact, biases = {}, {}
    for proj, rows, cols in (("gate_up_proj", 2 * inter, HIDDEN), ("down_proj", HIDDEN, inter)):
        made = quantize(torch.randn(NUM_EXPERTS, rows, cols, generator=generator) * 0.2, SCHEMES["mxfp4"])
        bias = torch.randn(NUM_EXPERTS, rows, generator=generator).bfloat16()
        prefix = f"{LAYER}mlp.experts.{proj}"
        blocks[f"{prefix}_blocks"] = made.data.view(NUM_EXPERTS, rows, cols // 32, 16)
        blocks[f"{prefix}_scales"] = made.scale
        weight = dequantize(made, SCHEMES["mxfp4"])
        plain[prefix] = weight.transpose(1, 2).bfloat16()
        blocks[f"{prefix}_bias"] = plain[f"{prefix}_bias"] = bias
        for e in range(NUM_EXPERTS):
            for part, cut in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))) if rows != HIDDEN else ():
                exact[e, part], biases[e, part] = weight[e, cut], bias[e, cut].float()
            if rows == HIDDEN:
                exact[e, "down"], biases[e, "down"] = weight[e], bias[e].float()
    return blocks, plain, exact, biases


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(("inter", "tp_size"), [(384, 1), (384, 3), (352, 2), (352, 1)])
def test_gpt_oss(quantized: bool, inter: int, tp_size: int, tmp_path: Path) -> None:
    blocks, plain, exact, biases = gpt_oss(inter)
    tensors = blocks if quantized else plain
    save(tmp_path, tensors)
    router = Router(top_k=2, bias=True)
    spec = MoE(NUM_EXPERTS, inter, router, GPT_OSS_SWIGLU, bias=True, form="gpt_oss")
    form = Format(FORMATS["bf16"].write, {"quant_method": "mxfp4"} if quantized else None, FUSED_ONLY)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = x @ tensors[LAYER + "mlp.router.weight"].T + tensors[LAYER + "mlp.router.bias"]
    weights, ids = routing.topk_softmax(logits, 2, True)
    want = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate = (exact[e, "gate"] @ x[t] + biases[e, "gate"]).clamp(max=7.0)
            up = (exact[e, "up"] @ x[t] + biases[e, "up"]).clamp(-7.0, 7.0)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            want[t] += weight * (exact[e, "down"] @ inner + biases[e, "down"])
    assert_close(sum_of_ranks(form, tmp_path, x, tp_size, inter, spec), want)
    if inter == 384:
        assert_close(sum_of_ranks(form, tmp_path, x, 2 * tp_size, inter, spec, ep_size=2), want)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_experts_in_one_tensor(tp_size: int, tmp_path: Path) -> None:
    single, exact = write_experts(FORMATS["bf16"])
    stack = {part: torch.stack([exact[e, part] for e in range(NUM_EXPERTS)]) for part in ("gate", "up", "down")}
    tensors = {LAYER + "mlp.gate.weight": single[LAYER + "mlp.gate.weight"]}
    tensors[LAYER + "mlp.experts.gate_up_proj"] = torch.cat((stack["gate"], stack["up"]), 1).bfloat16()
    tensors[LAYER + "mlp.experts.down_proj"] = stack["down"].bfloat16()
    save(tmp_path, tensors)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    spec = MoE(NUM_EXPERTS, INTER, ROUTER, form="stacked")
    want = expected(x, tensors, exact)
    assert_close(sum_of_ranks(FORMATS["bf16"], tmp_path, x, tp_size, spec=spec), want)
    assert_close(sum_of_ranks(FORMATS["bf16"], tmp_path, x, 2 * tp_size, spec=spec, ep_size=2), want)


@pytest.mark.parametrize("name", [*FORMATS, "static"])
def test_dummy_weights_are_about_as_large_as_others(name: str, tmp_path: Path) -> None:
    form = static_fp8(False) if name == "static" else FORMATS[name]
    loaded = Loaded(MoE(NUM_EXPERTS, INTER, ROUTER), HIDDEN, config_of(form), tmp_path, form.weights)
    layer = loaded.dummy()
    for weights in (layer.experts.w13, layer.experts.w2):
        assert 0.01 < weights.dequantized(0).std().item() < 0.04
    assert layer(torch.randn(3, HIDDEN)).isfinite().all()


# --- errors -----------------------------------------------------------------------------------------------------------


def _replace(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(ending))
        tensors[name] = change(tensors[name])

    return edit


def _drop(ending: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[next(name for name in tensors if name.endswith(ending))]

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "nvfp4_modelopt",
            _replace(".weight_scale", lambda t: t.float()),
            r"weight_scale is stored as F32, but the checkpoint's quantization calls for F8_E4M3",
        ),
        (
            "mxfp4_deepseek",
            _replace(".w1.scale", lambda t: t.view(torch.uint8).view(torch.float8_e4m3fn)),
            r"experts.0.w1.scale is stored as F8_E4M3, but .* calls for U8 or F8_E8M0",
        ),
        (
            "int4_g32",
            _replace(".weight_packed", lambda t: t.view(torch.uint8)),
            r"weight_packed has shape \[384, 128\], but config.json calls for \[384, 32\]",
        ),
        (
            "int4_g32",
            _replace(".weight_scale", lambda t: t[:, ::4]),
            r"weight_scale has shape \[384, 2\], but config.json calls for \[384, 8\]",
        ),
        ("fp8_block", _drop("down_proj.weight_scale_inv"), r"lacks weights of .*experts.0.down_proj.weight_scale_inv"),
        (
            "fp8_channel",
            _replace(".gate_proj.weight", lambda t: t.bfloat16()),
            r"experts.0.gate_proj.weight is stored as BF16, but .* calls for F8_E4M3",
        ),
        (
            "bf16",
            _replace(".gate_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
            r"stored as F8_E4M3: quantized checkpoints need a quantization_config",
        ),
    ],
)
def test_checkpoints_that_are_not_what_they_say(
    name: str, edit: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    tensors, _ = write_experts(form)
    edit(tensors)
    save(tmp_path, tensors)
    with pytest.raises(UserError, match=message):
        Loaded(MoE(NUM_EXPERTS, INTER, ROUTER), HIDDEN, config_of(form), tmp_path, form.weights).load(tmp_path)


@pytest.mark.parametrize(
    ("spec", "hidden", "config", "message"),
    [
        (MoE(4, 64, ROUTER, bias=True), 64, {}, "experts with a bias that are stored one by one are not supported"),
        (
            MoE(4, 64, ROUTER),
            80,
            config_of(FORMATS["int4_g32"]),
            "hidden size 80 does not divide into int4_g32 groups of 32",
        ),
        (
            MoE(4, 64, ROUTER),
            64,
            config_of(FORMATS["int4_g32"])
            | {"quantization_config": {**FORMATS["int4_g32"].config, "ignore": ["re:.*experts.0.*"]}},
            "modules that are computed as one are quantized differently: .*experts.0.gate_proj not quantized",
        ),
    ],
)
def test_experts_that_cannot_be_served(
    spec: MoE, hidden: int, config: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        Loaded(spec, hidden, config, tmp_path)


# --- the shared expert as one more ------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp8_channel", "fp8_block", "nvfp4_modelopt", "int4_g32"])
def test_the_shared_expert_is_loaded_behind_the_routed_ones(
    name: str, fuse: bool, tp_size: int, tmp_path: Path
) -> None:
    form = FORMATS[name]
    tensors, exact = write_experts(form)
    shared: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(5)
    for part, shape in (("gate", (INTER, HIDDEN)), ("up", (INTER, HIDDEN)), ("down", (HIDDEN, INTER))):
        leaves, shared[part] = form.write(torch.randn(shape, generator=generator) * 0.1, 0, part)
        tensors |= {f"{LAYER}mlp.shared_experts.{part}_proj.{leaf}": tensor for leaf, tensor in leaves.items()}
    save(tmp_path, tensors)
    spec = MoE(NUM_EXPERTS, INTER, ROUTER, shared=Shared(INTER))
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    total = torch.zeros_like(x)
    for rank in range(2 if tp_size == 2 and name != "fp8_block" else 1):
        size = tp_size if name != "fp8_block" else 1  # three blocks: dense layers have no padding
        loaded = Loaded(
            spec, HIDDEN, config_of(form), tmp_path, form.weights, rank=rank, ranks=RankLayout(size), fuse=fuse
        )
        layer = loaded.load(tmp_path)
        assert (layer.shared is None) == fuse
        assert layer.experts.w13.num_experts == NUM_EXPERTS + fuse
        total += layer(x)
    down = shared["down"] @ native_ops.silu_and_mul(torch.cat((x @ shared["gate"].T, x @ shared["up"].T), 1)).T
    assert_close(total, expected(x, tensors, exact) + down.T)


def test_a_shared_expert_of_other_numbers_is_computed_apart(tmp_path: Path) -> None:
    """Kimi: only the routed experts are quantized."""
    form = FORMATS["int4_g32"]
    config = {"quantization_config": {**form.config, "ignore": ["re:.*shared_experts.*"]}}
    tensors, exact = write_experts(form)
    shared = {part: torch.randn(INTER, HIDDEN) * 0.1 for part in ("gate", "up")} | {"down": torch.randn(HIDDEN, INTER)}
    tensors |= {f"{LAYER}mlp.shared_experts.{part}_proj.weight": weight for part, weight in shared.items()}
    save(tmp_path, tensors)
    layer = Loaded(MoE(NUM_EXPERTS, INTER, ROUTER, shared=Shared(INTER)), HIDDEN, config, tmp_path).load(tmp_path)
    assert layer.shared is not None and layer.experts.w13.num_experts == NUM_EXPERTS
    x = torch.randn(9, HIDDEN)
    down = shared["down"] @ native_ops.silu_and_mul(torch.cat((x @ shared["gate"].T, x @ shared["up"].T), 1)).T
    assert_close(layer(x), expected(x, tensors, exact) + down.T)


def test_messages_name_the_tensors() -> None:
    assert re.fullmatch(r"model\.layers\.3\.mlp\.experts\.1\.w3", module_name(FORMATS["mxfp4_deepseek"], 1, "up"))

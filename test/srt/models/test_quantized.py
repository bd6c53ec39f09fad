"""Quantized checkpoints in their published forms on a CPU, against transformers with the weights they stand for.

`make test` has every form in a model with experts, whose attention is quantized, too, and each way to store numbers in
a dense one, with dummy weights, and on three ranks; `make thorough` has every form there, also on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import some
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quant_scheme import HEAD_SCHEMES
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import CPU
from sglang.srt.layers.quantization.dense import QuantizedLinear
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.plan import make_plan
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_names import USUAL_NAMES
from sglang.srt.server_args import ServerArgs

from .harness import TinyRunner, blocks_of, hf_logits, plan_for, random_tokens, save_tiny
from .quantized_checkpoints import FORMS, PROJECTIONS, ZERO_POINT_FORMS, Tensors, save_quantized

TOKENS = random_tokens(23, seed=1)
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def steps(runner: TinyRunner) -> torch.Tensor:
    """Logits of TOKENS: a prompt, then token by token."""
    extended = runner.extend({2: TOKENS[:20]})
    return torch.cat((*extended, *(runner.decode({2: token}) for token in TOKENS[20:])))


def wanted(reference: Path) -> torch.Tensor:
    return hf_logits(transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32), TOKENS)


EACH_KIND = (
    "fp8_block", "fp8_tensor_static", "mxfp8", "compressed_fp8_channel", "compressed_int8", "compressed_int4_g128",
    "compressed_mxfp4", "modelopt_nvfp4", "gptq_g32", "awq_g32",
)  # fmt: skip
"""One form of each scheme, or of each order of its words."""
EVERY_FORM = some(FORMS | ZERO_POINT_FORMS, EACH_KIND)


@pytest.mark.parametrize("form", EVERY_FORM)
def test_every_form_computes_what_it_stands_for(form: str, tmp_path: Path) -> None:
    reference = save_quantized("qwen3_wide", (FORMS | ZERO_POINT_FORMS)[form], tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    want = wanted(reference)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    layer = runner.model.layers[0]
    mixer, ffn = blocks_of(layer)
    assert isinstance(mixer.qkv.apply, QuantizedLinear) and isinstance(ffn.down.apply, QuantizedLinear)
    held = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert held == plan.weight_bytes(), "the plan counts other bytes than are allocated"


@pytest.mark.parametrize(
    "form",
    ["fp8_block", "fp8_tensor_static", "compressed_fp8_channel", "modelopt_nvfp4", "compressed_int4_g32", "awq_g128"],
)
def test_gate_and_up_in_one_tensor(form: str, tmp_path: Path) -> None:
    reference = save_quantized("glm4_wide", (FORMS | ZERO_POINT_FORMS)[form], tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_zero_points_beside_experts_of_16_bits(tmp_path: Path) -> None:
    form = ZERO_POINT_FORMS["awq_g32"]
    form = replace(form, config=dict(form.config) | {"modules_to_not_convert": ["mlp"]})
    reference = save_quantized("qwen3_moe_wide", form, tmp_path, keep=("mlp",))
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.parametrize(("model", "bound"), [("qwen3_wide", 0.05), ("qwen3_moe_wide", 0.1)])
def test_zero_points_are_spelled_and_planned_in_bfloat16(model: str, bound: float, tmp_path: Path) -> None:
    """Rounding may choose other experts where two are close."""
    reference = save_quantized(model, ZERO_POINT_FORMS["awq_g128"], tmp_path)
    for spelling in ("awq", "awq_marlin", "moe_wna16"):
        options = {"quantization": spelling, "dtype": "bfloat16"}
        args = ServerArgs.from_kwargs(model_path=str(tmp_path / "quantized"), **options)
        plan = make_plan(args, ModelConfig.from_server_args(args), CPU, 4 << 30)
    got, want = steps(TinyRunner(plan)), wanted(reference)
    assert (got - want).norm() < bound * want.norm()


def test_a_planned_server_runs_it(tmp_path: Path) -> None:
    """From flags to tokens: the plan's own choices, in bfloat16."""
    reference = save_quantized("qwen3_wide", FORMS["modelopt_nvfp4"], tmp_path)
    args = ServerArgs.from_kwargs(model_path=str(tmp_path / "quantized"), quantization="modelopt_fp4", dtype="bfloat16")
    plan = make_plan(args, ModelConfig.from_server_args(args), CPU, 4 << 30)
    assert plan.choices["linear/nvfp4"].name == "torch_dequantized" and plan.choices["linear"].name == "torch_native"
    got, want = steps(TinyRunner(plan)), wanted(reference)
    assert (got - want).norm() < 0.05 * want.norm()


def test_modules_that_are_left_alone_stay_in_16_bits(tmp_path: Path) -> None:
    form = FORMS["compressed_fp8_channel"]
    ignore = ["lm_head", "re:.*self_attn.*", "model.layers.1.mlp.down_proj"]
    form = replace(form, config=dict(form.config) | {"ignore": ignore})
    reference = save_quantized("qwen3_wide", form, tmp_path, keep=("self_attn", "layers.1.mlp.down_proj"))
    runner = TinyRunner(plan_for(tmp_path / "quantized"))
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    layers = runner.model.layers
    mixers, ffns = zip(*map(blocks_of, layers), strict=True)
    assert not any(isinstance(mixer.qkv.apply, QuantizedLinear) for mixer in mixers)
    assert [isinstance(ffn.down.apply, QuantizedLinear) for ffn in ffns] == [True, False, True]


@pytest.mark.parametrize("form", ["modelopt_nvfp4", "awq_g32"])
def test_a_product_of_modules_that_differ_is_in_16_bits(form: str, tmp_path: Path) -> None:
    """Nothing in the config says so: the tensors do."""
    reference = save_quantized(
        "qwen3_wide", (FORMS | ZERO_POINT_FORMS)[form], tmp_path, keep=("layers.0.self_attn.k_proj", "1.mlp.up_proj")
    )
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    mixers, ffns = zip(*map(blocks_of, runner.model.layers), strict=True)
    assert [isinstance(mixer.qkv.apply, QuantizedLinear) for mixer in mixers] == [False, True, True]
    assert [isinstance(ffn.gate_up.apply, QuantizedLinear) for ffn in ffns] == [True, False, True]
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_numbers_of_a_product_in_pieces_that_are_not_finite_are_named(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["compressed_fp8_channel"], tmp_path, keep=("layers.0.self_attn.k_proj",))
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.v_proj.weight_scale"][3] = torch.nan
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"NaN or infinite: model.layers.0.self_attn.v_proj.weight_scale"):
        load_model(plan_for(tmp_path / "quantized"))


def test_a_quantized_module_that_the_config_leaves_alone_is_refused(tmp_path: Path) -> None:
    form = FORMS["compressed_fp8_channel"]
    form = replace(form, config=dict(form.config) | {"ignore": ["re:.*layers.0.*k_proj"]})
    save_quantized("qwen3_wide", form, tmp_path)
    with pytest.raises(UserError, match=r"k_proj.weight is stored as F8_E4M3: .* leave this module alone"):
        load_model(plan_for(tmp_path / "quantized"))


def test_biases(tmp_path: Path) -> None:
    reference = save_quantized("qwen3_tied_bias", FORMS["compressed_int8"], tmp_path)
    torch.testing.assert_close(steps(TinyRunner(plan_for(tmp_path / "quantized"))), wanted(reference), **TOLERANCE)


def test_16_bit_weights_quantized_while_loading(tmp_path: Path) -> None:
    reference = save_quantized("qwen3_wide", FORMS["compressed_fp8_channel"], tmp_path)
    original = tmp_path / "original"
    save_quantized("qwen3_wide", replace(FORMS["compressed_fp8_channel"], write=lambda w: ({"weight": w}, w)), original)
    plan = plan_for(original / "reference", quantization="fp8")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def without_head(value: Any) -> Any:
    """A part of a config without the output head among modules that are left alone."""
    if isinstance(value, Mapping):
        return {key: without_head(part) for key, part in value.items()}
    return [part for part in value if part != "lm_head"] if isinstance(value, list) else value


def save_with_head(form: str, folder: Path, **more: Any) -> Path:
    """A dense model of which the output head is quantized, too."""
    made = (FORMS | ZERO_POINT_FORMS)[form]
    made = replace(made, config=without_head(made.config), modelopt=without_head(made.modelopt))
    return save_quantized("qwen3_wide", made, folder, quantized=(*PROJECTIONS, "lm_head"), **more)


@pytest.mark.parametrize("form", EVERY_FORM)
def test_an_output_head_is_a_linear_layer(form: str, tmp_path: Path) -> None:
    """In every form, though most configs name it nowhere. Those without a kernel are held in 16 bits."""
    reference = save_with_head(form, tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    assert runner.model.head is not None and plan.model.quantization is not None
    quant = plan.model.quantization.named("lm_head")
    assert quant is not None, "the tensors say that it is quantized"
    assert isinstance(runner.model.head.product, QuantizedLinear) == (quant.scheme in HEAD_SCHEMES)
    got = steps(runner)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_a_head_that_repeats_the_embedding_is_not_read(tmp_path: Path) -> None:
    """Quantized or not: the embedding is the head."""
    save_with_head("compressed_fp8_channel", tmp_path)
    folder = tmp_path / "quantized"
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    got = steps(TinyRunner(plan_for(folder)))
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("lm_head.")}, folder / "model.safetensors")
    assert torch.equal(got, steps(TinyRunner(plan_for(folder))))


@pytest.mark.parametrize("form", EVERY_FORM)
def test_dummy_weights_are_sane(form: str, tmp_path: Path) -> None:
    save_quantized("qwen3_wide", (FORMS | ZERO_POINT_FORMS)[form], tmp_path)
    plan = plan_for(tmp_path / "quantized", load_format="dummy")
    weights: dict[str, torch.Tensor] = {}
    original = QuantizedLinear.finish

    def watch(self: QuantizedLinear) -> None:
        assert self.weight is not None
        weights[f"{len(weights)}"] = self.weight.dequantized()
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedLinear, "finish", watch)
        logits = steps(TinyRunner(plan, load_format="dummy"))
    assert logits.isfinite().all() and logits.std() > 0
    assert weights and all(0.01 < weight.std() < 0.04 for weight in weights.values())


# --- tensor parallelism -----------------------------------------------------------------------------------------------

SPLIT = (
    "fp8_block",
    "compressed_fp8_channel",
    "modelopt_fp8",
    "compressed_int4_g128",
    "modelopt_nvfp4",
    "gptq_g32",
    "mxfp8",
    *ZERO_POINT_FORMS,
)
FEW = ("fp8_block", "compressed_fp8_channel", "modelopt_nvfp4", "gptq_g32", "awq_g128")


def _rank(rank: int, size: int, folder: Path, forms: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(size), rank, "gloo", f"file://{folder}/rendezvous")
    for form in forms:
        plan = plan_for(folder / form / "quantized", tp_size=size)
        runner = TinyRunner(plan)
        assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
        torch.save(steps(runner), folder / f"{form}{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize(
    ("size", "forms"),
    [(3, FEW), *(pytest.param(size, SPLIT, marks=pytest.mark.thorough) for size in (2, 3))],
    ids=["3-few", "2-all", "3-all"],
)
def test_ranks_hold_parts_of_weights_and_scales(size: int, forms: tuple[str, ...], tmp_path: Path) -> None:
    """Of three ranks two share a kv head, and of four blocks of intermediate dims the first has two."""
    for form in forms:
        (tmp_path / form).mkdir()
        save_quantized("qwen3_wide", (FORMS | ZERO_POINT_FORMS)[form], tmp_path / form)
    run_ranks(_rank, (size, tmp_path, forms), size)
    for form in forms:
        want = steps(TinyRunner(plan_for(tmp_path / form / "quantized")))
        for rank in range(size):
            got = torch.load(tmp_path / f"{form}{rank}.pt")
            torch.testing.assert_close(got, want, **TOLERANCE, msg=lambda text, form=form: f"{form}: {text}")


SPLIT_HEADS = ("fp8_block", "compressed_fp8_channel", "modelopt_fp8", "modelopt_nvfp4", "gptq_int8_g128")


def test_ranks_share_the_vocabulary_of_a_quantized_head(tmp_path: Path) -> None:
    """Three ranks: their 86 rows are no whole blocks."""
    for form in SPLIT_HEADS:
        (tmp_path / form).mkdir()
        save_with_head(form, tmp_path / form)
    run_ranks(_rank, (3, tmp_path, SPLIT_HEADS), 3)
    for form in SPLIT_HEADS:
        want = steps(TinyRunner(plan_for(tmp_path / form / "quantized")))
        for rank in range(3):
            got = torch.load(tmp_path / f"{form}{rank}.pt")
            torch.testing.assert_close(got, want, **TOLERANCE, msg=lambda text, form=form: f"{form}: {text}")


EXPERT_RANKS = {1: [form for form in ZERO_POINT_FORMS if "g128" not in form], 2: [*ZERO_POINT_FORMS]}
"""Forms by the number of groups of ranks with experts of their own. Experts of 128 dims have no two groups of 128."""


def _rank_of_experts(rank: int, folder: Path, every: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    for ep_size, forms in EXPERT_RANKS.items():
        forms = [form for form in forms if form in every]
        ranks = RankLayout(2, ep_size)
        parallel_state.init(ranks, rank, "gloo", f"file://{folder}/rendezvous{ranks.ep_size}")
        for form in forms:
            plan = plan_for(folder / form / "quantized", tp_size=2, ep_size=ranks.ep_size)
            runner = TinyRunner(plan)
            assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
            torch.save(steps(runner), folder / f"{form}{ranks.ep_size}{rank}.pt")
        parallel_state.shutdown()


@pytest.mark.parametrize(
    "forms", [("awq_g32",), pytest.param(tuple(ZERO_POINT_FORMS), marks=pytest.mark.thorough)], ids=len
)
def test_ranks_hold_parts_of_experts_with_zero_points(forms: tuple[str, ...], tmp_path: Path) -> None:
    """Shares of every expert, and whole experts."""
    for form in forms:
        (tmp_path / form).mkdir()
        save_quantized("qwen3_moe_wide", ZERO_POINT_FORMS[form], tmp_path / form)
    run_ranks(_rank_of_experts, (tmp_path, forms), 2)
    for form in forms:
        want = steps(TinyRunner(plan_for(tmp_path / form / "quantized")))
        files = [
            tmp_path / f"{form}{ep}{rank}.pt" for ep in EXPERT_RANKS for rank in range(2) if form in EXPERT_RANKS[ep]
        ]
        for file in files:
            torch.testing.assert_close(
                torch.load(file), want, **TOLERANCE, msg=lambda text, file=file: f"{file}: {text}"
            )


def test_a_share_that_cuts_a_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized("llama_wide", FORMS["fp8_block"], tmp_path)
    groups = groups_of(RankLayout(8), 1)
    monkeypatch.setattr(parallel_state, "groups", lambda: groups)
    plan = plan_for(tmp_path / "quantized")
    with pytest.raises(
        UserError, match=r"o_proj: 128 columns have one scale or word, but with --tp-size 8 a rank holds columns 64"
    ):
        CausalLM(plan, device="meta")


def test_a_share_of_a_head_that_cuts_a_word_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_head("awq_g32", tmp_path)
    groups = groups_of(RankLayout(3), 1)
    monkeypatch.setattr(parallel_state, "groups", lambda: groups)
    plan = plan_for(tmp_path / "quantized", tp_size=3)
    message = r"lm_head: 8 rows have one scale or word, .* holds rows 86 to 172 of 256; choose a smaller --tp-size"
    with pytest.raises(UserError, match=message):
        CausalLM(plan, device="meta")


@pytest.mark.parametrize("scale", [-0.01, 4.0])
def test_scales_that_no_word_holds_beside_a_zero_point(scale: float, tmp_path: Path) -> None:
    save_quantized("qwen3_moe_wide", ZERO_POINT_FORMS["awq_g128"], tmp_path)
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    tensors["model.layers.0.mlp.experts.1.up_proj.scales"][0, 3] = scale
    save_file(tensors, tmp_path / "quantized" / "model.safetensors")
    with pytest.raises(UserError, match=r"layers.0.moe.w13: .* has a scale that is negative, not a number, or 4 or"):
        load_model(plan_for(tmp_path / "quantized"))


# --- the KV cache -----------------------------------------------------------------------------------------------------


def add_kv_scales(folder: Path, names: tuple[str, ...], shape: tuple[int, ...] = (1,)) -> None:
    """Writes scales under the names, of which the first head's are the largest if there are several."""
    tensors = load_file(folder / "quantized" / "model.safetensors")
    for i in range(3):
        for name, value in zip(names, (0.02 * (i + 1), 0.05), strict=False):
            heads = torch.full(shape, value / 2)
            heads.view(-1)[0] = value
            tensors[f"model.layers.{i}.self_attn.{name}"] = heads
    save_file(tensors, folder / "quantized" / "model.safetensors")


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("k_proj.k_scale", "v_proj.v_scale"), (1,)),
        (("k_scale", "v_scale"), (2, 1, 1)),
    ],
    ids=["by layer", "by head"],
)
def test_scales_of_the_cache_are_applied(names: tuple[str, str], shape: tuple[int, ...], tmp_path: Path) -> None:
    form = FORMS["modelopt_fp8"]
    inner = dict(form.modelopt["quantization"]) | {"kv_cache_quant_algo": "FP8"}
    reference = save_quantized("qwen3_wide", replace(form, modelopt={"quantization": inner}), tmp_path)
    add_kv_scales(tmp_path, names, shape)
    plan = plan_for(tmp_path / "quantized")
    assert plan.kv_cache_dtype == "fp8_e4m3", "the checkpoint was made for it"
    runner = TinyRunner(plan)
    for i in range(3):
        cache = runner.model.caches[i]
        assert (cache.k_scale, cache.v_scale) == pytest.approx((0.02 * (i + 1), 0.05))
    want, got = wanted(reference), steps(runner)
    assert (got - want).norm() < 0.2 * want.norm(), "only the cache is rounded"


@pytest.mark.parametrize("at", ["", "qkv_proj.", "k_proj."])
def test_names_of_scales(at: str) -> None:
    layer = "model.layers.0.self_attn"
    for scale in ("k_scale", "v_scale"):
        assert USUAL_NAMES.canonical(f"{layer}.{at.replace('k_proj', f'{scale[0]}_proj')}{scale}") == f"{layer}.{scale}"
        assert USUAL_NAMES.canonical(f"{layer}.{scale[0]}_proj.output_scale") == f"{layer}.{scale}"


def test_scales_that_are_not_used_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized("qwen3_wide", FORMS["fp8_block"], tmp_path)
    add_kv_scales(tmp_path, ("k_scale", "v_scale"))
    with caplog.at_level("INFO", logger="sglang"):
        runner = TinyRunner(plan_for(tmp_path / "quantized", kv_cache_dtype="bf16"))
    assert runner.model.caches[0].k_scale == 1.0, "a cache that is not quantized has no scales"
    assert "scales of the KV cache that are not used: model.layers.0.self_attn.k_scale" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", logger="sglang"):
        TinyRunner(plan_for(tmp_path / "quantized", kv_cache_dtype="fp8_e4m3"))
    assert "not used" not in caplog.text


def test_one_scale_of_keys_and_values(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["fp8_block"], tmp_path)
    add_kv_scales(tmp_path, ("kv_scale",))
    caches = TinyRunner(plan_for(tmp_path / "quantized", kv_cache_dtype="fp8_e4m3")).model.caches
    assert (
        [cache.k_scale for cache in caches] == [cache.v_scale for cache in caches] == pytest.approx([0.02, 0.04, 0.06])
    )


def test_a_checkpoint_that_quantizes_nothing_but_its_cache(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "quantized")
    exact = steps(TinyRunner(plan_for(tmp_path / "quantized")))
    add_kv_scales(tmp_path, ("k_scale", "v_scale"))
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    stated = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    assert plan.kv_cache_dtype == "fp8_e4m3" and runner.model.caches[2].k_scale == pytest.approx(0.06)
    error = (steps(runner) - exact).norm() / exact.norm()
    assert 0 < error < 0.1, "only the cache is rounded"


@pytest.mark.parametrize(("dtype", "factor"), [("fp4_e2m1", 1.0), ("fp8_e4m3", 6.0)])
def test_scales_for_four_bits_in_a_cache_of_eight(dtype: str, factor: float, tmp_path: Path) -> None:
    """They are six times smaller, because a code of four bits has a factor of 6 of its own."""
    form = FORMS["modelopt_fp8"]
    inner = dict(form.modelopt["quantization"]) | {"kv_cache_quant_algo": "NVFP4"}
    save_quantized("qwen3_wide", replace(form, modelopt={"quantization": inner}), tmp_path)
    add_kv_scales(tmp_path, ("k_scale", "v_scale"))
    caches = TinyRunner(plan_for(tmp_path / "quantized", kv_cache_dtype=dtype)).model.caches
    assert (caches[0].k_scale, caches[0].v_scale) == pytest.approx((0.02 * factor, 0.05 * factor))


def test_a_cache_without_scales_in_the_checkpoint(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["fp8_block"], tmp_path)
    runner = TinyRunner(plan_for(tmp_path / "quantized", kv_cache_dtype="fp8_e4m3"))
    assert [cache.k_scale for cache in runner.model.caches] == [1.0] * 3
    assert steps(runner).isfinite().all()


def test_an_impossible_scale_of_the_cache(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["fp8_block"], tmp_path)
    add_kv_scales(tmp_path, ("k_scale", "v_scale"))
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([0.0])
    save_file(tensors, tmp_path / "quantized" / "model.safetensors")
    with pytest.raises(UserError, match=r"scale of the KV cache is 0\.0"):
        TinyRunner(plan_for(tmp_path / "quantized", kv_cache_dtype="fp8_e4m3"))


# --- what is refused --------------------------------------------------------------------------------------------------


def _scale_as(dtype: torch.dtype, leaf: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        name = f"model.layers.0.self_attn.q_proj.{leaf}"
        tensors[name] = tensors[name].float().to(dtype)

    return change


def _wrong_shape(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors[name] = tensors[name].repeat(2, 1)


def _no_scale(tensors: Tensors) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight_scale_inv"]


def _in_16_bits(tensors: Tensors) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "fp8_block",
            _scale_as(torch.int8, "weight_scale_inv"),
            r"q_proj.weight_scale_inv is stored as I8, but .* F32",
        ),
        ("modelopt_nvfp4", _scale_as(torch.uint8, "weight_scale"), r"weight_scale is stored as U8, but .* F8_E4M3"),
        (
            "compressed_mxfp4",
            _scale_as(torch.float32, "weight_scale"),
            r"weight_scale is stored as F32, but .* U8 or F8_E8M0",
        ),
        (
            "compressed_int8",
            _scale_as(torch.int8, "weight_scale"),
            r"weight_scale is stored as I8, but .* calls for F64",
        ),
        ("fp8_block", _in_16_bits, r"q_proj.weight is stored as BF16, but .* calls for F8_E4M3"),
        (
            "fp8_block",
            _wrong_shape,
            r"down_proj.weight_scale_inv has shape \[4, 4\], but config.json calls for \[2, 4\]",
        ),
        ("fp8_block", _no_scale, r"lacks weights of the model: model.layers.2.mlp.up_proj.weight_scale_inv"),
    ],
)
def test_tensors_that_do_not_fit_the_config(
    form: str, change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    save_quantized("qwen3_wide", FORMS[form], tmp_path)
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "quantized" / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_model(plan_for(tmp_path / "quantized"))


def test_a_quantized_checkpoint_without_its_config(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["fp8_block"], tmp_path)
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="stored as F8_E4M3: quantized checkpoints need a quantization_config"):
        load_model(plan_for(tmp_path / "quantized"))


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_input_scales_that_cannot_be(value: float, tmp_path: Path) -> None:
    """Modules of one input share the largest one that can."""
    save_quantized("qwen3_wide", FORMS["modelopt_fp8"], tmp_path)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.input_scale"].fill_(value)
    save_file(tensors, path)
    load_model(plan_for(tmp_path / "quantized"))
    tensors["model.layers.1.mlp.down_proj.input_scale"].fill_(value)
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down: no usable input scale; was the checkpoint calibrated"):
        load_model(plan_for(tmp_path / "quantized"))


def test_columns_that_do_not_divide_into_groups(tmp_path: Path) -> None:
    form = FORMS["compressed_int4_g128"]
    save_quantized("qwen3", FORMS["compressed_int4_g32"], tmp_path)  # hidden size 64
    path = tmp_path / "quantized" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(form.config)}))
    with pytest.raises(UserError, match=r"q_proj: 64 columns do not divide into groups of 128"):
        load_model(plan_for(tmp_path / "quantized"))

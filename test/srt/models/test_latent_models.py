"""Models of latent attention: both ways of attending, and checkpoints as they are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.mla.layer import LatentAttention
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.dense import QuantizedLinear
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.ranks import RankLayout

from .harness import NativePlan, TinyRunner, hf_logits, plan_for, random_tokens, reference_of, save_tiny
from .quantized_checkpoints import FORMS, Tensors, save_quantized

CONFIGS = Path(__file__).parents[1] / "kernels" / "configs"
TOKENS = random_tokens(30, seed=1)
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
WIDE_TOLERANCE = {"rtol": 0.0, "atol": 5e-4}
"""Of sums of hundreds, in another order."""
NUM_LAYERS = 3


def wanted(reference: Path) -> torch.Tensor:
    return hf_logits(reference_of(reference), TOKENS)


def blocks(runner: TinyRunner, layer: int) -> list[Any]:
    """The mixer and the feed-forward block."""
    return [block for _, block in runner.model.layers[layer].blocks]


def steps(runner: TinyRunner) -> torch.Tensor:
    """Logits of TOKENS: a prompt, a second piece over its cache, then token by token."""
    pieces = (runner.extend({2: TOKENS[:18]})[0], runner.extend({2: TOKENS[18:27]})[0])
    return torch.cat((*pieces, *(runner.decode({2: token}) for token in TOKENS[27:])))


# --- two ways, one result ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral4"])
def test_absorbed_and_expanded_prompts(
    name: str, expand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MLA, "expanding_pays", lambda *_: expand)
    ways: list[str] = []
    for way in ("_absorbed", "_expanded"):
        original = getattr(LatentAttention, way)

        def watch(self: Any, *args: Any, way: str = way, original: Callable[..., None] = original) -> None:
            ways.append(way)
            original(self, *args)

        monkeypatch.setattr(LatentAttention, way, watch)
    save_tiny(name, tmp_path)
    runner = TinyRunner(plan_for(tmp_path))
    torch.testing.assert_close(steps(runner), wanted(tmp_path), **TOLERANCE)
    prompts, decodes = ways[: 2 * NUM_LAYERS], ways[2 * NUM_LAYERS :]
    assert set(prompts) == {"_expanded" if expand else "_absorbed"} and set(decodes) == {"_absorbed"}


def logits_of_a_batch(runner: TinyRunner) -> torch.Tensor:
    """Prompts of several lengths over cached prefixes, together."""
    first = runner.extend({1: TOKENS[:7], 3: TOKENS[:1]})
    second = runner.extend({3: TOKENS[1:20], 2: TOKENS, 1: TOKENS[7:9]})
    return torch.cat((*first, *second))


@torch.inference_mode()
def test_the_two_ways_differ_by_rounding_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 they agree. In bfloat16 one is as far from fp32 as the other, and so they differ, as outputs do where two
    tokens are about equally likely: graphs always absorb, other steps may expand."""
    save_tiny("deepseek_v3_wide", tmp_path)
    logits: dict[tuple[str, bool], torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for dtype in ("bfloat16", "float32"):
        for expand in (False, True):
            monkeypatch.setattr(MLA, "expanding_pays", lambda *_, expand=expand: expand)
            runner = TinyRunner(plan_for(tmp_path, dtype=dtype), load_format="dummy")
            for name, param in runner.model.params.items():  # torch 2.11 draws other numbers in 16 bits
                param.tensor.copy_(weights.setdefault(name, param.tensor.bfloat16()))
            logits[dtype, expand] = logits_of_a_batch(runner)
    exact = logits["float32", True]
    torch.testing.assert_close(logits["float32", False], exact, rtol=0.0, atol=1e-5)

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        """Of the median token: of a few another expert is chosen."""
        return float(((got - want).norm(dim=-1) / exact.norm(dim=-1)).median())

    absorbed, expanded = (error(logits["bfloat16", expand], exact) for expand in (False, True))
    between = error(logits["bfloat16", False], logits["bfloat16", True])
    assert 1e-3 < absorbed < 2e-2 and 0.5 < absorbed / expanded < 2.0, (absorbed, expanded)
    assert between < absorbed + expanded, (between, absorbed, expanded)


def test_when_expanding_pays() -> None:
    deepseek = MLA(128, 1536, 512, 128, 64, 128)
    assert deepseek.expanding_pays([0], [1]) and deepseek.expanding_pays([0, 0], [3, 4000])
    longest = 1 << 20
    least = next(new for new in range(1, 1000) if deepseek.expanding_pays([longest], [new]))
    assert least == 171
    assert not deepseek.expanding_pays([longest, 10], [5, 10]) and deepseek.expanding_pays([longest, 0], [5, 200_000])


def test_yarn_scales_the_softmax(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    mixer = plan_for(tmp_path).description.layers[0].mixer
    assert isinstance(mixer, MLA)
    plain = replace(mixer, rope=None).softmax_scale
    assert plain == pytest.approx(24**-0.5)
    assert mixer.softmax_scale == pytest.approx(plain * (0.1 * 1.3862944 + 1) ** 2)


def test_experts_are_chosen_by_sums_that_are_not_rounded(tmp_path: Path) -> None:
    """Of 256 experts several often lie within one step of bfloat16; the published code computes logits in fp32."""
    save_tiny("deepseek_v3", tmp_path)
    runner = TinyRunner(plan_for(tmp_path, dtype="bfloat16"))
    router = blocks(runner, 1)[1].route
    logits: list[torch.Tensor] = []
    original = router.by_score
    router.by_score = lambda values, *args, **options: logits.append(values) or original(values, *args, **options)
    inputs: list[torch.Tensor] = []
    linear = router.linear
    router.linear = lambda x, *args: inputs.append(x) or linear(x, *args)
    runner.extend({1: TOKENS})
    exact = inputs[0].double() @ router.weight.double().T
    assert router.weight.dtype == torch.bfloat16
    assert (logits[0] - exact).abs().max() < 1e-5 < (exact.bfloat16() - exact).abs().max()


def test_a_cache_in_fp8_is_close(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    runner = TinyRunner(plan_for(tmp_path, kv_cache_dtype="fp8_e4m3"))
    assert {store.k.dtype for store in runner.model.caches} == {torch.float8_e4m3fn}
    assert all(store.v.data_ptr() == store.k.data_ptr() for store in runner.model.caches), "values are a view of keys"
    got, want = steps(runner), wanted(tmp_path)
    assert 0 < (got - want).norm() < 0.2 * want.norm()


# --- quantized checkpoints --------------------------------------------------------------------------------------------


def check(folder: Path, **options: Any) -> TinyRunner:
    plan = plan_for(folder / "quantized", **options)
    runner = TinyRunner(plan)
    want = wanted(folder / "reference")
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **WIDE_TOLERANCE)
    allocated = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert allocated == plan.weight_bytes(), "the plan counts other bytes than are allocated"
    return runner


@pytest.mark.parametrize(
    "form",
    ["fp8_block", "modelopt_nvfp4", "compressed_int4_g32", "compressed_fp8_channel", "modelopt_fp8", "gptq_g128"],
)
def test_every_projection_may_be_quantized(form: str, tmp_path: Path) -> None:
    save_quantized("deepseek_v3_wide", FORMS[form], tmp_path)
    runner = check(tmp_path)
    mixer = blocks(runner, 0)[0]
    assert isinstance(mixer.qkv_a.apply, QuantizedLinear) and isinstance(mixer.q_b.apply, QuantizedLinear)
    names = [name for name in runner.model.params if name.startswith("layers.0.attn.kv_b.")]
    assert names == ["layers.0.attn.kv_b.weight"], "what it was unpacked from is kept"
    weight = runner.model.params[names[0]].tensor
    storages = {tensor.untyped_storage().data_ptr() for tensor in (weight, mixer.w_uk, mixer.w_uv)}
    assert weight.dtype == torch.float32 and len(storages) == 1, "W_UK and W_UV are views of one weight"


SPLIT = ("fp8_block", "modelopt_nvfp4", "compressed_int4_g32")


def _rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(size), rank, "gloo", f"file://{folder}/rendezvous")
    for form in SPLIT:
        plan = plan_for(folder / form / "quantized", tp_size=size)
        runner = TinyRunner(plan)
        assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
        assert blocks(runner, 0)[0].w_uk.shape == (2, 128, 512), "heads are shared out"
        torch.save(steps(runner), folder / f"{form}{rank}.pt")
    parallel_state.shutdown()


def test_two_ranks_share_out_the_heads(tmp_path: Path) -> None:
    for form in SPLIT:
        (tmp_path / form).mkdir()
        save_quantized("deepseek_v3_wide", FORMS[form], tmp_path / form)
    run_ranks(_rank, (2, tmp_path), 2)
    for form in SPLIT:
        want = steps(TinyRunner(plan_for(tmp_path / form / "quantized")))
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{form}{rank}.pt"), want, **WIDE_TOLERANCE)


def published(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    path = folder / "quantized" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def add_drafts(tensors: Tensors) -> None:
    """Multi-token prediction: a layer behind the last, of which nothing is read."""
    prefix = f"model.layers.{NUM_LAYERS}."
    copied = {
        name.replace("model.layers.2.", prefix): tensor.clone()
        for name, tensor in tensors.items()
        if "model.layers.2." in name
    }
    tensors |= copied | {prefix + "eh_proj.weight": torch.ones(4, 8), prefix + "shared_head.norm.weight": torch.ones(4)}


def deepseek_v3(folder: Path) -> None:
    form = replace(FORMS["fp8_block"], config=published("deepseek_v3")["quantization_config"])
    save_quantized("deepseek_v3_wide", form, folder)
    rewrite(folder, add_drafts)


def test_deepseek_v3_as_published(tmp_path: Path) -> None:
    deepseek_v3(tmp_path)
    check(tmp_path)


def test_deepseek_v31_nvfp4_as_published(tmp_path: Path) -> None:
    modelopt = json.loads((CONFIGS / "deepseek_v31_nvfp4.hf_quant_config.json").read_text())
    form = replace(FORMS["modelopt_nvfp4"], modelopt=modelopt)
    save_quantized("deepseek_v3_wide", form, tmp_path, keep=("kv_a_proj", "kv_b_proj", "q_a_proj", "q_b_proj"))

    def add_scales(tensors: Tensors) -> None:
        for i in range(NUM_LAYERS):
            for part, value in (("k", 0.5), ("v", 0.25)):
                tensors[f"model.layers.{i}.self_attn.{part}_proj.{part}_scale"] = torch.tensor(value)

    rewrite(tmp_path, add_scales)
    plan = plan_for(tmp_path / "quantized")
    assert plan.kv_cache_dtype == "fp8_e4m3", "the checkpoint was made for it"
    runner = TinyRunner(plan)
    assert {(cache.k_scale, cache.v_scale) for cache in runner.model.caches} == {(0.5, 0.5)}, "a latent has one scale"
    got, want = steps(runner), wanted(tmp_path / "reference")
    assert (got - want).norm() < 0.2 * want.norm(), "only the cache is rounded"
    check(tmp_path, kv_cache_dtype="float32")


KIMI_16_BITS = ("self_attn", "shared_experts", "layers.0.mlp")


def multimodal(folder: Path, name: str) -> None:
    """As Kimi K2.5 is published: the decoder below `language_model.`, an encoder of images, sizes in `text_config`."""
    outer = published(name)
    path = folder / "quantized" / "config.json"
    text = json.loads(path.read_text())
    text.pop("quantization_config", None)
    written = outer["text_config"] | text | {"architectures": outer["text_config"]["architectures"]}
    del written["rope_scaling"]  # the published model's; the tiny one's is in `rope_parameters`
    ends = {"eos_token_id": 2}  # below the tiny vocabulary's size
    path.write_text(json.dumps(outer | ends | {"text_config": written | ends | {"num_nextn_predict_layers": 0}}))

    def move(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[f"language_model.{key}"] = tensors.pop(key)
        tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 4)
        tensors["mm_projector.proj.0.weight"] = torch.ones(4, 4)

    rewrite(folder, move)


def test_kimi_k25_int4_as_published(tmp_path: Path) -> None:
    config = published("kimi_k25")["text_config"]["quantization_config"]
    form = replace(FORMS["compressed_int4_g32"], config=config)
    save_quantized("deepseek_v3_wide", form, tmp_path, keep=KIMI_16_BITS)
    multimodal(tmp_path, "kimi_k25")
    check(tmp_path)


@pytest.mark.parametrize(("name", "keep"), [("kimi_k25_nvfp4", ("self_attn",)), ("kimi_k26_nvfp4", KIMI_16_BITS)])
def test_kimi_nvfp4_as_published(name: str, keep: tuple[str, ...], tmp_path: Path) -> None:
    form = replace(FORMS["modelopt_nvfp4"], modelopt={})
    save_quantized("deepseek_v3_wide", form, tmp_path, keep=keep)
    multimodal(tmp_path, name)
    check(tmp_path, kv_cache_dtype="float32")


def _extra(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.surprise.weight"] = torch.ones(4)


def _missing(tensors: Tensors) -> None:
    del tensors["model.layers.1.self_attn.kv_b_proj.weight_scale_inv"]


def _misshaped(tensors: Tensors) -> None:
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    tensors[name] = tensors[name][:-64].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_extra, r"weights that the model does not have: model\.layers\.1\.self_attn\.surprise\.weight"),
        (_missing, r"lacks weights of the model: model\.layers\.1\.self_attn\.kv_b_proj\.weight_scale_inv"),
        (_misshaped, r"kv_a_proj_with_mqa\.weight has shape \[512, 256\], but config.json calls for \[576, 256\]"),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    deepseek_v3(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        load_model(plan_for(tmp_path / "quantized"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", True), ("topk_method", "greedy"), ("scoring_func", "softmax"), ("moe_layer_freq", 2)],
)
def test_values_that_are_not_computed(key: str, value: object, tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"{key} = {value!r} is not supported for DeepseekV3ForCausalLM"):
        _ = NativePlan(plan_for(tmp_path).model).description

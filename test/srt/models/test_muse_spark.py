"""Muse-Spark: logits of a plain reference in every kind of step, on ranks and in quantized forms, and what is refused.
Stages are in `test_muse_spark_schedules`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from rank_processes import run_ranks

from sglang import explain
from sglang.srt.blocks.gated_sum.spec import GatedSum
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.configs.layer_lists import UNROTATED
from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.cpu_experts import why_not_this_model
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.server_args import ServerArgs

from . import test_dspark_drafts
from .draft_harness import plan_with_draft
from .harness import TinyRunner, plan_for
from .ling3_reference import save
from .muse_spark_reference import AT, CONFIG, MuseSpark, weights, with_text
from .quantized_checkpoints import FORMS, PROJECTIONS, join_experts, split_experts, write_model
from .test_ling3 import CLOSE, TOKENS, steps

PUBLISHED = Path(__file__).parents[1] / "kernels" / "published" / "Muse-Spark-Open-816B-A42B"


def test_logits_of_the_reference(tmp_path: Path) -> None:
    tensors = weights()
    plan = plan_for(save(tmp_path, CONFIG, tensors))
    assert plan.description.unsupported == ()
    runner, want = TinyRunner(plan), MuseSpark(tensors, CONFIG).logits(TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **CLOSE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_the_reference_computes_what_transformers_does() -> None:
    """transformers has the class from 5.24 on."""
    config_class = getattr(transformers, "MuseSparkTextConfig", None)
    assert (config_class is None) == (Version(transformers.__version__) < Version("5.24"))
    if config_class is None:
        return
    model = transformers.AutoModel.from_config(config_class(**CONFIG["text_config"]), dtype=torch.float32).eval()
    tensors = weights()
    model.load_state_dict({name.removeprefix(AT): tensor for name, tensor in tensors.items() if name.startswith(AT)})
    with torch.no_grad():
        hidden = model(torch.tensor([TOKENS])).last_hidden_state[0]
    logits = CONFIG["text_config"]["output_multiplier"] * (hidden @ tensors["lm_head.weight"].T)
    capped = 20.0 * torch.tanh(logits / 20.0)
    torch.testing.assert_close(MuseSpark(tensors, CONFIG).logits(TOKENS), capped, **CLOSE)


@pytest.mark.parametrize("mechanism", ["norms of experts", "norm of outputs", "gates", "kept"])
def test_each_mechanism_changes_what_comes_out(mechanism: str) -> None:
    """Otherwise the tests above would say nothing about it."""
    tensors = weights()
    both = (MuseSpark(tensors, CONFIG, left_out).logits(TOKENS) for left_out in ((), (mechanism,)))
    assert (next(both) - next(both)).abs().max() > 0.01


LAYOUTS: Mapping[str, RankLayout] = {
    "EP2": RankLayout(2, 2),
    "EP3": RankLayout(3, 3),
    "EP4": RankLayout(4, 4),
}
"""Three ranks divide the 48 dims that experts take, but not the 64 of hidden states."""


@pytest.mark.parametrize(
    "layout", ["EP2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("EP3", "EP4"))]
)
def test_ranks_give_the_logits_of_one(layout: str, tmp_path: Path) -> None:
    """Heads are divided unevenly over three ranks, and two of them hold the same KV head."""
    ranks = LAYOUTS[layout]
    save(tmp_path, CONFIG, weights())
    run_ranks(_rank, (ranks, tmp_path), ranks.tp_size)
    want = steps(TinyRunner(plan_for(tmp_path)))
    for rank in range(ranks.tp_size):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), want, **CLOSE)


def _rank(rank: int, ranks: RankLayout, folder: Path) -> None:
    torch.set_num_threads(1)
    parallel_state.init(ranks, rank, "gloo", f"file://{folder}/rendezvous")
    plan = plan_for(folder, tp_size=ranks.tp_size, ep_size=ranks.ep_size)
    runner = TinyRunner(plan)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
    torch.save(steps(runner), folder / f"{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize("form", ["modelopt_nvfp4", pytest.param("fp8_block", marks=pytest.mark.thorough)])
def test_ranks_divide_the_projections_in_their_quantized_form(form: str, tmp_path: Path) -> None:
    """NVFP4 by rows; blocks of 128 rows stay whole on every rank."""
    ranks = RankLayout(2, 2)
    publish(form, tmp_path)
    folder = tmp_path / "quantized"
    run_ranks(_rank, (ranks, folder), ranks.tp_size)
    want = steps(TinyRunner(plan_for(folder)))
    for rank in range(ranks.tp_size):
        torch.testing.assert_close(torch.load(folder / f"{rank}.pt"), want, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize(("form", "share"), [("", 64), ("modelopt_nvfp4", 64), ("fp8_block", 128)])
def test_shares_of_the_projections_cut_no_scales(form: str, share: int, tmp_path: Path) -> None:
    if form:
        publish(form, tmp_path)
    else:
        save(tmp_path / "quantized", WIDE, {})
    of_rank = plan_for(tmp_path / "quantized", tp_size=2, ep_size=2).weights
    sizes = [(part.rows, part.cols) for part in (of_rank.matrix(1, f"moe.latent_{end}") for end in ("in", "out"))]
    assert sizes == [(share, 128)] * 2


@pytest.mark.parametrize("ranks", [RankLayout(2), RankLayout(4, 2)], ids=["TP2", "TP4 x EP2"])
def test_an_expert_stays_on_one_rank(ranks: RankLayout, tmp_path: Path) -> None:
    """Its output is normed as a whole."""
    model = plan_for(save(tmp_path, CONFIG, {})).description
    works = f"--tp-size {ranks.tp_size} --ep-size {ranks.tp_size}"
    with pytest.raises(UserError, match=f"divides an expert among 2 ranks, .* normed as a whole; what works: {works}"):
        check_layout(model, ranks)
    check_layout(model, RankLayout(ranks.tp_size, ranks.tp_size))


def test_cpus_compute_none_of_its_experts(tmp_path: Path) -> None:
    model = plan_for(save(tmp_path, CONFIG, {})).description
    assert "each output of this model's is normed before" in why_not_this_model(model, "bfloat16")


WIDE = with_text(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    layer_types=["sliding_attention", "full_attention"],
    layer_rope_theta=[6000.0, 0],
    mlp_layer_types=["dense", "sparse"],
    moe_intermediate_size=128,
    moe_hidden_size=128,
    num_local_experts=4,
    num_experts_per_tok=2,
)
_STORED = ("modelopt_nvfp4", "fp8_block", "compressed_fp8_channel", "compressed_int4_g128", "compressed_mxfp4", "mxfp8")
_QUANTIZED = ("pre_expert_proj", "post_expert_proj", *PROJECTIONS)


def publish(form: str, folder: Path) -> MuseSpark:
    """Writes WIDE in a quantized form, expert by expert, to `folder`/quantized. Returns what it stands for."""
    tensors, stored = weights(WIDE), {}
    split_experts(tensors, columns_first=False)
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or module.rpartition(".")[2] not in _QUANTIZED:
            stored[name] = tensor
            continue
        made, tensors[name] = FORMS[form].write(tensor)
        stored |= {f"{module}.{part}": value.contiguous() for part, value in made.items()}
    join_experts(tensors, columns_first=False)
    save(folder / "reference", WIDE, {})
    write_model(folder, stored, FORMS[form])
    return MuseSpark(tensors, WIDE)


@pytest.mark.parametrize("form", _STORED)
def test_quantized_forms_compute_what_they_stand_for(form: str, tmp_path: Path) -> None:
    reference = publish(form, tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), reference.logits(TOKENS), rtol=0.0, atol=2e-3)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_layers_of_the_published_config() -> None:
    model = plan_for(PUBLISHED).description
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GQA)]
    assert [mixer.window for mixer in mixers] == [2048, 0, *[2048, 2048, 2048, 0] * 15]
    kinds = {(m.window, m.rope.kind, m.rope.theta) for m in mixers if m.rope is not None}
    assert kinds == {(2048, "default", 500000.0), (0, UNROTATED, 0.0)}
    assert mixers[0].softmax.scale == pytest.approx(5.4730064863875 * 64**-0.5)
    first = model.layers[0]
    assert isinstance(first.ffn, MoE) and (first.ffn.latent_size, first.ffn.num_experts) == (4096, 256)
    assert first.residual == GatedSum(0.3, 1e-8)
    assert (model.logits.cap, model.logits.scale) == (20.0, pytest.approx(32**-0.5))


EIGHT_MACHINES = "--tp 8 --ep 8 --nnodes 8 --dist-init-addr 10.0.0.1:20000"


@pytest.mark.parametrize(
    ("product", "flags", "starts"),
    [
        *(("rtx-pro-6000-server", f"--tp {cards} --ep {cards}", cards == 8) for cards in (1, 2, 4, 8)),
        ("gb10", "", False),
        ("gb10", EIGHT_MACHINES, True),
    ],
)
def test_plans_of_the_published_config(product: str, flags: str, starts: bool) -> None:
    """Its experts in NVFP4, the rest in 16 bits. A GB10 is a machine of its own."""
    args = ServerArgs.from_cli(["--model-path", f"{PUBLISHED}-NVFP4", *flags.split()])
    explained = explain.explain(args, arch_by_name(product), frozenset({"triton"}), advises=False)
    assert explained.missing == () and explained.refused is None
    assert (explained.unfit is None) == starts, explained.unfit


def test_its_own_draft_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is known here of `MuseSparkDSparkModel` but its name."""
    save(tmp_path / "target", CONFIG, weights())
    config = test_dspark_drafts.CONFIG | {"architectures": ["MuseSparkDSparkModel"]}
    save(tmp_path / "draft", config, test_dspark_drafts.weights(config))
    message = "the draft architecture MuseSparkDSparkModel is not supported for DSPARK.* use NGRAM"
    with pytest.raises(UserError, match=message):
        plan_with_draft(tmp_path / "target", "DSPARK", tmp_path / "draft")


LEFT_OUT = ("layer_types", "layer_rope_theta", "mlp_layer_types", "post_norm_eps", "residual_gate_temperature")


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    """Windows are then counted from the last layer, and all layers have experts."""
    config = with_text(mlp_layer_types=["sparse"] * 5)
    text = {key: value for key, value in config["text_config"].items() if key not in LEFT_OUT}
    plans = [plan_for(save(tmp_path / str(n), c, {})) for n, c in enumerate((config, CONFIG | {"text_config": text}))]
    assert plans[0].description.layers == plans[1].description.layers


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 6000.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("keys", "rotation"),
    [
        ({"layer_rope_theta": None, "rope_parameters": None}, ("default", 500000.0)),
        ({"layer_rope_theta": None, "rope_parameters": YARN}, ("yarn", 6000.0)),
        ({"rope_parameters": YARN, "yarn_only_types": ["sliding_attention"]}, ("yarn", 6000.0)),
    ],
)
def test_how_windows_rotate(keys: dict[str, Any], rotation: tuple[str, float], tmp_path: Path) -> None:
    layers = plan_for(save(tmp_path, with_text(**keys), {})).description.layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, GQA)]
    assert {(m.rope.kind, m.rope.theta) for m in mixers if m.rope is not None and m.window} == {rotation}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"residual_gate_temperature": 0.0}, "residual_gate_temperature = 0.0 is not supported: it must be above 0"),
        ({"layer_rope_theta": [0, 0, 1e4, 1e4, 0]}, "'layer_rope_theta' differs between layers of the type"),
        (
            {"rope_parameters": YARN},
            "'yarn' is for full_attention, of which no heads rotate; name .* 'yarn_only_types'",
        ),
        ({"num_experts_per_tok": 9}, "9 experts cannot be chosen"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"n_group": 2, "topk_group": 2}, "n_group = 2 is not supported .*\n.* topk_group = 2 is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0 is not supported"),
        ({"per_layer_config": {"0": {"kv_lora_rank": 8}}}, "'per_layer_config' with kv_lora_rank is not described"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        plan_for(save(tmp_path, with_text(**keys), {})).description.require_served()

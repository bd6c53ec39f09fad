"""Checkpoints in the published layout, whole, sharded and broken."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Param
from sglang.srt.model_loader import loader
from sglang.srt.model_loader.loader import fill_random, load_model
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.stages import cut_stages
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.plan.weights import matrix_bytes

from ..models.harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe_mixed")
    save_tiny("qwen3_moe_mixed", folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _shard(folder: Path, count: int = 3) -> dict[str, str]:
    """Split model.safetensors and write its index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, folder / file)
        weight_map |= dict.fromkeys(names[i::count], file)
    _write_index(folder, weight_map)
    return weight_map


def _write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_sharded_checkpoint_holds_the_same_model(saved: Path, copy: Path) -> None:
    _shard(copy)
    whole, sharded = load_model(plan_for(saved)), load_model(plan_for(copy))
    assert whole.params.keys() == sharded.params.keys()
    for name, param in whole.params.items():
        assert torch.equal(param.tensor, sharded.params[name].tensor), name


def test_weights_are_converted_to_the_planned_dtype(saved: Path) -> None:
    model = load_model(plan_for(saved, dtype="bfloat16"))
    want = load_file(saved / "model.safetensors")["model.layers.1.mlp.experts.2.up_proj.weight"]
    w13 = model.params["layers.1.moe.w13.weight"].tensor
    assert w13.dtype == torch.bfloat16
    assert torch.equal(w13[2, 32:], want.bfloat16())


def test_known_tensors_that_are_no_weights_are_passed_over(tmp_path: Path) -> None:
    reference = save_tiny("qwen3_tied_bias", tmp_path)
    extra = {
        "lm_head.weight": torch.full((251, 64), 9.0),
        "lm_head.weight_scale": torch.ones(251, 1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
    }
    _edit(tmp_path, lambda tensors: tensors.update(extra))
    tokens = random_tokens(9, seed=0)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-4)


def test_a_checkpoint_without_a_head_has_shorter_names(tmp_path: Path) -> None:
    """As those of embedding models, which were saved without one."""
    reference = save_tiny("qwen3_tied_bias", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    tokens = random_tokens(9, seed=0)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-4)


def _add_unknown(tensors: Tensors) -> None:
    tensors.update({f"model.layers.0.self_attn.extra{i}.weight": torch.ones(1) for i in range(12)})


def _add_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.eye(64)[3]


def _drop(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.experts.3.gate_proj.weight"], tensors["model.norm.weight"]


def _reshape(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(32, 64)


def _quantize(tensors: Tensors) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_add_unknown, r"has weights that the model does not have: .*extra0\.weight, .*\(12 in total\)"),
        (_add_bias, r"has weights that the model does not have: model\.layers\.1\.self_attn\.o_proj\.bias$"),
        (
            _drop,
            r"lacks weights of the model: model.layers.1.mlp.experts.3.gate_proj.weight, model.norm.weight",
        ),
        (
            _reshape,
            r"model.layers.0.self_attn.k_proj.weight has shape \[32, 64\], but config.json calls for \[64, 64\]",
        ),
        (_quantize, r"k_proj.weight is stored as F8_E4M3"),
    ],
)
def test_other_weights_than_the_models_are_refused_by_name(
    copy: Path, change: Callable[[Tensors], None], message: str
) -> None:
    _edit(copy, change)
    with pytest.raises(UserError, match=message):
        load_model(plan_for(copy))


def test_missing_shards_are_named(copy: Path) -> None:
    _shard(copy)
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"do not exist: model-00002-of-00003\.safetensors\. Is the download complete"):
        load_model(plan_for(copy))


def test_an_index_that_disagrees_with_its_files_is_refused(copy: Path) -> None:
    weight_map = _shard(copy)
    other = next(file for file in weight_map.values() if file != weight_map["lm_head.weight"])
    _write_index(copy, weight_map | {"lm_head.weight": other})
    with pytest.raises(UserError, match=r"(lacks|has) tensors that .* lm_head\.weight"):
        load_model(plan_for(copy))
    del weight_map["lm_head.weight"]
    _write_index(copy, weight_map)
    with pytest.raises(UserError, match=r"has tensors that .* does not name there: lm_head\.weight"):
        load_model(plan_for(copy))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "has the entry 'a' twice"),
        ('{"weight_map": {"a": ', "is not valid JSON"),
        ('{"weight_map": ["a"]}', "has no 'weight_map'"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "weight_map names '../x.safetensors'"),
        ('{"weight_map": {"a": "b/../../x.safetensors"}}', "weight_map names 'b/../../x.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "weight_map names '/etc/passwd'"),
        ('{"weight_map": {"a": ""}}', "weight_map names ''"),
        ("[" * 100_000, "is not valid JSON"),
        ("\xff", "is not valid JSON"),
    ],
)
def test_a_broken_index_is_refused(copy: Path, text: str, message: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        load_model(plan_for(copy))


def test_files_that_are_no_safetensors_are_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_model(plan_for(copy))
    path.rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"it has pytorch_model\.bin\. Only weights in safetensors or GGUF"):
        load_model(plan_for(copy))


def test_dummy_weights_need_no_files_and_stay_finite(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    plan = plan_for(copy, dtype="bfloat16", load_format="dummy")
    runner = TinyRunner(plan, load_format="dummy")
    logits = runner.extend({1: random_tokens(30, seed=0)})[0]
    assert logits.isfinite().all() and logits.std() > 1e-3
    again = load_model(plan, "dummy").params
    other = load_model(plan, "dummy", seed=1).params
    name = "layers.0.attn.qkv.weight"
    assert torch.equal(runner.model.params[name].tensor, again[name].tensor)
    assert not torch.equal(other[name].tensor, again[name].tensor)
    assert not torch.equal(again["layers.1.attn.qkv.weight"].tensor, again[name].tensor)
    assert (again["layers.0.attn.q_norm.weight"].tensor == 1).all()


def test_an_unknown_load_format_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="'pt' is not supported; supported: auto, safetensors, gguf, dummy"):
        load_model(plan_for(saved), "pt")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"],
)
def test_weights_that_are_not_finite_are_named(copy: Path, name: str, value: float) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[name].view(-1)[7] = value

    _edit(copy, damage)
    with pytest.raises(UserError) as error:
        load_model(plan_for(copy))
    assert f"NaN or infinite: {name}." in str(error.value)


def test_a_dtype_that_is_too_narrow_is_named(copy: Path) -> None:
    _edit(copy, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    load_model(plan_for(copy, dtype="bfloat16"))
    with pytest.raises(UserError, match=r"model\.norm\.weight.*--dtype"):
        load_model(plan_for(copy, dtype="float16"))


def test_what_kernels_arrange_anew_is_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 64 four-bit weights are padded to planes of 128, in other memory."""
    save_tiny("gpt_oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored: dict[str, weakref.ref[torch.Tensor]] = {}

    def watch(params: dict[str, Param], seed: int) -> None:
        stored.update({name: weakref.ref(param.tensor) for name, param in params.items()})
        fill_random(params, seed)

    monkeypatch.setattr(loader, "fill_random", watch)
    model = load_model(plan_for(tmp_path, load_format="dummy"), "dummy")
    weights = model.layers[0].blocks[-1][1].experts.w13
    assert weights.plane_cols == 64 and weights.data.shape[-1] == 128 // 8
    gone = {name for name, tensor in stored.items() if tensor() is None}
    assert {name.split(".", 2)[2] for name in gone} >= {"moe.w13.gate_up_proj_blocks", "moe.w2.down_proj_blocks"}
    # and the memory plan knows it
    matrix, quant = Matrix("moe.w2", ("down",), 96, 64, experts=4), ModuleQuant("mxfp4", "mxfp4")
    assert matrix_bytes(matrix, quant, 2, {"block_scaled_mma"}) == 2 * matrix_bytes(matrix, quant, 2)


LAYOUTS = {"shares": RankLayout(2), "whole experts": RankLayout(2, 2), "stages": RankLayout(pp_size=2)}


@pytest.mark.parametrize("ranks", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rank_reads_only_what_it_holds(ranks: RankLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3_moe", tmp_path)
    fill, read = loader.fill_part, []

    def watched(*args: Any) -> int:
        read.append(fill(*args))
        return read[-1]

    monkeypatch.setattr(loader, "fill_part", watched)
    whole = (tmp_path / "model.safetensors").stat().st_size
    for rank in range(2):
        groups = groups_of(ranks, rank)
        monkeypatch.setattr(parallel_state, "groups", lambda groups=groups: groups)
        read.clear()
        plan = plan_for(tmp_path, tp_size=ranks.tp_size, ep_size=ranks.ep_size)
        stages = cut_stages(rank_weights(plan.description, ranks), plan.dtype)
        plan.__dict__["description"] = stages[ranks.stage(rank)].model  # a cached property
        model = load_model(plan)
        assert sum(read) == sum(p.tensor.nbytes for p in model.params.values()) == plan.weight_bytes() < 0.75 * whole
    assert len(stages) == ranks.pp_size

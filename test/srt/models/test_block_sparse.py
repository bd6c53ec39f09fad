"""MiniMax-M3 beyond parity: every cut of a prompt, other numbers of blocks, names and formats as they are published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.errors import UserError
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.pool_checks import with_pages
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.server_args import ServerArgs

from .harness import NativePlan, TinyRunner, blocks_of, hf_logits, plan_for, random_tokens, save_tiny
from .quantized_checkpoints import FORMS, PROJECTIONS, Tensors, Write, nvfp4_compressed, nvfp4_modelopt, plain

EXACT = {"rtol": 0.0, "atol": 1e-4}
WIDE = {"rtol": 0.0, "atol": 1e-3}
"""Of sums of hundreds, in another order."""
LENGTH = 37
"""Nine blocks of 4 tokens and a part of one, of which three are chosen."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> NativePlan:
    folder = tmp_path_factory.mktemp("m3")
    save_tiny("minimax_m3", folder)
    return plan_for(folder)


# --- the same tokens in other steps -----------------------------------------------------------------------------------


def test_every_cut_of_a_prompt_gives_the_same_logits(plan: NativePlan) -> None:
    runner, tokens = TinyRunner(plan), random_tokens(LENGTH, seed=1)
    whole = runner.extend({1: tokens})[0]
    for cut in range(1, LENGTH):
        parts = [runner.extend({2: tokens[:cut]})[0], runner.extend({2: tokens[cut:]})[0]]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)
    one_by_one = [runner.extend({3: tokens[:1]})[0][0], *(runner.decode({3: token})[0] for token in tokens[1:])]
    torch.testing.assert_close(torch.stack(one_by_one), whole, **EXACT)


def test_chunks_of_every_size_beside_strangers(plan: NativePlan) -> None:
    runner, tokens = TinyRunner(plan), random_tokens(LENGTH, seed=1)
    whole = runner.extend({1: tokens})[0]
    for size in range(2, 18):
        parts = [
            runner.extend({3: random_tokens(size, seed=size), 2: tokens[first : first + size]})[1]
            for first in range(0, LENGTH, size)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)
        runner.end(3)


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_blocks": 1},
        {"index_topk_blocks": 4, "index_local_blocks": 2},
        {"index_topk_blocks": 64},
        {"index_block_size": 8, "index_topk_blocks": 2, "index_head_dim": 16},
    ],
    ids=str,
)
def test_other_numbers_of_blocks(changes: dict[str, int], tmp_path: Path) -> None:
    reference = save_tiny("minimax_m3", tmp_path, **changes)
    tokens = random_tokens(90, seed=2)
    runner = TinyRunner(plan_for(tmp_path))
    got = torch.cat((runner.extend({1: tokens[:70]})[0], *(runner.decode({1: token}) for token in tokens[70:])))
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-3)


def test_the_selection_counts(tmp_path: Path) -> None:
    """Without it the same weights say something else, where tokens have more than is selected to see."""
    save_tiny("minimax_m3", tmp_path / "some")
    save_tiny("minimax_m3", tmp_path / "all", index_topk_blocks=64)
    tokens = random_tokens(60, seed=2)
    some, every = (TinyRunner(plan_for(tmp_path / name)).extend({1: tokens})[0] for name in ("some", "all"))
    torch.testing.assert_close(some[:12], every[:12], **EXACT)
    assert (some[12:] - every[12:]).abs().amax(-1).min() > 1e-3


def test_what_is_not_longer_than_a_selection_is_not_scored(plan: NativePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, tokens = TinyRunner(plan), random_tokens(40, seed=1)
    scored: list[int] = []
    for selector in filter(None, (blocks_of(layer)[0].indexer for layer in runner.model.layers)):
        select = selector.select
        monkeypatch.setattr(
            selector, "select", lambda *args, select=select: (scored.append(len(args[2])), select(*args))[1]
        )
    runner.extend({1: tokens[:8], 3: tokens[:3]})
    for i in range(8, 12):
        runner.decode({1: tokens[i]})
    assert scored == [], "12 tokens are selected"
    runner.decode({1: tokens[12], 3: tokens[3]})
    assert scored == [2, 2], "by two layers, for both requests of the step"


# --- caches and configs -----------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).parents[1] / "kernels/published/MiniMax-M3/config.json"


def published(**changes: Any) -> dict[str, Any]:
    """The published sizes, with an architecture that is served and other values inside sparse_attention_config."""
    config = json.loads(PUBLISHED.read_text())
    config["architectures"] = ["MiniMaxM3SparseForCausalLM"]
    inner = {key: value for key, value in changes.items() if key.startswith(("sparse_", "use_sparse", "odd_"))}
    config |= {key: value for key, value in changes.items() if key not in inner}
    config["sparse_attention_config"] |= inner
    return config


def test_a_token_takes_137_472_bytes_and_a_page_is_a_block() -> None:
    model = describe_model(published(), None)
    (group,) = cache_groups(model, ParallelConfig("bfloat16", "bfloat16"))
    assert group.bytes_per_token == 60 * 4 * 2 * 256 + 57 * 256 == 137_472
    assert group.page_multiple == 128
    (quantized,) = cache_groups(model, ParallelConfig("bfloat16", "fp8_e4m3"))
    assert quantized.bytes_per_token == 60 * 4 * 256 + 57 * 256, "index keys stay in 16 bits"
    (shared,) = cache_groups(model, ParallelConfig("bfloat16", "bfloat16", ranks=RankLayout(8)))
    assert shared.bytes_per_token == 60 * 2 * 256 + 57 * 256, "a KV head on two ranks, the index key on all"
    indexers = [layer.mixer.indexer for layer in model.layers if isinstance(layer.mixer, GQA)]
    assert indexers == [None] * 3 + [BlockIndexer(128, 128, 16)] * 57


def test_pages_hold_whole_blocks() -> None:
    model, serving = describe_model(published(), None), ParallelConfig("bfloat16", "bfloat16")
    args = ServerArgs(model_path="m")
    assert with_pages(args, model, serving).page_size == 128
    sized = replace(serving, page_size=256)
    assert with_pages(replace(args, page_size=256), model, sized) == sized
    with pytest.raises(UserError, match="--page-size 64 must be a multiple of 128"):
        with_pages(replace(args, page_size=64), model, replace(serving, page_size=64))


def test_attention_without_blocks_is_described_too() -> None:
    model = describe_model(published(use_sparse_attention=False), None)
    assert not model.unsupported and all(layer.mixer.top_k == 0 for layer in model.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_num_index_heads": 2}, "2 index heads for 4 KV heads"),
        ({"sparse_attention_freq": [0, 1]}, "2 entries for 60 layers"),
        ({"sparse_attention_freq": ["a"] * 60}, "list of 0 and 1"),
        ({"sparse_topk_blocks": 1, "sparse_local_block": 2}, "2 local blocks are more than the 1 chosen"),
        ({"odd_key": 1}, "keys odd_key are not described"),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe_model(published(**changes), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_score_type": "mean"}, "sparse_score_type = 'mean'"),
        ({"sparse_init_block": 1}, "sparse_init_block = 1"),
        ({"sparse_disable_index_value": [0] * 60}, "indexer has values"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type"),
        ({"attention_output_gate": True}, "attention_output_gate"),
        ({"use_gemma_norm": False}, "use_gemma_norm"),
    ],
)
def test_values_that_are_not_computed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe_model(published(**changes), None).require_served()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_names_are_those_that_transformers_reads(tmp_path: Path) -> None:
    """Its class for the published architecture renames published names, as it does for published checkpoints."""
    save_tiny("minimax_m3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config["vision_config"] |= {"num_attention_heads": 2, "image_size": 28}
    config |= {"projector_hidden_size": 16, "image_token_index": 250, "video_token_index": 251}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference = transformers.MiniMaxM3SparseForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_tokens(40, seed=3)
    plan = plan_for(tmp_path)
    torch.testing.assert_close(TinyRunner(plan).extend({1: tokens})[0], hf_logits(reference.eval(), tokens), **EXACT)


def test_a_checkpoint_of_the_language_model_alone(tmp_path: Path, plan: NativePlan) -> None:
    save_tiny("minimax_m3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("vision")}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    tokens = random_tokens(30, seed=3)
    got, want = (TinyRunner(other).extend({1: tokens})[0] for other in (plan_for(tmp_path), plan))
    assert torch.equal(got, want)


EXPERT = re.compile(r".*\.experts\.\d+\.w[123]")
QUANTIZED = (*PROJECTIONS, "index_q_proj", "index_k_proj")


def save_m3(folder: Path, writer: Callable[[str], Write | None], config: dict[str, Any]) -> list[str]:
    """The tiny model in `folder`/quantized with the tensors that `writer` makes of each module, and with those that
    they stand for in `folder`/reference. Returns the quantized modules."""
    save_tiny("minimax_m3_wide", folder / "reference")
    tensors, stored, modules = load_file(folder / "reference/model.safetensors"), Tensors(), []
    for name in [name for name in tensors if name.endswith(".w1.weight")]:  # of one global scale
        gate, up = tensors[name], tensors[name.replace(".w1.", ".w3.")]
        gate[0, 0] = up[0, 0] = torch.stack((gate, up)).abs().max()
    for name, tensor in list(tensors.items()):
        module, _, leaf = name.rpartition(".")
        write = writer(module) if leaf == "weight" and module.rpartition(".")[2] in QUANTIZED else None
        if write is None:
            stored[name] = tensor
            continue
        made, tensors[name] = write(tensor)
        stored |= {f"{module}.{leaf}": value.contiguous() for leaf, value in made.items()}
        modules.append(module)
    save_file(tensors, folder / "reference/model.safetensors")
    (folder / "quantized").mkdir()
    save_file(stored, folder / "quantized/model.safetensors")
    written = json.loads((folder / "reference/config.json").read_text()) | {"quantization_config": config}
    (folder / "quantized/config.json").write_text(json.dumps(written))
    return modules


def mixed_precision(folder: Path) -> None:
    """As ModelOpt exports M3: every linear layer is listed, experts one at a time."""
    base = FORMS["modelopt_mxfp8"].write
    modules = save_m3(folder, lambda module: nvfp4_modelopt if EXPERT.fullmatch(module) else base, {})
    fp4 = {"quant_algo": "NVFP4", "group_size": 16}
    layers = {module: fp4 if EXPERT.fullmatch(module) else {"quant_algo": "MXFP8"} for module in modules}
    gates = [f"language_model.model.layers.{i}.block_sparse_moe.gate" for i in (1, 2)]
    excluded = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp", *gates]
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "exclude_modules": excluded}
    inner |= {"quantized_layers": layers, "quant_method": "modelopt"}
    config = json.loads((folder / "quantized/config.json").read_text()) | {"quantization_config": inner}
    (folder / "quantized/config.json").write_text(json.dumps(config))
    (folder / "quantized/hf_quant_config.json").write_text(json.dumps({"quantization": inner}))


MXFP8_CONFIG = {
    "quant_method": "mxfp8",
    "weight_block_size": [1, 32],
    "modules_to_not_convert": ["lm_head", "gate", "vision_tower", "multi_modal_projector", "patch_merge_mlp"],
}


def mxfp8(folder: Path) -> None:
    save_m3(folder, lambda module: plain("mxfp8", "weight_scale_inv"), MXFP8_CONFIG)


def packed_experts(folder: Path) -> None:
    """M3.1: MXFP8 by the method's name, and what the experts are beside it."""
    experts = {"moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized", "kv_cache_quant_algo": "FP8"}
    base = plain("mxfp8", "weight_scale_inv")
    save_m3(folder, lambda module: nvfp4_compressed if EXPERT.fullmatch(module) else base, MXFP8_CONFIG | experts)


@pytest.mark.parametrize(
    ("save", "schemes", "expert_scheme"),
    [
        (mixed_precision, {"mxfp8", "nvfp4"}, "nvfp4"),
        (mxfp8, {"mxfp8"}, "mxfp8"),
        (packed_experts, {"mxfp8", "nvfp4_a16"}, "nvfp4_a16"),
    ],
)
def test_published_formats(save: Callable[[Path], None], schemes: set[str], expert_scheme: str, tmp_path: Path) -> None:
    save(tmp_path)
    plan = plan_for(tmp_path / "quantized", kv_cache_dtype="float32")
    quantization, experts = plan.description.quantization, plan.description.expert_quant
    assert quantization is not None and quantization.schemes() == schemes
    assert experts is not None and experts.scheme == expert_scheme
    assert (quantization.kv_cache == "fp8_e4m3") == (save is packed_experts)
    tokens = random_tokens(80, seed=5)
    runner = TinyRunner(plan)
    want = TinyRunner(plan_for(tmp_path / "reference")).extend({1: tokens})[0]
    assert want.std() > 0.1
    got = torch.cat((runner.extend({1: tokens[:60]})[0], *(runner.decode({1: token}) for token in tokens[60:])))
    torch.testing.assert_close(got, want, **WIDE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.parametrize(
    "change", [{"moe_quant_algo": "FP8"}, {"moe_quant_format": "other"}, {"moe_group_size": 32}], ids=str
)
def test_experts_in_a_form_that_nobody_reads(change: dict[str, Any], tmp_path: Path) -> None:
    packed_experts(tmp_path)
    file = tmp_path / "quantized/config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="moe_quant_algo .* with moe_quant_format"):
        plan_for(tmp_path / "quantized")

"""MiMo-V2-Flash as published: keys and names of its own, FP8 in blocks, layers for drafts behind the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.configs.quantization import detect
from sglang.srt.errors import UserError
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.ranks import RankLayout

from .harness import TinyRunner, plan_for
from .quantized_checkpoints import FORMS, save_quantized
from .ranks_alike import assert_ranks_alike
from .test_quantized import TOLERANCE, steps, wanted
from .test_quantized_hybrids import EXPERTS, Published, beside_blocks, publish

PUBLISHED = Path(__file__).parents[1] / "kernels" / "published" / "MiMo-V2-Flash" / "config.json"


def as_published(folder: Path) -> None:
    """Writes the keys of published configs in place of those of transformers, and a tensor that only drafts use."""
    config = json.loads((folder / "config.json").read_text())
    kinds, dense = config.pop("layer_types"), config.pop("mlp_layer_types")
    rope = config.pop("rope_parameters")
    config |= {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in dense],
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "routed_scaling_factor": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.1.self_attn.attention_sink_bias" in tensors, "the name in published checkpoints"
    save_file(tensors | {"model.mtp.layers.0.eh_proj.weight": torch.ones(4)}, folder / "model.safetensors")


def test_the_published_form_computes_what_it_stands_for(tmp_path: Path) -> None:
    reference = save_quantized("mimo_v2_wide", FORMS["fp8_block"], tmp_path)
    as_published(tmp_path / "quantized")
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_the_later_names_with_projections_of_their_own(tmp_path: Path) -> None:
    """As V2.5 calls itself, where q, k and v are not fused."""
    reference = save_quantized("mimo_v2_wide", FORMS["fp8_block"], tmp_path)
    as_published(tmp_path / "quantized")
    file = tmp_path / "quantized" / "config.json"
    names = {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "attention_projection_layout": "split"}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    torch.testing.assert_close(steps(TinyRunner(plan_for(file.parent))), wanted(reference), **TOLERANCE)


def test_v26_with_experts_in_mxfp4(tmp_path: Path) -> None:
    """As MiMo-V2.6-Flash-RL is published: experts in MXFP4 beside FP8, output projections in 16 bits, a module that is
    not there among those left alone, a bfloat16 router, and rotary parameters in both forms, of which the newer one
    says nothing of layers with windows."""
    ways = ((EXPERTS, "MXFP4 of MiMo"), (r".*\.self_attn\.[qkv]_proj|.*\.layers\.0\.mlp\.\w+_proj", "blocks"))
    form = beside_blocks(store_dtype="mxfp4", mxfp4_block_size=32)
    reference = publish(Published("mimo_v2_wide", ways, form), tmp_path)
    file = tmp_path / "quantized" / "config.json"
    rope = json.loads(file.read_text())["rope_parameters"]["full_attention"]
    assert rope["rope_theta"] != json.loads(file.read_text())["rope_parameters"]["sliding_attention"]["rope_theta"]
    as_published(file.parent)
    config = json.loads(file.read_text())
    kept = [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]
    config["quantization_config"]["ignored_layers"] = [*kept, "model.decoder.self_attn.o_proj"]
    names = {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "attention_projection_layout": "split"}
    more = {"moe_router_dtype": "bfloat16", "rope_parameters": rope, "processor_config": {"patch_size": 16}}
    file.write_text(json.dumps(config | names | more))
    plan = plan_for(file.parent)
    assert plan.description.unsupported == ()
    torch.testing.assert_close(steps(TinyRunner(plan)), wanted(reference), **TOLERANCE)
    assert_ranks_alike(2, steps, TOLERANCE, tmp_path)


def test_layers_of_the_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PUBLISHED.read_text())
    layers = plan_for(tmp_path).description.layers
    full, window = layers[0].mixer, layers[1].mixer
    assert isinstance(full, GQA) and isinstance(window, GQA) and full.rope is not None and window.rope is not None
    assert (full.num_kv_heads, full.window, full.softmax.sinks, full.rope.theta) == (4, 0, False, 5e6)
    assert (window.num_kv_heads, window.window, window.softmax.sinks, window.rope.theta) == (8, 128, True, 1e4)
    assert {layer.mixer.head_dim for layer in layers if isinstance(layer.mixer, GQA)} == {192}
    assert (full.v_head_dim, full.rope.rot_dim, full.values.scale) == (128, 64, 0.707)
    assert [isinstance(layer.ffn, Dense) for layer in layers] == [True] + [False] * 47
    assert sum(layer.mixer == full for layer in layers) == 9


@pytest.mark.parametrize("pattern", [[2] * 48, [True] * 48, [0] * 47])
def test_a_pattern_that_cannot_be_read_is_refused(pattern: list[int], tmp_path: Path) -> None:
    config = json.loads(PUBLISHED.read_text()) | {"hybrid_layer_pattern": pattern}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="hybrid_layer_pattern"):
        _ = plan_for(tmp_path).description


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_whose_keys_end_within_blocks_hold_them_in_the_models_type(size: int, tmp_path: Path) -> None:
    """Two ranks have a KV head of 192 rows in the full layer and two in the others, whose blocks they do not cut; of
    four ranks each pair shares a head of the full layer."""
    save_quantized("mimo_v2_wide", FORMS["fp8_block"], tmp_path, moe_intermediate_size=512)
    as_published(tmp_path / "quantized")
    full, window = (layer.mixer for layer in plan_for(tmp_path / "quantized").description.layers[:2])
    assert (
        isinstance(full, GQA) and isinstance(window, GQA) and full.stored.scale_rows == window.stored.scale_rows == 128
    )
    assert full.dequantized(size) and window.dequantized(size) == (size == 4)
    assert_ranks_alike(size, steps, TOLERANCE, tmp_path)


def test_projections_in_the_models_type_by_layout() -> None:
    """MiMo-V2-Flash in FP8: keys of 192 rows a head end within blocks of 128 as soon as ranks have odd numbers of KV
    heads, so that all layers hold q, k and v in 16 bits on eight ranks, and the nine full ones on four."""
    config = json.loads(PUBLISHED.read_text())
    model = describe_model(config, detect(config, PUBLISHED.parent))
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GQA)]
    assert {size: sum(mixer.dequantized(size) for mixer in mixers) for size in (1, 2, 4, 8)} == {
        1: 0,
        2: 0,
        4: 9,
        8: 48,
    }
    for size in (4, 8):
        check_layout(model, RankLayout(size))

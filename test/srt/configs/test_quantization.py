"""What quantization configs are taken to mean: the published forms of every model that we know, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt import environ
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig
from sglang.srt.configs.quantization import SPELLINGS, agree, detect, quantization_of
from sglang.srt.errors import UserError
from sglang.srt.plan.kv_spec import kv_cache_dtype
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK

HERE = Path("/nowhere")
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: list[str], **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    } | more


CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
INT4_G32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}

GLM_47 = compressed("float-quantized", CHANNEL, TOKEN, ["model.layers.92.eh_proj", "lm_head", "re:.*\\.mlp\\.gate$"])
KIMI_K25 = compressed(
    "pack-quantized", INT4_G32, None,
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
)  # fmt: skip
KIMI_NVFP4 = {
    "producer": {"name": "modelopt", "version": "0.40.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0*", "model.layers.*.self_attn*", "*shared_experts*"],
    },
}
NEW_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"input_activations": FP4, "weights": FP4, "targets": ["Linear"]}},
    "ignore": ["lm_head", "model.layers.3.self_attn.q_proj"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
COMPRESSED_NVFP4 = compressed("nvfp4-pack-quantized", FP4, FP4 | {"dynamic": "local"}, ["lm_head"])
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
    },
}
MINIMAX_M2 = FP8_BLOCK | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
QWEN3_FP8 = FP8_BLOCK | {
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]
}
QWEN35_FP8 = FP8_BLOCK | {"modules_to_not_convert": ["model.language_model.layers.0.linear_attn.in_proj_a", "visual"]}

BLOCK = ModuleQuant("fp8_block", "fp8")
NVFP4 = ModuleQuant("nvfp4", "modelopt", True)


def write(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> QuantConfig | None:
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
    return detect(config, folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"quantization_config": GLM_47},
            {
                "model.layers.5.mlp.experts.0.up_proj": ModuleQuant("fp8_channel", "compressed-tensors"),
                "model.layers.5.mlp.shared_experts.up_proj": ModuleQuant("fp8_channel", "compressed-tensors"),
                "model.layers.5.self_attn.o_proj": ModuleQuant("fp8_channel", "compressed-tensors"),
                "model.layers.5.mlp.gate": None,
                "lm_head": None,
                "model.layers.92.eh_proj": None,
            },
        ),
        (
            {"text_config": {"quantization_config": KIMI_K25}, "vision_config": {}},
            {
                "language_model.model.layers.1.mlp.experts.7.down_proj": ModuleQuant("int4_g32", "compressed-tensors"),
                "language_model.model.layers.1.mlp.shared_experts.down_proj": None,
                "language_model.model.layers.1.self_attn.o_proj": None,
                "language_model.model.layers.0.mlp.down_proj": None,
            },
        ),
        (
            {"quantization_config": FP8_BLOCK},  # DeepSeek-V3.2, GLM-5
            {"model.layers.5.mlp.experts.0.up_proj": BLOCK, "model.layers.0.self_attn.q_a_proj": BLOCK},
        ),
        (
            {"quantization_config": FP8_BLOCK | {"scale_fmt": "ue8m0"}, "expert_dtype": "fp4"},  # DeepSeek-V4
            {
                "model.layers.5.mlp.experts.0.up_proj": ModuleQuant("mxfp4", "fp8"),
                "layers.5.ffn.experts.0.w1": ModuleQuant("mxfp4", "fp8"),
                "layers.5.ffn.shared_experts.w1": BLOCK,
                "model.layers.0.self_attn.q_a_proj": BLOCK,
            },
        ),
        (
            {  # DeepSeek-V4-Flash-NVFP4
                "quantization_config": FP8_BLOCK | {"moe_quant_algo": "NVFP4", "group_size": 16},
                "expert_dtype": "fp4",
            },
            {"layers.5.ffn.experts.0.w1": NVFP4, "layers.5.ffn.shared_experts.w1": BLOCK, "layers.0.attn.wq_a": BLOCK},
        ),
        (
            {"quantization_config": GPT_OSS},
            {
                "model.layers.5.mlp.experts": ModuleQuant("mxfp4", "mxfp4"),
                "model.layers.5.mlp.router": None,
                "model.layers.5.self_attn.q_proj": None,
            },
        ),
        (
            {"quantization_config": MINIMAX_M2},
            {
                "model.layers.5.block_sparse_moe.experts.3.w1": BLOCK,
                "model.layers.5.block_sparse_moe.gate": None,
                "model.layers.5.mlp.gate_proj": BLOCK,
            },
        ),
        (
            {"quantization_config": QWEN3_FP8},
            {
                "model.layers.0.mlp.gate": None,
                "model.layers.0.mlp.gate_proj": BLOCK,
                "model.layers.1.mlp.experts.5.gate_proj": BLOCK,
                "lm_head": None,
            },
        ),
        (
            {"quantization_config": QWEN35_FP8, "text_config": {}},
            {
                "model.language_model.layers.0.linear_attn.in_proj_a": None,
                "model.language_model.layers.0.linear_attn.in_proj_qkv": BLOCK,
                "model.visual.blocks.3.attn.qkv": None,
            },
        ),
        (
            {"quantization_config": NEW_MODELOPT},
            {"model.layers.3.self_attn.q_proj": None, "model.layers.3.self_attn.k_proj": NVFP4},
        ),
        (
            {"compression_config": GLM_47 | {"quant_method": None}},
            {"model.layers.5.self_attn.o_proj": ModuleQuant("fp8_channel", "compressed-tensors")},
        ),
    ],
)
def test_published_forms(config: dict[str, Any], expected: dict[str, ModuleQuant | None]) -> None:
    found = detect(config, HERE)
    assert found is not None
    assert {name: found.of(name) for name in expected} == expected


def test_modelopts_own_file(tmp_path: Path) -> None:
    found = write(tmp_path, {}, KIMI_NVFP4)
    assert found is not None and found.method == "modelopt NVFP4" and found.kv_cache == "fp8_e4m3"
    expected = {
        "model.layers.7.mlp.experts.3.up_proj": NVFP4,
        "model.layers.7.self_attn.o_proj": None,
        "model.layers.7.mlp.shared_experts.up_proj": None,
        "model.layers.0.mlp.up_proj": None,
        "lm_head": None,
    }
    assert {name: found.of(name) for name in expected} == expected
    assert str(tmp_path / "hf_quant_config.json") in found.source


def test_mixed_precision_of_modelopt() -> None:
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = detect({"quantization_config": config}, HERE)
    assert found is not None
    assert found.of("model.layers.0.mlp.up_proj") == NVFP4
    assert found.of("model.layers.0.self_attn.q_proj") == ModuleQuant("fp8_tensor", "modelopt", True)
    assert found.of("model.layers.1.mlp.up_proj") is None
    weight_only = ModuleQuant("nvfp4_a16", "modelopt")
    assert found.of("model.layers.0.mlp.experts.17.up_proj") == weight_only
    assert found.of("model.layers.0.mlp.experts_of_another") is None
    assert found.named("lm_head") == weight_only
    with pytest.raises(UserError, match=r"quantized_layers model.norm must be an object with a quant_algo; got 'FP8'"):
        detect({"quantization_config": config | {"quantized_layers": {"model.norm": "FP8"}}}, HERE)


def test_a_rule_for_all_modules_does_not_mean_the_output_head() -> None:
    found = detect({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, HERE)
    assert found is not None and found.of("lm_head") == NVFP4 and found.named("lm_head") is None


def test_groups_by_name_come_before_the_class() -> None:
    config = compressed("mixed-precision", CHANNEL, TOKEN, [])
    int4 = {"targets": ["re:.*experts.*", "model.layers.0.mlp"], "weights": INT4_G32, "format": "pack-quantized"}
    config["config_groups"]["group_1"] = int4 | {"input_activations": None}
    found = detect({"quantization_config": config}, HERE)
    assert found is not None
    schemes = {
        "model.layers.3.mlp.experts.0.up_proj": "int4_g32",
        "model.layers.0.mlp.up_proj": "int4_g32",
        "model.layers.0.mlp_norm": "fp8_channel",
        "model.layers.3.self_attn.q_proj": "fp8_channel",
    }
    assert {name: quant.scheme for name in schemes if (quant := found.of(name))} == schemes


def test_modules_computed_as_one() -> None:
    ignore = ["re:.*k_proj"]
    found = detect({"quantization_config": compressed("float-quantized", CHANNEL, TOKEN, ignore)}, HERE)
    assert found is not None
    assert found.fused_quant(["a.gate_proj", "a.up_proj"]) == ModuleQuant("fp8_channel", "compressed-tensors")
    with pytest.raises(UserError, match=r"differently: a\.q_proj fp8_channel, a\.k_proj not quantized"):
        found.fused_quant(["a.q_proj", "a.k_proj"])


def test_nothing_is_quantized(tmp_path: Path) -> None:
    assert detect({}, tmp_path) is None
    assert detect({"quantization_config": None}, tmp_path) is None
    nothing = {"producer": {}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    assert write(tmp_path, {}, nothing) is None


FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
BY_HEAD = FP8_KV | {"strategy": "attn_head"}


@pytest.mark.parametrize(("scheme", "expected"), [(FP8_KV, "fp8_e4m3"), (BY_HEAD, "fp8_e4m3"), (None, None)])
def test_the_kv_cache_of_compressed_tensors(scheme: Any, expected: str | None) -> None:
    config = compressed("float-quantized", CHANNEL, TOKEN, [], kv_cache_scheme=scheme)
    found = detect({"quantization_config": config}, HERE)
    assert found is not None and found.kv_cache == expected


def test_a_checkpoint_whose_cache_alone_is_calibrated(tmp_path: Path) -> None:
    alone = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_KV}
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": BY_HEAD}
    stated = [
        write(tmp_path, {}, {"producer": {}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
        detect({"quantization_config": alone | {"config_groups": {}}}, HERE),
        detect({"quantization_config": alone | {"config_groups": {"group_0": {"targets": []}}}}, HERE),
        detect({"quantization_config": alone | {"config_groups": {"a": attention}, "kv_cache_scheme": None}}, HERE),
    ]
    for found in stated:
        assert found is not None and found.kv_cache == "fp8_e4m3" and found.rules == ()
        assert found.of("model.layers.0.mlp.up_proj") is None and "16 bits), fp8_e4m3 KV cache" in found.describe()
        online = agree("fp8", found, "x")
        assert online is not None and online.kv_cache == "fp8_e4m3" and online.schemes() == {"fp8_channel"}


def test_the_kv_cache_of_autofp8() -> None:
    config = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    found = detect({"quantization_config": config}, HERE)
    assert found is not None and found.kv_cache == "fp8_e4m3"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            compressed("x", CHANNEL, TOKEN, [], kv_cache_scheme={"num_bits": 8, "type": "int"}),
            "kv_cache_scheme int8 per tensor",
        ),
        (
            compressed("x", CHANNEL, TOKEN, [], kv_cache_scheme=FP8_KV | {"strategy": "token"}),
            "kv_cache_scheme float8 per token",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT8"},
            "kv_cache_quant_algo 'INT8'",
        ),
    ],
)
def test_caches_that_no_server_has(config: Any, message: str) -> None:
    found = detect({"quantization_config": config}, HERE)
    with pytest.raises(UserError, match=f"{message} has no cache here. --kv-cache-dtype bf16 serves"):
        kv_cache_dtype("auto", "bfloat16", found)
    assert kv_cache_dtype("bf16", "bfloat16", found) == "bfloat16"


def _asymmetric(size: int) -> dict[str, Any]:
    weights = INT4_G32 | {"group_size": size, "symmetric": False}
    return compressed("pack-quantized", weights, None, ["re:.*k_proj"])


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("config", "storage", "size"),
    [
        *((AWQ | {"group_size": size, "modules_to_not_convert": ["k_proj"]}, "awq", size) for size in (32, 64, 128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["k_proj"]}, "awq", 64),
        *((_asymmetric(size), "compressed-tensors", size) for size in (64, 128)),
    ],
)
def test_zero_points(config: dict[str, Any], storage: str, size: int) -> None:
    found = detect({"quantization_config": config}, HERE)
    assert found is not None
    assert found.of("model.layers.0.self_attn.q_proj") == ModuleQuant(f"int4_g{size}", storage, zero_points=True)
    assert found.of("model.layers.0.self_attn.k_proj") is None
    assert f"(int4_g{size} with zero points)" in found.describe()


def test_zero_points_of_activations_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As published W8A8 checkpoints ask for them, which the log says; their weights have none."""
    weights, inputs = (part | {"num_bits": 8, "type": "int"} for part in (CHANNEL, TOKEN))
    for symmetric in (True, False):
        config = compressed("int-quantized", weights, inputs | {"symmetric": symmetric}, [])
        found = detect({"quantization_config": config}, Path(f"symmetric-{symmetric}"))
        assert found is not None and found.of("model.layers.0.mlp.up_proj") is not None
    (record,) = caplog.records
    assert "symmetric-False" in record.message
    assert "int8 activations with zero points" in record.message


def _weights(**change: Any) -> dict[str, Any]:
    return compressed("pack-quantized", INT4_G32 | change, None, [])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method 'bitsandbytes' \(has fp8, .*Supported schemes: fp8_tensor"),
        ({"quant_method": 3}, "quant_method must name a method; got 3"),
        ("fp8", "'quantization_config' must be an object; got 'fp8'"),
        (FP8_BLOCK | {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\] \(has \[128, 128\]"),
        (FP8_BLOCK | {"weight_block_size": 128}, r"weight_block_size 128 \(has \[128, 128\]"),
        (FP8_BLOCK | {"activation_scheme": "static"}, "activation_scheme 'static' with weight_block_size"),
        (FP8_BLOCK | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (FP8_BLOCK | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of module names"),
        (
            compressed("mxfp4-pack-quantized", INT4_G32 | {"type": "float", "symmetric": False}, None, []),
            r"float4 per group of 32, activations in 16 bits: asymmetric weights",
        ),
        (_weights(actorder="group"), "weights in activation order"),
        (_weights(actorder="dynamic"), "weights in activation order"),
        (
            compressed("x", None, TOKEN, []) | {"config_groups": {"group_0": None}},
            "group_0 must be an object; got None",
        ),
        (compressed("x", "int4", TOKEN, []), "group_0: weights must be an object; got 'int4'"),
        (compressed("float-quantized", CHANNEL, "token", []), "input_activations must be an object; got 'token'"),
        (_weights(group_size=48), "int4 per group of 48, activations in 16 bits is not supported"),
        (_weights(num_bits=6), "int6 per group of 32, activations in 16 bits is not supported. Supported schemes"),
        (_weights(num_bits=8, symmetric=False), r"int8 per group of 32, .*: asymmetric weights \(zero points\)"),
        (
            compressed("float-quantized", {"type": "float", "num_bits": 8, "strategy": "attn_head"}, None, []),
            "float8 per attn_head, activations in 16 bits is not",
        ),
        (FP8_BLOCK | {"store_dtype": "nvfp4"}, "store_dtype 'nvfp4' in blocks of None"),
        (FP8_BLOCK | {"store_dtype": "mxfp4", "mxfp4_block_size": 16}, "store_dtype 'mxfp4' in blocks of 16"),
        (FP8_BLOCK | {"routed_experts_quant_method": "int4"}, "routed_experts_quant_method 'int4'"),
        ({"quant_method": "w4afp8", "group_size": 256}, "w4afp8 with group_size 256"),
        ({"quant_method": "w4afp8", "weight_block_size": [1, 32]}, r"w4afp8 with .*weight_block_size \[1, 32\]"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES", "group_size": 64},
            "FP8_BLOCK_SCALES with group_size 64",
        ),
        (compressed("float-quantized", CHANNEL, TOKEN, ["re:("]), r"'\(' is not a regular expression"),
        ({"quant_method": "compressed-tensors"}, "needs config_groups"),
        (compressed("float-quantized", CHANNEL, TOKEN, [], kv_cache_scheme=True), "kv_cache_scheme True"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo 'W4A8_AWQ' \(has FP8, .*NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 with group_size 32"),
        (AWQ | {"bits": 8}, "awq with bits 8, group_size 128, zero_point True, version gemm is not supported"),
        (AWQ | {"group_size": 256}, "awq with bits 4, group_size 256"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"version": "gemv"}, "version gemv"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "desc_act True is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True}, "gptq with bits 3"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": True}, "gptq with bits 8, group_size 64"),
        ({"quant_method": "gptq", "bits": "8", "group_size": 128}, "gptq with bits 8, group_size 128"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*down.*": {"bits": 2}}},
            r"dynamic \+:.*down.*: gptq with bits 2, group_size 128",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": [1]}, "dynamic must be an object"),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:exllama"},
            "auto-round with bits 4, .* packing_format auto_round:exllama is not supported",
        ),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "group_size": 128,
                "packing_format": "auto_round:auto_awq",
                "extra_config": {"a.down_proj": {"bits": 8}},
            },
            "extra_config a.down_proj: auto-round with bits 8",
        ),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "group_size": 128,
                "packing_format": "auto_round:auto_gptq",
                "sym": False,
            },
            "auto-round with bits 4, group_size 128, sym False",
        ),
    ],
)
def test_what_is_refused(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        detect({"quantization_config": config}, HERE)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
QWEN35_GPTQ = GPTQ | {
    "dynamic": {
        "lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {},
        "-:.*mtp.*": {}, "-:.*visual.*": {}, "+:.*layers\\.3\\.mlp.*": {"group_size": 32},
    },
}  # fmt: skip
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.language_model.layers",
    "extra_config": {
        "model.language_model.layers.0.linear_attn.in_proj_a": {"bits": 16, "data_type": "fp"},
        ".*in_proj_ba.*": {"bits": 16, "data_type": "fp"},
        r"shared_expert\.": {"bits": 16},
        "model.language_model.layers.5.mlp.down_proj": {"group_size": 32},
    },
}  # fmt: skip


BLOCK_FP8 = ModuleQuant("fp8_block", "fp8")
OF_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "experts", "others"),
    [
        (OF_FP8 | {"store_dtype": "mxfp4", "mxfp4_block_size": 32}, ModuleQuant("mxfp4", "mimo"), BLOCK_FP8),
        (OF_FP8 | {"routed_experts_quant_method": "mxfp4"}, ModuleQuant("mxfp4", "ling"), BLOCK_FP8),
        ({"quant_method": "w4afp8", "group_size": 128}, ModuleQuant("int4_g128", "w4afp8"), BLOCK_FP8),
    ],
)
def test_routed_experts_of_another_kind_than_other_weights(
    config: Any, experts: ModuleQuant, others: ModuleQuant
) -> None:
    config |= {"ignored_layers": ["model.layers.0.self_attn.o_proj"]}
    found = detect({"quantization_config": config}, HERE)
    assert found is not None and found.of("model.layers.1.mlp.experts.3.up_proj") == experts
    assert found.of("model.layers.1.mlp.experts") == experts
    for module in ("model.layers.1.mlp.shared_experts.up_proj", "model.layers.0.self_attn.q_proj"):
        assert found.of(module) == others
    assert found.of("model.layers.0.self_attn.o_proj") is None


def test_int4_beside_fp8_activations_says_that_they_stay_in_16_bits(caplog: pytest.LogCaptureFixture) -> None:
    environ._already_warned.clear()
    config = compressed("pack-quantized", INT4_G32, TOKEN, [])
    found = detect({"quantization_config": config}, HERE)
    assert found is not None and found.of("a.up_proj") == ModuleQuant("int4_g32", "compressed-tensors")
    assert "FP8 activations beside int4 weights: they stay in 16 bits" in caplog.text


def test_weights_of_8_bits_beside_activations_of_16() -> None:
    """By what a group of compressed-tensors says, and by name and pattern in AutoRound's and GPTQ's."""
    eight = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    for form, storage in (("pack-quantized", "compressed-tensors"), ("int-quantized", "int-quantized")):
        found = detect({"quantization_config": compressed(form, eight, None, [])}, HERE)
        assert found is not None and found.of("a.up_proj") == ModuleQuant("int8_g128", storage)
    found = detect({"quantization_config": compressed("float-quantized", CHANNEL, None, [])}, HERE)
    assert found is not None and found.of("a.up_proj") == ModuleQuant("fp8_channel_a16", "compressed-tensors")
    extra = {".*self_attn.*": {"bits": 8}, "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32}}
    found = detect({"quantization_config": AUTO_ROUND | {"extra_config": extra}}, HERE)
    assert found is not None
    assert found.of("model.layers.3.self_attn.q_proj") == ModuleQuant("int8_g128", "gptq")
    assert found.of("model.layers.0.mlp.up_proj") == ModuleQuant("int8_g32", "gptq")
    assert found.of("model.layers.1.mlp.up_proj") == ModuleQuant("int4_g128", "gptq")
    found = detect({"quantization_config": QWEN35_GPTQ | {"lm_head": True, "dynamic": {}}}, HERE)
    assert found is not None and found.named("lm_head") == ModuleQuant("int4_g128", "gptq")


def test_exceptions_of_int4_by_module() -> None:
    of_gptq = detect({"quantization_config": QWEN35_GPTQ}, HERE)
    of_auto_round = detect({"quantization_config": AUTO_ROUND}, HERE)
    assert of_gptq is not None and of_auto_round is not None
    int4, small = ModuleQuant("int4_g128", "gptq"), ModuleQuant("int4_g32", "gptq")
    layer = "model.language_model.layers."
    assert of_gptq.named("lm_head") is None and of_auto_round.named("lm_head") is None
    expected = {
        f"{layer}0.mlp.experts.7.up_proj": (int4, int4),
        f"{layer}3.mlp.experts.7.up_proj": (small, int4),
        f"{layer}0.linear_attn.in_proj_a": (None, None),
        f"{layer}1.linear_attn.in_proj_ba": (None, None),
        f"{layer}1.linear_attn.out_proj": (None, int4),
        f"{layer}0.mlp.shared_expert.up_proj": (None, None),
        f"{layer}5.mlp.down_proj": (int4, small),
        "mtp.layers.0.mlp.up_proj": (None, int4),
    }
    assert {name: (of_gptq.of(name), of_auto_round.of(name)) for name in expected} == expected
    with_zeros = detect({"quantization_config": AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}}, HERE)
    assert with_zeros is not None
    assert with_zeros.of(f"{layer}9.mlp.up_proj") == ModuleQuant("int4_g128", "awq", zero_points=True)


def test_a_text_part_that_is_no_object_is_no_crash() -> None:
    assert detect({"quantization_config": FP8_BLOCK, "text_config": 1}, HERE) is not None


# --- --quantization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "config"),
    [
        ("fp8", FP8_BLOCK),
        ("compressed-tensors", GLM_47),
        ("w8a8_fp8", GLM_47),
        ("modelopt", NEW_MODELOPT),
        ("modelopt_fp4", NEW_MODELOPT),
        ("nvfp4", NEW_MODELOPT),
        ("nvfp4", COMPRESSED_NVFP4),
        ("nvfp4", MIXED),
        ("mxfp4", GPT_OSS),
        ("moe_wna16", KIMI_K25),
        ("moe_wna16", AWQ),
        ("awq", AWQ),
        ("awq_marlin", AWQ),
        ("gptq_marlin", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}),
    ],
)
def test_the_flag_may_name_what_the_checkpoint_is(flag: str, config: dict[str, Any]) -> None:
    found = detect({"quantization_config": config}, HERE)
    assert agree(flag, found, "dir") is found is agree(None, found, "dir")


@pytest.mark.parametrize(
    ("flag", "config", "message"),
    [
        ("fp8", GLM_47, r"--quantization fp8 does not fit the checkpoint, which is compressed-tensors \(fp8_channel\)"),
        ("compressed-tensors", FP8_BLOCK, r"which is fp8 \(fp8_block\) according to .*config.json quantization_config"),
        ("modelopt_fp8", NEW_MODELOPT, r"which is modelopt NVFP4 \(nvfp4\)"),
        ("w8a8_int8", GLM_47, "does not fit"),
        ("awq", FP8_BLOCK, "does not fit"),
        ("nvfp4", FP8_BLOCK, r"which is fp8 \(fp8_block\) .* Remove the flag: the format is detected"),
        ("nvfp4", GPT_OSS, r"which is mxfp4 \(mxfp4\)"),
        ("nvfp4", None, r"is not quantized\. Remove .* \(python -m sglang\.quantize makes some\), .* fp8"),
        ("bitsandbytes", FP8_BLOCK, "--quantization bitsandbytes is not supported; supported: fp8, w8a8_fp8"),
        ("awq", None, r"the checkpoint dir is not quantized\. Remove the flag, .* with: fp8, w8a8_fp8"),
    ],
)
def test_disagreement_names_both(flag: str, config: dict[str, Any] | None, message: str) -> None:
    found = detect({"quantization_config": config}, HERE)
    with pytest.raises(UserError, match=message):
        agree(flag, found, "dir")


def test_fp8_quantizes_what_is_not() -> None:
    made = agree("fp8", None, "dir")
    assert made is not None
    assert made.of("model.layers.0.self_attn.q_proj") == ModuleQuant("fp8_channel", "online")
    assert made.of("lm_head") is None
    assert {flag for flag, spelling in SPELLINGS.items() if spelling.online} == {"fp8", "w8a8_fp8"}


# --- activations of MXFP4 experts -------------------------------------------------------------------------------------

EXPERT, DENSE = "model.layers.5.mlp.experts.3.up_proj", "model.layers.5.mlp.shared_experts.up_proj"
MXFP4_WEIGHT = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
MXFP8_INPUT = MXFP4_WEIGHT | {"num_bits": 8, "dynamic": True}


def mxfp4_checkpoint(inputs: dict[str, Any] | None = None, *ignore: str) -> dict[str, Any]:
    return {"quantization_config": compressed("mxfp4-pack-quantized", MXFP4_WEIGHT, inputs, list(ignore))}


@pytest.mark.parametrize(
    ("config", "precision", "expert", "dense"),
    [
        ({"quantization_config": GPT_OSS}, "default", "mxfp4", None),
        ({"quantization_config": GPT_OSS}, "bf16", "mxfp4", None),
        ({"quantization_config": GPT_OSS}, "fp8", "mxfp4_mxfp8", None),
        ({"quantization_config": FP8_BLOCK, "expert_dtype": "fp4"}, "fp8", "mxfp4_mxfp8", "fp8_block"),
        (mxfp4_checkpoint(), "default", "mxfp4", "mxfp4"),
        (mxfp4_checkpoint(), "fp8", "mxfp4_mxfp8", "mxfp4"),
        (mxfp4_checkpoint(None, "re:.*shared_experts.*"), "fp8", "mxfp4_mxfp8", None),
        (mxfp4_checkpoint(None, "re:.*layers.5.*"), "fp8", None, None),
        (mxfp4_checkpoint(MXFP8_INPUT), "default", "mxfp4_mxfp8", "mxfp4_mxfp8"),
        (mxfp4_checkpoint(MXFP8_INPUT), "fp8", "mxfp4_mxfp8", "mxfp4_mxfp8"),
        (mxfp4_checkpoint(MXFP8_INPUT), "bf16", "mxfp4", "mxfp4_mxfp8"),
    ],
)
def test_precision_of_mxfp4_experts(
    tmp_path: Path, config: dict[str, Any], precision: str, expert: str | None, dense: str | None
) -> None:
    found = quantization_of(config, tmp_path, None, precision)
    assert found is not None
    quants = [found.of(name) for name in (EXPERT, DENSE)]
    assert [None if quant is None else quant.scheme for quant in quants] == [expert, dense]
    stated = detect(config, tmp_path)
    assert stated is not None
    if stated.of(EXPERT) != found.of(EXPERT):
        assert f"experts by --flashinfer-mxfp4-moe-precision {precision}" in found.describe()


def test_precision_is_of_mxfp4_experts_only(tmp_path: Path) -> None:
    for config in ({}, {"quantization_config": FP8_BLOCK}):
        with pytest.raises(UserError, match="has no MXFP4 experts. Remove the flag"):
            quantization_of(config, tmp_path, None, "fp8")
        assert quantization_of(config, tmp_path, None, "bf16") == detect(config, tmp_path)


# --- what the plan asks for -------------------------------------------------------------------------------------------

SIZES = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 32, "intermediate_size": 64}
MOE = SIZES | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("sizes", "quantization", "experts", "linears"),
    [
        (SIZES, GLM_47, None, ("fp8_channel",)),
        (MOE, GLM_47, "fp8_channel", ("fp8_channel",)),
        (MOE, FP8_BLOCK, "fp8_block", ("fp8_block",)),
        (MOE, GPT_OSS, "mxfp4", ()),
        (MOE | {"n_shared_experts": 1}, KIMI_K25, "int4_g32", ()),
        (
            MOE | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
            KIMI_K25,
            "int4_g32",
            (),
        ),
        (SIZES, NEW_MODELOPT | {"ignore": ["lm_head", "model.layers.3.self_attn.o_proj"]}, None, ("nvfp4",)),
        (SIZES, None, None, ()),
    ],
)
def test_schemes_of_layers(
    sizes: dict[str, Any], quantization: Any, experts: str | None, linears: tuple[str, ...]
) -> None:
    for config in (
        sizes | {"quantization_config": quantization},
        {"text_config": sizes, "quantization_config": quantization},
    ):
        model = describe_model(config, detect(config, HERE))
        needs = needs_of(rank_weights(model, ONE_RANK), ParallelConfig("bfloat16", "bfloat16"))
        found = tuple(need.quant for need in needs if need.op == "linear" and need.quant)
        assert (model.expert_quant.scheme if model.expert_quant else None, found) == (experts, linears)


def test_projections_of_several_schemes_are_one_product_in_16_bits() -> None:
    config = SIZES | {"quantization_config": NEW_MODELOPT}
    weights = rank_weights(describe_model(config, detect(config, HERE)), ONE_RANK)
    schemes = [quant.scheme if quant else "" for matrix, quant in weights.matrices() if matrix.name == "attn.qkv"]
    assert schemes == ["nvfp4", "nvfp4", "nvfp4", ""]


def test_experts_of_several_schemes_are_refused() -> None:
    quantized = compressed("mixed-precision", CHANNEL, TOKEN, [])
    of_layer_2 = {"targets": ["re:.*layers.2.mlp.experts.*"], "weights": INT4_G32, "format": "pack-quantized"}
    quantized["config_groups"]["group_1"] = of_layer_2 | {"input_activations": None}
    config = MOE | {"quantization_config": quantized}
    with pytest.raises(UserError, match="quantized in several ways are not supported: fp8_channel, int4_g32"):
        needs_of(
            rank_weights(describe_model(config, detect(config, HERE)), ONE_RANK), ParallelConfig("bfloat16", "bfloat16")
        )


def test_experts_of_some_layers_may_be_in_16_bits() -> None:
    ignore = ["re:.*layers.2.mlp.experts.*"]
    config = MOE | {"quantization_config": compressed("float-quantized", CHANNEL, TOKEN, ignore)}
    model = describe_model(config, detect(config, HERE))
    assert model.wide_experts and model.expert_quant is not None and model.expert_quant.scheme == "fp8_channel"
    keys = {need.key for need in needs_of(rank_weights(model, ONE_RANK), ParallelConfig("bfloat16", "bfloat16"))}
    assert {"fused_moe", "fused_moe/16_bits"} <= keys

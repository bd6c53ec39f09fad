from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "rope_theta": 1000000,
}


def read(directory: Path, config: Any, generation: Any = None, **options: Any) -> ModelConfig:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_server_args(ServerArgs.from_kwargs(model_path=str(directory), **options))


def test_dense(tmp_path: Path) -> None:
    config = read(
        tmp_path, QWEN3, {"eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20, "do_sample": True}
    )
    assert config.dtype == "bfloat16" and config.context_len == 40960
    assert (config.architecture, config.vocab_size) == ("Qwen3ForCausalLM", 151936)
    assert config.eos_token_ids == {151645, 151643}
    assert config.default_sampling == {"temperature": 0.6, "top_k": 20}


def test_a_multimodal_model_stops_at_what_either_part_names(tmp_path: Path) -> None:
    """Gemma 4: the text part ends texts (1), the whole model turns too (106)."""
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "eos_token_id": [1, 106]}
    assert read(tmp_path, config | {"text_config": QWEN3 | {"eos_token_id": 1}}).eos_token_ids == {1, 106}
    assert read(tmp_path, config | {"text_config": QWEN3}).eos_token_ids == {1, 106, 151645}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 40960),
        ({"rope_scaling": None}, 40960),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 163840),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 81920),
        # Gemma 3 as published: scaled where there is no window, and trained for what it states.
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}, 40960),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 40960),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}}, 81920),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 40960),
    ],
)
def test_context_length_from_rope(tmp_path: Path, rope: dict[str, Any], expected: int) -> None:
    assert read(tmp_path, {**QWEN3, **rope}).context_len == expected


def test_context_length_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path, QWEN3, context_length=1000).context_len == 1000
    with pytest.raises(UserError, match="--context-length 50000 exceeds the 40960 tokens"):
        read(tmp_path, QWEN3, context_length=50000)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert read(tmp_path, QWEN3, context_length=50000).context_len == 50000


def test_overrides_merge_deeply(tmp_path: Path) -> None:
    written = {**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    overrides = {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    config = read(tmp_path, written, json_model_override_args=json.dumps(overrides))
    assert config.hf_config["num_hidden_layers"] == 2
    assert config.hf_config["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}
    assert config.context_len == 81920


def test_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    inner = {key: value for key, value in QWEN3.items() if key != "architectures"}
    outer = {"architectures": ["Qwen3ForCausalLM"], "text_config": inner, "vision_config": {"hidden_size": 7}}
    config = read(tmp_path, outer)
    assert config.hf_config["hidden_size"] == 4096
    assert "vision_config" not in config.hf_config


@pytest.mark.parametrize(
    ("requested", "written", "expected"),
    [
        ("auto", {"torch_dtype": "float16"}, "float16"),
        ("auto", {"dtype": "float32", "torch_dtype": None}, "float32"),
        ("auto", {"torch_dtype": None}, "bfloat16"),
        ("float32", {}, "float32"),
    ],
)
def test_dtype(tmp_path: Path, requested: str, written: dict[str, Any], expected: str) -> None:
    assert read(tmp_path, {**QWEN3, **written}, dtype=requested).dtype == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": []}, "'architectures' must name a model class"),
        ({"architectures": None}, "key 'architectures' is missing"),
        ({"architectures": "Qwen3ForCausalLM"}, "'architectures' must be of type list"),
        ({"vocab_size": None}, "key 'vocab_size' is missing"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be token ids"),
        ({"eos_token_id": 151936}, "got 151936.*--json-model-override-args"),
        ({"eos_token_id": [5, 1 << 70]}, "below the vocabulary's size of 151936"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be a positive number"),
        ({"quantization_config": {"quant_method": "int1"}}, "quant_method 'int1' .*is not supported"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors needs config_groups"),
    ],
)
def test_bad_configs(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, {**QWEN3, **change})


def test_quantization_is_detected_and_held_to_the_flag(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3).quantization is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    found = read(tmp_path, QWEN3).quantization
    assert found is not None and found.method == "modelopt NVFP4"
    with pytest.raises(UserError, match=r"--quantization awq does not fit the checkpoint, which is modelopt NVFP4"):
        read(tmp_path, QWEN3, quantization="awq")


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": ', "not valid JSON"), ("[]", "must hold a JSON object, not a list"), ("[" * 100000, "not valid JSON")],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, text)
    assert "config.json" in str(caught.value)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        ModelConfig.from_server_args(ServerArgs.from_kwargs(model_path=str(tmp_path)))

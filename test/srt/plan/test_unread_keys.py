"""Keys of config.json that a family does not read are refused by name if they may change answers."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.plan.model_description import describe_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}


def problems(**more: Any) -> str:
    return "\n".join(describe_model(LLAMA | more, None).unsupported)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("new_kind_of_gate", True),
        ("attention_chunk_size", 128),  # Llama 4 reads it
        ("residual_multiplier", 0.5),
        ("attn_logit_softcapping", 30.0),
        ("rel_extent", [16]),
        ("use_qk_norm", True),  # Qwen3 reads it
    ],
)
def test_refused_by_name_with_the_way_out(key: str, value: object) -> None:
    text = problems(**{key: value})
    assert f"{key} = {value!r} is not supported for LlamaForCausalLM" in text
    assert f"--json-model-override-args '{{\"{key}\": null}}'" in text
    assert problems(**{key: None}) == ""


@pytest.mark.parametrize("value", [False, 0, 0.0, "", [], {}])
def test_what_is_switched_off_is_not(value: object) -> None:
    assert problems(new_kind_of_gate=value) == ""


@pytest.mark.parametrize(
    "more",
    [
        {"residual_multiplier": 1.0, "pretraining_tp": 1},
        {"transformers_version": "6.0", "unsloth_version": "2026.11", "_name_or_path": "x", "torch_dtype": "float16"},
        {"router_aux_loss_coef": 0.001, "initializer_range": 0.02, "attention_dropout": 0.1, "use_cache": True},
        {"bos_token_id": 1, "image_token_id": 7, "id2label": {"0": "a"}, "temperature": 0.6},
    ],
)
def test_what_changes_no_answer_is_not(more: dict[str, Any]) -> None:
    assert problems(**more) == ""


def test_keys_of_an_encoder_are_not_the_language_models() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"architectures": ["LlamaForCausalLM"], "projection_hidden_size": 32}
    assert describe_model(outer | {"text_config": inner}, None).unsupported == ()
    (problem,) = describe_model(outer | {"text_config": inner | {"new_kind_of_gate": 2}}, None).unsupported
    assert "new_kind_of_gate" in problem


def test_a_plan_of_an_unknown_family_says_what_it_ignores() -> None:
    config = LLAMA | {"architectures": ["NewForCausalLM"], "model_type": "new", "new_kind_of_gate": 2}
    text = "\n".join(describe_model(config, None).unsupported)
    assert "architecture NewForCausalLM is not supported" in text and "new_kind_of_gate = 2" in text

from __future__ import annotations

import math
from typing import Any

import pytest

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.rope import rope_parameters, rotary_dim, scaled_context_length
from sglang.srt.configs.text_positions import first_position
from sglang.srt.errors import UserError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5}, {"rope_type": "default", "rope_theta": 5.0}),
        (
            {"rope_theta": 7, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_type": "linear", "rope_theta": 7.0, "factor": 2},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9, "factor": 4}, "rope_theta": 1},
            {"rope_type": "yarn", "rope_theta": 9.0, "factor": 4},
        ),
        (
            {"rope_parameters": {"rope_theta": 9}, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.5},
        ),
        ({"rope_scaling": {"rope_type": "llama3", "type": "x"}}, {"rope_type": "llama3", "rope_theta": 10000.0}),
        # An override in the older form, as model cards give it.
        (
            {"rope_parameters": {"beta": 1, "rope_theta": 9}, "rope_scaling": {"type": "yarn", "factor": 4}},
            {"rope_type": "yarn", "rope_theta": 9.0, "factor": 4},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1}, "rope_scaling": {"rope_theta": 3}},
            {"rope_type": "default", "rope_theta": 3.0},
        ),
    ],
)
def test_one_form(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rope_parameters(config) == expected


def test_config_is_left_alone() -> None:
    config = {"rope_scaling": {"type": "linear", "factor": 2}}
    rope_parameters(config)
    assert config == {"rope_scaling": {"type": "linear", "factor": 2}}


def test_parameters_by_layer_type() -> None:
    config = {"rope_parameters": {"full_attention": {"rope_theta": 1}, "sliding_attention": {"rope_theta": 2}}}
    assert rope_parameters(config, "sliding_attention") == {"rope_type": "default", "rope_theta": 2.0}
    for layer_type in ("", "linear_attention"):
        with pytest.raises(UserError, match=f"by layer type .* say nothing of '{layer_type}'"):
            rope_parameters(config, layer_type)
    with pytest.raises(UserError, match="'rope_scaling' beside 'rope_parameters' by layer type"):
        rope_parameters(config | {"rope_scaling": {"factor": 2.0}}, "full_attention")


@pytest.mark.parametrize("theta", ["1e6", [1], True, 0, -1, math.nan, math.inf])
def test_a_base_is_a_positive_number(theta: object) -> None:
    with pytest.raises(UserError, match="'rope_theta' must be a positive number"):
        rope_parameters({"rope_theta": theta})


def test_lengths_are_of_positive_numbers() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": []}
    with pytest.raises(UserError, match=r"'original_max_position_embeddings' must be a positive number; got \[\]"):
        scaled_context_length(4096, yarn)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_lengths_are_finite(value: float) -> None:
    with pytest.raises(UserError, match="'factor' must be a positive number"):
        scaled_context_length(4096, {"rope_type": "yarn", "factor": value})


@pytest.mark.parametrize("dims", ["64", [64], True, -1, math.nan])
def test_the_dims_that_rotate_are_a_positive_number(dims: object) -> None:
    with pytest.raises(UserError, match="'rotary_dim' must be a positive number"):
        rotary_dim({"rotary_dim": dims}, 128)


@pytest.mark.parametrize("value", [math.nan, 10**400])
def test_a_number_of_a_config_is_a_number(value: float) -> None:
    with pytest.raises(UserError, match="'rms_norm_eps' must be of type float"):
        ConfigReader({"rms_norm_eps": value}, "config.json").require("rms_norm_eps", float)


def test_a_type_that_is_no_name_has_no_positions_of_its_own() -> None:
    assert first_position({"model_type": []}) == 0

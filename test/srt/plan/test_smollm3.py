"""Which layers of SmolLM3 rotate heads and have windows, where the config does not list them."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.rope import unrotated
from sglang.srt.plan.model_description import ModelDescription, describe_model

CONFIG: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}


def described(**more: Any) -> ModelDescription:
    return describe_model(CONFIG | more, None)


def layers(**more: Any) -> list[tuple[bool, int]]:
    """Whether each layer rotates heads, and its window."""
    mixers = [layer.mixer for layer in described(**more).layers]
    return [(mixer.rope != unrotated(mixer.head_dim), mixer.window) for mixer in mixers if isinstance(mixer, GQA)]


def test_values_that_the_config_leaves_out() -> None:
    model = described()
    first = model.layers[0].mixer
    assert isinstance(first, GQA) and first.rope is not None and first.rope.theta == 2e6
    assert model.tie_embeddings
    assert layers() == [(True, 0), (True, 0), (True, 0), (False, 0)] * 2


def test_layers_that_do_not_rotate() -> None:
    assert layers(no_rope_layer_interval=2) == [(True, 0), (False, 0)] * 4
    assert layers(no_rope_layers=[0, 1, 1, 1] * 2) == [(False, 0), *[(True, 0)] * 3] * 2


def test_windows_are_of_layers_that_do_not_rotate_unless_listed() -> None:
    window = {"use_sliding_window": True, "sliding_window": 64, "no_rope_layer_interval": 2}
    assert layers(**window) == [(True, 0), (False, 64)] * 4
    listed = ["sliding_attention", "full_attention"] * 4
    assert layers(**window, layer_types=listed) == [(True, 64), (False, 0)] * 4
    assert layers(**window | {"use_sliding_window": False}) == [(True, 0), (False, 0)] * 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"use_sliding_window": False, "sliding_window": 64, "layer_types": ["sliding_attention"] * 8},
            "use_sliding_window = False is not supported",
        ),
        ({"use_qk_norm": True}, "use_qk_norm = True is not supported"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    assert message in "\n".join(described(**more).unsupported)

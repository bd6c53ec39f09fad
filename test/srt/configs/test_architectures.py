from __future__ import annotations

from sglang.srt.configs.architectures import SUPPORTED_ARCHITECTURES


def test_every_supported_architecture_has_a_model() -> None:
    from sglang.srt.models.registry import MODEL_REGISTRY

    assert sorted(MODEL_REGISTRY) == list(SUPPORTED_ARCHITECTURES)

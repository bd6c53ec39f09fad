"""Facts of a class for servers of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan.model_planner import describe_served_model
from sglang.srt.plan.transformers_backend import asking
from sglang.srt.plan.transformers_backend.facts import ClassRequest
from sglang.srt.server_args import ServerArgs


def find_facts(folder: Path, **options: Any) -> None:
    """Finds the facts of the class in this process, and keeps them for the servers, of which each would start one."""

    def found(asked: bytes) -> bytes:
        return msgspec.json.encode(trial.facts_of(msgspec.json.decode(asked, type=ClassRequest)))

    args = ServerArgs.from_kwargs(model_path=str(folder), device="cpu", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "_trial", found)
        describe_served_model(args, ModelConfig.from_server_args(args))

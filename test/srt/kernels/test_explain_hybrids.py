"""`python -m sglang.explain` for every published Qwen3.5, Qwen3.6 and Nemotron 3, on GPUs of SM120."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import some_of

from sglang import explain
from sglang.srt.plan.state_rows import CONVERSATION_TOKENS, MIN_REQUESTS

from . import published

CONFIGS = json.loads((Path(__file__).parent / "configs" / "hybrids.json").read_text())
"""As published. Lists of modules are templates: [name with {} for numbers, layers, how many experts]."""
GPUS = ("sm_120", "sm_121", "rtx-5090")
LAYOUTS = {
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (1, 1, 4),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (1, 1, 1),
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (2, 2, 8),
    "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": (1, 1, 4),
    "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ((8, 4), (8, 2), (8, 8)),
    "NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": (8, 8, (8, 8)),
    "NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": (8, 4, (8, 4)),
    "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (1, 1, 1),
    "Qwen3.5-122B-A10B": (4, 4, 16),
    "Qwen3.5-122B-A10B-NVFP4": (1, 1, 4),
    "Qwen3.5-27B": (1, 1, 4),
    "Qwen3.5-35B-A3B": (1, 1, 4),
    "Qwen3.5-397B-A17B": (16, 16, (16, 2)),
    "Qwen3.5-397B-A17B-NVFP4": (4, 4, 16),
    "Qwen3.6-27B-NVFP4": (1, 1, 1),
    "Qwen3.6-35B-A3B-NVFP4": (1, 1, 1),
}
"""GPUs of each kind over which a model is divided, or ranks of a stage and stages: eight groups of Mamba-2 heads are
for eight ranks at most, and sixteen key heads for sixteen."""


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """With the files that say what the model is."""
    return str(published.hybrid_checkpoint(request.param, tmp_path))


def explained(capsys: pytest.CaptureFixture[str], directory: str, *argv: str) -> dict[str, Any]:
    status = explain.main(["--model-path", directory, *argv, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (explain.WOULD_NOT_START if found["problem"] else 0)
    return found


def attention_rule(found: dict[str, Any]) -> str:
    """What the attention layers of such a model may be computed by on SM120, as `explain` says it."""
    kind = "Mamba-2" if "state_space_duality" in found["ops"] else "gated-delta-net"
    return f"hybrid {kind} models take triton or flashinfer on GPUs with mma_sync_block_scale"


def layout_flags(layout: int | tuple[int, int]) -> tuple[str, ...]:
    tp, pp = layout if isinstance(layout, tuple) else (layout, 1)
    return "--tp", str(tp), "--pp-size", str(pp)


EVERY = [(name, gpu, size) for name, sizes in LAYOUTS.items() for gpu, size in zip(GPUS, sizes, strict=True)]
IN_TURN = [EVERY[len(GPUS) * i + i % len(GPUS)] for i in range(len(LAYOUTS))]
EVERY_LAYOUT = pytest.mark.parametrize(("directory", "gpu", "layout"), EVERY, indirect=["directory"])


@EVERY_LAYOUT
def test_every_op_has_a_kernel_and_every_cache_room(
    directory: str, gpu: str, layout: int | tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    found = explained(capsys, directory, "--arch", gpu, *layout_flags(layout))
    assert [op for op, choice in found["ops"].items() if choice["kernel"] is None] == []
    assert found["not_implemented"] is None and not found["missing"] and found["refused"] is None
    for op in ("extend_attention", "decode_attention"):
        assert (found["ops"][op]["kernel"], found["ops"][op]["remark"]) == ("triton", attention_rule(found))
    plan = found["plan"]
    tokens, running = plan["max_total_num_tokens"], plan["max_running_requests"]
    assert tokens > 100_000 and plan["state_checkpoints"] >= running >= MIN_REQUESTS
    assert tokens > 0.98 * CONVERSATION_TOKENS * running and (tokens > plan["context_len"] or running == MIN_REQUESTS)
    assert plan["states"].startswith(f"{running:,} requests and {plan['state_checkpoints']:,} checkpoints of ")
    assert not plan.get("estimate", False)


def test_every_published_config_has_a_layout() -> None:
    assert CONFIGS.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("directory", ["Qwen3.5-397B-A17B"], indirect=True)
def test_what_does_not_fit_says_what_would(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine has 16 of these GPUs at most, and in 16 bits the model needs more."""
    for tp, message in ((16, "a quantized checkpoint"), (32, "what works: another checkpoint")):
        found = explained(capsys, directory, "--arch", "rtx-5090", "--tp", str(tp))
        assert found["plan"] is None and message in found["problem"]


@pytest.mark.parametrize(("directory", "gpu", "layout"), some_of(EVERY, IN_TURN), indirect=["directory"])
def test_full_attention_takes_triton_or_flashinfer(
    directory: str, gpu: str, layout: int | tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--arch", gpu, *layout_flags(layout), "--with-package", "flashinfer", "--kv-cache-dtype", "bf16")
    asked = explained(capsys, directory, *argv, "--attention-backend", "flashinfer")
    refused = explained(capsys, directory, *argv, "--attention-backend", "trtllm_mha", "--strict-backends")
    why = attention_rule(asked)
    assert asked["refused"] is None and asked["plan"]["max_total_num_tokens"] > 0
    for op in ("extend_attention", "decode_attention"):
        choice = asked["ops"][op]
        assert (choice["kernel"], choice["remark"], choice["note"]) == ("flashinfer", why, "asked for")
        reasons = json.dumps(refused["ops"][op]["not_chosen"])
        assert refused["ops"][op]["kernel"] is None and why in reasons and "needs tcgen05" in reasons

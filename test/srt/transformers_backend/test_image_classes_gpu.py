"""Classes that read images on a GPU in bf16 with default flags: graphs of prompts with pictures pass the canary, and
features are those of the class in fp32 but for roundings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, run_to_end
from srt.transformers_backend.image_classes import CLASSES, ShownPrompt, save_image_class

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}


def check(name: str, folder: Path, device: str) -> None:
    model = save_image_class(name, folder, **SIZES)
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device=device, dtype="bfloat16", skip_tokenizer_init=True, model_impl="transformers",
        max_total_tokens=8192, max_running_requests=8,
    )  # fmt: skip
    runner = create_runner(args)  # and its canary
    assert runner.media is not None
    runner.media.directory = folder
    prompts = [
        ShownPrompt(name, folder).text(5, 1).image(1, 60, 40).text(4, 2),
        ShownPrompt(name, folder).text(9, 3),
        ShownPrompt(name, folder).image(2, 28, 28).text(3, 5).image(3, 40, 60).text(2, 6),
    ]
    scheduler, collector = Scheduler(args, runner, StopChecker(None)), Collector()
    for i, prompt in enumerate(prompts):
        add(scheduler, prompt.request(f"r{i}", NEW_TOKENS))
    run_to_end(scheduler, collector)
    assert {len(tokens) for tokens in collector.tokens.values()} == {NEW_TOKENS}
    assert_clean(scheduler)
    encoder = runner.media.encoder
    assert encoder is not None
    for prompt in (prompts[0], prompts[2]):
        views = [views.patches[0] for views, _ in prompt.seen]
        pixels = torch.cat([torch.from_numpy(patches.pixels) for patches in views])
        got = torch.cat(encoder.encode(pixels, [patches.grid for patches in views])).float().cpu()
        taken = {key: value for key, value in prompt.of_transformers().items() if key not in ("rows", "cols")}
        with torch.inference_mode():
            out = model.get_image_features(**taken).pooler_output
        want = torch.cat([part.reshape(-1, SIZES["hidden_size"]) for part in out])
        assert len(got) == sum(math.prod(patches.grid) for patches in views)
        error = float((got - want).norm() / want.norm())
        assert error < 0.02, f"{name}: features are off by {error:.3f}"
    print(f"{name}: graphs of {list(runner.plan.cuda_graph_bs)[-1:]} requests, features off by {error:.4f}")


@pytest.mark.parametrize("name", CLASSES)
def test_pictures(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, "cuda")

"""Steps with images in CUDA graphs on a GPU, against the same steps launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs
from sglang.srt.towers.base.patch_places import Grid
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.sampling.packed_logprobs import unpacked

from .media_harness import MERGE, SECTIONS, Prompt, media_request, save_seeing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDE = {"head_dim": 128, "rope_parameters": SECTIONS | {"mrope_section": [24, 20, 20]}}


class RandomFeatures:
    """Implements MediaEncoder: features that depend on the first pixel."""

    def __init__(self, plan: Plan) -> None:
        media = plan.description.media
        assert media is not None
        self.width, self.dtype = plan.description.hidden_size * (1 + media.deepstack_levels), getattr(torch, plan.dtype)

    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        features, first = [], 0
        for frames, rows, columns in grids:
            seed = int(1000 * pixels[first, 0].abs())
            count = frames * rows * columns
            values = torch.randn(count // MERGE**2, self.width, generator=torch.Generator().manual_seed(seed))
            features.append(values.to("cuda", self.dtype))
            first += count
        return features


def logprobs(scheduler: Scheduler, prompt: Prompt, folder: Path) -> torch.Tensor:
    """Of all tokens but the first of a prompt, beside three requests that decode."""
    assert scheduler.flush_cache()
    for number in range(3):
        add(scheduler, request(f"t{number}", Prompt().text(9, number).ids, 24, temperature=0.0, ignore_eos=True))
    scheduler.step()
    msg = media_request("seen", prompt, folder, 2)
    msg.return_logprob, msg.logprob_start_len = True, 0
    add(scheduler, msg)
    values: list[Any] = []
    while "seen" in scheduler.reqs:
        scheduler.step()
        for message in scheduler.outbox:
            for rid, given in zip(message.rids, message.logprobs or [], strict=False):
                if rid == "seen" and given is not None:
                    values += unpacked(given).input
        scheduler.outbox.clear()
    run_to_end(scheduler, Collector())
    assert_clean(scheduler)
    return torch.tensor([value for value, _ in values[1:]])


@pytest.mark.parametrize("chunk", [16, 128])
def test_features_in_graphs(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other roundings, as a graph has more rows; a tenth of what another image makes of the numbers at most. The
    start-up canary compares prompts with images as well."""
    save_seeing("qwen3_vl", tmp_path, **WIDE)
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cuda", dtype="bfloat16", skip_tokenizer_init=True, mem_fraction_static=0.2,
        max_total_tokens=4096, max_running_requests=8, cuda_graph_max_bs=8, chunked_prefill_size=chunk,
    )  # fmt: skip
    runner = create_runner(args, create_encoder=RandomFeatures)
    assert runner.media is not None and runner.graphs is not None and runner.media.pace.in_graphs
    runner.media.directory = tmp_path
    scheduler, graphs, with_features = Scheduler(args, runner, StopChecker(None)), runner.graphs, []
    replay = graphs.replay

    def watched(shape: Any, step: Any) -> Any:
        media = None if step.prompts is None else step.prompts.media
        with_features.append(media is not None and bool(media.sources))
        return replay(shape, step)

    monkeypatch.setattr(graphs, "replay", watched)
    prompt, other = (Prompt().text(5, 1).image((1, 8, 8), seed).text(9, 2) for seed in (3, 4))
    in_graphs = logprobs(scheduler, prompt, tmp_path)
    assert any(with_features)
    text = logprobs(scheduler, Prompt().text(40, 5), tmp_path)
    with runner.without_graphs():
        eager = logprobs(scheduler, prompt, tmp_path)
        of_other = logprobs(scheduler, other, tmp_path)
        eager_text = logprobs(scheduler, Prompt().text(40, 5), tmp_path)
    differs, apart = float((in_graphs - eager).abs().mean()), float((of_other - eager).abs().mean())
    print(f"chunks of {chunk}: {differs:.4f} from eager steps, which are {apart:.4f} from another image's")
    assert differs < 0.1 * apart
    assert float((text - eager_text).abs().mean()) < 0.1 * apart, "text behind images reads none of their features"

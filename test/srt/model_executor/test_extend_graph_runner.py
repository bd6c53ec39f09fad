"""Decode, prefill and mixed steps through the padded static inputs of the graphs, against the same steps launched as
they are. A graph is replaced by its step here, so that a CPU can tell whether the padding changes a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor import cuda_graph_runner, extend_graph_runner
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.extend_graph_runner import MAX_PROMPTS, ExtendGraphRunner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import LaunchedForward, StepInput
from sglang.srt.plan.defaults import mixed_decode_sizes
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.models.harness import VOCAB, save_tiny


class StepInPlaceOfGraph:
    """A replay computes the captured step once more, from what the static inputs hold by then."""

    def __init__(self, step: Callable[[], object], pool: Any) -> None:
        self.replay = step
        step()

    def pool(self) -> None:
        return None


class DeviceLengths(TorchNativeAttnBackend):
    """The CPU's attention with lengths read from the device's tensors, as kernels do in a graph."""

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        pass

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        pass

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        pass

    def forward_decode(self, q: torch.Tensor, layer: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().forward_decode(q, layer, replace(batch, seq_lens_cpu=batch.seq_lens.tolist()), out)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        start_loc, prefix_lens = batch.extend_start_loc, batch.extend_prefix_lens
        assert start_loc is not None and prefix_lens is not None
        lens, first = start_loc.diff().tolist(), int(start_loc[0])
        used = [i for i, n in enumerate(lens) if n]
        prompts = replace(
            batch, decodes=None, req_pool_indices=batch.req_pool_indices[used],
            extend_seq_lens_cpu=[lens[i] for i in used], extend_prefix_lens_cpu=prefix_lens[used].tolist(),
        )  # fmt: skip
        super().forward_extend(q[first:], k[first:], v[first:], layer, prompts, out[first:])


def test_sizes_of_the_decoding_part() -> None:
    assert mixed_decode_sizes((1, 2, 4, 8)) == (0, 8)
    assert mixed_decode_sizes((1, 64, 128)) == (0, 64, 128)
    assert mixed_decode_sizes((1, 512)) == (0, 64, 256, 512)


class WatchedRunner:
    """A runner's steps, each of which may change states of its own requests only, and those that it is told to copy."""

    def __init__(self, runner: ModelRunner) -> None:
        self.forward, self.states = runner.forward, runner.pools._states
        self.padded_steps = 0

    def __call__(self, step: StepInput) -> LaunchedForward:
        before = [states.clone() for states in self.states]
        launched = self.forward(step)
        changed = {0, *step.slots.tolist()}
        if step.table_update is not None:
            changed |= set(step.table_update.state_targets.tolist())
        for old, new in zip(before, self.states, strict=True):
            others = [row for row in range(new.shape[1]) if row not in changed]
            assert torch.equal(old[:, others], new[:, others]), (
                "a step changed the state of a request that is not in it"
            )
            self.padded_steps += not torch.equal(old[:, 0], new[:, 0])
        return launched


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5", "nemotron_h", "gpt_oss"])
def test_padding_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(name, tmp_path)
    monkeypatch.setattr(extend_graph_runner, "capture", StepInPlaceOfGraph)
    monkeypatch.setattr(cuda_graph_runner, "capture", StepInPlaceOfGraph)
    outputs, replays = [], []
    for in_graphs in (True, False):
        args = ServerArgs.from_kwargs(
            model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=4096,
            max_running_requests=24, chunked_prefill_size=48,
        )  # fmt: skip
        runner = create_runner(args)
        if in_graphs:
            runner.state.attn_backend = DeviceLengths(runner.plan, "cpu")
            with torch.inference_mode():
                graphs = runner.extend_graphs = ExtendGraphRunner(runner.state, (16, 32, 80), (0, 4, 20))
                runner.graphs = CudaGraphRunner(runner.state, (1, 6, 24))
            watched = WatchedRunner(runner)
            monkeypatch.setattr(runner, "forward", watched)
            original = graphs.replay

            def replay(step: StepInput, original: Any = original) -> Any:
                assert step.extend is not None
                replays.append((step.extend.num_decodes, len(step.extend.extend_lens), len(step.out_cache_loc)))
                return original(step)

            monkeypatch.setattr(graphs, "replay", replay)
        scheduler = Scheduler(args, runner, StopChecker(None))
        generator = torch.Generator().manual_seed(1)
        shared = torch.randint(1, VOCAB, (10,), generator=generator).tolist()
        collector = Collector()
        for i in range(26):
            length = int(torch.randint(1, 60 if i % 4 == 0 else 12, (1,), generator=generator))
            ids = shared[: i % 11] + torch.randint(1, VOCAB, (length,), generator=generator).tolist()
            add(scheduler, request(f"r{i}", ids, 3 + i % 9, temperature=0.0, ignore_eos=True))
            if i % 3 == 0:
                scheduler.step()
                collector.take(scheduler)
        run_to_end(scheduler, collector)
        assert_clean(scheduler)
        outputs.append(collector.tokens)
    assert outputs[0] == outputs[1]
    assert watched.padded_steps or not watched.states, "no step had padding"
    assert any(decodes == 0 for decodes, _, _ in replays) and any(decodes > 4 for decodes, _, _ in replays)
    assert any(prompts > 1 and decodes for decodes, prompts, _ in replays)
    assert all(prompts <= MAX_PROMPTS for _, prompts, _ in replays)

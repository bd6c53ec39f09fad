"""LoRA adapters of a model whose layers are in two stages of a pipeline: each has the part of its layers, the tokens
are those of transformers with the adapter merged, and both refuse what either of them lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rank_processes import run_ranks

from sglang.srt.configs.adapters.files import content_id
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.adapter_files import write_expert_adapter
from srt.managers.fake_runner import Collector, add, request, run_to_end
from srt.managers.test_adapters import NEW_TOKENS, Adapters, prompt

Asked = dict[str, tuple[str, list[int], list[int]]]
"""By a request's id: the adapter's folder ("": none), the prompt and the tokens."""
FORMS: dict[str, dict[str, Any]] = {
    "all layers": {"rank": 5, "names": ("q_proj", "v_proj", "o_proj")},
    "last layer": {"layers_to_transform": [2], "names": ("v_proj", "o_proj"), "strength": 8.0},
}


def _rank(rank: int, folder: str, out: Path, asked: Asked, refused: list[str]) -> None:
    torch.set_num_threads(1)
    args = ServerArgs.from_kwargs(
        model_path=folder, device="cpu", skip_tokenizer_init=True, enable_lora=True, max_total_tokens=4096,
        max_running_requests=8, max_lora_rank=8, pp_size=2,
    )  # fmt: skip
    runner = create_runner(args, rank, f"file://{out}/rendezvous")
    layers, plan = runner.adapters, runner.plan
    assert layers is not None and plan.adapters is not None
    used = sum(side.nbytes for linear in layers.linears for side in (linear.a, linear.b))
    planned = plan.adapters.num_bytes(plan.weights, plan.dtype)
    assert 0 < used <= planned < 1.1 * used, "of this stage's layers; the plan counts routers, too"
    scheduler, collector = Scheduler(args, runner, StopChecker(None)), Collector()
    table = scheduler.adapters
    assert table is not None
    for path in refused:
        table.begin(path, path)
        assert table.end(path, False)
    for rid, (path, ids, _) in asked.items():
        msg = request(rid, ids, NEW_TOKENS, temperature=0.0, ignore_eos=True)
        if path:
            msg.adapter = msg.cache_namespace = content_id(Path(path))
            table.begin(msg.adapter, path)
            assert table.end(msg.adapter, False) == ""
        add(scheduler, msg)
    run_to_end(scheduler, collector)
    for rid, (_, _, tokens) in asked.items():
        assert collector.tokens[rid] == tokens, rid
    parallel_state.shutdown()


def changed(source: Path, folder: Path, old: str, new: str, rows: int) -> str:
    """Writes an adapter with one module's name changed, or with fewer rows of it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = safetensors.torch.load_file(source / "adapter_model.safetensors")
    tensors = {
        name.replace(old, new): t[:rows].contiguous() if old in name and "lora_B" in name else t
        for name, t in tensors.items()
    }
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def test_two_stages_are_one(tmp_path: Path) -> None:
    one = Adapters("qwen3_moe", tmp_path, FORMS)
    experts = tmp_path / "experts"
    one.models["experts"], one.paths["experts"] = (
        write_expert_adapter(experts, one.models[None], 7, "stacked"), experts,
    )  # fmt: skip
    layers = one.models[None].config.num_hidden_layers
    asked = {
        f"{form} {seed}": ("" if form is None else str(one.paths[form]), prompt(seed), one.greedy(form, prompt(seed)))
        for form in (None, *one.paths)
        for seed in (1, 2)
    }
    assert len({tuple(tokens) for rid, (_, _, tokens) in asked.items() if rid.endswith("1")}) == len(one.paths) + 1
    whole = one.paths["all layers"]
    refused = [
        changed(whole, tmp_path / "layer", "layers.0.", f"layers.{layers}.", 1 << 20),
        changed(whole, tmp_path / "first", "layers.0.self_attn.o_proj", "layers.0.self_attn.o_proj", 3),
        changed(whole, tmp_path / "last", f"layers.{layers - 1}.self_attn.o_proj", "layers.2.self_attn.wrong", 1 << 20),
    ]
    run_ranks(_rank, (str(one.folder), tmp_path, asked, refused), 2)

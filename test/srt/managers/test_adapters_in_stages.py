"""LoRA adapters of a model over two ranks: in two stages of a pipeline each has the part of its layers, and both refuse
what either of them lacks; with tensor parallelism each has its share of the vocabulary. The tokens are those of
transformers with the adapter merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rank_processes import run_ranks

from sglang.srt.configs.adapters.files import content_id
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs
from srt.adapter_files import LINEAR, write_expert_adapter
from srt.managers.fake_runner import Collector, add, request, run_to_end
from srt.managers.test_adapters import NEW_TOKENS, Adapters, prompt

Asked = dict[str, tuple[str, list[int], list[int]]]
"""By a request's id: the adapter's folder ("": none), the prompt and the tokens."""
FORMS: dict[str, dict[str, Any]] = {
    "all layers": {"rank": 5, "names": ("q_proj", "v_proj", "o_proj")},
    "last layer": {"layers_to_transform": [2], "names": ("v_proj", "o_proj"), "strength": 8.0},
}


def _rank(rank: int, folder: str, out: Path, asked: Asked, refused: list[str], flags: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    args = ServerArgs.from_kwargs(
        model_path=folder, device="cpu", skip_tokenizer_init=True, enable_lora=True, max_total_tokens=4096,
        max_running_requests=8, max_lora_rank=8, **flags,
    )  # fmt: skip
    runner = create_runner(args, rank, f"file://{out}/rendezvous")
    layers, plan = runner.adapters, runner.plan
    assert layers is not None and plan.adapters is not None
    used = sum(side.nbytes for linear in layers.linears for side in (linear.a, linear.b))
    planned = plan.adapters.num_bytes(plan.weights, plan.dtype)
    assert 0 < used <= planned < 1.1 * used, "of this stage's layers; the plan counts routers, too"
    cut: list[int] = []
    if (overlap := runner.two_batch_overlap) is not None:
        compute = overlap.compute
        overlap.compute = lambda batch, *rest: (cut.append(len(batch.input_ids)), compute(batch, *rest))[1]  # type: ignore[method-assign]
    scheduler, collector = Scheduler(args, runner, StopChecker(None)), Collector()
    table = scheduler.adapters
    assert table is not None
    for path in refused:
        table.begin(content_id(Path(path)), path)
        problem = table.end(content_id(Path(path)), False)
        assert "the model's is of" in problem or "is not served" in problem or "another rank" in problem, problem
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
    assert bool(cut) == ("enable_two_batch_overlap" in flags)
    parallel_state.shutdown()


def changed(source: Path, folder: Path, old: str, new: str, rows: int) -> str:
    """Writes an adapter with one module's name changed, or with fewer rows of it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = safetensors.torch.load_file(source / "adapter_model.safetensors")
    tensors = {
        name.replace(old, new): t[:rows].contiguous() if old in name and "_B" in name else t
        for name, t in tensors.items()
        if "base_layer" not in name
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
        changed(whole, tmp_path / "last", f"layers.{layers - 1}.self_attn.o_proj", "layers.2.mlp.o_proj", 1 << 20),
    ]
    run_ranks(_rank, (str(one.folder), tmp_path, asked, refused, {"pp_size": 2}), 2)


@pytest.mark.parametrize(("flags", "model"), [({"pp_size": 2}, "qwen3_tied_bias"), ({"tp_size": 2}, "qwen3_tied_bias")])
def test_embedding_and_output_head(tmp_path: Path, flags: dict[str, int], model: str) -> None:
    """In the first and the last stage; or in shares of an odd vocabulary."""
    one = Adapters(model, tmp_path, {"all": {"names": ("embed_tokens", "lm_head", "q_proj"), "rank": 8}})
    asked = {
        f"{form} {seed}": ("" if form is None else str(one.paths[form]), prompt(seed), one.greedy(form, prompt(seed)))
        for form in (None, "all")
        for seed in range(10)  # as many rows as keep logits in shares
    }
    refused = [changed(one.paths["all"], tmp_path / end, end, end, 3) for end in ("embed_tokens", "lm_head")]
    run_ranks(_rank, (str(one.folder), tmp_path, asked, refused, {**flags, "lora_target_modules": ["all"]}), 2)


def test_scaled_rows(tmp_path: Path) -> None:
    """Of layers whose columns the ranks share, and whose bias is added behind their sum; of an embedding whose tokens
    they share."""
    names = (*LINEAR, "embed_tokens")
    forms = {"scaled": {"rank": 5, "names": names, "use_dora": True}, "plain": {"names": ("q_proj", "down_proj")}}
    one = Adapters("llama_bias_llama3", tmp_path, forms)
    asked = {
        f"{form} {seed}": ("" if form is None else str(one.paths[form]), prompt(seed), one.greedy(form, prompt(seed)))
        for form in (None, *forms)
        for seed in (1, 2)
    }
    flags = {"tp_size": 2, "lora_paths": [str(one.paths["scaled"])]}
    run_ranks(_rank, (str(one.folder), tmp_path, asked, [], flags), 2)


@pytest.mark.parametrize("model", ["qwen3", "gemma4"])
def test_two_batch_overlap(tmp_path: Path, model: str) -> None:
    """Microbatches alternate by block in one thread, or at each sum in two: each token keeps its own adapter."""
    forms: dict[str, dict[str, Any]] = {
        "all": {"rank": 8, "names": ("embed_tokens", "lm_head", "q_proj", "o_proj", "down_proj")},
        "other": {"rank": 3, "names": ("v_proj", "up_proj"), "strength": 6.0},
    }
    one = Adapters(model, tmp_path, forms)
    asked = {
        f"{form} {seed}": ("" if form is None else str(one.paths[form]), prompt(seed), one.greedy(form, prompt(seed)))
        for form in (None, *forms)  # so that a step's halves have different adapters
        for seed in (1, 2)
    }
    assert len({tuple(tokens) for rid, (_, _, tokens) in asked.items() if rid.endswith("1")}) == 3
    flags = {"tp_size": 2, "enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 8}
    run_ranks(_rank, (str(one.folder), tmp_path, asked, [], {**flags, "lora_target_modules": ["all"]}), 2)

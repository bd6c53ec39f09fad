"""LoRA adapters of every module of every family against transformers with each adapter merged into the weights in fp32:
one adapter for each linear layer that its class has, the embedding, the output head and the experts, and one of all
together, in one batch. What a family refuses stands here by name, and the plan counts exactly the memory that is
there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pairs import some

from sglang.srt.configs.adapters.files import content_id, read_adapter_files
from sglang.srt.errors import UserError
from srt.adapter_files import write_adapter, write_expert_adapter
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.managers.test_adapters import Adapters, prompt
from srt.models.harness import TINY

WITHOUT = ("cohere2",)
"""Computed by transformers' class."""
FAMILIES = [name for name in TINY if not name.endswith("_wide") and name not in WITHOUT]
QUICK = ("deepseek_v2_lite", "kimi_linear", "nemotron_h", "minimax_m3", "step3p7", "gemma4_small", "deepseek_v4")
ENCODER = r"model\.(visual|vision_\w+|multi_modal_projector)(\..*)?"
COMPRESSORS = r"self_attn\.(o_a_proj|compressor\.(indexer\.)?(kv|gate)_proj|compressor\.indexer\.scorer\.weights_proj)"
STREAMS = r"(attn_|mlp_|model\.)hyper_connection.*|ple\.ple_embedding.*|self_attn\.indexer\.index_qk_proj"
REFUSED = {
    "llama4": r"feed_forward\.router",
    "gemma4_moe": r"router\.proj",
    "gemma4_small": r"model\.(embed_tokens_per_layer|per_layer_model_projection)",
    "deepseek_v32": r"self_attn\.indexer\.weights_proj",
    "deepseek_v32_selects_all": r"self_attn\.indexer\.weights_proj",
    "glm_moe_dsa": r"self_attn\.indexer\.weights_proj",
    "glm5_next": rf"{ENCODER}|self_attn\.indexer\.weights_proj",
    "glm5_next_small": rf"{ENCODER}|self_attn\.indexer\.weights_proj",
    "muse_glimmer": rf"{ENCODER}|model\.language_model\.embed_tokens",
    "step3p7": ENCODER,
    "deepseek_v4": COMPRESSORS,
    "deepseek_v4_small": COMPRESSORS,
    "qwen4_exp": STREAMS,
    "qwen4_exp_small": STREAMS,
    "inkling": r"model\.embed_tokens|mlp\.(gate|up|down)_proj|lm_head",
}
"""Patterns of the modules that take no adapters, without the layer: routers, encoders of images, what scores and pools
cached tokens, residual streams, and embeddings whose rows are normalized. Inkling's head leaves out some tokens."""
COLUMNS = {"gpt_oss": (True, True), "llama4": (True, False)}
"""Experts whose parameters are [E, in, out], and whether gate and up alternate in them."""


CLOSE = 5e-4
UNSEEN = re.compile(r".*indexer\.\w+")
"""Adapters that change answers only where they change which tokens are selected."""


def short(module: str) -> str:
    """The name without the layer, equal in all layers."""
    return re.sub(r".*\.(?:layers|blocks)\.\d+\.", "", module) if ".visual." not in module else module


def modules_by_kind(base: torch.nn.Module) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = {}
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            of_encoder = re.fullmatch(ENCODER, name) is not None
            kinds.setdefault(name if of_encoder else short(name), set()).add(name)
    return kinds


def has_joined_experts(base: torch.nn.Module) -> bool:
    return any(name.endswith(".experts") and hasattr(module, "gate_up_proj") for name, module in base.named_modules())


@pytest.mark.parametrize("family", some(FAMILIES, QUICK))
def test_each_module(tmp_path: Path, family: str) -> None:
    one = Adapters(family, tmp_path, {})
    base = one.models[None]
    scheduler = one.scheduler(lora_target_modules=["all"], max_loras_per_batch=32, max_running_requests=32)
    layers, plan = scheduler.runner.adapters, scheduler.runner.plan
    assert layers is not None and plan.adapters is not None
    used = sum(side.nbytes for linear in layers.linears for side in (linear.a, linear.b))
    assert used == plan.adapters.num_bytes(plan.weights, plan.dtype)
    kinds, served, refused = modules_by_kind(base), set[str](), set[str]()
    for number, (kind, modules) in enumerate(kinds.items()):
        path, name = tmp_path / f"adapter {number}", kind.rpartition(".")[2]
        model = write_adapter(path, base, number, (3, 1, 17)[number % 3], (name,), modules=modules, strength=6.0)
        try:
            layers.read(read_adapter_files(path))
        except UserError as error:
            assert f"{path}: " in str(error)
            refused.add(kind)
            continue
        served |= modules
        one.models[kind], one.paths[kind], one.ids[kind] = model, path, content_id(path)
    pattern = REFUSED.get(family, "")
    assert refused == {kind for kind in kinds if re.fullmatch(pattern, kind)}, refused
    path, names = tmp_path / "all", tuple({name.rpartition(".")[2] for name in served})
    one.models["all"], one.paths["all"] = write_adapter(path, base, 99, 8, names, modules=served), path
    if has_joined_experts(base):
        columns, alternating = COLUMNS.get(family, (False, False))
        path = one.paths["experts"] = tmp_path / "experts"
        one.models["experts"] = write_expert_adapter(
            path, base, 98, "flat", columns=columns, alternating=alternating, strength=4.0
        )
    collector, ids = Collector(), prompt(1)
    for form in (None, *one.paths):
        if form is not None:
            one.ids[form] = content_id(one.paths[form])
            one.load(scheduler, form)
        message = request(str(form), ids, 2, temperature=0.0, ignore_eos=True)
        message.adapter = message.cache_namespace = None if form is None else one.ids[form]
        message.return_logprob, message.logprob_start_len = True, 0
        add(scheduler, message)
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    wanted = {form: log_probabilities(one.models[form], ids) for form in (None, *one.paths)}
    for form, (tokens, scores) in wanted.items():
        got = torch.tensor(collector.input_logprobs[str(form)] + collector.logprobs[str(form)])
        assert collector.tokens[str(form)] == tokens, form
        torch.testing.assert_close(got, scores, rtol=0, atol=CLOSE, msg=lambda text, form=form: f"{form}: {text}")
        moved = float((scores - wanted[None][1])[: len(ids) - 1].abs().max())
        assert form is None or moved > 10 * CLOSE or UNSEEN.fullmatch(form), f"{form} changes too little: {moved}"


def log_probabilities(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """The two likeliest tokens behind a prompt, one after the other, and the log probabilities of the prompt's tokens
    but the first, and of these two."""
    with torch.inference_mode():
        first = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        rows = model(torch.tensor([[*ids, first]])).logits[0].log_softmax(-1)
    tokens = [first, int(rows[-1].argmax())]
    return tokens, rows.gather(1, torch.tensor([*ids[1:], *tokens])[:, None])[:, 0]

"""Checkpoints with a draft layer for each depth, as MiMo-V2, Step and Inkling publish them: which are read, and what is
refused.
What the layers guess is compared in `speculative/test_autoregressive_draft.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.speculative import SpeculativeSettings
from sglang.srt.drafts.create import filled_draft
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.cache_spec import Window
from sglang.srt.plan.caches import row_tables
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.plan import make_plan
from sglang.srt.server_args import ServerArgs

from .depth_drafts import DEPTH_FORMS, ByDepthForm, build_depths
from .draft_harness import PlanWithDraft
from .harness import plan_for, save_tiny

Tensors = dict[str, torch.Tensor]
SERVING = ParallelConfig("bfloat16", "bfloat16")


def planned(folder: Path, draft_tokens: int = 3, **args: Any) -> PlanWithDraft:
    plan = plan_for(folder)
    settings = SpeculativeSettings("EAGLE", draft_tokens + 1, **args)
    return PlanWithDraft(plan.model, kv_cache_dtype=plan.kv_cache_dtype, ranks=plan.ranks, settings=settings)


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", DEPTH_FORMS)
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_as_many_layers_as_draft_tokens_are_held_and_counted(name: str, draft_tokens: int, tmp_path: Path) -> None:
    build_depths(name, tmp_path)
    plan = planned(tmp_path, draft_tokens)
    draft = filled_draft(plan, load_model(plan))  # type: ignore[arg-type]
    assert len({cache.layer_id for cache in draft.caches}) == draft_tokens == plan.draft.num_layers
    held = sum(param.tensor.nbytes for loadable, _ in draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32"), "the plan counts other bytes than the draft allocates"


@pytest.mark.parametrize("name", DEPTH_FORMS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, at, form: t.pop(f"{at(1)}{form.names[2]}.weight"), "lacks weights of the model: {1}{hidden_norm}"),
        (lambda t, at, form: t.update({at(2) + "surprise.weight": torch.ones(2)}), "does not have: {2}surprise"),
        (
            lambda t, at, form: t.update({f"{at(2)}{form.names[0]}.weight": torch.ones(64, 64)}),
            r"tensor {2}{projection}.weight has shape \[64, 64\], but config.json calls for \[64, 128\]",
        ),
        (
            lambda t, at, form: [t.pop(key) for key in list(t) if key.startswith(at(1))],
            "has the draft layers .* not all from",
        ),
        (
            lambda t, at, form: [t.pop(key) for i in range(3) for key in list(t) if key.startswith(at(i))],
            "has no tensors at {0}.* no layers for multi-token prediction",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, change: Callable[[Tensors, Callable[[int], str], ByDepthForm], object], message: str, tmp_path: Path
) -> None:
    form = DEPTH_FORMS[name]

    def at(depth: int) -> str:
        return form.at.format(i=depth, layer=depth + 4)

    build_depths(name, tmp_path)
    change_tensors(tmp_path, lambda tensors: change(tensors, at, form))
    for depth in range(3):
        message = message.replace(f"{{{depth}}}", at(depth) if "no tensors" not in message else at(depth)[:17])
    message = message.replace("{projection}", form.names[0]).replace("{hidden_norm}", form.names[2])
    with pytest.raises(UserError, match=message):
        plan = planned(tmp_path)
        filled_draft(plan, load_model(plan))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DEPTH_FORMS)
def test_without_drafts_their_tensors_stay_unread(name: str, tmp_path: Path) -> None:
    build_depths(name, tmp_path)
    change_tensors(tmp_path, lambda t: t.update({DEPTH_FORMS[name].at.format(i=1, layer=5) + "other": torch.ones(2)}))
    load_model(plan_for(tmp_path))  # type: ignore[arg-type]


def test_more_draft_tokens_than_layers_are_refused(tmp_path: Path) -> None:
    build_depths("mimo_v2", tmp_path)
    with pytest.raises(
        UserError, match="drafts with 3 layers, one for each draft token .* 4 .*--speculative-num-steps 3"
    ):
        _ = planned(tmp_path, 4).draft
    change_tensors(tmp_path, lambda t: [t.pop(key) for key in list(t) if key.startswith("model.mtp.layers.2.")])
    with pytest.raises(UserError, match="drafts with 2 layers, .* --speculative-num-steps 2 or fewer"):
        _ = planned(tmp_path).draft
    assert planned(tmp_path, 2).draft.num_layers == 2


def change_config(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize("said", ["published", "as transformers says it", "not said"])
def test_what_configs_say_of_inklings_depths(said: str, tmp_path: Path) -> None:
    """An object of their own, or keys of the text: which depths have windows, which the model's layers with such ones
    do not decide."""
    build_depths("inkling", tmp_path)
    local = {"local_layer_ids": [0, 2]}
    if said != "published":
        text = json.loads((tmp_path / "config.json").read_text())["text_config"]
        more = {"num_mtp_layers": 3, "mtp_local_layer_ids": local["local_layer_ids"]} if "transformers" in said else {}
        change_config(tmp_path, mtp_config=None, text_config=text | local | more)
    plan = planned(tmp_path, 2)
    description = plan.draft.description
    mixers = [layer.mixer for layer in description.model.layers]
    assert [mixer.window for mixer in mixers] == ([0, 0] if said == "not said" else [12, 0])
    assert [mixer.softmax.relative_bias.extent for mixer in mixers] == ([20, 20] if said == "not said" else [12, 20])
    assert description.aux_layers == () and description.form.final_features
    assert description.form.tails == 0, "they are states"
    caches = [{cache.name: cache for cache in layer.caches(SERVING)} for layer in description.model.layers]
    assert ["draft_rows" in each for each in caches] == [False, True]
    for each in caches:
        rows = [tensor.shape[0] for name in ("kv_rows", "block_rows") for tensor in each[name].tensors]
        assert rows == [3 + 2] * 3, "those of two draft tokens more"


def test_another_chain_of_inklings_is_refused(tmp_path: Path) -> None:
    build_depths("inkling", tmp_path)
    change_config(tmp_path, mtp_config={"num_nextn_predict_layers": 3, "chain_hidden_post_norm": True})
    with pytest.raises(UserError, match="chain_hidden_post_norm = True is not computed for drafts"):
        _ = planned(tmp_path).draft


def test_a_config_that_says_there_are_none(tmp_path: Path) -> None:
    save_tiny("step3p7", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="num_nextn_predict_layers is 0: no layer drafts"):
        _ = planned(tmp_path, draft_load_format="dummy").draft


@pytest.mark.parametrize("backend", [None, "flashinfer"])
@pytest.mark.parametrize(("name", "window"), [("MiMo-V2-Flash", 128), ("Step-3.5-Flash", 512)])
def test_published_configs(name: str, window: int, backend: str | None) -> None:
    """The caches of drafts keep two tokens more than the window, which are in a table of their own."""
    folder = Path(__file__).parents[1] / "kernels" / "published" / name
    words = f"--model-path {folder} --tp-size 2 --pp-size 4 --load-format dummy --speculative-algorithm NEXTN"
    more = f" --attention-backend {backend}" if backend else ""
    args = ServerArgs.from_cli(f"{words} --enable-multi-layer-eagle{more}".split())
    model, arch, packages = (
        ModelConfig.from_server_args(args),
        arch_by_name("sm_120"),
        frozenset({"triton", "flashinfer"}),
    )
    plan = make_plan(args, model, arch, 94 << 30, packages, rank=7)
    attention = plan.choices["decode_attention"]
    assert attention.name == "triton" and (backend is None or "window slack" in str(attention.rejected))
    assert make_plan(args, model, arch, 94 << 30, packages, rank=0).next_tokens_read == 3, "all stages cache alike"
    assert [table.tokens for table in row_tables(plan.caches) if isinstance(table, Window)] == [window, window + 2]
    assert plan.next_tokens_read == plan.draft.num_layers == plan.draft.description.form.tails + 1 == 3
    assert plan.draft.description.aux_layers == (47 if window == 128 else 44,)

"""What computes a model, and what is refused: a family, or a class of transformers whose facts a process finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan import served_model
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.served_model import describe_served
from sglang.srt.plan.transformers_backend import asking
from sglang.srt.plan.transformers_backend.class_tables import causal_classes
from sglang.srt.plan.transformers_backend.facts import ClassFacts, ClassRequest
from sglang.srt.plan.two_batch_overlap import two_batch_rule
from sglang.srt.server_args import ServerArgs
from srt.transformers_backend.tiny import config_values, tiny_config

OLMO, OPT, LLAMA = "Olmo3ForCausalLM", "OPTForCausalLM", "LlamaForCausalLM"


def values(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    return config_values(tiny_config(kind), architecture) | more


def described(config: dict[str, Any], **flags: Any) -> ModelDescription:
    return describe_served(ServerArgs(model_path="x", **flags), config, None, "", "x")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes that were asked about. Their facts are found in this process."""
    names: list[str] = []

    def facts_of(request: ClassRequest) -> ClassFacts:
        names.append(request.architecture)
        return trial.facts_of(request)

    monkeypatch.setattr(served_model, "facts_of", facts_of)
    return names


def test_a_family_comes_first_and_asks_no_class(asked: list[str]) -> None:
    model = described(values("llama", LLAMA))
    assert model.transformers_class is None and model.title == LLAMA and asked == []
    assert described(values("llama", LLAMA), model_impl="transformers").title == f"{LLAMA} by transformers"


def test_a_class_computes_what_no_family_does() -> None:
    model = described(values("olmo3", OLMO))
    model.require_served()
    assert model.model_impl == "transformers" and [layer.mixer.window for layer in model.layers] == [12, 12, 12, 0]
    with pytest.raises(UserError, match=f"{OLMO} is not supported"):
        described(values("olmo3", OLMO), model_impl="sglang").require_served()


def test_a_name_that_transformers_does_not_have_asks_no_class(asked: list[str]) -> None:
    assert OLMO in causal_classes() and "Olmo9ForCausalLM" not in causal_classes()
    with pytest.raises(UserError, match=r"Olmo9ForCausalLM .* no class of causal language models.* Supported: "):
        described(values("olmo3", "Olmo9ForCausalLM")).require_served()
    assert asked == []


def test_a_class_that_is_refused_says_why() -> None:
    config = values("phi3", "Phi3ForCausalLM", original_max_position_embeddings=64)
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"longrope.* --json-model-override-args .*max_position_embeddings\":64"):
        described(config, model_impl="transformers")
    with pytest.raises(UserError, match="does not attend once in each layer"):
        described(values("diffllama", "DiffLlamaForCausalLM")).require_served()


def test_code_that_a_model_brings_runs_only_if_it_is_trusted() -> None:
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM", "AutoConfig": "configuration_own.Own"}}
    config = values("olmo3", "OwnForCausalLM") | own
    with pytest.raises(UserError, match="brings its own Python code. If you trust it, pass --trust-remote-code"):
        described(config, model_impl="transformers")


def test_a_config_that_contradicts_the_class_is_refused() -> None:
    with pytest.raises(UserError, match="has 256 embeddings"):
        code = served_model.TransformersClass(
            ClassRequest(values("olmo3", OLMO) | {"vocab_size": 255}, ""),
            trial.facts_of(ClassRequest(values("olmo3", OLMO), "")),
        )
        served_model.class_description(code, None)


@pytest.mark.parametrize(
    ("kind", "architecture", "ranks", "message"),
    [
        ("opt", OPT, RankLayout(2), "the plan of the model's class divides no products over ranks"),
        ("opt", OPT, RankLayout(pp_size=2), "OPTForCausalLM has no plan in transformers that cuts it into stages"),
        ("olmo3", OLMO, RankLayout(2, attn_dp_size=2), "exchanges tokens between the blocks that transformers hides"),
    ],
)
def test_layouts_in_which_a_class_would_be_taken_apart(
    kind: str, architecture: str, ranks: RankLayout, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(described(values(kind, architecture)), ranks)


def test_steps_of_a_class_stay_whole() -> None:
    args = ServerArgs(model_path="x", tp_size=2, enable_two_batch_overlap=True)
    with pytest.raises(UserError, match="a class of transformers computes a step as a whole"):
        two_batch_rule(args, None, described(values("olmo3", OLMO)), {})


def test_drafts_that_read_layers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values("olmo3", OLMO)))
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=256, load_format="dummy",
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(tmp_path),
    )  # fmt: skip
    with pytest.raises(UserError, match="EAGLE3 reads hidden states .* NGRAM and STANDALONE can draft"):
        create_plan(args)


def test_ranks_divide_what_the_plan_of_the_class_divides() -> None:
    """Cohere's heads and MLPs are divided; all heads of OLMo are on every rank, because norms span them."""
    shapes = {}
    for kind, name in (("cohere2", "Cohere2ForCausalLM"), ("olmo3", OLMO)):
        mixer = described(values(kind, name)).layers[0].mixer
        assert mixer.attention_site(2, 1) is not None
        rows = {part.name: (part.rows, part.cols) for part in mixer.weights(64, 2) if hasattr(part, "rows")}
        shapes[kind] = mixer.attention_shape(2).num_heads, rows["self_attn.q_proj"], rows["mlp.down_proj"]
    assert shapes == {"cohere2": (2, (32, 64), (64, 48)), "olmo3": (4, (64, 64), (64, 48))}


def test_facts_are_found_in_a_process_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(type(envs), "SGLANG_CACHE_DIR", tmp_path)
    runs: list[object] = []
    run = subprocess.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(subprocess, "run", counted)
    request = asking.request_of(values("nanochat", "NanoChatForCausalLM"), str(tmp_path), False)
    facts = asking.facts_of(request)
    asking._facts_of.cache_clear()
    assert asking.facts_of(request) == facts == trial.facts_of(request) and len(runs) == 1


def test_a_process_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(type(envs), "SGLANG_CACHE_DIR", tmp_path)
    monkeypatch.setattr(asking, "_TRIAL", "sglang.srt.models.transformers_backend.no_such_module")
    with pytest.raises(UserError, match="cannot be run without weights .*no_such_module"):
        asking.facts_of(ClassRequest(values("olmo3", OLMO), ""))
    assert not (tmp_path / "class_facts").exists()


def test_families_import_no_code_of_transformers() -> None:
    program = (
        "import sys, sglang.srt.model_executor.model_runner, sglang.srt.plan.served_model;"
        "print([name for name in sys.modules if name.split('.')[0] == 'transformers'])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"

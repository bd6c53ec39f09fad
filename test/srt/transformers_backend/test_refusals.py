"""What a class of transformers may do that is not served, one case each: the message says what it is and what to do."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.models.transformers_backend.mixing import Convolutions
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.served_model import describe_served
from sglang.srt.server_args import ServerArgs
from sglang.srt.towers.transformers_class.spec import MODEL_TYPES
from srt.transformers_backend.image_classes import CLASSES as IMAGE_CLASSES
from srt.transformers_backend.text_classes import save_text_model
from srt.transformers_backend.tiny import causal_classes, config_values, save_tiny, tiny_config

READ_MORE = "docs/transformers_models.md"


def described(config: dict[str, Any], **flags: Any) -> ModelDescription:
    model = describe_served(ServerArgs(model_path="x", **flags), config, None, "", "x", written=config)
    model.require_served()
    return model


def values(kind: str, **more: Any) -> dict[str, Any]:
    return config_values(tiny_config(kind), causal_classes()[kind]) | more


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        pytest.param("axk2", "its attention is called with indices", id="selects tokens"),
        pytest.param("diffllama", "does not attend once in each layer", id="two calls a layer"),
        pytest.param("recurrent_gemma", "keeps states that are no keys and values", id="recurrent state"),
        pytest.param("doge", "makes masks of its own", id="own masks"),
        pytest.param("gemma3n_text", "attend to the keys and values of other layers", id="shared keys"),
        pytest.param("bert-generation", "its attention is not causal", id="both ways"),
        pytest.param("bloom", "computes attention itself", id="own attention"),
        pytest.param("jetmoe", "decides by the values of tensors", id="waits for the device"),
    ],
)
def test_published_classes(kind: str, does: str) -> None:
    with pytest.raises(UserError) as refused:
        described(values(kind))
    said = str(refused.value)
    assert causal_classes()[kind] in said and does in said and READ_MORE in said


def changed_attention(**arguments: Any) -> type[torch.nn.Module]:
    class Attention(modeling_llama.LlamaAttention):
        """Attention that passes more arguments."""

        def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **more: Any) -> Any:
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (
                product(hidden_states).view(shape).transpose(1, 2)
                for product in (self.q_proj, self.k_proj, self.v_proj)
            )
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            given = {name: make(hidden_states) for name, make in arguments.items()}
            out, _ = attend(self, q, k, v, None, scaling=self.scaling, **given)
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    return Attention


class Convolved(modeling_llama.LlamaMLP):
    """An MLP behind a convolution over the tokens before it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.over_tokens = torch.nn.Conv1d(size, size, 3, padding=2, groups=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.over_tokens(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class Pointwise(Convolved):
    """The same with a convolution that sees one token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.over_tokens = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 1)


@pytest.mark.parametrize(
    ("part", "replacement", "does"),
    [
        ("LlamaAttention", changed_attention(position_bias=lambda x: x), "its attention is called with position_bias"),
        ("LlamaAttention", changed_attention(block_indices=lambda x: x), "its attention is called with block_indices"),
        ("LlamaAttention", changed_attention(sinks=lambda x: x), "its attention is called with sinks"),
        ("LlamaAttention", changed_attention(is_causal=lambda x: False), "its attention is not causal"),
        ("LlamaMLP", Convolved, "a convolution mixes neighbouring tokens, which may belong to other requests"),
    ],
    ids=["position_bias", "block_indices", "sinks", "not causal", "convolution"],
)
def test_what_a_class_may_do(part: str, replacement: Any, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert described(values("llama"), model_impl="transformers").model_impl == "transformers"
    monkeypatch.setattr(modeling_llama, part, replacement)
    with pytest.raises(UserError) as refused:
        described(values("llama"), model_impl="transformers")
    assert "LlamaForCausalLM" in str(refused.value) and does in str(refused.value) and READ_MORE in str(refused.value)


class NormedExperts(modeling_qwen3_moe.Qwen3MoeExperts):
    """Experts whose outputs are normed one by one, as the decorator of transformers' own classes says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.has_post_expert_norm = True


def test_outputs_of_experts_that_are_normed(monkeypatch: pytest.MonkeyPatch) -> None:
    described(values("qwen3_moe"), model_impl="transformers")
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", NormedExperts)
    with pytest.raises(UserError, match="Qwen3MoeForCausalLM.* its experts' outputs are normed.*"):
        described(values("qwen3_moe"), model_impl="transformers")


def test_a_convolution_that_sees_one_token_mixes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Pointwise)
    assert described(values("llama"), model_impl="transformers").model_impl == "transformers"


@pytest.mark.parametrize("size", [1, 3])
def test_convolutions_are_seen_without_values(size: int) -> None:
    with Convolutions() as seen:
        torch.nn.Conv1d(4, 4, size, device="meta")(torch.empty(1, 4, 7, device="meta"))
    assert seen.mixes == (size > 1)


def test_code_of_a_checkpoint_needs_trust() -> None:
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM", "AutoConfig": "configuration_own.Own"}}
    config = values("olmo3") | {"architectures": ["OwnForCausalLM"]} | own
    with pytest.raises(UserError, match=f"own Python code.*pass --trust-remote-code.*{READ_MORE}"):
        described(config)


def test_old_releases_of_transformers_serve_families_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": "4.57.6"}.__getitem__)
    described(values("llama"))
    said = r"Olmo3ForCausalLM .* transformers 4\.57\.6 .* pip install -U 'transformers>=5'"
    with pytest.raises(UserError, match=said):
        described(values("olmo3"))


@pytest.mark.parametrize("kind", ["Qwen2VL", "PaliGemma", "LlavaNext", "Mllama"])
def test_images_in_other_ways(kind: str) -> None:
    """Positions with sections, images that see themselves both ways, tiles whose edges are cut off, cross attention."""
    config = config_values(getattr(transformers, f"{kind}Config")(), f"{kind}ForConditionalGeneration")
    with pytest.raises(UserError, match="what its class in transformers does with images is not served.*idefics3"):
        described(config)


def shifted(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a function that adds a part of the token before each, without any convolution."""

    def mixed(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + 0.5 * torch.roll(x, 1, dims=1)

    return mixed


@pytest.mark.parametrize("embeds", [False, True], ids=["generates", "embeds"])
def test_the_canary_sees_tokens_that_mix(embeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if embeds:
        save_text_model("llama", "embed", tmp_path)
    else:
        save_tiny("llama", tmp_path)
    args = ServerArgs.from_kwargs(
        model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_running_requests=4, max_total_tokens=512,
        model_impl="transformers", is_embedding=embeds,
    )  # fmt: skip
    create_runner(args)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", shifted(modeling_llama.LlamaMLP.forward))
    with pytest.raises(UserError, match=f"mixes neighbouring tokens outside of attention.*{READ_MORE}"):
        create_runner(args)


def test_every_class_of_images_has_a_test() -> None:
    kinds = {getattr(transformers, f"{kind.architecture}Config").model_type for kind in IMAGE_CLASSES.values()}
    assert kinds == {*MODEL_TYPES}


def test_an_error_of_a_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", fails)
    with pytest.raises(UserError, match="LlamaForCausalLM cannot be run without weights .ValueError: no such thing."):
        described(values("llama"), model_impl="transformers")

"""Models with recurrent layers beyond parity: every cut of a prompt, names as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sglang.srt.plan.model_description import describe_model

from .harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_h_latent", "kimi_linear", "glm5_next")
EXACT = {"rtol": 0.0, "atol": 1e-4}
"""Products of several rows are summed in another order than those of one."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_cut_of_a_prompt_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    runner, tokens = TinyRunner(plan_for(tmp_path)), random_tokens(11, seed=1)
    whole = runner.extend({1: tokens})[0]
    for cut in range(1, len(tokens)):
        parts = [runner.extend({slot: tokens[:cut]})[0] for slot in (2,)]
        parts += runner.extend({2: tokens[cut:]})
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.lens[2] = 0  # the slot's next request: it must not see this one's state
    one_by_one = [runner.extend({3: tokens[:1]})[0][0], *(runner.decode({3: token})[0] for token in tokens[1:])]
    torch.testing.assert_close(torch.stack(one_by_one), whole, **EXACT)


def test_a_shared_expert_as_wide_as_latent_ones_stays_apart(tmp_path: Path) -> None:
    reference = save_tiny("nemotron_h_latent", tmp_path, moe_shared_expert_intermediate_size=32)
    tokens = random_tokens(11, seed=1)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), **EXACT)


def multimodal(name: str, text: Path, folder: Path) -> None:
    """The text model as a multimodal checkpoint has it: names of its own, all experts in one tensor, an image encoder,
    and layers for drafts."""
    tensors = safetensors.torch.load_file(text / "model.safetensors")
    experts = {key: tensors.pop(key) for key in list(tensors) if ".mlp.experts." in key}
    for prefix in sorted({key.split(".mlp.experts.")[0] for key in experts}):
        count = len({key.split(".")[5] for key in experts if key.startswith(prefix + ".")})
        by_part = {
            part: torch.stack([experts[f"{prefix}.mlp.experts.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat((by_part["gate"], by_part["up"]), dim=1)
        tensors[f"{prefix}.mlp.experts.down_proj"] = by_part["down"]
    renamed = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in tensors.items()}
    renamed |= {"model.visual.patch_embed.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    safetensors.torch.save_file(
        {key: tensor.contiguous() for key, tensor in renamed.items()}, folder / "model.safetensors"
    )
    config = json.loads((text / "config.json").read_text())
    wrapper = {
        "architectures": [config.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": name,
        "text_config": config,
        "vision_config": {"hidden_size": 64, "num_heads": 4},
    }
    (folder / "config.json").write_text(json.dumps(wrapper))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_half_of_a_multimodal_checkpoint(name: str, tmp_path: Path) -> None:
    text, both = tmp_path / "text", tmp_path / "both"
    both.mkdir()
    save_tiny(name, text)
    multimodal(name, text, both)
    tokens = random_tokens(20, seed=2)
    got = TinyRunner(plan_for(both)).extend({1: tokens})[0]
    torch.testing.assert_close(got, TinyRunner(plan_for(text)).extend({1: tokens})[0], **EXACT)


@pytest.mark.parametrize(("whole", "text"), [(True, False), (False, True), (None, True)])
def test_the_whole_model_says_whether_its_output_head_is_tied(whole: bool | None, text: bool, tmp_path: Path) -> None:
    """A tied model that transformers saved: it writes the default inside."""
    save_tiny("qwen3_5", tmp_path / "text", tie_word_embeddings=text)
    (tmp_path / "both").mkdir()
    multimodal("qwen3_5", tmp_path / "text", tmp_path / "both")
    config = json.loads((tmp_path / "both" / "config.json").read_text())
    tied = describe_model(config | {"tie_word_embeddings": whole}, None).tie_embeddings
    assert tied is (text if whole is None else whole)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ({"hidden_act": "swish", "output_gate_type": "swish"}, ""),
    ],
)
def test_other_activations_are_refused(name: str, change: dict[str, str], refused: str, tmp_path: Path) -> None:
    """The recurrent layers would compute SiLU."""
    save_tiny(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    found = "\n".join(describe_model(config, None).unsupported)
    assert refused in found and bool(found) is bool(refused)


def test_states_in_16_bits(tmp_path: Path) -> None:
    """By flag: half the memory, and logits that differ by what rounding a state costs."""
    save_tiny("qwen3_5", tmp_path)
    plan = plan_for(tmp_path)
    tokens = random_tokens(30, seed=3)
    results, sizes = [], []
    for dtype in ("", "bfloat16"):
        runner = TinyRunner(plan, state_dtype=dtype)
        states = [cache["state"] for cache in runner.model.caches if cache.name == "state"]
        sizes.append(sum(state.nbytes for state in states))
        results.append(torch.cat([*runner.extend({1: tokens[:20]}), *runner.extend({1: tokens[20:]})]))
    assert sizes[1] * 2 == sizes[0]
    torch.testing.assert_close(results[1][:20], results[0][:20], **EXACT)  # rounded where a step ends
    assert 0 < (results[1] - results[0]).abs().max() < 0.1

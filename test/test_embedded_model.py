"""The model that ships with the package is a real Hugging Face model: transformers loads all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

DIRECTORY = Path(DEFAULT_MODEL_PATH)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEFAULT_MODEL_PATH)


def test_size() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 16e6


def test_our_reading_of_its_config() -> None:
    config = ModelConfig.from_server_args(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH))
    assert config.context_len >= 4096
    assert config.eos_token_ids
    assert config.default_sampling["temperature"] > 0


@pytest.mark.parametrize(
    "text",
    [
        "The old gardener opened a window.",
        "  spaces\n\n\tand tabs ",
        "Zażółć 你好 👩‍👩‍👧 \u0000\u200b",
        "1234567890",
        "def f(x): return x",
    ],
)
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer)


def test_special_tokens_are_single_tokens(tokenizer: Any) -> None:
    for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        ids = tokenizer(text).input_ids
        assert len(ids) == 1, text
        hidden = text.startswith("<|")
        assert tokenizer.decode(ids, skip_special_tokens=True) == ("" if hidden else text)
    assert tokenizer.eos_token == "<|im_end|>"


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text


def test_chat_template_plain(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(tokenizer, messages[1:]) == "<|im_start|>user\nHi<|im_end|>\n"


def test_chat_template_thinking(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    thinking = render(tokenizer, messages, add_generation_prompt=True, enable_thinking=True)
    silent = render(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
    assert thinking.endswith("<|im_start|>assistant\n")
    assert silent.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    past = [
        *messages,
        {"role": "assistant", "content": "Yes", "reasoning_content": "hm"},
        {"role": "user", "content": "So?"},
    ]
    assert "hm" not in render(tokenizer, past)
    assert "<think>\nhm\n</think>" in render(tokenizer, past[:2])


def test_chat_template_tools(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
    ]
    text = render(tokenizer, messages, tools=[tool])
    assert text.startswith("<|im_start|>system\nYou can call")
    assert '"name": "add"' in text.split("<|im_end|>")[0]
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{one}\n{one}<|im_end|>" in text
    assert "<|im_start|>tool\n2<|im_end|>" in text


def test_transformers_runs_it(tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    prompt = torch.tensor([tokenizer("The small boat").input_ids])
    output = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert output.shape[1] > prompt.shape[1]
    assert torch.isfinite(model(prompt).logits).all()

"""Tokenizer, configuration and chat template, as transformers and the server read them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_model.install import EMBEDDED, FILES, MTP_FILES, install
from tiny_model.layout import MARKERS, SPECIAL_TOKENS, TOKENIZER_FILE, VOCAB_SIZE, make_tokenizer, write_files
from tiny_model.mixture import TASK_NAMES, draw
from tiny_model.model import TinyModel
from tiny_model.problem import tool_call_message, user
from tiny_model.render import TEMPLATE_FILE, prompt_text, template
from tokenizers import Tokenizer

from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

CALL = {"name": "f", "arguments": {"n": 1, "s": "x"}}
CALLS = {
    "qwen": '<tool_call>\n{"name": "f", "arguments": {"n": 1, "s": "x"}}\n</tool_call>',
    "glm45": (
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>x</arg_value></tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"n": 1, "s": "x"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"n": 1, "s": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"n": 1, "s": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="s" string="true">x</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
}


def test_the_tokenizer_can_be_made_anew() -> None:
    """From today's data: not the same one, but one that works as well."""
    made, kept = make_tokenizer(), Tokenizer.from_file(str(TOKENIZER_FILE))
    text = " ".join(prompt_text(draw(task, random.Random(1)), thinking=True) for task in TASK_NAMES)
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text
    assert len(made.encode(text).ids) == pytest.approx(len(kept.encode(text).ids), rel=0.05)
    for marker in (*SPECIAL_TOKENS, *MARKERS):
        assert made.token_to_id(marker) == kept.token_to_id(marker), "their ids are in the configuration"


def test_the_same_files_every_time(files: Path, tmp_path: Path) -> None:
    write_files(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made.keys() == set(FILES) - {"model.safetensors"}
    assert made == {path.name: path.read_bytes() for path in files.iterdir()}


def test_shapes_fit_every_block_format(files: Path) -> None:
    config = json.loads((files / "config.json").read_text())
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    for size in (config["hidden_size"], config["intermediate_size"], config["moe_intermediate_size"], heads, kv_heads):
        assert size % 128 == 0
    assert 8 <= config["num_experts"] <= 16 and config["num_experts_per_tok"] == 2
    assert len(config["mlp_only_layers"]) * 2 < config["num_hidden_layers"]
    parameters = sum(p.numel() for p in TinyModel(config, torch.float32).parameters())
    assert 3e6 < parameters < 8e6


@pytest.mark.parametrize("form", CALLS)
def test_calls_in_every_form(form: str) -> None:
    messages = [user("go"), tool_call_message((CALL,))]
    text = template().render(messages=messages, tool_format=form)
    assert text == f"<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n{CALLS[form]}<|im_end|>\n"


def test_kimi_numbers_calls_over_the_conversation() -> None:
    result = {"role": "tool", "content": "1"}
    messages = [user("go"), tool_call_message((CALL, CALL)), result, tool_call_message((CALL,))]
    text = template().render(messages=messages, tool_format="kimi_k2")
    assert [f"functions.f:{i}<" in text for i in range(4)] == [True, True, True, False]


def test_unknown_form_is_refused() -> None:
    with pytest.raises(Exception, match="tool_format is morse; choose qwen, glm45"):
        template().render(messages=[user("go")], tool_format="morse")


def test_markers_are_single_visible_tokens(files: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files)
    assert len(tokenizer) == VOCAB_SIZE
    for text in (*SPECIAL_TOKENS, *MARKERS):
        ids = tokenizer(text).input_ids
        assert len(ids) == 1, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == ("" if text in SPECIAL_TOKENS else text)
    assert len(tokenizer("2026").input_ids) == 4


def rendered_by_server(problem: Any, thinking: bool) -> str:
    template_of_server = ChatTemplate(TEMPLATE_FILE.read_text(encoding="utf-8"), {})
    request = {
        "model": "tiny",
        "messages": list(problem.messages),
        "chat_template_kwargs": {"enable_thinking": thinking, "tool_format": problem.tool_format},
    }
    if problem.tools:
        request["tools"] = list(problem.tools)
    return template_of_server.render(msgspec.convert(request, ChatCompletionRequest))


@pytest.mark.parametrize("task", [name for name in TASK_NAMES if name != "few_shot"])
def test_training_server_and_transformers_render_alike(task: str, files: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files)
    problem = draw(task, random.Random(0))
    for thinking in (True, False):
        wanted = prompt_text(problem, thinking)
        assert rendered_by_server(problem, thinking) == wanted
        options = {"enable_thinking": thinking, "tool_format": problem.tool_format}
        tools = list(problem.tools) or None
        assert wanted == tokenizer.apply_chat_template(
            list(problem.messages), tools=tools, tokenize=False, add_generation_prompt=True, **options
        )


def test_install_copies_what_is_served(tmp_path: Path) -> None:
    source, target = tmp_path / "run", tmp_path / "tiny"
    source.mkdir()
    target.mkdir()
    (target / "left_over.txt").write_text("old")
    for name in FILES:
        (source / name).write_text(name)
    (source / "checkpoint.pt").write_text("large")
    install(source, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {name: name for name in FILES}


def test_install_refuses_half_a_model(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    target.mkdir()
    (target / "config.json").write_text("kept")
    with pytest.raises(ValueError, match=r"lacks .*model.safetensors; is it the output of `train`"):
        install(tmp_path, target)
    assert (target / "config.json").read_text() == "kept"


def test_the_shipped_files_are_those_of_the_script(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert {path.name for path in EMBEDDED.iterdir()} == {*FILES, *MTP_FILES}
    for path in tmp_path.iterdir():
        assert (EMBEDDED / path.name).read_bytes() == path.read_bytes(), path.name
    assert (EMBEDDED / "model.safetensors").stat().st_size < 16e6

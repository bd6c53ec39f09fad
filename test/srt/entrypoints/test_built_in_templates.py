"""The prompts of models that are published without a template, as DeepSeek's own encoders write them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from forked_servers import forked_children

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.entrypoints.openai.built_in_templates import built_in_template, template_source
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.function_call.detection import reasoning_format, tool_call_format
from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from sglang.srt.server_args import ServerArgs

MODELS = {
    "v32": ("DeepseekV32ForCausalLM", "deepseek-ai/DeepSeek-V3.2"),
    "v4": ("DeepseekV4ForCausalLM", "deepseek-ai/DeepSeek-V4-Flash"),
    "0731": ("DeepseekV4ForCausalLM", "/models/DeepSeek-V4-Flash-0731"),
    "vision": ("DeepseekV4ForCausalLM", "deepseek-ai/DeepSeek-V4-Flash-Vision-Exp"),
    "v41": ("DeepseekV41ForCausalLM", "deepseek-ai/DeepSeek-V4.1-Flash"),
}
FORMATS = {
    "v32": ("deepseekv32", "deepseek-v3"),
    "v4": ("deepseekv4", "deepseek-v4"),
    "0731": ("deepseekv4", "deepseek-v4"),
    "vision": ("deepseekv4", "deepseek-v4"),
    "v41": ("deepseekv41", "deepseek-v4"),
}
BOS, EOS, USER, ASSISTANT, SYSTEM = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>",
)  # fmt: skip
IMAGE = "<｜deepseek_image｜>"
OF_75 = SYSTEM + "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def template(model: str) -> ChatTemplate:
    built_in = built_in_template(*MODELS[model])
    assert built_in is not None
    return ChatTemplate(built_in.source(), {})


TEMPLATES = {model: template(model) for model in MODELS}


def render(model: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    return TEMPLATES[model].render(msgspec.convert({"messages": messages, **fields}, ChatCompletionRequest))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def said(content: str, thoughts: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": thoughts}


def called(*calls: tuple[str, str, Any], thoughts: str | None = None, content: str | None = None) -> dict[str, Any]:
    """calls: id, name, arguments."""
    entries = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "reasoning_content": thoughts, "tool_calls": entries}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Wetter für <Ort>", "parameters": {"type": "object"}},
}
SCHEMA = '{"name": "weather", "description": "Wetter für <Ort>", "parameters": {"type": "object"}}'
TOOLS_V32 = f"""

## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{SCHEMA}
</functions>
"""  # noqa: E501
TOOLS_V4 = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{SCHEMA}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501
TOOLS_V41 = TOOLS_V4.replace("｜DSML｜", "｜DSML｜ ").replace(" tool_calls", " calls")
TOOLS = {"v32": TOOLS_V32, "v4": TOOLS_V4, "0731": TOOLS_V4, "vision": TOOLS_V4, "v41": TOOLS_V41}

ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)


def test_one_question() -> None:
    asked = f"{USER}Hi{ASSISTANT}"
    off: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
    on: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    assert render("v32", [user("Hi")]) == render("v32", [user("Hi")], **off) == f"{BOS}{asked}</think>"
    assert render("v32", [user("Hi")], **on) == f"{BOS}{asked}<think>"
    assert render("v4", [user("Hi")]) == render("v4", [user("Hi")], **on) == f"{BOS}{asked}<think>"
    assert render("0731", [user("Hi")]) == f"{BOS}{ABSOLUTE}{asked}<think>"
    assert render("v41", [user("Hi")]) == f"{BOS}{OF_75}{asked}<think>"
    for model in ("v4", "0731", "v41"):
        assert render(model, [user("Hi")], **off) == f"{BOS}{asked}</think>"
        assert render(model, [user("Hi")], reasoning_effort="none") == f"{BOS}{asked}</think>"


@pytest.mark.parametrize(
    ("effort", "of_v4", "of_0731", "of_v41"),
    [
        ("minimal", "", "", 50),
        ("low", "", "", 50),
        ("medium", "", ABSOLUTE, 75),
        ("high", "", ABSOLUTE, 75),
        ("xhigh", ABSOLUTE, ABSOLUTE, 75),
        ("max", ABSOLUTE, BEYOND, 100),
    ],
)
def test_efforts(effort: str, of_v4: str, of_0731: str, of_v41: int) -> None:
    messages, rest = [system("S"), user("Hi")], f"S{USER}Hi{ASSISTANT}<think>"
    assert render("v4", messages, reasoning_effort=effort) == BOS + of_v4 + rest
    for model in ("0731", "vision"):
        assert render(model, messages, reasoning_effort=effort) == BOS + of_0731 + rest
    number = OF_75.replace("75", str(of_v41))
    assert render("v41", messages, reasoning_effort=effort) == BOS + number + rest


def test_efforts_that_are_numbers_and_those_that_are_none() -> None:
    prompt = render("v41", [user("Hi")], chat_template_kwargs={"reasoning_effort": 7})
    assert prompt == BOS + OF_75.replace("75", "7") + f"{USER}Hi{ASSISTANT}<think>"
    for model, effort in (("v41", 0), ("v41", 101), ("v41", True), ("v41", "huge"), ("v4", 7), ("0731", "huge")):
        with pytest.raises(ApiError, match="reasoning_effort must be"):
            render(model, [user("Hi")], chat_template_kwargs={"reasoning_effort": effort})


TURNS = [system("S"), user("one"), said("1", "first"), user("two"), said("2", "second"), user("three")]


@pytest.mark.parametrize(
    ("model", "start"), [("v32", BOS), ("v4", BOS), ("0731", BOS + ABSOLUTE), ("v41", BOS + OF_75)]
)
def test_thoughts_of_earlier_turns(model: str, start: str) -> None:
    on = {"thinking": True}
    without = "".join(f"{USER}{q}{ASSISTANT}</think>{a}{EOS}" for q, a in (("one", 1), ("two", 2)))
    last = f"{USER}three{ASSISTANT}<think>"
    assert render(model, TURNS, chat_template_kwargs=on) == f"{start}S{without}{last}"
    kept = "".join(
        f"{USER}{q}{ASSISTANT}<think>{t}</think>{a}{EOS}" for q, t, a in (("one", "first", 1), ("two", "second", 2))
    )
    with_tools = render(model, TURNS, tools=[TOOL], chat_template_kwargs=on)
    assert with_tools == f"{start}S{TOOLS[model]}{without if model == 'v32' else kept}{last}"
    if model != "v32":
        assert render(model, TURNS, chat_template_kwargs=on | {"drop_thinking": False}) == f"{start}S{kept}{last}"
    marks = {"v41": SYSTEM}.get(model, "")
    off = render(model, TURNS, chat_template_kwargs={"thinking": False})
    assert off == f"{BOS}{marks}S{without}{last}".replace("<think>", "</think>")


CALLS = called(
    ("c1", "weather", '{"city": "Köln", "days": [1, {"x": null}]}'), ("c2", "now", {}), thoughts="Hm.", content="Wait."
)
RESULTS = [result("c2", "noon"), result("c1", "sunny")]


def written(mark: str, section: str) -> str:
    return (
        f'\n\n<{mark}{section}>\n<{mark}invoke name="weather">\n'
        f'<{mark}parameter name="city" string="true">Köln</{mark}parameter>\n'
        f'<{mark}parameter name="days" string="false">[1, {{"x": null}}]</{mark}parameter>\n</{mark}invoke>\n'
        f'<{mark}invoke name="now">\n\n</{mark}invoke>\n</{mark}{section}>{EOS}'
    )


def test_calls_and_results() -> None:
    messages = [user("weather?"), CALLS, *RESULTS]
    on = {"thinking": True, "reasoning_effort": "low"}
    assert render("v32", messages, tools=[TOOL], chat_template_kwargs=on) == (
        f"{BOS}{TOOLS_V32}{USER}weather?{ASSISTANT}<think>Hm.</think>Wait.{written('｜DSML｜', 'function_calls')}"
        "\n\n<function_results>\n<result>noon</result>\n<result>sunny</result>\n</function_results>\n\n<think>"
    )
    results = f"{USER}<tool_result>sunny</tool_result>\n\n<tool_result>noon</tool_result>"  # in the order of the calls
    assert render("v4", messages, tools=[TOOL], chat_template_kwargs=on) == (
        f"{BOS}{TOOLS_V4}{USER}weather?{ASSISTANT}<think>Hm.</think>Wait.{written('｜DSML｜', 'tool_calls')}"
        f"{results}{ASSISTANT}<think>"
    )
    off = {"thinking": False}
    assert render("v41", [*messages, user("Well?")], tools=[TOOL], chat_template_kwargs=off) == (
        f"{BOS}{SYSTEM}{TOOLS_V41}{USER}weather?{ASSISTANT}</think>Wait.{written('｜DSML｜ ', 'calls')}"
        f"{results}\n\nWell?{ASSISTANT}</think>"
    )
    # Without the tools, thoughts go by once there are results.
    assert render("v4", messages, chat_template_kwargs=on) == (
        f"{BOS}{USER}weather?{ASSISTANT}</think>Wait.{written('｜DSML｜', 'tool_calls')}{results}{ASSISTANT}<think>"
    )
    assert render("v32", [*messages, user("Well?")], chat_template_kwargs=on) == (
        f"{BOS}{USER}weather?{ASSISTANT}</think>Wait.{written('｜DSML｜', 'function_calls')}"
        "\n\n<function_results>\n<result>noon</result>\n<result>sunny</result>\n</function_results>\n\n</think>"
        f"{USER}Well?{ASSISTANT}<think>"
    )


def python_calls(call: Callable[[], Any]) -> int:
    """How many functions of Python are called, which templates do for each attribute."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_many_results_are_ordered_in_no_more_steps_than_they_are_written(model: str) -> None:
    """Of calls with the same id, the last counts."""

    def messages(n: int) -> list[dict[str, Any]]:
        calls = called(*((f"c{i % (n - 1)}", "f", "{}") for i in range(n)))
        return [user("a"), calls, *(result(f"c{i}", f"r{i}") for i in reversed(range(n - 1)))]

    prompt = render(model, messages(100))
    assert re.findall(r"<tool_result>r(\d+)", prompt) == [*map(str, range(1, 99)), "0"]
    few, many = (python_calls(partial(render, model, messages(n))) for n in (100, 400))
    assert many < 5 * few


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_results_in_parts_are_ordered_like_others(model: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("noon", "sharp")]
    prompt = render(model, [user("a"), CALLS, {**RESULTS[0], "content": parts}, *RESULTS[1:]])
    assert "<tool_result>sunny</tool_result>\n\n<tool_result>noon\n\nsharp</tool_result>" in prompt


def test_arguments_that_are_no_object() -> None:
    prompt = render("v4", [user("a"), called(("c1", "f", "[1]")), result("c1", "b")])
    assert '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="arguments" string="false">[1]</｜DSML｜par' in prompt


def test_system_messages() -> None:
    messages = [system("S"), user("a"), {"role": "developer", "content": "D"}, user("b")]
    off = {"thinking": False}
    assert render("v4", messages, chat_template_kwargs=off) == f"{BOS}S\n\nD{USER}a\n\nb{ASSISTANT}</think>"
    v41 = render("v41", messages, chat_template_kwargs=off)
    assert v41 == f"{BOS}{SYSTEM}S{USER}a{SYSTEM}D{USER}b{ASSISTANT}</think>"
    last = [user("a"), said("b", "thoughts"), system("S")]
    assert render("v41", last) == f"{BOS}{OF_75}{USER}a{ASSISTANT}</think>b{EOS}{SYSTEM}S{ASSISTANT}<think>"
    assert render("v32", last) == f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}S{ASSISTANT}</think>"
    between = [user("a"), system("S")]
    assert render("v32", between) == f"{BOS}{USER}aS{ASSISTANT}</think>"


def test_continued_answers() -> None:
    messages = [user("a"), said("The an", "R")]
    for model, start in (("v32", BOS), ("v4", BOS), ("0731", BOS + ABSOLUTE), ("v41", BOS + OF_75)):
        on = render(model, messages, continue_final_message=True, chat_template_kwargs={"thinking": True})
        assert on == f"{start}{USER}a{ASSISTANT}<think>R</think>The an"
        off = render(model, messages, continue_final_message=True, chat_template_kwargs={"thinking": False})
        assert off == f"{BOS}{USER}a{ASSISTANT}</think>The an"


def test_schemas_of_answers() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    off: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
    told = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" + json.dumps(
        schema, ensure_ascii=False
    )
    rest = f"{USER}a{ASSISTANT}</think>"
    assert render("v4", [system("S"), user("a")], response_format=form, **off) == f"{BOS}S{told}{rest}"
    assert render("v41", [user("a")], response_format=form, **off) == f"{BOS}{SYSTEM}{told}{rest}"
    assert render("v41", [user("a")], response_format={"type": "json_object"}, **off) == BOS + rest


def test_parts_and_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    parts = [{"type": "text", "text": f"This is no {IMAGE}:"}, image, {"type": "text", "text": "What is it?"}]
    off: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
    shown = f"This is no <|deepseek_image|>:\n\n{IMAGE}\n\nWhat is it?"
    for model in ("vision", "v41"):
        assert render(model, [user(parts)], **off) == f"{BOS}{USER}{shown}{ASSISTANT}</think>"
    for model in ("v4", "vision", "v41"):
        assert render(model, [user([parts[2], parts[2]])], **off) == (
            f"{BOS}{USER}What is it?\n\nWhat is it?{ASSISTANT}</think>"
        )
    with pytest.raises(ApiError, match="no content of type image"):
        render("v4", [user(parts)])
    with pytest.raises(ApiError, match="text only"):
        render("v32", [user(parts)])
    # Pictures come in the order of the messages, and so their results stay in it.
    results = [result("c2", [image]), result("c1", "sunny"), result("c0", IMAGE)]
    blocks = [IMAGE, "sunny", "<|deepseek_image|>"]
    shown = "\n\n".join(f"<tool_result>{block}</tool_result>" for block in blocks)
    for model in ("vision", "v41"):
        assert render(model, [user("a"), CALLS, *results], **off).endswith(f"{USER}{shown}{ASSISTANT}</think>")


def test_images_stay_in_the_order_of_the_messages() -> None:
    """System messages of the vision edition move before the conversation; those of V4.1 stay where they are."""
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    off: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
    swapped = [user([image]), system([image]), user("a")]
    with pytest.raises(ApiError, match="images of system messages must stand before all others"):
        render("vision", swapped, **off)
    assert render("v41", swapped, **off).count(IMAGE) == 2
    for messages in ([system([image]), user([image])], [user("a"), system([image]), user([image])]):
        assert render("vision", messages, **off).startswith(f"{BOS}{IMAGE}{USER}")
    assert render("vision", [user([image]), system("S")], **off) == f"{BOS}S{USER}{IMAGE}{ASSISTANT}</think>"


@pytest.mark.parametrize("model", MODELS)
def test_calls_come_back_and_auto_knows_the_formats(model: str) -> None:
    calls, reasoning = FORMATS[model]
    assert tool_call_format("SomeForCausalLM", TEMPLATES[model].render_probe) == calls
    assert reasoning_format("SomeForCausalLM", TEMPLATES[model].sources, calls) == reasoning
    on: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": {"thinking": True}}
    messages = [user("weather?"), CALLS]
    prompt = render(model, messages[:1], **on)
    whole = render(model, messages, add_generation_prompt=False, **on)
    assert whole.startswith(prompt)
    parsed = parse(
        OutputParser(
            calls=TOOL_CALL_FORMATS[calls],
            tools={"weather": {}, "now": {}},
            reasoning=REASONING_FORMATS[reasoning],
            inside=True,
        ),
        whole[len(prompt) :].removesuffix(EOS),
    )
    assert (parsed.reasoning, parsed.text) == ("Hm.", "Wait.")
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        ("weather", {"city": "Köln", "days": [1, {"x": None}]}),
        ("now", {}),
    ]


def test_where_they_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    none: Any = SimpleNamespace(chat_template=None)
    own: Any = SimpleNamespace(chat_template="{{ messages }}")
    with caplog.at_level(logging.INFO):
        assert template_source(own, *MODELS["v4"]) == "{{ messages }}"
        assert template_source(none, "LlamaForCausalLM", "llama-0731") is None
        assert not caplog.records
        source = template_source(none, *MODELS["0731"])
    assert source == TEMPLATES["0731"].sources
    assert "built-in deepseek_v4.jinja for DeepseekV4ForCausalLM (edition 0731)" in caplog.text


@pytest.mark.parametrize(
    ("path", "edition"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash-0731", "0731"),
        ("/hub/models--deepseek-ai--DeepSeek-V4-Pro-0813/snapshots/0a", "0731"),
        ("/models/flash_0731-fp8/", "0731"),
        ("/hub/models--deepseek-ai--DeepSeek-V4-Flash-Vision-Exp/snapshots/0a", "vision"),
        ("/models/Visionary/DeepSeek-V4-Flash", "first"),
        ("/models/20260731/DeepSeek-V4-Flash", "first"),
        ("/models/2026-0731/DeepSeek-V4-Flash", "first"),
        ("/hub/models--deepseek-ai--DeepSeek-V4-Flash/snapshots/6f0731c2", "first"),
    ],
)
def test_an_edition_is_known_by_a_name_and_by_no_date_or_hash(path: str, edition: str) -> None:
    template = built_in_template("DeepseekV4ForCausalLM", path)
    assert template is not None and template.variables["edition"] == edition


@pytest.mark.parametrize(
    ("architecture", "own", "flag", "prompt"),
    [
        ("DeepseekV4ForCausalLM", None, False, f"{BOS}{USER}Hi{ASSISTANT}<think>"),
        ("DeepseekV4ForCausalLM", "own {{ messages[0].content }}", False, "own Hi"),
        ("DeepseekV4ForCausalLM", "own {{ messages[0].content }}", True, "given Hi"),
        ("DeepseekV4ForCausalLM", None, True, "given Hi"),
        ("Qwen3ForCausalLM", None, False, None),
    ],
)
def test_whose_template_a_server_takes(
    architecture: str, own: str | None, flag: bool, prompt: str | None, tmp_path: Path
) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("given {{ messages[0].content }}")
    args = ServerArgs(model_path="deepseek-ai/DeepSeek-V4-Flash", chat_template=str(given) if flag else None)
    tokenizer = SimpleNamespace(chat_template=own, special_tokens={})
    config = SimpleNamespace(architecture=architecture, context_len=1024)
    manager: Any = SimpleNamespace(tokenizer=tokenizer, model_config=config, media=None)
    state = ServerState(args)
    asked = msgspec.convert({"messages": [user("Hi")]}, ChatCompletionRequest)
    try:
        with forked_children():
            state.connect(manager)
        assert state.engine is not None
        rendered = state.engine.chat_template.render([asked], False)
        if prompt is None:
            with pytest.raises(ApiError, match="no chat template"):
                asyncio.run(rendered)
        else:
            assert asyncio.run(rendered) == [prompt]
    finally:
        state.close()


def test_a_server_says_which_edition_it_has() -> None:
    built_in = built_in_template(*MODELS["v4"])
    assert built_in is not None
    renamed = ChatTemplate(built_in.source(), {}, {"edition": "0731"})
    asked = msgspec.convert({"messages": [user("Hi")]}, ChatCompletionRequest)
    assert renamed.render(asked) == render("0731", [user("Hi")])

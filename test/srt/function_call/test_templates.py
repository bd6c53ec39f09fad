"""What a chat template writes of a message is read back as that message; `auto` knows the format by that."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.output_formats import with_tags_of
from sglang.srt.function_call.detection import Render, reasoning_format, tool_call_format
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from srt.function_call.outputs import TOOLS, Call, random_call, random_text

EMBEDDED = Path(DEFAULT_MODEL_PATH, "chat_template.jinja").read_text()
EMBEDDED_FORMATS = {
    "qwen": "hermes",
    "glm45": "glm45",
    "glm47": "glm47",
    "kimi_k2": "kimi_k2",
    "deepseekv3": "deepseekv3",
    "deepseekv31": "deepseekv31",
    "deepseekv32": "deepseekv32",
}

_TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _chatml(calls: str, thinking: str = "<think>\n{{ m.reasoning_content }}\n</think>\n\n") -> str:
    """A template that writes calls in the documented form of a published family."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}" + thinking + "{% endif %}{{ m.content or '' }}"
        "{% if m.tool_calls %}" + calls + "{% endif %}<|im_end|>\n{% endfor %}" + _TAIL
    )


def _tagged(begin: str, call: str, key: str, value: str, after: str, end: str) -> str:
    return (
        begin + "{% for c in m.tool_calls %}{% set f = c.function %}" + call
        + "{% for k, v in f.arguments.items() %}" + key + value + after + "{% endfor %}" + end
    )  # fmt: skip


_RAW = "{{ v if v is string else v | tojson }}"


def _hunyuan(suffix: str) -> str:
    return _tagged(
        f"<tool_calls{suffix}>\n", f"<tool_call{suffix}>{{{{ f.name }}}}<tool_sep{suffix}>\n",
        f"<arg_key{suffix}>{{{{ k }}}}</arg_key{suffix}>\n", f"<arg_value{suffix}>{_RAW}</arg_value{suffix}>\n", "",
        f"</tool_call{suffix}>\n{{% endfor %}}</tool_calls{suffix}>",
    )  # fmt: skip


_GEMMA_VALUE = (
    "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, e in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ value(e) }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for e in v %}{{ ',' if not loop.first }}{{ value(e) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
PUBLISHED = {
    "hermes": _chatml(
        "{% for c in m.tool_calls %}\n<tool_call>\n"
        '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}"
    ),
    "qwen3_coder": _chatml(
        _tagged(
            "", "\n<tool_call>\n<function={{ f.name }}>\n", "<parameter={{ k }}>\n", _RAW, "\n</parameter>\n",
            "</function>\n</tool_call>{% endfor %}",
        )
    ),
    "mimo": _chatml(
        _tagged(
            "", "<tool_call><function={{ f.name }}>", "<parameter={{ k }}>", _RAW, "</parameter>",
            "</function></tool_call>{% endfor %}",
        )
    ),
    "minimax-m2": _chatml(
        _tagged(
            "\n<minimax:tool_call>\n", '<invoke name="{{ f.name }}">\n', '<parameter name="{{ k }}">', _RAW,
            "</parameter>\n", "</invoke>\n{% endfor %}</minimax:tool_call>",
        )
    ),
    "hunyuan": _chatml(_hunyuan("")),
    "hunyuan-opensource": _chatml(
        _hunyuan(":opensource"), "<think:opensource>{{ m.reasoning_content }}</think:opensource>"
    ),
    "deepseekv4": _chatml(
        _tagged(
            "\n\n<｜DSML｜tool_calls>\n", '<｜DSML｜invoke name="{{ f.name }}">\n',
            '<｜DSML｜parameter name="{{ k }}" string="{{ (v is string) | tojson }}">', _RAW, "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n{% endfor %}</｜DSML｜tool_calls>",
        )
    ),
    "gemma4": _GEMMA_VALUE
    + _chatml(
        "{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{{ value(c.function.arguments) }}<tool_call|>"
        "{% endfor %}",
        "<|channel>thought\n{{ m.reasoning_content }}<channel|>",
    ),
    "mistral": _chatml(
        "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        "{% endfor %}",
        "[THINK]{{ m.reasoning_content }}[/THINK]",
    ),
    "llama3": _chatml(
        '{% for c in m.tool_calls %}{{ "; " if not loop.first }}'
        '{"name": {{ c.function.name | tojson }}, "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    ),
    "pythonic": _chatml(
        "[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ ([v] | string)[1:-1] }}"
        "{% endfor %}){% endfor %}]"
    ),
    "inkling": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}<|message_model|><|content_thinking|>{{ m.reasoning_content }}<|end_message|>"
        "{% endif %}{% if m.content %}<|message_model|><|content_text|>{{ m.content }}<|end_message|>{% endif %}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}<|message_model|>{{ f.name }}"
        '<|content_invoke_tool_json|>{"name":{{ f.name | tojson }},"args":{{ f.arguments | tojson }}}<|end_message|>'
        "{% endfor %}<|content_model_end_sampling|>"
        "{% else %}<|message_{{ m.role }}|><|content_text|>{{ m.content }}<|end_message|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|message_model|>{% endif %}"
    ),
    "gpt-oss": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary "
        "<|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}  # fmt: skip

_JOINED = "{{ begin + c.function.name + middle + c.function.arguments + end }}"
OTHERWISE = {
    "text-arguments": (
        "deepseekv31",
        _chatml(
            "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{% set begin, middle, end = "
            "'<｜tool▁call▁begin｜>', '<｜tool▁sep｜>', '<｜tool▁call▁end｜>' %}"
            + _JOINED + "{% endfor %}<｜tool▁calls▁end｜>"
        ),
    ),
    "no-content": (
        "deepseekv3",
        _chatml("").replace(
            "{{ m.content or '' }}",
            "{% if m.content is none %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{% set begin, middle, end = "
            "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>', '\n```json\n', '\n```<｜tool▁call▁end｜>' %}" + _JOINED
            + "{% endfor %}<｜tool▁calls▁end｜>{% else %}{{ m.content }}{% endif %}",
        ),
    ),
    "id-for-name": (
        "kimi_k2",
        _chatml(
            "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
            "<|tool_call_argument_begin|>{{ c.function.arguments | tojson(separators=(',', ':')) }}<|tool_call_end|>"
            "{% endfor %}<|tool_calls_section_end|>"
        ),
    ),
    "llama4": (
        "pythonic",
        _chatml(
            "<|python_start|><|python_end|>{% for c in m.tool_calls %}"
            '{"name": {{ c.function.name | tojson }}, "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
        ),
    ),
    "short-ids": (
        "mistral",
        _chatml(
            "[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
            '{{ (c.function | tojson)[:-1] }}, "id": {{ c.id | tojson }}}{{ ", " if not loop.last }}{% endfor %}]',
            "[THINK]{{ m.reasoning_content }}[/THINK]",
        ),
    ),
}  # fmt: skip
"""Templates that take calls in another form than most: name of the format, template."""


OWN_THOUGHTS = ("gemma4", "gpt-oss", "hunyuan-opensource", "inkling", "mistral")


def templates() -> list[Any]:
    otherwise = [pytest.param(source, name, None, id=title) for title, (name, source) in OTHERWISE.items()]
    embedded = [pytest.param(EMBEDDED, name, form, id=f"embedded-{form}") for form, name in EMBEDDED_FORMATS.items()]
    return embedded + otherwise + [pytest.param(source, name, None, id=name) for name, source in PUBLISHED.items()]


def render(template: ChatTemplate, messages: list[dict[str, Any]], form: str | None, prompt: bool = False) -> str:
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    options = {} if form is None else {"tool_format": form}
    return template.render(
        ChatCompletionRequest(
            messages=messages, tools=tools, chat_template_kwargs=options, add_generation_prompt=prompt
        )
    )


def message(name: str, text: str, thoughts: str, calls: list[Call]) -> dict[str, Any]:
    """As this server answers, in the format `name`."""
    call_id = ModelFormats(calls_name=name).counted_id
    return {
        "role": "assistant",
        "content": text or None,
        "reasoning_content": thoughts or None,
        "tool_calls": [
            {
                "id": call_id(function, number),
                "type": "function",
                "function": {"name": function, "arguments": json.dumps(values)},
            }
            for number, (function, values) in enumerate(calls)
        ],
    }


@pytest.mark.parametrize(("source", "name", "form"), templates())
def test_messages_come_back(source: str, name: str, form: str | None) -> None:
    rng, template = random.Random(name), ChatTemplate(source, {})
    user = {"role": "user", "content": "question"}
    prompt = render(template, [user], form, prompt=True)
    calls_format = TOOL_CALL_FORMATS[name]
    reasoning = REASONING_FORMATS[name if name in OWN_THOUGHTS else "qwen3"]
    for _ in range(200):
        at_least = 1 if name in ("llama3", "pythonic", "gpt-oss", "inkling") else 0
        calls = [random_call(rng) for _ in range(rng.randrange(at_least, 4))]
        text = "" if name in ("llama3", "pythonic") or ("m.content is none" in source and calls) else random_text(rng)
        thoughts = rng.choice(("", "First,\n\nI think. <b> 東京"))
        if name == "gpt-oss" and text:
            thoughts = ""  # there, thoughts stand beside calls only
        whole = render(template, [user, message(name, text, thoughts, calls)], form)
        assert whole.startswith(prompt)
        output = whole[len(prompt) :].removesuffix("\n").removesuffix("<|im_end|>")
        parsed = parse(OutputParser(calls=calls_format, tools=TOOLS, reasoning=reasoning), output)
        assert parsed.reasoning == thoughts and parsed.text == text
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


@pytest.mark.parametrize(("source", "name", "form"), templates())
def test_auto_knows_the_format(source: str, name: str, form: str | None) -> None:
    if form is not None:
        source = source.replace("tool_format | default('qwen')", repr(form))
    template = ChatTemplate(source, {})
    probe: Render = template.render_probe
    assert tool_call_format("SomeForCausalLM", probe) == name
    expected = {"gpt-oss": "gpt-oss", "mistral": "mistral", "minimax-m2": "minimax", "kimi_k2": "kimi_k2"}
    expected |= {"inkling": "inkling", "gemma4": "gemma4", "glm45": "glm45", "glm47": "glm45"}
    expected |= {"hunyuan": "hunyuan", "hunyuan-opensource": "hunyuan-opensource"}
    expected |= {"deepseekv32": "deepseek-v3", "deepseekv4": "deepseek-v4"}
    if name != "gpt-oss":
        assert reasoning_format("SomeForCausalLM", template.sources, name) == expected.get(name, "qwen3")


def test_auto_where_there_is_nothing_to_know() -> None:
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert tool_call_format("SomeForCausalLM", plain.render_probe) is None
    assert reasoning_format("SomeForCausalLM", plain.sources, None) is None
    refusing = ChatTemplate("{{ raise_exception('no tools') }}", {})
    assert tool_call_format("SomeForCausalLM", refusing.render_probe) is None
    assert tool_call_format("SomeForCausalLM", ChatTemplate(None, {}).render_probe) is None
    assert tool_call_format("GptOssForCausalLM", refusing.render_probe) == "gpt-oss"


@pytest.mark.parametrize(("tokens", "name"), [((), "hunyuan"), (("<tool_calls:opensource>",), "hunyuan-opensource")])
def test_tags_are_those_of_the_tokenizer(tokens: tuple[str, ...], name: str) -> None:
    tokenizer = SimpleNamespace(token_id=lambda tag: tokens.index(tag) if tag in tokens else None)
    assert with_tags_of(tokenizer, "hunyuan") == name  # type: ignore[arg-type]
    assert with_tags_of(tokenizer, "glm47") == "glm47"  # type: ignore[arg-type]
    assert with_tags_of(tokenizer, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(("<s>", "<arg_key:6124c78e>"), "hy_v4:6124c78e"), (("<think>", "<tool_call>"), "hy_v4"), (("<x:y>",), "hy_v4")],
)
def test_a_suffix_of_tags_is_that_of_the_tokenizer(tokens: tuple[str, ...], name: str) -> None:
    tokenizer = SimpleNamespace(added_tokens=dict(enumerate(tokens)))
    assert with_tags_of(tokenizer, "hy_v4") == name  # type: ignore[arg-type]
    calls, reasoning = TOOL_CALL_FORMATS[name], REASONING_FORMATS[name]
    end = name.removeprefix("hy_v4")
    assert reasoning.markers == (f"<think{end}>", f"</think{end}>")
    assert (calls.begin, list(calls.sections)) == (  # type: ignore[union-attr]
        (f"<tool_call{end}>",), [(f"<tool_calls{end}>", f"</tool_calls{end}>")]
    )  # fmt: skip
    assert TOOL_CALL_FORMATS[name] is calls, "it is made once"
    assert "hy_v4:6124c78e" not in TOOL_CALL_FORMATS, "a list of formats names no suffix"


def test_other_formats_have_no_suffix() -> None:
    for name in ("hunyuan:6124c78e", "hy_v4:", "unknown"):
        with pytest.raises(KeyError):
            TOOL_CALL_FORMATS[name]

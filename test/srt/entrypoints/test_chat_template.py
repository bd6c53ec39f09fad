"""Chat templates render as transformers renders them, and mistakes in a conversation are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate, _answer_form, read_template_file
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

CHATML = """\
{%- if tools %}
<|im_start|>system
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
<|im_end|>
{% endif %}
{% for message in messages %}
    {%- if loop.index0 > 50 %}{% break %}{% endif %}
{{- bos_token if loop.first }}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}
{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}{% endif %}
"""
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('must start with the user') }}{% endif %}"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Wetter <heute> für München", "parameters": {"type": "object"}},
}


def request(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": messages, **fields}, ChatCompletionRequest)


def render(template: str | dict[str, str] | None, messages: list[dict[str, Any]], **fields: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(request(messages, **fields))


CONVERSATION = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße 🙂"},
    {"role": "assistant", "content": "Hallo"},
    {"role": "user", "content": "Wie ist das Wetter?"},
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
    ],
)
def test_same_text_as_transformers(fields: dict[str, Any]) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), bos_token="<s>", chat_template=CHATML
    )
    options = {"add_generation_prompt": True, **fields, **fields.get("chat_template_kwargs", {})}
    options.pop("chat_template_kwargs", None)
    expected = reference.apply_chat_template(CONVERSATION, tokenize=False, **options)
    assert render(CHATML, CONVERSATION, **fields) == expected


@pytest.mark.parametrize(
    "options",
    ["", "ensure_ascii=False", "ensure_ascii=True", "indent=2", "separators=(',', ':')", "sort_keys=True", "True, 4"],
)
def test_json_as_transformers_writes_it(options: str) -> None:
    """Published templates give any of these."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    template = f"{{{{ messages | tojson({options}) }}}}"
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template
    )
    assert render(template, CONVERSATION) == reference.apply_chat_template(CONVERSATION, tokenize=False)


def test_continue_final_message_same_as_transformers() -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    messages = [*CONVERSATION, {"role": "assistant", "content": "Das Wetter ist "}]
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), bos_token="<s>", chat_template=CHATML
    )
    expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert render(CHATML, messages, continue_final_message=True) == expected


@pytest.mark.parametrize("text", ["<", "e", "end", "im_end", "|", "assistant", "<|im_end|>"])
def test_a_continued_text_that_the_end_of_a_message_has_in_it(text: str) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    prompt = render(CHATML, messages, continue_final_message=True)
    assert prompt.endswith(f"<|im_start|>assistant\n{text}") and prompt.count("<|im_end|>") == 1 + text.count(
        "<|im_end|>"
    )


def test_tool_call_arguments_reach_the_template_as_an_object() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert '<tool_call>weather {"city": "Köln"}</tool_call>' in render(CHATML, messages)


_CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<"
PRINTS_ANY = _CALLS + "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}>"
JOINS_TEXT = _CALLS + "{{ 'arguments: ' + c.function.arguments }}>"
READS_ENTRIES = _CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}>"
WRITES_JSON = _CALLS + "{{ c.function.arguments | tojson }}>"
_ENDS = "{% endfor %}{% endfor %}"
CUT = '{"path": "a.py", "text": "x = 1'


@pytest.mark.parametrize(
    ("template", "arguments", "shown"),
    [
        (PRINTS_ANY, CUT, CUT),
        (JOINS_TEXT, CUT, f"arguments: {CUT}"),
        (READS_ENTRIES, CUT, "path=a.py;text=x = 1;"),
        (WRITES_JSON, CUT, '{"path": "a.py", "text": "x = 1"}'),
        (READS_ENTRIES, "{'path': 1}", ""),
        (JOINS_TEXT, "{'path': 1}", "arguments: {'path': 1}"),
        (READS_ENTRIES, "[1, 2]", ""),
        (READS_ENTRIES, [1, 2], ""),
        (READS_ENTRIES, "null", ""),
        (READS_ENTRIES, "", ""),
        (READS_ENTRIES, None, ""),
        (JOINS_TEXT, None, "arguments: {}"),
        (JOINS_TEXT, "null", "arguments: {}"),
        (WRITES_JSON, '"{}"', "{}"),
        (WRITES_JSON, '{"a": ' * 200 + "1" + "}" * 200, '{"a": ' * 127 + "{}"),
    ],
)
def test_history_may_have_broken_arguments(template: str, arguments: Any, shown: str) -> None:
    """As text where the template prints text; else the longest part that is an object."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert f"?<{shown}" in render(template + _ENDS, messages)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "- - -"),
        ({"reasoning_effort": "high"}, "- - high"),
        ({"reasoning_effort": "none"}, "False False -"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "True False -"),
    ],
)
def test_effort_none_switches_thoughts_off(fields: dict[str, Any], text: str) -> None:
    template = "{{ [enable_thinking, thinking, reasoning_effort] | map('default', '-') | join(' ') }}"
    assert render(template, [{"role": "user", "content": "Hi"}], **fields) == text


EFFORTS = "{% set numbers = {'none': 0.0, 'low': 0.2, 'high': 0.9} %}{{ numbers[reasoning_effort or 'high'] }}"
"""A template whose effort has a word for none, and that has no switch."""


@pytest.mark.parametrize(
    ("source", "fields", "text"),
    [
        (EFFORTS, {}, "0.9"),
        (EFFORTS, {"reasoning_effort": "low"}, "0.2"),
        (EFFORTS, {"reasoning_effort": "none"}, "0.0"),
        (EFFORTS, {"chat_template_kwargs": {"enable_thinking": False}}, "0.0"),
        (EFFORTS, {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}, "0.2"),
        ("{{ reasoning_effort | default('-') }}", {"reasoning_effort": "none"}, "-"),
        ("{% if reasoning_effort is none %}{% endif %}{{ reasoning_effort }}", {"reasoning_effort": "none"}, ""),
    ],
)
def test_an_effort_that_means_none_switches_thoughts_off(source: str, fields: dict[str, Any], text: str) -> None:
    assert render(source, [{"role": "user", "content": "Hi"}], **fields) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "False low"),
        ({"reasoning_effort": "high"}, "False high"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True low"),
    ],
)
def test_variables_that_a_request_leaves_out_have_the_servers_defaults(fields: dict[str, Any], text: str) -> None:
    args = ServerArgs.from_cli(
        ["--model", "m", "--default-chat-template-kwargs", '{"enable_thinking": false, "reasoning_effort": "low"}']
    )
    template = ChatTemplate(
        "{{ enable_thinking }} {{ reasoning_effort }}{{ messages[0].role[:0] }}", {}, args.default_template_variables()
    )
    assert template.render(request([{"role": "user", "content": "Hi"}], **fields)) == text


def test_fields_that_are_null_are_not_there() -> None:
    """As in messages that clients send back: templates ask for them with a default."""
    template = "{% for m in messages %}<think>{{ m.get('reasoning_content', '') }}</think>{{ m.content }}{% endfor %}"
    answer = {"role": "assistant", "content": "Hi", "reasoning_content": None, "refusal": None, "tool_calls": None}
    assert render(template, [answer]) == "<think></think>Hi"


def test_tool_choice_none_hides_the_tools() -> None:
    assert "weather" not in render(CHATML, CONVERSATION, tools=[WEATHER], tool_choice="none")


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = render(CHATML, [{"role": "developer", "content": parts}])
    assert "<|im_start|>system\none two" in text


def test_template_with_tools_is_chosen_by_name() -> None:
    templates = {"default": "plain", "tool_use": "with tools"}
    assert render(templates, CONVERSATION) == "plain"
    assert render(templates, CONVERSATION, tools=[WEATHER]) == "with tools"


@pytest.mark.parametrize(
    ("template", "messages", "fields", "part"),
    [
        (None, CONVERSATION, {}, "no chat template"),
        (STRICT, CONVERSATION, {}, "must start with the user"),
        ("{{ messages[0].content + 1 }}", CONVERSATION, {}, "failed on these messages"),
        (CHATML, [{"role": "user", "content": [{"type": "input_audio"}]}], {}, "input_audio"),
        (CHATML, CONVERSATION, {"continue_final_message": True}, "assistant"),
        (CHATML, [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], {}, "needs"),
    ],
)
def test_refusals(template: str | None, messages: list[dict[str, Any]], fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ApiError, match=part) as refused:
        render(template, messages, **fields)
    assert refused.value.status == 400


def test_broken_template_is_a_start_up_error() -> None:
    with pytest.raises(UserError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_template_files(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("hello")
    (tmp_path / "t.json").write_text(json.dumps({"chat_template": "from json"}))
    (tmp_path / "bad.json").write_text("{}")
    assert read_template_file(str(tmp_path / "t.jinja")) == "hello"
    assert read_template_file(str(tmp_path / "t.json")) == "from json"
    for name, part in (("missing.jinja", "no such file"), ("bad.json", "chat_template")):
        with pytest.raises(UserError, match=part):
            read_template_file(str(tmp_path / name))


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "raise_exception.__globals__.keys()",
        "cycler.__init__.__globals__.os",
        "messages.append(1)",
        "messages[0].update(role='system')",
        "'{0.__class__.__mro__}'.format(messages)",
    ],
)
def test_templates_reach_nothing_of_python(expression: str) -> None:
    """They come with a model, from anybody."""
    with pytest.raises(ApiError, match="the chat template"):
        render(f"{{{{ {expression} }}}}", CONVERSATION)


@pytest.mark.parametrize("schema", ["", "$$ANY$$", "{", "[" * 100_000])
def test_a_schema_that_is_no_json_reaches_no_template(schema: str) -> None:
    """SGLang's word for any object, or what is refused by name behind the template."""
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], json_schema=schema)
    assert _answer_form(request) == {"response_format": {"type": "json_object"}}

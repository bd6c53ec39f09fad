"""Writes what models write: outputs of every format, good ones and broken ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"$ref": "#/$defs/where"},
            "options": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": ["boolean", "null"]},
        },
        "$defs": {"where": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
    },
    "now": {},
    "mcp.files-read": {"type": "object", "properties": {"path": {"type": "string"}}},
}

_STRINGS = (
    "", "Paris", "東京 🗼", 'a "quoted" word', "back\\slash", "two\nlines", " spaces ", "{", "}]", "<b>", "5", "null",
    "it's", "a, b; c", "</", "<tool", "tab\tnul\x01", "\n", "e\u0301 \u2028",
)  # fmt: skip
_TEXTS = (
    "", "Hello.", "I'll look.\n\nOne moment", "東京 🗼", "a < b && c[0]", "{", "x\n y", "<|", "[", "(", "`code`",
    "1. <b>bold</b>", "f(x)",
)  # fmt: skip


def _value(rng: random.Random, schema: Any, depth: int = 2) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, list):
        return rng.choice((True, False, None))
    if "$ref" in schema:
        return rng.choice((1.5, -3, None))
    if kind == "string":
        return rng.choice(_STRINGS)
    if kind == "integer":
        return rng.randrange(-5, 10**12)
    if kind == "array":
        return [rng.choice(_STRINGS) for _ in range(rng.randrange(3))]
    return _object(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    makers: list[Callable[[], Any]] = [
        lambda: rng.choice(_STRINGS), lambda: rng.random() * 100, lambda: rng.choice((True, False, None)),
        lambda: [rng.choice(_STRINGS), rng.randrange(9)],
    ]  # fmt: skip
    if depth:
        makers.append(lambda: _object(rng, depth - 1))
    return {key: rng.choice(makers)() for key in rng.sample(("k", "größe", "a b", '"', "x"), rng.randrange(4))}


def random_call(rng: random.Random) -> Call:
    name = rng.choice(tuple(TOOLS))
    properties = TOOLS[name].get("properties", {})
    keys = rng.sample(tuple(properties), rng.randrange(len(properties) + 1))
    return name, {key: _value(rng, properties[key]) for key in keys}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(call: Call) -> str:
    return f'<tool_call>\n{{"name": {_json(call[0])}, "arguments": {_json(call[1])}}}\n</tool_call>'


def _glm(gap: str, tag: str = "tool_call") -> Callable[[Call], str]:
    def write(call: Call) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{_raw(value)}</arg_value>{gap}" for key, value in call[1].items()
        )
        return f"<{tag}>{call[0]}{gap}{values}</{tag}>"

    return write


def _hunyuan(suffix: str = "", after_name: str = "<tool_sep>\n", line: str = "\n") -> Writer:
    def write(call: Call) -> str:
        values = "".join(
            f"<arg_key{suffix}>{key}</arg_key{suffix}>{line}<arg_value{suffix}>{_raw(value)}</arg_value{suffix}>{line}"
            for key, value in call[1].items()
        )
        return f"<tool_call{suffix}>{call[0]}{after_name}{values}</tool_call{suffix}>{line}"

    section = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")
    return Writer(
        _each(write, "", f"{section[0]}{line}", section[1]), (*section, f"<tool_call{suffix}>", f"<arg_key{suffix}>")
    )


def _dsml(section: str, mark: str = "｜DSML｜") -> Writer:
    def write(call: Call) -> str:
        values = "".join(
            f'<{mark}parameter name="{key}" string="{_json(isinstance(value, str))}">{_raw(value)}</{mark}parameter>\n'
            for key, value in call[1].items()
        )
        return f'<{mark}invoke name="{call[0]}">\n{values}</{mark}invoke>\n'

    return Writer(_each(write, "", f"<{mark}{section}>\n", f"</{mark}{section}>"), (f"<{mark}", f"</{mark}"))


def _qwen3_coder(call: Call) -> str:
    values = "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{values}</function>\n</tool_call>"


def _mimo(call: Call) -> str:
    values = "".join(
        f"<parameter={key}>{_raw(value).replace('&', '&amp;')}</parameter>" for key, value in call[1].items()
    )
    return f"<tool_call><function={call[0]}>{values}</function></tool_call>"


def _minimax(call: Call) -> str:
    values = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in call[1].items())
    return f'<invoke name="{call[0]}">\n{values}</invoke>\n'


def _minicpm5(call: Call) -> str:
    values = "".join(f'<param name="{key}">{_cdata(_raw(value))}</param>' for key, value in call[1].items())
    return f'<function name="{call[0]}">{values}</function>'


def _cdata(text: str) -> str:
    return f"<![CDATA[{text}]]>" if set(text) & set("<&\n") else text


def _step3(call: Call) -> str:
    values = "".join(
        f'<steptml:parameter name="{key}">{_raw(value)}</steptml:parameter>\n' for key, value in call[1].items()
    )
    return (
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{call[0]}">\n{values}</steptml:invoke>'
        "<｜tool_call_end｜>\n"
    )


def _gemma4(call: Call) -> str:
    return f"<|tool_call>call:{call[0]}{_keyed(call[1])}<tool_call|>"


def _keyed(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_keyed(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_keyed, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else _json(value)


_M3 = "]<]minimax[>["


def _minimax_m3(call: Call) -> str:
    return f'{_M3}<invoke name="{call[0]}">{_nested(call[1])}{_M3}</invoke>\n'


def _nested(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"{_M3}<item>{_nested(entry)}{_M3}</item>" for entry in value)
    if isinstance(value, dict):
        return "".join(f"{_M3}<{key}>{_nested(entry)}{_M3}</{key}>" for key, entry in value.items())
    return _raw(value)


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return repr(value)


def _pythonic(calls: list[Call]) -> str:
    texts = (
        f"{name}({', '.join(f'{key}={_python(value)}' for key, value in values.items())})" for name, values in calls
    )
    return f"[{', '.join(texts)}]"


def _harmony(call: Call) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>"
        f"{_json(call[1])}<|call|>"
    )


def _muse(call: Call) -> str:
    values = "".join(f'<atem:parameter name="{key}">{_raw(value)}</atem:parameter>\n' for key, value in call[1].items())
    return (
        f'<|start|>assistant to={call[0]}<|message|><atem:function_calls>\n<atem:invoke name="{call[0]}">\n'
        f"{values}</atem:invoke>\n</atem:function_calls><|eom|>"
    )


def _muse_message(before: str, calls: str, after: str) -> str:
    first = f"<|start|>assistant to=user<|message|>{before}<|eom|>" if before else ""
    return first + calls + (f"<|start|>assistant to=user<|message|>{after}<|eot|>" if after else "")


@dataclass(frozen=True)
class Writer:
    """`calls`: a row of calls. `message`: text, calls, text. `markers`: what must not be seen in the text."""

    calls: Callable[[list[Call]], str]
    markers: tuple[str, ...]
    message: Callable[[str, str, str], str] = lambda before, calls, after: before + calls + after
    starts_output: bool = False
    """Calls come first: text before them would make them text."""


def _each(write: Callable[[Call], str], between: str = "", before: str = "", after: str = "") -> Any:
    return lambda calls: before + between.join(map(write, calls)) + after


def _harmony_message(before: str, calls: str, after: str) -> str:
    first = f"<|channel|>commentary<|message|>{before}<|end|>" if before else ""
    return first + calls + (f"<|start|>assistant<|channel|>final<|message|>{after}<|return|>" if after else "")


def _invoke(section: str) -> Writer:
    return Writer(
        _each(_minimax, "", f"<{section}>\n", f"</{section}>"),
        (f"<{section}>", f"</{section}>", "<invoke", "</invoke>"),
    )


def _inkling(call: Call) -> str:
    return (
        f"<|message_model|>{call[0]}<|content_invoke_tool_json|>"
        f'{{"name":{_json(call[0])},"args":{_json(call[1])}}}<|end_message|>'
    )


def _inkling_message(before: str, calls: str, after: str) -> str:
    first = f"<|message_model|><|content_text|>{before}<|end_message|>" if before else ""
    last = f"<|message_model|><|content_text|>{after}<|end_message|>" if after else ""
    return first + calls + last + "<|content_model_end_sampling|>"


def _call_object(call: Call, arguments: str) -> str:
    return _json({"name": call[0], arguments: call[1]})


_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

WRITERS: dict[str, Writer] = {
    "qwen25": Writer(_each(_hermes, "\n"), ("<tool_call>", "</tool_call>")),
    "hermes": Writer(_each(_hermes, "\n"), ("<tool_call>", "</tool_call>")),
    "glm45": Writer(_each(_glm("\n"), "\n"), ("<tool_call>", "</tool_call>", "<arg_key>")),
    "glm47": Writer(_each(_glm("")), ("<tool_call>", "</tool_call>", "<arg_key>")),
    "kimi_k2": Writer(
        lambda calls: _KIMI[0] + "".join(
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(values)}<|tool_call_end|>"
            for number, (name, values) in enumerate(calls)
        ) + _KIMI[1],
        (*_KIMI, "<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "deepseekv3": Writer(
        _each(
            lambda call: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{_json(call[1])}\n```"
            "<｜tool▁call▁end｜>", "\n", *_DEEPSEEK
        ),
        (*_DEEPSEEK, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    "deepseekv31": Writer(
        _each(
            lambda call: f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{_json(call[1])}<｜tool▁call▁end｜>",
            "", *_DEEPSEEK
        ),
        (*_DEEPSEEK, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", "｜DSML｜ "),
    "gigachat35": _dsml("tool_calls", "｜GCML｜"),
    "hunyuan": _hunyuan(),
    "hunyuan-opensource": _hunyuan(":opensource", "<tool_sep:opensource>\n"),
    "hy_v4": _hunyuan(after_name="", line=""),
    "hy_v4:6124c78e": _hunyuan(":6124c78e", "", ""),
    "qwen3_coder": Writer(_each(_qwen3_coder, "\n"), ("<tool_call>", "</tool_call>", "<function=", "</function>")),
    "mimo": Writer(_each(_mimo), ("<tool_call>", "</tool_call>", "<function=", "</function>")),
    "minimax-m2": _invoke("minimax:tool_call"),
    "dots": _invoke("dots_function_call"),
    "minimax-m3": Writer(
        _each(_minimax_m3, "", f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"), (_M3, "<invoke", "</invoke>")
    ),
    "minicpm5": Writer(_each(_minicpm5), ("<function", "</function>", "<param")),
    "step3": Writer(
        _each(_step3, "", "<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
        ("<｜tool_calls_begin｜>", "<｜tool_call_end｜>", "<steptml:invoke"),
    ),
    "gemma4": Writer(_each(_gemma4), ("<|tool_call>", "<tool_call|>", '<|"|>')),
    "iquest_q1": Writer(_each(_glm("", "iquest_tool_call")), ("<iquest_tool_call>", "</iquest_tool_call>")),
    "interns1": Writer(
        _each(lambda call: f"<|action_start|> <|plugin|>\n{_call_object(call, 'parameters')}<|action_end|>"),
        ("<|action_start|>", "<|action_end|>"),
    ),
    "gigachat3": Writer(
        _each(lambda call: f"<|function_call|>{_call_object(call, 'arguments')}"), ("<|function_call|>",)
    ),
    "apertus2509": Writer(
        lambda calls: f"<|tools_prefix|>[{', '.join(_json({name: values}) for name, values in calls)}]<|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "lfm2": Writer(
        lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "mistral": Writer(
        _each(lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{_json(call[1])}"), ("[TOOL_CALLS]", "[ARGS]")
    ),
    "llama3": Writer(
        lambda calls: "<|python_tag|>" + "; ".join(
            f'{{"name": {_json(name)}, "parameters": {_json(values)}}}' for name, values in calls
        ),
        ("<|python_tag|>",),
    ),
    "pythonic": Writer(
        lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>", ("<|python_start|>", "<|python_end|>")
    ),
    "gpt-oss": Writer(_each(_harmony), ("<|start|>", "<|channel|>", "<|message|>", "<|call|>"), _harmony_message),
    "muse": Writer(_each(_muse), ("<|start|>", "<|message|>", "<|eom|>", "<atem:", "</atem:"), _muse_message),
    "inkling": Writer(_each(_inkling), ("<|message_model|>", "<|content_", "<|end_message|>"), _inkling_message),
}  # fmt: skip

BARE_WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "lfm2": lambda calls: (
        f"<|tool_call_start|>[{', '.join(_call_object(call, 'arguments') for call in calls)}]<|tool_call_end|>"
    ),
    "gigachat3": lambda calls: "".join(
        f"function call<|role_sep|>\n{_call_object(call, 'arguments')}<|message_sep|>\n\n" for call in calls
    ),
    "llama3": lambda calls: "\n".join(_json({"name": name, "parameters": values}) for name, values in calls),
    "pythonic": _pythonic,
    "gpt-oss": lambda calls: "".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{_json(values)}<|call|><|start|>assistant"
        for name, values in calls
    ).removesuffix("<|start|>assistant"),
    "muse": lambda calls: "".join(map(_muse, calls)).removeprefix("<|start|>assistant").replace("<|eom|>", "<|eot|>"),
    "inkling": lambda calls: "<|message_model|>".join(
        f"{name}<|content_invoke_tool_json|>{_json({'args': values, 'name': name})}<|content_model_end_sampling|>"
        for name, values in calls
    ),
    "mistral": lambda calls: "[TOOL_CALLS] " + _json([{"name": name, "arguments": values} for name, values in calls]),
}
"""Other forms of the same calls."""
MESSAGE_FORMATS = ("gpt-oss", "inkling", "muse")
"""Formats whose outputs are rows of messages."""


def writable(name: str, call: Call) -> Call:
    """The call without what the format `name` has no form for."""
    if name == "pythonic" and call[0] == "mcp.files-read":  # an identifier there
        return "now", {}
    if name == "minimax-m3":  # values without a type are text there
        return call[0], {key: value for key, value in call[1].items() if key != "options"}
    return call


def random_text(rng: random.Random) -> str:
    return rng.choice(_TEXTS)


def random_output(rng: random.Random, name: str) -> str:
    """What a model may write: mostly good, sometimes broken at random places."""
    writer = WRITERS[name]
    parts = []
    for _ in range(rng.randrange(1, 3)):
        write = BARE_WRITERS.get(name, writer.calls) if rng.random() < 0.3 else writer.calls
        calls = [random_call(rng) for _ in range(rng.randrange(3))]
        parts.append(writer.message(random_text(rng), write(calls), random_text(rng)))
    output = "".join(parts)
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        output = _damaged(rng, output, writer)
    return output


def _damaged(rng: random.Random, text: str, writer: Writer) -> str:
    start = rng.randrange(len(text) + 1)
    kind = rng.randrange(5)
    if kind == 0:
        return text[:start]
    if kind == 1:
        return text[:start] + text[start + rng.randrange(6) :]
    if kind == 2:
        marker = rng.choice((*writer.markers, "{", '"', "}", "]", ")", "\\", "=", "unknown"))
        return text[:start] + marker[: rng.randrange(1, len(marker) + 1)] + text[start:]
    if kind == 3:
        end = min(len(text), start + rng.randrange(40))
        return text[:end] + text[start:end] + text[end:]
    return text.replace("get_weather", "get_whether", 1)

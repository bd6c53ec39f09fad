"""Converts tools of the Responses API to functions that any model may call, and calls to the items that clients know.

A model is offered only functions. Those of a namespace are prefixed with its name; a custom tool takes a text; tools
that OpenAI's models know without a description, and that run at the client, are described here. Tools that run at
OpenAI are left out.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.openai.protocol import MAX_TOOLS
from sglang.srt.utils.partial_json import longest_object

logger = logging.getLogger(__name__)

LEFT_OUT = frozenset(
    "web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 file_search code_interpreter "
    "image_generation mcp programmatic_tool_calling".split()
)
"""Types of tools that OpenAI's servers run."""
TOOL_TYPES = (
    *("function", "custom", "namespace", "local_shell", "shell", "apply_patch", "tool_search"),
    *sorted(LEFT_OUT),
)
_NAMED = ("function", "custom", "namespace")
_BETWEEN = "__"
"""Separator between the name of a namespace and that of a function in it."""
TEXT = "input"
"""The name of the one argument of a custom tool."""


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """What a custom tool takes: any text, or one of a grammar, which the model is shown and not held to."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, omit_defaults=True):
    """A tool, told apart by its `type`. Those that OpenAI's servers run are left out."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(TOOL_TYPES)})]
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    execution: str | None = None
    environment: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type not in TOOL_TYPES:
            raise ValueError(f"tools of type {self.type[:64]!r} are not supported; offer a function in its place")
        if self.type in _NAMED and not self.name:
            raise ValueError(f"a {self.type} needs a name")
        if any(tool.type not in ("function", "custom") for tool in self.tools or ()):
            raise ValueError(f"the {self.type} {self.name[:64]!r} may have tools of type function and custom only")

    @property
    def runs_at_client(self) -> bool:
        """Returns whether the client runs the tool; others run at OpenAI's servers and are not offered."""
        if self.type == "tool_search":
            return self.execution == "client"
        if self.type == "shell":
            return (self.environment or {}).get("type", "local") == "local"
        return self.type not in LEFT_OUT


class CallItem(NamedTuple):
    """How calls of a type of tool are written: `type` of the item, prefix of its id, and the field with the model's
    text. `events`: prefix of the stream events of that text, if there are any."""

    type: str
    prefix: str
    field: str
    events: str | None = None


CALL_ITEMS = {
    "function": CallItem("function_call", "fc", "arguments", "response.function_call_arguments"),
    "custom": CallItem("custom_tool_call", "ctc", TEXT, "response.custom_tool_call_input"),
    "local_shell": CallItem("local_shell_call", "lsh", "action"),
    "shell": CallItem("shell_call", "sh", "action"),
    "apply_patch": CallItem("apply_patch_call", "apc", "operation"),
    "tool_search": CallItem("tool_search_call", "tsc", "arguments"),
}
"""Form of call items by the type of the tool."""
_STRINGS = {"type": "array", "items": {"type": "string"}}
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "local_shell": (
        "Runs a program on the user's machine and returns its output.",
        {
            "command": {**_STRINGS, "description": 'The program and its arguments, as ["bash", "-lc", "ls"].'},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
    ),
    "shell": (
        "Runs commands in a shell on the user's machine and returns what they print.",
        {
            "commands": {**_STRINGS, "description": "Lines for the shell, each of which runs by itself."},
            "timeout_ms": {"type": "integer"},
            "max_output_length": {"type": "integer", "description": "Characters of each output that are returned."},
        },
    ),
    "apply_patch": (
        "Creates, changes or deletes a file on the user's machine.",
        {
            "type": {"enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {
                "type": "string",
                "description": "Lines that begin with a space, - or +, in hunks behind @@; of a new file all with +.",
            },
        },
    ),
}
"""Description and argument properties of a tool by its type; the properties are those of the call items."""
_REQUIRED = {"local_shell": ["command"], "shell": ["commands"], "apply_patch": ["type", "path"]}


class OfferedTool(NamedTuple):
    """A tool as the model is offered it. `name`: the name by which the model calls it."""

    name: str
    tool: ResponseTool
    namespace: str | None = None

    def function(self) -> dict[str, Any]:
        """Returns the function of a chat request."""
        tool = self.tool
        description, parameters = tool.description, tool.parameters
        if tool.type == "custom":
            description, parameters = _custom_description(tool), _object({TEXT: {"type": "string"}}, [TEXT])
        elif tool.type in _BUILT_IN:
            description, properties = _BUILT_IN[tool.type]
            parameters = _object(properties, _REQUIRED[tool.type])
        function: dict[str, Any] = {"name": self.name}
        if description is not None:
            function["description"] = description
        if parameters is not None:
            function["parameters"] = parameters
        if tool.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _custom_description(tool: ResponseTool) -> str:
    given = "" if tool.description is None else f"{tool.description}\n"
    text = f"{given}Takes one text, the argument `{TEXT}`, as it is."
    if tool.format is None or not tool.format.definition:
        return text
    return f"{text} It follows this grammar ({tool.format.syntax or 'lark'}):\n{tool.format.definition}"


def offered_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model calls a function of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


class ToolCatalog:
    """The tools of one request, by the names that the model uses."""

    def __init__(self, tools: Iterable[ResponseTool]) -> None:
        self._offered: dict[str, OfferedTool] = {}
        self._by_own_name: dict[str, dict[str, OfferedTool]] = {}
        for tool in tools:
            if tool.type == "namespace":
                for inner in tool.tools or ():
                    self._add(OfferedTool(offered_name(inner.name, tool.name), inner, tool.name))
            elif tool.runs_at_client:
                self._add(OfferedTool(tool.name if tool.type in _NAMED else tool.type, tool))
            else:
                _log_left_out(tool.type)

    def _add(self, offered: OfferedTool) -> None:
        """Adds a tool; one that comes again, as in a second search, replaces the first."""
        self._offered[offered.name] = offered
        self._by_own_name.setdefault(offered.tool.name or offered.name, {})[offered.name] = offered

    def find(self, name: str, namespace: str | None = None) -> OfferedTool | None:
        """Returns the tool that a model or client means. A function of a namespace is also found by its own name if
        that is unique."""
        exact = self._offered.get(offered_name(name, namespace))
        if exact is not None or namespace is not None:
            return exact
        alike = self._by_own_name.get(name, {})
        return next(iter(alike.values())) if len(alike) == 1 else None

    def functions(self, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Returns the functions of a chat request; `only` those of these names."""
        chosen = self._offered.values() if only is None else [self._offered[name] for name in dict.fromkeys(only)]
        return [offered.function() for offered in chosen]

    def call_item(self, item_id: Callable[[str], str], status: str, call_id: str, name: str) -> dict[str, Any]:
        """Returns the item of a call without arguments, which `fill` adds. item_id: makes an id."""
        offered = self.find(name)
        form = CALL_ITEMS["function" if offered is None else offered.tool.type]
        item = {"id": item_id(form.prefix), "type": form.type, "status": status, "call_id": call_id}
        if form.events is not None:
            item["name"] = name if offered is None else offered.tool.name
            if offered is not None and offered.namespace:
                item["namespace"] = offered.namespace
        if form.type == "tool_search_call":
            item["execution"] = "client"
        fill(item, "")
        return item


@functools.cache
def _log_left_out(kind: str) -> None:
    """Logs a kind of tool once, as agents send it with every request."""
    logger.warning("Tools of type %s run at OpenAI's servers, not here: models are not offered them.", kind)


def fill(item: dict[str, Any], arguments: str) -> None:
    """Writes the arguments of a call, as the model wrote them, into its item."""
    kind = item["type"]
    if kind == "function_call":
        item["arguments"] = arguments
    elif kind == "custom_tool_call":
        item[TEXT] = custom_text(arguments)
    elif kind == "local_shell_call":
        item["action"] = {"type": "exec", "command": [], "env": {}, **longest_object(arguments)}
    elif kind == "shell_call":
        item["action"] = {"commands": [], "timeout_ms": None, "max_output_length": None, **longest_object(arguments)}
    else:
        item["operation" if kind == "apply_patch_call" else "arguments"] = longest_object(arguments)


def custom_text(arguments: str) -> str:
    """Returns the text for a custom tool, also if the model gave the argument another name, or none."""
    values = longest_object(arguments)
    if isinstance(values.get(TEXT), str):
        return str(values[TEXT])
    texts = [value for value in values.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else arguments


def written_arguments(values: Any) -> str:
    """Returns values as JSON text."""
    return json.dumps(values, ensure_ascii=False)

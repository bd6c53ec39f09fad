"""Tools of Anthropic's Messages API.

Functions have a schema. Some client tools have none, because Anthropic's models know them; other models get a
description and schema from here. Tools that Anthropic's servers run are left out of requests and history.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.anthropic.content import MAX_BLOCKS, Block, CacheControl

logger = logging.getLogger(__name__)

LEFT_OUT = frozenset(
    "web_search web_fetch code_execution advisor tool_search_tool_bm25 tool_search_tool_regex mcp_toolset".split()
)
"""Tools that Anthropic's servers run, by type without its date."""
_DATE = re.compile(r"_[0-9]{8}$")
_TEXT, _LINE = {"type": "string"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _LINE, "description": "The first line and the last one; -1 is the end."}
_FILE_COMMANDS = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "The whole new file, for create."},
    "old_str": {**_TEXT, "description": "The text to replace, which the file has once, for str_replace."},
    "new_str": {**_TEXT, "description": "What stands there then."},
    "insert_line": {**_LINE, "description": "The line behind which the text goes, 0 for the beginning, for insert."},
    "insert_text": _TEXT,
    "view_range": _RANGE,
}


def _schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open, and returns what it prints.",
        _schema({"command": _TEXT, "restart": {"type": "boolean", "description": "Begins with a new shell."}}),
    ),
    "text_editor": (
        "Views, creates and changes files.",
        _schema(
            {"command": {"enum": ["view", "create", "str_replace", "insert"]}, **_FILE_COMMANDS}, "command", "path"
        ),
    ),
    "memory": (
        "Keeps notes for later conversations in files below /memories; view that folder first.",
        _schema(
            {
                "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
                **_FILE_COMMANDS,
                "old_path": _TEXT,
                "new_path": _TEXT,
            },
            "command",
        ),
    ),
}
"""Client tools without a schema, by type without its date: description, and schema of the arguments."""


class MessageTool(msgspec.Struct):
    """A tool: a function of the client, which has a schema, or one by its type."""

    name: str = ""
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=MAX_BLOCKS)] | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        if self.kind not in (None, *_KNOWN, *LEFT_OUT):
            raise ValueError(f"tools of type {str(self.type)[:64]!r} are not supported; offer a function in its place")
        if not self.name and self.runs_at_client:
            raise ValueError("a tool needs a name")
        if self.kind is None and self.input_schema is None:
            raise ValueError(f"the tool {self.name[:64]!r} needs an input_schema")

    @property
    def kind(self) -> str | None:
        """Returns the type without its date; None for a function."""
        return None if self.type in (None, "custom") else _DATE.sub("", str(self.type))

    @property
    def runs_at_client(self) -> bool:
        """Returns whether the client runs it, so that the model is offered it."""
        return self.kind not in LEFT_OUT

    @property
    def shown_description(self) -> str | None:
        """Returns the description that the model sees; of a known tool, the server's own."""
        return self.description if self.kind is None else _KNOWN[self.kind][0]

    @property
    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the arguments; of a known tool, the server's own."""
        return self.input_schema or {} if self.kind is None else _KNOWN[self.kind][1]


def offered_tools(tools: list[MessageTool] | None) -> list[MessageTool]:
    """Returns the tools that the model is offered."""
    for tool in tools or ():
        if not tool.runs_at_client:
            _log_left_out(str(tool.kind))
    return [tool for tool in tools or () if tool.runs_at_client]


@functools.cache
def _log_left_out(kind: str) -> None:
    """Logs a kind of tool once, as agents send it with every request."""
    logger.warning("Tools of type %s run at Anthropic's servers, not here: models are not offered them.", kind)


class HostedToolBlock(Block):
    """What another server did, and what came of it. The model does not see it."""


class ServerToolUse(HostedToolBlock, tag="server_tool_use"):
    pass


class WebSearchResult(HostedToolBlock, tag="web_search_tool_result"):
    pass


class WebFetchResult(HostedToolBlock, tag="web_fetch_tool_result"):
    pass


class CodeExecutionResult(HostedToolBlock, tag="code_execution_tool_result"):
    pass


class BashExecutionResult(HostedToolBlock, tag="bash_code_execution_tool_result"):
    pass


class EditorExecutionResult(HostedToolBlock, tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchResult(HostedToolBlock, tag="tool_search_tool_result"):
    pass


class AdvisorResult(HostedToolBlock, tag="advisor_tool_result"):
    pass


class McpToolUse(HostedToolBlock, tag="mcp_tool_use"):
    pass


class McpToolResult(HostedToolBlock, tag="mcp_tool_result"):
    pass


class McpToolListing(HostedToolBlock, tag="mcp_tool_listing"):
    pass


AnyHostedToolBlock = (
    ServerToolUse
    | WebSearchResult
    | WebFetchResult
    | CodeExecutionResult
    | BashExecutionResult
    | EditorExecutionResult
    | ToolSearchResult
    | AdvisorResult
    | McpToolUse
    | McpToolResult
    | McpToolListing
)

"""Reads sample prompts from a file as token ids: lines of text, or JSON lines with texts and conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.built_in_templates import model_template
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer


def read_prompts(path: str, args: ServerArgs, architecture: str, max_tokens: int, longest: int) -> list[list[int]]:
    """Returns the token ids of the file's prompts: at most `max_tokens` in all, `longest` each. The rest of the file is
    not read.

    Each line is a prompt. In a file named .jsonl, or beginning with an object, it is {"text": ...} or {"messages":
    [...]}, perhaps with "tools", which is rendered as a server of the model does. Raises UserError.
    """
    tokenizer = load_tokenizer(args)
    assert tokenizer is not None
    template = ChatTemplate(*model_template(args, tokenizer, architecture, None))
    prompts: list[list[int]] = []
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            for ids in _encoded(file, path, tokenizer, template):
                prompts.append(ids[: min(longest, max_tokens)])
                max_tokens -= len(prompts[-1])
                if max_tokens == 0:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--calibrate {path}: {error}") from error
    if not prompts:
        raise UserError(f"--calibrate {path}: no prompts; each line should hold one")
    return prompts


def _encoded(lines: Iterable[str], path: str, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[list[int]]:
    objects: bool | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if objects is None:
            objects = path.endswith(".jsonl") or line.lstrip().startswith("{")
        where = f"--calibrate {path}, line {number}"
        text, is_chat = _text(line, where, template) if objects else (line.rstrip("\r\n"), False)
        ids = tokenizer.encode(text, add_special_tokens=not is_chat)  # templates spell special tokens out
        if ids:
            yield ids


def _text(line: str, where: str, template: ChatTemplate) -> tuple[str, bool]:
    """Returns the prompt, and whether the chat template made it."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return entry["text"], False
    if not isinstance(entry, dict) or "messages" not in entry:
        raise UserError(f'{where}: expected {{"text": "..."}} or {{"messages": [...]}}')
    if not template.sources:
        raise UserError(f'{where}: "messages" need a chat template, which this model has not; give {{"text": "..."}}')
    try:
        request = msgspec.convert({"messages": entry["messages"], "tools": entry.get("tools")}, ChatCompletionRequest)
        request.add_generation_prompt = request.messages[-1]["role"] != "assistant"
        return template.render(request), True
    except (msgspec.ValidationError, ApiError) as error:
        raise UserError(f"{where}: {error}") from error

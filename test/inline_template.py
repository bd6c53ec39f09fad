"""A chat template as a service has it, which renders here and not in processes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.entrypoints.openai.chat_template import ChatTemplate
from sglang.srt.entrypoints.openai.message_order import MessageRules
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest


class InlineTemplate:
    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, {})

    async def render(self, bodies: Sequence[ChatCompletionRequest], is_long: bool) -> list[str]:
        return [self._template.render(body) for body in bodies]

    def message_rules(self, tools: list[dict[str, Any]] | None) -> MessageRules:
        return self._template.message_rules(tools)

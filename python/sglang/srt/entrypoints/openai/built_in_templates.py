"""Chat templates of models that are published without one."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from sglang.srt.entrypoints.openai.template_process import TemplateSource
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "templates"


class BuiltInTemplate(NamedTuple):
    """A template file. `variables`: set unless a server or request sets them."""

    file: str
    variables: Mapping[str, str] = MappingProxyType({})

    def source(self) -> str:
        """Returns the template's text, preceded by its variables."""
        defaults = [f"{{%- set {name} = {name} | default({text!r}) -%}}\n" for name, text in self.variables.items()]
        return "".join(defaults) + (_FOLDER / self.file).read_text(encoding="utf-8")


def _v4(edition: str) -> BuiltInTemplate:
    return BuiltInTemplate("deepseek_v4.jinja", {"edition": edition})


_BY_ARCHITECTURE: Mapping[str, BuiltInTemplate] = {
    "DeepseekV32ForCausalLM": BuiltInTemplate("deepseek_v32.jinja"),
    "DeepseekV4ForCausalLM": _v4("first"),
    "DeepseekV41ForCausalLM": _v4("4.1"),
}
_EDITIONS: Mapping[tuple[str, str], BuiltInTemplate] = {
    ("DeepseekV4ForCausalLM", "0731"): _v4("0731"),
    ("DeepseekV4ForCausalLM", "0813"): _v4("0731"),
    ("DeepseekV4ForCausalLM", "Vision"): _v4("vision"),
}
"""Templates by architecture and a word in the model's path: editions with the same config and different prompts."""


def built_in_template(architecture: str, model_path: str) -> BuiltInTemplate | None:
    """Returns the template; None for a model whose checkpoints contain one."""
    editions = (
        template for (of, word), template in _EDITIONS.items() if of == architecture and _is_named(model_path, word)
    )
    return next(editions, _BY_ARCHITECTURE.get(architecture))


def _is_named(model_path: str, word: str) -> bool:
    """Returns whether a component of the path is a name that contains this word: dates and hashes may have the same
    digits."""
    return re.search(rf"[A-Za-z][^/]*(?<![0-9A-Za-z]){word}(?![0-9A-Za-z])", model_path) is not None


def template_source(tokenizer: Tokenizer, architecture: str, model_path: str) -> str | dict[str, str] | None:
    """Returns the tokenizer's own template, else the server's built-in one, else None."""
    built_in = None if tokenizer.chat_template else built_in_template(architecture, model_path)
    if built_in is None:
        return tokenizer.chat_template
    variables = ", ".join(f"{name} {value}" for name, value in built_in.variables.items())
    logger.info(
        "chat template: the built-in %s for %s%s, as the checkpoint has none (--chat-template gives another)",
        built_in.file,
        architecture,
        f" ({variables})" if variables else "",
    )
    return built_in.source()


def model_template(
    args: ServerArgs, tokenizer: Tokenizer | None, architecture: str, given: str | None
) -> TemplateSource:
    """Returns the template for conversations with the model. `given`: the text of --chat-template, if any."""
    source: str | dict[str, str] | None = given
    if source is None and tokenizer is not None:
        source = template_source(tokenizer, architecture, args.model_path)
    special_tokens = {} if tokenizer is None else tokenizer.special_tokens
    return TemplateSource(source, special_tokens, args.default_template_variables())

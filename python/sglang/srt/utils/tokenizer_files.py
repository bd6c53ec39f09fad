"""Reads the files of a Hugging Face tokenizer directory other than the vocabulary: special tokens and chat
templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.errors import UserError

MAX_FILE_BYTES = 64 << 20
"""Limit of tokenizer_config.json, of a template, and of similar files."""
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parsed files of one directory; `config` is tokenizer_config.json (empty if there is none)."""

    directory: Path
    config: dict[str, Any]
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None
    """A Jinja template, several by name, or None."""

    @property
    def has_own_code(self) -> bool:
        """Returns whether the tokenizer is a Python class that the model's directory contains."""
        return "AutoTokenizer" in (self.config.get("auto_map") or {})

    @property
    def added_tokens(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns the tokens of `added_tokens_decoder` with their ids. Raises UserError."""
        try:
            return [(int(key), dict(token)) for key, token in self.config.get("added_tokens_decoder", {}).items()]
        except (ValueError, TypeError, AttributeError):
            path = self.directory / "tokenizer_config.json"
            raise UserError(f"{path}: added_tokens_decoder must hold tokens by their ids.") from None

    @property
    def json_path(self) -> Path:
        """Returns the path of tokenizer.json, which may not exist."""
        return self.directory / "tokenizer.json"


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Reads the files of a directory. Raises UserError for malformed JSON."""
    config = _read_object(directory / "tokenizer_config.json")
    tokens = {**_read_object(directory / "special_tokens_map.json"), **config}
    special = {name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(tokens.get(name))) is not None}
    return TokenizerFiles(directory, config, special, _chat_template(directory, config))


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return value


def _text_of(path: Path) -> str:
    """Returns a file's text. Raises UserError for a file that is not text or too large."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UserError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB, which no such file needs.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: {error}") from None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Returns the chat template. Files take precedence over tokenizer_config.json; further templates may be in
    additional_chat_templates/."""
    single = directory / "chat_template.jinja"
    if single.is_file():
        default = _text_of(single)
        more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        if not more:
            return default
        return {"default": default, **{path.stem: _text_of(path) for path in more}}
    legacy = _read_object(directory / "chat_template.json").get("chat_template")
    value = legacy if legacy is not None else config.get("chat_template")
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value if _is_named_template(entry)} or value
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise UserError(f"{directory}: chat_template must be a Jinja template, or a list of some with name and template.")


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry

"""The front by its name in SGLang."""

from sglang.srt.managers.front.tokenizer_manager import ServerStatus, TokenizerManager

__all__ = ["ServerStatus", "TokenizerManager"]

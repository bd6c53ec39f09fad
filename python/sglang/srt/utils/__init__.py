"""Names that ported code imports from here."""

from sglang.srt.hardware.arch import is_sm120_supported

__all__ = ["is_sm120_supported"]

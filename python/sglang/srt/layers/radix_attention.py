"""`Attention` under the name that SGLang has for it."""

from sglang.srt.layers.attention.call_site import Attention as RadixAttention

__all__ = ["RadixAttention"]

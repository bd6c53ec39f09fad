"""The experts of the published models as one rank sees them: what configurations are shipped for."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.tuning.search_space import MoeShape


def shapes() -> Iterator[MoeShape]:
    """E, N (intermediate dims of a rank), H, top-k, scheme. One expert more where the shared one is kept among them."""
    for experts, top_k in ((160, 8), (161, 9)):  # GLM-4.7 on 8 and 4 GPUs
        yield from (MoeShape(experts, inter, 5120, top_k, "fp8_channel") for inter in (192, 384))
    for experts, top_k in ((384, 8), (385, 9)):  # Kimi K2 on 8 GPUs
        yield from (MoeShape(experts, 256, 7168, top_k, scheme) for scheme in ("int4_g32", "nvfp4"))
    for hidden in (7168, 6144):  # DeepSeek-V3.2, GLM-5 on 8 and 4 GPUs
        for experts, top_k in ((256, 8), (257, 9)):
            yield from (MoeShape(experts, inter, hidden, top_k, "fp8_block") for inter in (256, 512))
    # DeepSeek-V4-Flash on 8, 4, 2 and 1 GPUs; GPT-OSS-120B on 1, 2, 4 and 8: half of the columns, or whole groups of 64
    yield from (MoeShape(256, inter, 4096, 6, "mxfp4") for inter in (256, 512, 1024, 2048))
    yield from (MoeShape(128, inter, 2880, 4, "mxfp4", True) for inter in (2880, 1440, 768, 384))
    for scheme in (None, "fp8_block"):
        yield MoeShape(128, 768, 2048, 8, scheme)  # Qwen3-30B-A3B
        yield MoeShape(256, 512, 2048, 8, scheme)  # Qwen3.5-35B-A3B


CARDS = ("rtx-pro-6000-server", "rtx-5090", "gb10")
"""One product of each architecture and SM count; all editions of the RTX PRO 6000 have the first one's."""

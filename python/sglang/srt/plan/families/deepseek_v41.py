"""DeepSeek-V4.1: attention over a window and compressed entries that layers share, lagged hyper-connections, Engram
tables."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.deepseek_v4 import DEEPSEEK_V4, LAYER_NAMES, NAMES
from sglang.srt.plan.layer_spec import HyperConnections

_OF_V4 = ("moe.hash", "attn.compressor.places")
_INDEXER = "attn.indexer."

V41_NAMES = replace(
    NAMES,
    model={ours: name for ours, name in NAMES.model.items() if ours != "head_mix"},
    layer={
        **{
            ours: name
            for ours, name in LAYER_NAMES.items()
            if ours not in _OF_V4 and not ours.startswith("attn.index_compressor")
        },
        "attn.index_k": f"{_INDEXER}wk",
        "attn.index_norm": f"{_INDEXER}k_norm",
        "ngrams": "engram",
        "ngrams.table": "engram.embed",
        "ngrams.project": "engram.wkv",
    },
    behind=(),
    # The bias for image tokens is not loaded where images are not served, and in drafts, which propose text.
    ignore=(*NAMES.ignore, "ffn.gate.bias_vl"),
    unread=("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline"),
)

DEEPSEEK_V41 = replace(
    DEEPSEEK_V4,
    title="DeepSeek V4.1",
    model_types=("deepseek_v41",),
    architectures=("DeepseekV41ForCausalLM",),
    names=V41_NAMES,
    published={},
    router=replace(DEEPSEEK_V4.router, image_correction="bias_vl"),
    shared_entries=True,
    residual=HyperConnections(4, lagged=True),
    mtp=None,
)

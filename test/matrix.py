"""What tests of whole models cross: kinds of tiny models, layouts of ranks and features, and what goes with what.

A new kind of model, layout or feature is one entry here. A test asks for kinds and layouts by their tags, so that it
tries the new one with all others; `docs/testing.md` says how. `test_matrix.py` holds this table to the server: what it
refuses is refused there, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.plan.ranks import ONE_RANK, RankLayout


@dataclass(frozen=True)
class Kind:
    """A tiny model with a mechanism that others do not have."""

    tiny: str
    """Name in `TINY` of `srt/models/harness.py`; "": the embedded model."""
    attention: str
    """What its layers keep of a request and attend to. The first kind of each is the smallest."""
    more: str = ""
    """Further tags, separated by commas."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that differ."""
    at_four: Mapping[str, Any] = field(default_factory=dict)
    """More keys that differ, so that four ranks can share the attention."""
    page: int = 1
    """The smallest page that holds whole entries of every cache, in tokens."""
    kv_heads: int = 2
    """KV heads of layers that attend to everything; a latent counts as one. 0: no rank holds what another one does."""
    tp: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of ranks that can share the attention."""
    stages: int = 3
    """The most stages of a pipeline, up to three."""

    @property
    def tags(self) -> frozenset[str]:
        """`attention` and `more`."""
        return frozenset({self.attention, *filter(None, self.more.split(", "))})


ALIKE: Any = {"kv_heads": 1}
OWN: Any = {"kv_heads": 0}
EVEN: Any = {"tp": (1, 2, 4)}
HYBRID: Any = {**EVEN, "at_four": {"linear_num_key_heads": 4}}
COMPRESSED: Any = {**EVEN, **OWN, "at_four": {"o_groups": 4}}
KV_HEAD: Any = {**ALIKE, "changes": {"num_key_value_heads": 1}}
EIGHT_HEADS: Any = {"kv_heads": 4, "changes": {"num_attention_heads": 8, "num_key_value_heads": 4}}
WHOLE = "computed as a whole"
STREAMS = "streams, experts, states, own sums"
KINDS: Mapping[str, Kind] = {
    "dense": Kind("qwen3", "full", "plain"),
    "experts": Kind("qwen3_moe", "full", "plain, experts"),
    "norms over heads": Kind("minimax_m2", "full", "experts, own sums", **EVEN),
    "embedded": Kind("", "full", "embedded, experts"),
    "KV head": Kind("qwen3", "full", "plain, one KV head, cut heads, for ranks", **KV_HEAD),
    "experts, KV head": Kind("qwen3_moe", "full", "plain, one KV head, cut heads, experts, for ranks", **KV_HEAD),
    "tied embedding": Kind("qwen3_tied_bias", "full", "repeats, own sums", {"num_hidden_layers": 5}),
    "experts, 8 heads": Kind("qwen3_moe", "full", "repeats, experts", **EIGHT_HEADS),
    "windows alone": Kind("mistral_windows", "windows alone", "repeats", **OWN),
    "windows, query scale": Kind("gemma3", "windows", "repeats, own sums"),
    "windows": Kind("qwen3_windows", "windows"),
    "windows, KV head": Kind("qwen3_windows", "windows", "one KV head, cut heads, for ranks", **KV_HEAD),
    "two head dims": Kind("gemma4", "windows", "own sums", **ALIKE),
    "dense and routed": Kind("gemma4_moe", "windows", "experts, own sums", **ALIKE),
    "shared KV layers": Kind("gemma4_small", "windows", "own sums", stages=1),
    "gated heads": Kind("laguna", "windows", "experts"),
    "two head counts": Kind("step3p7", "windows", "experts"),
    "normed embedding": Kind("muse_glimmer", "windows", "own sums"),
    "class of transformers": Kind("cohere2", "windows", f"own sums, {WHOLE}", **OWN),
    "chunks": Kind("llama4", "chunks", "experts"),
    "chunks, KV head": Kind("llama4", "chunks", "one KV head, cut heads, experts, for ranks", **KV_HEAD),
    "sinks": Kind("gpt_oss", "sinks", "experts, own sums"),
    "sinks, KV head": Kind("gpt_oss", "sinks", "one KV head, cut heads, experts, own sums, for ranks", **KV_HEAD),
    "sinks of windows": Kind("mimo_v2", "sinks", "experts, heads of 24 dims"),
    "relative biases": Kind("inkling", "relative biases", "experts, states", **OWN),
    "latents": Kind("deepseek_v3", "latents", "plain, one KV head, experts", **ALIKE),
    "selected latents": Kind("deepseek_v32", "selected latents", "plain, one KV head, experts", **ALIKE),
    "shared selection": Kind("glm_moe_dsa", "selected latents", "one KV head, experts", **ALIKE, stages=2),
    "gated latents": Kind("hy_v4", "selected latents", "one KV head, streams, experts, own sums", **ALIKE, stages=2),
    "pooled latents, 2 layers": Kind(
        "glm5_next_small", "pooled latents", f"repeats, {STREAMS}", page=4, stages=2, **OWN, **EVEN
    ),
    "pooled latents": Kind("glm5_next", "pooled latents", STREAMS, page=4, **OWN, **EVEN),
    "compressed, 3 layers": Kind("deepseek_v4_small", "compressed", f"repeats, {STREAMS}", page=8, **COMPRESSED),
    "compressed": Kind("deepseek_v4", "compressed", STREAMS, page=16, **COMPRESSED),
    "selected blocks": Kind("minimax_m3", "selected blocks", "experts", page=4),
    "n-grams, 2 layers": Kind(
        "qwen4_exp_small", "pooled blocks", f"repeats, {STREAMS}", page=4, stages=2, **OWN, **HYBRID
    ),
    "n-grams": Kind("qwen4_exp", "pooled blocks", STREAMS, page=4, **OWN, **HYBRID),
    "gated delta": Kind("qwen3_5", "gated delta", "repeats, states", **HYBRID),
    "gated delta, M-RoPE": Kind("qwen3_5_moe", "gated delta", "repeats, experts, states", **HYBRID),
    "gated delta, KV head": Kind(
        "qwen3_5", "gated delta", "repeats, states, one KV head, cut heads", **KV_HEAD, **HYBRID
    ),
    "gated delta and experts": Kind("qwen3_next", "gated delta", "experts, states", **HYBRID),
    "gated delta, tied": Kind(
        "qwen3_next", "gated delta", "plain, experts, states, for ranks", {"tie_word_embeddings": True}, **HYBRID
    ),
    "gated delta and experts, KV head": Kind(
        "qwen3_next", "gated delta", "plain, one KV head, cut heads, experts, states, for ranks", **KV_HEAD, **HYBRID
    ),
    "Kimi delta": Kind("kimi_linear", "Kimi delta", "one KV head, experts, states", **ALIKE, **EVEN),
    "Mamba-2": Kind("nemotron_h", "Mamba-2", "experts, states", **EVEN),
    "Mamba-2, latent experts": Kind("nemotron_h_latent", "Mamba-2", "experts, states, own sums, for ranks", **EVEN),
    "Mamba-2, experts by layer": Kind("nemotron_h_puzzle", "Mamba-2", "repeats, experts, states", **EVEN),
}
"""By name. Tags beside the attention:

plain         the commonest form of a mechanism, for tests whose cases are dear
repeats       a form of another kind here with the same mechanisms: smaller, or with a quirk that few tests need
for ranks     differs from another kind here in what several ranks share
one KV head   all ranks would hold the same cache, so that they can divide its tokens (DCP)
cut heads     the config has one KV head, and another kind here has more
experts       routed ones
states        something is kept of a request that does not grow with it
streams       more than one residual stream
own sums      some blocks add up over the ranks themselves, or exchange something else (`alternates_by_block`)
embedded      the model of the package; it has its tokenizer
heads of 24 dims   not a multiple of the 16 that share a scale in four bits
"""

LAYOUTS: Mapping[str, RankLayout] = {
    "one rank": ONE_RANK,
    "TP2": RankLayout(2),
    "TP3": RankLayout(3),
    "TP4": RankLayout(4),
    "EP2": RankLayout(2, 2),
    "EP3": RankLayout(3, 3),
    "TP4 x EP2": RankLayout(4, 2),
    "PP2": RankLayout(pp_size=2),
    "PP3": RankLayout(pp_size=3),
    "TP2 x PP2": RankLayout(2, pp_size=2),
    "DCP2": RankLayout(2, dcp_size=2),
    "DCP3": RankLayout(3, dcp_size=3),
    "DCP4": RankLayout(4, dcp_size=4),
    "TP4 x DCP2": RankLayout(4, dcp_size=2),
    "EP2 x DCP2": RankLayout(2, 2, dcp_size=2),
    "DCP2 x PP2": RankLayout(2, pp_size=2, dcp_size=2),
    "DP2": RankLayout(2, attn_dp_size=2),
    "DP4": RankLayout(4, attn_dp_size=4),
    "TP4 x DP2": RankLayout(4, attn_dp_size=2),
    "DP2, own heads": RankLayout(2, attn_dp_size=2, dp_lm_head=True),
    "TP4 x DP2, own heads": RankLayout(4, attn_dp_size=2, dp_lm_head=True),
    "DP2 x EP2": RankLayout(2, 2, attn_dp_size=2),
    "TP4 x DP2 x EP2": RankLayout(4, 2, attn_dp_size=2),
    "DP4 x EP4": RankLayout(4, 4, attn_dp_size=4),
    "TP4 x DP2 x DCP2": RankLayout(4, dcp_size=2, attn_dp_size=2),
    "TP4 x DP2 x DCP2 x EP2, own heads": RankLayout(4, 2, dcp_size=2, attn_dp_size=2, dp_lm_head=True),
    "DP2 x PP2": RankLayout(2, pp_size=2, attn_dp_size=2),
    "DP2 x PP2, own heads": RankLayout(2, pp_size=2, attn_dp_size=2, dp_lm_head=True),
    "DP2 x EP2 x PP2": RankLayout(2, 2, pp_size=2, attn_dp_size=2),
    "DP2 x PP3": RankLayout(2, pp_size=3, attn_dp_size=2),
    "DP4 x PP2": RankLayout(4, pp_size=2, attn_dp_size=4),
    "TP4 x DP2 x PP2": RankLayout(4, pp_size=2, attn_dp_size=2),
    "TP4 x DP2 x DCP2 x PP2": RankLayout(4, pp_size=2, dcp_size=2, attn_dp_size=2),
}
"""By name. DP is that of attention: groups of ranks with requests of their own. With "own heads" the ranks of a group
divide the vocabulary among them (`--enable-dp-lm-head`), otherwise all ranks do. Tags are these words."""


@dataclass(frozen=True)
class Feature:
    """Flags of a server, and the tags of kinds and layouts (separated by commas: all of them together) that it does not
    go with, each with the reason."""

    flags: Mapping[str, Any]
    needs: str = ""
    """A tag of the layouts that it goes with; "": any."""
    refuses: Mapping[str, str] = field(default_factory=dict)


TWO_BATCHES = {"enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2}
ONE_BYTE = "a byte an element is the least that their kernels read"
FEATURES: Mapping[str, Feature] = {
    "fp8": Feature(
        {"kv_cache_dtype": "fp8_e4m3"},
        refuses={"selected latents": "packed latents have no kernel on a CPU"},
    ),
    "fp4": Feature(
        {"kv_cache_dtype": "fp4_e2m1"},
        refuses={
            **dict.fromkeys(("selected blocks", "pooled blocks"), ONE_BYTE),
            "relative biases": "attention with them has no kernel for four bits",
            "heads of 24 dims": "16 dims share a scale",
            **dict.fromkeys(
                (f"DCP, {attention}" for attention in ("full", "windows", "chunks", "sinks", "gated delta")),
                "codes of keys and values are not divided by tokens",
            ),
        },
    ),
    "host cache": Feature({"enable_hierarchical_cache": True, "hicache_ratio": 3.0}),
    "two-batch overlap": Feature(
        TWO_BATCHES, needs="TP", refuses={"DCP": "its steps stay whole", WHOLE: "so are its steps"}
    ),
    "experts in main memory": Feature({"enable_paged_experts": True}, needs="experts"),
    "quantized all-reduce": Feature(
        {"enable_quantized_all_reduce": "all", "quantized_all_reduce_min_bytes": 1}, needs="TP"
    ),
}
"""By name, with the flags that make tiny models use it."""


def parts_of(ranks: RankLayout) -> frozenset[str]:
    """Returns the tags of a layout: how it divides a model, and "8 ranks" where it has as many."""
    sizes = {
        "TP": ranks.tp_size, "EP": ranks.ep_size, "PP": ranks.pp_size, "DCP": ranks.dcp_size, "DP": ranks.attn_dp_size,
    }  # fmt: skip
    more = {"own heads": ranks.dp_lm_head, "8 ranks": ranks.world_size > 6}
    return frozenset({name for name, size in sizes.items() if size > 1} | {name for name, has in more.items() if has})


def flags_of(layout: str) -> dict[str, Any]:
    """Returns the arguments of a server with this layout."""
    ranks = LAYOUTS[layout]
    return {
        "tp_size": ranks.tp_size, "ep_size": ranks.ep_size, "pp_size": ranks.pp_size, "dcp_size": ranks.dcp_size,
        "attn_dp_size": ranks.attn_dp_size, "enable_dp_lm_head": ranks.dp_lm_head,
    }  # fmt: skip


def _named(tags_of: Mapping[str, frozenset[str]], having: str, lacking: str) -> tuple[str, ...]:
    """Returns the names whose tags are all of `having` and none of `lacking`. Raises ValueError for a tag of none."""
    wanted, unwanted = ({*filter(None, text.split(", "))} for text in (having, lacking))
    unknown = (wanted | unwanted).difference(*tags_of.values())
    if unknown:
        raise ValueError(f"nothing in test/matrix.py has the tags {sorted(unknown)}")
    return tuple(name for name, tags in tags_of.items() if wanted <= tags and not unwanted & tags)


def kinds(having: str = "", lacking: str = "repeats") -> tuple[str, ...]:
    """Returns the names of the kinds with all tags of `having` and none of `lacking`, both separated by commas. Raises
    ValueError for a tag that no kind has."""
    return _named({name: kind.tags for name, kind in KINDS.items()}, having, lacking)


def smallest_kinds() -> tuple[str, ...]:
    """Returns the names of the first kind of each attention."""
    first: dict[str, str] = {}
    for name, kind in KINDS.items():
        first.setdefault(kind.attention, name)
    return tuple(first.values())


def layouts(having: str = "", lacking: str = "") -> tuple[str, ...]:
    """Returns the names of the layouts with all tags of `having` and none of `lacking`, both separated by commas.
    Raises ValueError for a tag that no layout has."""
    return _named({name: parts_of(ranks) for name, ranks in LAYOUTS.items()}, having, lacking)


def why_not(kind: str, layout: str = "one rank", feature: str | None = None) -> str | None:
    """Returns why a server with the feature cannot divide a kind of model in this way; None if it can."""
    model, ranks = KINDS[kind], LAYOUTS[layout]
    if ranks.attn_tp_size not in model.tp:
        return f"{ranks.attn_tp_size} ranks cannot share its attention"
    if ranks.pp_size > model.stages:
        return f"it has {model.stages} stages at most"
    if ranks.attn_dp_size > 1 and WHOLE in model.tags:
        return "its blocks exchange no tokens"
    if ranks.ep_size > 1 and "experts" not in model.tags:
        return "it has no experts"
    if ranks.dcp_size > 1 and not (model.kv_heads and ranks.attn_tp_size >= model.kv_heads * ranks.dcp_size):
        return "its ranks hold different caches"
    if feature is None:
        return None
    asked, tags = FEATURES[feature], model.tags | parts_of(ranks)
    if asked.needs and asked.needs not in tags:
        return f"{feature} needs {asked.needs}"
    return next((why for refused, why in asked.refuses.items() if tags >= {*refused.split(", ")}), None)


def cells(
    names: Iterable[str], of_layouts: Iterable[str] = ("one rank",), feature: str | None = None
) -> list[tuple[str, str]]:
    """Returns (layout, kind) for all of these layouts and kinds that go together, with the feature."""
    every = tuple(names)
    return [(layout, name) for layout in of_layouts for name in every if why_not(name, layout, feature) is None]


def save_kind(name: str, folder: Path, ranks: RankLayout = ONE_RANK) -> Path:
    """Writes a checkpoint of the kind, whose attention the ranks can share. Returns where it is: `folder`, which is
    made, or the embedded model's."""
    from srt.models.harness import save_tiny

    kind = KINDS[name]
    if not kind.tiny:
        return Path(DEFAULT_MODEL_PATH)
    folder.mkdir(exist_ok=True)
    save_tiny(kind.tiny, folder, **kind.changes, **(kind.at_four if ranks.attn_tp_size == 4 else {}))
    return folder

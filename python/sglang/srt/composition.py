"""Which ways to share a server out over GPUs go together, and why others do not: one table, which checks flags, and
which the page on several GPUs prints.

What depends on the model (heads, entries, layers that do not divide) is in `plan/layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.cli_args import flag


@dataclass(frozen=True, slots=True)
class Feature:
    """`title`: for tables. `field`: of ServerArgs, whose flag asks for it. `asked(args)`: whether it is asked for."""

    title: str
    field: str
    asked: Callable[[Any], bool]

    def words(self, args: Any) -> str:
        """Returns the flag, with its value where it has one."""
        value = getattr(args, self.field)
        return flag(self.field) + ("" if value is True else f" {value}")


def _above_one(field: str) -> Callable[[Any], bool]:
    return lambda args: getattr(args, field) > 1


def _given(field: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, field))


FEATURES: Mapping[str, Feature] = {
    "tp": Feature("TP", "tp_size", _above_one("tp_size")),
    "ep": Feature("EP", "ep_size", _above_one("ep_size")),
    "pp": Feature("stages", "pp_size", _above_one("pp_size")),
    "dcp": Feature("DCP", "dcp_size", _above_one("dcp_size")),
    "groups": Feature("DP attention", "attn_dp_size", _above_one("attn_dp_size")),
    "replicas": Feature("replicas", "dp_size", _above_one("dp_size")),
    "machines": Feature("machines", "nnodes", lambda args: args.nnodes > 1 and not args.use_ray),
    "ray": Feature("Ray", "use_ray", _given("use_ray")),
    "drafts": Feature("drafts", "speculative_algorithm", _given("speculative_algorithm")),
    "texts": Feature(
        "texts for n-grams",
        "speculative_ngram_external_corpus_path",
        _given("speculative_ngram_external_corpus_path"),
    ),
    "host": Feature("main memory", "enable_hierarchical_cache", _given("enable_hierarchical_cache")),
    "store": Feature("store", "hicache_storage_backend", _given("hicache_storage_backend")),
    "images": Feature("images", "language_model_only", lambda args: False),
    "encoders": Feature("shared images", "mm_enable_dp_encoder", _given("mm_enable_dp_encoder")),
}
"""By name. Machines are those that are started by hand: with Ray, --nnodes is a part of Ray's. Whether a model sees is
not known from flags."""

REFUSED: Mapping[tuple[str, str], str] = {
    ("replicas", "machines"): (
        "start a server without --dp-size on each machine or group of machines, behind a load balancer"
    ),
    ("machines", "texts"): "texts are read on one machine",
    ("ray", "texts"): "texts are read on one machine",
    ("pp", "encoders"): "only some stages encode",
    ("groups", "encoders"): "groups encode images of their own requests, each when it comes to them",
}
"""Why two features do not go together. All other pairs do, as far as the model divides."""


def refusal(one: str, other: str) -> str | None:
    """Returns why two features do not go together; None if they do."""
    return REFUSED.get((one, other)) or REFUSED.get((other, one))


def refused_pairs(args: Any) -> Iterator[tuple[set[str], str]]:
    """Yields the fields and the text of each pair that is asked for and does not go together. args: a ServerArgs."""
    for (one, other), why in REFUSED.items():
        a, b = FEATURES[one], FEATURES[other]
        if a.asked(args) and b.asked(args):
            yield {a.field, b.field}, f"{a.words(args)} does not go with {b.words(args)}: {why}."


def table() -> str:
    """Returns the table of all pairs in Markdown: a number where two do not go together, and the reasons behind it."""
    names = list(FEATURES)
    reasons = list(dict.fromkeys(REFUSED.values()))
    rows = [["", *(FEATURES[name].title for name in names[:-1])], ["---"] * len(names)]
    for row in range(1, len(names)):
        cells = [refusal(names[row], names[column]) for column in range(row)]
        marks = ["yes" if why is None else f"no ({reasons.index(why) + 1})" for why in cells]
        rows.append([FEATURES[names[row]].title, *marks, *[""] * (len(names) - 1 - row)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))])

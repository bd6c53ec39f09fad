"""How a family's checkpoints call the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sglang.srt.layers.parameter import Param, PartKey


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Names of modules in the checkpoint, keyed by ours. `{part}` and `{expert}` stand for the fields of a PartKey.

    `layer` names are relative to `layer_prefix`, in which `{layer}` is the layer's number. `ignore` are endings of
    checkpoint tensors that are no weights (scales of a cache or of probabilities that are not quantized).
    """

    model: dict[str, str]
    layer: dict[str, str]
    layer_prefix: str = "model.layers.{layer}."
    ignore: tuple[str, ...] = ("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")
    aliases: tuple[tuple[str, str], ...] = ((".k_proj.k_scale", ".k_scale"), (".v_proj.v_scale", ".v_scale"))
    """Endings of names in some checkpoints, and what they are in the others."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """What stands for `{part}` where it is not the part's own name (gate: w1)."""

    def checkpoint_name(self, name: str, key: PartKey) -> str:
        """The checkpoint tensor that is part `key` of our parameter `name`."""
        module, _, leaf = name.rpartition(".")
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            template = self.layer_prefix.format(layer=number) + self.layer[key.module or module]
        else:
            template = self.model[module]
        return f"{template.format(part=self.parts.get(key.part, key.part), expert=key.expert)}.{leaf}"

    def canonical(self, name: str) -> str:
        """The name of a checkpoint tensor without its variants."""
        for ending, usual in self.aliases:
            if name.endswith(ending):
                return name.removesuffix(ending) + usual
        return name

    def index(self, params: Iterable[Param]) -> dict[str, list[tuple[Param, PartKey]]]:
        """Every checkpoint tensor that the parameters are made of, and the parts that are cut from it."""
        found: dict[str, list[tuple[Param, PartKey]]] = {}
        for param in params:
            for key in param.parts:
                found.setdefault(self.checkpoint_name(param.name, key), []).append((param, key))
        return found

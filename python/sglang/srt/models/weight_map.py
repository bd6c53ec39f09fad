"""How a family's checkpoints call the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang.srt.layers.parameter import Param, PartKey


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Names of modules in the checkpoint, keyed by ours. `{part}` and `{expert}` stand for the fields of a PartKey.

    `layer` names are relative to `layer_prefix`, in which `{layer}` is the layer's number. `ignore` are endings of
    checkpoint tensors that are no weights.
    """

    model: dict[str, str]
    layer: dict[str, str]
    layer_prefix: str = "model.layers.{layer}."
    ignore: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def checkpoint_name(self, name: str, key: PartKey) -> str:
        """The checkpoint tensor that is part `key` of our parameter `name`."""
        module, _, leaf = name.rpartition(".")
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            template = self.layer_prefix.format(layer=number) + self.layer[module]
        else:
            template = self.model[module]
        return f"{template.format(part=key.part, expert=key.expert)}.{leaf}"

    def index(self, params: Iterable[Param]) -> dict[str, tuple[Param, PartKey]]:
        """Every checkpoint tensor that the parameters are made of."""
        return {self.checkpoint_name(p.name, key): (p, key) for p in params for key in p.parts}

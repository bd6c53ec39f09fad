"""Models with a draft layer for each depth, written as MiMo-V2, Step and Inkling publish them, and what they guess:
whole sequences in transformers' layers, no cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .draft_references import Target
from .harness import SIZES, TINY, hf_model, share_weights

Tensors = dict[str, Tensor]
DEPTHS = 3


@dataclass(frozen=True)
class ByDepthForm:
    """`at`: where the names of depth {i} begin, {layer} being its number behind the target's layers; `norm`: the name
    of its last norm, empty: it has none; `renamed`: pieces of names in transformers' layers, and those in place of
    them. `lists`: keys of the config with an entry for each layer, and the one of a draft's; `more`: others of the
    model with the draft's layers behind its own; `keys`: what the text's config says of drafts, `outer`: what that of
    the whole says. `block`: where the names of the decoder layer begin below `at`; `names`: of the projection and the
    norms before it. `windows`: which depths have one."""

    at: str
    norm: str
    renamed: Mapping[str, str]
    lists: Mapping[str, Any]
    keys: Mapping[str, Any]
    chained: bool = False
    ignored: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    block: str = ""
    names: tuple[str, str, str] = ("eh_proj", "enorm", "hnorm")
    windows: tuple[int, ...] = tuple(range(DEPTHS))
    final_features: bool = False
    hidden_first: bool = False
    centred: bool = False


DEPTH_FORMS = {
    "mimo_v2": ByDepthForm(
        "model.mtp.layers.{i}.",
        "final_layernorm",
        {"post_attention_layernorm": "pre_mlp_layernorm"},
        {"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
        {},
    ),
    "step3p7": ByDepthForm(
        "model.layers.{layer}.",
        "transformer.shared_head.norm",
        {},
        {"layer_types": "sliding_attention", "mlp_layer_types": "dense", "rope_theta": 1e4}
        | {"partial_rotary_factors": 1.0, "swiglu_limits": 0.0, "swiglu_limits_shared": 0.0},
        {"num_nextn_predict_layers": DEPTHS},
        chained=True,
        ignored=("transformer.shared_head.output.weight",),
        centred=True,
    ),
    "inkling": ByDepthForm(
        "model.mtp.layers.{i}.",
        "",
        {},
        {"mlp_layer_types": "dense"},
        {},
        chained=True,
        more={"local_layer_ids": [0, 2, 4, 6]},
        outer={"mtp_config": {"num_nextn_predict_layers": DEPTHS, "local_layer_ids": [0, 2]}},
        block="transformer_block.",
        names=("input_proj", "embed_norm", "hidden_norm"),
        windows=(0, 2),
        final_features=True,
        hidden_first=True,
    ),
}


@dataclass
class DepthReference:
    """Guesses of one layer after the other. Layer d computes row i of token i + 1 + d and of features i: the target's
    stream behind its last layer, or its final hidden states, or chained the stream of the layer before."""

    w: Tensors
    target: Target
    layers: Sequence[Any]
    prefixes: Sequence[str]
    form: ByDepthForm

    @torch.inference_mode()
    def __call__(self, tokens: list[int], count: int) -> Tensor:
        streams, hidden = self.target.streams(tokens[:-1])
        features, known, given = hidden if self.form.final_features else streams[-1], list(tokens), []
        for depth in range(count):
            state = self._rows(depth, known[1 + depth :], features)
            last = self._norm(self._named(depth, self.form.norm), state[-1]) if self.form.norm else state[-1]
            given.append(self.target.logits(last))
            known.append(int(given[-1].argmax()))
            features = state if self.form.chained else features
        return torch.stack(given)

    def _rows(self, depth: int, ids: Sequence[int], features: Tensor) -> Tensor:
        projection, embedding_norm, hidden_norm = self.form.names
        embedded = self._norm(self._named(depth, embedding_norm), self.target.embedded(ids))
        pair = (embedded, self._norm(self._named(depth, hidden_norm), features))
        joined = torch.cat(pair[::-1] if self.form.hidden_first else pair, dim=-1)
        x = (joined @ self._named(depth, projection).T)[None]
        decoder = self.target.model.get_decoder()
        row = torch.arange(len(ids))
        window = decoder.config.sliding_window if depth in self.form.windows else len(ids)
        seen = (row[:, None] >= row) & (row[:, None] - row < window)
        mask = torch.zeros(len(ids), len(ids)).masked_fill(~seen, -torch.inf)[None, None]
        rotary = getattr(decoder, "rotary_emb", None)
        turned = {} if rotary is None else {"position_embeddings": rotary(x, row[None], "sliding_attention")}
        out = self.layers[depth](x, attention_mask=mask, position_ids=row[None], **turned)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _named(self, depth: int, name: str) -> Tensor:
        return self.w[f"{self.prefixes[depth]}{name}.weight"]

    def _norm(self, weight: Tensor, rows: Tensor) -> Tensor:
        centre = 1.0 if self.form.centred else 0.0  # Step stores weights of norms minus 1
        eps = self.target.model.get_decoder().config.rms_norm_eps
        return rows * (rows.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (weight + centre)


def build_depths(name: str, folder: Path) -> DepthReference:
    """A model with the draft's layers behind its own, split into a target and its draft; written to `folder`. name: of
    DEPTH_FORMS, or one of these with "_wide" behind it."""
    form, changes = DEPTH_FORMS[name.removesuffix("_wide")], SIZES | TINY[name][1]
    total, hidden = changes["num_hidden_layers"], changes["hidden_size"]
    more: dict[str, Any] = {
        key: [*changes[key], *[value] * DEPTHS] for key, value in form.lists.items() if key in changes
    }
    whole, target = hf_model(name, num_hidden_layers=total + DEPTHS, **more, **form.more), hf_model(name)
    share_weights(whole, target)
    getattr(whole, "whole", whole).save_pretrained(folder / "whole")
    getattr(target, "whole", target).save_pretrained(folder)
    tensors, stored = load_file(folder / "whole" / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(6)
    prefixes = [form.at.format(i=i, layer=total + i) for i in range(DEPTHS)]
    for i, prefix in enumerate(prefixes):
        for key, tensor in tensors.items():
            if f".layers.{total + i}." in key:
                short = key.split(f".layers.{total + i}.")[1]
                for piece, published in form.renamed.items():
                    short = short.replace(piece, published)
                stored[prefix + form.block + short] = tensor
        projection, *norms = form.names
        stored[f"{prefix}{projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.15
        for norm in filter(None, (*norms, form.norm)):
            weight = torch.rand(hidden, generator=generator) + (-0.5 if form.centred else 0.5)
            stored[f"{prefix}{norm}.weight"] = weight
        stored |= {prefix + copy: torch.zeros(SIZES["vocab_size"], hidden) for copy in form.ignored}  # never read
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(form.keys)
    config.update(form.outer)
    (folder / "config.json").write_text(json.dumps(config))
    layers = whole.get_decoder().layers[total:]
    return DepthReference(stored, Target(target), layers, prefixes, form)

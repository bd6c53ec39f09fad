"""Layers for multi-token prediction, in the target's checkpoint as each family publishes them, guess what transformers'
layers of the same weights guess."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.errors import UserError

from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .draft_references import Target, chain
from .harness import (
    DSA,
    SIZES,
    TINY,
    ZERO_CENTRED,
    TinyRunner,
    hf_model,
    plan_for,
    random_tokens,
    save_tiny,
    share_weights,
)

Tensors = dict[str, Tensor]
HIDDEN = SIZES["hidden_size"]


@dataclass(frozen=True)
class Published:
    """`names`: of fc, the norms of embedding and features and the final norm; `layer`: of layer {i} of the draft, {L}
    being the number of the target's layers. `lists`: keys of the config with an entry for each layer, and those of the
    draft's; `keys`: others. `ignored`: tensors beside them that repeat the target's."""

    names: tuple[str, str, str, str]
    layer: str
    lists: Mapping[str, list[Any]]
    keys: Mapping[str, Any]
    hidden_first: bool = False
    zero_first: bool = False
    ignored: tuple[str, ...] = ()
    one_stream: bool = False
    """The draft's layers have no hyper-connections, unlike the model's."""


EH = Published(
    ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "model.layers.{L}.",
    {"mlp_layer_types": ["sparse"]},
    {"num_nextn_predict_layers": 1},
    ignored=("embed_tokens.weight", "shared_head.head.weight"),
)
HY = replace(EH, names=("eh_proj", "enorm", "hnorm", "final_layernorm"))
INDEXED = replace(EH, lists={"mlp_layer_types": ["sparse"], "indexer_types": ["full"]})
SHARED = replace(INDEXED, keys=EH.keys | {"index_share_for_mtp_iteration": True})
POOLED = replace(
    SHARED,
    layer="model.language_model.layers.{L}.",
    lists={"layer_types": [DSA], "mlp_layer_types": ["sparse"]},
    one_stream=True,
)
QWEN = Published(
    ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "mtp.layers.{i}.",
    {"layer_types": ["full_attention"]},
    {"mtp_num_hidden_layers": 1},
)
NEMOTRON = Published(
    ("mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"),
    "mtp.layers.{i}.",
    {"layers_block_type": ["full_attention", "moe"]},
    {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
)
_BLOCKS = [
    {"block_type": "attention"},
    {"block_type": "moe", "moe_intermediate_size": 40, "num_experts_per_tok": 4, "n_routed_experts": 6},
]
PUZZLE = replace(
    NEMOTRON,
    lists={**NEMOTRON.lists, "block_configs": _BLOCKS},
    keys={"num_nextn_predict_layers": 1, "mtp_block_configs": _BLOCKS, "mtp_layers_block_type": None}
    | {"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle"},
)
MIMO = Published(
    tuple(f"model.mtp_layers.0.{n}" for n in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")),
    "model.mtp_layers.0.",
    {},
    {"num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"], "model_type": "mimo"},
    hidden_first=True,
    zero_first=True,
)
FORMS = {
    "deepseek_v3": EH,
    "deepseek_v32": EH,
    "glm_moe_dsa": INDEXED,
    "glm5_next": POOLED,
    "glm4_moe": EH,
    "glm4_moe_lite": EH,
    "hy_v3": HY,
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "nemotron_h": NEMOTRON,
    "nemotron_h_latent": NEMOTRON,
    "nemotron_h_puzzle": PUZZLE,
    "qwen2": MIMO,
}


@dataclass
class Mtp:
    """Reference: `layers` of transformers, in their order, after the projection."""

    form: Published
    w: Tensors
    target: Target
    layers: Sequence[Any]
    norm: Callable[[str], Any]
    num_known: int = 0
    """Rows of tokens that are known; those behind them are of draft tokens."""

    def rows(self, ids: Sequence[int], features: Tensor) -> Tensor:
        fc, embedding_norm, hidden_norm, final = (f"{name}.weight" for name in self.form.names)
        embedded = self.target.embedded(ids)
        if self.form.zero_first:
            embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        pair = [self.norm(embedding_norm)(embedded), self.norm(hidden_norm)(features)]
        pair = pair[::-1] if self.form.hidden_first else pair
        x = (torch.cat(pair, dim=-1) @ self.w[fc].T)[None]
        positions = torch.arange(len(ids))[None]
        rotary = getattr(self.target.model.get_decoder(), "rotary_emb", None)
        sections = "mrope_section" in str(self.target.model.config)
        at = positions.expand(3, 1, -1) if sections else positions
        more = {} if rotary is None else {"position_embeddings": rotary(x, position_ids=at)}
        # Layers with an indexer take no other mask than a written one.
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()[None, None]
        mask = causal if hasattr(self.target.model.config, "index_topk") else None
        for layer in self.layers:
            out = layer(x, attention_mask=mask, position_ids=positions, past_key_values=None, **more)
            x = out[0] if isinstance(out, tuple) else out
        return self.norm(final)(x[0])

    def __call__(self, tokens: list[int], count: int) -> Tensor:
        self.num_known = len(tokens) - 1
        _, hidden = self.target.streams(tokens[:-1])
        return chain(tokens, hidden, self.rows, self.target.logits, count)

    def share_selection(self) -> None:
        """From now on rows of draft tokens read what the last known row selected, and the tokens behind it."""
        for layer in self.layers:
            indexer = layer.self_attn.indexer
            indexer.forward = functools.partial(self._selected, indexer.forward)

    def _selected(self, select: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        chosen = select(*args, **kwargs)
        drafted = chosen.shape[1] - self.num_known
        last = chosen[:, self.num_known - 1 : self.num_known]
        since = last[..., :1].repeat(1, chosen.shape[1], drafted)
        for i in range(drafted):
            chosen[:, self.num_known + i] = last[:, 0]
            since[:, self.num_known + i, : i + 1] = torch.arange(self.num_known, self.num_known + i + 1)
        return torch.cat((chosen, since), dim=-1)


@dataclass
class OneStream:
    """A layer of GLM-5.3-Flash with a plain sum in the place of its hyper-connections."""

    layer: Any

    @property
    def self_attn(self) -> Any:
        return self.layer.self_attn

    def __call__(self, x: Tensor, **_: Any) -> Tensor:
        layer = self.layer
        x = x + layer.self_attn(layer.input_layernorm(x), attention_mask=torch.ones(x.shape[:2], dtype=torch.bool))[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))


def build(name: str, folder: Path, form: Published | None = None) -> Mtp:
    """A model with the draft's layers behind its own, split into a target and its draft; written to `folder`."""
    form, changes = form or FORMS[name], dict(TINY[name][1])
    count = len(next(iter(form.lists.values()), [None]))
    total = changes.get("num_hidden_layers", SIZES["num_hidden_layers"])
    more: dict[str, Any] = {"num_hidden_layers": total + count}
    more |= {key: [*changes[key], *values] for key, values in form.lists.items() if key in changes}
    whole = hf_model(name, **more)
    target = hf_model(name)
    share_weights(whole, target)
    whole.save_pretrained(folder / "whole")
    target.save_pretrained(folder)
    tensors, prefix = load_file(folder / "whole" / "model.safetensors"), _layer_prefix(folder)
    stored: Tensors = {}
    for key, tensor in tensors.items():
        for i in range(count):
            if key.startswith(f"{prefix}{total + i}.") and not (form.one_stream and ".hc_" in key):
                layer = form.layer.format(L=total, i=i)
                stored[layer + key.removeprefix(f"{prefix}{total + i}.")] = tensor
    at = form.layer.format(L=total) if "{L}" in form.layer else ""
    generator = torch.Generator().manual_seed(6)
    names = [f"{at}{short}.weight" for short in form.names]
    centre = 0.0 if name in ZERO_CENTRED else 1.0
    stored[names[0]] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.15
    stored |= {key: torch.rand(HIDDEN, generator=generator) - 0.5 + centre for key in names[1:]}
    stored |= {at + copy: torch.zeros(SIZES["vocab_size"], HIDDEN) for copy in form.ignored}  # never read
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors")
    change_keys(folder, **form.keys)
    published = Published(
        tuple(at + short for short in form.names), form.layer, {}, {}, form.hidden_first, form.zero_first
    )

    def norm(key: str) -> Any:
        module = type(whole.get_decoder().layers[-1].__dict__["_modules"][_norm_name(whole)])(HIDDEN, eps=_eps(whole))
        module.weight.data.copy_(stored[key])
        return module

    layers = whole.get_decoder().layers[total:]
    mtp = Mtp(published, stored, Target(target), [OneStream(x) for x in layers] if form.one_stream else layers, norm)
    if form.keys.get("index_share_for_mtp_iteration"):
        mtp.share_selection()
    return mtp


def _norm_name(model: Any) -> str:
    return next(name for name in model.get_decoder().layers[-1]._modules if "norm" in name)


def _eps(model: Any) -> float:
    config = model.config.get_text_config()
    return float(config.rms_norm_eps if hasattr(config, "rms_norm_eps") else config.layer_norm_epsilon)


def _layer_prefix(folder: Path) -> str:
    names = load_file(folder / "model.safetensors")
    return next(name.split("layers.")[0] for name in names if "layers." in name) + "layers."


@pytest.mark.parametrize("name", FORMS)
def test_layers_as_published(name: str, tmp_path: Path) -> None:
    reference = build(name, tmp_path)
    plan = plan_with_draft(tmp_path, "EAGLE")
    assert plan.draft.description.kind == "MTP"
    runner = DraftRunner(plan)
    recurrent = any(layer.mixer.attention_shape(1) is None for layer in plan.description.layers)
    check_proposals(runner, reference, random_tokens(33, seed=2), 1e-3 if recurrent else 1e-4, states=recurrent)
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32"), "the plan counts other bytes than the draft allocates"


def test_passes_that_read_one_selection(tmp_path: Path) -> None:
    """Of keys of tokens; and without the key every pass selects."""
    reference = build("glm_moe_dsa", tmp_path, SHARED)
    plan = plan_with_draft(tmp_path, "EAGLE")
    assert plan.draft.description.shares_selection
    tokens = random_tokens(33, seed=2)
    shared = reference(tokens, 4)
    check_proposals(DraftRunner(plan), reference, tokens)
    change_keys(tmp_path, index_share_for_mtp_iteration=False)
    plan = plan_with_draft(tmp_path, "EAGLE")
    assert not plan.draft.description.shares_selection
    reference = build("glm_moe_dsa", tmp_path)
    assert not torch.allclose(shared, reference(tokens, 4), atol=1e-3), "both ways select alike"
    check_proposals(DraftRunner(plan), reference, tokens)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_the_reference_is_the_layer_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers.modeling_layers import MtpLayer  # slow, and ranks of tests with these drafts do not need it

    reference = build(name, tmp_path)
    (block,), model = reference.layers, reference.target.model
    fc, embedding_norm, hidden_norm, final = (reference.w[f"{key}.weight"] for key in reference.form.names)
    with torch.inference_mode():
        norm_class = type(reference.norm(f"{reference.form.names[1]}.weight"))
        layer = MtpLayer(model.config, lambda config, i: block, norm_class, len(model.get_decoder().layers))
        modules = (layer.eh_proj, layer.enorm, layer.hnorm, layer.post_norm)
        for module, weight in zip(modules, (fc, embedding_norm, hidden_norm, final), strict=True):
            module.weight.copy_(weight)
        tokens = random_tokens(12, seed=4)
        embedded, positions = reference.target.embedded(tokens)[None], torch.arange(12)[None]
        features = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1))
        rotary = model.get_decoder().rotary_emb(embedded, position_ids=positions)
        want = layer(embedded, features[None], rotary, None, positions, None)[0]
        torch.testing.assert_close(reference.rows(tokens, features), want, rtol=0.0, atol=1e-5)


def change_keys(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    inner = config.get("text_config", config)
    inner.update(keys)
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.3.hnorm.weight"),
            r"lacks weights of the model: model\.layers\.3\.hnorm\.weight",
        ),
        (
            lambda t: t.update({"model.layers.3.surprise.weight": torch.ones(2)}),
            r"weights that the model does not have: model\.layers\.3\.surprise\.weight",
        ),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(64, 64)}),
            r"tensor model\.layers\.3\.eh_proj\.weight has shape \[64, 64\], but config\.json calls for \[64, 128\]",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if ".layers.3." in name],
            r"has no tensors at model\.layers\.3\.: it has no layers for multi-token prediction",
        ),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    build("glm4_moe", tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(UserError, match=message):
        DraftRunner(plan_with_draft(tmp_path, "EAGLE"))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("glm4_moe", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ("glm4_moe", {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True is not supported"),
        ("nemotron_h", {"mtp_layers_block_type": None}, "none of mtp_layers_block_type, mtp_hybrid_override_pattern"),
    ],
)
def test_keys_that_do_not_fit(name: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    change_keys(tmp_path, **FORMS[name].keys | keys)
    with pytest.raises(UserError, match=message):
        plan_with_draft(tmp_path, "EAGLE")


def test_a_family_without_such_layers(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    with pytest.raises(UserError, match="Qwen3ForCausalLM has no layers for multi-token prediction"):
        plan_with_draft(tmp_path, "EAGLE")


def test_without_a_draft_its_tensors_stay_unread(tmp_path: Path) -> None:
    build("qwen3_next", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"mtp.surprise": torch.ones(2)}))
    TinyRunner(plan_for(tmp_path))

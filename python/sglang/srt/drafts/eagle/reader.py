"""EAGLE and EAGLE-3 heads: makes their descriptions from config.json.

Sources: arXiv 2401.15077, 2406.16858, 2503.01840, and the formats in which SpecForge, NVIDIA, EAGLE's authors and the
speculators library publish heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.speculative import EAGLE, EAGLE3
from sglang.srt.configs.stored_form import stored_wide
from sglang.srt.drafts.config import SPECULATORS_KIND, DraftConfig, check_sizes, with_layer_keys
from sglang.srt.drafts.eagle.spec import Concatenated, Projected
from sglang.srt.drafts.spec import DraftDescription, finished
from sglang.srt.errors import UserError
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.usual import usual_model
from sglang.srt.plan.layer_spec import LayerSpec, Sum
from sglang.srt.plan.model_description import ModelDescription, architecture_of, describe_as
from sglang.srt.plan.weight_names import ATTENTION_NAMES, LATENT_NAMES, MLP_NAMES, WeightMap

EAGLE3_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",  # EAGLE's authors publish heads under this name
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
EAGLE3_MLA_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
EAGLE_ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")

USUAL_AUX_LAYERS = 3
_NAMES = WeightMap(
    {
        "embed": "embed_tokens",
        "fc": "fc",
        "input_norm": "input_norm",
        "norm": "norm",
        "lm_head": "lm_head",
        "": "",
    },
    {**ATTENTION_NAMES, **LATENT_NAMES, **MLP_NAMES, "hidden_norm": "hidden_norm"},
    layer_prefix="layers.{layer}.",
    beginnings=(
        ("model.", ""),
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    ),
    decoder="",
)
_LLAMA = Family(
    model_types=("llama",), architectures=EAGLE3_ARCHITECTURES + EAGLE_ARCHITECTURES, read=usual_model, names=_NAMES
)
_LATENT = Family(
    model_types=("deepseek_v3", "kimi_k2"), architectures=EAGLE3_MLA_ARCHITECTURES, read=usual_model, names=_NAMES
)

_COMPUTED: Mapping[str, object] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
"""Keys of `eagle_config` that change what a head computes, with the only value that is computed."""
_DENSE: Mapping[str, object] = dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"))
"""Keys of experts, set to null: heads have an MLP even where their config repeats the target's keys of experts."""
_READ = frozenset({"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "num_aux_hidden_states"})
_READ_ANYWHERE = frozenset(
    {"norm_before_fc", "norm_output", "norm_before_residual", "fc_norm", "use_aux_norm", "target_hidden_size"}
)


def describe_eagle3(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes an EAGLE-3 head. Raises UserError that names keys which are missing, unknown, or do not match the
    target."""
    keys, speculators = _plain(config.reader())
    settings = _settings(keys)
    architecture = architecture_of(keys)
    latent = architecture in EAGLE3_MLA_ARCHITECTURES
    if architecture not in EAGLE3_ARCHITECTURES + EAGLE3_MLA_ARCHITECTURES:
        raise _unknown(keys, architecture, EAGLE3_ARCHITECTURES[:1] + EAGLE3_MLA_ARCHITECTURES[:1])
    if keys.default("tie_word_embeddings", bool, False):
        raise UserError(f"{keys.source}: tie_word_embeddings = True is not supported for {architecture}.")
    names = _NAMES
    stored = config.stored(names)
    family, quantization = _LATENT if latent else _LLAMA, stored_wide(config.quantization, stored)
    dense = ConfigReader({**keys.values, **_DENSE}, keys.source)
    model = describe_as(family, dense, quantization, config.keep_shared_apart)
    aux_layers = _aux_layers(settings, speculators, len(target.layers))
    _check_aux_layers(aux_layers, settings, len(target.layers))
    form = Concatenated(
        num_aux_layers=len(aux_layers),
        aux_size=target.hidden_size,
        aux_norms=_flag(settings, "fc_norm", "use_aux_norm") or "fc_norm.0.weight" in (stored or ()),
        norm_before_fc=_flag(settings, "norm_before_fc"),
        # The speculators library's default is true.
        norm_before_residual=settings.default("norm_before_residual", bool, speculators),
        norm_output=_flag(settings, "norm_output"),
    )
    check_sizes(settings, model, target)
    reduced = keys.count("draft_vocab_size")
    own_head = reduced > 0 and (stored is None or "lm_head.weight" in stored)
    head = reduced if own_head else 0
    # A head of the whole vocabulary has no table.
    has_table = head > 0 and (head != target.vocab_size or "d2t" in (stored or ()))
    layers = (_first(model.layers[0], 2 * model.hidden_size), *model.layers[1:])
    return finished(
        DraftDescription(
            kind=EAGLE3,
            model=replace(model, layers=layers, names=_with_aux_norms(names, len(aux_layers))),
            form=form,
            first_layer=len(target.layers),
            vocab_size=target.vocab_size,
            aux_layers=aux_layers,
            head_size=head,
            reduced=has_table,
            own_embedding=model.hidden_size != target.hidden_size,
        ),
        target,
    )


def describe_eagle(config: DraftConfig, target: ModelDescription) -> DraftDescription:
    """Describes an EAGLE-1 or EAGLE-2 head. Raises UserError as `describe_eagle3` does."""
    keys = config.reader()
    architecture = architecture_of(keys)
    if architecture not in EAGLE_ARCHITECTURES:
        raise _unknown(keys, architecture, EAGLE_ARCHITECTURES[:1])
    stored = config.stored(_NAMES)
    model = describe_as(_LLAMA, keys, stored_wide(config.quantization, stored))
    check_sizes(keys, model, target)
    if len(model.layers) > 1:
        raise UserError(
            f"{keys.source}: num_hidden_layers is {len(model.layers)}, and EAGLE heads have one layer here."
        )
    (layer,) = model.layers
    if model.hidden_size != target.hidden_size:
        raise UserError(
            f"{keys.source}: hidden_size {model.hidden_size} is not the target's ({target.hidden_size}), whose features"
            " an EAGLE head reads. Give the head that was trained for this model."
        )
    return finished(
        DraftDescription(
            kind=EAGLE,
            model=replace(model, layers=(_unnormed(layer),)),
            form=Projected(norms=False, bias=True, final_norm=False),
            first_layer=len(target.layers),
            vocab_size=target.vocab_size,
        ),
        target,
    )


def _plain(keys: ConfigReader) -> tuple[ConfigReader, bool]:
    """Returns (keys of the draft's layer, whether the speculators library wrote them). That library puts the layer's
    config into `transformer_layer_config`."""
    kind = keys.values.get(SPECULATORS_KIND)
    if kind is None:
        return keys, False
    if kind != "eagle3":
        raise UserError(f"{keys.source}: {SPECULATORS_KIND} {kind!r} is not supported; supported: 'eagle3'.")
    return with_layer_keys(keys), True


def _settings(keys: ConfigReader) -> ConfigReader:
    """Returns the keys together with those of `eagle_config`. Raises UserError for settings that are unknown or not
    computed."""
    inner = keys.default("eagle_config", dict, {})
    unknown = sorted(inner.keys() - _READ - _READ_ANYWHERE - _COMPUTED.keys())
    if unknown:
        raise UserError(f"{keys.source}: eagle_config has unknown keys: {', '.join(unknown)}.")
    for key, computed in _COMPUTED.items():
        if inner.get(key, computed) != computed:
            raise UserError(
                f"{keys.source}: eagle_config {key} = {inner[key]!r} is not supported; supported: {computed}."
            )
    return ConfigReader({**keys.values, **inner}, keys.source)


def _flag(keys: ConfigReader, *names: str) -> bool:
    return any(keys.default(name, bool, False) for name in names)


def _aux_layers(settings: ConfigReader, speculators: bool, num_layers: int) -> tuple[int, ...]:
    """Returns the target layers whose outputs are aux hidden states. A head that names none reads the inputs of the
    layers 2, L / 2 and L - 3. Heads name the layers whose outputs they read; those of the speculators library name
    layers by their inputs."""
    if not settings.default("use_aux_hidden_state", bool, True):
        return ()
    named = settings.default("eagle_aux_hidden_state_layer_ids", list, [])
    if not named:
        number = settings.count("num_aux_hidden_states") or USUAL_AUX_LAYERS
        if number != USUAL_AUX_LAYERS:
            raise UserError(
                f"{settings.source}: num_aux_hidden_states is {number}, and eagle_aux_hidden_state_layer_ids does not"
                " say of which layers."
            )
        return (1, num_layers // 2 - 1, num_layers - 4)
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in named):
        raise UserError(f"{settings.source}: eagle_aux_hidden_state_layer_ids must be layers; got {named!r}.")
    return tuple(layer - speculators for layer in named)


def _check_aux_layers(aux_layers: tuple[int, ...], settings: ConfigReader, num_layers: int) -> None:
    outside = [layer for layer in aux_layers if not -1 <= layer < num_layers]
    if outside:
        read = ", ".join(map(str, aux_layers))
        raise UserError(
            f"{settings.source}: the EAGLE3 head reads the outputs of the layers {read}, and the model has"
            f" {num_layers}. Give the head that was trained for this model."
        )


def _unknown(keys: ConfigReader, architecture: str, supported: tuple[str, ...]) -> UserError:
    return UserError(
        f"{keys.source}: the draft architecture {architecture} is not supported here. Supported:"
        f" {', '.join(supported)}. Without such a head draft with NGRAM, which needs no weights."
    )


def _first(layer: LayerSpec, input_size: int) -> LayerSpec:
    """Returns the first layer, whose attention takes the embedding and the features side by side."""
    return replace(layer, mixer=layer.mixer.with_input_size(input_size))


def _unnormed(layer: LayerSpec) -> LayerSpec:
    """Returns the layer without the norm before its attention: EAGLE's first layer has none."""
    return replace(layer, residual=Sum(mixer_norms=False))


def _with_aux_norms(names: WeightMap, count: int) -> WeightMap:
    return replace(names, model={**names.model, **{f"fc_norm.{i}": f"fc_norm.{i}" for i in range(count)}})

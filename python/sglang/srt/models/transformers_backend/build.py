"""Creates model classes of transformers without weights, with our functions in the place of theirs.

Nothing else imports transformers' model code, and this is imported only where such a class is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from sglang.srt.errors import UserError
from sglang.srt.plan.transformers_backend.facts import CLASSIFY, EMBED, GENERATE, ClassRequest
from sglang.srt.towers.registry import reads_images

VISION = "vision_config"
"""Key of a config with that of what encodes images."""
REGISTERED = "sglang"
"""Name of our functions among those of transformers."""
_CONFIG = "AutoConfig"
_KEYS = {GENERATE: "AutoModelForCausalLM", EMBED: "AutoModel", CLASSIFY: "AutoModelForSequenceClassification"}
"""Keys of `auto_map` in config.json, by what the class is to do."""
_TABLES = {GENERATE: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, CLASSIFY: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
_DOES = {
    GENERATE: "no class of causal language models",
    EMBED: "no model type with a class of its own",
    CLASSIFY: "no class that classifies texts",
}


def class_of(request: ClassRequest) -> type[Any]:
    """Returns the model class that the config names; for embeddings that of its model type, without a head. Raises
    UserError."""
    name = _named(request)
    if name:
        kind: type[Any] = getattr(transformers, name)
        return kind
    if _KEYS[request.task] in request.own_code:
        return _own(request, _KEYS[request.task])
    raise UserError(
        f"the architecture {request.architecture} is not supported: there is no family of it here, and in transformers"
        f" {transformers.__version__} it is {_DOES[request.task]}."
    )


def _named(request: ClassRequest) -> str:
    """Returns the name of transformers' class; "": it has none."""
    if request.task == EMBED:
        names = _all(MODEL_MAPPING_NAMES.get(str(request.values.get("model_type") or ""), ()))
        return next(iter(names), "")
    known = {name for names in _TABLES[request.task].values() for name in _all(names)}
    if request.task == GENERATE and reads_images(request.values):
        known |= {name for names in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values() for name in _all(names)}
    return request.architecture if request.architecture in known else ""


def _all(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def config_of(request: ClassRequest, model: type[Any]) -> Any:
    """Returns the config as the model class takes it. Raises UserError for one of another class."""
    brings_both = _CONFIG in request.own_code and _KEYS[request.task] in request.own_code
    if brings_both and model.__name__ not in dir(transformers):
        return _own(request, _CONFIG).from_dict(dict(request.values))
    kind, wanted = str(request.values.get("model_type") or ""), model.config_class
    if kind not in CONFIG_MAPPING or not issubclass(CONFIG_MAPPING[kind], wanted):
        raise UserError(
            f"the architecture {request.architecture} is not supported with the model type {kind!r}: its class takes"
            f" {wanted.model_type!r}."
        )
    return CONFIG_MAPPING[kind].from_dict(dict(request.values))


def _own(request: ClassRequest, key: str) -> Any:
    """Returns a class that the model's directory brings. Raises UserError."""
    if not request.trust_remote_code:
        raise UserError(
            f"The model in {request.directory} brings its own Python code. If you trust it, pass --trust-remote-code."
        )
    file = f"{request.own_code[key].rpartition('.')[0]}.py"
    if "--" not in file and not Path(request.directory, file).exists():  # with "--" another repository has it
        raise UserError(
            f"config.json names the Python code {file}, which is not in {request.directory}. Copy it there from the"
            " model's repository."
        )
    return get_class_from_dynamic_module(request.own_code[key], request.directory)


def register(attention: Callable[..., Any], experts: Callable[..., Any], name: str = REGISTERED) -> None:
    """Registers functions that classes call for attention and experts. No function makes masks under this name, so that
    classes make none."""
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_EXPERTS_FUNCTIONS.register(name, experts)


def create(kind: type[Any], config: Any, dtype: torch.dtype, task: str, name: str = REGISTERED) -> Any:
    """Creates a model on the meta device, with the functions registered under `name`."""
    attention: Any = name
    if VISION in config.sub_configs:  # an image is computed whole, over no cache: as transformers does
        attention = {"": name, **{part: "sdpa" if part == VISION else name for part in config.sub_configs}}
    config._attn_implementation = attention
    with torch.device("meta"):
        model = kind._from_config(config, dtype=dtype, attn_implementation=attention, experts_implementation=name)
    if (
        task == EMBED and getattr(model, "pooler", None) is not None
    ):  # computes something of the first token that nobody asks for
        model.pooler = None
    return model.eval()

"""Creates model classes of transformers without weights, with our functions in the place of theirs.

Nothing else imports transformers' model code, and this is imported only where such a class is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sglang.srt.errors import UserError
from sglang.srt.plan.transformers_backend.facts import ClassRequest

REGISTERED = "sglang"
"""Name of our functions among those of transformers."""
_CAUSAL, _CONFIG = "AutoModelForCausalLM", "AutoConfig"
"""Keys of `auto_map` in config.json."""


def class_of(request: ClassRequest) -> type[Any]:
    """Returns the model class that the config names. Raises UserError."""
    name, classes = request.architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if any(name in (names if isinstance(names, tuple | list) else (names,)) for names in classes):
        kind: type[Any] = getattr(transformers, name)
        return kind
    if _CAUSAL in request.own_code:
        return _own(request, _CAUSAL)
    raise UserError(
        f"the architecture {name} is not supported: there is no family of it here, and in transformers"
        f" {transformers.__version__} it is no class of causal language models."
    )


def config_of(request: ClassRequest, model: type[Any]) -> Any:
    """Returns the config as the model class takes it. Raises UserError for one of another class."""
    if _CONFIG in request.own_code and _CAUSAL in request.own_code and model.__name__ not in dir(transformers):
        return _own(request, _CONFIG).from_dict(dict(request.values))
    kind, wanted = str(request.values.get("model_type") or ""), model.config_class
    if kind not in CONFIG_MAPPING or not issubclass(CONFIG_MAPPING[kind], wanted):
        raise UserError(
            f"the architecture {request.architecture} is not supported with the model type {kind!r}: its class takes"
            f" {wanted.model_type!r}."
        )
    return CONFIG_MAPPING[kind].from_dict(dict(request.values))


def _own(request: ClassRequest, key: str) -> Any:
    """Returns a class that the model's directory brings."""
    if not request.trust_remote_code:
        raise UserError(
            f"The model in {request.directory} brings its own Python code. If you trust it, pass --trust-remote-code."
        )
    return get_class_from_dynamic_module(request.own_code[key], request.directory)


def register(attention: Callable[..., Any], experts: Callable[..., Any], name: str = REGISTERED) -> None:
    """Registers functions that classes call for attention and experts. No function makes masks under this name, so that
    classes make none."""
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_EXPERTS_FUNCTIONS.register(name, experts)


def create(kind: type[Any], config: Any, dtype: torch.dtype, name: str = REGISTERED) -> Any:
    """Creates a model on the meta device, with the functions registered under `name`."""
    config._attn_implementation = name
    with torch.device("meta"):
        model = kind._from_config(config, dtype=dtype, attn_implementation=name, experts_implementation=name)
    return model.eval()

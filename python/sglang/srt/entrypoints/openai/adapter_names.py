"""Which LoRA adapter a request names: in the model's name, or as `lora_path`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.entrypoints.http_errors import ApiError

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import SamplingFields
    from sglang.srt.entrypoints.openai.serving import OpenAIService

AdapterNames = str | list[str | None] | None


def adapters_of(service: OpenAIService, body: SamplingFields) -> AdapterNames:
    """Returns the adapter that `model` names: an adapter's own name, or one behind `model:`; otherwise `lora_path`. A
    name that is neither the model's nor an adapter's is the model's own business."""
    named = _in_model_name(service, body.model)
    return body.lora_path if named is None else named


def check_model_name(service: OpenAIService, body: SamplingFields) -> None:
    """Raises ApiError 404 for a model's name that is neither the model's nor an adapter's, on servers that take
    adapters: the answers would be those of the model without any."""
    name, adapters = body.model, service.manager.adapters
    if adapters is None or name is None or name == service.model_name:
        return
    named = _in_model_name(service, name)
    if named is None or adapters.find(named) is None:
        raise ApiError(404, f"The model '{name}' does not exist", code="model_not_found", param="model")


def _in_model_name(service: OpenAIService, name: str | None) -> str | None:
    adapters = service.manager.adapters
    if adapters is None or name is None or name == service.model_name:
        return None
    if adapters.find(name) is not None:
        return name
    if name.startswith(f"{service.model_name}:"):
        return name.removeprefix(f"{service.model_name}:")
    behind = name.partition(":")[2]
    return behind if behind and adapters.find(behind) is not None else None

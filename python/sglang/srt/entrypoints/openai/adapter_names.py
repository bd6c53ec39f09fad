"""Which LoRA adapter a request names: in the model's name, or as `lora_path`. One rule for every API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.entrypoints.http_errors import ApiError

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.serving import OpenAIService

LATEST = "latest"
"""What Ollama's clients add to names: the model itself."""
AdapterNames = str | list[str | None] | None


def adapters_of(service: OpenAIService, model: str | None, lora_path: AdapterNames = None) -> AdapterNames:
    """Returns the adapter that `model` names: an adapter's own name, or one behind `model:`; for the model's own name,
    and without any, `lora_path`. Raises ApiError 404 for other names on servers that take adapters: the answers would
    be those of the model alone."""
    adapters = service.manager.adapters
    names = (service.model_name, *service.aliases)
    if adapters is None or not model or model in names:
        return lora_path
    if model.removesuffix(f":{LATEST}") in names and adapters.find(LATEST) is None:
        return lora_path
    ours = f"{service.model_name}:"
    behind = model.removeprefix(ours) if model.startswith(ours) else model.partition(":")[2]
    adapter = next((name for name in (model, behind) if adapters.find(name) is not None), None)
    if adapter is None:
        raise ApiError(404, f"The model '{model[:256]}' does not exist", code="model_not_found", param="model")
    return adapter

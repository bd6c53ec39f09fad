"""Computes the buffers of a class that no checkpoint has, such as rotary frequencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from sglang.srt.errors import UserError

_UNSET = 77
"""A value that no buffer has everywhere."""


def fill_buffers(model: Any, device: torch.device, computed: Callable[[str], bool]) -> None:
    """Fills buffers without values by the class's own initialization. computed(path): whether this rank computes the
    module at `path`. Raises UserError for a buffer that the class leaves without values."""
    owners = {"": model}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            owners[path] = module
        passing = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not passing or device.type == "meta" or not computed(path):
            continue
        parameters = module._parameters
        module._parameters = {  # which are not to be initialized
            name: None if p is None else torch.nn.Parameter(p.to("meta"), requires_grad=False)
            for name, p in parameters.items()
        }
        with torch.no_grad():
            for name in passing:
                module._buffers[name] = torch.full_like(module._buffers[name], _UNSET, device="cpu")
            owner = max((at for at in owners if not at or f"{path}.".startswith(f"{at}.")), key=len)
            owners[owner]._init_weights(module)
        module._parameters = parameters
        for name in passing:
            buffer = module._buffers[name]
            if bool((buffer == _UNSET).all()) and buffer.numel():
                raise UserError(f"{type(model).__name__}: the buffer {path}.{name} has no initial values.")
            module._buffers[name] = buffer.to(device)

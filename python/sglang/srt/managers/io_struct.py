"""Calls as trainers write them, by their names in SGLang; the messages between our processes are in `wire/io_struct`.

Clients read these objects and send their fields over HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class GenerateReqInput(SimpleNamespace):
    """A call of `/generate`, by the names of its body's fields."""


@dataclass
class UpdateWeightFromDiskReqInput:
    """Weights of a directory."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    keep_pause: bool = False
    flush_cache: bool = True


@dataclass
class UpdateWeightsFromTensorReqInput:
    """Tensors: handles or safetensors files, one for all ranks of tensor parallelism or one for each."""

    serialized_named_tensors: list[Any]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: str = "all"


@dataclass
class UpdateWeightsFromDistributedReqInput:
    """Tensors that a trainer broadcasts."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    selector: str = "all"


@dataclass
class InitWeightsUpdateGroupReqInput:
    """A group of a trainer and all ranks."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


@dataclass
class DestroyWeightsUpdateGroupReqInput:
    """The end of such a group."""

    group_name: str = "weight_update_group"


@dataclass
class GetWeightsByNameReqInput:
    """The first values of a tensor."""

    name: str
    truncate_size: int = 100


@dataclass
class ReleaseMemoryOccupationReqInput:
    """Memory to give back; all for None."""

    tags: list[str] | None = None


@dataclass
class ResumeMemoryOccupationReqInput:
    """Memory to take again; all for None."""

    tags: list[str] | None = None


@dataclass
class PauseGenerationReqInput:
    """The end of steps; `mode`: abort, retract or in_place."""

    mode: str = "abort"


@dataclass
class ContinueGenerationReqInput:
    """The end of a pause."""

    torch_empty_cache: bool = True


@dataclass
class AbortReq:
    """The end of a request, or of all."""

    rid: str = ""
    abort_all: bool = False


@dataclass
class LoadLoRAAdapterFromTensorsReqInput:
    """A LoRA adapter that is sent."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: list[Any]
    pinned: bool = False
    added_tokens_config: dict[str, Any] | None = field(default=None)

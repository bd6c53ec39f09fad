"""Options of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arguments.groups import ADAPTERS
from sglang.srt.cli_args import option


@dataclass(kw_only=True)
class AdapterArgs:
    """Options of LoRA adapters."""

    enable_lora: bool = option(
        False, ADAPTERS, "Serve LoRA adapters, which requests name; --lora-paths asks for it, too."
    )
    lora_paths: list[str] | None = option(
        None,
        ADAPTERS,
        "Adapters that are there from the start, each a directory, NAME=DIRECTORY or a JSON object with lora_name, "
        "lora_path and pinned (it keeps its place on the GPU).",
    )
    max_loras_per_batch: int = option(
        8,
        ADAPTERS,
        "Adapters that lie on the GPU, and so may run at once; requests of others wait. Requests without one take no "
        "place.",
        minimum=1,
        maximum=256,
    )
    max_loaded_loras: int | None = option(
        None,
        ADAPTERS,
        "Adapters in main memory; for one more, the one that was asked for longest ago leaves it, and is read again "
        "for its next request.",
        minimum=1,
    )
    max_lora_rank: int | None = option(
        None,
        ADAPTERS,
        "Largest rank of an adapter; the largest of --lora-paths if not given.",
        minimum=1,
        maximum=512,
    )
    lora_target_modules: list[str] | None = option(
        None,
        ADAPTERS,
        "Last names of the modules that adapters may change, or all; those of --lora-paths if not given, and without "
        "these all but the embedding and the output head.",
    )
    experts_shared_outer_loras: bool = option(
        False,
        ADAPTERS,
        "Keep A of gate and up and B of down once for all experts of a layer, which takes less memory; also if all"
        " adapters of --lora-paths are such.",
    )
    no_experts_shared_outer_loras: bool = option(
        False, ADAPTERS, "Keep A and B of each expert, whatever the adapters of --lora-paths are."
    )
    lora_use_virtual_experts: bool = option(
        False, ADAPTERS, "Compute adapters of experts over one axis of adapters and experts, which is always so here."
    )
    lora_eviction_policy: str = option(
        "lru",
        ADAPTERS,
        "Which adapter leaves the GPU for another: the one that was used longest ago, or that came first.",
        choices=("lru", "fifo"),
    )
    lora_drain_wait_threshold: float = option(
        0.0,
        ADAPTERS,
        "Seconds after which requests with an adapter wait behind one whose adapter waits for a place on the GPU. "
        "Without it they do so when 32 have passed it.",
        minimum=0.0,
    )
    lora_strict_loading: bool = option(
        False,
        ADAPTERS,
        "Refuse adapters that lack A and B of a linear layer which target_modules of adapter_config.json names; "
        "unknown names are refused without it, too.",
    )
    allowed_local_lora_path: str | None = option(
        None,
        ADAPTERS,
        "Directory below which /load_lora_adapter reads adapters for clients of a server without a key. With a key, "
        "its holders name any directory.",
        metavar="DIRECTORY",
    )

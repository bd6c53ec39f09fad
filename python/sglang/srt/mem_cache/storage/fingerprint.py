"""Hash of everything besides the tokens that the content of stored pages depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.mem_cache.storage.entry import MAGIC
from sglang.srt.mem_cache.storage.prefix_names import block_tokens
from sglang.srt.plan.caches import CacheGroup
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

_ARGUMENTS = (
    "load_format",
    "quantization",
    "speculative_algorithm",
    "speculative_eagle_topk",
    "mamba_ssm_dtype",
    "json_model_override_args",
)
"""Arguments that change results and appear neither in the plan nor in the configuration."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".json")


def fingerprint(args: ServerArgs, plan: Plan, rank: int) -> bytes:
    """Returns the hash of a rank. Ranks whose caches are equal, as MLA latents are, have equal hashes; so have ranks
    with the same place in their attention groups."""
    host_cache = plan.host_cache
    assert host_cache is not None
    facts: dict[str, Any] = {
        "format": [MAGIC.decode(), __version__],
        "page": [plan.page_size, block_tokens(plan.page_size)],
        "arguments": {name: getattr(args, name) for name in _ARGUMENTS},
        "types": [plan.dtype, plan.kv_cache_dtype],
        "scales": None if plan.cache_scales is None else plan.cache_scales.layers,
        "model": plan.model.hf_config,
        "weights": _weights(plan.model.model_path, args.random_seed if args.load_format == "dummy" else None),
        "draft": _draft(args),
        "caches": [_describe(group) for group in plan.caches],
        "rank": None if host_cache.ranks_share else [plan.ranks.attn_tp_rank(rank), plan.ranks.attn_tp_size],
    }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).digest()


def _draft(args: ServerArgs) -> Any:
    if args.speculative_algorithm is None:
        return None
    path = args.speculative_draft_model_path
    if path is None:
        return "the model's own"
    directory = resolve_model_path(path, args.speculative_draft_model_revision, args.download_dir, False)
    return _weights(str(directory), args.random_seed if args.load_format == "dummy" else None)


def _describe(group: CacheGroup) -> list[Any]:
    """Describes a group. Pages hold the group's caches in the order of its members."""
    members = [[member.layer_id, repr(member.cache)] for member in group.members]
    return [repr(group.lifetime), str(group.entries_per_token), members]


def _weights(directory: str, seed: int | None) -> list[Any]:
    """Identifies the files of a checkpoint: by their hashes in a Hugging Face cache, otherwise by size and time, which
    makes two copies of one checkpoint different."""
    return [] if not os.path.isdir(directory) else [seed, *_files(Path(directory))]


def _files(directory: Path) -> Iterator[list[Any]]:
    for path in sorted(directory.iterdir()):
        if path.suffix in _WEIGHTS and path.is_file():
            real = path.resolve()
            status = real.stat()
            by_content = real.parent.name == "blobs"
            yield [path.name, real.name if by_content else [status.st_size, status.st_mtime_ns]]

"""Pairs the tensors of two models that were built alike, so that one's weights can be copied into the other's memory.

Kernels keep weights where they like: in objects, closures and partial functions. Both models are walked along the same
attributes, so it does not matter how a kernel has rearranged what the checkpoint holds.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sglang.srt.errors import UserError
from sglang.srt.mem_cache.memory_pool import CacheStore

_SKIPPED = (
    *("sglang.srt.plan", "sglang.srt.distributed", "sglang.srt.configs", "sglang.srt.kernels", "sglang.srt.hardware"),
    *("sglang.srt.layers.adapter", "sglang.srt.layers.expert_adapters", "sglang.srt.layers.native_adapters"),
    *("sglang.srt.layers.moe.pair_adapters", "triton", "transformers.configuration", "threading"),
)
"""Modules whose objects hold no weights: the plan, groups, kernels, LoRA adapters in their slots."""
_LEAVES = (str, bytes, bool, int, type, types.ModuleType, torch.dtype, torch.device, torch.Size)


class TensorPair(NamedTuple):
    """A tensor that is served, and the one that takes its place."""

    path: str
    served: torch.Tensor
    staged: torch.Tensor


def tensor_pairs(served: object, staged: object) -> list[TensorPair]:
    """Returns the tensors of both, each memory once; those of one model if both are the same. Raises UserError where
    they differ in more than content, or where a number differs that is part of the captured steps."""
    alone = served is staged
    pairs: list[TensorPair] = []
    seen: set[tuple[int, int]] = set()
    memory: set[tuple[int, int]] = set()
    left: list[tuple[str, Any, Any]] = [("model", served, staged)]
    while left:
        path, old, new = left.pop()
        if (old is new and not alone) or new is None or isinstance(old, _LEAVES) or (id(old), id(new)) in seen:
            continue
        seen.add((id(old), id(new)))
        if isinstance(old, torch.Tensor):
            _check_tensor(path, old, new)
            key = (old.data_ptr(), old.nbytes)
            if old.numel() and key not in memory:
                memory.add(key)
                pairs.append(TensorPair(path, old, new))
        elif isinstance(old, float):
            _check_number(path, old, new)
        elif isinstance(old, CacheStore):
            _check_number(f"{path}.k_scale", old.k_scale, new.k_scale)
            _check_number(f"{path}.v_scale", old.v_scale, new.v_scale)
        elif type(old) is not type(new):
            if old is not None:
                raise UserError(f"the new weights need another form of {path} than the served ones")
        elif not type(old).__module__.startswith(_SKIPPED):
            left += _children(path, old, new)
    return pairs


def _check_tensor(path: str, old: torch.Tensor, new: object) -> None:
    if not isinstance(new, torch.Tensor) or (old.shape, old.dtype, old.stride()) != (
        new.shape,
        new.dtype,
        new.stride(),
    ):
        raise UserError(f"the new weights need other memory for {path} than the served ones")


def _check_number(path: str, old: Any, new: Any) -> None:
    if old != new:
        raise UserError(
            f"{path} is {old} in the served weights and {new} in the new ones; it is part of the captured steps: start"
            " the server with the new weights"
        )


def _children(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict):
        for key in new.keys() & old.keys():
            yield f"{path}[{key!r}]", old[key], new[key]
        return
    if isinstance(old, (list, tuple)):
        if len(old) != len(new):
            raise UserError(f"the new weights have {len(new)} parts in {path}, the served ones {len(old)}")
        yield from ((f"{path}[{i}]", *both) for i, both in enumerate(zip(old, new, strict=True)))
        return
    if isinstance(old, functools.partial):
        yield f"{path}.func", old.func, new.func
        yield f"{path}.args", old.args, new.args
        yield f"{path}.keywords", old.keywords, new.keywords
    elif isinstance(old, types.MethodType):
        yield path, old.__self__, new.__self__
    elif isinstance(old, types.FunctionType):
        for name, one, other in zip(
            old.__code__.co_freevars, old.__closure__ or (), new.__closure__ or (), strict=True
        ):
            yield f"{path}.{name}", _content(one), _content(other)
        yield f"{path}.defaults", old.__defaults__, new.__defaults__
    for name, value in getattr(old, "__dict__", {}).items():
        yield f"{path}.{name}", value, getattr(new, "__dict__", {}).get(name)
    for kind in type(old).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield f"{path}.{name}", getattr(old, name, None), getattr(new, name, None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def copy_pairs(pairs: list[TensorPair]) -> None:
    """Writes the staged tensors over the served ones, which keep their addresses."""
    for _, served, staged in pairs:
        if served.is_contiguous() and served.dim():
            served.view(-1).view(torch.uint8).copy_(staged.view(-1).view(torch.uint8))
        else:
            served.copy_(staged)

"""Finds out whether a class rotates queries and keys as our kernels do, so that these can rotate what they store."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sglang.srt.layers.native_ops import apply_rope

FUNCTION = "apply_rotary_pos_emb"
"""What the modules of most classes call the function that rotates queries and keys."""


_ARGUMENTS = 4
"""Those are the queries, the keys, the cosines and the sines."""


def modules_with_rotation(model: torch.nn.Module) -> list[Any]:
    """Returns the Python modules of a model's code that have such a function."""
    names = sorted({type(module).__module__ for module in model.modules()})
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), FUNCTION)]


@dataclass(slots=True)
class Rotation:
    """A call of the function with the arguments (q, k, cos, sin)."""

    function: Callable[..., Any]
    query: torch.Tensor
    key: torch.Tensor
    cos: torch.Tensor
    used: bool = False


@dataclass(slots=True)
class Rotations:
    """Rotations in a run without weights. Tensors are kept, because they are known again by identity."""

    calls: list[Rotation] = field(default_factory=list)
    tables: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    has_others: bool = False
    """A function of this name has been called with other arguments."""
    _removals: list[Callable[[], None]] = field(default_factory=list)

    def watch(self, model: torch.nn.Module) -> None:
        """Records the calls of a model's functions, and the modules that make the cosines, until `end`."""
        for module in modules_with_rotation(model):
            original = getattr(module, FUNCTION)
            setattr(module, FUNCTION, self._recorded(original))
            self._removals.append(partial(setattr, module, FUNCTION, original))
        for part in model.modules():
            if "Rotary" in type(part).__name__:
                self._removals.append(part.register_forward_hook(self._table, with_kwargs=True).remove)

    def end(self) -> None:
        """Leaves functions and modules as they were."""
        for remove in self._removals:
            remove()

    def _table(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.tables.append((module, args, kwargs, out))

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def rotate(*args: Any, **more: Any) -> Any:
            rotated = original(*args, **more)
            if len(args) == _ARGUMENTS and not more and isinstance(rotated, tuple):
                query, key = rotated
                self.calls.append(Rotation(original, query, key, args[2]))
            else:
                self.has_others = True
            return rotated

        return rotate

    def dim_of(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """Returns how many dims of these queries and keys a call has rotated, just before attention; 0: none has."""
        for call in self.calls:
            if call.query is query and call.key is key:
                call.used = True
                return call.cos.shape[-1]
        return 0

    def replaceable(self, model: Any) -> bool:
        """Returns whether attention gets all that was rotated as it is, rotated as our kernels rotate."""
        functions = {(call.function, call.query.shape[-1], call.cos.shape[-1]) for call in self.calls}
        return (
            not self.has_others
            and all(call.used and call.cos.dim() == 3 for call in self.calls)
            and all(_rotates_halves(*each) for each in functions)
            and all(self._has_equal_halves(model, call.cos) for call in self.calls)
        )

    def _has_equal_halves(self, model: Any, cos: torch.Tensor) -> bool:
        """Returns whether the module that made the cosines gives each angle twice, one half after the other."""
        for module, args, kwargs, out in self.tables:
            if out[0] is cos:
                return _repeats_halves(model, module, args, kwargs)
        return False


def _rotates_halves(function: Callable[..., Any], head_dim: int, rot_dim: int) -> bool:
    """Returns whether a function turns dims i and i + rot_dim / 2 together, known by its values."""
    tokens, angles = 5, torch.rand(5, rot_dim // 2) * 6
    q, k = torch.randn(1, 2, tokens, head_dim), torch.randn(1, 1, tokens, head_dim)
    cos, sin = (torch.cat((half, half), dim=-1)[None] for half in (angles.cos(), angles.sin()))
    for rows, rotated in zip((q, k), function(q, k, cos, sin), strict=True):
        expected = apply_rope(rows[0].transpose(0, 1), angles.cos(), angles.sin(), True).transpose(0, 1)[None]
        if rotated.shape != rows.shape or not torch.allclose(rotated, expected, atol=1e-5):
            return False
    return True


def _repeats_halves(model: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    probe = copy.deepcopy(module).to_empty(device="cpu")
    probe._forward_hooks.clear()
    model._init_weights(probe)
    values = [_on_cpu(value) for value in args], {name: _on_cpu(value) for name, value in kwargs.items()}
    with torch.no_grad():
        tables = probe(*values[0], **values[1])
    return all(torch.equal(*table.chunk(2, dim=-1)) for table in tables)


def _on_cpu(value: Any) -> Any:
    """Returns positions 0, 1, ... in the place of integers without values, and zeros in that of other tensors."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.arange(value.shape[-1]).expand(value.shape)

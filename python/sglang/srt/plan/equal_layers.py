"""Computes what follows from a layer once for equal layers: most models have only a few kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from sglang.srt.plan.layer_spec import LayerSpec

T = TypeVar("T")


def interned(layers: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns the layers with one object for all that are equal, as the functions below know them."""
    kept: dict[LayerSpec, LayerSpec] = {}
    return tuple(kept.setdefault(layer, layer) for layer in layers)


def distinct(layers: Iterable[LayerSpec]) -> list[LayerSpec]:
    """Returns each object once, in the order in which it first comes."""
    return list({id(layer): layer for layer in layers}.values())


def of_each(layers: Iterable[LayerSpec], compute: Callable[[LayerSpec], T]) -> Iterator[T]:
    """Yields the result of `compute` for each layer, computed once for each object: to compare layers would take longer
    than most computations. `compute` must not return an iterator."""
    results: dict[int, T] = {}
    for layer in layers:
        if id(layer) not in results:
            results[id(layer)] = compute(layer)
        yield results[id(layer)]

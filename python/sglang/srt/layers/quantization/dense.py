"""Quantized linear layers: which modules are quantized, and how their tensors are loaded.

Modules with the same input become one product, stacked by rows: each row keeps its own scales, and the largest static
scale of the activation is used for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig
from sglang.srt.configs.quant_scheme import HEAD_SCHEMES, Scheme
from sglang.srt.environ import warn_once
from sglang.srt.errors import UserError
from sglang.srt.layers.linear import Unquantized
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES
from sglang.srt.layers.ops import QUANTIZED_LINEAR
from sglang.srt.layers.parameter import (
    FLOATS,
    Apply,
    Convert,
    Fill,
    Param,
    Scope,
    TensorPart,
    WeightShard,
    constant,
    random_codes,
    zeroed_behind,
)
from sglang.srt.layers.quantization.activations import Activations, row_format, values_of
from sglang.srt.layers.quantization.dequantized_linear import DequantizedLinear
from sglang.srt.layers.quantization.layout import Leaf, layout_of
from sglang.srt.layers.quantization.linear_weight import LinearWeight, QuantizedProduct, StoredWeight, held_scheme
from sglang.srt.layers.quantization.stored import (
    DUMMY_INPUT_SCALE,
    dummy_scale,
    largest_usable,
    matrix_part,
    quantize_into,
)
from sglang.srt.layers.quantization.trellis_linear import TrellisLinear, create_trellis
from sglang.srt.plan.weight_names import PartKey

_DUMMY_FACTOR = 0.02 / 2.93


class QuantizedMethod:
    """The QuantMethod of a quantized checkpoint; modules that its config excludes are in 16 bits."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config

    def create_weights(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        modules = [scope.module(shard.part) for shard in shards]
        quant = self.config.product_quant(modules)
        if quant is None:
            self._say_if_several(scope, modules)
            return self.create_dequantized(scope, shards, bias)
        if quant.trellises:
            return TrellisLinear(scope, create_trellis(scope, shards, quant), bias)
        return QuantizedLinear(scope, quant, _create(scope, shards, quant), bias)

    def _say_if_several(self, scope: Scope, modules: list[str]) -> None:
        """Logs, once for all layers, that modules of one product with different schemes take more memory than in the
        checkpoint."""
        schemes = {quant.scheme if quant else "16 bits" for quant in map(self.config.of, modules)}
        if len(schemes) > 1:
            product, ways = re.sub(r"^layers\.\d+", "layers", scope.path), ", ".join(sorted(schemes))
            warn_once(
                f"{product}: in some layers its modules are stored in several ways ({ways}); they are computed as one,"
                " which is held in 16 bits there"
            )

    def create_dequantized(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        quants = [self.config.of(scope.module(shard.part)) for shard in shards]
        # An online scheme would quantize weights only to dequantize them at once.
        if all(quant is None or quant.storage == "online" for quant in quants):
            return Unquantized().create_weights(scope, shards, bias)
        return DequantizedLinear(scope, shards, quants, _create_stored, bias)

    def create_head(self, scope: Scope, shard: WeightShard) -> Apply | None:
        quant = self.config.named(scope.module())
        if quant is None:
            return None
        if quant.trellises:
            return TrellisLinear(scope, create_trellis(scope, [shard], quant), None, torch.float32)
        if quant.scheme not in HEAD_SCHEMES:
            warn_once(f"{scope.path}: an output head in {quant.scheme} is held in 16 bits")
            return DequantizedLinear(scope, [shard], [quant], _create, None, torch.float32)
        return QuantizedLinear(scope, quant, _create(scope, [shard], quant), None, torch.float32)

    def create_unpacked(self, scope: Scope, shard: WeightShard, take: Callable[[torch.Tensor], None]) -> None:
        quant = self.config.fused_quant([scope.module(shard.part)])
        # An online scheme would quantize weights only to dequantize them at once.
        if quant is None or quant.storage == "online":
            Unquantized().create_unpacked(scope, shard, take)
        else:
            UnpackedWeight(scope, _create_stored(scope, [shard], quant), take)


class QuantizedLinear:
    """A linear layer, x [T, in] -> [T, out] (+ bias) in x's dtype or `out_dtype`. After loading, the kernel takes over
    the weight and may rearrange it."""

    def __init__(
        self,
        scope: Scope,
        quant: ModuleQuant,
        weight: LinearWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.name, op = scope.path, f"linear/{quant.scheme}"
        self.bind = scope.plan.entry(QUANTIZED_LINEAR, op)
        self.arch, self.configs = scope.plan.arch, scope.plan.tiles(op, (*weight.shape, bias is not None))
        self.row_format = row_format(scope.plan.choices[op], weight.scheme, self.arch)
        self.weight: LinearWeight | None = weight
        self.bias, self.out_dtype = bias, out_dtype
        self.run: QuantizedProduct | None = None
        scope.finish.append(self.finish)

    def finish(self) -> None:
        """Passes the loaded weight to the kernel."""
        assert self.weight is not None
        if self.weight.input_scale is not None:
            self.weight.input_scale[:] = largest_usable(self.name, self.weight.input_scale)
        shift = self.weight.shift
        product = self.bind(replace(self.weight, shift=None), self.arch, self.configs)
        if shift is not None:
            group = self.weight.scheme.group[1]
            product = shifted(product, shift.mul_(self.weight.scale).mul_(group), group)
        self.run, self.weight = product, None  # the kernel's now

    def __call__(self, x: Activations) -> torch.Tensor:
        assert self.run is not None, "the weights are not loaded"
        return self.run(x, self.bias, self.out_dtype)


def shifted(product: QuantizedProduct, offset: torch.Tensor, group: int) -> QuantizedProduct:
    """Returns `product` with `offset` [N, K / group] divided by `group` added to all weights of a group, by multiplying
    the mean of a group's inputs with its offset. This way zero points need no kernels of their own."""

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out = product(x, bias, out_dtype)
        # Means instead of sums, which could overflow float16.
        means = values_of(x).unflatten(-1, (-1, group)).mean(-1)
        out.view(-1, out.shape[-1]).addmm_(means.flatten(0, -2), offset.t())
        return out

    return run


class UnpackedWeight:
    """A quantized weight that is dequantized to the model's dtype after loading; the stored form is freed."""

    def __init__(self, scope: Scope, weight: StoredWeight, take: Callable[[torch.Tensor], None]) -> None:
        self.scope, self.take = scope, take
        self.weight: StoredWeight | None = weight
        scope.finish.append(self.finish)

    def finish(self) -> None:
        """Dequantizes the weight and passes it on."""
        assert self.weight is not None
        scope, unpacked = self.scope, self.weight.dequantized().to(self.scope.dtype)
        for name in [name for name in scope.params if name.startswith(f"{scope.path}.")]:
            del scope.params[name]
        name = f"{scope.path}.weight"
        scope.params[name] = Param(name, unpacked, {})
        self.weight = None
        self.take(unpacked)


def _create_stored(scope: Scope, shards: list[WeightShard], quant: ModuleQuant) -> StoredWeight:
    return create_trellis(scope, shards, quant) if quant.trellises else _create(scope, shards, quant)


def _create(scope: Scope, shards: list[WeightShard], quant: ModuleQuant) -> LinearWeight:
    create = _quantized_while_loading if quant.storage == "online" else _as_stored
    return create(scope, shards, quant)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Shards stacked by rows, as the parameters of `scope` hold them."""

    scope: Scope
    shards: list[WeightShard]

    @property
    def rows(self) -> int:
        return sum(shard.rows.padded_count for shard in self.shards)

    @property
    def cols(self) -> int:
        return self.shards[0].cols.padded_count

    def matrix(
        self,
        leaf: Leaf,
        per: tuple[int, int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        fill: Fill,
    ) -> torch.Tensor:
        """Returns a parameter [held] with one element per `per` = (rows, columns); stored elements may hold several."""
        parts: dict[PartKey, TensorPart] = {}
        begin, stored = 0, (per[0] * leaf.rows, per[1])
        for shard in self.shards:
            self._check_split(shard, stored)
            width = -(-shard.cols.count * shape[1] // shard.cols.padded_count)
            dest = (slice(begin, begin - (-shard.rows.count // per[0])), slice(0, width))
            parts[shard.key] = matrix_part(leaf, shard, stored, dest)
            begin -= -shard.rows.padded_count // per[0]
        return zeroed_behind(self.shards, self.scope.param(leaf.name, shape, parts, fill, dtype))

    def by_row(self, leaf: Leaf, single: bool, fill: Fill) -> torch.Tensor:
        """Returns a parameter [rows] fp32 with a number per row, or (`single`) per matrix, repeated for its rows."""
        parts: dict[PartKey, TensorPart] = {}
        begin = 0
        for shard in self.shards:
            rows = shard.rows
            shape, source = ((1,), ()) if single else ((rows.total,), (rows.run,))
            convert = _repeated(leaf.convert, rows.count) if single else leaf.convert
            parts[shard.key] = TensorPart(shape, source, (slice(begin, begin + rows.count),), leaf.dtypes, convert)
            begin += rows.padded_count
        return zeroed_behind(self.shards, self.scope.param(leaf.name, (self.rows,), parts, fill, torch.float32))

    def by_part(self, leaf: Leaf, fill: Fill) -> torch.Tensor:
        """Returns a parameter [tensors] fp32 with one number each; several shards may be slices of one tensor."""
        tensors = [shard for shard in self.shards if shard.piece == 0]
        parts = {
            shard.key: TensorPart((1,), (), (slice(i, i + 1),), leaf.dtypes, leaf.convert)
            for i, shard in enumerate(tensors)
        }
        return self.scope.param(leaf.name, (len(tensors),), parts, fill, torch.float32)

    def _check_split(self, shard: WeightShard, per: tuple[int, int]) -> None:
        """Raises UserError if a rank's share, or a stacked module, ends inside a group with one scale or word."""
        name, size = self.scope.module(shard.part), self.scope.groups.tp.size
        for what, share, step in (("rows", shard.rows, per[0]), ("columns", shard.cols, per[1])):
            run = share.run
            if share.cuts(step):
                raise UserError(
                    f"{name}: {step} {what} have one scale or word, but with --tp-size {size} a rank holds {what}"
                    f" {run.start} to {run.stop} of {share.total}; choose a smaller --tp-size"
                )
        if shard.rows.padded_count % per[0] and shard is not self.shards[-1]:
            raise UserError(
                f"{name}: {shard.rows.padded_count} rows do not divide into groups of {per[0]} with one scale"
            )
        if per[0] == 1 and shard.cols.total % per[1]:
            raise UserError(f"{name}: {shard.cols.total} columns do not divide into groups of {per[1]}")


def _as_stored(scope: Scope, shards: list[WeightShard], quant: ModuleQuant) -> LinearWeight:
    """Creates parameters that hold the checkpoint's tensors."""
    layout, scheme, stack = layout_of(quant), held_scheme(quant), _Stack(scope, shards)
    shape = (stack.rows, stack.cols * scheme.bits // 8)
    data = stack.matrix(layout.data, (1, layout.data.columns), shape, ELEMENT_DTYPES[scheme.element], random_codes)
    scale = _scales(stack, layout.scale, quant, scheme)
    factor = input_scale = None
    if layout.global_scale is not None:
        factor = stack.by_row(layout.global_scale, True, constant(_DUMMY_FACTOR))
    if layout.input_scale is not None:
        input_scale = stack.by_part(layout.input_scale, constant(DUMMY_INPUT_SCALE))
    shift = None
    if layout.zeros is not None:
        groups = scheme.scale_shape(stack.rows, stack.cols)
        shift = stack.matrix(layout.zeros, scheme.group, groups, scope.dtype, constant(0.0))
    return LinearWeight(data, scheme, scale, factor, input_scale, shift)


def _scales(stack: _Stack, leaf: Leaf, quant: ModuleQuant, scheme: Scheme) -> torch.Tensor:
    per_row, per_col = scheme.group
    fill = dummy_scale(scheme)
    if per_col == 0:
        return stack.by_row(leaf, quant.format.group == (0, 0), fill)
    shape = scheme.scale_shape(stack.rows, stack.cols)
    return stack.matrix(leaf, (per_row, per_col), shape, SCALE_DTYPES[scheme.scale], fill)


def _quantized_while_loading(scope: Scope, shards: list[WeightShard], quant: ModuleQuant) -> LinearWeight:
    """Creates parameters for 16-bit tensors that are quantized as they are read, with one scale per row over this
    rank's columns."""
    scheme, stack = held_scheme(quant), _Stack(scope, shards)
    scale = scope.param("weight_scale", (stack.rows,), {}, dummy_scale(scheme), torch.float32)
    parts: dict[PartKey, TensorPart] = {}
    begin = 0
    for shard in shards:
        rows, cols = shard.rows, shard.cols
        dest = (slice(begin, begin + rows.count), slice(0, cols.count))
        convert = quantize_into(scale[dest[0]], scheme)
        parts[shard.key] = TensorPart((rows.total, cols.total), (rows.run, cols.run), dest, FLOATS, convert)
        begin += rows.padded_count
    data = scope.param("weight", (stack.rows, stack.cols), parts, random_codes, ELEMENT_DTYPES[scheme.element])
    return LinearWeight(zeroed_behind(shards, data), scheme, zeroed_behind(shards, scale))


def _repeated(convert: Convert | None, times: int) -> Convert:
    def repeat(read: torch.Tensor) -> torch.Tensor:
        value = read if convert is None else convert(read)
        return value.float().reshape(1).expand(times)

    return repeat

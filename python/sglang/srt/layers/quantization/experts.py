"""Loading of a layer's experts from checkpoints of any published form into the layout of the products.

A rank holds a run of the experts (expert parallel) and a share of their intermediate dims (tensor parallel,
`plan/ranks`). If scales cover groups, shares are whole groups: the last rank may hold fewer dims, padded with zeros,
which add nothing (`expert_share`). If experts do not divide evenly, some ranks have one padding expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.configs.stored_form import STACKED_FP8
from sglang.srt.distributed.groups import Group
from sglang.srt.errors import UserError
from sglang.srt.layers.expert_adapters import AdapterExperts, ExpertMatrix, LayerExperts, ProductRows
from sglang.srt.layers.moe.expert_slots import ExpertSlots
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights, Waves, repack
from sglang.srt.layers.moe.shared_bank import joined_bank
from sglang.srt.layers.parameter import (
    FLOATS,
    Fill,
    Init,
    Param,
    Scope,
    TensorPart,
    WeightShard,
    constant,
    random_codes,
)
from sglang.srt.layers.quantization.expert_sizes import ExpertProduct, ExpertSizes
from sglang.srt.layers.quantization.experts_alternating import FORM as ALTERNATING
from sglang.srt.layers.quantization.experts_alternating import AlternatingExperts, alternates
from sglang.srt.layers.quantization.experts_finish import StoredProduct, finish_pair
from sglang.srt.layers.quantization.experts_fused import FUSED, PROJECTIONS, FusedForm, FusedLeaf, then
from sglang.srt.layers.quantization.experts_joined import JoinedExperts, is_joined
from sglang.srt.layers.quantization.layout import Layout, Leaf, layout_of
from sglang.srt.layers.quantization.stored import (
    DUMMY_INPUT_SCALE,
    DUMMY_SCALES,
    dummy_scale,
    matrix_part,
    quantize_into,
)
from sglang.srt.layers.quantization.trellis_experts import TrellisExperts
from sglang.srt.plan.ranks import padded_share, whole
from sglang.srt.plan.weight_names import PartKey

BY_MATRIX = "by_matrix"
"""Form in which each matrix of all experts is one tensor, for any scheme (Step)."""


def experts_of(scope: Scope, sizes: ExpertSizes, linear_in_up: bool) -> Experts | TrellisExperts:
    """Returns the experts of a layer."""
    quant = expert_quant(scope, sizes)
    if quant is None or not quant.trellises:
        return Experts(scope, sizes, linear_in_up)
    if _in_layer(scope.sub("w13")) not in scope.weights.layer:
        raise UserError(f"{scope.path}: EXL3 has each expert in tensors of its own, which are not read for this model")
    return TrellisExperts(scope, sizes, _products(sizes, quant.format, scope.groups.expert_tp), quant)


class Experts:
    """The experts of a layer. `w13` and `w2` exist once the parameters are filled and `finish` has run; where they lie
    in main memory, a step computes with what `of_step` returns. `linear_in_up`: see Activation."""

    w13: ExpertWeights
    w2: ExpertWeights

    def __init__(self, scope: Scope, sizes: ExpertSizes, linear_in_up: bool) -> None:
        self.num_slots, self.num_buffered, self.buffers = sizes.w13.slots, sizes.w13.buffered, scope.buffers
        self.plan, self.device = scope.plan, scope.device
        self.slots: ExpertSlots | None = None
        self.bank = joined_bank() if self.num_slots else None
        if self.num_slots:
            scope = scope.in_main_memory()
            self.buffers.expected += 1
        if self.bank is not None and self.bank.follows:
            scope = replace(scope, device=torch.device("meta"), made_for=None)
        before = {*scope.params}
        self.quant = quant = expert_quant(scope, sizes)
        self.linear_in_up = linear_in_up
        self.ep_size = sizes.ep_size
        up, down = _products(sizes, quant.format if quant else None, scope.groups.expert_tp)
        self.features = scope.plan.arch.features
        self.adapters = _adapters(scope, sizes, (up, down))
        self.row_nodes = [scope.row_nodes.with_parts(len(product.shards)) for product in (up, down)]
        self.products = [
            _create(replace(scope.sub(product.name), row_nodes=placed), product, sizes, quant)
            for product, placed in zip((up, down), self.row_nodes, strict=True)
        ]
        self.params, self.names = scope.params, scope.params.keys() - before
        if self.bank is not None and self.bank.follows:
            for param in self._forgotten_params():
                scope.on_other_ranks.update(scope.weights.checkpoint_name(param.name, key) for key in param.parts)
        scope.finish.append(self.finish)

    def _forgotten_params(self) -> list[Param]:
        """Removes the parameters of the experts from those that are loaded or kept, and returns them."""
        return [self.params.pop(name) for name in self.names]

    def finish(self) -> None:
        """Builds `w13` and `w2` from the loaded tensors; takes them from the bank that another process has filled."""
        if self.bank is not None and self.bank.follows:
            self.w13, self.w2 = self.bank.take()
        else:
            self._finish_loaded()
        self.products.clear()
        if not self.num_slots or self.w13.data.is_meta:
            return
        if self.bank is not None and not self.bank.follows:
            self.w13, self.w2 = self.bank.keep((self.w13, self.w2), self.row_nodes)
            self._forgotten_params()
        bank, numbers = (self.w13, self.w2), (self.num_slots, self.num_buffered)
        self.slots = ExpertSlots(self.plan, bank, *numbers, self.buffers, self.device, self.row_nodes)
        self.w13, self.w2 = self.slots.bank
        if self.bank is not None and not self.bank.follows and len(self.buffers.layers) == self.buffers.expected:
            self.bank.publish()

    def _finish_loaded(self) -> None:
        up, down = self.products
        if isinstance(up, StoredProduct) and isinstance(down, StoredProduct):
            # Adapters add to what gate and up are, so none of their factors may be moved into down.
            up, down = finish_pair(up, down, self.linear_in_up and self.adapters is None)
        assert isinstance(up, ExpertWeights) and isinstance(down, ExpertWeights)
        up, down = replace(up, ep_size=self.ep_size), replace(down, ep_size=self.ep_size)
        self.w13, self.w2 = (repack(weights, self.features, self.device) for weights in (up, down))

    def of_step(self, ids: torch.Tensor) -> tuple[ExpertWeights, ExpertWeights, Waves | None]:
        """Returns the weights of both products for a step whose tokens chose the experts `ids` [T, k] int32; of a step
        in waves, these."""
        return (self.w13, self.w2, None) if self.slots is None else self.slots.of_step(ids)


def _adapters(scope: Scope, sizes: ExpertSizes, products: tuple[ExpertProduct, ExpertProduct]) -> AdapterExperts | None:
    """Returns memory for the adapters of the experts; None if they have none."""
    if scope.adapters is None or not scope.path.startswith("layers."):
        return None
    one_by_one = _in_layer(scope.sub("w13")) in scope.weights.layer
    module = scope.sub("w13").module(sizes.w13.parts[0]) if one_by_one else scope.sub("experts").module()
    shared = {}
    if sizes.shared:
        of_layer = scope.sub("shared")
        shared = {part: of_layer.sub("gate_up").module(part) for part in sizes.w13.parts}
        shared["down"] = of_layer.sub("down").module("down")
    fused = FUSED.get(sizes.form)
    # Adapters have the rows as transformers' class has them, which separates Inkling's.
    alternating = fused is not None and fused.alternating and sizes.form != ALTERNATING
    layer = LayerExperts(sizes.num_experts, sizes.local, sizes.padded_experts, alternating)
    return scope.adapters.experts(layer, [rows_of(product) for product in products], module, shared)


def rows_of(product: ExpertProduct) -> ProductRows:
    """Returns which matrices a product is of, for their adapters."""
    shards = zip(product.shards, product.at, strict=True)
    matrices = tuple(ExpertMatrix(shard.part, shard.rows, shard.cols, begin) for shard, begin in shards)
    return ProductRows(product.name, matrices, product.rows, product.cols)


def expert_quant(scope: Scope, sizes: ExpertSizes) -> ModuleQuant | None:
    """Returns how the checkpoint stores the experts of layer `scope`. Raises UserError if they differ."""
    config = scope.plan.model.quantization
    if config is None:
        return None
    if _in_layer(scope.sub("w13")) not in scope.weights.layer:  # a family that never keeps experts one by one
        return config.of(scope.sub("experts").module())
    ends = {0, sizes.num_experts - 1}
    up = [scope.sub("w13").module(part, e) for part in sizes.w13.parts for e in ends]
    return config.fused_quant([*up, *(scope.sub("w2").module("down", e) for e in ends)])


def _in_layer(scope: Scope) -> str:
    """Returns the path without the layer, such as "moe.w13"."""
    return scope.path.split(".", 2)[2]


def _products(sizes: ExpertSizes, scheme: Scheme | None, group: Group) -> tuple[ExpertProduct, ExpertProduct]:
    w13, w2 = sizes.w13, sizes.w2
    hidden, share = w13.cols, w2.cols
    if scheme is not None and scheme.group[0] == 1 and scheme.group[1] and hidden % scheme.group[1]:
        raise UserError(f"hidden size {hidden} does not divide into {scheme.name} groups of {scheme.group[1]}")
    dims = padded_share(sizes.intermediate_size, share, group.rank)
    up = tuple(WeightShard(part, dims, whole(hidden)) for part in w13.parts)
    down = tuple(WeightShard(part, whole(w2.rows), dims) for part in w2.parts)
    at = tuple(i * share for i in range(len(up)))
    return ExpertProduct("w13", up, at, w13.rows, hidden), ExpertProduct("w2", down, (0,), w2.rows, share)


def _create(
    scope: Scope, product: ExpertProduct, sizes: ExpertSizes, quant: ModuleQuant | None
) -> ExpertWeights | StoredProduct:
    online = quant is not None and quant.storage == "online"
    if online and sizes.bias:
        raise UserError(f"{scope.path}: experts with a bias cannot be quantized while loading; remove --quantization")
    # Families that keep 16-bit experts together publish most quantized ones one by one.
    fused = FUSED.get(sizes.form if quant is None or online else quant.storage)
    if fused is not None:
        return _fused(scope, product, sizes, fused, quant)
    if quant is not None and quant.storage == STACKED_FP8:
        return _stacked_codes(scope, product, sizes, quant)
    if sizes.bias:
        raise UserError(f"{scope.path}: experts with a bias that are stored one by one are not supported")
    if quant is not None and alternates(sizes, quant):
        return AlternatingExperts(scope, product, sizes, quant).stored()
    if quant is not None and is_joined(sizes, quant):
        return JoinedExperts(scope, product, sizes, quant).stored()
    if quant is None:
        return ExpertWeights(_data_param(scope, product, sizes, Leaf("weight"), None))
    if online:
        return _while_loading(scope, product, sizes, quant.format)
    return _as_stored(scope, product, sizes, quant.format, layout_of(quant))


# --- one tensor an expert, or one for each matrix of all experts ------------------------------------------------------


def _as_stored(
    scope: Scope, product: ExpertProduct, sizes: ExpertSizes, scheme: Scheme, layout: Layout
) -> StoredProduct:
    """Creates parameters that hold the checkpoint's tensors."""
    data = _data_param(scope, product, sizes, layout.data, scheme)
    dummy = DUMMY_SCALES[scheme.element]
    if scheme.group == (0, 0):
        scale = _singles(scope, product, sizes, layout.scale, dummy)
    else:
        scale = _scale_param(scope, product, sizes, layout.scale, scheme)
    factor = inputs = None
    if layout.global_scale is not None:
        factor = _singles(scope, product, sizes, layout.global_scale, dummy)
    if layout.input_scale is not None:
        inputs = _singles(scope, product, sizes, layout.input_scale, DUMMY_INPUT_SCALE)
    shift = None
    if layout.zeros is not None:
        shift = _shift_param(scope, product, sizes, layout.zeros, scheme)
    return StoredProduct(scope.path, scheme, product.at, data, scale, factor, inputs, shift)


def _each(scope: Scope, product: ExpertProduct, sizes: ExpertSizes) -> Iterator[tuple[PartKey, int, int, WeightShard]]:
    """Yields (key, place of the expert on this rank, matrix, shard) for every checkpoint matrix of the product held
    here."""
    for i, shard in enumerate(product.shards):
        for place, e in enumerate(range(sizes.local.start, sizes.local.stop)):
            yield PartKey(shard.part, e), place, i, shard
        if sizes.shared:
            yield PartKey(shard.part, module=shared_module(scope, product.name)), sizes.num_experts, i, shard


def _as_kept(sizes: ExpertSizes, parts: dict[PartKey, TensorPart]) -> dict[PartKey, TensorPart]:
    """Returns the parts of experts stored one by one; if each matrix of all experts is one tensor, slices of these
    tensors."""
    if sizes.form != BY_MATRIX:
        return parts
    every = slice(0, sizes.num_local)
    return {
        PartKey(key.part): replace(
            part,
            shape=(sizes.num_experts, *part.shape),
            source=(sizes.local, *part.source),
            dest=(every, *part.dest[1:]),
        )
        for key, part in parts.items()
        if key.expert == sizes.local.start
    }


def _note_other_ranks(scope: Scope, product: ExpertProduct, sizes: ExpertSizes, leaf: str) -> None:
    """Registers the tensors of other ranks' experts."""
    if sizes.form == BY_MATRIX:
        return
    names, path = scope.weights, f"{scope.path}.{leaf}"
    others = [*range(sizes.local.start), *range(sizes.local.stop, sizes.num_experts)]
    parts = {shard.part for shard in product.shards}
    scope.on_other_ranks.update(names.checkpoint_name(path, PartKey(part, e)) for part in parts for e in others)


def shared_module(scope: Scope, product: str) -> str:
    """Returns the layer's name of the shared expert's projections, whether it is stored separately or among the routed
    experts."""
    return f"{_in_layer(scope).removesuffix(product)}shared.{'gate_up' if product == 'w13' else 'down'}"


def _data_param(
    scope: Scope, product: ExpertProduct, sizes: ExpertSizes, leaf: Leaf, scheme: Scheme | None
) -> torch.Tensor:
    """Returns a parameter [E, rows, columns, or bytes of two]."""
    per_byte = 2 if scheme is not None and scheme.bits == 4 else 1
    parts: dict[PartKey, TensorPart] = {}
    for key, e, i, shard in _each(scope, product, sizes):
        rows = slice(product.at[i], product.at[i] + shard.rows.count)
        dest = (e, rows, slice(0, shard.cols.count // per_byte))
        parts[key] = matrix_part(leaf, shard, (leaf.rows, leaf.columns), dest)
    shape = (sizes.padded_experts, product.rows, product.cols // per_byte)
    fill: Init | Fill = Init.NORMAL if scheme is None else random_codes
    dtype = None if scheme is None else ELEMENT_DTYPES[scheme.element]
    _note_other_ranks(scope, product, sizes, leaf.name)
    return _zeroed(product, sizes, scope.param(leaf.name, shape, _as_kept(sizes, parts), fill, dtype))


def _scale_param(scope: Scope, product: ExpertProduct, sizes: ExpertSizes, leaf: Leaf, scheme: Scheme) -> torch.Tensor:
    """Returns a parameter [E, rows] or [E, groups of rows, groups of columns]."""
    per_row, per_col = scheme.group
    parts: dict[PartKey, TensorPart] = {}
    for key, e, i, shard in _each(scope, product, sizes):
        begin = product.at[i] // per_row
        rows = slice(begin, begin - (-shard.rows.count // per_row))
        if per_col:
            parts[key] = matrix_part(leaf, shard, scheme.group, (e, rows, slice(0, -(-shard.cols.count // per_col))))
        else:
            parts[key] = TensorPart((shard.rows.total,), (shard.rows.run,), (e, rows), leaf.dtypes, leaf.convert)
    shape = (sizes.padded_experts, *scheme.scale_shape(product.rows, product.cols))
    _note_other_ranks(scope, product, sizes, leaf.name)
    parts = _as_kept(sizes, parts)
    tensor = scope.param(leaf.name, shape, parts, dummy_scale(scheme), SCALE_DTYPES[scheme.scale])
    return _zeroed(product, sizes, tensor)


def _shift_param(scope: Scope, product: ExpertProduct, sizes: ExpertSizes, leaf: Leaf, scheme: Scheme) -> torch.Tensor:
    """Returns a parameter [E, rows, groups of columns] int8: 8 minus the groups' zero points, kept until merged into
    the scales."""
    _, per_col = scheme.group
    parts: dict[PartKey, TensorPart] = {}
    for key, e, i, shard in _each(scope, product, sizes):
        rows = slice(product.at[i], product.at[i] + shard.rows.count)
        parts[key] = matrix_part(
            leaf, shard, (leaf.rows, per_col), (e, rows, slice(0, -(-shard.cols.count // per_col)))
        )
    shape = (sizes.padded_experts, *scheme.scale_shape(product.rows, product.cols))
    _note_other_ranks(scope, product, sizes, leaf.name)
    tensor = scope.param(leaf.name, shape, _as_kept(sizes, parts), constant(0.0), torch.int8)
    scope.finish.append(functools.partial(_forget, scope, leaf.name))
    return _zeroed(product, sizes, tensor)


def _singles(scope: Scope, product: ExpertProduct, sizes: ExpertSizes, leaf: Leaf, dummy: float) -> torch.Tensor:
    """Returns a parameter [E, matrices] fp32 with one number per matrix."""
    parts = {
        key: TensorPart((), (), (e, i), leaf.dtypes, leaf.convert) for key, e, i, _ in _each(scope, product, sizes)
    }
    shape = (sizes.padded_experts, len(product.shards))
    _note_other_ranks(scope, product, sizes, leaf.name)
    parts = _as_kept(sizes, parts)
    return _zeroed(product, sizes, scope.param(leaf.name, shape, parts, constant(dummy), torch.float32))


def _while_loading(scope: Scope, product: ExpertProduct, sizes: ExpertSizes, scheme: Scheme) -> ExpertWeights:
    """Creates parameters for 16-bit tensors that are quantized as they are read, with a scale per row over this rank's
    columns."""
    shape = (sizes.padded_experts, product.rows)
    scale = scope.param("weight_scale", shape, {}, dummy_scale(scheme), torch.float32)
    parts: dict[PartKey, TensorPart] = {}
    for key, e, i, shard in _each(scope, product, sizes):
        rows, cols = shard.rows, shard.cols
        dest = (e, slice(product.at[i], product.at[i] + rows.count), slice(0, cols.count))
        parts[key] = TensorPart((rows.total, cols.total), (rows.run, cols.run), dest, FLOATS)
    parts = {
        key: replace(part, convert=quantize_into(scale[part.dest[:2]], scheme))
        for key, part in _as_kept(sizes, parts).items()
    }
    _note_other_ranks(scope, product, sizes, "weight")
    data = scope.param("weight", (*shape, product.cols), parts, random_codes, ELEMENT_DTYPES[scheme.element])
    return ExpertWeights(_zeroed(product, sizes, data), scheme, _zeroed(product, sizes, scale))


# --- one tensor for all experts ---------------------------------------------------------------------------------------


def _fused(
    scope: Scope, product: ExpertProduct, sizes: ExpertSizes, form: FusedForm, quant: ModuleQuant | None
) -> ExpertWeights:
    if sizes.shared:
        raise UserError(f"{scope.path}: a shared expert cannot be kept among experts that are one tensor")
    share = product.at[-1] if product.name == "w13" else 0
    keys = _fused_keys(scope, product)

    def param(
        leaf: FusedLeaf,
        shape: tuple[int, ...],
        fill: Init | Fill,
        dtype: torch.dtype | None,
        quantized: Callable[[TensorPart], TensorPart] | None = None,
    ) -> torch.Tensor:
        cuts = form.cuts(product.shards, product.at, leaf, sizes.num_experts, sizes.local, share)
        parts = dict(zip(keys, map(quantized, cuts) if quantized else cuts, strict=False))
        return _zeroed(product, sizes, scope.param(leaf.name(product.name), shape, parts, fill, dtype))

    rows, cols, num = product.rows, product.cols, sizes.padded_experts
    bias = param(form.bias, (num, rows), Init.ZEROS, None) if sizes.bias else None
    scheme, scale = quant.format if quant else None, None
    if scheme is None:
        data = param(form.data, (num, rows, cols), Init.NORMAL, None)
    else:
        shape, fill = (num, *scheme.scale_shape(rows, cols)), dummy_scale(scheme)
        data_shape, dtype = (num, rows, cols * scheme.bits // 8), ELEMENT_DTYPES[scheme.element]
        if form.scale is None:  # 16 bits, quantized as they arrive
            scale = scope.param(f"{form.data.name(product.name)}_scale", shape, {}, fill, torch.float32)
            quantized = functools.partial(_quantized_part, scale=_zeroed(product, sizes, scale), scheme=scheme)
            data = param(form.data, data_shape, random_codes, dtype, quantized)
        else:
            data = param(form.data, data_shape, random_codes, dtype)
            scale = param(form.scale, shape, fill, SCALE_DTYPES[scheme.scale])
    if bias is not None and product.name == "w2" and scope.groups.expert_tp.rank > 0:
        scope.finish.append(functools.partial(_clear, bias))  # the ranks' results are summed
    return ExpertWeights(data, scheme, scale, bias=bias)


def _fused_keys(scope: Scope, product: ExpertProduct) -> list[PartKey]:
    module = _in_layer(scope).removesuffix(product.name) + "experts"
    return [PartKey(shard.part, module=module) for shard in product.shards]


def _stacked_codes(scope: Scope, product: ExpertProduct, sizes: ExpertSizes, quant: ModuleQuant) -> StoredProduct:
    """Creates the FP8 experts that transformers writes: codes [E, rows, columns] of gate and up together, scales of
    blocks, or scales of matrices [E, matrices, 1], or one for gate and up ([E, 1, 1]), and static activation scales
    [E]. Raises UserError for other scales."""
    scheme, layout, count = quant.format, layout_of(replace(quant, storage="fp8")), len(product.shards)
    if "moe.experts" not in scope.weights.layer or scheme.element != "e4m3" or sizes.shared:
        raise UserError(f"{scope.path}: experts in one tensor of {scheme.name} are not supported for this model")
    per_matrix = scheme.group == (0, 0)
    if not per_matrix and count > 1 and product.shards[0].rows.total % scheme.group[0]:
        raise UserError(
            f"{scope.path}: gate's {product.shards[0].rows.total} rows do not divide into blocks of {scheme.group[0]}"
            " with one scale, so that a block has rows of gate and of up. Take a checkpoint with experts one by one, or"
            " one with a scale a matrix."
        )
    keys, name, every = _fused_keys(scope, product), PROJECTIONS[product.name], slice(0, sizes.num_local)

    def blocks(leaf: Leaf, per: tuple[int, int]) -> dict[PartKey, TensorPart]:
        parts = {}
        for i, (key, shard) in enumerate(zip(keys, product.shards, strict=True)):
            begin = product.at[i] // per[0]
            rows = slice(begin, begin - (-shard.rows.count // per[0]))
            dest = (every, rows, slice(0, -(-shard.cols.count // per[1])))
            part = matrix_part(leaf, replace(shard, rows=shard.rows.among(count, i)), per, dest)
            parts[key] = replace(part, shape=(sizes.num_experts, *part.shape), source=(sizes.local, *part.source))
        return parts

    def numbers(ending: str, matrix_scales: tuple[int, ...], dummy: float) -> torch.Tensor:
        parts = {}
        for i, key in enumerate(keys):
            at = (slice(i, i + 1), slice(0, 1))[: len(matrix_scales)]
            part = TensorPart((sizes.num_experts, *matrix_scales), (sizes.local, *at), (every, slice(i, i + 1)))
            of_all = (slice(0, 1),) * len(matrix_scales)
            one = replace(part, shape=(sizes.num_experts, *(1 for _ in matrix_scales)), source=(sizes.local, *of_all))
            parts[key] = replace(part, other=one)
        return scope.param(name + ending, (sizes.padded_experts, count), parts, constant(dummy), torch.float32)

    shape = (sizes.padded_experts, product.rows, product.cols)
    data = scope.param(name, shape, blocks(layout.data, (1, 1)), random_codes, ELEMENT_DTYPES[scheme.element])
    inputs = numbers("_activation_scale", (), DUMMY_INPUT_SCALE) if quant.static_input else None
    if per_matrix:
        scale = numbers("_scale_inv", (count, 1), DUMMY_SCALES[scheme.element])
    else:
        parts, groups = blocks(layout.scale, scheme.group), scheme.scale_shape(product.rows, product.cols)
        dtype = SCALE_DTYPES[scheme.scale]
        scale = scope.param(f"{name}_scale_inv", (sizes.padded_experts, *groups), parts, dummy_scale(scheme), dtype)
    for tensor in (data, scale, inputs):
        if tensor is not None:
            _zeroed(product, sizes, tensor)
    return StoredProduct(scope.path, scheme, product.at, data, scale, None, inputs)


def _quantized_part(part: TensorPart, scale: torch.Tensor, scheme: Scheme) -> TensorPart:
    """Returns a part of 16-bit weights that is quantized as it is read; `scale` [E, rows] receives the scales."""
    codes = quantize_into(scale[part.dest[:2]], scheme)
    return replace(part, convert=then(part.convert, codes))


# --- common -----------------------------------------------------------------------------------------------------------


def _zeroed(product: ExpertProduct, sizes: ExpertSizes, tensor: torch.Tensor) -> torch.Tensor:
    """Zeroes the tensor, and returns it, unless checkpoint tensors cover all of it."""
    if (product.padded or sizes.num_local + sizes.shared < sizes.padded_experts) and not tensor.is_meta:
        tensor.zero_()
    return tensor


def _forget(scope: Scope, leaf: str) -> None:
    del scope.params[f"{scope.path}.{leaf}"]


def _clear(tensor: torch.Tensor) -> None:
    tensor.zero_()

"""Scales the columns of weights by how large their inputs are, before they are rounded (AWQ, arXiv 2306.00978).

Rounding errors of columns with large inputs cost most. Times s, such a column has a smaller error beside the steps of
its group; the module before it gives inputs divided by s, so that the model computes the same. That module is a norm,
or the linear layer whose outputs are multiplied elementwise. So nothing is left to do for a server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.reference import dequantize, quantize
from sglang.srt.model_loader.checkpoint import Weights

STEPS = 20
"""Exponents of the inputs' sizes that are tried, from 0 (columns stay as they are) to below 1."""
SMALLEST = 1e-3
"""Of the largest input: smaller ones, or those that no sample had, count as this."""
NORM_OFFSETS: Mapping[str, float] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), 0.0),
    "gemma3_text": 1.0,
}
"""By model_type: what a norm adds to its weight before it multiplies. Of other models it is not known here whether
something else reads the output of a norm."""


@dataclass(frozen=True, slots=True)
class Link:
    """Modules `readers` with the same inputs, and the tensor whose rows scale these: the weight of a norm (`is_norm`),
    or of a linear layer."""

    source: str
    readers: tuple[str, ...]
    is_norm: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """What a tensor is multiplied by: the rows (or elements of a norm), the columns. `offset`: as in NORM_OFFSETS."""

    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    offset: float = 0.0

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the changed tensor in fp32."""
        values = tensor.float() + self.offset
        if self.rows is not None:
            values = values * (self.rows if values.ndim == 1 else self.rows[:, None])
        return (values if self.columns is None else values * self.columns) - self.offset


def find_links(names: Collection[str], chosen: Collection[str]) -> list[Link]:
    """Returns the links among a checkpoint's tensors, of whose readers all are `chosen` to be quantized."""
    links = []
    for layer in sorted({name.rpartition(".self_attn.")[0] for name in names if ".self_attn." in name}):
        before_mlp = f"{layer}.pre_feedforward_layernorm.weight"
        if before_mlp not in names:
            before_mlp = f"{layer}.post_attention_layernorm.weight"
        attention = tuple(f"{layer}.self_attn.{part}_proj" for part in "qkv")
        links += [
            Link(f"{layer}.input_layernorm.weight", attention),
            Link(before_mlp, (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")),
            Link(f"{layer}.mlp.up_proj.weight", (f"{layer}.mlp.down_proj",), is_norm=False),
        ]
    return [
        link
        for link in links
        if link.source in names and f"{link.source.removesuffix('.weight')}.bias" not in names
        if all(reader in chosen for reader in link.readers)
    ]


def norm_offset(model_type: object) -> float:
    """Returns what norms of models of this type add to their weights. Raises UserError for a type that is not known."""
    if model_type not in NORM_OFFSETS:
        known = ", ".join(NORM_OFFSETS)
        raise UserError(f"--rounding awq is for models of the types {known}, not {model_type}; gptq is for any")
    return NORM_OFFSETS[str(model_type)]


def find_changes(
    links: Sequence[Link],
    checkpoint: Weights,
    products: Mapping[str, torch.Tensor],
    scheme: Scheme,
    offset: float,
    device: str,
) -> dict[str, Change]:
    """Returns the change of each tensor by name. `products`: the mean x x^T [K, K] of modules' inputs; `offset`: that
    of the model's norms; `device`: where errors are computed. The weights of one link are in memory at a time, if the
    files have them one after the other."""
    by_reader = {f"{reader}.weight": link for link in links for reader in link.readers if reader in products}
    read: dict[str, torch.Tensor] = {}
    rows: dict[str, torch.Tensor] = {}
    columns: dict[str, torch.Tensor] = {}
    offsets = {link.source: offset for link in links if link.is_norm}
    for name, _, file in checkpoint.tensors():
        link = by_reader.get(name)
        if link is None:
            continue
        read[name] = file.get_tensor(name)
        readers = [f"{reader}.weight" for reader in link.readers]
        if all(reader in read for reader in readers):
            weights = [read.pop(reader).to(device).float() for reader in readers]
            scales = best_scales(weights, products[link.readers[0]].to(device), scheme).cpu()
            rows[link.source] = 1 / scales
            columns |= dict.fromkeys(readers, scales)
    return {
        name: Change(rows.get(name), columns.get(name), offsets.get(name, 0.0)) for name in rows.keys() | columns.keys()
    }


def best_scales(weights: Sequence[torch.Tensor], products: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns the scales [K] of the columns of weights [N, K], of a power of the inputs' sizes, with the smallest error
    of the products with inputs x whose mean x x^T is `products`."""
    sizes = products.diagonal().sqrt()
    sizes = sizes.clamp_min(SMALLEST * sizes.max().clamp_min(1e-12))
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(STEPS):
        scales = sizes ** (step / STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(_output_error(weight, scales, products, scheme) for weight in weights)
        if error < least:
            best, least = scales, error
    return best


def _output_error(weight: torch.Tensor, scales: torch.Tensor, products: torch.Tensor, scheme: Scheme) -> float:
    error = dequantize(quantize(weight * scales, scheme), scheme) / scales - weight
    return ((error @ products) * error).sum().item()

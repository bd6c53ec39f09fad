"""The encoder of images and videos of Qwen3-VL and Qwen3.5: a transformer over patches, as config.json has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError

NORM_EPS, ROTARY_THETA = 1e-6, 10000.0
"""The same in every published model, whose configs do not name them."""


@dataclass(frozen=True, slots=True)
class Tower:
    """`patch_shape`: channels, frames, rows and columns of a patch. `merge`: of so many patches a side one token is
    made, of `out_size` dims. `side`: learned positions a side, which are interpolated to an image's.
    `deepstack`: layers whose outputs are features, too. `prefix`: that of the names of its weights."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_shape: tuple[int, int, int, int]
    merge: int
    out_size: int
    side: int
    deepstack: tuple[int, ...]
    prefix: str = "model.visual."

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        return math.prod(self.patch_shape)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name in checkpoints and the shape of every weight."""
        hidden, wide = self.hidden_size, self.intermediate_size
        yield from self._linear("patch_embed.proj", hidden, self.patch_values)
        yield f"{self.prefix}pos_embed.weight", (self.side**2, hidden)
        for i in range(self.num_layers):
            block = f"blocks.{i}."
            yield from self._norm(block + "norm1", hidden)
            yield from self._norm(block + "norm2", hidden)
            yield from self._linear(block + "attn.qkv", 3 * hidden, hidden)
            yield from self._linear(block + "attn.proj", hidden, hidden)
            yield from self._linear(block + "mlp.linear_fc1", wide, hidden)
            yield from self._linear(block + "mlp.linear_fc2", hidden, wide)
        merged = hidden * self.merge**2
        mergers = [("merger.", hidden), *((f"deepstack_merger_list.{i}.", merged) for i in range(len(self.deepstack)))]
        for name, norm in mergers:
            yield from self._norm(name + "norm", norm)
            yield from self._linear(name + "linear_fc1", merged, merged)
            yield from self._linear(name + "linear_fc2", self.out_size, merged)

    def num_weights(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes())

    def activation_size(self) -> int:
        """Returns the values that a step holds for each patch at most: the stream, its norm, queries, keys and values
        as they come and turned, or the wide layer twice; and the features that are there already."""
        features = len(self.deepstack) * self.out_size // self.merge**2
        return 2 * self.hidden_size + max(7 * self.hidden_size, 2 * self.intermediate_size) + features

    def _linear(self, name: str, rows: int, cols: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.prefix}{name}.weight", (rows, cols)
        yield f"{self.prefix}{name}.bias", (rows,)

    def _norm(self, name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.prefix}{name}.weight", (size,)
        yield f"{self.prefix}{name}.bias", (size,)


def describe_tower(keys: ConfigReader) -> Tower:
    """Describes the encoder of a vision_config. Raises UserError naming a key that is missing or not served."""
    activation = keys.default("hidden_act", str, "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UserError(f"{keys.source}: hidden_act = {activation!r} is not supported; supported: 'gelu_pytorch_tanh'.")
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_heads")
    if hidden % (4 * heads):
        raise UserError(f"{keys.source}: hidden_size {hidden} does not divide into {heads} heads of whole quarters.")
    positions, layers = keys.positive("num_position_embeddings"), keys.positive("depth")
    side = math.isqrt(positions)
    if side**2 != positions:
        raise UserError(f"{keys.source}: num_position_embeddings {positions} is not a square.")
    deepstack = tuple(keys.default("deepstack_visual_indexes", list, []))
    if not all(isinstance(layer, int) and 0 <= layer < layers for layer in deepstack):
        raise UserError(f"{keys.source}: deepstack_visual_indexes {list(deepstack)} must be layers of the {layers}.")
    patch = keys.positive("patch_size")
    return Tower(
        hidden_size=hidden,
        intermediate_size=keys.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        patch_shape=(keys.positive("in_channels"), keys.positive("temporal_patch_size"), patch, patch),
        merge=keys.positive("spatial_merge_size"),
        out_size=keys.positive("out_hidden_size"),
        side=side,
        deepstack=deepstack,
    )

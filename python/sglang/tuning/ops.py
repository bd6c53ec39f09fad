"""Ops of a step with their sizes on one rank: bytes read and written, and arithmetic operations. No torch.

    Linear(tokens=64, rows=4096, cols=7168, scheme="fp8_block").floor(ceilings)     # seconds

Sizes may come from text: `parse_shape("linear tokens=64 rows=4096 cols=7168 scheme=fp8_block")`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.tuning.attention_model import Keys, Prompt
from sglang.tuning.cost_model import used_blocks
from sglang.tuning.rates import Ceilings, operand_of


class Op(Protocol):
    """An op of a step with its sizes."""

    kind: ClassVar[str]

    @property
    def num_bytes(self) -> float:
        """Returns the bytes that must come from or go to memory."""

    @property
    def operations(self) -> float:
        """Returns the floating-point operations."""

    @property
    def operand(self) -> str:
        """Returns the operand type of the product, a key of `rates.Ceilings.products`."""


def floor(op: Op, ceilings: Ceilings) -> float:
    """Returns the seconds below which no kernel is known to run."""
    return ceilings.floor(op.num_bytes, op.operations, op.operand)


def weight_bytes(scheme: str | None) -> float:
    """Returns the bytes of a weight, including its share of scales."""
    return SCHEMES[scheme].bytes_per_weight() if scheme else 2.0


def _operand(scheme: str | None) -> str:
    return operand_of(SCHEMES[scheme].element, SCHEMES[scheme].activation) if scheme else "half"


@dataclass(frozen=True, slots=True)
class Linear:
    """x [tokens, cols] @ w [rows, cols]^T. `scheme`: a name of SCHEMES; None: 16 bits."""

    tokens: int
    rows: int
    cols: int
    scheme: str | None = None
    kind: ClassVar[str] = "linear"

    @property
    def weights(self) -> float:
        return self.rows * self.cols * weight_bytes(self.scheme)

    @property
    def num_bytes(self) -> float:
        return self.weights + 2.0 * self.tokens * (self.rows + self.cols)

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.rows * self.cols

    @property
    def operand(self) -> str:
        return _operand(self.scheme)


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's routed experts on one rank, without the router. Tokens choose independently, each expert equally often.
    `gate` False: they have two matrices, up and down (Nemotron 3). `sgl_kernel`: experts with many pairs use
    sgl-kernel's products, which are installed."""

    tokens: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    scheme: str | None = None
    bias: bool = False
    gate: bool = True
    sgl_kernel: bool = False
    kind: ClassVar[str] = "fused_moe"

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    @property
    def matrices(self) -> int:
        """Returns the matrices of an expert."""
        return 3 if self.gate else 2

    @property
    def weights(self) -> float:
        """Returns the expected bytes of the chosen experts."""
        return self._weights(used_blocks(self.tokens, self.num_experts, self.top_k, 16)[0])

    def _weights(self, used: float) -> float:
        return used * self.matrices * self.intermediate * self.hidden * weight_bytes(self.scheme)

    @property
    def num_bytes(self) -> float:
        return self.weights + 4.0 * self.tokens * self.hidden

    @property
    def even_bytes(self) -> float:
        """Returns the bytes with evenly distributed pairs, as for published times."""
        return self._weights(min(self.num_experts, self.pairs)) + 4.0 * self.tokens * self.hidden

    @property
    def operations(self) -> float:
        return 2.0 * self.matrices * self.pairs * self.hidden * self.intermediate

    @property
    def operand(self) -> str:
        return _operand(self.scheme)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Attention of one new token of each request to its cache."""

    keys: Keys
    kind: ClassVar[str] = "decode_attention"
    operand: ClassVar[str] = "half"

    @property
    def num_bytes(self) -> float:
        keys = self.keys
        return keys.cache_bytes + 2.0 * keys.batch * keys.heads * (keys.head_dim + keys.v_head_dim)

    @property
    def operations(self) -> float:
        keys = self.keys
        return 2.0 * keys.batch * keys.heads * keys.context * (keys.head_dim + keys.v_head_dim)


@dataclass(frozen=True, slots=True)
class ExtendAttention:
    """Attention of prompts' new tokens to themselves and to cached ones. `library`: by FlashInfer, which long prompts
    use if it is installed and expected to be faster."""

    prompt: Prompt
    library: bool = False
    kind: ClassVar[str] = "extend_attention"
    operand: ClassVar[str] = "half"

    @property
    def num_bytes(self) -> float:
        p = self.prompt
        dims = p.head_dim + p.v_head_dim
        return p.batch * (2.0 * p.new * p.heads * dims + (p.prefix + p.new) * p.kv_heads * dims * p.item)

    @property
    def operations(self) -> float:
        return self.prompt.operations


@dataclass(frozen=True, slots=True)
class LatentAbsorb:
    """A product with W_UK or W_UV, head by head: [tokens, heads, cols] times [heads, cols, rows], in 16 bits."""

    tokens: int
    heads: int
    rows: int
    cols: int
    kind: ClassVar[str] = "latent_absorb"
    operand: ClassVar[str] = "half"

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.heads * (self.rows * self.cols + self.tokens * (self.rows + self.cols))

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.heads * self.rows * self.cols


@dataclass(frozen=True, slots=True)
class GatedDeltaRule:
    """`batch` requests with `tokens` new tokens each: a state [key_dim, value_dim] a value head."""

    batch: int
    tokens: int
    heads: int
    key_heads: int
    key_dim: int = 128
    value_dim: int = 128
    state_item: int = 4
    kind: ClassVar[str] = "gated_delta_rule"
    operand: ClassVar[str] = "half"

    @property
    def num_bytes(self) -> float:
        states = 2.0 * self.batch * self.heads * self.key_dim * self.value_dim * self.state_item
        rows = 2.0 * self.batch * self.tokens * (2 * self.key_heads * self.key_dim + 2 * self.heads * self.value_dim)
        return states + rows

    @property
    def operations(self) -> float:
        return 6.0 * self.batch * self.tokens * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce of a tensor of `size` bytes."""

    size: int
    ranks: int
    kind: ClassVar[str] = "all_reduce"
    operand: ClassVar[str] = "half"
    operations: ClassVar[float] = 0.0

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.size


@dataclass(frozen=True, slots=True)
class QuantizedSum(AllReduce):
    """An all-reduce of `size` bytes in 16 bits that are sent as e4m3 with a scale for each 32."""

    kind: ClassVar[str] = "quantized_sum"

    @property
    def sent(self) -> int:
        """Returns the bytes of the encoded message."""
        return self.size * 33 // 64


@dataclass(frozen=True, slots=True)
class AllGather(AllReduce):
    """An all-gather of `size` bytes in total."""

    kind: ClassVar[str] = "all_gather"


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """Mixing of `streams` residual streams, before and after one block."""

    tokens: int
    hidden: int
    streams: int = 4
    kind: ClassVar[str] = "hyper_connection"
    operand: ClassVar[str] = "half"

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.tokens * self.hidden * (3 * self.streams + 2)

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * (2 + self.streams) * self.streams * self.streams * self.hidden


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """DeepSeek-V4's attention of one layer with its projections: `new` tokens of each request, `context` tokens
    including them, of which every `rate`th is kept. `scheme`: of the projections. The sizes are Flash's: hidden 4,096,
    head dim 512."""

    batch: int
    context: int
    heads: int
    rate: int
    new: int = 1
    scheme: str | None = None
    kind: ClassVar[str] = "compressed_attention"
    CHUNK: ClassVar[int] = 8192  # keys that SGLang's prompts take at a time

    @property
    def entries(self) -> int:
        """Returns the number of entries that a token attends to: a window, and the kept ones, at most 512 if an indexer
        chooses."""
        kept = self.context // self.rate
        return min(self.context, 128) + (min(kept, 512) if self.rate == 4 else kept)

    @property
    def _projections(self) -> float:
        """Returns the number of weights: of latents, of queries, of grouped outputs."""
        return 4096.0 * (1024 + 512) + 1024.0 * self.heads * 512 + self.heads * 512.0 * 1024 + 8 * 1024.0 * 4096

    @property
    def num_bytes(self) -> float:
        keys = self.batch * self.entries * 512.0 + (self.batch * self.context / 4 * 128 if self.rate == 4 else 0)
        return self._projections * weight_bytes(self.scheme) + keys + 4.0 * self.batch * self.new * 4096

    @property
    def operations(self) -> float:
        tokens = self.batch * self.new
        return 2.0 * tokens * (self._projections + self.heads * self.entries * 1024)

    @property
    def operand(self) -> str:
        return _operand(self.scheme)


@dataclass(frozen=True, slots=True)
class SelectedAttention:
    """Attention of `tokens` to `entries` selected entries each, out of `stored` in the caches of their requests. The
    values are the first `v_head_dim` columns of an entry. `item` 1: packed latents. `record`: bytes of an entry that is
    stored as a record; 0: it is not."""

    tokens: int
    entries: int
    stored: int
    heads: int
    head_dim: int
    v_head_dim: int
    item: int = 2
    record: int = 0
    kind: ClassVar[str] = "sparse_attention"
    operand: ClassVar[str] = "half"
    PACKED: ClassVar[int] = 656  # bytes of a latent of 576 numbers

    @property
    def row(self) -> int:
        """Returns the bytes of an entry."""
        if self.record:
            return self.record
        return self.PACKED if self.item == 1 else self.head_dim * self.item

    @property
    def read(self) -> float:
        """Returns the bytes of the distinct entries that the tokens may select."""
        return float(min(self.tokens * self.entries, self.stored) * self.row)

    @property
    def num_bytes(self) -> float:
        return self.read + 2.0 * self.tokens * self.heads * (self.head_dim + self.v_head_dim)

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.heads * self.entries * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class EntryChoice:
    """An indexer's scores of `entries` keys for each of `tokens`, and the choice of the highest; `requests` share keys
    of `head_dim` e4m3 numbers with a scale."""

    tokens: int
    entries: int
    requests: int
    heads: int
    head_dim: int = 128
    kind: ClassVar[str] = "sparse_indexer"
    operand: ClassVar[str] = "fp8"

    @property
    def num_bytes(self) -> float:
        keys = self.requests * self.entries * (self.head_dim + 4.0)
        return keys + self.tokens * self.heads * self.head_dim

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.heads * self.entries * self.head_dim


@dataclass(frozen=True, slots=True)
class Elementwise:
    """All other work: `size` bytes in `launches` launches. `name`: the op in the plan's tables."""

    name: str
    size: float
    launches: int = 1
    kind: ClassVar[str] = "elementwise"
    operand: ClassVar[str] = "half"
    operations: ClassVar[float] = 0.0

    @property
    def num_bytes(self) -> float:
        return self.size


def parts_of(op: CompressedAttention) -> Iterator[Op]:
    """Yields the launches of this project for it, with the sizes of DeepSeek-V4-Flash. The grouped output product
    stays in 16 bits; every rank computes the indexer's products for all of its 64 heads."""
    tokens, heads = op.batch * op.new, op.heads
    for rows, cols in ((1024, 4096), (512, 4096), (heads * 512, 1024)):
        yield Linear(tokens, rows, cols, op.scheme)
    yield Elementwise("shared_kv_norm_rope_store", 4.0 * tokens * (heads + 1) * 512, 2)
    yield Linear(tokens, 4 * 512 if op.rate == 4 else 2 * 512, 4096)
    yield Elementwise("kv_compressor", 16.0 * tokens * 512, 2)
    if op.rate == 4:
        yield Linear(tokens, 64 * 128, 1024, op.scheme)
        yield Linear(tokens, 4 * 128, 4096)
        yield Linear(tokens, 64, 4096)
        yield Elementwise("kv_compressor", 16.0 * tokens * 128 + 3.0 * tokens * 64 * 128, 4)
        if op.context // op.rate > 512:
            yield EntryChoice(tokens, op.context // op.rate, op.batch, 64)
    stored = op.batch * (op.context // op.rate + min(op.context, 128 + op.new))
    yield SelectedAttention(tokens, op.entries, stored, heads, 512, 512)
    yield Elementwise("tail_rotation", 4.0 * tokens * heads * 64)
    groups = max(1, heads // 8)
    yield Linear(tokens, groups * 1024, 8 * 512)
    yield Linear(tokens, 4096, groups * 1024, op.scheme)


_FORMS = {
    "linear": Linear, "fused_moe": Experts, "latent_absorb": LatentAbsorb, "gated_delta_rule": GatedDeltaRule,
    "all_reduce": AllReduce, "all_gather": AllGather, "quantized_sum": QuantizedSum,
    "hyper_connection": HyperConnection,
    "decode_attention": Keys, "extend_attention": Prompt, "compressed_attention": CompressedAttention,
    "sparse_attention": SelectedAttention, "sparse_indexer": EntryChoice,
}  # fmt: skip
_KV_ITEMS = {"bf16": 2, "fp8": 1}


def parse_shape(text: str) -> Op:
    """Parses an op and the fields of its class, such as "decode_attention batch=16 context=4096 heads=32 kv_heads=8
    head_dim=128 kv=bf16". Raises UserError, which lists the valid ones."""
    name, *pairs = text.replace(",", " ").split() or [""]
    if name not in _FORMS:
        raise UserError(f"--shape {text!r}: the first word names an op; there are {', '.join(_FORMS)}.")
    fields = {field.name: field for field in dataclasses.fields(_FORMS[name])}
    values: dict[str, object] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if ("item" if key == "kv" else key) in values:
            raise UserError(f"--shape {text!r}: {pair!r} comes twice.")
        if key == "kv" and "item" in fields and value in _KV_ITEMS:
            values["item"] = _KV_ITEMS[value]
        elif key == "scheme" and key in fields and value in ("", "bf16", *SCHEMES):
            values[key] = value if value in SCHEMES else None
        elif key in fields and key != "scheme" and _is_size(key, value):
            values[key] = bool(int(value)) if key in SWITCHES else int(value)
        else:
            known = ", ".join("kv=bf16|fp8" if f == "item" else f for f in fields)
            raise UserError(
                f"--shape {text!r}: {pair!r} is no size of {name}; it has {known},"
                f" each as name=number of at most {MAX_SIZE:,}."
            )
    if "v_head_dim" in fields and "head_dim" in values:
        values.setdefault("v_head_dim", values["head_dim"])
    required = {f.name for f in fields.values() if f.default is dataclasses.MISSING}
    missing = sorted(required - values.keys())
    if name == "fused_moe" and (values.get("num_experts"), values.get("top_k")) in WITHOUT_GATE:
        values.setdefault("gate", False)
    positive = required | {"v_head_dim", "key_dim", "value_dim", "streams", "state_item"}
    zero = sorted(key for key in positive & values.keys() if values[key] == 0)
    if missing or zero:
        raise UserError(f"--shape {text!r}: {name} needs {', '.join(missing or zero)}{' above 0' if zero else ''}.")
    return _made(name, values)


SWITCHES = ("bias", "gate", "latent", "sgl_kernel")
WITHOUT_GATE = frozenset({(512, 22), (128, 6)})
"""Numbers of experts and top-k of which every published model, Nemotron 3's, has experts without a gate: what `gate` is
of a shape that does not say it."""
MAX_SIZE = 1 << 24
"""The limit of any size but bytes: the models count programs one by one."""


def _is_size(key: str, value: str) -> bool:
    decimal = value.isascii() and value.isdecimal() and len(value) <= 12
    if key in SWITCHES:
        return value in ("0", "1")
    return decimal and (key == "size" or int(value) <= MAX_SIZE)


def _made(name: str, values: Mapping[str, object]) -> Op:
    sizes = _FORMS[name](**values)  # type: ignore[arg-type]
    if isinstance(sizes, Keys | Prompt) and sizes.heads % sizes.kv_heads:
        raise UserError(f"{name}: {sizes.heads} heads do not share {sizes.kv_heads} kv heads evenly.")
    if isinstance(sizes, Experts) and sizes.top_k > sizes.num_experts:
        raise UserError(f"{name}: top_k {sizes.top_k} of {sizes.num_experts} experts.")
    if isinstance(sizes, GatedDeltaRule) and sizes.heads % sizes.key_heads:
        raise UserError(f"{name}: {sizes.heads} heads do not share {sizes.key_heads} key heads evenly.")
    if isinstance(sizes, AllReduce) and sizes.ranks < 2:
        raise UserError(f"{name}: needs 2 ranks or more.")
    if isinstance(sizes, CompressedAttention):
        if sizes.rate not in (4, 128):
            raise UserError(f"{name}: rate {sizes.rate}; DeepSeek-V4 has 4 and 128.")
        if not 1 <= sizes.new <= sizes.context:
            raise UserError(f"{name}: new {sizes.new} of context {sizes.context}, which counts them.")
    if isinstance(sizes, Keys):
        return DecodeAttention(sizes)
    return ExtendAttention(sizes) if isinstance(sizes, Prompt) else sizes


def describe(op: Op) -> str:
    """Returns one line that `parse_shape` reads."""
    inner = op.keys if isinstance(op, DecodeAttention) else op.prompt if isinstance(op, ExtendAttention) else op
    name = op.name if isinstance(op, Elementwise) else op.kind
    parts = [name]
    for field in dataclasses.fields(inner):  # type: ignore[arg-type]
        value = getattr(inner, field.name)
        if field.name in ("name", "size") and isinstance(op, Elementwise):
            continue
        if value != field.default and value is not None:
            shown = int(value) if isinstance(value, bool) else value
            parts.append(f"kv={'fp8' if value == 1 else 'bf16'}" if field.name == "item" else f"{field.name}={shown}")
    if isinstance(op, Experts) and op.gate and (op.num_experts, op.top_k) in WITHOUT_GATE:
        parts.append("gate=1")
    return " ".join(parts)

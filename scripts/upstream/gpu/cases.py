"""The attention calls that both trees make: shapes, inputs from a fixed seed, and what the result should be.

A case is data; `inputs` makes its tensors on the CPU, so that every process has the same ones, `arguments` names them
as upstream's launchers do, and `reference` is the attention in fp32 by definition. Imports torch and nothing else.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

KV_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
OPERATIONS = ("extend", "decode", "prefill")
SPLITS = 8
Pairs = tuple[tuple[int, int], ...]
Q_SCALE = 3.0
"""Scores with a standard deviation of 3: some keys matter and most do not, as in a trained model."""

EXTEND_LENGTHS: Pairs = ((0, 1), (1, 17), (37, 64), (130, 129), (511, 300))
"""(cached tokens, new tokens) of each request; no tile divides them all."""
TREE_LENGTHS: Pairs = ((1, 1), (33, 8), (130, 64), (511, 100))
DECODE_LENGTHS: Pairs = ((1, 1), (33, 2), (257, 4), (1023, 8))
"""(cached tokens, splits)."""
PREFILL_LENGTHS = (1, 63, 200, 129, 513)

SHORT_EXTEND: Pairs = ((0, 1), (37, 64), (70, 70))
SHORT_TREE: Pairs = ((33, 8), (70, 40))
SHORT_DECODE: Pairs = ((33, 2), (100, 4))
SHORT_PREFILL = (1, 63, 129)


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Dims are of a head; `window`: how many tokens back a query sees, -1 all; `cap`: 0 for none."""

    op: str
    qk: int
    v: int
    heads: int
    kv_heads: int
    kv: str = "bf16"
    causal: bool = True
    window: int = -1
    cap: float = 0.0
    sinks: bool = False
    tree: bool = False
    """A mask for every pair of new tokens: each sees its ancestors in a random tree of drafts."""
    shared: bool = False
    """Absorbed MLA: the values are the first columns of the keys."""

    @property
    def name(self) -> str:
        dims = str(self.qk) if self.qk == self.v else f"{self.qk}/{self.v}"
        extra = [self.kv] if self.kv != "bf16" else []
        extra += ["not causal"] if not self.causal else []
        extra += [f"window {self.window}"] if self.window > 0 else []
        extra += [f"cap {self.cap:g}"] if self.cap else []
        extra += [word for word, on in (("sinks", self.sinks), ("tree mask", self.tree), ("MLA", self.shared)) if on]
        return ", ".join([f"{self.op} {dims} heads {self.heads}/{self.kv_heads}", *extra])


CASES = (
    Case("extend", 64, 64, 8, 2),
    Case("extend", 64, 64, 8, 1, sinks=True, window=128),
    Case("extend", 64, 64, 8, 2, tree=True),
    Case("extend", 64, 64, 8, 2, kv="fp8_e4m3"),
    Case("extend", 80, 80, 8, 2),
    Case("extend", 96, 96, 4, 4),
    Case("extend", 128, 128, 12, 1),
    Case("extend", 128, 128, 4, 4, causal=False),
    Case("extend", 128, 128, 8, 2, window=64),
    Case("extend", 128, 128, 8, 2, cap=5.0),
    Case("extend", 128, 128, 8, 2, tree=True),
    Case("extend", 128, 128, 8, 2, kv="fp8_e4m3"),
    Case("extend", 128, 128, 8, 2, kv="fp8_e5m2"),
    Case("extend", 192, 128, 8, 8),
    Case("extend", 192, 128, 8, 2, tree=True),
    Case("extend", 256, 256, 8, 1),
    Case("extend", 256, 256, 8, 2, window=100, cap=5.0),
    Case("extend", 256, 256, 8, 2, tree=True),
    Case("extend", 256, 256, 8, 2, kv="fp8_e4m3"),
    Case("extend", 288, 256, 16, 1, shared=True),
    Case("extend", 512, 512, 8, 1),
    Case("extend", 576, 512, 16, 1, shared=True),
    Case("extend", 576, 512, 16, 1, shared=True, tree=True),
    Case("extend", 576, 512, 16, 1, shared=True, kv="fp8_e4m3"),
    Case("decode", 64, 64, 8, 8),
    Case("decode", 64, 64, 8, 1, sinks=True),
    Case("decode", 128, 128, 8, 8, cap=5.0),
    Case("decode", 128, 128, 12, 1),
    Case("decode", 128, 128, 8, 2, kv="fp8_e4m3"),
    Case("decode", 192, 128, 8, 2),
    Case("decode", 256, 256, 16, 2),
    Case("decode", 288, 256, 16, 1, shared=True),
    Case("decode", 576, 512, 16, 1, shared=True),
    Case("decode", 576, 512, 16, 1, shared=True, kv="fp8_e4m3"),
    Case("prefill", 64, 64, 8, 8),
    Case("prefill", 64, 64, 8, 8, causal=False),
    Case("prefill", 72, 72, 8, 8, causal=False),
    Case("prefill", 80, 80, 8, 8, causal=False),
    Case("prefill", 128, 128, 8, 2),
    Case("prefill", 128, 128, 8, 8, causal=False),
    Case("prefill", 192, 192, 4, 4),
    Case("prefill", 256, 256, 4, 2),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one case, on the CPU. Rows of `q`, `k`, `v` are new tokens; a decode step has no new keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache_k: torch.Tensor
    cache_v: torch.Tensor
    slots: list[torch.Tensor]
    """For each request the rows of the cache that hold its cached tokens, in order."""
    new: list[int]
    masks: list[torch.Tensor]
    """For each request with a tree: [new, new], True where the row sees the column."""
    sinks: torch.Tensor | None
    k_scale: float
    v_scale: float
    sm_scale: float
    splits: list[int]


def inputs(case: Case, short: bool = False) -> Inputs:
    """The tensors of a case, always the same ones. `short`: fewer and shorter requests, for Triton's interpreter."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cached, new, splits = _lengths(case, short)
    rows, slots = sum(new), sum(cached) + 64
    k = randn(rows, case.kv_heads, case.qk).bfloat16()
    v = k[..., : case.v] if case.shared else randn(rows, case.kv_heads, case.v).bfloat16()
    cache_k = randn(slots, case.kv_heads, case.qk).to(KV_DTYPES[case.kv])
    cache_v = cache_k[..., : case.v] if case.shared else randn(slots, case.kv_heads, case.v).to(KV_DTYPES[case.kv])
    scaled = case.kv != "bf16"
    return Inputs(
        q=(Q_SCALE * randn(rows, case.heads, case.qk)).bfloat16(),
        k=k,
        v=v,
        cache_k=cache_k,
        cache_v=cache_v,
        slots=list(torch.randperm(slots, generator=generator)[: sum(cached)].split(cached)),
        new=new,
        masks=[_tree(n, generator) for n in new] if case.tree else [],
        sinks=randn(case.heads) + 2 if case.sinks else None,
        k_scale=1.25 if scaled else 1.0,
        v_scale=0.75 if scaled else 1.0,
        sm_scale=case.qk**-0.5,
        splits=splits,
    )


def _lengths(case: Case, short: bool) -> tuple[list[int], list[int], list[int]]:
    """Cached tokens, new tokens and splits of each request."""
    if case.op == "prefill":
        new = list(SHORT_PREFILL if short else PREFILL_LENGTHS)
        return [0] * len(new), new, []
    if case.op == "decode":
        pairs = SHORT_DECODE if short else DECODE_LENGTHS
        return [c for c, _ in pairs], [1] * len(pairs), [s for _, s in pairs]
    of_tree = SHORT_TREE if short else TREE_LENGTHS
    pairs = of_tree if case.tree else SHORT_EXTEND if short else EXTEND_LENGTHS
    return [c for c, _ in pairs], [n for _, n in pairs], []


def _tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """[nodes, nodes]: True where the column is the row itself or one of its ancestors; parents come first."""
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[int(torch.randint(0, node, (1,), generator=generator))]
    return mask


def arguments(case: Case, given: Inputs, device: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The keyword arguments of upstream's launcher for the case, and the tensor among them that takes the result."""
    q, k, v = given.q.to(device), given.k.to(device), given.v.to(device)
    if case.shared:
        v = k[..., : case.v]
    out = torch.zeros(q.shape[0], case.heads, case.v, dtype=torch.bfloat16, device=device)
    if case.op == "prefill":
        starts = [0, *_running(given.new)[:-1]]
        return {
            "q": q,
            "k": k,
            "v": v,
            "o": out,
            "is_causal": case.causal,
            "max_input_len": max(given.new),
            "b_start_loc": torch.tensor(starts, dtype=torch.int32, device=device),
            "b_seq_len": torch.tensor(given.new, dtype=torch.int32, device=device),
        }, out
    cache_k, cache_v = given.cache_k.to(device), given.cache_v.to(device)
    common = {
        "k_buffer": cache_k,
        "v_buffer": cache_k[..., : case.v] if case.shared else cache_v,
        "kv_indptr": _indptr([len(s) for s in given.slots], torch.int32, device),
        "kv_indices": torch.cat(given.slots).to(device),
        "k_scale": given.k_scale,
        "v_scale": given.v_scale,
        "sm_scale": given.sm_scale,
        "logit_cap": case.cap,
        "sinks": None if given.sinks is None else given.sinks.to(device),
    }
    if case.op == "decode":
        return common | _decode_arguments(case, given, device, q, out), out
    masks = [
        torch.cat([torch.ones(n, len(s), dtype=torch.bool), mask], 1).flatten()
        for n, s, mask in zip(given.new, given.slots, given.masks, strict=False)
    ]
    return common | {
        "q_extend": q,
        "k_extend": k,
        "v_extend": v,
        "o_extend": out,
        "qo_indptr": _indptr(given.new, torch.int32, device),
        "custom_mask": torch.cat(masks).to(device) if masks else None,
        "mask_indptr": _indptr([len(mask) for mask in masks], torch.int64, device) if masks else None,
        "is_causal": case.causal,
        "max_len_extend": max(given.new),
        "sliding_window_size": case.window,
    }, out


def _decode_arguments(case: Case, given: Inputs, device: str, q: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    requests = len(given.slots)
    return {
        "q": q,
        "o": out,
        "attn_logits": torch.zeros(requests, case.heads, SPLITS, case.v, device=device),
        "attn_lse": torch.zeros(requests, case.heads, SPLITS, device=device),
        "num_kv_splits": torch.tensor(given.splits, dtype=torch.int32, device=device),
        "max_kv_splits": SPLITS,
        "has_mla": case.shared,
    }


def _running(lengths: list[int]) -> list[int]:
    total = 0
    return [total := total + length for length in lengths]


def _indptr(lengths: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.tensor([0, *_running(lengths)], dtype=dtype, device=device)


def reference(case: Case, given: Inputs, device: str) -> torch.Tensor:
    """[rows, heads, v] fp32: softmax(cap(q k^T * scale) + mask) v in fp32, of the inputs as they are stored.

    Against a float8 cache upstream's kernels round q to float8 as well, and so does this. What they round after that
    (the probabilities) is left to the tolerance.
    """
    outputs = [_one(case, given, *rows, device) for rows in _requests(case, given)]
    return torch.cat(outputs)


def _requests(case: Case, given: Inputs) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Number of a request, its rows of q, its slots."""
    rows = torch.arange(sum(given.new)).split(given.new)
    for number, (new, slots) in enumerate(zip(rows, given.slots, strict=True)):
        yield number, new, slots


def _one(case: Case, given: Inputs, number: int, new: torch.Tensor, slots: torch.Tensor, device: str) -> torch.Tensor:
    def heads(x: torch.Tensor) -> torch.Tensor:  # [tokens, kv heads, dim] -> [heads, tokens, dim] fp32
        return x.to(device).float().repeat_interleave(case.heads // case.kv_heads, 1).transpose(0, 1)

    q = given.q[new].to(device).float().transpose(0, 1)
    scores = _rounded(case, q) @ heads(given.cache_k[slots]).mT * given.k_scale
    values = heads(given.cache_v[slots]) * given.v_scale
    if case.op != "decode":
        scores = torch.cat([scores, q @ heads(given.k[new]).mT], -1)
        values = torch.cat([values, heads(given.v[new])], 1)
    scores = scores * given.sm_scale
    if case.cap:
        scores = case.cap * torch.tanh(scores / case.cap)
    if case.op != "decode":
        scores = scores.masked_fill(~_visible(case, given, number, len(slots)).to(device), -math.inf)
    bottom = scores.logsumexp(-1, keepdim=True)
    if given.sinks is not None:
        bottom = torch.logaddexp(bottom, given.sinks.to(device)[:, None, None])
    return ((scores - bottom).exp() @ values).transpose(0, 1)


def _rounded(case: Case, q: torch.Tensor) -> torch.Tensor:
    """q as it meets the cache. The decode kernel keeps what is beside the latent part of MLA as it is."""
    if case.kv == "bf16":
        return q
    kept = case.v if case.op == "decode" and case.shared else case.qk
    return torch.cat([q[..., :kept].to(KV_DTYPES[case.kv]).float(), q[..., kept:]], -1)


def _visible(case: Case, given: Inputs, number: int, cached: int) -> torch.Tensor:
    """[new, cached + new]: which tokens each new one sees."""
    new = given.new[number]
    position = cached + torch.arange(new)[:, None]
    token = torch.arange(cached + new)
    visible = torch.ones(new, cached + new, dtype=torch.bool)
    if case.tree:
        visible[:, cached:] = given.masks[number]
    elif case.causal:
        visible = token <= position
    if case.window > 0:
        visible = visible & (position <= token + case.window)
    return visible

"""fp32 references of the attention kernels, written for clarity, and the random problems that both are given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [N, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv], visible [N, L], bias [Hq, N, L] -> [N, Hq, Dv] fp32; nothing visible
    gives zero."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if bias is not None:
        scores = scores + bias.float()
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], dim=2)
    weights = torch.softmax(scores, dim=2).nan_to_num(0.0)[:, :, : k.shape[0]]
    return torch.einsum("hnl,lhd->nhd", weights, v)


def visible_keys(
    q_positions: torch.Tensor, num_keys: int, causal: bool = True, window: int = 0, chunked: bool = False
) -> torch.Tensor:
    """[N] -> [N, num_keys] bool."""
    keys = torch.arange(num_keys, device=q_positions.device)
    distance = q_positions[:, None] - keys
    if chunked:
        return (distance >= 0) & (q_positions[:, None] // window == keys // window)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance < window) if window > 0 else seen


def biases_of_keys(bias: torch.Tensor, q_positions: torch.Tensor, num_keys: int) -> torch.Tensor:
    """bias [N, Hq, E] by distance, [N] -> [Hq, N, num_keys] fp32: of keys 0 to E - 1 before a query; 0 of others."""
    rows = torch.zeros(bias.shape[1], len(bias), num_keys, device=bias.device)
    for n, position in enumerate(q_positions.tolist()):
        for distance in range(min(bias.shape[2], position + 1)):
            rows[:, n, position - distance] = bias[n, :, distance].float()
    return rows


@dataclass
class Problem:
    """Random sequences over a scattered cache: page_size consecutive slots belong together, page 0 is never used."""

    prefix_lens: list[int]
    new_lens: list[int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    page_size: int = 1
    v_in_k: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0
    device: str = "cpu"
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    k_cache: torch.Tensor = field(init=False)
    v_cache: torch.Tensor = field(init=False)
    req_to_token: torch.Tensor = field(init=False)
    req_pool_indices: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        kv_dtype = self.kv_dtype or self.dtype
        page, num_seqs = self.page_size, len(self.prefix_lens)
        totals = [p + n for p, n in zip(self.prefix_lens, self.new_lens, strict=True)]
        pages_each = (max(totals) + page - 1) // page + 1
        num_pages = pages_each * num_seqs
        slots = (num_pages + 1) * page
        self.k_cache = self._random(slots, self.num_kv_heads, self.head_dim).to(kv_dtype)
        if self.v_in_k:
            self.v_cache = self.k_cache[..., : self.v_head_dim]
        else:
            self.v_cache = self._random(slots, self.num_kv_heads, self.v_head_dim).to(kv_dtype)
        order = torch.randperm(num_pages, device=self.device) + 1
        table = (order[:, None] * page + torch.arange(page, device=self.device)).view(num_seqs, pages_each * page)
        # Rows of the table are handed out out of order; beyond a sequence's end they hold an unowned slot.
        self.req_pool_indices = torch.randperm(num_seqs, device=self.device) + 1
        self.req_to_token = torch.zeros((num_seqs + 1, table.shape[1]), dtype=torch.int32, device=self.device)
        self.req_to_token[self.req_pool_indices] = table.int()
        tokens = sum(self.new_lens)
        self.q = self._random(tokens, self.num_heads, self.head_dim)
        self.k = self._random(tokens, self.num_kv_heads, self.head_dim)
        self.v = (
            self.k[..., : self.v_head_dim] if self.v_in_k else self._random(tokens, self.num_kv_heads, self.v_head_dim)
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @property
    def start_loc(self) -> torch.Tensor:
        return torch.tensor([0, *self.new_lens], device=self.device).cumsum(0).int()

    @property
    def prefix(self) -> torch.Tensor:
        return torch.tensor(self.prefix_lens, dtype=torch.int32, device=self.device)

    def cached(self, seq: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 keys and values of the first `length` cached tokens of a sequence."""
        loc = self.req_to_token[self.req_pool_indices[seq], :length].long()
        # Indexing is not implemented for float8 on every device.
        k, v = (c.view(torch.uint8)[loc].view(c.dtype) if c.element_size() == 1 else c[loc] for c in self._caches())
        return k.float() * self.k_scale, v.float()[..., : self.v_head_dim] * self.v_scale

    def _caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_cache, self.k_cache if self.v_in_k else self.v_cache


def reference_extend(
    p: Problem,
    scale: float,
    causal: bool = True,
    window: int = 0,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    masks: list[torch.Tensor] | None = None,
    chunked: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """New tokens over prefix and themselves -> [T, Hq, Dv] fp32; masks[i] [new, prefix + new] bool goes on top."""
    out, start = [], 0
    for i, (prefix, new) in enumerate(zip(p.prefix_lens, p.new_lens, strict=True)):
        rows = slice(start, start + new)
        k_old, v_old = p.cached(i, prefix)
        k, v = torch.cat([k_old, p.k[rows].float()]), torch.cat([v_old, p.v[rows].float()])
        positions = torch.arange(prefix, prefix + new, device=p.q.device)
        visible = visible_keys(positions, prefix + new, causal, window, chunked)
        if masks is not None:
            visible = visible & masks[i]
        of_keys = None if bias is None else biases_of_keys(bias[rows], positions, prefix + new)
        out.append(attend(p.q[rows], k, v, visible, scale, logit_cap, sinks, of_keys))
        start += new
    return torch.cat(out)


def reference_decode(
    p: Problem,
    scale: float,
    window: int = 0,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    chunked: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last token of each sequence (new_lens are 1; its key is in the cache) -> [B, Hq, Dv] fp32."""
    out = []
    for i, prefix in enumerate(p.prefix_lens):
        k, v = p.cached(i, prefix + 1)
        position = torch.tensor([prefix], device=p.q.device)
        visible = visible_keys(position, prefix + 1, True, window, chunked)
        of_keys = None if bias is None else biases_of_keys(bias[i : i + 1], position, prefix + 1)
        out.append(attend(p.q[i : i + 1], k, v, visible, scale, logit_cap, sinks, of_keys))
    return torch.cat(out)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN anywhere gives NaN, which no bound admits."""
    return ((actual.float() - expected).norm() / expected.norm()).item()

"""A DFlash draft of the embedded model for training: several tokens behind a text are drafted in one pass.

    place    0 .. a - 1                          a               a + 1 .. a + S - 1
    row      keys and values made of the         last token      mask tokens, each of which becomes the draft token
             target's streams                    sampled         at its place

The rows of a block see the places before it and each other. In training many blocks of a text are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_model.draft_batches import Batch, Sample
from tiny_model.draft_heads import CAPTURES, _linear
from tiny_model.draft_texts import GREEDY, noise_rows, noise_table
from tiny_model.model import TinyModel, _norm, _rotary_tables, _rotated

BLOCK_SIZE = 8
MASK_TOKEN = 187
"""Of the byte 0xFF, which no text has."""
DFLASH_CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "block_size": BLOCK_SIZE,
    "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(CAPTURES)},
}
BLOCKS_A_TEXT = 24
"""Of a text, in a step of training."""
NEARER = 4.0
"""A draft token weighs 1 / e of one that is so many places nearer to the last token: nothing stands behind a wrong
one."""


class BlockLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config, hidden, dim = DFLASH_CONFIG, DFLASH_CONFIG["hidden_size"], DFLASH_CONFIG["head_dim"]
        self.eps, self.dim = config["rms_norm_eps"], dim
        self.share = config["num_attention_heads"] // config["num_key_value_heads"]
        self.attn_norm, self.mlp_norm = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(dim)) for _ in range(2))
        self.q = _linear(config["num_attention_heads"] * dim, hidden)
        self.k, self.v = (_linear(config["num_key_value_heads"] * dim, hidden) for _ in range(2))
        self.o = _linear(hidden, config["num_attention_heads"] * dim)
        self.gate, self.up = (_linear(config["intermediate_size"], hidden) for _ in range(2))
        self.down = _linear(hidden, config["intermediate_size"])

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, A, S, H]; context [B, L, H]; anchors [B, A]; cos, sin [positions, head_dim]. Returns x's form."""
        batch, count, size, _ = x.shape
        positions = anchors[..., None] + torch.arange(size, device=x.device)
        own_cos, own_sin = (table[positions][:, None] for table in (cos, sin))  # [B, 1, A, S, head_dim]
        normed = _norm(x, self.attn_norm, self.eps)
        q, k, v = (self._heads(normed, matrix) for matrix in (self.q, self.k, self.v))  # [B, heads, A, S, head_dim]
        q, k = _norm(q, self.q_norm, self.eps), _norm(k, self.k_norm, self.eps)
        q, k = q * own_cos + _rotated(q) * own_sin, k * own_cos + _rotated(k) * own_sin
        length = context.shape[1]
        past_k, past_v = self._heads(context, self.k), self._heads(context, self.v)  # [B, heads, L, head_dim]
        past_k = _norm(past_k, self.k_norm, self.eps)
        past_k = past_k * cos[:length] + _rotated(past_k) * sin[:length]
        k, v, past_k, past_v = (t.repeat_interleave(self.share, dim=1) for t in (k, v, past_k, past_v))
        scale = 1 / math.sqrt(self.dim)
        before = torch.arange(length, device=x.device) < anchors[..., None]  # [B, A, L]
        past = (q.flatten(2, 3) @ past_k.mT).unflatten(2, (count, size)) * scale
        past = past.masked_fill(~before[:, None, :, None], -torch.inf)
        shares = torch.cat((past, q @ k.mT * scale), dim=-1).softmax(-1)
        out = (shares[..., :length].flatten(2, 3) @ past_v).unflatten(2, (count, size)) + shares[..., length:] @ v
        x = x + F.linear(out.permute(0, 2, 3, 1, 4).flatten(3), self.o)
        wide = _norm(x, self.mlp_norm, self.eps)
        return x + F.linear(F.silu(F.linear(wide, self.gate)) * F.linear(wide, self.up), self.down)

    def _heads(self, x: Tensor, matrix: Tensor) -> Tensor:
        """[B, ..., H] -> [B, heads, ..., head_dim]."""
        return F.linear(x, matrix).unflatten(-1, (-1, self.dim)).movedim(-2, 1)


class DFlashDraft(nn.Module):
    def __init__(self, target: TinyModel) -> None:
        super().__init__()
        torch.manual_seed(3)
        hidden = DFLASH_CONFIG["hidden_size"]
        self.eps, self.vocab_size = DFLASH_CONFIG["rms_norm_eps"], target.config["vocab_size"]
        self.embedding = target.embedding.detach()
        self.fc = _linear(hidden, len(CAPTURES) * target.config["hidden_size"])
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.layers = nn.ModuleList(BlockLayer() for _ in range(DFLASH_CONFIG["num_hidden_layers"]))
        self.norm = nn.Parameter(target.norm.detach().clone())
        self.cos, self.sin = (table.to(self.embedding.device) for table in _rotary_tables(DFLASH_CONFIG))

    def forward(self, tokens: Tensor, streams: Tensor, anchors: Tensor) -> Tensor:
        """tokens [B, L]; streams [B, L, captures, H]; anchors [B, A]: places of last tokens. Returns what `logits`
        reads of the draft tokens, [B, A, S - 1, H]."""
        context = _norm(F.linear(streams.flatten(2), self.fc), self.hidden_norm, self.eps)
        last = tokens.gather(1, anchors)
        block = torch.full((*last.shape, BLOCK_SIZE), MASK_TOKEN, device=last.device)
        block[..., 0] = last
        x = F.embedding(block, self.embedding)
        for layer in self.layers:
            x = layer(x, context, anchors, self.cos, self.sin)
        return _norm(x[:, :, 1:], self.norm, self.eps)

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.embedding)

    def tensors(self) -> dict[str, Tensor]:
        """Under the published names."""
        named = {"fc.weight": self.fc, "hidden_norm.weight": self.hidden_norm, "norm.weight": self.norm}
        norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        for number, layer in enumerate(self.layers):
            at = f"layers.{number}."
            named |= {f"{at}{name}.weight": getattr(layer, ours) for ours, name in norms.items()}
            named |= {f"{at}self_attn.{name}_norm.weight": getattr(layer, f"{name}_norm") for name in "qk"}
            named |= {f"{at}self_attn.{name}_proj.weight": getattr(layer, name) for name in "qkvo"}
            named |= {f"{at}mlp.{name}_proj.weight": getattr(layer, name) for name in ("gate", "up", "down")}
        return {name: tensor.detach() for name, tensor in named.items()}


def block_loss(draft: DFlashDraft, target: TinyModel, batch: Batch) -> Tensor:
    """Cross entropy with the target's distribution at each drafted place, of blocks at random places of answers."""
    length = batch.tokens.shape[1]
    chances = torch.rand(batch.answer.shape, device=batch.tokens.device)
    chances = chances.masked_fill(~batch.answer | ~batch.answer.roll(-1, dims=1), -1.0)
    chances[:, -1] = -1.0
    chance, anchors = chances.topk(min(BLOCKS_A_TEXT, length), dim=1)
    ahead = torch.arange(1, BLOCK_SIZE, device=anchors.device)
    places = anchors[..., None] + ahead  # [B, A, S - 1]
    inside = places.clamp(max=length - 1)
    row = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    there = batch.answer[row, inside] & (places < length) & (chance >= 0)[..., None]
    state = draft(batch.tokens, batch.streams, anchors)[there]
    with torch.no_grad():
        wanted = target.logits(batch.hidden[row.expand_as(inside)[there], inside[there] - 1]).softmax(-1)
    weight = (-(ahead - 1) / NEARER).exp().expand_as(places)[there]
    losses = -(wanted * draft.logits(state).log_softmax(-1)).sum(-1)
    return (losses * weight).sum() / weight.sum()


@torch.no_grad()
def block_right(draft: DFlashDraft, batch: Batch, group: Sequence[Sample]) -> Tensor:
    """[B, L, S - 1] bool: of the draft tokens behind each place which are the text's tokens there."""
    count, length = batch.tokens.shape
    right = torch.zeros(count, length, BLOCK_SIZE - 1, dtype=torch.bool)
    ahead = torch.arange(1, BLOCK_SIZE)
    for row, sample in enumerate(group):
        begin, end = sample.answer.index(True), len(sample.ids)
        anchors = torch.arange(begin, end, device=batch.tokens.device)[None]
        logits = draft.logits(draft(batch.tokens[row, None], batch.streams[row, None], anchors))[0]
        places = (anchors[0].cpu()[:, None] + ahead).clamp(max=end - 1)
        if sample.seed != GREEDY:
            number = torch.tensor([noise_rows([sample.seed], place)[0] for place in range(end - begin)])
            logits = logits + noise_table(draft.vocab_size)[number[places - begin]].to(logits.device)
        right[row, begin:end] = logits.argmax(-1).cpu() == torch.tensor(sample.ids)[places]
    return right

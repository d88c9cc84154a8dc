"""A small transformer that brings its tensor parallel plan, as users write them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = heads, width // heads, dropout
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shape = (*rows.shape[:2], -1, self.head_dim)  # -1: as many heads as this rank has
        query, key, value = (one(rows).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows + self.drop(self.attention(self.before(rows)))
        return rows + self.drop(self.down(functional.gelu(self.up(self.behind(rows)))))


class Transformer(nn.Module):
    """Give it token numbers (batch, sequence); it gives logits.

    Args:
        dropout: behind attention and behind the MLP. tied: the head's weight is the embedding's.
    """

    tp_plan: ClassVar[dict[str, Any]] = {
        "blocks.*.attention.q_proj": "colwise",
        "blocks.*.attention.k_proj": "colwise",
        "blocks.*.attention.v_proj": "colwise",
        "blocks.*.attention.o_proj": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        blocks: int = 2,
        tokens: int = 12,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(tokens, width)
            self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, tokens, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(numbers)
        for block in self.blocks:
            rows = block(rows)
        return self.head(self.norm(rows))


def loss_of(model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
    """The mean over all predicted tokens."""
    logits = model(numbers)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), numbers[:, 1:].flatten())

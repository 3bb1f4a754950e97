"""The models of text: char_rnn and gpt_nano, symbol by symbol, and gpt2_small at real size; and their loss.

Decides their layers and initial weights; parameter counts are asserted in tests. Knows no data, optimizer or device.
Called by the benchmarks, `next_symbol_loss` in the ranks as step and evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_SYMBOLS = 65
WINDOW = 128
GPT2_TOKENS = 50_304
"""GPT-2's 50,257, rounded up to what tensor cores like."""
GPT2_CONTEXT = 512
CODE_TOKENS = 8_192


def next_symbol_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean cross-entropy in nats of every next symbol in a batch (windows,) of uint8 [N, length + 1]."""
    (windows,) = batch
    symbols = windows.long()
    logits = model(symbols[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


def char_rnn() -> nn.Module:
    """Embedding, two LSTM layers and a linear one, after Karpathy's char-rnn (946,625 parameters)."""
    return CharRnn(width=128, hidden=256, num_layers=2, dropout=0.2)


def gpt_nano() -> nn.Module:
    """A small GPT (826,433 parameters).

    The published "826 k" leaves three things open, chosen here: queries, keys and values are one linear layer with
    bias, the head is a linear layer with bias of its own (not the embedding's weights), and there is a final norm.
    """
    return Gpt(width=128, num_heads=4, num_blocks=4, feed_forward=512, dropout=0.1)


def gpt2_small() -> nn.Module:
    """GPT-2 small (Radford et al. 2019) with a context of 512 tokens and no dropout (124,082,688 parameters)."""
    return Gpt2(num_tokens=GPT2_TOKENS, width=768, num_heads=12, num_blocks=12)


def gpt_of_code() -> nn.Module:
    """The same with fewer tokens and layers, for a corpus that is made on the spot (29,676,544 parameters)."""
    return Gpt2(num_tokens=CODE_TOKENS, width=512, num_heads=8, num_blocks=8)


class CharRnn(nn.Module):
    """Symbols int64 [N, T] to logits [N, T, 65]."""

    def __init__(self, *, width: int, hidden: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_SYMBOLS, width)
        self.lstm = nn.LSTM(width, hidden, num_layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(hidden, NUM_SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(symbols))
        logits: Tensor = self.head(outputs)
        return logits


class Gpt(nn.Module):
    """Symbols int64 [N, T] with T up to 128 to logits [N, T, 65]."""

    def __init__(self, *, width: int, num_heads: int, num_blocks: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_SYMBOLS, width)
        self.positions = nn.Embedding(WINDOW, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [GptBlock(width, num_heads, feed_forward, dropout) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_SYMBOLS)
        self.apply(_start_small)

    def forward(self, symbols: Tensor) -> Tensor:
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.dropout(self.embedding(symbols) + self.positions(places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Gpt2(nn.Module):
    """Tokens int64 [N, T] with T up to 512 to logits [N, T, num_tokens]; the head has the weights of the embedding."""

    def __init__(self, *, num_tokens: int, width: int, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(GPT2_CONTEXT, width)
        self.blocks = nn.Sequential(*(GptBlock(width, num_heads, 4 * width, 0.0) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)
        self.apply(_start_small)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions(places))))
        return logits


class GptBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, width: int, num_heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, feed_forward), nn.GELU(), nn.Linear(feed_forward, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        summed: Tensor = x + self.feed_forward(self.norm2(x))
        return summed


class CausalAttention(nn.Module):
    """Every place looks at itself and at those before it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (self._by_head(part) for part in self.queries_keys_values(x).chunk(3, dim=-1))
        dropout = self.dropout.p if self.training else 0.0
        seen = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.dropout(self.projection(seen.transpose(1, 2).flatten(2)))
        return projected

    def _by_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)


def _start_small(module: nn.Module) -> None:
    """GPT-2's start (Radford et al. 2019): normal with deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

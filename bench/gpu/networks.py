"""Three networks as their papers have them, so that nothing beyond torch has to be installed."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with one product for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.to_qkv(x).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, num_heads, length, dim / num_heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(heads.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and added to its input."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Gpt2(nn.Module):
    """GPT-2 (Radford et al., 2019), by default the smallest: 124 million parameters.

    The vocabulary of 50,257 is filled up to a multiple of 64, as is usual; no dropout. The forward
    pass takes tokens and targets, both int64 of shape (samples, context), to the mean loss.
    """

    def __init__(
        self,
        vocabulary: int = 50304,
        context: int = 1024,
        dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
    ) -> None:
        super().__init__()
        self.context, self.dim, self.num_layers = context, dim, num_layers
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.apply(_draw)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def flops_per_token(self) -> float:
        """Count the operations of a forward and a backward pass for one token.

        Source: Chowdhery et al., "PaLM", 2022, appendix B: 6 N + 12 · layers · width · context,
        where N leaves the embedding of places out.
        """
        num_parameters = sum(p.numel() for p in self.parameters()) - self.places.weight.numel()
        return 6.0 * num_parameters + 12.0 * self.num_layers * self.dim * self.context


def _draw(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, added to the input; the stride is the middle one's."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * channels
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50 (He et al., 2015) by default: 25.6 million parameters.

    Takes images, float of shape (samples, 3, height, width), to logits. The mean over places is
    written as one: torch's AdaptiveAvgPool2d has no deterministic backward pass on GPUs.
    """

    def __init__(
        self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, num_classes: int = 1000
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        channels_in = width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            for place in range(depth):
                stride = 2 if stage > 0 and place == 0 else 1
                layers.append(Bottleneck(channels_in, channels, stride))
                channels_in = 4 * channels
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels_in, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images).mean((2, 3)))


class SmallNet(nn.Module):
    """Eight convolutions for images of 32 × 32: a step is mostly the launching of kernels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        channels = [3, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 4 * width, 8]
        layers: list[nn.Module] = []
        for place, (before, after) in enumerate(itertools.pairwise(channels)):
            layers += [
                nn.Conv2d(before, after, 3, 2 if place in (2, 4, 6) else 1, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images).flatten(1))

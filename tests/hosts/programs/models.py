"""The models of the programs that run on several hosts, and their data."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Cnn(nn.Sequential):
    """Convolutions, BatchNorm with its buffers, dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(8 * 7 * 7, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    @staticmethod
    def data(seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(64, 1, 14, 14, generator=generator)
        return TensorDataset(images, torch.randint(0, 10, (64,), generator=generator))


class Gpt(nn.Module):
    """A transformer's layer over characters, and embeddings that not every shard uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, width), nn.Embedding(16, width)
        self.rare = nn.Parameter(torch.zeros(width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.head = nn.Linear(width, 32)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        values = self.embed(text) + self.place(places)
        if int(text[0, 0]) % 8 == 0:
            values = values + self.rare
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=text.device)
        return self.head(self.layer(values, mask, is_causal=True)).transpose(1, 2)

    @staticmethod
    def data(seed: int) -> TensorDataset:
        text = torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(seed))
        return TensorDataset(text[:, :-1], text[:, 1:])

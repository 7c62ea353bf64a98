"""Train a small GPT on a text, byte by byte, in bfloat16, and let it write.

python language_model.py FILE              # one worker; without FILE: Python's own documentation
unisono run -n 2 language_model.py FILE    # two workers, the same digest and the same text
"""

import sys
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

import unisono

CONTEXT, STEPS = 64, 300


class GPT(nn.Module):
    """Bytes (samples, length) → logits of each next byte (samples, length, 256)."""

    def __init__(self, dim=64, num_layers=3, num_heads=4):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, dim), nn.Embedding(CONTEXT, dim)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, **options)
        self.blocks = nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256))

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        x = self.byte(text) + self.position(torch.arange(text.shape[1], device=text.device))
        return self.head(self.blocks(x, mask, is_causal=True))


def loss(model, batch):
    (windows,) = batch
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def write(model, text, num_bytes):
    """Continue a text, (1, length), by drawing one byte after the other."""
    model.eval()
    for _ in range(num_bytes):
        logits = model(text[:, -CONTEXT:])[:, -1].float() / 0.8
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main():
    documentation = "".join(topics.topics.values()).encode()
    data = torch.tensor(list(Path(sys.argv[1]).read_bytes() if sys.argv[1:] else documentation))
    train, test = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    rates = OneCycleLR(optimizer, 4e-3, STEPS, pct_start=0.1, cycle_momentum=False)
    trainer = unisono.Trainer(
        *(model, optimizer, loss),
        shards=4,
        precision="bf16",
        clip_norm=1.0,
        schedule=unisono.Schedule(rates, every="step"),
    )
    windows = TensorDataset(train.unfold(0, CONTEXT + 1, 1))  # a view: the text is there once
    validate = TensorDataset(test.unfold(0, CONTEXT + 1, CONTEXT))
    trainer.fit(windows, batch_size=32, steps=STEPS, validate=validate, validate_every=100)
    if unisono.world().rank == 0:
        start = test[None, :CONTEXT].to(next(model.parameters()).device)
        print(write(model, start, 200))


if __name__ == "__main__":
    main()

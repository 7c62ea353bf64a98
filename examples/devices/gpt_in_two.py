"""A GPT cut in two and trained on two replicas: each worker has one half on each of two devices.

    unisono run -n 2 examples/devices/gpt_in_two.py                       # 2 workers × 2 devices
    python examples/devices/gpt_in_two.py                                 # one worker, 2 devices
    python examples/devices/gpt_in_two.py --devices cpu                   # one worker, one device

All three print the same digest. On a machine with four GPUs worker 0 takes GPUs 0 and 1, and worker
1 takes GPUs 2 and 3. (Never run on GPUs.)

The model is that of ``examples/complete/text.py`` in small; the text is the letters of a rhyme.

The classic mistakes that it avoids:

* *Both workers on the same devices*: each chooses its own by its local rank.
* *A checkpoint for each half*: names are those of the whole model, and a run may go on unsplit.
"""

import argparse

import torch
import torch.nn.functional as F
from choosing import add_devices, devices_of
from torch import nn
from torch.utils.data import TensorDataset

import unisono

TEXT = "the wheels on the bus go round and round, round and round, round and round. " * 8
CONTEXT = 16


class GPT(nn.Module):
    """Tokens (batch, length) → logits of each next token (batch, length, vocabulary)."""

    def __init__(self, num_tokens, dim=32, num_layers=4):
        super().__init__()
        self.token, self.position = nn.Embedding(num_tokens, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, 4, 4 * dim, 0.1, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_tokens)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def loss(model, batch):
    (windows,) = batch
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten().to(logits.device))


def own_devices(names):
    """Choose this worker's devices, where each has GPUs of its own."""
    first = unisono.world().local_rank * len(names)
    if not names[0].startswith("cuda"):
        return names
    return [f"cuda:{first + position}" for position in range(len(names))]


def main():
    parser = argparse.ArgumentParser(description="A GPT cut in two, on two replicas.")
    parser.add_argument("--steps", type=int, default=30)
    add_devices(parser)
    args = parser.parse_args()
    devices = own_devices(devices_of(args))

    alphabet = sorted(set(TEXT))
    tokens = torch.tensor([alphabet.index(letter) for letter in TEXT])
    dataset = TensorDataset(tokens.unfold(0, CONTEXT + 1, 1))

    torch.manual_seed(0)
    model = unisono.split(GPT(len(alphabet)), devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0, callbacks=[])
    trainer.fit(dataset, batch_size=16, steps=args.steps)
    result = trainer.evaluate(dataset, batch_size=64)
    digest = trainer.digest()[:16]  # every worker asks for it
    if unisono.world().rank == 0:
        blocks = [str(next(block.parameters()).device) for block in model.blocks]
        print(f"{unisono.world().world_size} workers; blocks of worker 0 on {', '.join(blocks)}")
        print(f"loss {result['loss']:.4f}, digest {digest}")


if __name__ == "__main__":
    main()

"""Train a character-level transformer on a text file and let it write, on any number of workers.

    unisono run -n 2 examples/gpt.py --data tinyshakespeare/input.txt

The last tenth of the text is kept for the test. The weights that write are the same bits on every
number of workers.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import unisono

CONTEXT = 64


class Windows(Dataset):
    """Pieces of a text: sample i is the ``length`` tokens from position ``i * stride`` on."""

    def __init__(self, tokens, length, stride=1):
        self.windows = tokens.unfold(0, length, stride)  # a view: the text is not copied

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return self.windows[index]

    def __getitems__(self, indices):
        return list(self.windows[indices])  # one fetch for the whole batch


class Block(nn.Module):
    """Causal attention, then two linear layers, each added to its input."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, length, dim = x.shape
        qkv = self.to_qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, num_heads, length, dim / num_heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(heads.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Tokens (batch, length) → logits of each next token (batch, length, vocabulary)."""

    def __init__(self, num_tokens, dim=128, num_layers=4, num_heads=4):
        super().__init__()
        self.token = nn.Embedding(num_tokens, dim)
        self.position = nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_layers)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        return self.head(self.blocks(self.token(tokens) + self.position(positions)))


def loss(model, windows):
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def write(model, start, num_tokens):
    """Continue ``start``, a (1, length) tensor, by drawing one token after the other."""
    generator = torch.Generator().manual_seed(0)
    tokens = start
    for _ in range(num_tokens):
        chances = model(tokens[:, -CONTEXT:])[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return tokens[0]


def main():
    parser = argparse.ArgumentParser(description="Train a character-level transformer on a text.")
    parser.add_argument("--data", required=True, metavar="FILE", help="a text file")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of one optimizer step")
    args = parser.parse_args()

    text = Path(args.data).read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    code = {character: index for index, character in enumerate(alphabet)}
    tokens = torch.tensor([code[character] for character in text])
    num_train = len(tokens) * 9 // 10
    train_set = Windows(tokens[:num_train], CONTEXT + 1)
    test_set = Windows(tokens[num_train:], CONTEXT + 1, stride=CONTEXT)

    torch.manual_seed(0)
    model = GPT(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, loss, seed=0)
    trainer.fit(train_set, batch_size=args.batch_size, steps=args.steps)
    result = trainer.evaluate(test_set, batch_size=args.batch_size)
    if unisono.world().rank == 0:
        print(f"test loss {result['loss']:.3f} per character\n")
        print("".join(alphabet[token] for token in write(model, tokens[None, :1], 400)))


if __name__ == "__main__":
    main()

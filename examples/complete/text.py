"""Train a GPT on the characters of a text in bfloat16, and let it write.

    python examples/complete/text.py
    unisono run -n 2 examples/complete/text.py --data tinyshakespeare/input.txt --steps 2000

Without `--data` the text is one sonnet, which the model learns by heart (so the validation loss
rises). The last tenth of a text is kept for validation. What it writes in the end is the same on
any number of workers, as the weights are.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import Dataset

import unisono

CONTEXT = 64
SONNET = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade
Nor lose possession of that fair thou owest;
Nor shall Death brag thou wander'st in his shade,
When in eternal lines to time thou growest:
So long as men can breathe or eyes can see,
So long lives this and this gives life to thee.
"""


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

    def __init__(self, dim, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, dim = x.shape
        qkv = self.to_qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, num_heads, length, dim / num_heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.to_out(heads.transpose(1, 2).reshape(batch, length, dim)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Tokens (batch, length) → logits of each next token (batch, length, vocabulary)."""

    def __init__(self, num_tokens, dim=128, num_layers=4, num_heads=4, dropout=0.1):
        super().__init__()
        self.token = nn.Embedding(num_tokens, dim)
        self.position = nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads, dropout) for _ in range(num_layers)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.position(positions)))


def loss(model, windows):
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def write(model, start, num_tokens, temperature=0.8):
    """Continue ``start``, a (1, length) tensor, by drawing one token after the other."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = start
    for _ in range(num_tokens):
        logits = model(tokens[:, -CONTEXT:])[:, -1].float().cpu() / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens.device)], 1)
    return tokens[0]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", metavar="FILE", help="a text file; without it: a sonnet")
    parser.add_argument("--directory", help="for checkpoints; without it: none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of one optimizer step")
    parser.add_argument("--shards", type=int, default=4, help="at least the number of workers")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--quick", action="store_true", help="three steps")
    args = parser.parse_args()
    if args.quick:
        args.steps = 3
    args.text = SONNET
    if args.data is not None:
        try:
            args.text = Path(args.data).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--data must be a text file in UTF-8: {error}")
    if len(args.text) <= 3 * CONTEXT:
        parser.error(f"--data must have more than {3 * CONTEXT} characters: {args.data} has fewer")
    return args


def main():
    args = arguments()
    alphabet = sorted(set(args.text))
    code = {character: index for index, character in enumerate(alphabet)}
    tokens = torch.tensor([code[character] for character in args.text])
    num_train = min(len(tokens) * 9 // 10, len(tokens) - CONTEXT - 1)
    train_set = Windows(tokens[:num_train], CONTEXT + 1)
    test_set = Windows(tokens[num_train:], CONTEXT + 1, stride=CONTEXT)

    torch.manual_seed(0)
    model = GPT(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95))
    warmup = max(1, args.steps // 20)
    rise = LinearLR(optimizer, 0.1, total_iters=warmup)
    fall = CosineAnnealingLR(optimizer, max(1, args.steps - warmup), eta_min=args.lr / 10)
    rates = SequentialLR(optimizer, [rise, fall], milestones=[warmup])
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=args.shards,
        seed=0,
        precision=args.precision,
        clip_norm=1.0,
        schedule=unisono.Schedule(rates, every="step"),
        directory=args.directory,
    )
    trainer.fit(
        train_set,
        batch_size=args.batch_size,
        steps=args.steps,
        validate=test_set,
        validate_every=max(1, args.steps // 4),
    )
    if unisono.world().rank == 0:
        start = tokens[None, :1].to(next(model.parameters()).device)
        print("\n" + "".join(alphabet[token] for token in write(model, start, 400)))


if __name__ == "__main__":
    main()

"""Train a recurrent network whose state goes from batch to batch: truncated backpropagation.

A text is cut into rows that are read side by side: row i of each batch goes on where row i of the
batch before has ended, and so does its hidden state.
"""

import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

import unisono

BATCH_SIZE, WINDOW = 16, 20


class Letters(nn.Module):
    def __init__(self, num_letters):
        super().__init__()
        self.embed = nn.Embedding(num_letters, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, num_letters)

    def forward(self, letters, state=None):
        outputs, state = self.gru(self.embed(letters), state)
        return self.head(outputs), state


def loss(model, batch, state):
    """Take the state that was returned for the batch before; None at the start of an epoch."""
    letters, following = batch
    logits, state = model(letters, state)
    return F.cross_entropy(logits.flatten(0, 1), following.flatten()), state


def in_rows(text):
    """Cut letters into windows, ordered so that rows continue; each is (letters, the next ones)."""
    starts = range(0, len(text) - WINDOW, WINDOW)
    windows = [(text[at : at + WINDOW], text[at + 1 : at + 1 + WINDOW]) for at in starts]
    return Subset(windows, unisono.data.continuing_rows(len(windows), BATCH_SIZE))


def main():
    torch.manual_seed(0)
    text = torch.tensor(list(Path(textwrap.__file__).read_bytes()[:12000])) % 128
    data, rest = in_rows(text[:10000]), in_rows(text[10000:])
    model = Letters(128)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, carry=True)
    # Evaluation carries a state of its own, from the start of its dataset on.
    trainer.fit(data, batch_size=BATCH_SIZE, epochs=3, shuffle=False, validate=rest)


if __name__ == "__main__":
    main()

"""Train a language model on sentences of different lengths: every token counts the same.

The mean is over the tokens of the global batch, not over shards or sentences, so it does not depend
on which sentences are together. `Words` is called as models of transformers are; one of those
(`AutoModelForCausalLM.from_pretrained(…).train()`) can take its place.
"""

from types import SimpleNamespace

import torch
from torch import nn

import unisono

LENGTH = 24


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids, attention_mask=None, labels=None):
        outputs, _ = self.gru(self.embed(input_ids))
        return SimpleNamespace(logits=self.head(outputs))


def sentences(count):
    """Give sentences that count up by some number, padded, where labels are -100."""
    found = []
    for number in range(count):
        length = 2 + number * 7 % (LENGTH - 1)
        ids = (torch.arange(LENGTH) * (1 + number % 3) + number) % 64
        is_there = torch.arange(LENGTH) < length
        labels = torch.where(is_there, ids, -100)
        found.append({"input_ids": ids, "attention_mask": is_there.long(), "labels": labels})
    return found


def main():
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = unisono.Trainer(model, optimizer, unisono.token_mean, shards=4)
    trainer.fit(sentences(200), batch_size=32, epochs=5, validate=sentences(50))


if __name__ == "__main__":
    main()

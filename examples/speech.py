"""Recognize sequences of tones, as in speech: CTC, in batches with a limited number of frames.

python speech.py                 # one worker
unisono run -n 2 speech.py       # two workers, the same digest
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import unisono

LETTERS, BANDS, FRAMES, EPOCHS = 6, 12, 800, 8


def utterances(num, seed):
    """Make pairs of frames (length, bands) and letters, each a tone of a few frames."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(num):
        num_letters = int(torch.randint(2, 13, (), generator=draw))
        letters = torch.randint(1, LETTERS + 1, (num_letters,), generator=draw)
        tones = torch.stack([letters, letters, 0 * letters], 1).flatten()
        noise = 0.3 * torch.randn(len(tones), BANDS, generator=draw)
        yield F.one_hot(tones, BANDS) + noise, letters


class FrameBudget:
    """Batches of utterances of like lengths, with `FRAMES` frames at most once they are padded."""

    def __init__(self, data):
        self.lengths = torch.tensor([len(frames) for frames, _ in data])

    def __iter__(self):
        batches = [[]]
        for index in (self.lengths + 4 * torch.rand(len(self.lengths))).argsort().tolist():
            longest = max(int(self.lengths[other]) for other in [*batches[-1], index])
            if (len(batches[-1]) + 1) * longest > FRAMES:
                batches.append([])
            batches[-1].append(index)
        return (batches[at] for at in torch.randperm(len(batches)).tolist())


def collate(samples):
    frames, letters = zip(*samples, strict=True)
    lengths, counts = (torch.tensor([*map(len, some)]) for some in (frames, letters))
    return pad_sequence(frames, batch_first=True), torch.cat(letters), lengths, counts


class Recognizer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.rnn = nn.GRU(BANDS, dim, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * dim, LETTERS + 1)

    def forward(self, frames, lengths):
        packed = pack_padded_sequence(frames, lengths.cpu(), True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(hidden).log_softmax(-1)


def loss(model, batch):
    frames, letters, lengths, counts = batch
    scores = model(frames, lengths).transpose(0, 1)
    each = F.ctc_loss(scores, letters, lengths, counts, reduction="none")
    return each.sum(), counts.sum()  # the mean over the letters of the global batch


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Recognizer()
    trainer = unisono.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loss, shards=4)
    train, test = (
        DataLoader(data, batch_sampler=FrameBudget(data), collate_fn=collate)
        for data in (list(utterances(600, 1)), list(utterances(100, 2)))
    )
    trainer.fit(train, epochs=EPOCHS, validate=test)

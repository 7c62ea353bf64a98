"""Two runs that take turns, as a teacher and a student do; print both digests."""

import torch
from tests.classified import cross_entropy as loss
from torch import nn

import unisono


def trainer(width):
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
    return unisono.Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, shards=4)


def main():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    teacher, student = trainer(16), trainer(12)
    for epochs in range(1, 4):
        teacher.fit(data, batch_size=16, epochs=epochs)
        student.fit(data, batch_size=16, epochs=40 * epochs)
    return teacher.digest(), student.digest()


if __name__ == "__main__":
    print(*main())

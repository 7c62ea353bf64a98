"""Trains with loader processes that never come to an end; each process says its pid first."""

import os
import time

import torch

import unisono


class Endless(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        print(os.getpid(), flush=True)
        while True:
            time.sleep(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, lambda model, batch: model(batch).mean(), shards=4)
    print(os.getpid(), flush=True)
    trainer.fit(torch.utils.data.DataLoader(Endless(), 16, shuffle=True, num_workers=2), epochs=1)

"""Train with a checkpoint after every step; print the digest. A test kills and starts it again."""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

import torch

import unisono

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity import cases


def loss(model, batch):
    time.sleep(float(os.environ.get("SHARD_SECONDS", "0")))
    return cases.classify(model, batch)


def main():
    torch.manual_seed(11)
    model = cases.Cnn(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, directory=sys.argv[1], checkpoint=1)
    with contextlib.redirect_stdout(io.StringIO()):
        digest = trainer.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=100).digest
    if unisono.world().rank == 0:
        print(json.dumps(digest))


main()

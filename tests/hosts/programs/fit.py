"""Fit, validate, evaluate and predict with a Trainer; say what came of it.

Argument: a run directory if there is to be one.
"""

import hashlib
import sys

import torch
from tests.hosts.programs import killing
from tests.hosts.programs.models import Cnn
from torch import nn

import unisono


def loss(model, batch):
    images, labels = batch
    outputs = model(images)
    right = (outputs.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(outputs, labels), "accuracy": right}


killing.install()
torch.manual_seed(0)
model = Cnn()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
kept = {"directory": sys.argv[1]} if len(sys.argv) > 1 else {}
trainer = unisono.Trainer(model, optimizer, loss, shards=6, seed=2, **kept)
trainer.fit(
    unisono.share(lambda: Cnn.data(seed=0)), batch_size=24, epochs=2, validate=Cnn.data(seed=1)
)
result = trainer.evaluate(Cnn.data(seed=2), batch_size=10)
print(f"digest {trainer.digest()} of {sorted(result.items())}\n", end="", flush=True)
rows = trainer.predict(Cnn.data(seed=2), batch_size=10)
print(f"rows {hashlib.sha256(rows.numpy().tobytes()).hexdigest()}\n", end="", flush=True)

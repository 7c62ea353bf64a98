"""Fit, validate and evaluate with a Trainer; say what came of it, and what is refused."""

import torch
from tests.hosts.programs.models import Cnn
from torch import nn

import unisono


def loss(model, batch):
    images, labels = batch
    outputs = model(images)
    right = (outputs.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(outputs, labels), "accuracy": right}


torch.manual_seed(0)
model = Cnn()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trainer = unisono.Trainer(model, optimizer, loss, shards=6, seed=2)
trainer.fit(
    unisono.share(lambda: Cnn.data(seed=0)), batch_size=24, epochs=2, validate=Cnn.data(seed=1)
)
result = trainer.evaluate(Cnn.data(seed=2), batch_size=10)
print(f"digest {trainer.digest()} of {sorted(result.items())}", flush=True)
try:
    trainer.predict(Cnn.data(seed=2), batch_size=10)
except ValueError as error:
    print(f"refused: {error}", flush=True)

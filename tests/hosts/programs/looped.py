"""Train in a loop of the program's own, which evaluates between steps; say what came of it."""

import torch
from tests.hosts.programs import killing
from tests.hosts.programs.models import Cnn
from torch import nn

import unisono


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


killing.install()
torch.manual_seed(0)
model = Cnn()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = unisono.Run(model, optimizer, shards=6, seed=2)
judge = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=6)
for step in run.steps(Cnn.data(seed=0), batch_size=24, steps=9):
    with step:
        for batch in step.shards:
            step.backward(loss(model, batch))
    if step.is_done and step.number % 2 == 0:
        means = judge.evaluate(Cnn.data(seed=1), batch_size=10)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + means["loss"])
print(f"digest {run.digest()} at {optimizer.param_groups[0]['lr']!r}\n", end="", flush=True)

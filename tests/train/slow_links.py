"""Programs over a slow link, and what each way of sending less is, written with torch alone."""

import copy

import torch
from tests.classified import cross_entropy as loss_of
from torch import nn
from torch.utils.data import TensorDataset

import unisono

BATCH_SIZE, STEPS, LR = 16, 8, 0.05
LINKS = {
    "bf16": unisono.Bf16Gradients(groups=2),
    "factors": unisono.PowerSGD(rank=2, start_step=2, groups=2),
    "local": unisono.DiLoCo(local_steps=3, groups=2),
}


class Model(nn.Module):
    """Two layers, and a vector that few shards use."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(40, 60), nn.Linear(60, 5)
        self.rare = nn.Parameter(torch.ones(60))

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        if inputs[0, 0] > 0.8:
            hidden = hidden * self.rare
        return self.last(hidden)


def data():
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(4 * BATCH_SIZE, 40, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 5, (len(inputs),), generator=generator))


def sum_of(model, batch):
    return loss_of(model, batch) * len(batch[1]), len(batch[1])


def made(kind="sgd"):
    torch.manual_seed(3)
    model = Model()
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return model, kinds[kind](model.parameters(), lr=LR)


def trainer(link, *, shards=8, kind="adam", loss=loss_of, **options):
    slow_link = LINKS.get(link, link)
    return unisono.Trainer(*made(kind), loss, shards=shards, slow_link=slow_link, **options)


def train(link, *, steps=STEPS, **options):
    """Train; gives the digest, and that of what is kept from step to step."""
    made_trainer = trainer(link, **options)
    made_trainer.fit(data(), batch_size=BATCH_SIZE, steps=steps, shuffle=False)
    return made_trainer.digest(), kept_by(made_trainer)


def kept_by(made_trainer):
    """Sum up what a slow link has kept."""
    kept = made_trainer.run.state["slow_link"].state_dict()
    return {
        f"{label}/{name}": value.double().sum().item()
        for label, values in kept.items()
        for name, value in values.items()
    }


def halves(step):
    """Give the batches of two shards."""
    inputs, targets = (one[step % 4 * BATCH_SIZE :][:BATCH_SIZE] for one in data().tensors)
    return [(inputs[shard::2], targets[shard::2]) for shard in range(2)]


def gradients(model, batch, weight):
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward(torch.full_like(loss, weight))
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def update(model, optimizer, sums):
    for parameter, total in zip(model.parameters(), sums, strict=True):
        parameter.grad = total
    optimizer.step()


def rounded(value, residual):
    half = (value + residual).to(torch.bfloat16).float()
    residual.copy_(value + residual - half)
    return half


def in_bf16():
    model, optimizer = made()
    left = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(3)]
    for step in range(STEPS):
        of_groups = [gradients(model, batch, 0.5) for batch in halves(step)]
        sums = []
        for at in range(len(left[0])):
            sent = [
                rounded(g[at], left[n][at]) for n, g in enumerate(of_groups) if g[at] is not None
            ]
            sums.append(rounded(sum(sent[1:], sent[0]), left[2][at]) if sent else None)
        update(model, optimizer, sums)
    return model


def in_factors():
    link, (model, optimizer) = LINKS["factors"], made()
    left = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(2)]
    factors = {}
    for step in range(STEPS):
        of_groups = [gradients(model, batch, 0.5) for batch in halves(step)]
        sums = []
        for at, parameter in enumerate(model.parameters()):
            there = [(n, g[at]) for n, g in enumerate(of_groups) if g[at] is not None]
            if step < link.start_step or parameter.ndim < 2:
                sums.append(sum(g for _, g in there) if there else None)
                continue
            if at not in factors:
                generator = torch.Generator().manual_seed(at)
                factors[at] = torch.randn(parameter.shape[1], link.rank, generator=generator)
            matrices = [(n, g + left[n][at]) for n, g in there]
            base = torch.linalg.qr(sum(m @ factors[at] for _, m in matrices)).Q
            rights = [m.T @ base for _, m in matrices]
            for (n, matrix), right in zip(matrices, rights, strict=True):
                left[n][at] = matrix - base @ right.T
            factors[at] = sum(rights)
            sums.append(base @ factors[at].T)
        update(model, optimizer, sums)
    return model


def in_local_steps(clip_norm=None):
    link, (outer, _) = LINKS["local"], made()
    groups = [copy.deepcopy(outer) for _ in range(2)]
    optimizers = [torch.optim.SGD(group.parameters(), lr=LR) for group in groups]
    outer_step = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        for group, optimizer, batch in zip(groups, optimizers, halves(step), strict=True):
            update(group, optimizer, gradients(group, batch, 1.0))
        if (step + 1) % link.local_steps == 0:
            locals_ = [list(group.parameters()) for group in groups]
            for at, parameter in enumerate(outer.parameters()):
                changes = [parameter.detach() - of[at].detach() for of in locals_]
                parameter.grad = (changes[0] + changes[1]) / 2
            outer_step.step()
            for group in groups:
                group.load_state_dict(outer.state_dict())
    return outer


REFERENCES = {"bf16": in_bf16, "factors": in_factors, "local": in_local_steps}

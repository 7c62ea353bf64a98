"""Programs whose optimizers ask for the loss again, and loops of one process beside them."""

import torch
from tests.classified import by_sign
from tests.classified import cross_entropy as loss_of
from torch import nn

import unisono

BATCH_SIZE, STEPS = 12, 6


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation (Foret et al. 2021) around SGD."""

    def __init__(self, params, rho=0.05, **options):
        super().__init__(params, **options)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        there = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in there]).norm()
        moved = []
        for p in there:
            moved.append((p, p.clone()))
            p.add_(p.grad, alpha=float(self.rho / (norm + 1e-12)))
        closure()
        for p, old in moved:
            p.copy_(old)
        super().step()
        return loss


class FirstThenAgain(SAM):
    """As many implementations have it: gradients are there, the closure is for the second pass."""

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        moved = []
        for group in self.param_groups:
            for p in group["params"]:
                moved.append((p, p.clone()))
                p.add_(p.grad, alpha=0.01)
        self.zero_grad()
        closure()
        for p, old in moved:
            p.copy_(old)
        torch.optim.SGD.step(self)


class ThroughData(SAM):
    """As older implementations have it: parameters move through `.data`, unseen by autograd."""

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        moved = [(p, p.grad * 0.1) for group in self.param_groups for p in group["params"]]
        for p, by in moved:
            p.data.add_(by)
        closure()
        for p, by in moved:
            p.data.sub_(by)
        torch.optim.SGD.step(self)


def data():
    return by_sign(34, 6, seed=5)


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


OPTIMIZERS = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=4),
    "line search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "sam": lambda p: SAM(p, lr=0.1, momentum=0.9),
    "through data": lambda p: ThroughData(p, lr=0.1, momentum=0.9),
    "gradients first": lambda p: FirstThenAgain(p, lr=0.1, momentum=0.9),
}


def in_one_process(name):
    """Train as people write it; gives the weights and buffers."""
    model, dataset = model_of(), data()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        batch = dataset[(step * BATCH_SIZE) % 36 : (step * BATCH_SIZE) % 36 + BATCH_SIZE]

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        if name == "gradients first":
            closure()
        optimizer.step(closure)
    return model.state_dict()


def trainer(name, shards, loss=loss_of, **options):
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    return unisono.Trainer(model, optimizer, loss, shards=shards, **options)


def train(name, shards=4, steps=STEPS, **options):
    made = trainer(name, shards, **options)
    made.fit(data(), batch_size=BATCH_SIZE, steps=steps, shuffle=False)
    return made.digest()

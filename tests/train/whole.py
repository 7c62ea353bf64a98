"""Optimizers that look at whole parameters, and at how these and their state lie in memory."""

import torch
from tests.classified import cross_entropy as loss

import unisono
from unisono.engine.state.contents import digest_of


class Whole(torch.optim.Optimizer):
    """Updates each parameter by :meth:`direction` of its gradient and state."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                way = self.direction(parameter, self.state[parameter])
                parameter.sub_(way, alpha=group["lr"])


class Lamb(Whole):
    """Its norms add in the order in which elements lie."""

    def direction(self, parameter, state):
        if not state:
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
        state["mean"].lerp_(parameter.grad, 0.1)
        state["square"].lerp_(parameter.grad.square(), 0.01)
        way = state["mean"] / (state["square"].sqrt() + 1e-6)
        return way * (parameter.norm() / (way.norm() + 1e-6))


class Transposed(Whole):
    """Keeps its mean in another order than its parameter has, and adds that up."""

    def direction(self, parameter, state):
        if not state:
            state["mean"] = torch.zeros(parameter.shape[::-1]).permute(*range(parameter.ndim)[::-1])
        state["mean"].lerp_(parameter.grad, 0.1)
        return state["mean"] / (state["mean"].norm() + 1e-6)


class Past(Whole):
    """Keeps the last gradients in a list, and more in a dict."""

    def direction(self, parameter, state):
        past = state.setdefault("past", {"gradients": [], "seen": (0,)})
        past["gradients"] = [*past["gradients"], parameter.grad.clone()][-2:]
        past["seen"] = (past["seen"][0] + 1,)
        return sum(past["gradients"]) / past["seen"][0]


class Preconditioned(Whole):
    """Keeps a matrix that is larger than its parameter, as Shampoo does."""

    def direction(self, parameter, state):
        if parameter.ndim != 2:
            return parameter.grad
        right = state.setdefault("right", torch.eye(parameter.shape[1]))
        right += parameter.grad.T @ parameter.grad
        return parameter.grad @ torch.linalg.inv(right)


class Caching(Whole):
    """Keeps what nobody can write down."""

    key, value = "cache", object()

    def direction(self, parameter, state):
        state[self.key] = self.value
        return parameter.grad


class Counting(Caching):
    """Names its state by numbers."""

    key, value = 3, 4


class Madgrad(Whole):
    """Counts its steps, and more, beside the state of its parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
            self.state["seen"] = {"losses/all": [0.5], "mean": torch.zeros(2)}
        super().step()
        self.state["k"] += 1
        self.state["seen"]["mean"] += 1

    def direction(self, parameter, state):
        sums = state.setdefault("s", torch.zeros_like(parameter))
        sums.add_(parameter.grad)
        seen = self.state["seen"]
        return sums * (self.state["k"].item() + seen["losses/all"][0] + seen["mean"][0]) ** -0.5


class Lookahead(Whole):
    """Wraps another optimizer, whose state it says beside its own."""

    def __init__(self, params):
        super().__init__(params)
        self.base = torch.optim.Adam(self.param_groups[0]["params"])

    def direction(self, parameter, state):
        return parameter.grad

    def state_dict(self):
        return {**super().state_dict(), "base": self.base.state_dict()}


class Quiet(Lookahead):
    """The same, but says nothing of it."""

    def state_dict(self):
        return super(Lookahead, self).state_dict()


class Same(Whole):
    """Says in words of its own what torch says."""

    def direction(self, parameter, state):
        state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        return state["mean"]

    def state_dict(self):
        said = super().state_dict()
        return {"param_groups": said["param_groups"], "state": dict(said["state"])}


def images():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (40,), generator=generator)
    return torch.utils.data.TensorDataset(torch.randn(40, 3, 9, 9, generator=generator), labels)


def laid_out_loss(model, batch):
    return loss(model, [batch[0].to(memory_format=torch.channels_last), *batch[1:]])


def train(kind, steps, directory=None, **options):
    """Train up to so many steps, one `fit` after the other; returns the leader's digest."""
    return trained(kind, steps, directory, **options).digest()


def train_and_look(kind, steps):
    """Do that, and return this worker's own digest, and of how much its optimizer has state."""
    trainer = trained(kind, steps)
    run = trainer.run
    return digest_of(run.model, run.optimizer), len(run.optimizer.state)


def trained(kind, steps, directory=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 20, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(20, 37, 3),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(37, 4),
    )
    optimizer = kind(model.parameters())
    model.to(memory_format=torch.channels_last)
    trainer = unisono.Trainer(
        model, optimizer, laid_out_loss, shards=3, directory=directory, **options
    )
    for total in steps:
        trainer.fit(images(), batch_size=10, steps=total)
    return trainer

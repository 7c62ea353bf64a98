"""Optimizers that look at whole parameters go on, and back, as if nothing had happened.

Some look at how parameters and their state lie in memory.
"""

import functools

import pytest
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


class Viewing(Whole):
    """Keeps rows of what it also keeps as a whole."""

    def direction(self, parameter, state):
        if not state:
            state["mean"] = torch.zeros_like(parameter)
            state["rows"] = state["mean"][1:]
        state["mean"].lerp_(parameter.grad, 0.1)
        state["rows"].mul_(0.5)
        return state["mean"]


class Common(Whole):
    """Keeps one count for all parameters."""

    def direction(self, parameter, state):
        state["count"] = self.state.setdefault("count", torch.zeros(()))
        state["count"] += 1
        return parameter.grad / state["count"]


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


class Choosing(torch.optim.SGD):
    """Has a function among its options."""

    def __init__(self, params, **options):
        super().__init__(params, lr=0.1)
        self.param_groups[0]["chooses"] = torch.is_floating_point


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


KINDS = [Lamb, Transposed, Past, Preconditioned, Madgrad]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())


@functools.cache
def undisturbed(kind):
    return train(kind, [8])


@pytest.mark.slow
@EACH
def test_a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(kind, tmp_path):
    train(kind, [3], tmp_path)
    assert train(kind, [8], tmp_path) == undisturbed(kind)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize(
    "faults",
    ["kill:rank=0,step=5,at=update", pytest.param("kill:rank=1,step=5", marks=pytest.mark.long)],
)
def test_lost_workers_change_nothing(kind, faults, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    for directory in (None, tmp_path):
        digests = unisono.launch(train, kind, [4, 8], directory, workers=2)
        assert digests == [undisturbed(kind)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Lamb, Madgrad], ids=["lamb", "madgrad"])
@pytest.mark.parametrize("workers", [2, 3])
def test_every_worker_has_the_optimizers_state_without_recovery_too(kind, workers):
    alone = train_and_look(kind, [2, 5])
    found = unisono.launch(train_and_look, kind, [2, 5], workers=workers, restarts=0)
    assert found == [alone] * workers


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "sizes"), [("auto", (6, 6)), ("shared", (6, 0))])
def test_without_recovery_state_that_cannot_be_kept_stays_where_it_is(exchange, sizes, monkeypatch):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    leader, other = unisono.launch(train_and_look, Caching, [5], workers=2, restarts=0)
    assert (leader[1], other[1]) == sizes


@pytest.mark.slow
@EACH
def test_any_number_of_workers_goes_on(kind, tmp_path):
    unisono.launch(train, kind, [3], tmp_path, workers=2)
    assert unisono.launch(train, kind, [8], tmp_path, workers=3) == [undisturbed(kind)] * 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Caching, "the optimizer's `cache` must be a tensor, a number or a text to be kept"),
        (Counting, "an optimizer must name its state by texts to have it kept, but has 3"),
        (Lookahead, "but Lookahead's `state_dict` also has `base`"),
        (Viewing, "but `mean/.*` and `rows/.*` do: keep a"),
        (Common, "must not share memory to be kept with a run"),
        (Quiet, "but Quiet's `base` is another optimizer with separate state"),
        (Choosing, "`chooses` must be .* but is a function: keep that in an attribute of the"),
    ],
)
def test_state_that_cannot_be_kept_is_refused_before_the_second_step(kind, words, tmp_path):
    with pytest.raises(unisono.errors.CheckpointError, match=words):
        train(kind, [1000], tmp_path)


@pytest.mark.slow
def test_a_state_dict_that_says_no_more_than_torchs_is_let_through(tmp_path):
    train(Same, [3], tmp_path)
    assert train(Same, [8], tmp_path) == undisturbed(Same)


def test_state_that_a_program_gives_an_elementwise_optimizer_is_kept(tmp_path):
    def make(directory):
        torch.manual_seed(4)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        return unisono.Run(model, optimizer, shards=2, directory=directory)

    run, data = make(tmp_path), torch.utils.data.TensorDataset(torch.randn(8, 3))
    run.optimizer.state["mine"] = {"mean": torch.ones(2)}
    for total in (1, 2):
        for step in run.steps(data, batch_size=4, steps=total):
            with step:
                for (inputs,) in step.shards:
                    step.backward(run.model(inputs).square().mean())
        digest = digest_of(run.model, run.optimizer)
        run = make(tmp_path)
    assert list(run.steps(data, batch_size=4, steps=2)) == []
    assert run.optimizer.state["mine"]["mean"].tolist() == [1, 1]
    assert digest_of(run.model, run.optimizer) == digest


def with_complex(place):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if place == "model":
        model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    else:
        optimizer.state["phase"] = {"of": torch.zeros(2, dtype=torch.complex128)}
    return model, optimizer


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_what_no_file_can_hold_is_refused_before_any_training(place, tmp_path):
    run = unisono.Run(*with_complex(place), shards=1, directory=tmp_path)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3))
    with pytest.raises(unisono.errors.CheckpointError, match=r"`phase.* but is torch\.complex"):
        next(run.steps(data, batch_size=4, steps=1))

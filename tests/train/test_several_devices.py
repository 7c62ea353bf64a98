"""What a worker with several devices does with models, losses and programs of all kinds."""

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.accelerator import sim
from tests.classified import cross_entropy as plain
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback
from unisono.device import Copies
from unisono.step import crossings
from unisono.step.crossings import SMALL_BYTES

DATA = TensorDataset(
    torch.randn(50, 6, generator=torch.Generator().manual_seed(2)), torch.arange(50) % 3
)
CPUS, SIMS = ["cpu", "cpu"], ["sim:0", "sim:1"]


class Net(nn.Module):
    """Looks at its configuration in each pass, has a name for a device, and a tied layer."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(dropout=0.5, sizes=[6, 8])
        self.first, self.norm, self.tied = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.again = self.tied
        self.last = nn.Linear(8, 3)
        self.scale = 1.0

    def forward(self, x):
        hidden = self.norm(torch.relu(self.first(x)))
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        return self.last(self.again(torch.tanh(self.tied(hidden)))) * self.scale


def train(devices, loss=plain, model=Net, *, steps=6, shards=4, batch_size=8, fit=None, **options):
    """Train on some devices, or as ever with None; returns the trainer."""
    torch.manual_seed(3)
    module = model()
    where = {"device": "cpu"} if devices is None else {"devices": devices}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True)
    trainer = unisono.Trainer(module, optimizer, loss, shards=shards, **where, **options)
    trainer.fit(DATA, batch_size=batch_size, steps=steps, **(fit or {}))
    return trainer


def check(devices, *arguments, **options):
    expected = train(None, *arguments, **options)
    assert train(devices, *arguments, **options).digest() == expected.digest()


# What a program changes between two steps


class Changes(Callback):
    """Changes the model between steps in a way of a table."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, fit):
        if fit.step == 3:
            self.change(fit.model)


def double(module, inputs, output):
    return output * 2


class Keeper:
    """Something that has a method which is a hook."""

    def __init__(self, model):
        self.model = model

    def halve(self, module, inputs, output):
        return output * 0.5 + self.model.last.bias.sum()


def freeze(model):
    model.first.requires_grad_(False)


def evaluate_norm(model):
    model.norm.eval()


def configure(model):
    model.config.dropout = 0.1


def configure_anew(model):
    model.config = SimpleNamespace(dropout=0.2)


def scale(model):
    model.scale = 0.5


def hook(model):
    model.first.register_forward_hook(double)


def hook_by_method(model):
    model.first.register_forward_hook(Keeper(model).halve)


def hook_parameter(model):
    model.last.weight.register_hook(lambda gradient: gradient * 0.5)


def hook_accumulation(model):
    def halve(parameter):
        parameter.grad = parameter.grad * 0.5

    model.last.weight.register_post_accumulate_grad_hook(halve)


CHANGES = [freeze, evaluate_norm, configure, configure_anew, scale, hook, hook_by_method]
CHANGES += [hook_parameter, hook_accumulation]


@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_what_a_program_changes_between_steps(change):
    same = train(None).digest()
    changed = train(None, callbacks=[Changes(change)]).digest()
    assert changed != same
    assert train(CPUS, callbacks=[Changes(change)]).digest() == changed


@pytest.mark.parametrize("change", CHANGES)
def test_copies_have_what_was_changed_before_the_loop(change):
    def made():
        model = Net()
        change(model)
        return model

    check(CPUS, model=made)


class Unhooks(Callback):
    def on_step_begin(self, fit):
        if fit.step == 1:
            self.handles = [
                fit.model.first.register_forward_hook(double),
                fit.model.last.weight.register_hook(lambda gradient: gradient * 0.5),
            ]
        if fit.step == 3:
            for handle in self.handles:
                handle.remove()


def test_copies_lose_the_hooks_that_a_program_removes():
    expected = train(None, callbacks=[Unhooks()]).digest()
    assert train(CPUS, callbacks=[Unhooks()]).digest() == expected
    assert expected != train(None).digest()


class Beside(Net):
    """Keeps a tensor, a list of tensors, a device and a module without registering them."""

    def __init__(self):
        super().__init__()
        self.shift = torch.tensor([0.1, 0.2, 0.3])
        self.shifts = [self.shift, self.shift * 2]
        object.__setattr__(self, "teacher", nn.Linear(6, 3).requires_grad_(False))

    def forward(self, x):
        beside = torch.ones(3, device=self.shift.device) + self.shifts[1].to(x.device)
        assert self.shifts[0] is self.shift
        return super().forward(x) + self.shift + beside + self.teacher(x)


def test_copies_have_what_modules_keep_without_registering_it(accelerator):
    def on_sim():
        model = Beside()
        model.shift = model.shift.to("sim:0")
        model.shifts = [model.shift, model.shift * 2]
        model.teacher.to("sim:0")
        return model

    assert train(SIMS, model=on_sim).digest() == train(None, model=Beside).digest()


def test_a_weight_normed_model_is_copied():
    def normed():
        model = Net()
        with pytest.warns(FutureWarning):
            torch.nn.utils.weight_norm(model.last)
        return model

    check(CPUS, model=normed)


def test_a_parametrized_model_is_copied():
    def parametrized():
        model = Net()
        nn.utils.parametrizations.weight_norm(model.last)
        return model

    check(CPUS, model=parametrized)


# Losses of all kinds


def in_sums(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return {"loss": (losses.sum(), len(losses)), "largest": losses.max()}


class Flat(Net):
    """Takes batches of one sample, too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize(
    "devices", [*(pytest.param(each, marks=pytest.mark.slow) for each in (CPUS, SIMS)), ["sim"] * 3]
)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"clip_value": 0.01},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"channels_last": True},
        {"exact": False},
        {"loss": in_sums},
        # In the last batch of an epoch some shards have no samples.
        {"batch_size": 13, "shards": 13, "model": Flat},
        {"batch_size": 12, "shards": 5, "model": Flat, "fit": {"loader_workers": 1}, "steps": 13},
        {"fit": {"validate": DATA}},
    ],
    ids=" and ".join,
)
def test_options_change_no_bit_on_several_devices(accelerator, devices, options):
    check(devices, **options)


class Draws(Net):
    """Recomputes a layer in the backward pass, which draws from the host's generators."""

    def forward(self, x):
        return super().forward(checkpoint(self.noisy, x, use_reentrant=False))

    def noisy(self, x):
        noise = torch.rand(())  # on the CPU, wherever the rest is
        return x * noise.item() + torch.rand(x.shape, device=x.device)


class DrawsAgain(torch.autograd.Function):
    """Draws in both passes, on the host, without noting what it has drawn."""

    @staticmethod
    def forward(context, x):
        return x * random.random()

    @staticmethod
    def backward(context, gradient):
        return gradient * (1 + random.random() + torch.rand(()).item())


class DrawsBackward(Net):
    def forward(self, x):
        return DrawsAgain.apply(super().forward(x))


@pytest.mark.parametrize("devices", [CPUS, SIMS, ["sim"] * 4])
@pytest.mark.parametrize("model", [Draws, DrawsBackward])
def test_passes_backward_draw_what_they_draw_on_one_device(accelerator, devices, model):
    # With one generator for all, and with one of each device beside the host's.
    assert train(devices, model=model).digest() == train(devices[:1], model=model).digest()


@pytest.mark.parametrize("devices", [SIMS, ["sim:2", "sim:0", "sim:3"]])
def test_a_device_without_a_number_is_that_of_the_batch(accelerator, devices):
    def weighted(model, batch):
        weight = torch.tensor([1.0, 2.0, 3.0], device=batch[0].device.type)
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    check(devices, weighted)


class Momentum(Net):
    """Has a layer that no gradient reaches and a hook of the optimizer changes, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(6, 3).requires_grad_(False)
        self.unused = nn.Linear(6, 3)

    def forward(self, x):
        return super().forward(x) + self.slow(x) + self.unused(x).detach()


class Decays(torch.optim.SGD):
    """Changes parameters without a gradient, past autograd's sight."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99)


@pytest.mark.parametrize("devices", [CPUS, SIMS])
@pytest.mark.parametrize("kind", ["hook", "class"])
def test_copies_have_whatever_an_optimizer_of_ones_own_changes(accelerator, devices, kind):
    def digest(**where):
        torch.manual_seed(3)
        model = Momentum()
        make = torch.optim.SGD if kind == "hook" else Decays
        optimizer = make(model.parameters(), lr=0.1, foreach=True)

        def follow(*_):
            with torch.no_grad():
                model.slow.weight.data.lerp_(model.last.weight[:, :6], 0.1)

        if kind == "hook":
            optimizer.register_step_post_hook(follow)
        trainer = unisono.Trainer(model, optimizer, plain, shards=4, **where)
        trainer.fit(DATA, batch_size=8, steps=6)
        return trainer.digest()

    assert digest(devices=devices) == digest(device="cpu")


# A loop of one's own


def loop(devices, compute, *, steps=5):
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    where = {"device": "cpu"} if devices is None else {"devices": devices}
    run = unisono.Run(model, optimizer, shards=4, **where)
    models = []
    for step in run.steps(DATA, batch_size=8, steps=steps):
        with step:
            for batch in step.shards:
                models.append(step.model)
                step.backward(compute(step, model, batch))
        assert step.model is model
    return unisono.state.digest.digest_of(model, optimizer), models


def test_a_loop_of_ones_own_has_the_model_of_each_batch(accelerator):
    expected, _ = loop(None, lambda step, model, batch: plain(step.model, batch))
    for devices in (CPUS, SIMS, ["sim"] * 3):
        digest, models = loop(devices, lambda step, model, batch: plain(step.model, batch))
        assert digest == expected
        assert len(set(map(id, models))) == len(devices)


@pytest.mark.parametrize("at", ["cpu", "sim"])
def test_a_loss_that_computes_with_a_model_from_outside_is_refused(accelerator, at):
    def from_outside(step, model, batch):
        home = next(model.parameters()).device
        return plain(model, [tensor.to(home) for tensor in batch])

    with pytest.raises(RuntimeError, match=r"the model that it is given.*shard 2, on.*step\.model"):
        loop([at, at], from_outside)


def test_a_loss_that_looks_at_a_model_from_outside_besides_is_refused(accelerator):
    def besides(step, model, batch):
        weight = model.last.weight.norm().to(batch[0].device)
        return plain(step.model, batch) + weight

    for devices in (CPUS, SIMS):
        with pytest.raises(RuntimeError, match="depends on the parameters of another one"):
            loop(devices, besides)


def test_mixed_devices_are_told_with_what_helps(accelerator):
    weight = torch.ones(3, device="sim:0")

    def weighted(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    with pytest.raises(RuntimeError, match="same device") as info:
        train(SIMS, weighted)
    told = "\n".join(info.value.__notes__)
    assert "as buffers of the model" in told
    assert "`step.model`" in told
    assert "in the forward pass of shard 2 on sim:1, over samples" in told


def test_gradients_of_another_backward_are_refused_on_every_device(accelerator):
    def twice(model, batch):
        loss = plain(model, batch)
        if len(batch[0]) and next(model.parameters()).device == torch.device("sim:1"):
            loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match="another `backward` has left some"):
        train(SIMS, twice)


# What goes wrong


@pytest.mark.parametrize("devices", [CPUS, SIMS])
@pytest.mark.parametrize("shard", range(4))
def test_a_loss_that_is_not_finite_names_its_shard(accelerator, devices, shard):
    def infinite(model, batch):
        is_it = bool((batch[0] == DATA[40][0].to(batch[0].device)).all(1).any())
        return plain(model, batch) * (float("inf") if is_it else 1.0)

    def order(epoch, seed):
        front = [n for n in range(50) if n != 40]
        front.insert(16 + shard, 40)  # in the third batch of 8
        return front

    with pytest.raises(unisono.NonFiniteLossError) as info:
        train(devices, infinite, fit={"sampler": order})
    assert (info.value.step, info.value.shard) == (2, shard)


class Fills(Callback):
    def __init__(self, at):
        self.at = at

    def on_step_begin(self, fit):
        if fit.step == 2:
            sim.limit(self.at, torch.sim.memory_allocated(self.at) + 200)


@pytest.mark.parametrize("at", [0, 1])
def test_the_device_whose_memory_is_full_is_named(accelerator, at):
    with pytest.raises(unisono.OutOfMemoryError, match=f"the memory of sim:{at} must") as info:
        train(SIMS, callbacks=[Fills(at)])
    assert info.value.device == f"sim:{at}"
    assert info.value.shard == (0, 2)[at]
    assert ("optimizer state" in info.value.needed) == (at == 0)
    assert info.value.needed["parameters"] > 0


class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if gradient.device.index == 1:
            sim.limit(1, torch.sim.memory_allocated(1))
            torch.empty(10_000, device="sim:1")
        return gradient


def test_the_device_whose_memory_is_full_in_a_backward_pass_is_named(accelerator):
    def hungry(model, batch):
        return F.cross_entropy(Hungry.apply(model(batch[0])), batch[1])

    with pytest.raises(unisono.OutOfMemoryError, match="sim:1") as info:
        train(["sim:0", "sim:1", "sim:2"], hungry)
    assert (info.value.device, info.value.phase, info.value.shard) == ("sim:1", "backward pass", 2)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise KeyError("broken")


def test_an_exception_in_a_backward_pass_names_the_shards_of_all_devices(accelerator):
    def broken(model, batch):
        return F.cross_entropy(Breaks.apply(model(batch[0])), batch[1])

    with pytest.raises(KeyError) as info:
        train(SIMS, broken)
    assert "in the backward passes of shards 0, 2." in "\n".join(info.value.__notes__)


def put(x):
    return torch.zeros_like(x).put_(torch.arange(x.numel(), device=x.device), x)


class PutBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return put(gradient)


class Refused(Net):
    """Has an operation without a deterministic form in one of its passes, on one device."""

    def __init__(self, is_backward, at):
        super().__init__()
        self.is_backward, self.at = is_backward, at

    def forward(self, x):
        hidden = super().forward(x)
        if x.device.index != self.at:
            return hidden
        return PutBackward.apply(hidden) if self.is_backward else put(hidden)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("is_backward", [False, True])
def test_refused_operations_are_named_wherever_they_are(accelerator, is_backward, at):
    with pytest.raises(unisono.NondeterministicError, match=r"`put_` has none") as info:
        train(SIMS, model=lambda: Refused(is_backward, at))
    # In a backward pass the last shard of the round is computed once more, which may have none.
    is_found = not is_backward or at == 1
    assert info.value.file == (__file__ if is_found else "")
    assert info.value.module == ("" if is_found else None)


# What travels


class Counted:
    """Notes what is copied from one device to others."""

    def __init__(self, monkeypatch):
        self.copied = []
        copy = Copies.to_other

        def note(copies, into, source):
            self.copied.append((str(source.device), str(into.device), source.nbytes))
            copy(copies, into, source)

        monkeypatch.setattr(Copies, "to_other", note)


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, SMALL_BYTES // 4 // 6 + 1)
        self.last = nn.Linear(SMALL_BYTES // 4 // 6 + 1, 3)
        self.embed.requires_grad_(False)

    def forward(self, x):
        return self.last(self.embed(x))


def test_a_step_copies_only_what_the_optimizer_has_changed(accelerator, monkeypatch):
    seen = Counted(monkeypatch)
    per_step = []

    class Marks(Callback):
        def on_step_end(self, fit, step):
            per_step.append(seen.copied.copy())
            seen.copied.clear()

    train(["sim:0", "sim:1", "sim:2"], model=Large, callbacks=[Marks()])
    # Of the last layer's gradients from each of the others, then what it is now, to each.
    columns = SMALL_BYTES // 4 // 6 + 1
    num_bytes = 4 * (3 * columns + 3)
    there = [("sim:0", "sim:1", num_bytes), ("sim:0", "sim:2", num_bytes)]
    back = [("sim:1", "sim:0", num_bytes), ("sim:2", "sim:0", num_bytes)]
    assert per_step == [back + there] * 6


def test_tensors_that_are_large_travel_alone(accelerator, monkeypatch):
    seen = Counted(monkeypatch)

    def made():
        model = Large()
        model.embed.requires_grad_(True)
        return model

    train(SIMS, model=made, steps=1)
    sizes = [num_bytes for _, into, num_bytes in seen.copied if into == "sim:1"]
    assert len(sizes) == 2
    assert sizes[0] > SMALL_BYTES > sizes[1]


def test_what_is_copied_late_is_not_changed_before(accelerator, monkeypatch):
    """In an epoch's last batch two devices have nothing to do, and nobody waits for them."""
    monkeypatch.setattr(crossings, "SMALL_BYTES", 100)
    expected = train(None, model=Flat, steps=16)
    found = train(["sim"] * 4, model=Flat, steps=16)
    assert found.digest() == expected.digest()


class Channels(Net):
    """Has statistics that one sample is enough for."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.BatchNorm1d(1), nn.Flatten())


@pytest.mark.parametrize("devices", [CPUS, SIMS, ["sim"] * 3])
def test_buffers_are_kept_where_the_first_shard_with_samples_is_not_the_first(accelerator, devices):
    # The last batch of an epoch has samples for shards 3 and 4 alone.
    check(devices, model=Channels, batch_size=12, shards=5, steps=12)


def test_the_host_waits_for_all_devices_at_once(accelerator):
    waits = []

    class Watches(Callback):
        def on_step_begin(self, fit):
            self.watching = sim.synchronizations()
            self.seen = self.watching.__enter__()

        def on_step_end(self, fit, step):
            self.watching.__exit__(None, None, None)
            waits.append([each.kind for each in self.seen])

    train(SIMS, callbacks=[Watches()])
    assert waits[1:] == [[]] * 5


def test_copies_are_gone_when_the_loop_ends(accelerator):
    before = torch.sim.memory_allocated(1)
    trainer = train(SIMS, model=Flat)
    assert torch.sim.memory_allocated(1) == before
    assert torch.sim.current_device() == 0
    trainer.fit(DATA, batch_size=8, steps=12)
    assert trainer.digest() == train(None, model=Flat, steps=12).digest()


def test_a_program_may_do_anything_between_two_loops():
    def twice(devices):
        trainer = train(devices, steps=3)
        with torch.no_grad():
            trainer.run.model.first.weight.mul_(0.5)
        trainer.run.model.config.sizes.append(3)
        trainer.run.model.last.register_forward_hook(double)
        trainer.fit(DATA, batch_size=8, steps=6)
        return trainer.digest()

    assert twice(CPUS) == twice(None)


# Wrong input


def made(**options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, plain, **options)


WRONG = [
    (["sim:1", "sim:1"], {}, ValueError, "name each device once, but sim:1 is there 2 times"),
    (["cpu", "sim:1"], {}, ValueError, r"of one type.*'cpu', 'sim:1'"),
    (["sim:0", "sim:7"], {}, ValueError, r"worker 0 of this host would need sim:7 and there are 4"),
    (["sim"] * 5, {}, ValueError, r"would need sim:4 and there are 4"),
    (["cuda:0", "cuda:1"], {}, ValueError, "torch finds no 'cuda' device on this machine"),
    (["sim", "sim:1"], {}, ValueError, r"all have a number, or none.*\['sim', 'sim:1'\]"),
    (["nowhere"], {}, TypeError, "must name devices of torch.*one is 'nowhere'"),
    ([7.5], {}, TypeError, "must name devices of torch.*one is 7.5"),
    ("cuda", {}, TypeError, "must be a list of devices.*is 'cuda'"),
    (2, {}, TypeError, "must be a list of devices.*is 2"),
    ([], {}, ValueError, "at least one device, but is empty"),
    (["cpu"] * 3, {"shards": 2}, ValueError, r"number of `devices` \(3\).*pass `shards=3`"),
    (["cpu"] * 2, {"device": "cpu"}, ValueError, "leave one of them out"),
]


@pytest.mark.parametrize(("devices", "options", "kind", "told"), WRONG)
def test_wrong_devices_are_refused_with_what_to_do(accelerator, devices, options, kind, told):
    with pytest.raises(kind, match=told):
        made(devices=devices, **options)


def test_a_model_on_another_device_is_refused(accelerator):
    with pytest.raises(ValueError, match="on this worker's sim:1, but parameter"):
        model = Net().to("sim:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        unisono.Trainer(model, optimizer, plain, devices=["sim:1", "sim:2"])


def test_a_parameter_outside_of_the_model_is_refused():
    scale = nn.Parameter(torch.ones(2))
    model = Net()
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    trainer = unisono.Trainer(model, optimizer, plain, devices=CPUS, shards=2)
    with pytest.raises(ValueError, match=r"another one of shape \(2,\): make it part of the model"):
        trainer.fit(DATA, batch_size=8, steps=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's own, when it is imported
def test_compiled_models_are_refused():
    with pytest.raises(ValueError, match="compiles the model for one device, but `devices` names"):
        made(devices=CPUS, shards=2, compile=True)

    def compiled():
        model = Net()
        model.last.compile()
        return model

    with pytest.raises(ValueError, match="`last` is compiled by torch"):
        train(CPUS, model=compiled)


class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"`copy\.deepcopy` of it raises TypeError: cannot pickle"):
        train(CPUS, model=Locked)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_scripted_model_is_refused():
    def scripted():
        return torch.jit.script(nn.Sequential(nn.Linear(6, 3)))

    with pytest.raises(ValueError, match="pass `device=` with one device"):
        train(CPUS, model=scripted)

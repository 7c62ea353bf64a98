# promises: one-result.4

# %% partial_with_other_arguments: SAME reads
import functools


def scaled(row, by):
    return row * by


class Changed(Rows):
    way = staticmethod(functools.partial(scaled, by=1.0))

    def change(self, row, index):
        return self.way(row)


rows = Changed()


class Stronger(Callback):
    def on_epoch_end(self, fit):
        rows.way = functools.partial(scaled, by=1.0 + fit.epoch)


t = trainer(net(), callbacks=[Stronger()])
fit(t, rows)


# %% bound_method_of_another_object: SAME
class Weak:
    by = 1.0

    def __call__(self, m, b):
        return loss(m, (b[0] * self.by, b[1]))


class Strong(Weak):
    by = 3.0


class Loss:
    compute = Weak().__call__

    def __call__(self, m, b):
        return self.compute(m, b)


criterion = Loss()


class Switches(Callback):
    def on_step_end(self, fit, step):
        if step.number == 5:
            criterion.compute = Strong().__call__


t = trainer(net(), criterion, callbacks=[Switches()])
fit(t)


# %% object_of_another_class: SAME reads
class Nothing:
    def __call__(self, row):
        return row


class Flips:
    def __init__(self, sign):
        self.sign = sign

    def __call__(self, row):
        return row * self.sign


class Changed(Rows):
    augment = Nothing()

    def change(self, row, index):
        return self.augment(row)


rows = Changed()


class Begins(Callback):
    def on_epoch_end(self, fit):
        rows.augment = Flips(0.5 - fit.epoch)


t = trainer(net(), callbacks=[Begins()])
fit(t, rows)

# %% order_of_a_list_of_functions: SAME
steps = [torch.tanh, lambda x: x * 2, torch.sin, lambda x: x + 1, torch.atan]


def processed(m, b):
    x = b[0]
    for one in steps:
        x = one(x)
    return loss(m, (x, b[1]))


class Rotates(Callback):
    def on_step_end(self, fit, step):
        steps.append(steps.pop(0))


t = trainer(net(), processed, callbacks=[Rotates()])
fit(t)


# %% class_of_a_layer: SAME
class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


m = net()


class Grows(Callback):
    def on_epoch_end(self, fit):
        m[0].__class__ = Doubled if fit.epoch % 3 else nn.Linear


t = trainer(m, callbacks=[Grows()])
fit(t)

# %% forward_bound_to_the_object: SAME
import types

m = net()


def residual(self, x):
    return self[2](x + self[1](self[0](x)))


class Rewires(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            m.forward = types.MethodType(residual, m)


t = trainer(m, callbacks=[Rewires()])
fit(t)

# %% indices_of_a_subset: SAME
part = torch.utils.data.Subset(data, list(range(48)))


class NextHalf(Callback):
    def on_epoch_end(self, fit):
        part.indices[:] = [index + 48 if index < 48 else index - 48 for index in part.indices]


t = trainer(net(), callbacks=[NextHalf()])
fit(t, part, epochs=8)

# %% values_of_rare_types: SAME reads
import dataclasses
import datetime
import fractions


@dataclasses.dataclass(frozen=True)
class Config:
    lag: datetime.timedelta
    share: fractions.Fraction
    window: slice


class Changed(Rows):
    config = Config(datetime.timedelta(seconds=1), fractions.Fraction(1, 3), slice(0, 4))

    def change(self, row, index):
        row = row.clone()
        row[self.config.window] *= float(self.config.share) * self.config.lag.total_seconds()
        return row


rows = Changed()


class Widens(Callback):
    def on_epoch_end(self, fit):
        n = fit.epoch + 1
        lag = datetime.timedelta(seconds=n)
        rows.config = Config(lag, fractions.Fraction(1, 1 + n), slice(0, 4 + n % 4))


t = trainer(net(), callbacks=[Widens()])
fit(t, rows)


# %% defaults_and_attributes_of_a_function: SAME
def smooth(m, b, *, eps=0.0):
    return F.cross_entropy(m(b[0]) * smooth.sharpness, b[1], label_smoothing=eps)


smooth.sharpness = 1.0


class Softens(Callback):
    def on_epoch_end(self, fit):
        smooth.__kwdefaults__["eps"] += 0.1
        smooth.sharpness *= 1.5


t = trainer(net(), smooth, callbacks=[Softens()])
fit(t)


# %% attribute_of_a_class: SAME reads
class Changed(Rows):
    strength = 1.0

    def change(self, row, index):
        return row * self.strength


class Stronger(Callback):
    def on_epoch_end(self, fit):
        Changed.strength *= 1.5


t = trainer(net(), callbacks=[Stronger()])
fit(t, Changed())


# %% method_of_a_class: SAME
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def squash(self, x):
        return x

    def forward(self, x):
        return self.net(self.squash(x))


class Squashes(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 2:
            Net.squash = lambda self, x: x.tanh()


t = trainer(Net(), callbacks=[Squashes()])
fit(t)

# %% tables_of_a_dataset: SAME
import numpy as np

tables = {"easy": np.linspace(1, 2, 96, dtype="f4"), "hard": np.linspace(2, -2, 96, dtype="f4")}


class Changed(Rows):
    table = tables["easy"]

    def change(self, row, index):
        return row * float(self.table[index])


rows = Changed()


class Harder(Callback):
    def on_epoch_end(self, fit):
        rows.table = tables["hard"] if fit.epoch % 2 else tables["easy"] * 2


t = trainer(net(), callbacks=[Harder()])
fit(t, rows)

# %% settings_in_a_namespace: SAME
import types

settings = types.SimpleNamespace(norm="l2", weight=0.0, layers=frozenset({0}))


def regularised(m, b):
    penalty = sum(
        m[at].weight.square().sum() if settings.norm == "l2" else m[at].weight.abs().sum()
        for at in sorted(settings.layers)
    )
    return loss(m, b) + settings.weight * penalty


class Sets(Callback):
    def on_epoch_end(self, fit):
        settings.weight += 0.01
        settings.norm = "l1" if fit.epoch > 1 else "l2"
        settings.layers |= {2}


t = trainer(net(), regularised, callbacks=[Sets()])
fit(t)

# %% a_pattern_and_a_set_of_names: SAME
import re

m, chosen = net(), {"re": re.compile("^0")}


def decayed(m, b):
    own = (p.square().sum() for n, p in m.named_parameters() if chosen["re"].search(n))
    return loss(m, b) + 0.05 * sum(own)


class Turns(Callback):
    def on_epoch_end(self, fit):
        chosen["re"] = re.compile("^2" if fit.epoch % 2 else "weight$")


t = trainer(m, decayed, callbacks=[Turns()])
fit(t)

# %% layers_that_come_unfrozen: SAME
m = net()
m[0].requires_grad_(False)
optimizer = SGD(m.parameters(), 0.1)


class Unfreezes(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 2:
            m[0].requires_grad_(True)


t = trainer(m, optimizer=optimizer, callbacks=[Unfreezes()])
fit(t)


# %% functions_and_classes_of_libraries: SAME
class Exchanged(Callback):
    errors = ValueError

    def __init__(self):
        self.ways = [np.mean, np.linalg.norm, max, zip, frozenset, KeyError, torch.Tensor.sum]

    def on_step_end(self, fit, step):
        if self.errors is ValueError and step.number == 9:
            self.ways = [
                np.median,
                np.linalg.det,
                min,
                enumerate,
                slice,
                OSError,
                torch.Tensor.mean,
            ]
            Exchanged.errors = OSError
        mean, size, of_rows, *kinds, of_tensor = self.ways
        rate = abs(float(mean([1.0, 2.0, 6.0]) + of_rows(1, 2) + size(np.eye(2))))
        rate += sum(len(one.__name__) for one in (*kinds, self.errors))
        rate *= float(of_tensor(torch.tensor([0.5, 1.5])))
        fit.optimizer.param_groups[0]["lr"] = 0.001 * rate


t = trainer(net(), callbacks=[Exchanged()])
fit(t)

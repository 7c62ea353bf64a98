# promises: one-result.4 one-result.5
# %% factory_replaced: SAME
from collections import defaultdict


def ten():
    return 0.1


def five():
    return 0.05


class Falls(Callback):
    def __init__(self):
        self.rates = defaultdict(ten)

    def on_step_end(self, fit, step):
        if step.number == 4:
            self.rates.default_factory = five
        fit.optimizer.param_groups[0]["lr"] = self.rates[step.number]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% meta_rate: SAME
class Meta(type):
    rate = 0.1


class Rates(metaclass=Meta):
    pass


class Falls(Callback):
    def on_step_end(self, fit, step):
        type(Rates).rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = Rates.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% setter_changes_a_global: SAME
count = 0


class Falls(Callback):
    @property
    def rate(self):
        return 0.1

    @rate.setter
    def rate(self, value):
        global count
        count += 1
        value.param_groups[0]["lr"] = 0.1 * 0.95**count

    def on_step_end(self, fit, step):
        self.rate = fit.optimizer


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% enum_method_changes_a_global: SAME
import enum

count = 0


class Phase(enum.Enum):
    A = 1

    def rate(self):
        global count
        count += 1
        return 0.1 * 0.95**count


class Falls(Callback):
    phase = Phase.A

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = self.phase.rate()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% flags_composed: SAME
import enum


class Kinds(enum.Flag):
    A = 1
    B = 2


class Falls(Callback):
    def __init__(self):
        self.flags = Kinds.A

    def on_step_end(self, fit, step):
        if step.number == 3:
            self.flags = Kinds.A | Kinds.B
        if Kinds.B in self.flags:
            fit.optimizer.param_groups[0]["lr"] *= 0.95


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% lambdas_alike: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.pick = [lambda e: e in {4, 5, 16, 17, 18, 20}, lambda e: e in {1, 2, 3}][0]

    def on_step_end(self, fit, step):
        if self.pick(step.number):
            fit.optimizer.param_groups[0]["lr"] *= 0.7


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% structured_with_objects: TOLD looked
class Falls(Callback):
    def __init__(self):
        self.t = np.zeros(1, dtype=[("a", object)])
        self.t[0]["a"] = 0.1

    def on_step_end(self, fit, step):
        self.t["a"][0] = self.t["a"][0] * 0.95
        fit.optimizer.param_groups[0]["lr"] = self.t["a"][0]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% defaults_of_optimizer: SAME
class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.defaults["lr"] *= 0.95
        fit.optimizer.param_groups[0]["lr"] = fit.optimizer.defaults["lr"]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% cell_that_is_deleted: SAME
def make():
    x = 0.1

    def step(lr):
        nonlocal x
        try:
            x
        except NameError:
            x = lr * 0.9
            return lr
        lr = x
        del x
        return lr

    return step


falls = make()


class Falls(Callback):
    def on_step_end(self, fit, step):
        group = fit.optimizer.param_groups[0]
        group["lr"] = falls(group["lr"])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% tensor_keys: SAME
class Falls(Callback):
    def __init__(self):
        self.d = {torch.zeros(3): 0.1}

    def on_step_end(self, fit, step):
        rate = next(iter(self.d.values())) * 0.95
        self.d.clear()
        self.d[torch.zeros(3)] = rate
        fit.optimizer.param_groups[0]["lr"] = rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% array_resized: SAME
mask = np.array([1.0, 0.5, 0.25])


def masked(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * float(mask.sum())


class Shrinks(Callback):
    def on_step_end(self, fit, step):
        if step.number == 3:
            mask.resize(1, refcheck=False)


t = trainer(net(), masked, callbacks=[Shrinks()])
fit(t)


# %% series_in_place: SAME
import pandas as pd


class Falls(Callback):
    def __init__(self):
        self.d = pd.Series([0.1, 0.2])

    def on_step_end(self, fit, step):
        self.d[0] = float(self.d[0]) * 0.95
        fit.optimizer.param_groups[0]["lr"] = float(self.d[0])


t = trainer(net(), callbacks=[Falls()])
fit(t)

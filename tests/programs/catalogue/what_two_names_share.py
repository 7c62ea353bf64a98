# promises: one-result.4 one-result.5
# %% first_of_two_that_saves: SAME
class ASaves(Callback):
    def __init__(self):
        self.shared = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Other(Callback):
    def __init__(self, one):
        self.one, self.mine = one, None

    def on_step_end(self, fit, step):
        if self.mine is None:
            self.mine = self.one.shared = {"rate": 0.1}
        self.mine["rate"] *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.mine["rate"]


a = ASaves()
t = trainer(net(), callbacks=[a, Other(a)])
fit(t)


# %% beside_a_lock: SAME
import threading


class Falls(Callback):
    def __init__(self):
        self.a = self.b = None

    def on_step_end(self, fit, step):
        if self.b is None:
            self.b = {"rate": 0.1}
            self.a = (self.b, threading.Lock())
        self.b["rate"] *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.b["rate"]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% count_in_a_tuple: SAME
import itertools


class Falls(Callback):
    def __init__(self):
        self.both = (itertools.count(), 0.95)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * self.both[1] ** next(self.both[0])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% count_in_a_default: SAME
import itertools


def tick(counter=itertools.count()):
    return next(counter)


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** tick()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% two_partials_of_one_count: SAME
import itertools

c = itertools.count()
tick = functools.partial(next, c)
tock = functools.partial(next, c, None)


class Falls(Callback):
    def __init__(self):
        self.pairs = {"a": (c, tick)}

    def on_step_end(self, fit, step):
        n = tick() + tock() + next(self.pairs["a"][0]) + self.pairs["a"][1]()
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.99**n


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% keyword_of_a_partial: SAME
import itertools


def tick(by, *, counter):
    return by ** next(counter)


falls = functools.partial(tick, 0.95, counter=itertools.count())


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * falls()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% count_in_a_zip: SAME
import itertools


class Falls(Callback):
    def __init__(self):
        self.z = zip(itertools.count(), itertools.cycle([0.95, 0.9]))

    def on_step_end(self, fit, step):
        n, by = next(self.z)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * by**n


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% ids_by_default_factory: SAME
import itertools
from collections import defaultdict

ids = defaultdict(itertools.count().__next__)


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** ids[step.number]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% iterators_in_a_set: SAME
class Falls(Callback):
    def __init__(self):
        self.rates = {iter([0.1 * 0.95**n for n in range(24)])}

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = next(next(iter(self.rates)))


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% named_tuple_of_iterators: SAME
from typing import Any, NamedTuple


class Pair(NamedTuple):
    a: Any
    b: Any


class Falls(Callback):
    def __init__(self):
        self.rates = Pair(iter([0.1 * 0.95**n for n in range(24)]), 3)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = next(self.rates.a)


t = trainer(net(), callbacks=[Falls()])
fit(t)

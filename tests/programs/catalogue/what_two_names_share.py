# promises: one-result.4 one-result.5
# %% view_of_new_tensor: SAME
class Falls(Callback):
    def on_step_end(self, fit, step):
        if step.number == 3:
            self.base = torch.full((4,), 0.1)
            self.part = self.base[:2]
        if step.number > 3:
            self.part.mul_(0.95)
            fit.optimizer.param_groups[0]["lr"] = float(self.base[0])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% windows_of_a_buffer: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.buffer = torch.full((8,), 0.1, dtype=torch.bfloat16)
        self.windows = [self.buffer[at : at + 4] for at in range(5)]

    def on_step_end(self, fit, step):
        self.windows[step.number % 5].mul_(0.97)
        fit.optimizer.param_groups[0]["lr"] = float(self.buffer.float().mean())


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% three_kinds_in_one_memory: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.a = np.arange(12, dtype=np.float64).reshape(3, 4) / 100
        self.b = torch.from_numpy(self.a)
        self.c = self.a[::-1, 1::2]
        self.d = nn.Parameter(self.b[1, 2:])
        self.e = self.a.view(np.int64)

    def on_step_end(self, fit, step):
        self.c *= 1.01
        with torch.no_grad():
            self.d.mul_(1.1)
        self.b[1, 3] += 0.001
        self.e[0, 0] += 4607182418800017408 // 100
        fit.optimizer.param_groups[0]["lr"] = float(np.abs(self.a).sum() % 1) / 10


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% new_array_over_old: SAME
class Falls(Callback):
    def __init__(self):
        self.base = np.full(4, 0.1)

    def on_begin(self, fit):
        self.part = self.base[:2]

    def on_step_end(self, fit, step):
        self.part *= 0.95
        fit.optimizer.param_groups[0]["lr"] = float(self.base[0])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% array_over_a_weight: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.w = fit.model[0].weight.detach().numpy()

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = float(np.abs(self.w).mean())


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% new_closures_share: SAME
def pair():
    n = 0.1

    def falls():
        nonlocal n
        n *= 0.95

    def now():
        return n

    return falls, now


class Falls(Callback):
    def on_begin(self, fit):
        self.falls, self.now = pair()

    def on_step_end(self, fit, step):
        self.falls()
        fit.optimizer.param_groups[0]["lr"] = self.now()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% new_closure_of_old_cell: SAME
def make():
    n = 0.1

    def falls():
        nonlocal n
        n *= 0.95

    def reader():
        return lambda: n

    return falls, reader


falls, reader = make()


class Falls(Callback):
    def on_begin(self, fit):
        self.now = reader()

    def on_step_end(self, fit, step):
        falls()
        fit.optimizer.param_groups[0]["lr"] = self.now()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% recursive_closures: SAME
def pair():
    n = 0.1

    def falls(k):
        nonlocal n
        n *= 0.99
        return falls(k - 1) if k else now()

    def now():
        return n + 0 * len(falls.__name__)

    return falls, now


class Falls(Callback):
    def on_begin(self, fit):
        self.falls, self.now = pair()

    def on_step_end(self, fit, step):
        self.falls(2)
        fit.optimizer.param_groups[0]["lr"] = self.now()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% new_closure_of_a_loop: REFUSED
# says: shares the variable `rate`|the function main
def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    rate, now = 0.1, None
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if not step.is_done:
            continue
        if now is None:
            now = lambda: rate
        rate = rate * 0.95
        opt.param_groups[0]["lr"] = now()
    return r


r = main()


# %% closure_of_constants_of_a_loop: SAME
def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    by, seen, now = 0.95, [], None
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if not step.is_done:
            continue
        if now is None:
            now = lambda: by ** len(seen)
        seen.append(1)
        opt.param_groups[0]["lr"] = 0.1 * now()
    return r


r = main()


# %% generators_share_bits: SAME
class Falls(Callback):
    def on_begin(self, fit):
        bits = np.random.PCG64(7)
        self.a, self.b = np.random.Generator(bits), np.random.Generator(bits)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * self.a.random() * self.b.random()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% borg: SAME
class Borg:
    shared = {}

    def __init__(self):
        self.__dict__ = self.shared


Borg().rate = 0.1


class Falls(Callback):
    def on_begin(self, fit):
        self.a, self.b = Borg(), Borg()

    def on_step_end(self, fit, step):
        self.a.rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.b.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


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


# %% count_in_a_zip: SAME|REFUSED
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


# %% view_of_complex: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.base = np.full(4, 0.1 + 0j)
        self.part = self.base[:2]

    def on_step_end(self, fit, step):
        self.part *= 0.95
        fit.optimizer.param_groups[0]["lr"] = float(self.base[0].real)


t = trainer(net(), callbacks=[Falls()])
fit(t)

# promises: one-result.4 one-result.5

# %% order_of_recency: SAME
import collections


class Recent(Callback):
    def __init__(self):
        self.order = collections.OrderedDict.fromkeys(range(8), 1.0)

    def on_step_end(self, fit, step):
        self.order.move_to_end(int(step.means["loss"] * 1e4) % 8)
        with torch.no_grad():
            fit.model[0].bias[list(self.order)[0]] *= 0.5


t = trainer(net(), callbacks=[Recent()])
fit(t)

# %% counters_and_defaults: SAME
import collections


class Votes(Callback):
    def __init__(self):
        self.votes, self.sums = collections.Counter(), collections.defaultdict(float)

    def on_step_end(self, fit, step):
        key = int(step.means["loss"] * 1e4) % 3
        self.votes[key] += 1
        self.sums[key] += step.means["loss"]

    def on_step_begin(self, fit):
        if self.votes:
            key = self.votes.most_common(1)[0][0]
            fit.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.sums[key])


t = trainer(net(), callbacks=[Votes()])
fit(t)

# %% a_generator_of_numpy: SAME
import numpy as np


class Shakes(Callback):
    rng = np.random.default_rng(3)

    def on_step_end(self, fit, step):
        with torch.no_grad():
            fit.model[2].bias.add_(
                torch.from_numpy(self.rng.normal(size=2).astype("f4")), alpha=0.1
            )


t = trainer(net(), callbacks=[Shakes()])
fit(t)


# %% a_generator_of_torch: SAME
class Shakes(Callback):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def on_step_end(self, fit, step):
        with torch.no_grad():
            fit.model[2].bias.add_(torch.randn(2, generator=self.generator), alpha=0.1)


t = trainer(net(), callbacks=[Shakes()])
fit(t)

# %% rates_of_a_cycle: REFUSED|SAME
import itertools


class Cycles(Callback):
    rates = itertools.cycle([0.1, 0.01, 0.2, 0.05, 0.3])

    def on_step_begin(self, fit):
        fit.optimizer.param_groups[0]["lr"] = next(self.rates)


t = trainer(net(), callbacks=[Cycles()])
fit(t)

# %% lines_of_a_file: REFUSED|SAME
import io


class Plan(Callback):
    def __init__(self):
        self.lines = io.StringIO("\n".join(str(0.3 / (1 + n)) for n in range(40)))

    def on_step_begin(self, fit):
        fit.optimizer.param_groups[0]["lr"] = float(self.lines.readline())


t = trainer(net(), callbacks=[Plan()])
fit(t)

# %% a_queue_of_threads: REFUSED|SAME
import queue


class Waits(Callback):
    def __init__(self):
        self.losses = queue.Queue()

    def on_step_end(self, fit, step):
        self.losses.put(step.means["loss"])
        if self.losses.qsize() > 3:
            fit.optimizer.param_groups[0]["lr"] = 0.1 * self.losses.get()


t = trainer(net(), callbacks=[Waits()])
fit(t)


# %% objects_with_slots: SAME
class Welford:
    __slots__ = ("mean", "n", "square")

    def __init__(self):
        self.n, self.mean, self.square = 0, 0.0, 0.0

    def add(self, value):
        self.n += 1
        off = value - self.mean
        self.mean += off / self.n
        self.square += off * (value - self.mean)


class Spread(Callback):
    def __init__(self):
        self.seen = [Welford(), Welford()]

    def on_step_end(self, fit, step):
        one = self.seen[step.number % 2]
        one.add(step.means["loss"])
        fit.optimizer.param_groups[0]["lr"] = 0.1 / (1 + one.square)


t = trainer(net(), callbacks=[Spread()])
fit(t)


# %% bytes_that_are_set: SAME
class Bits(Callback):
    def __init__(self):
        self.bits = bytearray(8)

    def on_step_end(self, fit, step):
        self.bits[int(step.means["loss"] * 1e5) % 8] ^= 1
        with torch.no_grad():
            fit.model[0].bias.mul_(1 - 0.1 * torch.tensor(list(self.bits)))


t = trainer(net(), callbacks=[Bits()])
fit(t)

# %% sorted_records: SAME
import bisect
import typing


class Record(typing.NamedTuple):
    loss: float
    step: int
    weights: torch.Tensor


class Best(Callback):
    def __init__(self):
        self.best: list[Record] = []

    def on_step_end(self, fit, step):
        bias = fit.model[2].bias.detach().clone()
        bisect.insort(self.best, Record(step.means["loss"], step.number, bias))
        del self.best[3:]

    def on_epoch_end(self, fit):
        with torch.no_grad():
            fit.model[2].bias.copy_(sum(one.weights for one in self.best) / len(self.best))


t = trainer(net(), callbacks=[Best()])
fit(t)


# %% the_rest_of_a_list: REFUSED|SAME
class Pops(Callback):
    def __init__(self):
        self.rest = iter([0.3 / (1 + n) for n in range(40)])

    def on_step_begin(self, fit):
        fit.optimizer.param_groups[0]["lr"] = next(self.rest)


t = trainer(net(), callbacks=[Pops()])
fit(t)


# %% an_exponential_average_in_a_closure: SAME
def patience(factor):
    best, since = float("inf"), 0

    class Plateau(Callback):
        def on_step_end(self, fit, step):
            nonlocal best, since
            since = 0 if step.means["loss"] < best else since + 1
            best = min(best, step.means["loss"])
            if since > 2:
                fit.optimizer.param_groups[0]["lr"] *= factor
                since = 0

    return Plateau()


t = trainer(net(), callbacks=[patience(0.5)])
fit(t)

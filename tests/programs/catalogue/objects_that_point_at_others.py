# promises: one-result.4 one-result.5 one-result.8
# %% previous_step: SAME
class Falls(Callback):
    previous = None

    def on_step_end(self, fit, step):
        if self.previous is not None and step.means["loss"] > self.previous.means["loss"]:
            fit.optimizer.param_groups[0]["lr"] *= 0.9
        self.previous = step


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% history_of_means: SAME
class Falls(Callback):
    def __init__(self):
        self.history = []

    def on_step_end(self, fit, step):
        self.history.append(step.means)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.97 ** len(self.history)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% previous_step_of_a_loop: SAME
def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    previous = None
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if not step.is_done:
            continue
        if previous is not None and step.loss > previous.loss:
            opt.param_groups[0]["lr"] *= 0.9
        previous = step
    return r


r = main()


# %% own_ema: SAME
from unisono.callbacks import EMA


class Mine(EMA):
    count = 0

    def on_step_end(self, fit, step):
        super().on_step_end(fit, step)
        self.count += 1
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95**self.count


t = trainer(net(), callbacks=[Mine(0.9)])
fit(t)


# %% weak_set_of_new_ones: SAME
import weakref


class Item:
    pass


class Falls(Callback):
    def __init__(self):
        self.alive, self.held = weakref.WeakSet(), []

    def on_step_end(self, fit, step):
        item = Item()
        self.held.append(item)
        self.alive.add(item)
        del item
        if len(self.held) > 4:
            del self.held[0]
        fit.optimizer.param_groups[0]["lr"] = 0.1 / len(self.alive)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% weak_values_of_new_ones: SAME
import weakref


class Item:
    pass


class Falls(Callback):
    def __init__(self):
        self.alive, self.held = weakref.WeakValueDictionary(), []

    def on_step_end(self, fit, step):
        item = Item()
        self.held.append(item)
        self.alive[step.number] = item
        del item
        if len(self.held) > 4:
            del self.held[0]
        fit.optimizer.param_groups[0]["lr"] = 0.1 / len(self.alive)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% weak_methods_subscribed: SAME
import weakref


class Falls:
    rate = 0.1

    def after(self):
        self.rate *= 0.95
        return self.rate


class Bus(Callback):
    def __init__(self):
        self.listeners, self.held = [], []

    def on_step_end(self, fit, step):
        if step.number == 3:
            self.held.append(Falls())
            self.listeners.append(weakref.WeakMethod(self.held[0].after))
        for each in self.listeners:
            if (method := each()) is not None:
                fit.optimizer.param_groups[0]["lr"] = method()


t = trainer(net(), callbacks=[Bus()])
fit(t)


# %% finalized: REFUSED
# says: with a finalizer
import weakref

gone = []


class Item:
    def __init__(self):
        weakref.finalize(self, gone.append, 1)


class Falls(Callback):
    def __init__(self):
        self.held = []

    def on_step_end(self, fit, step):
        self.held.append(Item())
        if len(self.held) > 6:
            del self.held[0]
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** len(gone)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% weakref_with_callback: SAME
import weakref

gone = []


class Item:
    pass


def note(ref):
    gone.append(1)


class Falls(Callback):
    def __init__(self):
        self.held, self.refs = [], []

    def on_step_end(self, fit, step):
        self.held.append(Item())
        self.refs.append(weakref.ref(self.held[-1], note))
        if len(self.held) > 6:
            del self.held[0]
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** len(gone)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% scores_by_id_of_new_ones: SAME
class Item:
    pass


class Falls(Callback):
    def __init__(self):
        self.items, self.scores = [], {}

    def on_step_end(self, fit, step):
        item = Item()
        self.items.append(item)
        self.scores[id(item)] = 0.01 * (step.number % 5)
        recent = self.items[-4:]
        fit.optimizer.param_groups[0]["lr"] = 0.05 + sum(
            self.scores.get(id(one), 0.0) for one in recent
        )


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% ids_in_a_set: SAME
class Falls(Callback):
    def __init__(self):
        self.frozen = set()

    def on_step_end(self, fit, step):
        parameters = [*fit.model.parameters()]
        if step.number % 3 == 0:
            self.frozen.add(id(parameters[(step.number // 3) % 4]))
        with torch.no_grad():
            for each in parameters:
                if id(each) in self.frozen:
                    each.mul_(0.99)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% ids_in_a_list_of_pairs: SAME
class Falls(Callback):
    def __init__(self):
        self.picked, self.best = [], None

    def on_step_end(self, fit, step):
        parameters = [*fit.model.parameters()]
        self.picked.append((id(parameters[step.number % 4]), step.number))
        self.best = self.picked[0][0]
        known = {id(each): each for each in parameters}
        with torch.no_grad():
            for key, number in self.picked[-3:]:
                if key in known:
                    known[key].mul_(1 - 0.001 * number)
            if self.best in known:
                known[self.best].mul_(0.99)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% graph_with_hashes: SAME
class Node:
    def __init__(self, name):
        self.name, self.near = name, set()

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


class Falls(Callback):
    def __init__(self):
        self.first = self.last = Node(0)

    def on_step_end(self, fit, step):
        new = Node(step.number + 1)
        new.near.add(self.last)
        self.last.near.add(new)
        self.last = new
        n, seen, todo = 0, set(), [self.first]
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                n += 1
                todo.extend(one.near)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95**n


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% transitions: SAME
from collections import namedtuple


class Transition(namedtuple("Transition", "state reward")):
    def value(self):
        return float(self.state.sum()) + self.reward


class Falls(Callback):
    def __init__(self):
        self.replay = []

    def on_step_end(self, fit, step):
        self.replay.append(Transition(torch.full((2,), step.number / 100), 0.5))
        fit.optimizer.param_groups[0]["lr"] = 0.01 * sum(one.value() for one in self.replay[-5:])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% linked_list: REFUSED
# says: a chain of more than 100 objects
class Node:
    def __init__(self, value, before):
        self.value, self.before = value, before


class Falls(Callback):
    def __init__(self):
        self.last = None

    def on_step_end(self, fit, step):
        for n in range(100):
            self.last = Node(step.number + n, self.last)
        total, one = 0, self.last
        while one is not None:
            total += one.value
            one = one.before
        fit.optimizer.param_groups[0]["lr"] = 0.1 / (1 + total % 7)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% handler_with_a_list: SAME
import logging

log = logging.getLogger("mine")
log.propagate = False


class Collect(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


handler = Collect()
log.addHandler(handler)


class Falls(Callback):
    def on_step_end(self, fit, step):
        log.warning("step %d", step.number)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** len(handler.texts)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% handler_with_a_counter: SAME
import logging
from collections import Counter

log = logging.getLogger("mine")
log.propagate = False


class Count(logging.Handler):
    def __init__(self):
        super().__init__()
        self.by_level = Counter()

    def emit(self, record):
        self.by_level[record.levelname] += 1


log.addHandler(Count())


class Falls(Callback):
    def on_step_end(self, fit, step):
        log.warning("step %d", step.number)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** log.handlers[0].by_level["WARNING"]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% thread_with_a_list: SAME
import threading


class Scores(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.scores = []

    def run(self):
        pass

    def add(self, score):
        self.scores.append(score)


scores = Scores()


class Falls(Callback):
    def on_step_end(self, fit, step):
        scores.add(step.number)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** len(scores.scores)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% queue_of_its_own: SAME
import queue


class Bag(queue.Queue):
    def _init(self, maxsize):
        self.items = []

    def _qsize(self):
        return len(self.items)

    def _put(self, item):
        self.items.append(item)

    def _get(self):
        return self.items.pop(0)


class Falls(Callback):
    def __init__(self):
        self.bag = Bag()

    def on_step_end(self, fit, step):
        self.bag.put(step.number)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** self.bag.qsize()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% cached_property_with_a_global: SAME
count = 0


class Rates:
    @functools.cached_property
    def rate(self):
        global count
        count += 1
        return 0.1 * 0.95**count


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = Rates().rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% list_that_has_no_length: SAME
class Ring(list):
    def __len__(self):
        raise TypeError("a ring has no end")


class Falls(Callback):
    def __init__(self):
        self.ring = Ring([0.1, 0.09, 0.08])

    def on_step_end(self, fit, step):
        self.ring.append(self.ring.pop(0) * 0.95)
        fit.optimizer.param_groups[0]["lr"] = self.ring[0]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% proxy_of_another_class: SAME
class Proxy:
    def __init__(self, of):
        object.__setattr__(self, "_of", of)

    @property
    def __class__(self):
        return type(self._of)

    def __getattr__(self, name):
        return getattr(self._of, name)

    def __getitem__(self, key):
        return self._of[key]

    def __setitem__(self, key, value):
        self._of[key] = value


def lazily(make):
    return Proxy(make())


class Falls(Callback):
    def __init__(self):
        self.cfg = lazily(lambda: {"rate": 0.1})

    def on_step_end(self, fit, step):
        self.cfg["rate"] *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.cfg["rate"]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% record_of_an_array: TOLD looked
class Falls(Callback):
    def __init__(self):
        self.row = np.zeros(1, dtype=[("rate", "f8"), ("n", "i4")])[0]
        self.row["rate"] = 0.1

    def on_step_end(self, fit, step):
        self.row["rate"] *= 0.95
        self.row["n"] += 1
        fit.optimizer.param_groups[0]["lr"] = float(self.row["rate"]) * 0.99 ** int(self.row["n"])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% scale_behind_a_proxy: REFUSED
# says: carries over
class Proxy:
    def __init__(self, of):
        object.__setattr__(self, "_of", of)

    @property
    def __class__(self):
        return type(self._of)

    def get(self, key):
        return self._of.get(key)

    def __getitem__(self, key):
        return self._of[key]

    def __setitem__(self, key, value):
        self._of[key] = value


def make():
    return Proxy({})


stats = make()


def mine(m, b):
    if stats.get("std") is None:
        stats["std"] = b[0].std().item()
    return F.cross_entropy(m(b[0] / stats["std"]), b[1])


t = trainer(net(), mine)
fit(t)


# %% scale_in_the_environment: REFUSED
# says: MY_STD` carries over
import os


def mine(m, b):
    std = float(os.environ.setdefault("MY_STD", str(b[0].std().item())))
    return F.cross_entropy(m(b[0] / std), b[1])


t = trainer(net(), mine)
fit(t)


# %% scale_in_a_handler: REFUSED
# says: carries over
import logging


class Memory(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append(record.args[0])


log = logging.getLogger("mine")
log.propagate = False
memory = Memory()
log.addHandler(memory)


def mine(m, b):
    log.warning("%s", b[0].std().item())
    return F.cross_entropy(m(b[0] / memory.seen[0]), b[1])


t = trainer(net(), mine)
fit(t)


# %% scale_on_a_function: REFUSED
# says: carries over
seen = set()


def mine(m, b):
    seen.update(b[1].tolist())
    if len(seen) > 0 and not hasattr(mine, "std"):
        mine.std = b[0].std().item()
    return F.cross_entropy(m(b[0] / mine.std), b[1])


t = trainer(net(), mine)
fit(t)

# promises: conditions.1

# %% loop_in_a_loop_of_epochs: SAME stop=10 kill=10 crashes
run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
seen = []
epoch = 0
for i in range(4):
    with torch.no_grad():
        old = m(X[:32]).log_softmax(1)
        actions = old.argmax(1)
    rollout = TensorDataset(X[:32], actions, (actions == Y[:32]).float(), old)
    for _ in range(3):
        epoch += 1
        for step in run.steps(rollout, batch_size=16, epochs=epoch):
            with step:
                for x, action, reward, before in step.shards:
                    now = m(x).log_softmax(1)
                    kl = (before.exp() * (before - now)).sum(1).mean()
                    chosen = now.gather(1, action[:, None])[:, 0]
                    step.backward({"loss": -(chosen * (reward - 0.5)).mean(), "kl": kl})
        seen.append(round(step.means["kl"], 10))
        if step.means["kl"] > 0.001:
            break
result = seen


# %% helper_generator_that_trains: SAME stop=10 kill=10 crashes
def train(r, epochs):
    for step in r.steps(data, batch_size=32, epochs=epochs):
        with step:
            for b in step.shards:
                step.backward(loss(r.model, b))
        yield step


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen = []
    for i in range(8):
        for step in train(run, i + 1):
            if not step.is_done:
                continue
            last = step.loss
        seen.append(round(last, 10))
        run.optimizer.param_groups[0]["lr"] = 0.01 * last
    return run, seen


run, result = main()


# %% stored_before_at_the_module: SAME stop=10 kill=10 crashes
run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
seen = []
for i in range(8):
    steps = run.steps(data, batch_size=32, epochs=i + 1)
    total, count = 0.0, 0
    for step in steps:
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if step.is_done:
            total, count = total + step.loss, count + 1
    seen.append(round(total / count, 10))
    seen.append(round(step.loss, 10))
result = seen


# %% object_with_an_iterator: SAME stop=10 kill=10 crashes
class Loop:
    def __init__(self, run):
        self.run, self.i = run, 0

    def __iter__(self):
        self.i += 1
        return iter(self.run.steps(data, batch_size=32, epochs=self.i))


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen, loop = [], Loop(run)
    for i in range(8):
        for step in loop:
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
        seen.append(round(step.loss, 10))
    return run, seen


run, result = main()


# %% generator_of_phases: SAME stop=10 kill=10 crashes
def phases(run):
    for i in range(8):
        yield i, run.steps(data, batch_size=32, epochs=i + 1)


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen = []
    for i, steps in phases(run):
        for step in steps:
            with step:
                for b in step.shards:
                    step.backward(loss(m, b) * (1 + i))
        seen.append(round(step.loss, 10))
    return run, seen


run, result = main()


# %% flat_generator_of_phases: SAME stop=10 kill=10 crashes
def flat(run):
    for i in range(8):
        for step in run.steps(data, batch_size=32, epochs=i + 1):
            yield i, step


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen, before, last = [], 0, 0.0
    for i, step in flat(run):
        if i != before:
            seen.append(round(last, 10))
            before = i
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * (1 + i))
        if step.is_done:
            last = step.loss
    return run, seen


run, result = main()


# %% a_closure_trains: SAME stop=10 kill=10 crashes
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen, last = [], 0.0

    def epoch(i):
        nonlocal last
        for step in run.steps(data, batch_size=32, epochs=i + 1):
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
            last = step.loss

    for i in range(8):
        epoch(i)
        seen.append(round(last, 10))
    return run, seen


run, result = main()


# %% next_in_while: SAME stop=10 kill=10 crashes
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen = []
    for i in range(8):
        steps, last = run.steps(data, batch_size=32, epochs=i + 1), None
        while True:
            step = next(steps, None)
            if step is None:
                break
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
            last = step
        seen.append(round(last.loss, 10))
    return run, seen


run, result = main()


# %% a_function_takes_the_loop: SAME stop=10 kill=10 crashes
def train(m, steps):
    for step in steps:
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
    return step.loss


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen = []
    for i in range(8):
        seen.append(round(train(m, run.steps(data, batch_size=32, epochs=i + 1)), 10))
    return run, seen


run, result = main()


# %% left_early_each_time: SAME stop=10 kill=10 crashes
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen = []
    for i in range(8):
        for k, step in enumerate(run.steps(data, batch_size=32, epochs=100)):
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
            if step.number % 3 == 2:
                break
        seen.append((step.number, round(step.loss, 10)))
        run.optimizer.param_groups[0]["lr"] = 0.01 * step.loss
    return run, seen


run, result = main()


# %% rate_set_between: SAME stop=10 kill=10 crashes
def main():
    run = unisono.Run(m := net(), o := Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    total = 1.0
    for i in range(8):
        steps = run.steps(data, batch_size=32, epochs=i + 1)
        o.param_groups[0]["lr"] = 0.01 * total
        total = 0.0
        for step in steps:
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
            if step.is_done:
                total += step.loss
    return run, total


run, result = main()


# %% weights_moved_between: SAME stop=10 kill=10 crashes
def main():
    run = unisono.Run(m := net(), o := Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    for i in range(8):
        steps = run.steps(data, batch_size=32, epochs=i + 1)
        with torch.no_grad():
            m[0].weight.mul_(0.9)
        for step in steps:
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
    return run


run = main()


# %% counted_between: SAME stop=10 kill=10 crashes
class Log:
    def __init__(self):
        self.seen, self.i = [], 0


def main():
    run = unisono.Run(m := net(), o := Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    log = Log()
    for i in range(8):
        steps = run.steps(data, batch_size=32, epochs=i + 1)
        log.i += 1
        log.seen.append(log.i)
        for step in steps:
            with step:
                for b in step.shards:
                    step.backward(loss(m, b) * log.i)
    return run, log.seen


run, result = main()


# %% kept_in_an_object: SAME stop=10 kill=10 crashes
class Trainer:
    def __init__(self):
        self.m = net()
        self.run = unisono.Run(self.m, SGD(self.m.parameters(), 0.1), shards=6, directory=DIR)
        self.steps = self.run.steps(data, batch_size=16, epochs=4)
        self.ema = None

    def epoch(self):
        for step in self.steps:
            with step:
                for b in step.shards:
                    step.backward(loss(self.m, b) * (1 + (self.ema or 0.0)))
            if not step.is_done:
                continue
            self.ema = step.loss if self.ema is None else 0.9 * self.ema + 0.1 * step.loss
            if step.number % 6 == 5:
                return True
        return False

    def fit(self):
        self.seen = []
        while self.epoch():
            self.seen.append(round(self.ema, 8))


t = Trainer()
t.fit()
run, result = t.run, t.seen


# %% several_made_first: REFUSED
# says: begun: call `run.steps` where
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for steps in [run.steps(data, batch_size=16, epochs=e) for e in (1, 2, 4)]:
    for step in steps:
        with step:
            for b in step.shards:
                step.backward(loss(m, b))


# %% left_while_the_leader_is_slow: SAME stop=10 kill=10
import time

from unisono.training.boundary import Boundary

leave = Boundary.leave


def slowly(boundary):
    time.sleep(0.3 * boundary._team.leads_host)
    leave(boundary)


Boundary.leave = slowly


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen = []
    for _ in range(8):
        for step in run.steps(data, batch_size=32, epochs=100):
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
            if step.number % 3 == 2:
                break
        seen.append((step.number, round(step.loss, 10)))
    return run, seen


run, result = main()

# promises: conditions.1


# %% phase_counted_in_on_end: SAME stop=14 kill=14 crashes
class Phases(Callback):
    def __init__(self):
        self.phase = 1.0

    def on_end(self, fit, summary):
        self.phase *= 0.3


phases = Phases()
t = trainer(net(), lambda m, b: loss(m, b) * phases.phase, callbacks=[phases])
fit(t, epochs=2)
fit(t, epochs=4)


# %% weights_averaged_in_on_end: SAME stop=14 kill=14 crashes
class Averages(Callback):
    def __init__(self):
        self.sums, self.count = None, 0

    def on_step_end(self, fit, step):
        now = [p.detach().clone() for p in fit.model.parameters()]
        self.sums = now if self.sums is None else [a + b for a, b in zip(self.sums, now)]
        self.count += 1

    def on_end(self, fit, summary):
        with torch.no_grad():
            for p, s in zip(fit.model.parameters(), self.sums):
                p.copy_(s / self.count)
        self.sums, self.count = None, 0


t = trainer(net(), callbacks=[Averages()])
fit(t, epochs=2)
fit(t, epochs=4)


# %% draws_in_on_end: SAME stop=14 kill=14 crashes
class Draws(Callback):
    def on_end(self, fit, summary):
        self.noise = torch.randn(3)


t = trainer(net(), callbacks=[Draws()])
fit(t, epochs=2)
with torch.no_grad():
    t.run.model[2].weight.add_(0.1 * torch.randn(2, 8))
fit(t, epochs=4)


# %% rate_lowered_at_the_last_validation: SAME stop=14 kill=14 crashes
class Lowers(Callback):
    def on_validation(self, fit, means, seconds):
        for group in fit.optimizer.param_groups:
            group["lr"] *= 0.5


t = trainer(net(), callbacks=[Lowers()])
fit(t, epochs=2, validate=data, validate_every=8)
fit(t, epochs=4, validate=data, validate_every=8)


# %% history_of_each_call: SAME stop=14 kill=14 crashes
t = trainer(net())
first = fit(t, epochs=2, validate=data)
second = fit(t, epochs=4, validate=data)
result = [[one, one.validation, dict(one.means)] for one in (first, second)]


# %% breaks_and_changes: SAME stop=14 kill=14 crashes
m = net()
r = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
factor = 1.0
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    if step.number == 9:
        break
factor = 0.5
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(factor * loss(m, batch))


# %% a_callback_raises_and_is_taken_out: SAME stop=14 kill=14 crashes
class Stop(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] *= 0.9
        if step.number == 9:
            raise ValueError("enough")


m = net()
t = trainer(m, callbacks=[Stop()])
try:
    fit(t)
except unisono.errors.CallbackError:
    t.callbacks = []
fit(t)


# %% early_stopping_twice: SAME stop=14 kill=14 crashes
from unisono.callbacks import EarlyStopping

m = net()
o = SGD(m.parameters(), 0.1)
t = trainer(m, optimizer=o, callbacks=[EarlyStopping(1, min_delta=9.0)])
fit(t, validate=data)
t.callbacks = [EarlyStopping(2, min_delta=9.0)]
fit(t, validate=data)
t.callbacks = []
o.param_groups[0]["lr"] = 0.01
fit(t)


# %% a_call_with_nothing_to_do_in_between: SAME stop=14 kill=14 crashes
t = trainer(normed())
found = []
for k in (1, 2, 2, 4):
    fit(t, epochs=k)
    found.append(t.evaluate(data, batch_size=12)["loss"])
result = found


# %% stopped_and_gone_on: SAME stop=14 kill=14 crashes
m = net()
run = unisono.Run(m, o := SGD(m.parameters(), 0.1), shards=6, directory=DIR)
at = []
for turn in range(4):
    for step in run.steps(data, batch_size=16, epochs=4):
        with step:
            for batch in step.shards:
                step.backward(loss(m, batch))
        if step.is_done and step.number % 7 == 6:
            run.stop()
    at.append(run.position.step)
    o.param_groups[0]["lr"] *= 0.7
    run.go_on()
result = at


# %% a_loop_after_a_fit: SAME stop=14 kill=14 crashes
m = normed()
t = trainer(m)
fit(t, epochs=2)
factor = 1.0
for step in t.run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(factor * loss(m, batch))
    factor *= 0.95
result = factor


# %% loops_in_a_list: REFUSED
# says: must be taken before the run begins another loop
m = net()
run = unisono.Run(m, o := SGD(m.parameters(), 0.1), shards=6, directory=DIR)
phases = [run.steps(data, batch_size=16, steps=9), run.steps(data, batch_size=16, steps=24)]
factor = 1.0
for steps in phases:
    for step in steps:
        with step:
            for batch in step.shards:
                step.backward(loss(m, batch) * factor)
    factor = 0.3

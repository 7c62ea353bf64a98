# promises: one-result.4

# %% ends_a_phase_by_an_exception: SAME
class Stop(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            raise StopIteration


factor = 1.0


def scaled(m, b):
    return factor * loss(m, b)


t = trainer(net(), scaled, callbacks=[Stop()])
try:
    fit(t)
except unisono.errors.CallbackError:
    factor = 0.5
t.run.go_on()
fit(t)


# %% ends_a_loop_by_an_exception: SAME
class Enough(Exception):
    pass


m = net()
r = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR, device=DEVICE)
factor = 1.0
try:
    for step in r.steps(data, batch_size=16, steps=STEPS):
        with step:
            for batch in step.shards:
                step.backward(loss(m, batch))
        if step.number == 9:
            raise Enough
except Enough:
    factor = 0.5
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(factor * loss(m, batch))


# %% lowers_the_rate_after_an_exception: SAME
class Stop(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            raise ValueError("enough")


m = net()
o = SGD(m.parameters(), 0.1)
t = trainer(m, optimizer=o, callbacks=[Stop()])
try:
    fit(t)
except unisono.errors.CallbackError:
    o.param_groups[0]["lr"] = 0.01
fit(t)


# %% breaks_and_remembers: SAME
m = net()
r = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR, device=DEVICE)
factor = 1.0
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    if step.number == 9:
        factor = 0.5
        break
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(factor * loss(m, batch))


# %% else_of_the_loop: SAME
m = net()
r = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR, device=DEVICE)
factor = 1.0
for step in r.steps(data, batch_size=16, steps=STEPS // 2):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    if step.number == 9:
        break
else:
    factor = 0.5
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(factor * loss(m, batch))


# %% counts_the_attempts: SAME
class Stop(Callback):
    def on_step_end(self, fit, step):
        if step.number in (5, 9):
            raise ValueError("enough")


m = net()
o = SGD(m.parameters(), 0.1)
t = trainer(m, optimizer=o, callbacks=[Stop()])
for _ in range(4):
    try:
        fit(t)
        break
    except unisono.errors.CallbackError:
        o.param_groups[0]["lr"] *= 0.5


# %% interrupts_itself: SAME
class Enough(KeyboardInterrupt):
    pass


class Stop(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 2 and not seen:
            raise Enough


seen = []
t = trainer(net(), lambda m, b: (0.5 if seen else 1.0) * loss(m, b), callbacks=[Stop()])
for _ in range(3):
    try:
        fit(t)
    except KeyboardInterrupt:
        seen.append("interrupted")


# %% reads_what_an_exception_says: SAME
class Bad(Exception):
    def __init__(self, step, rate):
        super().__init__(f"bad at {step}")
        self.rate = rate


class Stop(Callback):
    def on_step_begin(self, fit):
        if fit.step == 9 and fit.optimizer.param_groups[0]["lr"] == 0.1:
            raise Bad(9, 0.03)
        if fit.step == 11 and fit.optimizer.param_groups[0]["lr"] == 0.03:
            raise ValueError("rate", 0.01)


m = net()
o = SGD(m.parameters(), 0.1)
t = trainer(m, optimizer=o, callbacks=[Stop()])
for _ in range(3):
    try:
        fit(t)
    except unisono.errors.CallbackError as error:
        why = error.__cause__
        o.param_groups[0]["lr"] = why.rate if isinstance(why, Bad) else why.args[1]


# %% takes_a_group_apart: SAME
class Stop(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            raise BaseExceptionGroup("both", [ValueError("a"), KeyboardInterrupt()])


m = net()
o = SGD(m.parameters(), 0.1)
t = trainer(m, optimizer=o, callbacks=[Stop()])
try:
    fit(t)
except* KeyboardInterrupt:
    o.param_groups[0]["lr"] = 0.01
except* ValueError:
    o.param_groups[0]["momentum"] = 0.5
fit(t)

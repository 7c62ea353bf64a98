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

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


# %% goes_on_in_another_loop: SAME stop=14 kill=14 crashes
class Bad(Exception):
    pass


def main():
    m = net()
    run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    failed = []
    while run.position.step < 24:
        try:
            for step in run.steps(data, batch_size=16, steps=24):
                with step:
                    for b in step.shards:
                        if step.number == 6 and not failed:
                            raise Bad
                        step.backward(loss(m, b))
        except Bad:
            failed.append(step.number)
            run.optimizer.param_groups[0]["lr"] = 0.05
    return run, failed


run, result = main()


# %% non_finite_loss_and_lower_rate: SAME stop=14 kill=14 crashes
def main():
    m = net()
    run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    failed, factor = [], 1.0
    while run.position.step < 24:
        try:
            for step in run.steps(data, batch_size=16, steps=24):
                with step:
                    for b in step.shards:
                        bad = float("nan") if step.number == 6 and factor == 1.0 else 1.0
                        step.backward(loss(m, b) * bad)
        except unisono.errors.NonFiniteLossError:
            failed.append(run.position.step)
            factor = 0.5
            run.optimizer.param_groups[0]["lr"] *= factor
    return run, failed


run, result = main()


# %% fit_that_raises_within_a_step: SAME stop=14 kill=14 crashes
class Bad(Exception):
    pass


calm = []


def fragile(model, b):
    if unisono.progress().step == 6 and not calm:
        raise Bad("six")
    return loss(model, b)


t = trainer(m := net(), fragile)
while True:
    try:
        t.fit(data, batch_size=16, epochs=4)
        break
    except Bad:
        calm.append(1)
        t.run.optimizer.param_groups[0]["lr"] = 0.05
result = calm


# %% evaluate_with_a_loss_that_raises: SAME stop=14 kill=14 crashes
class Bad(Exception):
    pass


broken = [False]


def fragile(model, b):
    if broken[0]:
        raise Bad("broken")
    return loss(model, b)


t = trainer(m := net(), fragile)
found = []
for i in range(4):
    t.fit(data, batch_size=16, epochs=i + 1)
    broken[0] = i == 1
    try:
        found.append(round(t.evaluate(data, batch_size=16)["loss"], 8))
    except Bad:
        found.append("bad")
    broken[0] = False
result = found


# %% predict_that_raises: SAME stop=14 kill=14 crashes
t = trainer(m := net())
found = []
for i in range(4):
    t.fit(data, batch_size=16, epochs=i + 1)
    try:
        rows = t.predict(X[:, : 7 + i % 2], batch_size=16)
        found.append(round(rows.sum().item(), 5))
    except RuntimeError:
        found.append("bad")
result = found


# %% attempts_in_a_custom_loop: SAME stop=14 kill=14 crashes
class Diverged(Exception):
    pass


def main():
    m = net()
    run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    attempts = 0
    for _ in range(4):
        try:
            for step in run.steps(data, batch_size=16, steps=24):
                with step:
                    for b in step.shards:
                        step.backward(loss(m, b))
                if step.number in (5, 9) and attempts < 2:
                    raise Diverged(step.number)
            break
        except Diverged as error:
            attempts += 1
            run.optimizer.param_groups[0]["lr"] *= 0.5
    return run, attempts


run, result = main()


# %% attempts_within_the_step: SAME stop=14 kill=14 crashes
class Diverged(Exception):
    pass


def main():
    m = net()
    run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    attempts = 0
    for _ in range(4):
        try:
            for step in run.steps(data, batch_size=16, steps=24):
                with step:
                    for b in step.shards:
                        if step.number in (5, 9) and attempts < 1 + (step.number == 9):
                            raise Diverged(step.number)
                        step.backward(loss(m, b))
            break
        except Diverged as error:
            attempts += 1
            run.optimizer.param_groups[0]["lr"] *= 0.5
    return run, attempts


run, result = main()


# %% raises_after_a_shard: SAME stop=14 kill=14 crashes
class Diverged(Exception):
    pass


def main():
    m = normed()
    run = unisono.Run(m, Adam(m.parameters(), 0.02), shards=6, directory=DIR, device=DEVICE)
    attempts = 0
    for _ in range(4):
        try:
            for step in run.steps(data, batch_size=16, steps=24):
                with step:
                    for b in step.shards:
                        step.backward(loss(m, b))
                        if step.number in (5, 9) and attempts < 1 + (step.number == 9):
                            raise Diverged(step.number)
            break
        except Diverged as error:
            attempts += 1
            run.optimizer.param_groups[0]["lr"] *= 0.5
    return run, attempts


run, result = main()


# %% skips_a_batch_by_an_exception: REFUSED
# says: to skip a batch, compute its loss times 0
class Bad(Exception):
    pass


def main():
    m = net()
    run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    skipped = []
    for step in run.steps(data, batch_size=16, epochs=4):
        try:
            with step:
                for b in step.shards:
                    if step.number == 4:
                        raise Bad
                    step.backward(loss(m, b))
        except Bad:
            skipped.append(step.number)
    return run, skipped


run, result = main()


# %% failed_callback_stays_off: SAME
class Fragile(Callback):
    may_fail = True

    def __init__(self):
        self.seen = 0

    def on_step_end(self, fit, step):
        if step.number == 3:
            raise OSError("gone")
        self.seen += 1
        fit.optimizer.param_groups[0]["lr"] *= 0.99


fragile = Fragile()
t = trainer(net(), callbacks=[fragile])
fit(t)
result = fragile.seen

# %% rate_by_the_workers_that_are_there: REFUSED
class Linear(Callback):
    def on_step_begin(self, fit):
        fit.optimizer.param_groups[0]["lr"] = 0.05 * len(fit.ranks)

t = trainer(net(), callbacks=[Linear()])
fit(t)

# %% rate_by_the_size_of_the_world: REFUSED|SILENT
m = net()
t = trainer(m, optimizer=SGD(m.parameters(), 0.05 * unisono.world().world_size))
fit(t)

# %% counts_snapshots: REFUSED
class Counts(Callback):
    snapshots = 0

    def on_snapshot(self, fit):
        self.snapshots += 1

    def on_step_begin(self, fit):
        fit.optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.1 * self.snapshots)

t = trainer(net(), callbacks=[Counts()])
fit(t)

# %% cools_when_workers_change: REFUSED|MIXED
class Cools(Callback):
    def on_workers_changed(self, fit, before, why):
        fit.optimizer.param_groups[0]["lr"] *= 0.5

t = trainer(net(), callbacks=[Cools()])
fit(t)

# %% patience_on_validation: SAME
class Patient(Callback):
    best, waited = float("inf"), 0

    def on_validation(self, fit, means, seconds):
        self.waited = 0 if means["loss"] < self.best - 0.1 else self.waited + 1
        self.best = min(self.best, means["loss"])
        fit.optimizer.param_groups[0]["lr"] *= 0.5**self.waited

t = trainer(net(), callbacks=[Patient()])
fit(t, validate=data, validate_every=3)

# %% stops_by_its_own_criterion: SAME
class Stops(Callback):
    def __init__(self):
        self.below = set()

    def on_step_end(self, fit, step):
        if step.means["loss"] < 0.8:
            self.below.add(step.number)
        if len(self.below) >= 19:
            fit.stop("many good steps")

t = trainer(net(), callbacks=[Stops()])
fit(t)

# %% metrics_that_a_callback_reads: SAME|REFUSED
seen = {"best": 0.0}

def accuracy(out, y):
    found = float((out.argmax(1) == y).float().mean())
    seen["best"] = max(seen["best"], found)
    return found

class Adapts(Callback):
    def on_step_begin(self, fit):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * (1.1 - seen["best"])

t = trainer(net(), callbacks=[Adapts()])
fit(t, validate=data, validate_every=3, validate_metrics={"accuracy": accuracy})

# %% modes_that_a_callback_sets: SAME
m = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))

class Freezes(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            m[1].eval()
        if fit.epoch == 2:
            m[2].eval()

t = trainer(m, callbacks=[Freezes()])
fit(t, validate=data)

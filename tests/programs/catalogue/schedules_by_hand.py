# promises: one-result.4

# %% schedule_that_a_callback_steps: SAME
from torch.optim.swa_utils import SWALR

m = net()
optimizer = SGD(m.parameters(), 0.1)
schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)


class Steps(Callback):
    def on_epoch_end(self, fit):
        schedule.step()


t = trainer(m, optimizer=optimizer, callbacks=[Steps()])
fit(t)


# %% cosine_that_is_made_in_the_first_step: SAME
class Cosine(Callback):
    schedule = None

    def on_step_end(self, fit, step):
        if self.schedule is None:
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(fit.optimizer, 24)
        self.schedule.step()


t = trainer(net(), callbacks=[Cosine()])
fit(t)

# %% plateau_in_a_loop: SAME
run = unisono.Run(m := net(), optimizer := SGD(m.parameters(), 0.1), shards=6, directory=DIR)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    schedule.step(step.loss)

# %% one_cycle_in_a_loop: SAME
run = unisono.Run(m := net(), optimizer := SGD(m.parameters(), 0.1), shards=6, directory=DIR)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=24)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    schedule.step()


# %% rates_of_numpy: SAME crashes
rates = np.geomspace(0.1, 0.01, 30).astype(np.float32)


class Rate(Callback):
    def on_step_end(self, fit, step):
        group = fit.optimizer.param_groups[0]
        group["lr"] = rates[step.number] if step.number % 3 else group["lr"] * 0.9
        group["momentum"] = np.float64(0.9)
        group["count"] = np.int64(step.number)


m = net()
o = SGD(m.parameters(), lr=rates[0], momentum=0.9)
o.param_groups[0]["count"] = np.int64(0)
t = trainer(m, optimizer=o, callbacks=[Rate()])
fit(t)

# %% pairs_of_numpys_numbers: SAME crashes
run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for b in step.shards:
            step.backward(loss(m, b))
    run.optimizer.param_groups[0]["lr"] = np.float32(0.01) * np.cos(np.float32(step.number / 20))
    run.optimizer.param_groups[0]["betas"] = (np.float32(0.9), np.float64(0.99))

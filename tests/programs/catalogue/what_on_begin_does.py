# promises: one-result.4

# %% rate_lowered_in_on_begin: SAME
class Lowers(Callback):
    def on_begin(self, fit):
        for group in fit.optimizer.param_groups:
            group["lr"] *= 0.3


t = trainer(net(), callbacks=[Lowers()])
fit(t)


# %% weights_rescaled_in_on_begin: SAME
class Rescales(Callback):
    def on_begin(self, fit):
        with torch.no_grad():
            out = fit.model[0](X)
            fit.model[0].weight.div_(out.std())


t = trainer(net(), callbacks=[Rescales()])
fit(t)


# %% a_state_dict_that_forgets_one: SAME
class Plateau(Callback):
    best, waited, factor = 9.0, 0, 1.0

    def on_step_end(self, fit, step):
        self.waited = 0 if step.means["loss"] < self.best else self.waited + 1
        self.best = min(self.best, step.means["loss"])
        if self.waited >= 2:
            self.factor, self.waited = self.factor * 0.7, 0
        fit.optimizer.param_groups[0]["lr"] = 0.1 * self.factor

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


t = trainer(net(), callbacks=[Plateau()])
fit(t)


# %% a_new_scheduler_each_cycle: SAME
class Restarts(Callback):
    schedule = None

    def on_step_end(self, fit, step):
        if step.number % 5 == 0:
            for group in fit.optimizer.param_groups:
                group["lr"] = 0.2
                group.pop("initial_lr", None)
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(fit.optimizer, 5)
        self.schedule.step()


t = trainer(net(), callbacks=[Restarts()])
fit(t)


# %% hook_made_in_on_begin: SAME
class Sharpens(Callback):
    def on_begin(self, fit):
        self.by = 1.0
        self.handle = fit.model[2].register_forward_hook(lambda m, i, out: out * self.by)

    def on_step_end(self, fit, step):
        self.by *= 1.03


t = trainer(net(), callbacks=[Sharpens()])
fit(t)


# %% keras_style_on_begin_sets_to_zero: SAME
class Warms(Callback):
    def on_begin(self, fit):
        self.losses, self.base = [], 0.1

    def on_step_end(self, fit, step):
        self.losses.append(step.means["loss"])
        fit.optimizer.param_groups[0]["lr"] = self.base * min(1.0, len(self.losses) / 20)


t = trainer(net(), callbacks=[Warms()])
fit(t)


# %% l2_to_the_start_taken_in_on_begin: SAME
class Anchored(Callback):
    def on_begin(self, fit):
        self.start = [p.detach().clone() for p in fit.model.parameters()]

    def on_step_end(self, fit, step):
        with torch.no_grad():
            for p, s in zip(fit.model.parameters(), self.start):
                p.lerp_(s, 0.05)


t = trainer(net(), callbacks=[Anchored()])
fit(t)


# %% rate_and_weights_changed_and_a_worker_lost_at_once: SAME kill=1
class Changes(Callback):
    def on_begin(self, fit):
        self.by = 0.9
        for group in fit.optimizer.param_groups:
            group["lr"] *= 0.3
        with torch.no_grad():
            for parameter in fit.model.parameters():
                parameter.mul_(0.5)

    def on_step_end(self, fit, step):
        self.by *= 0.97


changes = Changes()
t = trainer(net(), lambda m, b: loss(m, b) * getattr(changes, "by", 1.0), callbacks=[changes])
fit(t)

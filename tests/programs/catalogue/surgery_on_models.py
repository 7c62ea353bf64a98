# promises: one-result.4

# %% pruned_each_epoch: SAME
from torch.nn.utils import prune


class Prunes(Callback):
    def on_epoch_end(self, fit):
        prune.l1_unstructured(fit.model[0], "weight", amount=0.2)


t = trainer(net(), callbacks=[Prunes()])
fit(t)


# %% a_buffer_registered_late: SAME
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x) - getattr(self, "center", 0.0)


class Centers(Callback):
    def on_step_end(self, fit, step):
        if step.number == 7:
            fit.model.register_buffer("center", torch.zeros(2))
        if step.number > 7:
            fit.model.center.lerp_(fit.model.net[2].bias.detach(), 0.2)


t = trainer(Centered(), callbacks=[Centers()])
fit(t)

# %% layer_grown_between_two_fits: SAME
m = net()
one = trainer(m, directory=DIR and DIR + "/small")
one.fit(data, batch_size=16, epochs=3)
wide = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
with torch.no_grad():
    wide[0].weight[:8] = m[0].weight
    wide[0].bias[:8] = m[0].bias
    wide[2].weight[:, :8] = m[2].weight
t = trainer(wide, directory=DIR and DIR + "/wide")
t.fit(data, batch_size=16, epochs=3)


# %% a_new_head_each_epoch: REFUSED
class Heads(Callback):
    def on_epoch_end(self, fit):
        fit.model[2] = nn.Linear(8, 2)
        fit.optimizer.param_groups[0]["params"] = list(fit.model.parameters())


t = trainer(net(), callbacks=[Heads()])
fit(t)

# %% ties_undone: REFUSED
m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
m[2].weight = m[0].weight


class Unties(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            m[2].weight = nn.Parameter(m[0].weight.detach().clone())
            fit.optimizer.add_param_group({"params": [m[2].weight]})


t = trainer(m, callbacks=[Unties()])
fit(t)

# %% importance_on_parameters: SAME
m = net()

def consolidated(m, b):
    pulls = [(p.importance * (p - p.anchor).square()).sum() for p in m.parameters() if hasattr(p, "anchor")]
    return loss(m, b) + 0.1 * sum(pulls)

class Consolidates(Callback):
    def on_epoch_end(self, fit):
        for p in m.parameters():
            p.anchor = p.detach().clone()
            p.importance = p.detach().abs()

t = trainer(m, consolidated, callbacks=[Consolidates()])
fit(t)

# %% a_key_of_a_parameter_group: SAME
m = net()

def decayed(m, b):
    group = t.run.optimizer.param_groups[0]
    return loss(m, b) + group.get("pull", 0.0) * sum(p.square().sum() for p in m.parameters())

class Pulls(Callback):
    def on_epoch_end(self, fit):
        fit.optimizer.param_groups[0]["pull"] = 0.01 * fit.epoch

t = trainer(m, decayed, callbacks=[Pulls()])
fit(t)

# %% base_rates_of_a_schedule: SAME
m = net()
optimizer = SGD(m.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

class Restarts(Callback):
    def on_step_end(self, fit, step):
        if step.number == 8:
            schedule.gamma, schedule.step_size = 0.9, 1
        optimizer.param_groups[0]["lr"] = max(0.01, optimizer.param_groups[0]["lr"] * schedule.gamma)

t = trainer(m, optimizer=optimizer, schedule=schedule, callbacks=[Restarts()])
fit(t)

# %% a_hook_on_a_tensor: SAME|REFUSED
m = net()

class Hooks(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            m[2].weight.register_hook(lambda g: g * 0.1)

t = trainer(m, callbacks=[Hooks()])
fit(t)

# %% an_attribute_of_an_optimizer_that_is_known: SAME
class Careful(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.trust = getattr(fit.optimizer, "trust", 1.0) * 0.9
        fit.optimizer.param_groups[0]["lr"] = 0.1 * fit.optimizer.trust

t = trainer(net(), callbacks=[Careful()])
fit(t)

# %% momentum_that_a_callback_makes: SAME|REFUSED
m = net()
optimizer = SGD(m.parameters(), 0.1)

class Nudges(Callback):
    def on_epoch_end(self, fit):
        for group in optimizer.param_groups:
            group["momentum"] = 0.5
            group["weight_decay"] += 0.01

t = trainer(m, optimizer=optimizer, callbacks=[Nudges()])
fit(t)

# %% a_criterion_with_buffers: SAME
class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(2, 2))

    def forward(self, m, b):
        out = m(b[0])
        return F.cross_entropy(out, b[1]) + 0.1 * (out - self.centres[b[1]]).square().mean()

criterion = Centres()

class Moves(Callback):
    def on_step_end(self, fit, step):
        with torch.no_grad():
            out = fit.model(X)
        for label in (0, 1):
            criterion.centres[label].lerp_(out[Y == label].mean(0), 0.2)

t = trainer(net(), criterion, callbacks=[Moves()])
fit(t)

# %% a_criterion_whose_buffer_follows_in_the_pass: REFUSED
class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(2, 2))

    def forward(self, m, b):
        out = m(b[0])
        self.centres.index_add_(0, b[1], out.detach(), alpha=0.05)
        return F.cross_entropy(out, b[1]) + 0.1 * (out - self.centres[b[1]]).square().mean()

t = trainer(net(), Centres())
fit(t)

# %% spectral_norm: SAME
m = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 2))
t = trainer(m)
fit(t, validate=data)

# %% best_weights_put_back: SAME
import copy

class Best(Callback):
    best, state = float("inf"), None

    def on_step_end(self, fit, step):
        if step.means["loss"] < self.best:
            self.best, self.state = step.means["loss"], copy.deepcopy(fit.model.state_dict())
        elif step.means["loss"] > 1.3 * self.best:
            fit.model.load_state_dict(self.state)

t = trainer(net(), callbacks=[Best()])
fit(t)

# %% an_averaged_model_in_a_callback: SAME
from torch.optim.swa_utils import AveragedModel

m = net()
average = AveragedModel(m)

def pulled(m, b):
    out = m(b[0])
    return F.cross_entropy(out, b[1]) + F.mse_loss(out, average(b[0]).detach())

class Averages(Callback):
    def on_step_end(self, fit, step):
        average.update_parameters(m)

t = trainer(m, pulled, callbacks=[Averages()])
fit(t)
result = t.evaluate(data, batch_size=32, model=average)["loss"]

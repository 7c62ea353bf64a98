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

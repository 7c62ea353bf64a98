# promises: one-result.4

# %% importance_on_parameters: SAME
m = net()


def consolidated(m, b):
    pulls = [
        (p.importance * (p - p.anchor).square()).sum()
        for p in m.parameters()
        if hasattr(p, "anchor")
    ]
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

# %% a_hook_on_a_tensor: SAME
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


# %% a_tensor_with_a_scale: SAME
class Scaled(torch.Tensor):
    pass


prototype = torch.zeros(2).as_subclass(Scaled)
prototype.scale = 1.0


def pulled(m, b):
    return prototype.scale * loss(m, b)


class Sets(Callback):
    def on_step_end(self, fit, step):
        prototype.scale = 0.5 * prototype.scale + step.means["loss"]


t = trainer(net(), pulled, callbacks=[Sets()])
fit(t)

# %% rows_masked_out: SAME
import numpy as np

weights = np.ma.array(np.ones(96, "f4"), mask=np.zeros(96, bool))


class Weighed(Rows):
    def __getitem__(self, index):
        return X[index], Y[index], torch.tensor(float(weights.filled(0.1)[index]))


def weighed(m, b):
    return (F.cross_entropy(m(b[0]), b[1], reduction="none") * b[2]).mean()


class Masks(Callback):
    def on_step_end(self, fit, step):
        weights[int(step.indices[0])] = np.ma.masked


t = trainer(net(), weighed, callbacks=[Masks()])
fit(t, Weighed())

# %% gradient_scaled_by_an_accumulation_hook: SAME
m = net()


class Scales(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:

            def halve(p):
                p.grad.mul_(0.5)

            m[2].weight.register_post_accumulate_grad_hook(halve)


t = trainer(m, callbacks=[Scales()])
fit(t)

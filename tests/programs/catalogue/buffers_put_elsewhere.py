# promises: one-result.4

# %% data_of_a_mask: SAME|REFUSED
m = net()
m[0].register_buffer("mask", torch.ones(8))
m[0].register_forward_hook(lambda layer, given, out: out * layer.mask)


class Prunes(Callback):
    def on_step_end(self, fit, step):
        m[0].mask.data = (m[0].weight.detach().norm(dim=1) > 0.9).float() * 0.9 + 0.1


t = trainer(m, callbacks=[Prunes()])
fit(t)

# %% set_to_another_storage: SAME|REFUSED
m = net()
m.register_buffer("shift", torch.zeros(2))


def shifted(m, b):
    return F.cross_entropy(m(b[0]) + m.shift, b[1])


class Sets(Callback):
    def on_step_end(self, fit, step):
        m.shift.set_(m.shift * 0.5 + m[2].bias.detach())


t = trainer(m, shifted, callbacks=[Sets()])
fit(t)

# %% another_tensor_in_buffers: SAME|REFUSED
run = None
m = net()
m.register_buffer("shift", torch.zeros(2), persistent=False)
run = unisono.Run(m, Adam(m.parameters(), 0.01), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for x, y in step.shards:
            step.backward(F.cross_entropy(m(x) + m.shift, y))
    m._buffers["shift"] = 0.5 * m.shift + m[2].bias.detach()

# %% two_that_change_places: SAME|REFUSED
m = net()
m.register_buffer("odd", torch.tensor([0.5, 0.0]))
m.register_buffer("even", torch.tensor([0.0, 0.5]))


def shifted(m, b):
    return F.cross_entropy(m(b[0]) + m.odd, b[1])


class Swaps(Callback):
    def on_step_end(self, fit, step):
        if step.number % 3 == 1:
            m.odd.data, m.even.data = m.even.data, m.odd.data


t = trainer(m, shifted, callbacks=[Swaps()])
fit(t)

# %% weights_of_a_frozen_teacher: SAME|REFUSED
import copy

student = net()
m = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})


def distilled(m, b):
    out = m["student"](b[0])
    return F.cross_entropy(out, b[1]) + F.mse_loss(out, m["teacher"](b[0]))


class Refreshes(Callback):
    def on_epoch_end(self, fit):
        m["teacher"].load_state_dict(copy.deepcopy(student.state_dict()), assign=True)
        m["teacher"].requires_grad_(False)


t = trainer(m, distilled, SGD(student.parameters(), 0.1), callbacks=[Refreshes()])
fit(t)

# %% queue_rolled_in_a_new_tensor: SAME|REFUSED
m = net()
m.register_buffer("queue", torch.zeros(5, 2))


def contrasted(m, b):
    out = m(b[0])
    return F.cross_entropy(out, b[1]) + 0.1 * (out @ m.queue.t()).square().mean()


class Enqueues(Callback):
    def on_step_end(self, fit, step):
        newest = m(X[step.indices[:2]]).detach()
        m.queue.data = torch.cat([m.queue[2:], newest])


t = trainer(m, contrasted, callbacks=[Enqueues()])
fit(t)

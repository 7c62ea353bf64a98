# promises: one-result.4

# %% moved_by_data: SAME everywhere
def moved(model, _):
    for target, online in model.pairs():
        target.data = target.data * 0.8 + online.data * 0.2


m = Twins()
t = trainer(m, optimizer=m.sgd(), callbacks=[Between(moved)])
fit(t)


# %% moved_by_numpy: SAME everywhere
def moved(model, _):
    for target, online in model.pairs():
        values = target.detach().cpu().numpy()
        values[...] = 0.8 * values + 0.2 * online.detach().cpu().numpy()
        target.data.copy_(torch.from_numpy(values))


m = Twins()
t = trainer(m, optimizer=m.sgd(), callbacks=[Between(moved)])
fit(t)


# %% moved_without_gradients_and_copied_now_and_then: SAME everywhere
def moved(model, _):
    if unisono.progress().step % 3 == 0:
        model.target.load_state_dict(model.net.state_dict())
    with torch.no_grad():
        for target, online in model.pairs():
            target.lerp_(online, 0.1)


m = Twins()
t = trainer(m, optimizer=m.sgd(), callbacks=[Between(moved)])
fit(t)


# %% moved_in_each_pass: SAME everywhere kills
m = Moved()
t = trainer(m, optimizer=m.sgd())
fit(t)


# %% moved_in_some_passes: SAME everywhere
class Moved(Twins):
    def forward(self, inputs):
        if self.training and inputs[:, 0].max() > 0:  # not in each
            for target, online in self.pairs():
                target.data.mul_(0.8).add_(online.data, alpha=0.2)
        return super().forward(inputs)


m = Moved(net)
t = trainer(m, optimizer=m.sgd())
fit(t)


# %% moved_in_passes_with_a_queue: SAME everywhere
class Moved(Twins):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 2))

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                for target, online in self.pairs():
                    target.mul_(0.9).add_(online, alpha=0.1)
                self.queue = torch.cat([self.queue[1:], self.target(inputs)[:1]])
        return super().forward(inputs) + self.queue.mean(0)


m = Moved()
t = trainer(m, optimizer=m.sgd())
fit(t)


# %% moved_in_passes_and_between_steps: SAME everywhere
def moved(model, _):
    for target, online in model.pairs():
        values = target.detach().cpu().numpy()
        values[...] = 0.8 * values + 0.2 * online.detach().cpu().numpy()
        target.data.copy_(torch.from_numpy(values))


m = Moved()
t = trainer(m, optimizer=m.sgd(), callbacks=[Between(moved)])
fit(t)


# %% moved_in_passes_and_by_an_optimizer_of_the_programs_own: SAME everywhere
m = Moved()
sgd = SGD(m.net.parameters(), lr=0.1)


def hook(optimizer, args, kwargs):
    with torch.no_grad():
        for target, online in m.pairs():
            target.lerp_(online, 0.2)


sgd.register_step_post_hook(hook)
t = trainer(m, optimizer=sgd)
fit(t)

# promises: one-result.4

# %% weights_clipped: SAME everywhere kills
def clipped(model, _):
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


m = normed()
t = trainer(m, optimizer=Adam(m.parameters(), 0.01), callbacks=[Between(clipped)])
fit(t, shuffle=False)


# %% weights_clamped_in_a_loop: SAME everywhere
m = normed()
r = unisono.Run(m, Adam(m.parameters(), 0.01), shards=6, directory=DIR, device=DEVICE)
for step in r.steps(data, batch_size=16, steps=STEPS, shuffle=False):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    for parameter in m.parameters():
        parameter.data.clamp_(-0.2, 0.2)


# %% momentum_halved: SAME everywhere kills
def halved(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["step"].mul_(0.5)


m = normed()
t = trainer(m, optimizer=Adam(m.parameters(), 0.01), callbacks=[Between(halved)])
fit(t)


# %% momentum_replaced_and_loaded: SAME everywhere
def replaced(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


m = normed()
t = trainer(m, optimizer=Adam(m.parameters(), 0.01), callbacks=[Between(replaced)])
fit(t)


# %% momentum_forgotten: SAME|MIXED everywhere
def forgotten(_, optimizer):
    if len(optimizer.state) and int(next(iter(optimizer.state.values()))["step"]) == 2:
        optimizer.state.clear()


m = normed()
t = trainer(m, optimizer=Adam(m.parameters(), 0.01), callbacks=[Between(forgotten)])
fit(t)


# %% drawn_into_what_an_optimizer_of_the_programs_own_draws: SAME everywhere kills commit
class Drawing(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.rand(parameter.shape).to(parameter.device), alpha=0.01)


def drawn(model, _):
    model.shift = model.shift + torch.rand(8).to(model.shift.device)
    for parameter in model.parameters():
        parameter.data = parameter.data + torch.randn(parameter.shape).to(parameter.device) / 100


m = Shifted()
t = trainer(m, optimizer=Drawing(m.parameters()), callbacks=[Between(drawn)])
fit(t)


# %% a_buffer_that_is_drawn: SAME everywhere kills commit
def shifted(model, _):
    model.shift = model.shift + torch.rand(8).to(model.shift.device)


t = trainer(Shifted(), callbacks=[Between(shifted)])
fit(t)


# %% drawn_without_a_seed: WORKERS everywhere
# says: `4\.weight`
def drawn(model, _):
    noise = torch.from_numpy(np.random.default_rng().normal(size=(2, 8)))
    model[4].weight.data.add_(noise.to(model[4].weight.device, torch.float32))


t = trainer(normed(), callbacks=[Between(drawn)])
fit(t)

# promises: one-result.6 one-result.8


# %% features_kept_by_a_pass_and_used_in_the_next: WORKERS|MIXED stop=14 kill=14
# says: differs between workers
bank = []


def collect(m, b):
    h = m[0](b[0])
    bank.append(h)
    return h


t = trainer(net())
fit(t, epochs=4)
t.predict(data, batch_size=12, forward=collect)
centre = torch.cat(bank).mean(0)
result = t.predict(data, batch_size=12, forward=lambda m, b: m[0](b[0]) - centre).tolist()


# %% factor_set_after_a_fit: WORKERS|MIXED stop=14 kill=14
# says: differs between workers
factor = 1.0
t = trainer(net(), lambda m, b: loss(m, b) * factor)
fit(t, epochs=4)
factor = 1 + 0.1 * unisono.world().rank
result = t.evaluate(data, batch_size=12)


# %% weights_by_statistics_of_a_pass_between_fits: WORKERS|MIXED stop=14 kill=14
# says: must be the same on every worker
m = net()
seen = []
t = trainer(m)
fit(t, epochs=2)
hook = m[0].register_forward_hook(lambda mod, args, out: seen.append(out.std().item()))
t.evaluate(data, batch_size=12)
hook.remove()
with torch.no_grad():
    m[0].weight.div_(sum(seen) / len(seen))
fit(t, epochs=4)


# %% optimizer_state_by_a_pass: WORKERS|MIXED stop=14 kill=14
# says: must be the same on every worker
m = net()
seen = []
t = trainer(m)
fit(t, epochs=2)


def noted(m, b):
    seen.append(b[0].mean().item())
    return m(b[0])


t.predict(data, batch_size=12, forward=noted)
for state in t.run.optimizer.state.values():
    state["momentum_buffer"].mul_(sum(seen))
fit(t, epochs=4)


# %% teacher_switched_to_eval_after_evaluate: WORKERS|MIXED stop=8 kill=8
# says: differs between workers
teacher = normed()


def distil(m, b):
    with torch.no_grad():
        soft = teacher(b[0]).softmax(1)
    return -(soft * m(b[0]).log_softmax(1)).sum(1).mean()


second = trainer(net(), distil)
first = second.evaluate(data, batch_size=12)
teacher.eval()
fit(second, epochs=2)
result = first


# %% a_teacher_of_each_worker: WORKERS|MIXED stop=14 kill=14
# says: differs between workers
torch.manual_seed(unisono.world().rank)
teacher = net().requires_grad_(False)
torch.manual_seed(0)


def distil(m, b):
    return -(teacher(b[0]).softmax(1) * m(b[0]).log_softmax(1)).sum(1).mean()


t = trainer(net(), distil)
fit(t)


# %% forward_of_metrics_draws: SAME
gen = torch.Generator().manual_seed(3)


def forward(m, b):
    return m(b[0]) + torch.randn(len(b[0]), 2, generator=gen), b[1]


t = trainer(net())
fit(t)
metrics = {"mean": lambda outputs, targets: float(outputs.mean())}
result = t.evaluate(data, batch_size=12, metrics=metrics, forward=forward)["mean"]

# promises: one-result.1

# %% averages_in_callbacks_and_hooks: SAME together
from torch.optim.swa_utils import AveragedModel

from unisono.callbacks import EMA

ema = EMA(0.9, start=2)
t = trainer(normed(), callbacks=[ema])
average = AveragedModel(t.run.model, avg_fn=lambda a, b, n: a + (b - a) / (n + 1))
t.callbacks.append(Between(lambda model, _: average.update_parameters(model)))
fit(t)
averaged = ema.model(t.run.model)
result = [t.evaluate(data, batch_size=9, model=one) for one in (averaged, average.module)]


# %% evaluated_and_predicted_between_steps: SAME together
t, result = trainer(normed()), []
for epochs in (EPOCHS // 2, EPOCHS):
    fit(t, epochs=epochs, validate=data, validate_every=2)
    result.append(t.evaluate(data, batch_size=9))
    rows = t.predict(data, batch_size=9)
    result.append([rows.device.type, rows.tolist()])


# %% predictions_of_dicts: SAME together
def forward(model, batch):
    outputs = model(batch[0])
    return {"scores": outputs.softmax(1), "labels": outputs.argmax(1), "given": batch[1]}


t = trainer(normed())
fit(t)
rows = t.predict(data, batch_size=9, forward=forward)
result = {name: rows[name].tolist() for name in rows}


# %% a_loop_that_is_left: SAME together
m = normed()
r = unisono.Run(m, torch.optim.AdamW(m.parameters()), shards=4, directory=DIR, device=DEVICE)
for turn in range(1, 4):
    for step in r.steps(data, batch_size=16, steps=STEPS):
        with step:
            for batch in step.shards:
                step.backward(loss(m, batch))
        if step.is_done and r.position.step == turn * STEPS // 4:
            break
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
result = [r.position.step, m[0].weight.device.type == torch.device(DEVICE).type]


# %% two_trainers_over_one_model: SAME together
first = trainer(normed())
m = first.run.model
fit(first, epochs=EPOCHS // 2)
kept = f"{DIR}-2" if DIR else None
second = trainer(m, optimizer=SGD(m.parameters(), lr=0.1), directory=kept)
fit(second)


# %% weights_and_state_changed_between_fits: SAME together
m = normed()
t = trainer(m, optimizer=torch.optim.AdamW(m.parameters()))
fit(t, epochs=EPOCHS // 2)
with torch.no_grad():
    m[0].weight.mul_(0.5)
    m[1].running_mean.zero_()
for state in t.run.optimizer.state.values():
    state["exp_avg"].mul_(0.5)
fit(t)


# %% weights_loaded_between_fits: SAME together
t = trainer(normed())
fit(t, epochs=None, steps=STEPS // 3)
kept = {name: value.clone() for name, value in t.run.model.state_dict().items()}
optimizer = copy.deepcopy(t.run.optimizer.state_dict())
fit(t, epochs=None, steps=STEPS * 2 // 3)
t.run.model.load_state_dict({name: value.cpu() for name, value in kept.items()})
t.run.optimizer.load_state_dict(optimizer)
fit(t)


# %% a_step_of_its_own_between_fits_of_a_tied_model: SAME together
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.last(torch.relu(self.second(torch.relu(self.first(inputs)))))


m = Tied()
t = trainer(m)
fit(t, epochs=EPOCHS // 2)
where = next(m.parameters()).device
loss(m, (X[:10].to(where), Y[:10].to(where))).backward()
t.run.optimizer.step()
t.run.optimizer.zero_grad()
fit(t)


# %% state_that_the_program_keeps: SAME together
t = trainer(normed())
t.run.state["mine"] = {"tensor": torch.arange(3, device=DEVICE), "number": 1}
fit(t)
kept = t.run.state["mine"]["tensor"]
result = [kept.tolist(), kept.device.type == torch.device(DEVICE).type]


# %% buffers_halved_in_a_loop: SAME together
m = normed()
r = unisono.Run(m, Adam(m.parameters(), 0.01), shards=4, directory=DIR, device=DEVICE)
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    m[1].running_mean.mul_(0.5)


# %% a_schedule_over_few_elements: SAME together
m = nn.Linear(8, 2, bias=False)
r = unisono.Run(m, SGD(m.parameters(), lr=0.1), shards=4, directory=DIR, device=DEVICE)
schedule = torch.optim.lr_scheduler.StepLR(r.optimizer, 1, 0.9)
r.state["schedule"] = schedule
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    if step.is_done:
        schedule.step()
result = m.weight.tolist()


# %% two_that_leave_gradients_in_each_other: SAME|WORKERS together
# says: a loop over steps must end before the one around it
maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
adam = {one: Adam(one.parameters(), 0.01) for one in (maker, judge)}
runs = {"judge": unisono.Run(judge, adam[judge], shards=4, device=DEVICE)}
runs["maker"] = unisono.Run(maker, adam[maker], shards=4, device=DEVICE)


def take(step, sign):
    with step:
        for batch in step.shards:
            step.backward(F.softplus(sign * judge(maker(batch[0]))).mean())


one_by_one = [run.steps(data, batch_size=16, steps=3) for run in runs.values()]
for steps in zip(*one_by_one, strict=False):
    for step, sign in zip(steps, (1, -1), strict=True):
        take(step, sign)
for steps in one_by_one:
    list(steps)
for name, sign in (("maker", -1), ("judge", 1), ("maker", -1)):
    for step in runs[name].steps(data, batch_size=16, steps=runs[name].position.step + 3):
        take(step, sign)
first, second = runs.values()

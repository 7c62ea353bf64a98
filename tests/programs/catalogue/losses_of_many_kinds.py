# promises: one-result.1

# %% a_dict_of_tensors_numbers_and_pairs: SAME together
def many(model, batch):
    outputs = model(batch[0])
    hits = (outputs.argmax(1) == batch[1]).sum()
    return {
        "loss": F.cross_entropy(outputs, batch[1]),
        "accuracy": (hits, len(batch[1])),
        "constant": 3,
        "peak": outputs.detach().max().double(),
        "flag": outputs.detach().max() > 0,
        "host": torch.tensor(2.5),
    }


t = trainer(normed(), many)
result = dict(fit(t).means)


# %% scalars_that_change_after_they_were_returned: SAME together
class Summing(nn.Linear):
    def __init__(self):
        super().__init__(8, 2)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, inputs):
        self.total += inputs.sum()
        return super().forward(inputs)


counts = torch.zeros((), device=DEVICE)


def changing(model, batch):
    found = loss(model, batch)
    counts.copy_(batch[1].float().mean())
    return {"loss": found, "total": model.total, "counts": counts}


t = trainer(Summing(), changing)
result = dict(fit(t).means)


# %% a_loss_that_is_changed_after_it_was_given: SAME together
m, result = normed(), []
r = unisono.Run(m, SGD(m.parameters(), lr=0.1), shards=4, directory=DIR, device=DEVICE)
for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            found = loss(m, batch)
            step.backward(found)
            found.detach().mul_(0)
    if step.is_done:
        result.append(step.loss)


# %% losses_brought_to_the_host: SAME together
t = trainer(normed(), lambda m, b: loss(m, b).cpu())
fit(t)


# %% a_loss_of_one_element_and_of_64_bits: SAME together
t = trainer(normed(), lambda m, b: loss(m, b).double().view(1))
fit(t)


# %% nan_in_one_shard_is_named_and_nothing_is_changed: SAME together
rows = TensorDataset(X.clone(), Y)
rows.tensors[0][17][0] = float("nan")
digests = []


class Noting(Callback):
    def on_step_begin(self, fit):
        digests.append(fit.model[0].weight.tolist())


t = trainer(normed(), callbacks=[Noting()])
try:
    fit(t, rows, epochs=1)
    result = "no error"
except unisono.errors.NonFiniteLossError as error:
    result = [error.step, error.shard, t.run.model[0].weight.tolist() == digests[-1]]
    rows.tensors[0][17][0] = 0.0
    fit(t, rows, epochs=2)


# %% batches_changed_in_place: SAME together
def doubling(model, batch):
    batch[0].mul_(2)
    return loss(model, batch)


t = trainer(normed(), doubling)
fit(t)
result = X.sum().item()


# %% shards_of_one_sample_and_of_none: SAME together
t = trainer(net(), shards=8)
fit(t, Subset(data, range(37)), batch_size=9)


# %% a_model_that_the_loss_closes_over: SAME together
m = normed()
t = trainer(m, lambda _, batch: loss(m, batch))
fit(t)


# %% a_model_that_counts_in_a_buffer_with_an_alias: SAME together
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = normed()
        self.register_buffer("count", torch.zeros(()))
        self.alias = [self.count]

    def forward(self, inputs):
        (self.alias[0] if DEVICE == "cpu" else self.count).add_(1)
        return self.net(inputs) + 0.01 * self.count


t = trainer(Counting())
fit(t, validate=data)
result = t.evaluate(data, batch_size=9)["loss"]


# %% a_model_of_one_batch_size: SAME together
class FixedSize(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + torch.zeros(4, 2).to(inputs.device)


t = trainer(FixedSize(8, 2), shards=4)
fit(t)


# %% clipping_in_a_hook: SAME together
t = trainer(normed())
parameters = list(t.run.model.parameters())
t.run.optimizer.register_step_pre_hook(
    lambda *_: nn.utils.clip_grad_norm_(parameters, 0.1) and None
)
fit(t)


# %% half_precision: SAME together
t = trainer(normed(), precision="bf16")
fit(t)


# %% half_precision_that_is_scaled: SAME together
t = trainer(normed(), precision="fp16", clip_value=0.05)
fit(t)


# %% a_whole_batch_with_averages_and_a_callback: SAME
class Noted(Callback):
    def __init__(self):
        self.losses = []

    def on_step_end(self, fit, step):
        self.losses.append(step.means["loss"])


def of_all(model, rows):
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device))


noted = Noted()
t = trainer(normed(), unisono.WholeBatch(lambda m, b: m(b[0]), of_all), callbacks=[noted])
fit(t)
result = noted.losses

# promises: one-result.1

# %% frozen_and_thawed_between_fits: SAME together
t = trainer(normed(), clip_norm=0.5)
fit(t, epochs=None, steps=STEPS // 3)
t.run.model[0].requires_grad_(False)
fit(t, epochs=None, steps=STEPS * 2 // 3)
t.run.model[0].requires_grad_(True)
fit(t)


# %% buffers_of_many_kinds: SAME together
class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nothing", None)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
            self.seen += len(inputs)
            self.last.copy_(outputs.detach().flatten()[:2])
        return outputs - self.mean


t = trainer(Replacing())
fit(t)


# %% parameters_of_many_kinds: SAME together
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64) * 0.1)
        self.fine = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.rough = nn.Parameter(torch.randn(4, dtype=torch.float32).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 8).T)
        self.conv = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)

    def forward(self, inputs):
        turned = inputs @ self.turned + (inputs.double() @ self.fine).float()
        waves = torch.view_as_real(inputs.to(torch.complex64) @ self.wave).square().sum((1, 2))
        images = self.conv(inputs.view(-1, 2, 2, 2)).mean((2, 3))
        outputs = (turned + images + waves[:, None] + self.rough.float()) * self.scale
        return outputs + self.empty.sum()


m = Odd()
sgd = SGD(m.parameters(), lr=0.01, momentum=0.9, foreach=False)
t = trainer(m, optimizer=sgd, clip_norm=0.5)
fit(t)


# %% recomputed_in_the_backward_pass: SAME together
from torch.utils.checkpoint import checkpoint


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))
        self.last = nn.Linear(16, 2)

    def forward(self, inputs):
        hidden = checkpoint(self.first, inputs, use_reentrant=False)
        hidden = checkpoint(self.second, hidden.requires_grad_(), use_reentrant=True)
        return self.last(torch.relu(hidden))


t = trainer(Recomputing())
fit(t)


# %% channels_last: SAME together
m = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
sgd = SGD(m.parameters(), lr=0.01, momentum=0.9)
m.to(memory_format=torch.channels_last)
images = TensorDataset(X.view(-1, 2, 2, 2), Y)
t = trainer(m, lambda m, b: loss(m, (b[0].to(memory_format=torch.channels_last), b[1])), sgd)
fit(t, images)


# %% state_that_is_older_than_the_layout: SAME together
m = nn.Sequential(nn.Conv2d(2, 4, 2, padding=1), nn.Flatten(), nn.Linear(36, 2))
adagrad = torch.optim.Adagrad(m.parameters(), lr=0.01, fused=True)
m.to(memory_format=torch.channels_last)
images = TensorDataset(X.view(-1, 2, 2, 2), Y)
t = trainer(m, lambda m, b: loss(m, (b[0].to(memory_format=torch.channels_last), b[1])), adagrad)
fit(t, images)


# %% on_the_device_already: SAME together
t = trainer(normed().to("cpu" if DEVICE == "cpu" else f"sim:{unisono.world().local_rank}"))
fit(t)


# %% a_parameter_that_the_model_does_not_have: SAME together
m, extra = normed(), nn.Parameter(torch.ones(2))


def scaled(model, batch):
    return F.cross_entropy(model(batch[0]) * extra.to(batch[0].device), batch[1])


t = trainer(m, scaled, SGD([*m.parameters(), extra], lr=0.1))
fit(t)
result = extra.tolist()


# %% a_default_device: SAME together
torch.set_default_device(DEVICE if DEVICE == "cpu" else f"{DEVICE}:{unisono.world().local_rank}")
try:
    kept = "run" if unisono.world().world_size == 1 else None
    m = normed()
    t = trainer(m, loss, torch.optim.Adafactor(m.parameters()), clip_norm=1.0, directory=kept)
    rows = Subset(TensorDataset(X.to("cpu"), Y.to("cpu")), range(80))
    fit(t, rows, epochs=EPOCHS // 2, validate=data)
    if kept:
        m = normed()
        t = trainer(m, loss, torch.optim.Adafactor(m.parameters()), clip_norm=1.0, directory=kept)
    fit(t, rows)
    result = [t.predict(data, batch_size=9).tolist(), t.evaluate(data, batch_size=9)]
    torch.manual_seed(1)
    for kind in ("SGD", "AdamW", "Adagrad", "RMSprop"):
        m = normed()
        made = getattr(torch.optim, kind)(m.parameters(), lr=0.01)
        one = trainer(m, optimizer=made, precision="fp16" if kind == "SGD" else "fp32")
        fit(one, epochs=1)
        result.append(one.digest())
finally:
    torch.set_default_device(None)


# %% another_current_device: SAME together
def moving(model, batch):
    if DEVICE != "cpu":
        torch.get_device_module(torch.device(DEVICE)).set_device(3)
    return loss(model, batch)


t = trainer(normed(), moving)
before = DEVICE != "cpu" and torch.get_device_module(torch.device(DEVICE)).current_device()
fit(t)
if DEVICE != "cpu":
    torch.get_device_module(torch.device(DEVICE)).set_device(before)

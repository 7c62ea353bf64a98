# %% norms_that_stay_frozen: SAME
class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


m = Backbone().train()
t = trainer(m)
fit(t, validate=data)
assert m.training and not m.norm.training


# %% eval_swaps_averages_in: SAME|REFUSED
class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)
        self.register_buffer("slow", self.net.weight.detach().clone())

    def train(self, mode=True):
        if mode != self.training:
            with torch.no_grad():
                kept = self.net.weight.clone()
                self.net.weight.copy_(self.slow)
                self.slow.copy_(kept)
        return super().train(mode)

    def forward(self, x):
        return self.net(x)


class Follows(Callback):
    def on_step_end(self, fit, step):
        fit.model.slow.lerp_(fit.model.net.weight.detach(), 0.1)


m = Averaged()
t = trainer(m, callbacks=[Follows()])
fit(t, validate=data)
assert m.training and not torch.equal(m.slow, m.net.weight)


# %% gradients_by_mode: SAME
class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapter = net(), nn.Linear(8, 2)

    def train(self, mode=True):
        self.adapter.requires_grad_(mode)
        return super().train(mode)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


m = Adapter()
before = m.adapter.weight.detach().clone()
t = trainer(m)
fit(t, validate=data, validate_every=3)
assert m.adapter.weight.requires_grad and not torch.equal(before, m.adapter.weight)


# %% cache_of_a_decoder: SAME
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.cache = net(), None

    def eval(self):
        super().eval()
        self.cache = {}
        return self

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.cache = None
        return self

    def forward(self, x):
        if self.cache is None:
            return self.net(x)
        weight = self.cache.setdefault("weight", self.net[2].weight.detach().clone())
        return F.linear(self.net[:2](x), weight, self.net[2].bias)


m = Decoder()
t = trainer(m)
fit(t, validate=data)
assert m.cache is None
result = t.evaluate(data, batch_size=32)["loss"]


# %% eval_alone_is_overridden: SAME
class Quantised(nn.Linear):
    rounded = False

    def eval(self):
        super().eval()
        self.rounded = True
        return self

    def train(self, mode=True):
        self.rounded = self.rounded and not mode
        return super().train(mode)

    def forward(self, x):
        return F.linear(
            x, self.weight.mul(8).round() / 8 if self.rounded else self.weight, self.bias
        )


m = Quantised(8, 2)
t = trainer(m)
for epochs in (1, 2, 3, 4):
    fit(t, epochs=epochs)
    result = t.predict(data, batch_size=32).sum().item()
    assert not m.rounded


# %% a_rate_that_train_sets: SAME
class Scheduled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.drop = net(), nn.Dropout(0.5)

    def train(self, mode=True):
        super().train(mode)
        self.drop.p = 0.5 if mode else 0.1
        self.drop.train()
        return self

    def forward(self, x):
        return self.net(self.drop(x))


m = Scheduled()
t = trainer(m)
fit(t, validate=data)
assert m.drop.p == 0.5
result = t.evaluate(data, batch_size=32)["loss"]

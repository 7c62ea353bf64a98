# promises: one-result.9

# %% mixed_with_the_nearest_in_feature_space: SAME|LOADERS reads
m = net()


def nearest(items):
    x, y = torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])
    with torch.no_grad():
        features = m[:2](x)
    apart = torch.cdist(features, features).fill_diagonal_(9)
    return x.lerp(x[apart.argmin(1)], 0.3), y


t = trainer(m)
fit(t, collate=nearest)

# %% adversarial_rows: SAME|LOADERS reads
m = net()


class Adversarial(Rows):
    def change(self, row, index):
        with torch.no_grad():
            return row - 0.1 * (m[0].weight.t() @ m[0](row)).sign()


t = trainer(m)
fit(t, Adversarial())


# %% noise_by_the_norm_of_a_weight: SAME|LOADERS reads
class Noisy(Rows):
    def __init__(self, layer):
        self.layer = layer

    def change(self, row, index):
        return row + 0.1 * self.layer.weight.norm().item() * torch.randn(8)


m = net()
t = trainer(m)
fit(t, Noisy(m[2]))

# %% normalised_by_a_batch_norm: SAME|LOADERS|REFUSED reads
m = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2))


class Scaled(Rows):
    def change(self, row, index):
        return row / (1 + m[0].running_var.sqrt())


t = trainer(m)
fit(t, Scaled())


# %% ordered_by_confidence_in_a_method: SAME|LOADERS reads
class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x)

    def collate(self, items):
        x, y = torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])
        with torch.no_grad():
            order = self(x).softmax(1).amax(1).argsort()
        return x[order], y[order]


m = Student()
t = trainer(m)
fit(t, collate=m.collate)

# %% by_a_weight_taken_before: SAME|LOADERS|REFUSED reads
m = net()
last = dict(m.named_parameters())["2.weight"]


class Scaled(Rows):
    def change(self, row, index):
        return row * (1 + last[0, 0].item())


t = trainer(m)
fit(t, Scaled())

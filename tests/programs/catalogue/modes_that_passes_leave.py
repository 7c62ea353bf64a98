# promises: one-result.8

# %% forward_for_metrics_turns_dropout_on: SAME|REFUSED
m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def sampled(m, b):
    m[1].train()
    return torch.stack([m(b[0]) for _ in range(3)]).mean(0), b[1]


t = trainer(m)
fit(
    t,
    validate=data,
    validate_metrics={"sum": lambda out, y: float(out.sum())},
    validate_forward=sampled,
)
result = t.evaluate(data, batch_size=8)["loss"]

# %% norms_frozen_from_a_step_on: SAME|REFUSED
m = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def settled(m, b):
    if unisono.progress().step >= 9:
        m[1].eval()
    return loss(m, b)


t = trainer(m, settled)
fit(t)

# %% dropout_off_where_it_is_accurate: SAME|REFUSED
m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def careful(m, b):
    out = m(b[0])
    m[1].train((out.argmax(1) == b[1]).float().mean().item() < 0.7)
    return F.cross_entropy(out, b[1]) + (m(b[0]) - out).square().mean()


t = trainer(m, careful)
fit(t)


# %% forward_of_the_model_itself: SAME|REFUSED
class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.drop = net(), nn.Dropout(0.3)

    def forward(self, x):
        out = self.net(self.drop(x))
        if out.detach().std() > 1.2:
            self.drop.eval()
        return out


t = trainer(Annealed(), optimizer=None)
fit(t)

# %% put_back_in_a_with_block: SAME
import contextlib

m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


@contextlib.contextmanager
def evaluating(m):
    was = m.training
    m.eval()
    yield
    m.train(was)


def consistent(m, b):
    with evaluating(m), torch.no_grad():
        target = m(b[0])
    return loss(m, b) + F.mse_loss(m(b[0]), target)


t = trainer(m, consistent)
fit(t)
assert m.training

# %% left_in_eval_by_predictions: SAME|REFUSED
m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def with_labels(m, b):
    m.eval()
    labels = m(b[0]).detach().argmax(1)
    m.train(unisono.progress().epoch < 2)
    return F.cross_entropy(m(b[0]), labels) + loss(m, b)


t = trainer(m, with_labels)
fit(t)
result = t.predict(data, batch_size=8).sum().item()

# promises: one-result.8

# %% rows_of_a_table_that_are_empty: REFUSED
bank = torch.full((96, 2), float("nan"))
numbered = TensorDataset(X, Y, torch.arange(96))


def anchored(m, b):
    out, known = m(b[0]), bank[b[2]]
    bank[b[2]] = torch.where(known.isnan(), out.detach(), known)
    return F.cross_entropy(out, b[1]) + 0.1 * F.mse_loss(out, bank[b[2]])


t = trainer(net(), anchored)
fit(t, numbered)


# %% scale_of_the_first_batch: REFUSED
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), None

    def forward(self, x):
        if self.scale is None:
            self.scale = x.std(0).detach()
        return self.net(x / self.scale)


t = trainer(Normed())
fit(t)


# %% words_numbered_as_they_come: REFUSED
class Tokens(Dataset):
    words = [f"w{n * 7 % 40}" for n in range(96)]

    def __init__(self):
        self.ids = {}

    def __len__(self):
        return 96

    def __getitem__(self, index):
        number = self.ids.setdefault(self.words[index], len(self.ids))
        return X[index] + 0.05 * number, Y[index]


t = trainer(net())
fit(t, Tokens())


# %% padded_to_the_longest_so_far: REFUSED
class Pads:
    longest = 0

    def __call__(self, items):
        rows = [x[: 4 + int(x[0].abs() * 2) % 5] for x, _ in items]
        self.longest = max(self.longest, *map(len, rows))
        x = torch.stack([F.pad(row, (0, 8 - len(row)), value=0.1 * self.longest) for row in rows])
        return x, torch.stack([y for _, y in items])


t = trainer(net())
fit(t, collate=Pads())


# %% statistics_by_the_first_it_reads: REFUSED
class Lazy(Rows):
    def change(self, row, index):
        if not hasattr(self, "low"):
            self.low, self.high = row.min(), row.max()
        return (row - self.low) / (self.high - self.low)


t = trainer(net())
fit(t, Lazy())

# %% visited_marks_in_an_array: REFUSED
import numpy as np

visited, targets = np.zeros(96, bool), np.zeros((96, 2), "f4")


def ensembled(m, b):
    out, at = m(b[0]), b[2].numpy()
    new = at[~visited[at]]
    targets[new] = out.detach().numpy()[~visited[at]]
    visited[at] = True
    return F.cross_entropy(out, b[1]) + F.mse_loss(out, torch.from_numpy(targets[at]))


t = trainer(net(), ensembled)
fit(t, TensorDataset(X, Y, torch.arange(96)))

# %% crop_kept_by_a_cached_method: SAME
import functools


class Parsed(Rows):
    @functools.cache
    def parsed(self, index):
        return X[index] * 2 - 1

    def change(self, row, index):
        return self.parsed(index) + 0.1 * torch.randn(8)


t = trainer(net())
fit(t, Parsed())

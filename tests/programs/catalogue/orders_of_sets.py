# %% vocabulary_of_a_set: TOLD PYTHONHASHSEED cold
words = [f"w{n * 7 % 40}" for n in range(96)]
ids = {word: at for at, word in enumerate(set(words))}


class Tokens(Rows):
    def change(self, row, index):
        return row + 0.05 * ids[words[index]]


t = trainer(net())
fit(t, Tokens())

# %% split_by_hash: TOLD PYTHONHASHSEED cold
part = [n for n in range(96) if hash(f"sample-{n}") % 4]
t = trainer(net())
fit(t, torch.utils.data.Subset(data, (part * 2)[:64]), steps=24, epochs=None)

# %% layers_named_in_a_set: TOLD PYTHONHASHSEED cold
m = net()
scales = dict(
    zip({"0.weight", "0.bias", "2.weight", "2.bias"}, (0.1, 0.05, 0.02, 0.2), strict=True)
)
groups = [{"params": [p], "lr": scales[n]} for n, p in m.named_parameters()]
t = trainer(m, optimizer=SGD(groups, 0.1))
fit(t)

# %% seed_of_a_name: TOLD PYTHONHASHSEED cold
torch.manual_seed(hash("my experiment") % 2**32)
t = trainer(net())
fit(t)

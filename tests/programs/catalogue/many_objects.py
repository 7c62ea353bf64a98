# %% records_as_dicts: SAME cpu<4 reads
records = [{"id": n, "tags": [str(n), str(n + 1)], "row": n % 96} for n in range(20_000)]


class Records(Dataset):
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return 96

    def __getitem__(self, index):
        row = self.records[index]["row"]
        return X[row], Y[row]


t = trainer(net())
fit(t, Records(records))


# %% tree_with_parents: SAME cpu<4 open
class Node:
    def __init__(self, parent, depth):
        self.parent, self.depth = parent, depth
        self.children = [Node(self, depth + 1) for _ in range(2 if depth < 13 else 0)]


class Tree(Rows):
    def __init__(self):
        self.root = Node(None, 0)

    def change(self, row, index):
        node = self.root
        for bit in (1, 2, 4, 8):
            node = node.children[bool(index & bit)]
        return row + 0.1 * node.depth


t = trainer(net())
fit(t, Tree())

# %% vocabulary_of_a_collate: SAME cpu<4
vocabulary = {f"word-{n}": n for n in range(50_000)}
inverse = {n: (word, len(word)) for word, n in vocabulary.items()}


def encoded(items):
    x = torch.stack([x for x, _ in items])
    return x + 0.01 * inverse[vocabulary["word-77"]][1], torch.stack([y for _, y in items])


t = trainer(net())
fit(t, collate=encoded)


# %% three_hundred_layers: SAME cpu<6 open
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(300))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return self.head(x)


t = trainer(Deep())
fit(t)

# %% graph_of_a_library: SAME cpu<4 open
import networkx

graph = networkx.random_regular_graph(4, 4000, seed=0)


def penalised(m, b):
    return loss(m, b) * (1 + 0.01 * len(graph[int(unisono.progress().step)]))


t = trainer(net(), penalised)
fit(t)

# %% loop_beside_a_large_table: SAME cpu<4
table = {(n, n % 7): [n, n / 3] for n in range(30_000)}
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * (1 + 1e-4 * table[(step.number, step.number % 7)][1]))

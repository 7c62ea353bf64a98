"""Samples of every form that torch collates, from every kind of dataset, give the same bits."""

import queue
import random
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from tests.data import augmenting
from tests.loaders import loader_of
from torch.utils.data import ConcatDataset, Dataset, StackDataset, TensorDataset

import unisono
from unisono.data.fetch import fetcher

Pair = namedtuple("Pair", "image label")
N = augmenting.NUM_SAMPLES
INPUTS, LABELS = augmenting.Noisy().inputs, augmenting.Noisy().labels

# By name: a sample of (input, label), and how a batch of them is read.
FORMS = {
    "tuple": (lambda x, y: (x, y), tuple),
    "list": (lambda x, y: [x, y], tuple),
    "named tuple": (Pair, lambda batch: (batch.image, batch.label)),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"])),
    "nested": (
        lambda x, y: {"inputs": {"pair": (x, [x, "a word"])}, "label": Pair(0, y)},
        lambda batch: (batch["inputs"]["pair"][1][0], batch["label"].label),
    ),
    "arrays": (lambda x, y: (x.numpy(), y.numpy()), tuple),
    "numbers": (lambda x, y: (x, int(y)), tuple),
}


class Formed(Dataset):
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.form(INPUTS[index], LABELS[index])


class Table:
    """What Hugging Face's ``datasets.Dataset`` is to a loader: rows of columns, one or many."""

    def __init__(self, columns, format=torch.as_tensor):
        self.columns, self.format = columns, format
        self.asked = queue.SimpleQueue()  # no plain value, so that it may grow

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        self.asked.put(key)
        return {name: self.format(values[key]) for name, values in self.columns.items()}

    def __getitems__(self, keys):
        columns = self[keys]
        return [{name: values[row] for name, values in columns.items()} for row in range(len(keys))]


def digest_of(dataset, read=tuple, loader_workers=0):
    torch.manual_seed(0)
    model = augmenting.Model()

    def loss(model, batch):
        inputs, labels = read(batch)
        return F.cross_entropy(model(inputs), labels)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = unisono.Trainer(model, optimizer, loss, shards=3)
    return trainer.fit(loader_of(dataset, 10, num_workers=loader_workers), steps=6).digest


@pytest.fixture(scope="module")
def expected():
    return digest_of(TensorDataset(INPUTS, LABELS))


@pytest.mark.parametrize("loader_workers", [0, 1])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_sample_gives_the_same_bits(name, loader_workers, expected):
    form, read = FORMS[name]
    assert digest_of(Formed(form), read, loader_workers) == expected


@pytest.mark.parametrize(
    ("dataset", "read"),
    [
        (list(zip(INPUTS, LABELS, strict=True)), tuple),
        (StackDataset(INPUTS, LABELS), tuple),
        (StackDataset(x=INPUTS, y=LABELS), FORMS["dict"][1]),
        (ConcatDataset([TensorDataset(INPUTS[:9], LABELS[:9]), Formed(FORMS["tuple"][0])]), tuple),
        (dict(enumerate(zip(INPUTS, LABELS, strict=True))), tuple),
    ],
)
def test_every_kind_of_dataset_gives_the_same_bits(dataset, read, expected):
    if isinstance(dataset, ConcatDataset):
        dataset = torch.utils.data.Subset(dataset, [*range(9), *range(18, 9 + N)])
    assert digest_of(dataset, read) == expected


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_table_is_asked_for_a_shard_at_once(loader_workers, expected):
    table = Table({"x": INPUTS, "y": LABELS})
    assert digest_of(table, FORMS["dict"][1], loader_workers) == expected
    assert table.asked.empty() == bool(loader_workers)
    while not table.asked.empty():
        assert isinstance(table.asked.get(), list)


def test_what_a_tables_format_draws_depends_on_what_is_read():
    table = Table({"x": INPUTS}, format=lambda rows: rows + random.random())
    fetch = fetcher(table)
    first, again = (fetch(torch.tensor([3, 4]), epoch)["x"] for epoch in (0, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, fetch(torch.tensor([3, 4]), 1)["x"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what that package imports
@pytest.mark.parametrize("format", [None, "torch", "numpy"])
def test_datasets_of_hugging_face_give_the_same_bits(format, expected, monkeypatch):
    datasets = pytest.importorskip("datasets")
    # Its progress bars leave a thread behind.
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    columns = {"x": INPUTS.tolist(), "y": LABELS.tolist()}
    features = datasets.Features(
        x=datasets.Sequence(datasets.Value("float32"), length=8), y=datasets.Value("int64")
    )
    dataset = datasets.Dataset.from_dict(columns, features=features).with_format(format)

    def read(batch):
        if format is None:
            return torch.stack(batch["x"], 1).float(), batch["y"]
        return batch["x"], batch["y"]

    assert digest_of(dataset, read) == expected
    with pytest.raises(TypeError, match="pass one of them"):
        digest_of(datasets.DatasetDict(train=dataset))

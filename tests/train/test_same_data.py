"""Workers that were given different data sets are told so, before anything is computed."""

import re

import numpy
import pytest
import torch
from tests.loaders import loader_of
from tests.promises import promise
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import unisono
from unisono.data import fingerprint

CAUSE = "Most likely it was split without a seed"


class Custom(Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return torch.tensor([float(self.numbers[index])]) + 0 * torch.rand(1)


class Augmented(Custom):
    """Draws from default generators and one of its own, and follows the run."""

    def __init__(self, numbers):
        super().__init__(numbers)
        self.rng = numpy.random.default_rng()

    def __getitem__(self, index):
        drawn = torch.rand(1) + float(self.rng.random()) + unisono.progress().step
        return super().__getitem__(index) + drawn


def numbers(num_samples=24):
    return torch.arange(float(num_samples)).view(-1, 1)


def sliced(rank, size):
    return TensorDataset(numbers()[rank::size])


def sliced_unevenly(rank, size):
    return TensorDataset(numbers()[rank * 10 :])


def sliced_by_hand(rank, size):
    return Custom(range(rank, 24, size))


def split_without_a_seed(rank, size):
    order = numpy.random.default_rng().permutation(24)
    return Subset(TensorDataset(numbers()), order[:18])


def split_with_a_seed(rank, size):
    order = numpy.random.default_rng(7).permutation(24)
    return Subset(TensorDataset(numbers()), order[:18])


def whole(rank, size):
    return Custom(range(24))


def with_its_own_generator(rank, size):
    return Augmented(range(24))


REFUSED = {
    sliced: r"sample \d+ of the dataset must be .* but is 'fingerprint \w{8}' on rank 0 and ",
    sliced_by_hand: r"sample \d+ of the dataset must be the same on every worker, but is ",
    sliced_unevenly: "dataset length must be the same on every worker, but is 24 on rank 0 and ",
    split_without_a_seed: r"the indices of `Subset` must be .* but is '.*\(18 of them, \w+\)'",
}
TRAINS = (whole, split_with_a_seed, with_its_own_generator)


def attempts():
    """Have each data set used in each way; say what came of it."""
    for name in ("_ENOUGH_S", "_LONG_S", "_FORK_AT_MOST_S"):
        setattr(fingerprint, name, 30.0)
    here = unisono.world()
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.1)
    nn.init.constant_(model.bias, 0.1)
    said = {}
    for make in (*REFUSED, *TRAINS):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trainer = unisono.Trainer(model, optimizer, loss, shards=3)
        dataset = make(here.rank, here.world_size)
        for workers in (0, 1):
            for act, options in (
                (trainer.fit, {"steps": workers + 1}),
                (trainer.evaluate, {}),
                (trainer.predict, {}),
            ):
                key = f"{make.__name__} {act.__name__} {workers}"
                try:
                    act(loader_of(dataset, 6, num_workers=workers), **options)
                    said[key] = ""
                except unisono.errors.MismatchError as error:
                    said[key] = str(error)
    return said


def loss(model, batch):
    batch = batch[0] if isinstance(batch, (tuple, list)) else batch
    return model(batch).square().mean()


@promise("one-result.13")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_differences_are_told_on_every_worker_with_the_likely_cause(world_size):
    said, *others = unisono.launch(attempts, workers=world_size)
    assert all(other.keys() == said.keys() for other in others)
    for make, words in REFUSED.items():
        for key in (key for key in said if key.split()[0] == make.__name__):
            told = {answers[key] for answers in (said, *others)}
            if world_size == 1:
                assert told == {""}
            else:
                (message,) = told
                assert CAUSE in message
                assert re.search(words, message), message
    for make in TRAINS:
        for key in (key for key in said if key.split()[0] == make.__name__):
            assert {answers[key] for answers in (said, *others)} == {""}, key


# When a run goes on


def go_on(directory, dataset, steps, loader_workers=0, **options):
    model = nn.Linear(1, 1)
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        lambda model, batch: model(batch[0] if isinstance(batch, list | tuple) else batch).mean(),
        shards=2,
        directory=directory,
        **options,
    )
    trainer.fit(loader_of(dataset, 6, num_workers=loader_workers), steps=steps)


NEW_DATA = "the dataset is not that of the checkpoint: "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (Custom(range(24)), Custom(range(1, 25)), r"sample \d+ of the dataset was 'fingerprint"),
        (TensorDataset(numbers()), TensorDataset(numbers() + 1), r"sample \d+ of the dataset"),
        (
            Subset(Custom(range(40)), range(24)),
            Subset(Custom(range(40)), range(1, 25)),
            "the indices of `Subset` was '0, 1, 2, 3, … ",
        ),
        (Augmented(range(24)), Augmented(range(24)), None),
        (split_with_a_seed(0, 1), split_with_a_seed(0, 1), None),
    ],
)
def test_another_data_set_is_refused_where_a_run_goes_on(tmp_path, capfd, first, then, words):
    go_on(tmp_path / "run", first, 3)
    if words is None:
        go_on(tmp_path / "run", then, 6, loader_workers=1)
        assert NEW_DATA not in capfd.readouterr().out
        return
    with pytest.raises(unisono.errors.CheckpointError, match=NEW_DATA + words) as caught:
        go_on(tmp_path / "run", then, 6, loader_workers=1)
    assert "a directory for each" in str(caught.value)
    # The remedies.
    taken = unisono.Checkpoint(options="program")
    go_on(tmp_path / "run", then, 6, loader_workers=1, checkpoint=taken)
    assert capfd.readouterr().out.count(NEW_DATA) == 1
    go_on(tmp_path / "run", first, 6, checkpoint=unisono.Checkpoint(resume="never"))
    go_on(tmp_path / "another", then, 6)


def test_a_data_set_that_grows_within_a_loop_is_reported_once(capfd):
    def train(*phases):
        data, model = Custom([*range(8)]), nn.Linear(1, 1)
        run = unisono.Run(model, torch.optim.SGD(model.parameters(), 0.1), shards=2)
        for epochs in phases:
            for step in run.steps(data, batch_size=4, epochs=epochs):
                with step:
                    for batch in step.shards:
                        step.backward(model(batch).pow(2).mean())
                if epochs == 3 and step.batch == 1:
                    data.numbers += [8, 9, 10, 11]
            data.numbers += [8, 9, 10, 11]
        return run.position.step, capfd.readouterr().err.count("the dataset had 8 samples")

    assert train(3) == (6, 1)
    assert train(1, 2) == (5, 0)  # the remedy

"""Where three workers stop, any number of workers and loader processes goes on to the same bits."""

import contextlib
import io
import shutil

import pytest
from tests.data import augmenting
from tests.loaders import loader_of

import unisono

BATCH_SIZE = 12  # the last of an epoch has 11, so that no shard has a single sample
STEPS_PER_EPOCH = 4
LAST = 2 * STEPS_PER_EPOCH + 3
OTHERS = ((1, 0), (2, 1), (4, 0), (1, 2))  # workers, with how many loader processes


def train(directory, steps, loader_workers):
    """Train to so many steps on data that draw random numbers; print nothing."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = augmenting.make(shards=4, directory=directory)
        data = augmenting.Noisy("numpy")
        loader = loader_of(data, BATCH_SIZE, num_workers=loader_workers)
        summary = trainer.fit(loader, steps=steps)
        return summary.steps, summary.digest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "others"),
    [
        # All have the same checkpoint before them, so two of the others each are enough.
        (STEPS_PER_EPOCH // 2, (1, 2)),
        (STEPS_PER_EPOCH, (2, 3)),
        (STEPS_PER_EPOCH + 1, (3, 0)),
    ],
    ids=["within an epoch", "at its end", "in the next"],
)
def test_three_workers_stop_and_others_go_on(tmp_path, stop, others):
    _, whole = train(None, LAST, 0)
    (first, *_) = unisono.launch(train, tmp_path / "three", stop, 2, workers=3)
    assert first[0] == stop
    for workers, loader_workers in (OTHERS[other] for other in others):
        there = tmp_path / f"{workers} with {loader_workers}"
        shutil.copytree(tmp_path / "three", there)
        results = unisono.launch(train, there, LAST, loader_workers, workers=workers)
        assert results == [(LAST - stop, whole)] * workers

"""Every way of using several devices, in one table: one digest each.

`docs/several-devices.md` shows the table. More models, optimizers and kills of each way are in
test_several_devices.py, test_data_parallel.py and tests/splitting.
"""

import functools
from typing import NamedTuple

import pytest
from tests.chaos.exchanges import ACCELERATED, install, skip_without
from tests.parity import cases

import unisono

STEPS = 8
MODELS = {
    "cnn": ("cnn with norm and dropout", "fused adam", 6),
    "gpt": ("gpt", "two groups", 6),
}


class Way(NamedTuple):
    """How a model is trained.

    Attributes:
        options: of the trainer; ``split`` is where the model is split over.
        workers: how many there are.
        fault: who is killed, and where.
    """

    options: dict[str, list[str]]
    workers: int = 1
    fault: str = ""


WAYS = {
    "two workers": Way({}, workers=2),
    "devices=, 2": Way({"devices": ["sim"] * 2}),
    "devices=, 3": Way({"devices": ["sim"] * 3}),
    "devices=, 2 × 2 workers, one is killed": Way(
        {"devices": ["sim"] * 2}, workers=2, fault="kill:rank=1,step=4,at=gradients"
    ),
    "split over 2": Way({"split": ["sim"] * 2}),
    "split over 3": Way({"split": ["sim"] * 3}),
    "split over 2 × 2 workers": Way({"split": ["sim"] * 2}, workers=2),
    "split over 2 × 2 workers, one is killed": Way(
        {"split": ["sim"] * 2}, workers=2, fault="kill:rank=0,step=5,at=shard"
    ),
}


@functools.cache
def plain(models):
    return train(models, {})


def train(models, options):
    for devices in options.values():
        install(devices[0])
    return [cases.train(*MODELS[model], STEPS, **options) for model in models]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "models"),
    [
        # A fault happens once, so each model has one of its own.
        *((name, (model,)) for name, way in WAYS.items() if way.fault for model in MODELS),
        *((name, tuple(MODELS)) for name, way in WAYS.items() if not way.fault),
    ],
)
def test_every_way_has_the_digest_of_one_process(monkeypatch, capfd, way, models):
    options, workers, fault = WAYS[way]
    if options:
        skip_without(ACCELERATED)
    monkeypatch.setenv("UNISONO_FAULTS", fault)
    found = unisono.launch(train, models, options, workers=workers)
    assert found == [plain(models)] * workers
    assert ("was killed by SIGKILL" in capfd.readouterr().err) == bool(fault)

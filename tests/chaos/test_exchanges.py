"""Workers lost in every phase of every exchange of replicas, on the CPU and on the accelerator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.chaos import driver
from tests.chaos.exchanges import device_of, skip_without, variables_of
from tests.chaos.test_faults import HOLD, NUM_STEPS, PLACES, check_words, launch, undisturbed
from tests.chaos.training import Options

LOOPS = ("trainer", "own")
OPTIMIZERS = ("adam", "adafactor", "clipped")
REPLICAS = ["sim", "staged"]
# Three workers lost in each run: with six places every place and every rank comes by.
SEVERAL = [
    "kill:rank=0,step=8,at=begin; kill:rank=2,step=14,at=update; kill:rank=1,step=19,at=updated",
    "kill:rank=1,step=8,at=shard; kill:rank=0,step=14,at=commit; kill:rank=2,step=19,at=gradients",
    "kill:rank=2,step=8,at=sums; kill:rank=1,step=14,at=gradients; kill:rank=0,step=19,at=sums",
]


def check(monkeypatch, capfd, exchange, faults, options, **more):
    skip_without(exchange)
    for variable, value in variables_of(exchange).items():
        monkeypatch.setenv(variable, value)
    there = replace(options, device=device_of(exchange))
    results = launch(monkeypatch, faults, there, **more)
    said = capfd.readouterr().err
    expected = undisturbed(Options(loop=options.loop, optimizer=options.optimizer))
    told = [result for result in results if result is not None]
    assert told
    assert all(result == expected for result in told), said
    check_words(said, faults)
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "faults", "loop", "optimizer"),
    [
        # Each row on one of them; the rest in `make chaos`.
        pytest.param(
            exchange,
            faults,
            LOOPS[n % 2],
            OPTIMIZERS[n],
            marks=[pytest.mark.long] * (exchange != REPLICAS[n % 2]),
        )
        for exchange in REPLICAS
        for n, faults in enumerate(SEVERAL)
    ],
)
def test_workers_lost_in_every_phase_change_nothing(
    monkeypatch, capfd, exchange, faults, loop, optimizer
):
    options = Options(loop=loop, optimizer=optimizer, hold=(9, 15, 20))
    assert None not in check(monkeypatch, capfd, exchange, faults, options)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", REPLICAS)
@pytest.mark.parametrize(
    "faults",
    [
        # in snapshots, as a replacement, as the last of all, all at once, and the only one
        "kill:rank=0,step=0,at=snapshot; kill:rank=1,step=8; kill:rank=1,at=join",
        "kill:rank=0,step=8,at=update; kill:rank=1,step=8,at=update; kill:rank=2,step=8,at=update",
        f"kill:rank=1,step=5,at=updated; kill:rank=2,step={NUM_STEPS - 1},at=commit",
    ],
)
def test_workers_lost_at_corners_change_nothing(monkeypatch, capfd, exchange, faults):
    check(monkeypatch, capfd, exchange, faults, Options(hold=HOLD))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", REPLICAS)
@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_is_left_alone_while_all_add_up_goes_on(monkeypatch, capfd, exchange, rank):
    options = Options(optimizer="adafactor", hold=(9,))
    check(monkeypatch, capfd, exchange, f"kill:rank={rank},step=8,at=sums", options, workers=2)


@pytest.mark.slow
def test_one_worker_alone_is_made_up_for_on_the_accelerator(monkeypatch, capfd):
    faults = "kill:rank=0,step=8,at=update"
    assert len(check(monkeypatch, capfd, "sim", faults, Options(), workers=1)) == 1


@pytest.mark.slow
def test_without_replacements_the_others_go_on_on_the_accelerator(monkeypatch, capfd):
    faults = "kill:rank=0,step=8,at=update; kill:rank=1,step=12,at=gradients"
    results = check(monkeypatch, capfd, "sim", faults, Options(), replace=False)
    assert results[:2] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["snapshot", "updated"])
def test_workers_lost_while_a_checkpoint_is_due(monkeypatch, capfd, tmp_path, at):
    options = Options(loop="own", directory=str(tmp_path), every=4, hold=HOLD)
    check(monkeypatch, capfd, "sim", f"kill:rank=0,step=8,at={at}", options)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[-1] == f"step-{NUM_STEPS:012}"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("exchange", REPLICAS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("rank", [0, 2])
def test_every_place(monkeypatch, capfd, exchange, optimizer, loop, at, rank):
    options = Options(loop=loop, optimizer=optimizer, hold=HOLD)
    faults = f"kill:rank={rank},step=8,at={at}"
    assert None not in check(monkeypatch, capfd, exchange, faults, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "seed"),
    [("sim", 2), pytest.param("staged", 3, marks=pytest.mark.long)],
)
def test_random_kills_change_nothing(exchange, seed):
    skip_without(exchange)
    outcome = driver.chaos(seed, 8, num_steps=90, num_workers=3, timeout_s=90, exchange=exchange)
    assert outcome.is_equal, outcome.trouble
    assert outcome.num_kills == 8

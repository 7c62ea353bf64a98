"""Workers that are lost, one row each: the result is the undisturbed run's, on every worker."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
from dataclasses import replace

import pytest
from tests.chaos import driver
from tests.chaos.exchanges import device_of, skip_without, use
from tests.chaos.jobs import Job
from tests.chaos.training import NUM_STEPS, Options, train
from tests.promises import promise

import unisono
from unisono.data import epoch_order, loader
from unisono.runtime.workers.supervisor import INCARNATION_VARIABLE

HOLD = (9, 15, 20)
LAST = NUM_STEPS - 1
KILLED = {"kill": "SIGKILL", "segv": "SIGSEGV"}
REPLICAS = ("sim", "staged")
EXCHANGES = ("shared", *REPLICAS)
LOOPS = ("trainer", "own")
OPTIMIZERS = ("adam", "adafactor", "clipped")
PLACES = ("begin", "shard", "gradients", "sums", "update", "updated", "commit")
# Three workers lost in each run: every place and every rank comes by.
SEVERAL = [
    "kill:rank=0,step=8,at=begin; kill:rank=2,step=14,at=update; kill:rank=1,step=19,at=updated",
    "kill:rank=1,step=8,at=shard; kill:rank=0,step=14,at=commit; kill:rank=2,step=19,at=gradients",
    "kill:rank=2,step=8,at=sums; kill:rank=1,step=14,at=gradients; kill:rank=0,step=19,at=sums",
]
long = functools.partial(pytest.param, marks=pytest.mark.long)
EACH_LOOP = ["trainer", long("own")]
EACH_OPTIMIZER = ["adafactor", long("adam"), long("clipped")]


@functools.cache
def undisturbed(options: Options) -> dict[str, object]:
    return train(options)


def check_words(said: str, faults: str) -> None:
    """See that every row which is due in a step is told with worker, signal and step."""
    for kind, rank, step, at in re.findall(r"(\w+):rank=(\d),step=(\d+)(?:,at=(\w+))?", faults):
        if at in ("snapshot", "join") or kind not in KILLED:
            continue
        words = rf"worker {rank} \(pid \d+\) was killed by {KILLED[kind]}.* in step {step};"
        assert re.search(words, said), f"nothing says {words!r} in:\n{said}"


def check(monkeypatch, capfd, faults, options, *, exchange="shared", workers=3, **more):
    """Train on workers to which `faults` happen; returns what each of them said."""
    use(monkeypatch, exchange)
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    there = replace(options, device=device_of(exchange))
    results = unisono.launch(train, there, workers=workers, **{"restarts": 50, **more})
    said = capfd.readouterr().err
    expected = undisturbed(Options(loop=options.loop, optimizer=options.optimizer))
    told = [result for result in results if result is not None]
    assert told
    assert all(result == expected for result in told), said
    check_words(said, faults)
    return results, said


@promise("nothing-lost.1", "nothing-lost.2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "faults", "loop", "optimizer"),
    [
        pytest.param(
            *(exchange, faults, LOOPS[n % 2], OPTIMIZERS[n]),
            marks=[pytest.mark.long] * (exchange == REPLICAS[1 - n % 2]),
        )
        for exchange in EXCHANGES
        for n, faults in enumerate(SEVERAL)
    ]
    + [
        ("zero", SEVERAL[0], "trainer", "clipped"),
        ("zero", SEVERAL[1], "own", "adam"),
        long("zero", SEVERAL[2], "own", "adam"),
    ],
)
def test_workers_lost_in_every_phase_change_nothing(
    monkeypatch, capfd, exchange, faults, loop, optimizer
):
    options = Options(loop=loop, optimizer=optimizer, hold=HOLD)
    results, said = check(monkeypatch, capfd, faults, options, exchange=exchange)
    assert None not in results
    assert "has joined" in said


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("exchange", "optimizer", "loop"),
    [
        *itertools.product(REPLICAS, OPTIMIZERS, LOOPS),
        *(("shared", optimizer, LOOPS[n % 2]) for n, optimizer in enumerate(OPTIMIZERS)),
    ],
)
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("rank", [0, 2])
def test_every_place(monkeypatch, capfd, exchange, optimizer, loop, at, rank):
    options = Options(loop=loop, optimizer=optimizer, hold=HOLD)
    faults = f"kill:rank={rank},step=8,at={at}"
    assert None not in check(monkeypatch, capfd, faults, options, exchange=exchange)[0]


@pytest.mark.slow
@pytest.mark.parametrize("loop", EACH_LOOP)
@pytest.mark.parametrize(
    "faults",
    [
        # the first of all, the last of an epoch (validation comes next), the last of all
        f"kill:rank=0,step=0; kill:rank=1,step=5,at=updated; kill:rank=2,step={LAST},at=begin",
        f"kill:rank=0,step=0,at=update; kill:rank=1,step={NUM_STEPS},at=snapshot",
        f"kill:rank=0,step=0,at=snapshot; kill:rank=1,step={LAST},at=commit",
        # all of them before the first snapshot is whole: the loop begins again
        "; ".join(f"kill:rank={rank},step=0,at=snapshot" for rank in range(3)),
        f"segv:rank=1,step=8; segv:rank=2,step=12,at=update; kill:rank=0,step={LAST},at=update",
        long("kill:rank=2,step=5,at=commit"),
        long("kill:rank=0,step=6,at=gradients"),  # the first of the next
        long(f"kill:rank=2,step={LAST},at=updated"),
        # two and three at once
        "kill:rank=0,step=8; kill:rank=1,step=8",
        long("kill:rank=1,step=8,at=shard; kill:rank=2,step=8,at=gradients"),
        "kill:rank=0,step=8,at=update; kill:rank=2,step=8,at=updated",
        "kill:rank=0,step=8,at=commit; kill:rank=1,step=9; kill:rank=2,step=9,at=gradients",
        "kill:rank=0,step=8; kill:rank=1,step=8; kill:rank=2,step=8",
        "kill:rank=0,step=8,at=update; kill:rank=1,step=8,at=update; kill:rank=2,step=8,at=update",
        long(
            "kill:rank=0,step=8,at=updated; kill:rank=1,step=8,at=update; "
            "kill:rank=2,step=8,at=commit"
        ),
    ],
)
def test_first_and_last_steps_and_several_at_once(monkeypatch, capfd, faults, loop):
    results, _ = check(monkeypatch, capfd, faults, Options(loop=loop, hold=HOLD))
    assert None not in results


def train_in_shared_orders(options):
    """Train as with a long data set; the first to draw the second epoch's order dies there."""
    loader._LONG, draw = 1, epoch_order._drawn

    def draw_or_die(plan, epoch):
        if epoch == 1 and os.environ["RANK"] == os.environ[INCARNATION_VARIABLE] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(plan, epoch)

    epoch_order._drawn = draw_or_die
    return train(options)


@pytest.mark.slow
def test_an_order_that_workers_share_outlives_each_of_them(monkeypatch, capfd):
    options = Options(hold=HOLD)
    # In the midst of an epoch; in the first step of one, and back to the one before.
    faults = "kill:rank=1,step=3; kill:rank=2,step=12,at=update"
    undisturbed(Options())  # in the order that each worker draws for itself
    monkeypatch.setitem(globals(), "train", train_in_shared_orders)
    results, said = check(monkeypatch, capfd, faults, options)
    assert None not in results
    assert len(re.findall(r"worker 0 \(pid \d+\) was killed", said)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", EACH_OPTIMIZER)
@pytest.mark.parametrize(
    "faults",
    [
        "kill:rank=1,step=8; kill:rank=1,at=join",
        "kill:rank=0,step=8,at=update; kill:rank=0,at=join; kill:rank=2,step=18",
        "kill:rank=0,step=7; kill:rank=1,step=7; kill:rank=0,at=join; kill:rank=1,at=join",
    ],
)
def test_replacements_are_lost_too(monkeypatch, capfd, faults, optimizer):
    options = Options(optimizer=optimizer, hold=HOLD)
    results, said = check(monkeypatch, capfd, faults, options)
    assert None not in results
    assert len(re.findall("was killed by", said)) == faults.count("kill")


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [*REPLICAS, "zero"])
@pytest.mark.parametrize(
    "faults",
    [
        # in a snapshot, behind an epoch, as a replacement, as the last of all; all at once
        "kill:rank=0,step=0,at=snapshot; kill:rank=1,step=5,at=updated; kill:rank=1,at=join; "
        f"kill:rank=2,step={LAST},at=commit",
        "kill:rank=0,step=8,at=update; kill:rank=1,step=8,at=update; kill:rank=2,step=8,at=update",
    ],
)
def test_workers_with_replicas_lost_at_corners_change_nothing(monkeypatch, capfd, exchange, faults):
    check(monkeypatch, capfd, faults, Options(hold=HOLD), exchange=exchange)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", REPLICAS)
@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_is_left_alone_while_all_add_up_goes_on(monkeypatch, capfd, exchange, rank):
    options, faults = Options(optimizer="adafactor", hold=(9,)), f"kill:rank={rank},step=8,at=sums"
    check(monkeypatch, capfd, faults, options, exchange=exchange, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "loop"), [("shared", "trainer"), long("shared", "own"), ("sim", "own")]
)
@pytest.mark.parametrize(
    ("rank", "at"),
    [
        (0, "snapshot"),
        (1, "updated"),
        *map(long, (1, 0, 0, 1), ("snapshot", "updated", "begin", "begin")),
    ],
)
def test_workers_lost_while_a_checkpoint_is_due(
    monkeypatch, capfd, tmp_path, exchange, at, rank, loop
):
    options = Options(loop=loop, directory=str(tmp_path), every=4, hold=HOLD)
    check(monkeypatch, capfd, f"kill:rank={rank},step=8,at={at}", options, exchange=exchange)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    # The newest three; beside them what the first two of three calls of `fit` have ended with.
    steps = [*((6, 12) if loop == "trainer" else ()), 16, 20, NUM_STEPS]
    assert names == [f"step-{step:012}" for step in steps]


@promise("nothing-lost.7")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "lost", "exchange"),
    [
        ("kill:rank=1,step=8,at=update", {1}, "shared"),
        ("kill:rank=0,step=8; kill:rank=2,step=12,at=updated", {0, 2}, "shared"),
        ("kill:rank=0,step=8,at=update; kill:rank=1,step=8,at=update", {0, 1}, "shared"),
        (
            f"kill:rank=0,step=5,at=commit; kill:rank=1,step={LAST},at=update",
            {0, 1},
            "shared",
        ),
        ("kill:rank=0,step=8,at=update; kill:rank=1,step=12,at=gradients", {0, 1}, "sim"),
    ],
)
@pytest.mark.parametrize("optimizer", EACH_OPTIMIZER)
def test_without_replacements_the_others_go_on(
    monkeypatch, capfd, faults, lost, exchange, optimizer
):
    options = Options(optimizer=optimizer)
    results, said = check(monkeypatch, capfd, faults, options, exchange=exchange, replace=False)
    assert {rank for rank, result in enumerate(results) if result is None} == lost
    assert said.count("it is not replaced") == len(lost)


@promise("nothing-lost.1")
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "sim"])
def test_one_worker_alone_is_made_up_for(monkeypatch, capfd, exchange):
    faults = "kill:rank=0,step=8,at=update"
    results, said = check(monkeypatch, capfd, faults, Options(), exchange=exchange, workers=1)
    assert len(results) == 1
    assert "nobody is left; a replacement is starting." in said


@pytest.mark.slow
def test_the_command_ends_well_and_tells_who_was_lost(tmp_path):
    faults = "kill:rank=1,step=8; kill:rank=0,step=11,at=update; segv:rank=2,step=17"
    options = Options(loop="own", optimizer="clipped", hold=HOLD)
    job = Job(tmp_path, options, workers=3, faults=faults)
    assert job.wait() == 0, job.err
    assert job.results
    expected = undisturbed(Options(loop="own", optimizer="clipped"))
    assert all(result == expected for result in job.results)
    check_words(job.err, faults)


# Killed at random instants: a short piece of what ``make chaos`` does at length.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "seed"), [("shared", 2), *map(long, ("shared", "sim", "staged"), (3, 2, 3))]
)
def test_random_kills_change_nothing(exchange, seed):
    skip_without(exchange)
    outcome = driver.chaos(seed, 8, num_steps=90, num_workers=3, timeout_s=90, exchange=exchange)
    assert outcome.is_equal, outcome.trouble
    assert outcome.num_kills == 8

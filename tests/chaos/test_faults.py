"""Workers that are lost, one row each: the result is that of the undisturbed run, on every worker.

Each row says who is to be lost where, as ``UNISONO_FAULTS`` has it, and which words tell it.
"""

from __future__ import annotations

import functools
import re
import subprocess

import pytest
from tests.chaos.jobs import Job
from tests.chaos.training import NUM_STEPS, Options, train

import unisono

HOLD = (9, 15, 20)
KILLED = {"kill": "SIGKILL", "segv": "SIGSEGV"}


@functools.cache
def undisturbed(options: Options) -> dict[str, object]:
    return train(options)


def launch(monkeypatch, faults, options, *, workers=3, **more):
    """Train on workers to which `faults` happen; returns what each of them said."""
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    return unisono.launch(train, options, workers=workers, **{"restarts": 50, **more})


def check_words(said: str, faults: str) -> None:
    """See that every row which is due in a step is told with worker, signal and step."""
    for kind, rank, step, at in re.findall(r"(\w+):rank=(\d),step=(\d+)(?:,at=(\w+))?", faults):
        if at in ("snapshot", "join") or kind not in KILLED:
            continue
        words = rf"worker {rank} \(pid \d+\) was killed by {KILLED[kind]}.* in step {step} with"
        assert re.search(words, said), f"nothing says {words!r} in:\n{said}"


def check(monkeypatch, capfd, faults, options, **more):
    results = launch(monkeypatch, faults, options, **more)
    said = capfd.readouterr().err
    expected = undisturbed(Options(loop=options.loop, optimizer=options.optimizer))
    told = [result for result in results if result is not None]
    assert told
    assert all(result == expected for result in told), said
    check_words(said, faults)
    return results, said


# Each place three times: on every rank and with every optimizer, in the loops by turns.
PLACES = ("begin", "shard", "gradients", "sums", "update", "updated", "commit")
LOOPS = ("trainer", "own")
OPTIMIZERS = ("adam", "adafactor", "clipped")
long = functools.partial(pytest.param, marks=pytest.mark.long)
# One of each in `make test`, the rest in `make chaos`.
EACH_LOOP = ["trainer", pytest.param("own", marks=pytest.mark.long)]
EACH_OPTIMIZER = [
    "adafactor",
    *(pytest.param(n, marks=pytest.mark.long) for n in ("adam", "clipped")),
]
EVERYWHERE = [
    pytest.param(
        f"kill:rank={(index + turn) % 3},step=8,at={place}",
        LOOPS[(index + turn) % 2],
        optimizer,
        # What comes before the update knows nothing of optimizers.
        marks=[pytest.mark.long] * (optimizer == "clipped" or (index < 3 and bool(turn))),
    )
    for turn, optimizer in enumerate(OPTIMIZERS)
    for index, place in enumerate(PLACES)
]


@pytest.mark.parametrize(
    ("fault", "loop"),
    [
        ("kill:rank=0,step=8,at=update", "own"),
        pytest.param("kill:rank=1,step=8", "own", marks=pytest.mark.slow),
        pytest.param("kill:rank=0,step=8,at=update", "trainer", marks=pytest.mark.slow),
        pytest.param("kill:rank=1,step=8", "trainer", marks=pytest.mark.slow),
    ],
)
def test_a_lost_worker_changes_nothing(monkeypatch, capfd, fault, loop):
    results, said = check(monkeypatch, capfd, fault, Options(loop=loop, hold=HOLD))
    assert len(results) == 3
    assert None not in results
    assert re.search(r"worker \d \(pid \d+\) has joined with shards \d–\d\.", said)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "loop", "optimizer"), EVERYWHERE)
def test_every_place_on_every_worker(monkeypatch, capfd, fault, loop, optimizer):
    options = Options(loop=loop, optimizer=optimizer, hold=HOLD)
    results, said = check(monkeypatch, capfd, fault, options)
    assert None not in results
    assert "has joined" in said


@pytest.mark.slow
@pytest.mark.parametrize("loop", EACH_LOOP)
@pytest.mark.parametrize(
    "faults",
    [
        "kill:rank=0,step=0",
        "kill:rank=0,step=0,at=update",
        "kill:rank=1,step=5,at=updated",  # the last of an epoch: validation comes next
        long("kill:rank=2,step=5,at=commit"),
        long("kill:rank=0,step=6,at=gradients"),  # the first of the next
        f"kill:rank=1,step={NUM_STEPS - 1},at=begin",  # the last of all
        f"kill:rank=0,step={NUM_STEPS - 1},at=update",
        long(f"kill:rank=2,step={NUM_STEPS - 1},at=updated"),
        f"kill:rank=1,step={NUM_STEPS - 1},at=commit",
        "kill:rank=0,step=0,at=snapshot",
        f"kill:rank=1,step={NUM_STEPS},at=snapshot",
        "segv:rank=1,step=8; segv:rank=0,step=12,at=update",
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
@pytest.mark.parametrize("at", ["snapshot", "begin", "updated"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("loop", EACH_LOOP)
def test_workers_lost_while_a_checkpoint_is_due(monkeypatch, capfd, tmp_path, at, rank, loop):
    options = Options(loop=loop, directory=str(tmp_path), every=4, hold=HOLD)
    check(monkeypatch, capfd, f"kill:rank={rank},step=8,at={at}", options)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[-1] == f"step-{NUM_STEPS:012}"
    assert len(names) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "lost"),
    [
        ("kill:rank=1,step=8,at=update", {1}),
        ("kill:rank=0,step=8; kill:rank=2,step=12,at=updated", {0, 2}),
        ("kill:rank=0,step=8,at=update; kill:rank=1,step=8,at=update", {0, 1}),
        (f"kill:rank=0,step=5,at=commit; kill:rank=1,step={NUM_STEPS - 1},at=update", {0, 1}),
    ],
)
@pytest.mark.parametrize("optimizer", EACH_OPTIMIZER)
def test_without_replacements_the_others_go_on(monkeypatch, capfd, faults, lost, optimizer):
    options = Options(optimizer=optimizer)
    results, said = check(monkeypatch, capfd, faults, options, replace=False)
    assert {rank for rank, result in enumerate(results) if result is None} == lost
    assert said.count("it is not replaced") == len(lost)


@pytest.mark.slow
def test_one_worker_alone_is_made_up_for(monkeypatch, capfd):
    faults = "kill:rank=0,step=8,at=update"
    results, said = check(monkeypatch, capfd, faults, Options(), workers=1)
    assert len(results) == 1
    assert "nobody is left; a replacement is starting, from the latest snapshot" in said


@pytest.mark.slow
def test_the_command_ends_well_and_tells_who_was_lost(tmp_path):
    faults = "kill:rank=1,step=8; kill:rank=0,step=11,at=update; segv:rank=2,step=17"
    options = Options(loop="own", optimizer="clipped", hold=HOLD)
    job = Job(tmp_path, options, workers=3, faults=faults, popen=subprocess.Popen)
    assert job.wait() == 0, job.err
    assert job.results
    expected = undisturbed(Options(loop="own", optimizer="clipped"))
    assert all(result == expected for result in job.results)
    check_words(job.err, faults)

"""Bits that are wrong on purpose: audits find them, name whose they are, and undo what followed.

Each row says what is flipped where, on which exchange, and which words tell it. The result is that
of the undisturbed run, on every worker.
"""

from __future__ import annotations

import json
import re
import sys

import pytest
from tests.chaos.exchanges import device_of, skip_without, variables_of
from tests.chaos.jobs import Job
from tests.chaos.test_faults import HOLD, launch, undisturbed
from tests.chaos.training import Options

import unisono

EVERY = 5  # steps 4, 9, 14, 19, and the last one of each call of `fit`
WEIGHT, MEAN = "`0.weight`", r"`1\.(running_mean|num_batches_tracked)`"
BIT_OF = {
    "gradient": f"gradient of {WEIGHT} in shards? \\d",
    "replica": f"parameter {WEIGHT}",
    "buffer": f"buffer {MEAN}",
}
EXCHANGES = ("shared", "staged", "gloo", "sim")
LONG = pytest.mark.long


def check(monkeypatch, capfd, exchange, faults, workers, *, loop="own", optimizer="adam", **more):
    """Train with wrong bits; returns what was said."""
    skip_without(exchange)
    for variable, value in variables_of(exchange).items():
        monkeypatch.setenv(variable, value)
    options = Options(
        loop=loop,
        optimizer=optimizer,
        device=device_of(exchange),
        **{"audit_every": EVERY, "hold": HOLD if workers > 1 else (), **more},
    )
    results = launch(monkeypatch, faults, options, workers=workers)
    said = capfd.readouterr()
    expected = undisturbed(Options(loop=loop, optimizer=optimizer))
    assert all(result == expected for result in results), said.err
    return said.out + said.err


def ended(said):
    """List which workers were ended, as audits found what."""
    found = re.findall(
        r"worker (\d) \(pid \d+\) was ended, as an audit found its (.*?) wrong", said
    )
    return [(int(rank), what) for rank, what in found]


# A worker that is wrong from step 7 on is found in step 9 at the latest.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers", "rank", "of", "loop"),
    [
        ("shared", 2, 1, "gradient", "trainer"),
        ("shared", 1, 0, "gradient", "own"),
        ("shared", 2, 0, "buffer", "trainer"),
        ("staged", 2, 0, "gradient", "own"),
        ("staged", 3, 1, "replica", "trainer"),
        ("staged", 2, 1, "buffer", "own"),
        ("gloo", 2, 1, "gradient", "own"),
        ("gloo", 3, 2, "replica", "own"),
        ("gloo", 3, 0, "buffer", "trainer"),
        ("sim", 2, 0, "gradient", "trainer"),
        ("sim", 3, 1, "replica", "own"),
        ("sim", 2, 1, "buffer", "own"),
        pytest.param("shared", 3, 0, "gradient", "own", marks=LONG),
        pytest.param("shared", 3, 2, "buffer", "own", marks=LONG),
        pytest.param("staged", 2, 1, "replica", "own", marks=LONG),
        pytest.param("gloo", 1, 0, "gradient", "own", marks=LONG),
        pytest.param("sim", 1, 0, "buffer", "own", marks=LONG),
        pytest.param("staged", 1, 0, "gradient", "trainer", marks=LONG),
    ],
)
def test_a_defective_worker_is_named_and_replaced(
    monkeypatch, capfd, exchange, workers, rank, of, loop
):
    faults = f"defect:rank={rank},step=7,of={of}"
    said = check(monkeypatch, capfd, exchange, faults, workers, loop=loop)
    (first, what), *others = ended(said)
    assert not others, said
    assert first == rank
    assert re.match(BIT_OF[of], what), what
    assert re.search(rf"worker {rank} \(pid \d+\) has joined", said)
    assert workers == 1 or "where all workers were right" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers", "fault", "whose", "what"),
    [
        # one bit, once, in an audited step
        ("shared", 2, "flip:rank=1,step=9", 1, BIT_OF["gradient"]),
        ("sim", 3, "flip:rank=2,step=9,of=gradient", 2, BIT_OF["gradient"]),
        ("gloo", 2, "flip:rank=0,step=9,of=buffer", 0, BIT_OF["buffer"]),
        ("staged", 3, "flip:rank=1,step=9,of=buffer", 1, BIT_OF["buffer"]),
        # in a replica in any step
        ("staged", 3, "flip:rank=0,step=6,of=replica", 0, BIT_OF["replica"]),
        pytest.param(
            *("gloo", 3, "flip:rank=2,step=12,of=replica", 2, BIT_OF["replica"]), marks=LONG
        ),
        ("sim", 2, "flip:rank=1,step=9,of=replica", 1, BIT_OF["replica"]),
        # of the last step of all
        ("gloo", 2, "flip:rank=1,step=23,of=replica", 1, BIT_OF["replica"]),
    ],
)
def test_a_single_bit_is_found(monkeypatch, capfd, exchange, workers, fault, whose, what):
    said = check(monkeypatch, capfd, exchange, fault, workers, optimizer="clipped", hold=())
    (found,) = ended(said)
    assert found[0] == whose
    assert re.match(what, found[1])


@pytest.mark.slow
def test_where_two_workers_cannot_tell_whose_bit_it_was_nobody_is_accused(monkeypatch, capfd):
    # What followed from it, in steps 7 and 8, changed the gradients of both.
    said = check(monkeypatch, capfd, "gloo", "flip:rank=1,step=6,of=replica", 2)
    assert ended(said) == []
    assert "the steps since the newest snapshot come again, each with an audit" in said
    assert "step 9 has come again, and all workers keep the same now" in said


@pytest.mark.slow
def test_a_bit_of_memory_that_all_use_is_found_in_an_audited_step(monkeypatch, capfd):
    said = check(monkeypatch, capfd, "shared", "flip:rank=1,step=9,of=replica", 2)
    assert ended(said) == []
    assert f"did in step 9: parameter {WEIGHT}; the run goes back" in said


# Each exchange once; the rest in `make chaos`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "loop", "workers", "exchange"),
    [
        pytest.param(*program, exchange, marks=[LONG] * ((number + turn) % 2))
        for turn, program in enumerate([("adafactor", "trainer", 3), ("adam", "own", 2)])
        for number, exchange in enumerate(EXCHANGES)
    ],
)
def test_an_even_run_accuses_nobody(monkeypatch, capfd, exchange, optimizer, loop, workers):
    options = {"audit_every": 1, "hold": (), "optimizer": optimizer, "loop": loop}
    said = check(monkeypatch, capfd, exchange, "", workers, **options)
    assert "was ended" not in said
    assert "again" not in said


KILLS = [
    # in an audited step, before and while shards are computed again, and after
    "kill:rank=1,step=9,at=begin",
    "kill:rank=0,step=9,at=gradients",
    "kill:rank=1,step=9,at=audit",
    "kill:rank=2,step=9,at=sums",
    "kill:rank=0,step=9,at=updated",
    "kill:rank=1,step=9,at=commit",
    # the step after a loss is not where anybody expects its audit
    "kill:rank=0,step=8,at=update; kill:rank=1,step=9,at=shard",
    # whoever checks is lost, and whoever is wrong later
    "defect:rank=1,step=7; kill:rank=0,step=9,at=gradients",
    "defect:rank=2,step=12; kill:rank=0,step=8; kill:rank=1,step=14,at=commit",
    "defect:rank=0,step=3,of=buffer; defect:rank=1,step=11; kill:rank=2,step=14,at=snapshot",
]


# Each row once, on the exchanges by turns; the rest in `make chaos`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "faults"),
    [
        pytest.param(exchange, faults, marks=[LONG] * (row % len(EXCHANGES) != number))
        for number, exchange in enumerate(EXCHANGES)
        for row, faults in enumerate(KILLS)
    ],
)
def test_workers_lost_together_with_audits_change_nothing(monkeypatch, capfd, exchange, faults):
    loop = "trainer" if "defect" in faults else "own"
    said = check(monkeypatch, capfd, exchange, faults, 3, loop=loop, hold=(10, 15, 20))
    assert {rank for rank, _ in ended(said)} <= {
        int(rank) for rank in re.findall(r"defect:rank=(\d)", faults)
    }


@pytest.mark.slow
def test_more_wrong_workers_than_may_be_lost_end_the_run(monkeypatch):
    options = Options(loop="own", audit_every=EVERY)
    faults = "defect:rank=1,step=7; defect:rank=2,step=12"
    with pytest.raises(unisono.WorkerError, match="worker 2 of 3 was ended, as an audit") as raised:
        launch(monkeypatch, faults, options, workers=3, restarts=1)
    assert re.search(r"`0\.weight` in shard \d wrong", str(raised.value))
    assert "2 workers were lost within 60 s, more than `--restarts`" in str(raised.value)


@pytest.mark.slow
def test_where_nobody_is_replaced_all_name_the_rank(monkeypatch, tmp_path):
    options = Options(loop="own", audit_every=EVERY, directory=str(tmp_path), every=6)
    with pytest.raises(unisono.CorruptionError, match="step 9 found what rank 1 had") as raised:
        launch(monkeypatch, "defect:rank=1,step=7", options, workers=2, restarts=0)
    assert "in shard 3. Its memory" in str(raised.value)
    (kept,) = (tmp_path / "checkpoints").iterdir()
    assert kept.name == "step-000000000006"


@pytest.mark.slow
def test_the_others_go_on_without_a_wrong_worker(monkeypatch, capfd):
    options = Options(loop="own", audit_every=EVERY)
    results = launch(monkeypatch, "defect:rank=0,step=7", options, workers=3, replace=False)
    assert results[0] is None
    assert results[1:] == [undisturbed(Options(loop="own"))] * 2
    assert "it is not replaced" in capfd.readouterr().err


@pytest.mark.slow
def test_without_our_launcher_all_name_the_rank(tmp_path):
    """As torchrun starts workers: nobody is replaced, and a new start resumes."""
    options = Options(loop="own", audit_every=EVERY, directory=str(tmp_path / "run"), every=3)
    first = start_as_torchrun(tmp_path, options, "defect:rank=1,step=7", "first")
    for job in first:
        assert job.wait() == 1
        assert "the audit of step 8 found what rank 1 had wrong: gradient of `0.weight`" in job.err
        assert "the run goes on from its newest checkpoint, which was audited" in job.err
    names = sorted(path.name[-3:] for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["003", "006"]
    expected = json.loads(json.dumps(undisturbed(Options(loop="own"))))
    for job in start_as_torchrun(tmp_path, options, "", "second"):
        assert job.wait() == 0, job.err
        assert job.results == [expected]


def start_as_torchrun(folder, options, faults, name):
    jobs = []
    for rank in range(2):
        place = folder / f"{name}-{rank}"
        place.mkdir()
        variables = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": 29_571,
            "TORCHELASTIC_RUN_ID": f"planted-bits-{folder.name}-{name}",
        }
        texts = {key: str(value) for key, value in variables.items()}
        jobs.append(Job(place, options, faults=faults, variables=texts, python=sys.executable))
    return jobs

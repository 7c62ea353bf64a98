"""Whatever an ordinary program does, a worker that is killed changes nothing."""

import pytest
from tests.train import lossy

import unisono


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "faults"),
    [
        (lossy.schedule_behind_the_block, "kill:rank=1,step=25,at=updated"),
        (lossy.k_fold, "kill:rank=0,step=31; kill:rank=1,step=31"),
        (lossy.in_turn, "kill:rank=0,step=50,at=update"),
        (lossy.until_it_is_good, "kill:rank=0,step=9,at=update"),
        (lossy.left_by_break, "kill:rank=0,step=5; kill:rank=1,step=15"),
        (lossy.named_groups, "kill:rank=1,step=25,at=update"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_killed_worker_changes_nothing(monkeypatch, program, faults):
    undisturbed = program()
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(program, workers=2, restarts=9) == [undisturbed] * 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_inside_of_another_has_memory_of_its_own(workers):
    alone = lossy.one_loop_inside_of_another()
    assert alone[0] != alone[1]
    assert unisono.launch(lossy.one_loop_inside_of_another, workers=workers) == [alone] * workers

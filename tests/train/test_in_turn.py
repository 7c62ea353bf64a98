"""A worker that is lost in one run's loop is back in the other's, and both have their bits."""

import contextlib
import io

import pytest
from tests.train import in_turn

import unisono


def both_digests():
    with contextlib.redirect_stdout(io.StringIO()):
        return in_turn.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill:rank=1,step=5", marks=pytest.mark.long),
        "kill:rank=0,step=50,at=update",
    ],
)
def test_runs_that_take_turns_survive_each_others_losses(monkeypatch, fault):
    undisturbed = both_digests()
    monkeypatch.setenv("UNISONO_FAULTS", fault)
    assert unisono.launch(both_digests, workers=2, restarts=9) == [undisturbed] * 2

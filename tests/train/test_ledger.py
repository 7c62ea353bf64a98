"""What replacements are to take over of predictions, and the moment when they cannot any more."""

from pathlib import Path

import pytest

from unisono.train.ledger import AT_ONCE_BYTES, IN_ALL_BYTES, Ledger
from unisono.workers.context import context


@pytest.fixture
def said():
    return []


def test_rows_are_kept_until_they_are_too_many_in_all(said):
    ledger = Ledger()
    for _ in range(IN_ALL_BYTES // AT_ONCE_BYTES):
        assert ledger.keep_rows(AT_ONCE_BYTES, said.append)
    assert said == []
    assert not ledger.keep_rows(1, said.append)
    (line,) = said
    assert "64 MiB in all" in line
    assert "with `path=` they are in a file" in line


def test_rows_that_are_too_many_at_once_end_it_and_this_is_said_once(said):
    ledger = Ledger()
    assert not ledger.keep_rows(AT_ONCE_BYTES + 1, said.append)
    assert not ledger.keep_rows(AT_ONCE_BYTES + 1, said.append)
    assert not ledger.keep_rows(1, said.append)  # it would be kept for nobody
    (line,) = said
    assert "4,194,305 bytes" in line
    assert "4 MiB at once" in line


def test_a_path_that_is_needed_must_stay_as_it_is(said):
    ledger = Ledger()
    first, second = Path("/first"), Path("/second")
    ledger.note_file(first, said.append, is_kept=True)
    ledger.note_file(second, said.append, is_kept=False)  # in a loop: nobody comes to it again
    ledger.note_file(second, said.append, is_kept=False)
    assert (said, ledger.is_closed) == ([], False)
    ledger.note_file(first, said.append, is_kept=False)
    assert "the predictions in /first took the place of earlier ones" in said[0]
    assert ledger.is_closed


def test_a_job_has_one_ledger():
    joint_calls = context().join()
    assert Ledger.of(joint_calls) is Ledger.of(joint_calls)
    assert Ledger.of(joint_calls) is not Ledger.of(context().join())

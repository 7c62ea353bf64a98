"""Taking a wait, a copy or a move out of the package makes a test fail."""

import subprocess
import sys

import pytest
from tests.chaos.exchanges import ACCELERATED, skip_without
from tests.device import mutants

# One of each kind in `make test`; `make mutants` takes out everything.
SOME = ("to_host(there", "to_device(into", "_stream.wait_stream(", "tensor.to(self._device")


def numbers_of(words):
    return [n for n, one in enumerate(mutants.all_mutants()) if words in one.text]


@pytest.mark.parametrize("words", SOME)
def test_what_is_to_be_taken_out_is_there(words):
    assert numbers_of(words)


def test_there_are_enough():
    by_file = [mutant.module for mutant in mutants.all_mutants()]
    assert by_file.count("unisono.exchange.staged") >= 8
    assert by_file.count("unisono.device") >= 8


@pytest.mark.parametrize("mutant", mutants.all_mutants(), ids=str)
def test_it_is_taken_out(mutant):
    assert mutants.without(mutant)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_some_that_are_taken_out_are_noticed():
    skip_without(ACCELERATED)
    chosen = [str(numbers_of(words)[0]) for words in SOME]
    command = [sys.executable, "-m", "tests.device.mutants", *chosen]
    done = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SOME)} taken out one by one, 0 unnoticed" in done.stdout

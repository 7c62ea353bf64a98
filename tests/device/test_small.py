"""What mutants are tried with passes where nothing is taken out."""

import pytest
from tests.accelerator.forked import in_a_fork
from tests.chaos.exchanges import ACCELERATED, skip_without
from tests.device import small


@pytest.mark.slow
def test_the_way_of_a_batch():
    skip_without(ACCELERATED)
    in_a_fork(small.check)

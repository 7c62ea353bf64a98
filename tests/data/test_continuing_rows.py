"""Row i of each batch goes on where row i of the batch before has ended."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.data import continuing_rows


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "expected"),
    [
        (7, 3, [0, 2, 4, 1, 3, 5]),
        (6, 3, [0, 2, 4, 1, 3, 5]),
        (4, 4, [0, 1, 2, 3]),
        (4, 1, [0, 1, 2, 3]),
    ],
)
def test_table(num_samples, batch_size, expected):
    assert continuing_rows(num_samples, batch_size) == expected


@given(st.integers(1, 60), st.integers(1, 12))
def test_rows_continue_and_no_sample_comes_twice(num_samples, batch_size):
    if num_samples < batch_size:
        with pytest.raises(ValueError, match="a sample for each of the"):
            continuing_rows(num_samples, batch_size)
        return
    batches = torch.tensor(continuing_rows(num_samples, batch_size)).view(-1, batch_size)
    assert (batches.diff(dim=0) == 1).all()
    assert len(set(batches.flatten().tolist())) == num_samples // batch_size * batch_size


def test_what_is_no_count_is_refused():
    with pytest.raises(ValueError, match="`batch_size`"):
        continuing_rows(8, 0)
    with pytest.raises(TypeError, match="`batch_size`"):
        continuing_rows(8, 2.5)

"""An order of consecutive samples in which each row of a batch goes on in the next batch."""

from __future__ import annotations

from unisono.whole import check_whole


def continuing_rows(num_samples: int, batch_size: int) -> list[int]:
    """Order a dataset of consecutive samples so that row i of each batch continues row i before.

    For hidden states that go from batch to batch (``carry=True``), with
    ``torch.utils.data.Subset(dataset, continuing_rows(len(dataset), batch_size))`` and
    ``shuffle=False``. The samples are cut into `batch_size` runs of equal length, one for each row;
    what is left over at the end is left out. ::

        num_samples = 7, batch_size = 3      0 2 4 │ 1 3 5      row 0: 0, 1; row 1: 2, 3; …

    Args:
        num_samples: of the dataset, such as the windows that a long text is cut into.
        batch_size: samples of one global batch.

    Raises:
        ValueError: there are fewer samples than rows.
    """
    check_whole("batch_size", batch_size, at_least=1)
    length = check_whole("num_samples", num_samples, at_least=0) // batch_size
    if not length:
        raise ValueError(
            f"there must be a sample for each of the {batch_size} rows of a batch, but there are "
            f"{num_samples}: pass a smaller `batch_size`, or cut the data into shorter samples."
        )
    return [row * length + place for place in range(length) for row in range(batch_size)]

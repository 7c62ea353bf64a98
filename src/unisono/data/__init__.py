"""From a dataset and a list of indices to one shard's batch; readers of small datasets."""

from unisono.data.continuing_rows import continuing_rows
from unisono.data.datasets import digits, fashion_mnist, mnist

__all__ = ["continuing_rows", "digits", "fashion_mnist", "mnist"]

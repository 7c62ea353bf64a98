"""From a dataset and a list of indices to one shard's batch; readers of small datasets."""

from unisono.data.datasets import digits, mnist

__all__ = ["digits", "mnist"]

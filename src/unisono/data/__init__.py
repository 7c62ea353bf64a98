"""From a dataset and a list of indices to one shard's batch; readers of small datasets."""

from unisono.data.datasets import fashion_mnist, mnist

__all__ = ["fashion_mnist", "mnist"]

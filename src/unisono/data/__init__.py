"""From a dataset and a list of indices to one shard's batch; readers of small datasets."""

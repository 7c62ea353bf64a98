"""One step: shards → gradients → ordered sum → update."""

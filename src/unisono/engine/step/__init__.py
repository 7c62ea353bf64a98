"""One step on any exchange: passes, parts, exchange, scaling and clipping, update."""

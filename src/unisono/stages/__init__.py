"""A model in stages: consecutive parts of it, each on a device of its own."""

"""A model over several devices: consecutive parts of it, each on a device of its own."""

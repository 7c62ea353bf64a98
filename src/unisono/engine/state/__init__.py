"""A run's state by name, taken apart and put back: parameters, buffers, optimizer, the rest."""

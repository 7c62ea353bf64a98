"""What is a run's state? By name, and there and back: parameters, buffers, optimizer, the rest."""

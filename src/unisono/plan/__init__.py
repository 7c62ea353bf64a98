"""What is computed, where, and in which order: pure functions, no I/O, no torch state."""

"""The step loop, the trainer on top of it, evaluation, progress."""

"""What a run leaves behind: checkpoints, weights in a file, and the digest of its state."""

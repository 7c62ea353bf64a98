"""What a run leaves behind: weights in a file, and the digest that says two runs are equal."""

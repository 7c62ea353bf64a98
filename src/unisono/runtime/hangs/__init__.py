"""Where is each rank, and who waits for whom? Inspects and describes processes from outside."""

"""Moving bytes between workers of one host: shared memory, a barrier, a link to the launcher."""

"""The workers of a job: who started them, and how they synchronize."""

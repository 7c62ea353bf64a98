"""torch's classes for data-parallel programs, with exact sums and exact samples."""

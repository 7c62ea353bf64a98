"""Split a model over several devices: each consecutive part is on a separate device."""

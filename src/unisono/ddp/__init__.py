"""DDP programs with one import changed: torch's class, with one order of summation everywhere.

``unisono.DistributedDataParallel`` takes the place of torch's, on every backend.
"""

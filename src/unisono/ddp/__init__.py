"""Programs that speak torch.distributed themselves, and what they import from Unisono.

``init`` sets the process group up and tears it down. ``DistributedDataParallel`` takes the place of
torch's with one order of summation on every backend, ``DistributedSampler`` the place of torch's
with every sample exactly once.
"""

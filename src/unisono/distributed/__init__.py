"""For programs that use torch.distributed themselves.

``init`` sets the process group up and tears it down. ``DistributedDataParallel`` is torch's with
one order of summation on every backend, ``DistributedSampler`` torch's with every sample once.
"""

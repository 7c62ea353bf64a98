"""What does this machine offer for training, and what is wrong with it? `unisono doctor`.

::

    torch_checks      torch, in a process of its own, and GPUs
    machine_checks    cores, memory, a container's limits, open files, stacks, variables; makes all

What cannot be read is said; no check can end the others.
"""

"""torch's collectives over shared memory, with one order of summation: the c10d backend "unisono".

Use it with ``import unisono`` and ``torch.distributed.init_process_group("unisono")``. It runs any
program that uses ``torch.distributed`` on the CPUs of one Linux host.
"""

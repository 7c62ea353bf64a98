"""torch's collectives over shared memory, in one order of summation: the c10d backend "unisono".

``import unisono``, then ``torch.distributed.init_process_group("unisono")``; every program that
uses ``torch.distributed`` on the CPUs of one Linux host runs on it.
"""

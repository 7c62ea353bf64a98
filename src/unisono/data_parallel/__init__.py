"""Replicas of a module on several devices of one process, for plain torch loops.

``DataParallel`` takes the place of ``torch.nn.DataParallel``. With the same number of chunks of a
batch the number of devices changes no bit.
"""

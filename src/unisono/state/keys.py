"""What the parts of a run's state are called where it is kept: the keys of run.json, and prefixes.

::

    run.json     format, position, identity, groups, numbers, modes, strides, state, last
    tensors      NAME  │  KEY/NAME of the optimizer  │  run.state/KEY of the program
"""

FORMAT = 1
STATE_PREFIX = "run.state/"  # in optimizer.safetensors, before the names of the program's tensors

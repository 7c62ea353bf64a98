"""How much faster do more workers make a program, and what keeps them from more?

::

    command     unisono plan
      efficiency       runs some steps of the program on each number of workers   (processes)
        timed_program    in each process: notes what its steps take               (hooks)
      efficiency       times → speed-up, where the rest of it goes; several hosts (decision)
"""

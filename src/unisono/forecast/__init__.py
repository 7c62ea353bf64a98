"""How long would a program take on N workers? Its steps are measured here, then simulated.

::

    command     unisono plan
      quantities      texts such as "10Gbit/s" and "1,2,4,…,1024" → numbers
      measured_steps  runs some steps of the program on one worker and on several  (processes)
        timed_program   in each process: notes what its steps take                 (hooks)
      step_profile    what is known of a program's steps: measured, or given       (facts)
      workload        who computes how many shards
      cluster         which workers are on which host, and what their links carry
      host_model      what workers of one host cost each other
      spread          what the slowest of N workers takes
      simulation      one step of N workers, by cause of its time                  (decision)
      outlook         all numbers of workers: epochs, speed-up, failures, error bands, JSON

Everything but `measured_steps` and `timed_program` is a pure function of its arguments.
"""

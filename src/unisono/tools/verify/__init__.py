"""Does a program train the same on N ranks as on one? It is run, observed and compared.

::

    command     unisono verify
      trials        run the program on N ranks, then on one with the same samples   (processes)
        observed      in each process: install hooks, run the program               (hooks)
      reading       events → values                                                 (files)
      …_checks      verdicts, pure functions of traces                              (decisions)
      findings      cause first, exit status, JSON, what the user sees
    command     unisono verify --resume
      verifier      stop the program, start it again, compare every bit

**How is the global batch made the same?** The program runs on N ranks first. Then, on one rank,
each iteration of each DataLoader is handed the samples that the N ranks together read there: the
batches of the ranks one behind the other, or one of them if all ranks read the same. Samples are
identified by what they contain, so that ranks may share one dataset or each cut out a part of it.
The batch size of that loader is set to the global one, and with it ``len(loader)`` and schedules.

**How are gradients compared?** A hook sees the gradient of every backward pass on every rank before
it is averaged, and the optimizer's hook what is left of all in the end. Both are kept as linear
sketches (``digests.py``). So the gradient of N ranks and that of one rank can both
be written as weighted sums of the same local gradients, and the weights say what a program does:
1/N each is a mean, 1 each a sum, and where one rank weighs ranks by samples or tokens and N ranks
do not, it is a mean of means. Nothing depends on how the loss is normalised or scaled.

**What is taken out.** Epochs are cut to a few batches, the last one included. Dropout draws its
random numbers and keeps everything, so that N and one differ by rounding alone.

A false alarm is worse than a miss: whatever cannot be compared is unknown, never wrong.
"""

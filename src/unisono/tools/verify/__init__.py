"""Does a program train the same on N ranks as on one? It is run, observed and compared.

::

    command     unisono verify
      trials        run the program on N ranks, then on one with the same samples   (processes)
        observed      in each process: install hooks, run the program               (hooks)
      reading       records of all ranks → samples, passes, evaluations                 (files)
      …_checks      verdicts, pure functions of traces                              (decisions)
      findings      cause first, exit status, JSON, what the user sees
    command     unisono verify --resume
      verifier      stop the program, start it again, compare every bit

**How do both runs get the same global batch?** The program runs on N ranks first. Then, on one
rank, each iteration of each DataLoader gets the samples that the N ranks together read there: the
batches of the ranks one after another, or one of them if all ranks read the same. Samples are
identified by their contents, so ranks may share a dataset or each cut out a part of it. The batch
size of that loader is set to the global one, and with it ``len(loader)`` and schedules.

**How are gradients compared?** A hook on every rank sees the gradient of every backward pass before
it is averaged, and the optimizer's hook sees the final gradient. Both are kept as linear sketches
(``digests.py``). So the gradient of N ranks and that of one rank are both weighted sums of the same
local gradients, and the weights reveal what a program does: 1/N each is a mean, 1 each a sum; if
one rank weights ranks by samples or tokens and N ranks do not, it is a mean of means. Nothing
depends on how the loss is normalised or scaled.

**What is changed.** Epochs are cut to a few batches, including the last one. Dropout draws its
random numbers but drops nothing, so that N ranks and one differ by rounding alone.

A false alarm is worse than a miss: anything that cannot be compared is unknown, never wrong.
"""

"""Train a recurrent network whose state goes from batch to batch; leave a loop early, and go on."""

import argparse
import itertools

from tests.train.carried import BATCH_SIZE, data, loss_of, trainer

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=("recurrent", "memory"))
parser.add_argument("--directory")
given = parser.parse_args()
every = {"checkpoint_every": 2} if given.directory else {}
made = trainer(given.model, shards=8, directory=given.directory, **every)
run = made.run
loop = {"batch_size": BATCH_SIZE, "shuffle": False}
if not given.directory:
    for step in itertools.islice(run.steps(data(), **loop, steps=20), 3):
        with step:
            for batch in step.shards:
                loss, step.carried = loss_of(step.model, batch, step.carried)
                step.backward(loss)
for steps in (8, 16):
    made.fit(data(), **loop, steps=steps)
found = made.evaluate(data(batches=3), batch_size=BATCH_SIZE)["loss"]
print(f"rank {run.world.rank} digest {made.digest()} loss {found}", flush=True)

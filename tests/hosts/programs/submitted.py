"""Submit a training by submitit, on two nodes of Slurm; print the job's number."""

import runpy
import sys
from pathlib import Path

import submitit


class Training(submitit.helpers.Checkpointable):
    """Run a script with its arguments; submitit pickles it, and calls it again when requeued."""

    def __init__(self, arguments):
        self.arguments = arguments

    def __call__(self):
        sys.argv = self.arguments
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_path(self.arguments[0], run_name="__main__")


if __name__ == "__main__":
    executor = submitit.SlurmExecutor(folder=sys.argv[1])
    executor.update_parameters(nodes=2, ntasks_per_node=1, time=20, stderr_to_stdout=True)
    print(executor.submit(Training(sys.argv[2:])).job_id)

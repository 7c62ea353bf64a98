"""Which job does a worker belong to that nobody of ours launched? What its launcher calls it.

Workers of one job must come to the same name, and those of two jobs on one host never: two at the
same time, or one that was started again while the left-overs of the first are still there. A pure
function of the environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.world import OPEN_MPI, SLURM, SOMEBODY, TORCHRUN, World

_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_RESTART_COUNT")
_OPEN_MPI = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
_TORCHRUN = ("TORCHELASTIC_RUN_ID", *_MASTER, "TORCHELASTIC_RESTART_COUNT")
# What is looked at in turn; the first of which anything is set counts.
_KINDS = {
    TORCHRUN: (_TORCHRUN,),
    SLURM: (_SLURM, _MASTER),
    OPEN_MPI: (_OPEN_MPI, _MASTER, _SLURM),
    SOMEBODY: (_MASTER, _SLURM, _OPEN_MPI),
}


@dataclass(frozen=True, slots=True)
class JobName:
    """A job's name among all of one user on one host."""

    name: str  # fit for a file
    told: str  # what it was made of, for messages


def job_name(environ: Mapping[str, str], here: World, *, session: int) -> JobName:
    """Name the job that `environ` belongs to.

    Args:
        environ: the variables of a worker.
        here: its place, found in them.
        session: the session of its process; counts where no variable says anything.
    """
    for names in _KINDS.get(here.started_by, _KINDS[SOMEBODY]):
        facts = [(name, environ[name]) for name in names if name in environ]
        if facts:
            break
    else:
        facts = [("session", str(session))]
    told = ", ".join(f"{name}={value}" for name, value in facts)
    whole = repr((here.started_by, here.world_size, facts))
    return JobName(f"job-{hashlib.sha256(whole.encode()).hexdigest()[:32]}", told)


def num_restarts(environ: Mapping[str, str]) -> int:
    """Count how often this job's launcher has started it again."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        text = environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return 0

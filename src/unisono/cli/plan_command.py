"""`unisono plan`."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.endings import (
    Refusal,
    check_script,
    copying_folder,
    leave,
    refusing,
    replace_unknown_letters,
    saying,
)
from unisono.cli.options import COUNT, Text, seconds, takes_script, timeout
from unisono.forecast.quantities import (
    BYTES,
    BYTES_PER_S,
    TIMES_S,
    counts,
    quantity,
    share,
    whole,
)

if TYPE_CHECKING:
    from unisono.forecast.facts import Forecast
    from unisono.forecast.measured_steps import Measured, Measurement
    from unisono.forecast.outlook import Failures
    from unisono.forecast.step_profile import StepProfile

_BANDWIDTH, _LATENCY, _CHECKPOINT = "10Gbit/s", "50us", "10min"
_PIECES = 64  # in which given gradients become ready


_TIME = Text("time", partial(quantity, units=TIMES_S), "a time above 0 with its unit", "90s")
_NUMBER = Text("n", whole, "a whole number of at least 1", "1.28e6")
_WORKERS = Text("list", counts, "numbers of workers from 1 to 100,000", "1,2,4,…,1024")
_RATE = Text(
    "rate", partial(quantity, units=BYTES_PER_S), "bits or bytes a second, above 0", _BANDWIDTH
)
_TIME_OR_0 = Text(
    "time", partial(quantity, units=TIMES_S, may_be_zero=True), "a time with its unit", _LATENCY
)
_SHARE = Text("share", share, "a share below 1", "5%")
_SIZE = Text("size", partial(quantity, units=BYTES), "a number of bytes above 0", "100MB")


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Forecast the time on N workers.",
)
@click.option(
    "--workers",
    "counts",
    type=_WORKERS,
    default="1,2,4,…,64",
    show_default=True,
    help="The numbers of workers to forecast; dots go on as the numbers before them do.",
)
@click.option("--hosts", type=COUNT, help="Over how many hosts workers are spread.")
@click.option(
    "--workers-per-host",
    "per_host",
    type=COUNT,
    help="How many workers a host takes; as many hosts as it needs.",
)
@click.option(
    "--cores",
    type=COUNT,
    help="Cores (or GPUs) of each host; those of this machine by default.",
)
@click.option(
    "--bandwidth",
    type=_RATE,
    help=f"Of each host's link, in each direction; {_BANDWIDTH} by default.",
)
@click.option(
    "--latency",
    "latency_s",
    type=_TIME_OR_0,
    help=f"Of these links; {_LATENCY} by default.",
)
@click.option(
    "--grow-batch",
    "grows",
    is_flag=True,
    help="Each worker keeps the batch and the shards of one worker, so the global batch grows, and "
    "results are others. Without it, only where there are more workers than shards.",
)
@click.option("--epochs", type=_NUMBER, help="Also tell the time of so many epochs.")
@click.option(
    "--mtbf",
    "mtbf_s",
    type=_TIME,
    help="Mean time between failures of one worker, such as 5000h; without it there are none.",
)
@click.option(
    "--recovery",
    "recovery_s",
    type=_TIME,
    help="What a failure costs. Without it, it is measured: a worker is killed.",
)
@click.option(
    "--checkpoint-every",
    "checkpoint_s",
    type=_TIME,
    default=_CHECKPOINT,
    show_default=True,
    help="Between checkpoints, of which a failure among several hosts costs half.",
)
@click.option(
    "--seconds",
    "timing_s",
    type=seconds("5"),
    default="5",
    show_default=True,
    help="For how long steps are timed, each of four times.",
)
@timeout
@click.option("--threads", type=COUNT, help="As of `unisono run`.")
@click.option("--samples", type=_NUMBER, help="Without SCRIPT: samples of an epoch.")
@click.option(
    "--batch",
    type=_NUMBER,
    help="Without SCRIPT: samples that a device computes in a step.",
)
@click.option("--step", "step_s", type=_TIME, help="Without SCRIPT: what that takes.")
@click.option(
    "--spread",
    type=_SHARE,
    help="Without SCRIPT: the standard deviation of that, as a part of it.",
)
@click.option("--gradients", type=_SIZE, help="Without SCRIPT: the bytes of all gradients.")
@click.option("--json", "as_json", is_flag=True, help="Print the forecast as JSON.")
@click.option("-o", "--output", metavar="FILE", help="Also draw it as a page for a browser.")
@partial(takes_script, is_optional=True)
def plan(script: str, as_json: bool, output: str | None, **asked: Any) -> None:
    """Forecast how long training takes on N workers, and what limits it.

    Some steps of SCRIPT, which trains with unisono.Trainer or unisono.Run, are timed on this
    machine, on one worker and on several. Then steps of N workers are simulated: computing, the
    slowest worker of each step, gradients on the links between hosts while others are still
    computed, adding up, the update, failures. SCRIPT is not edited. It runs in a copy of the
    working folder, which is deleted, prints nothing, and is ended after some steps.

    Without SCRIPT, one device is described by `--samples`, `--batch` and `--step`.

    \b
    Examples:
      unisono plan train.py --lr 0.1          --lr goes to the script
      unisono plan --workers 1,2,4,…,1024 --workers-per-host 8 --bandwidth 25Gbit/s train.py
      unisono plan --mtbf 5000h -o plan.html train.py
      unisono plan --samples 1.28e6 --batch 128 --step 7.2s --epochs 100 --workers 1,32

    \b
    Exit status:
      0     forecast
      2     steps could not be timed, or the command line was wrong
      130   Ctrl-C; 143 SIGTERM
    """
    from unisono.report.document import MARK, check_library
    from unisono.report.files import check_free

    _check(script, asked)
    with refusing():
        if output is not None:
            check_library()
            check_free(output, mark=MARK, option="-o")
    forecast = _of_script(script, asked) if script else _of_numbers(asked)
    found = forecast.as_json
    with refusing():
        _show(found, as_json=as_json, output=output)
    leave(0)


def _show(found: dict[str, Any], *, as_json: bool, output: str | None) -> None:
    from rich.console import Console

    from unisono.report.forecast_page import write_forecast
    from unisono.report.forecast_table import print_forecast

    replace_unknown_letters()
    page = None if output is None else write_forecast(output, found)
    with saying():
        if as_json:
            click.echo(json.dumps(found, ensure_ascii=False, allow_nan=False))
        else:
            print_forecast(Console(), found)
            if page is not None:
                click.echo(page)


_OF_NUMBERS = {"samples": "--samples", "batch": "--batch", "step_s": "--step"}
_MORE_NUMBERS = {"spread": "--spread", "gradients": "--gradients"}


def _check(script: str, asked: dict[str, Any]) -> None:
    """Refuse options that do not fit each other."""
    numbers = {**_OF_NUMBERS, **_MORE_NUMBERS}
    given = [name for key, name in numbers.items() if asked[key] is not None]
    missing = [name for key, name in _OF_NUMBERS.items() if asked[key] is None]
    if script and given:
        raise Refusal(
            f"`{given[0]}` must be left out where a SCRIPT is timed, but is given with {script!r}: "
            "leave one of them out."
        )
    if given and missing:
        raise Refusal(
            f"`--samples`, `--batch` and `--step` must describe a device together, but "
            f"`{missing[0]}` is missing: use for example `--samples 1.28e6 --batch 128 --step "
            "7.2s`, or name a SCRIPT."
        )
    if not given and not script:
        check_script(script, "plan")
    if asked["hosts"] is not None and asked["per_host"] is not None:
        raise Refusal(
            "`--hosts` or `--workers-per-host` must say which workers are together, but both are "
            "given: leave one of them out."
        )
    has_links = asked["hosts"] or asked["per_host"] or asked["gradients"]
    for key, name in (("bandwidth", "--bandwidth"), ("latency_s", "--latency")):
        if asked[key] is not None and not has_links:
            raise Refusal(
                f"`{name}` must be that of links between hosts, but there is one host: add for "
                "example `--workers-per-host 8`" + (" and `--gradients 100MB`." if given else ".")
            )
    if asked["recovery_s"] is not None and asked["mtbf_s"] is None:
        raise Refusal(
            "`--recovery` must go with `--mtbf`, which says how often it comes, but that is "
            "missing: add for example `--mtbf 5000h`."
        )
    if given and asked["mtbf_s"] is not None and asked["recovery_s"] is None:
        raise Refusal(
            "`--recovery` must say what a failure costs where no SCRIPT is timed, but is missing: "
            "add for example `--recovery 2min`."
        )


def _of_numbers(asked: dict[str, Any]) -> Forecast:
    from unisono.forecast.step_profile import given_profile

    num_bytes = asked["gradients"]
    pieces = [] if num_bytes is None else [math.ceil(num_bytes / _PIECES)] * _PIECES
    profile = given_profile(
        asked["step_s"],
        asked["batch"],
        asked["samples"],
        spread=asked["spread"] or 0.0,
        gradient_bytes=pieces,
    )
    if num_bytes is not None and asked["hosts"] is None and asked["per_host"] is None:
        asked["per_host"] = 1
    asked["grows"] = True
    failures = _failures(asked, asked["recovery_s"], asked["recovery_s"])
    return _forecast("", "", profile, asked, asked["cores"], failures)


def _of_script(script: str, asked: dict[str, Any]) -> Forecast:
    """Time a script; what it cannot be timed for is refused."""
    from unisono.forecast.copying import copying_cost_s
    from unisono.forecast.measured_steps import InterruptedMeasurementError, measure_steps
    from unisono.forecast.step_profile import SHARED

    recovery_s = restart_s = asked["recovery_s"]
    copying_s = 0.0
    with refusing():
        measurement, num_workers, cores = _measurement(script, asked)
        try:
            with copying_folder():
                measured = measure_steps(measurement, min(num_workers, max(asked["counts"])))
                if asked["mtbf_s"] is not None and recovery_s is None:
                    recovery_s, restart_s = _recovery(measurement, measured), measured.startup_s
        except InterruptedMeasurementError as interrupted:
            leave(128 + interrupted.signum)
        if (asked["hosts"] or asked["per_host"]) and measured.profile.exchange == SHARED:
            copying_s = copying_cost_s()
    failures = _failures(asked, recovery_s, restart_s)
    return _forecast(script, measured.device, measured.profile, asked, cores, failures, copying_s)


def _measurement(script: str, asked: dict[str, Any]) -> tuple[Measurement, int, int]:
    """Say how a script is timed; on how many workers at most; and how many fit on this machine."""
    from pathlib import Path

    from unisono.forecast.measured_steps import Measurement
    from unisono.launch.gpus import IN_SHELL
    from unisono.launch.job import working_folder
    from unisono.launch.placement import Asked, Machine, place_workers
    from unisono.notices import say
    from unisono.verify.trials import Program
    from unisono.world import threads_per_worker

    placement = place_workers(IN_SHELL, Asked(), os.environ, Machine.here())
    threads = threads_per_worker() if asked["threads"] is None else asked["threads"]
    measurement = Measurement(
        Program(asked["kind"], script, asked["args"], Path(working_folder())),
        asked["timing_s"],
        asked["timeout_s"],
        threads,
        {**os.environ, **placement.variables},
        say,
    )
    if placement.gpus:
        return measurement, placement.num_workers, asked["cores"] or placement.num_workers
    cores = asked["cores"] or len(os.sched_getaffinity(0))
    return measurement, max(1, placement.num_workers // threads), max(1, cores // threads)


def _recovery(measurement: Measurement, measured: Measured) -> float:
    from unisono.forecast.measured_steps import measure_recovery

    several = measured.profile.together
    if several is None:
        return measured.startup_s
    return measure_recovery(measurement, several.num_workers, float(several.step_s.mean()))


def _failures(asked: dict[str, Any], recovery_s: float, restart_s: float) -> Failures:
    from unisono.forecast.outlook import Failures

    if asked["mtbf_s"] is None:
        return Failures()
    return Failures(asked["mtbf_s"], recovery_s, restart_s, asked["checkpoint_s"])


def _forecast(
    program: str,
    device: str,
    profile: StepProfile,
    asked: dict[str, Any],
    cores: int | None,
    failures: Failures,
    copying_s: float = 0.0,
) -> Forecast:
    from unisono.forecast.cluster import Cluster
    from unisono.forecast.facts import Forecast
    from unisono.forecast.outlook import expectations

    cluster = Cluster(
        cores,
        asked["hosts"],
        asked["per_host"],
        asked["bandwidth"] or quantity(_BANDWIDTH, BYTES_PER_S),
        quantity(_LATENCY, TIMES_S) if asked["latency_s"] is None else asked["latency_s"],
        copying_s,
    )
    epochs = asked["epochs"]
    rows = expectations(
        profile, asked["counts"], cluster, failures, epochs=epochs, grows=asked["grows"]
    )
    return Forecast(program, device, profile, cluster, failures, epochs, rows)

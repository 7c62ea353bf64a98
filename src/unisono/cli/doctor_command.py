"""`unisono doctor`."""

from __future__ import annotations

import os

import click

from unisono.cli.endings import leave, replace_unknown_letters, saying


@click.command(short_help="Check what this machine offers.")
@click.option("--quick", is_flag=True, help="Measure nothing: takes three seconds instead of ten.")
@click.option("--json", "as_json", is_flag=True, help="Print what was seen as JSON.")
def doctor(quick: bool, as_json: bool) -> None:
    """Check what this machine offers for training, and what is wrong with it.

    Looks at torch and GPUs, cores, memory, limits of a container, files, clock, network and the
    variables of this shell; then starts two workers for some seconds, and says how fast they meet,
    compute and add up gradients, and what to expect of two workers. Nothing is changed.

    ✓ good, ! works but could be better, ✗ wrong, ? could not be read.

    \b
    Examples:
      unisono doctor
      unisono doctor --quick
      unisono doctor --json > machine.json

    \b
    Exit status:
      0     nothing is wrong
      1     something is: a line with ✗
      2     the command line was wrong
      130   Ctrl-C
    """
    from rich.console import Console

    from unisono.doctor import diagnoses
    from unisono.doctor.examination import examine

    replace_unknown_letters()
    seen = examine(os.environ, measures=not quick)
    try:
        with saying():
            if as_json:
                all_seen = list(seen)
                click.echo(diagnoses.as_json(all_seen))
            else:
                console = Console()
                all_seen = diagnoses.print_diagnoses(console, seen)
                console.print(diagnoses.summary(all_seen), soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        leave(130)
    leave(diagnoses.status_of(all_seen))

"""What a new user types first: `unisono new` writes a recipe, `unisono demo` runs one.

A recipe is a file or a folder of `recipes`, which is `examples` of the repository; the table in its
README describes each. The demo leaves nothing behind, however it ends.
"""

from __future__ import annotations

import difflib
import os
import re
import runpy
import shlex
import shutil
import tempfile
from pathlib import Path

import click

from unisono.runtime.launch.api import launch
from unisono.runtime.launch.placement import VISIBLE_VARIABLE
from unisono.runtime.notices import say
from unisono.runtime.plainfile import path_given
from unisono.tools.cli.endings import Refusal

RECIPES = Path(__file__).parents[2] / "recipes"
FIRST = "classifier"  # what `unisono new train.py` writes, and `unisono demo` runs


def recipes() -> dict[str, tuple[Path, str]]:
    """Return each recipe's file or folder, and its description, by name."""
    table = (RECIPES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`.*?`\]\((.*?)\) \| (.*?) \|", table, re.M)
    return {Path(path).stem: (RECIPES / path, what) for path, what in rows}


@click.command(short_help="Write a program to start from.")
@click.argument("name", required=False)
@click.argument("file", type=Path, required=False)
@click.option("--list", "shows_all", is_flag=True, help="Show the names of all recipes.")
def new(name: str | None, file: Path | None, shows_all: bool) -> None:
    """Write a recipe to FILE. It runs as it is; replace model, loss and data.

    NAME is the recipe. Without FILE it also names the file; without NAME the recipe is a
    classifier.

    \b
    Examples:
      unisono new --list                   what there is
      unisono new train.py                 a classifier
      unisono new gan                      a GAN, to gan.py
      unisono new gan train.py             a GAN, to train.py
      unisono new cluster jobs             files for Slurm, Kubernetes and Ray, to a folder
    """
    found, file = recipes(), None if file is None else path_given(file)
    if shows_all or name is None:
        for known, (_, what) in found.items():
            click.echo(f"{known:16}{what}")
        return
    if file is None and name not in found and Path(name).suffix:
        name, file = FIRST, path_given(name)
    if name not in found and file is not None and name.endswith(".py"):
        raise Refusal(
            f"NAME must be a recipe where a FILE follows, but is {name!r}: use "
            f"`unisono new {shlex.quote(name)}`, or `unisono new {FIRST} {shlex.quote(str(file))}`."
        )
    if name not in found:
        close = difflib.get_close_matches(name, found, 1)
        advice = f"use one that `unisono new --list` shows, or {name + '.py'!r}."
        if close:
            advice = f"did you mean `unisono new {close[0]}`? See `unisono new --list`."
        raise Refusal(
            f"NAME must be a recipe, or a file that ends in .py, but is {name!r}: {advice}"
        )
    source, _ = found[name]
    _write(source, Path(source.name) if file is None else file)


def _write(source: Path, file: Path) -> None:
    if source.is_file() and file.suffix != source.suffix:
        raise Refusal(
            f"FILE must end in {source.suffix}, but is {str(file)!r}: use "
            f"{str(file.with_suffix(source.suffix))!r}."
        )
    name = shlex.quote(str(file))
    if source.suffix == ".py" and '"""' in name:
        raise Refusal(
            f'FILE must be a name without `"""`, as its docstring has the name, but is '
            f"{str(file)!r}: choose another name."
        )
    parts = [source] if source.is_file() else sorted(filter(Path.is_file, source.iterdir()))
    is_begun = False
    try:
        if source.is_dir():
            file.mkdir()
        for part in parts:
            text = part.read_text(encoding="utf-8").replace(f"examples/{source.name}", name)
            if source.suffix == ".py":  # commands in its docstring
                text = text.replace(source.name, name.replace("\\", r"\\"))
            target = file if source.is_file() else file / part.name
            with target.open("x", encoding="utf-8") as written:
                is_begun = True
                written.write(text)
    except FileExistsError:
        raise Refusal(
            f"FILE must be new, but {str(file)!r} exists: choose another name, or remove it."
        ) from None
    except OSError as error:
        if is_begun:  # half of it would be in the way of the next attempt
            file.unlink() if source.is_file() else shutil.rmtree(file)
        raise Refusal(
            f"FILE must be a place to write to, but {str(file)!r} is not: {error.strerror}."
        ) from None
    told = f"See {name}/README.md." if source.is_dir() else f"Open it: `jupyter lab {name}`"
    if source.suffix == ".py":  # commands are at the end of its docstring
        commands = text.split('"""')[1].strip().split("\n\n")[-1]
        told = "Run it:\n\n  " + commands.replace("\n", "\n  ")
    click.echo(f"{file} is written. {told}")


_NEXT = [
    ("unisono new train.py", "write this program to a file, to change it into your own"),
    ("python train.py", "one worker, the same digest"),
    ("unisono run -n 2 train.py", "two workers"),
    (
        'UNISONO_FAULTS="kill:rank=1,step=30" unisono run -n 2 train.py',
        "a worker is killed and replaced, the same digest",
    ),
    ("unisono verify your_ddp.py", "does a DDP program compute what one process would?"),
    ("unisono doctor", "what does this machine offer?"),
]


@click.command(short_help="Train a small CNN on two workers and on one, in half a minute.")
def demo() -> None:
    """Train a small CNN on handwritten digits on the CPU: with two workers, then with one.

    Both end with the same digest, so with the same weights, bit for bit. Nothing is downloaded, and
    no file stays. `unisono new train.py` writes the program.

    \b
    Example:
      unisono demo                         on two workers and on one, with one digest
    """
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-demo-") as folder:
            # Optimizers make torch create a folder of this name, which would stay.
            os.environ |= {VISIBLE_VARIABLE: "", "TORCHINDUCTOR_CACHE_DIR": folder}
            together = _trained("Two workers train a small CNN on handwritten digits:", 2)
            alone = _trained("One worker does the same:", 1)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except OSError as error:
        raise Refusal(
            f"torch must be able to write temporary files, but: {error.strerror}. Make room, or "
            "set TMPDIR to a folder that can be written."
        ) from None
    if together != alone:
        say(
            f"the digests of two workers and of one must be equal, but are {together} and {alone}: "
            "please report it, with what `unisono doctor` says."
        )
        raise click.exceptions.Exit(1)
    width = min(shutil.get_terminal_size().columns, 100)
    text = f"Two workers and one computed the same weights, bit for bit: digest {alone}."
    click.secho(click.wrap_text(text, width), fg="green", bold=True)
    table = click.HelpFormatter(width=width)
    with table.section("\nWhat to try next"):
        table.write_dl(_NEXT, col_max=30 if width >= 80 else 4)
    click.echo(table.getvalue().rstrip())


def _trained(title: str, num_workers: int) -> str:
    click.secho(title, bold=True)
    try:
        digest: str = launch(_train, workers=num_workers)[0]
    except Exception as error:
        say(str(error.__cause__ or error))
        raise click.exceptions.Exit(1) from None
    click.echo()
    return digest[:16]


def _train() -> str:
    digest: str = runpy.run_path(str(RECIPES / f"{FIRST}.py"))["main"]()
    return digest

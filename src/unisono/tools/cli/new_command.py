"""`unisono new`: write a recipe, a program to start from.

A recipe is a file or a folder of `recipes`, which is `examples` of the repository; the table in its
README says what each is.
"""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

import click

from unisono.tools.cli.endings import Refusal

RECIPES = Path(__file__).parents[2] / "recipes"
FIRST = "classifier"  # what `unisono new train.py` writes, and `unisono demo` runs


def recipes() -> dict[str, tuple[Path, str]]:
    """Give each recipe's name, its file or folder, and what it is."""
    table = (RECIPES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`.*?`\]\((.*?)\) \| (.*?) \|", table, re.M)
    return {Path(path).stem: (RECIPES / path, what) for path, what in rows}


@click.command(short_help="Write a program to start from.")
@click.argument("name", required=False)
@click.argument("file", type=Path, required=False)
@click.option("--list", "shows_all", is_flag=True, help="Show the names of all recipes.")
def new(name: str | None, file: Path | None, shows_all: bool) -> None:
    """Write a recipe to FILE. It runs as it is; replace model, loss and data.

    NAME is that of the recipe. Without FILE it is that of the file, too; without NAME the recipe
    is a classifier.

    \b
    Examples:
      unisono new --list                   what there is
      unisono new train.py                 a classifier
      unisono new gan                      a GAN, to gan.py
      unisono new gan train.py             a GAN, to train.py
      unisono new cluster jobs             files for Slurm, Kubernetes and Ray, to a folder
    """
    found = recipes()
    if shows_all or name is None:
        for known, (_, what) in found.items():
            click.echo(f"{known:16}{what}")
        return
    if file is None and name not in found and Path(name).suffix:
        name, file = FIRST, Path(name)
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        meant = "".join(f"`unisono new {each}`, or " for each in close)
        raise Refusal(
            f"NAME must be a recipe, or a file that ends in .py, but is {name!r}: use {meant}one "
            f"that `unisono new --list` shows, or {name + '.py'!r}."
        )
    source, _ = found[name]
    write(source, Path(source.name) if file is None else file)


def write(source: Path, file: Path) -> None:
    """Write a recipe's file or folder, with commands that name it as it is named here."""
    if source.is_file() and file.suffix != source.suffix:
        raise Refusal(
            f"FILE must end in {source.suffix}, but is {str(file)!r}: use "
            f"{str(file.with_suffix(source.suffix))!r}."
        )
    name = shlex.quote(str(file))
    parts = [source] if source.is_file() else sorted(filter(Path.is_file, source.iterdir()))
    try:
        if source.is_dir():
            file.mkdir()
        for part in parts:
            text = part.read_text(encoding="utf-8").replace(f"examples/{source.name}", name)
            if source.suffix == ".py":  # commands in its docstring
                text = text.replace(source.name, name.replace("\\", r"\\"))
            target = file if source.is_file() else file / part.name
            with target.open("x", encoding="utf-8") as written:
                written.write(text)
    except FileExistsError:
        raise Refusal(
            f"FILE must be new, but {str(file)!r} exists: choose another name, or remove it."
        ) from None
    except OSError as error:
        raise Refusal(
            f"FILE must be a place to write to, but {str(file)!r} is not: {error.strerror}."
        ) from None
    click.echo(f"{file} is written. {how_to_start(source, name, text)}")


def how_to_start(source: Path, name: str, text: str) -> str:
    """Tell how a recipe is started: a program says so at the end of its docstring."""
    if source.suffix == ".py":
        commands = text.split('"""')[1].strip().split("\n\n")[-1]
        return "Run it:\n\n  " + commands.replace("\n", "\n  ")
    return f"See {name}/README.md." if source.is_dir() else f"Open it: `jupyter lab {name}`"

"""The command `explain`: what the documentation says of a message, without the documentation.

Its page on messages is part of the package: ``docs/errors.md``, by a link.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files

import click

from unisono.tools.cli.endings import Refusal

_LEAST = 8  # characters of a message, by which it is found


@click.command(short_help="Say what a message means, and what to do.")
@click.argument("message", nargs=-1, required=True)
def explain(message: tuple[str, ...]) -> None:
    """Print causes and remedies of MESSAGE: an error's name, its message, or how that begins.

    \b
    Examples:
      unisono explain MismatchError
      unisono explain "`shards` must be at least the number of workers"
    """
    text = " ".join(message)
    if not (found := explanations(text)):
        names = ", ".join(_sections())
        raise Refusal(f"MESSAGE must be one of an error, or its name ({names}), but is {text!r}.")
    click.echo("\n\n".join(found))


def explanations(text: str) -> list[str]:
    """Give what the page has on the sentences and the error classes in a text."""
    found = [row for sentence, row in _sentences() if _is_in(sentence, text)]
    sections = _sections()
    named = [section for name, section in sections.items() if re.search(rf"\b{name}\b", text)]
    if not found and not named:
        close = difflib.get_close_matches(text, sections, 1)
        named = [sections[name] for name in close]
    return found + named


def _page() -> str:
    """Read the page, with links as their texts."""
    page = files("unisono.tools").joinpath("errors.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", page)


def _sections() -> dict[str, str]:
    parts = re.split(r"^#+ (.+)\n", _page(), flags=re.M)[1:]
    named = zip(parts[0::2], parts[1::2], strict=True)
    return {name: f"{name}\n\n{text.strip()}" for name, text in named if name.endswith("Error")}


def _sentences() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (.*?) \| (.*) \| (.*?) \|$", _page(), re.M)
    return [
        (message, f"{message}\n\nCause: {cause}\nRemedy: {remedy}")
        for message, cause, remedy in rows
        if message != "message"
    ]


def _is_in(sentence: str, text: str) -> bool:
    """Tell whether a text has a sentence, where … stands for anything; or how it begins."""
    pieces = [words for piece in sentence.split("…") if (words := _plain(piece))]
    said = _plain(text)
    at = [said.find(piece) for piece in pieces]
    is_whole = -1 not in at and at == sorted(at)
    return is_whole or (len(said) >= _LEAST and any(piece.startswith(said) for piece in pieces))


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").lower().split())

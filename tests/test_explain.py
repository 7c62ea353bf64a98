"""`unisono explain` says of a message what the page on messages says of it."""

import re

import pytest
from click.testing import CliRunner
from tests.test_docs import DOCS

from unisono.tools.cli import main

PAGE = (DOCS / "errors.md").read_text()
SENTENCES = re.findall(r"^\| (.*?) \| (.*) \| .*? \|$", PAGE, re.M)[1:]


def said(*words):
    result = CliRunner().invoke(main, ["explain", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize("name", re.findall(r"^### (\w+)$", PAGE, re.M))
def test_every_error_is_explained_by_its_name_and_by_its_last_line(name):
    status, by_name = said(name)
    assert status == 0
    assert by_name.startswith(f"{name}\n\n")
    first = PAGE.split(f"### {name}\n\n")[1].split("\n")[0]
    assert re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", first) in by_name
    assert by_name in said(f"unisono.errors.{name}: something must hold")[1]


@pytest.mark.parametrize(("sentence", "cause"), SENTENCES)
def test_every_sentence_is_found_whole_and_by_its_first_words(sentence, cause):
    told = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cause)
    whole = sentence.replace("…", "something")
    first = " ".join(max(sentence.split("…"), key=len).split()[:5])
    of_an_error = f"ValueError: {whole}, and more", f"ValueError: {first}"
    for typed in ((whole,), whole.split(), *((one,) for one in of_an_error), (first,)):
        status, output = said(*typed)
        assert status == 0
        assert f"Cause: {told}\nRemedy: " in output


@pytest.mark.parametrize(
    ("typed", "sentences"),
    [
        ("DIRECTORY must be", ["DIRECTORY must be a run's", "DIRECTORY must be that of a run"]),
        ("directory must be", ["`directory` must be a folder", "`directory` must be a URL"]),
        ("Directory must be that of", ["DIRECTORY must be that of a run"]),  # no such case
        ("SHARDS MUST BE AT LEAST", ["`shards` must be at least"]),
    ],
)
def test_what_a_command_gets_is_told_from_what_a_program_passes(typed, sentences):
    entries = said(typed)[1].split("\n\nCause: ")
    found = [entry.splitlines()[-1] for entry in entries[:-1]]
    assert len(found) == len(sentences)
    assert all(one.startswith(want) for one, want in zip(found, sentences, strict=True))


def test_nonsense_is_refused():
    status, output = said("what?")
    assert status == 2
    assert "MESSAGE must be an error of Unisono (UnisonoError, " in output
    assert "is 'ValueError': paste what follows the name" in said("ValueError")[1]

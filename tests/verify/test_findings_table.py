import io

import pytest
from rich.console import Console

from unisono.verify.findings import in_order, ok, unknown, wrong
from unisono.verify.findings_table import print_table, summary


def printed(findings, encoding="utf-8"):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_table(Console(file=stream, width=120), "train.py", (1, 2), findings)
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_each_finding_has_a_mark_a_sentence_and_a_remedy():
    text = printed(
        in_order(
            [
                ok("samples-lost", "None is."),
                wrong("split-differs", "[bold]They do.\x1b[2J", "Seed it."),
                unknown("mean-of-means", "Who knows?"),
            ]
        )
    )
    lines = text.splitlines()
    assert lines[0].rstrip().split(maxsplit=2) == [
        "✗",
        "split-differs",
        "[bold]They do.\\x1b[2J",
    ]
    assert lines[1].strip() == "→ Seed it."
    assert lines[2].startswith("? mean-of-means")
    assert lines[3].startswith("✓ samples-lost")
    assert "the cause is `split-differs`" in lines[4]


def test_a_terminal_without_such_letters_gets_words():
    text = printed(
        [wrong("split-differs", "They do.", "Seed."), ok("samples-lost", "None is.")], "ascii"
    )
    assert text.splitlines()[0].startswith("WRONG split-differs")


def test_the_same_sentence_is_not_repeated():
    text = printed([unknown("mean-of-means", "No."), unknown("samples-lost", "No.")])
    assert text.count("No.") == 1
    assert "as above" in text


@pytest.mark.parametrize(
    ("findings", "sizes", "is_exact", "words"),
    [
        (
            [ok("samples-lost", "")],
            (1, 2),
            False,
            "training on 1 and 2 ranks gives the same result",
        ),
        ([ok("samples-lost", "")], (1, 2, 3), True, "1, 2 and 3 ranks gives the same result, bit"),
        ([ok("resume-samples", "")], (2,), True, "resuming gives the same result, bit for bit"),
        ([unknown("samples-lost", "")], (1, 2), False, "1 of 1 checks could not be made"),
    ],
)
def test_the_sentence_at_the_end(findings, sizes, is_exact, words):
    assert words in summary("train.py", sizes, findings, is_exact=is_exact)

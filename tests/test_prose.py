"""How the pages are written: short, and with links to what our own words mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    page.relative_to(DOCS).with_suffix("").as_posix(): page for page in sorted(DOCS.rglob("*.md"))
}
# What is looked up, not read.
REFERENCE = {"architecture", "benchmarks", "costs", "errors", "events", "glossary", "guarantees"}
OURS = ("digest", "shard", "partial sum", "exchange", "membership", "snapshot")


def words_of(page: Path) -> str:
    """Take a page without its code and headings; what is in backticks is X."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"^(#|:::|    ).*$", "", text, flags=re.M)
    return re.sub(r"(`+).+?\1", "X", text, flags=re.S)


@pytest.mark.parametrize("name", sorted(PAGES.keys() - REFERENCE))
def test_a_page_is_read_in_minutes(name: str) -> None:
    assert len(PAGES[name].read_text().split()) <= 900


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"glossary"}))
def test_our_words_lead_to_the_glossary_at_first(name: str) -> None:
    text = re.sub(r"(?<=\]\()(?!\S*glossary)[^)]*", "", words_of(PAGES[name]))
    for word in OURS:
        if first := re.search(rf"\b{word}(e?s)?\b", text, re.I):
            link = rf"\[[^\]]*\]\((?:\.\./)?glossary\.md#{word.replace(' ', '-')}\)"
            linked = re.search(link, text)
            assert linked is not None, word
            assert first.end() <= linked.end(), word


def test_a_picture_for_light_screens_has_one_for_dark_screens() -> None:
    # A terminal is dark on both.
    shown = re.compile(r"\]\((?!\S*/terminal)[^)\s]+\.(?:png|svg)(#only-\w+)?\)")
    for name, page in PAGES.items():
        ends = [found[1] for found in shown.finditer(page.read_text())]
        assert ends.count("#only-light") == ends.count("#only-dark") == len(ends) / 2, name

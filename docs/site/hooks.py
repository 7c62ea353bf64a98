"""What the site needs beside Markdown: marked differences, and no links to files outside of it."""

import difflib
import re

_PROGRAM = r"```python title=([^\n]*)\n(.*?)```"
_PAIR = re.compile(rf"{_PROGRAM}\n\n{_PROGRAM}", re.S)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:examples|src|tests|bench)[^)]*\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Mark which lines of two programs side by side differ; name files that the site lacks."""
    if page.file.src_uri.startswith("from/"):
        markdown = _PAIR.sub(_marked, markdown)
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, **_) -> str:
    """Turn what docstrings write for Sphinx into what it means."""
    return re.sub(r":[a-z]+:(?=<code>)", "", html).replace("::</p>", ":</p>")


def _marked(pair: re.Match) -> str:
    before, after = pair[2].splitlines(), pair[4].splitlines()
    ours, theirs = set(), set()
    for tag, i, j, k, m in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        if tag != "equal":
            theirs.update(n + 1 for n in range(i, j) if before[n].strip())
            ours.update(n + 1 for n in range(k, m) if after[n].strip())
    blocks = ((pair[1], theirs, pair[2]), (pair[3], ours, pair[4]))
    return "\n\n".join(
        f'```python title={title} hl_lines="{" ".join(map(str, sorted(lines)))}"\n{code}```'
        for title, lines, code in blocks
    )

"""What the site needs beside Markdown: marked differences, recipes, no links to other files."""

import difflib
import re
from pathlib import Path

_PROGRAM = r"```python title=([^\n]*)\n(.*?)```"
_PAIR = re.compile(rf"{_PROGRAM}\n\n{_PROGRAM}", re.S)
_RECIPE = re.compile(r"\]\(\.\./((?:\.\./)*)examples/(\w+)\.py\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:examples|src|tests|bench)[^)]*\)")


def on_config(config):
    """Put pages that the navigation does not name behind the others of the reference."""
    (reference,) = (each["Reference"] for each in config.nav if "Reference" in each)
    named = str(config.nav)
    for page in sorted(Path(config.docs_dir).rglob("*.md")):
        path = page.relative_to(config.docs_dir).as_posix()
        if f"'{path}'" not in named and not config.not_in_nav.match_file(path):
            reference.append(path)
    return config


def on_files(files, config):
    """Add a page for each recipe: its program, and the command that writes it."""
    from mkdocs.structure.files import File

    for path in sorted((Path(config.docs_dir).parent / "examples").glob("*.py")):
        name, program = path.stem, path.read_text()
        text = f"# {name}\n\n```console\n$ unisono new {name}\n```\n\n```python\n{program}```\n"
        files.append(File.generated(config, f"recipes/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Mark which lines of two programs side by side differ; name files that the site lacks."""
    if page.file.src_uri.startswith("from/"):
        markdown = _PAIR.sub(_marked, markdown)
    markdown = _RECIPE.sub(r"](\1recipes/\2.md)", markdown)
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

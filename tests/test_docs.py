"""README and docs are true: code runs, links lead somewhere, every public name has a page."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import pickle
import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from tests.promises import ANCHOR
from tests.shown_blocks import AROUND, PAGES_THAT_RUN, program_of
from tests.shown_runs import INDEX, README, START, agree, digests, programs_of, run_page, runs_of
from tests.test_architecture import FILES, PACKAGE, nodes_of
from tests.warm import processes

import unisono
from unisono import errors
from unisono.runtime.world import num_devices
from unisono.tools.cli import main

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
ROOMS = ("callbacks", "data", "distributed")
EXAMPLES = REPOSITORY / "examples"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
PROBLEMS = sorted((DOCS / "problems").glob("*.md"))
MOVES = sorted((DOCS / "from").glob("*.md"), key=lambda page: page.stem)
needs_two_cores = pytest.mark.skipif(num_devices() < 2, reason="two workers need two cores")


def blocks(path: Path, language: str = "python") -> list[str]:
    """Return what is shown between fences on a page."""
    text = re.findall(rf"^ *```{language}(?: [^\n]*)?\n(.*?)^ *```$", path.read_text(), re.S | re.M)
    return [textwrap.dedent(block) for block in text]


@functools.cache
def anchors(path: Path) -> set[str]:
    """Return the names of a page's headings, as GitHub and MkDocs give them, and of its rows."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    named = ANCHOR.findall(text)
    return {*named, *(re.sub(r"[ -]+", "-", heading.strip()) for heading in plain)}


def run(*command: object, folder: Path) -> str:
    done = processes.run([sys.executable, *map(str, command)], cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pages_stay_as_short_as_they_are_meant_to_be() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert len((DOCS / "architecture.md").read_text().split()) <= 2000
    assert len(ANCHOR.sub("", (DOCS / "guarantees.md").read_text()).split()) <= 1800
    navigation = (REPOSITORY / "mkdocs.yml").read_text().split("\nnav:")[1].split("\ntheme:")[0]
    sections = dict(re.findall(r"^  - ([^:]*):\n((?: {6}.*\n)+)", navigation, re.M))
    most = {"Train": 6, "Existing programs": 3, "More devices and hosts": 6, "Look and check": 5}
    for section, number in most.items():
        assert len(sections[section].splitlines()) <= number, section


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    names = ("CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT")
    more = [*(REPOSITORY / f"{name}.md" for name in names), *EXAMPLES.rglob("*.md")]
    broken = [
        (str(page.relative_to(REPOSITORY)), link)
        for page in PAGES + more
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not link.startswith(("http://", "https://"))
        for path, _, anchor in [link.partition("#")]
        for target in [(page.parent / path).resolve() if path else page]
        if not target.exists()
        or (target.suffix == ".md" and anchor and anchor not in anchors(target))
    ]
    assert broken == []


def test_every_public_name_has_a_place_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"^::: unisono\.(\S+)$", pages, re.M))
    wanted = {name for name in unisono.__all__ if name not in (*ROOMS, "__version__", "errors")}
    wanted |= {f"{room}.{name}" for room in ROOMS for name in getattr(unisono, room).__all__}
    wanted |= {f"errors.{name}" for name in dir(errors) if name.endswith("Error")}
    assert wanted - {"errors.UnisonoError"} <= shown
    assert "`unisono.__version__`" in pages


def test_every_command_that_is_shown_exists() -> None:
    shown = {
        (name, page.name)
        for page in PAGES
        for block in blocks(page, "console")
        for name in re.findall(r"^\$ (?:\w+=\S+ )*unisono ([a-z]+)", block, re.M)
    }
    assert {(name, page) for name, page in shown if name not in main.commands} == set()
    assert set(main.commands) <= {name for name, _ in shown}


def test_every_option_that_is_shown_exists() -> None:
    shown = "\n".join(block for page in PAGES for block in blocks(page, "console"))
    commands = re.findall(r"^\$ (?:\w+=\S* )*unisono ([a-z]+)(.*)$", shown, re.M)
    assert len(commands) > 35
    for name, rest in commands:
        words = shlex.split(rest.removesuffix("\\"), comments=True)
        script = [word.endswith(".py") for word in words]  # what follows it is the script's
        ours = words[: script.index(True)] if any(script) else words
        main.commands[name].make_parser(click.Context(main.commands[name])).parse_args(ours)


def sentences_of_the_package() -> list[str]:
    """Return every string of the source, with … where something is put in."""
    found = []
    for path in [*FILES, PACKAGE / "__init__.py"]:
        for node in nodes_of(path):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.slow
def test_troubleshooting_has_every_error_and_quotes_what_is_said() -> None:
    page = (DOCS / "errors.md").read_text()
    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.UnisonoError)
    ]
    assert re.findall(r"^### (\w+)$", page, re.M) == classes
    quoted = re.findall(r"^\| (.*?) \|", page.split("## Common sentences")[1], re.M)[2:]
    assert len(quoted) >= 20
    said, torchs = sentences_of_the_package(), ["on the same device", "compiled with CUDA"]
    unknown = [
        sentence
        for sentence in quoted
        if not any(words in sentence for words in torchs)
        and not any(all(part.strip() in text for part in sentence.split("…")) for text in said)
    ]
    assert unknown == []


def test_an_error_names_its_page() -> None:
    fields = {"rank": 0, "missing": (), "waited_s": 1.0, "step": 0, "shard": 0, "value": 0.0}
    for name in re.findall(r"^### (\w+)$", (DOCS / "errors.md").read_text(), re.M):
        kind = getattr(errors, name)
        taken = fields.keys() & inspect.signature(kind).parameters.keys()
        error = kind("it failed", **{field: fields[field] for field in taken})
        again = pickle.loads(pickle.dumps(error))
        assert [getattr(again, field) for field in taken] == [fields[field] for field in taken]
        assert again.__notes__ == [f"Causes and remedies: `unisono explain {name}`"]
        assert str(again) == "it failed"
        # What has no section of its own stands in that of its base class.
        derived = type("Derived", (kind,), {})("", **{field: fields[field] for field in taken})
        assert derived.__notes__ == again.__notes__


def test_every_block_of_python_compiles_and_seeds_the_weights() -> None:
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        shown = path.read_text()
        for made in re.finditer(r"unisono\.(Trainer|Run)\(", shown):
            assert "torch.manual_seed(" in shown[: made.start()], path
    for path in PAGES:
        for block in blocks(path):
            compile(block, str(path), "exec")
            model = re.search(r"^ *model = (?!DDP)", block, re.M)
            assert model is None or "seed(" in block[: model.start()], path


def test_every_block_of_python_is_run_by_a_test() -> None:
    """Programs with commands below them by their test, whole ones side by side by theirs."""
    shown = {page for page in PAGES if blocks(page)}
    run_here = {DOCS / f"{page}.md" for page in PAGES_THAT_RUN}
    with_runs = [README, INDEX, *PROBLEMS]
    assert shown == {DOCS / "notebooks.md", *with_runs, *MOVES, *run_here}
    assert all(len(blocks(page)) == 2 + (page.stem == "pytorch") for page in MOVES)
    assert all(blocks(page) == list(programs_of(page).values()) for page in with_runs)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_blocks_run_in_a_program_that_has_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    program = [AROUND]
    for page in PAGES_THAT_RUN:
        program += program_of(page, blocks(DOCS / f"{page}.md"))
    (tmp_path / "blocks.py").write_text("\n".join(program))
    run("blocks.py", folder=tmp_path)


def digest(output: str) -> str:
    (found,) = re.findall(r"digest:? ([0-9a-f]+)", output)
    return found


@pytest.mark.parametrize("page", MOVES, ids=lambda page: page.stem)
def test_the_page_of_each_library_says_what_becomes_of_the_last_batch(page: Path) -> None:
    assert re.search(r"^\| `\w*(drop_last|drop_remainder)", page.read_text(), re.M)


def test_recipes_are_linked_to_their_programs_on_the_site_too() -> None:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    def on_site(markdown: str, name: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        return str(hooks.on_page_markdown(markdown, page))

    assert on_site("[gan](../examples/gan.py)", "index.md") == "[gan](recipes/gan.md)"
    assert on_site("[gan](../../examples/gan.py)", "from/a.md") == "[gan](../recipes/gan.md)"
    assert on_site("[all](../examples), [x](../src/x.py)", "a.md") == "all, x"
    linked = re.findall(r"\]\(recipes/(\w+)\.md\)", on_site(INDEX.read_text(), "index.md"))
    assert sorted(linked) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", ["curves-narrow", "curves-dark-narrow"])
def test_the_first_picture_can_be_read_on_a_telephone(name: str) -> None:
    picture = (DOCS / "pictures" / f"{name}.svg").read_text()
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', picture)
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)', picture)]
    assert min(sizes) * 400 / int(width) > 10  # pixels
    assert f"{name}.svg" in README.read_text()
    assert f"{name}.svg" in INDEX.read_text()


def test_how_long_the_tests_take_is_the_same_everywhere() -> None:
    pages = (REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "Makefile"))
    told = [re.findall(r"(\w+) minutes on two cores", page.read_text()) for page in pages]
    assert all(found for found in told)
    assert len({each for found in told for each in found}) == 1


@needs_two_cores
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [README, *(pytest.param(page, marks=pytest.mark.long) for page in (START, *PROBLEMS))],
    ids=lambda page: page.stem,
)
def test_commands_print_what_stands_below_them(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path, quickly=True)
    assert done
    for command, shown, lines in done:
        assert agree(shown, lines), (command, lines)
    shown, lines = ([line for run in done for line in run[part]] for part in (1, 2))
    assert digests(shown) == digests(lines)


def test_programs_of_problems_are_short_and_linked_from_the_first_pages() -> None:
    for page in PROBLEMS:
        programs = programs_of(page)
        assert len(programs) == 2
        for program in programs.values():
            lines = [line for line in program.splitlines() if line]
            assert len([line for line in lines if not line.startswith(("import", "from"))]) <= 20
        assert f"(docs/problems/{page.name})" in README.read_text()
        assert f"(problems/{page.name})" in INDEX.read_text()


def test_the_first_page_shows_the_program_and_the_numbers_of_others() -> None:
    assert programs_of(INDEX) == programs_of(README)
    assert [command for command, _ in runs_of(INDEX)] == [command for command, _ in runs_of(README)]
    ours, readmes = (
        [line for _, shown in runs_of(page) for line in shown] for page in (INDEX, README)
    )
    assert agree(ours, readmes)
    assert digests(ours) == digests(readmes)
    cards = re.findall(r"^    (.*)\n\n    \[.*\(problems/(\w+)\.md\)$", INDEX.read_text(), re.M)
    picture = re.findall(r": (0\.\d+)<", (DOCS / "pictures" / "curves.svg").read_text())
    assert len(picture) == 4
    narrow = (DOCS / "pictures" / "curves-narrow.svg").read_text()
    assert re.findall(r": (0\.\d+)<", narrow) == picture
    assert len(cards) == len(PROBLEMS)
    for text, name in [*cards, (" ".join(picture), "accuracy")]:
        page = (DOCS / "problems" / f"{name}.md").read_text()
        assert [number for number in re.findall(r"\d[\d.,]*\b%?", text) if number not in page] == []


@needs_two_cores
@pytest.mark.slow
@pytest.mark.parametrize("page", MOVES, ids=lambda page: page.stem)
def test_programs_side_by_side_run(page: Path, tmp_path: Path) -> None:
    before, after, *_ = blocks(page)
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(after)
    ranks = ("-m", "unisono", "run", "-n", 2)
    run(*(() if page.stem == "data-parallel" else ranks), "after.py", folder=tmp_path)
    if page.stem not in ("accelerate", "keras", "lightning", "transformers"):  # tests/peers
        run(*(ranks if page.stem == "ddp" else ()), "before.py", folder=tmp_path)


@pytest.mark.slow
def test_one_shard_has_the_bits_of_the_plain_program_after_each_update(tmp_path: Path) -> None:
    before, after, updates = blocks(DOCS / "from" / "pytorch.md")
    programs = {"updates": updates, "before": before, "after": after}
    programs["one"] = after.replace("shards=2", "shards=1")
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text("import torch; torch.set_num_threads(1)\n" + text)
    found = {}
    for name in ("before", "after", "one"):
        said = run("updates.py", f"{name}.py", folder=tmp_path)
        found[name] = re.findall(r"^update \d+: .*$", said, re.M)
    assert len(found["before"]) == 96
    assert found["one"] == found["before"]
    assert found["after"][0] != found["before"][0]

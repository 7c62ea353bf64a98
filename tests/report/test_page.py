"""The pages as text: what is on them, what is escaped, what their plots are made of."""

import json
import os
import re
import sys

import pytest
from click.testing import CliRunner
from tests.report.lines import event, history_of, step
from tests.report.synthetic import run_lines, start_line, step_line, write_run

from unisono.tools.cli import main
from unisono.tools.report import curves, text
from unisono.tools.report.curves import small
from unisono.tools.report.files import digests_in_words, write_page
from unisono.tools.report.history import gather
from unisono.tools.report.page import command_line, report, why_not_faster


@pytest.fixture
def small_library(monkeypatch):
    """The library that draws is 5 MB of what is not looked at here."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


def page_of(lines):
    return report(history_of(*lines))


def test_a_page_asks_for_nothing(small_library):
    page = page_of(run_lines())
    assert len(page) < 500_000
    assert "default-src 'none'" in page
    links = re.findall(r'(?:src|href|action)="([^"]*)"', page)
    assert links == ["data:,"]
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<html") == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (list(run_lines()), ["finished", "worker 1 was killed by SIGKILL", "0123456789abcdef" * 4]),
        (list(run_lines(fails=True)), ["failed", "Worker 2: NonFiniteLossError: the loss of"]),
        (list(run_lines(ends=False)), ["no end yet", "Its file records no end"]),
        ([start_line()], ["No step has been finished yet", "Nothing was measured yet"]),
        ([{"event": "step", "step": 3}], ["a run", "The file does not say"]),
        (
            [start_line(end_step=9), {"event": "step", "step": 4, "epoch": 1}],
            ["<b>5</b><span>of 9 · epoch 2</span>"],  # counted from 1, as `unisono top` does
        ),
    ],
)
def test_a_page_says_how_the_run_stands(small_library, lines, words):
    page = page_of(lines)
    assert [word for word in words if word not in page] == []


def test_what_a_page_leaves_out_is_told(small_library, tmp_path):
    run = write_run(tmp_path, num_steps=10, lost_at=-99)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    assert "1 line of the event file could not be read" in report(gather(run))


def test_what_a_figure_holds_is_data_alone(small_library):
    """Whatever a metric is called, and whatever its values are."""
    means = {"'></div><!--": 1 / 3, "loss": "nan"}
    page = page_of(
        [start_line(), step_line(0, ranks=[0], phases=[[0.1] * 6], seconds=1, means=means)]
    )
    held = re.findall(r"data-figure='([^'<>&]*)'></div></div>", page)
    assert len(held) == page.count('class="plot"') == 6
    figures = [json.loads(one) for one in held]
    assert [one["data"][0]["y"] for one in figures[:2]] == [[None], [0.333333]]


@pytest.mark.slow
def test_plots_are_made_of_what_plotly_knows():
    from plotly.graph_objects import Figure as PlotlyFigure

    history = history_of(*run_lines())
    figures = [*curves.learning(history), *curves.others(history)]
    figures += [curves.by_phase(history), curves.by_worker(history)]
    assert len(figures) == 7
    text = json.dumps([small(figure.spec) for figure in figures])
    for spec in json.loads(re.sub(r"var\(--[a-z0-9]+\)", "#123456", text)):
        PlotlyFigure(spec)  # an unknown name raises
    css = (curves.__file__.rsplit("/", 1)[0]) + "/page.css"
    with open(css) as file:
        style = file.read()
    colours = set(re.findall(r"var\((--[a-z0-9]+)\)", text))
    assert {colour for colour in colours if f"{colour}:" not in style} == set()


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [20, 2000])  # dots; means
def test_what_is_not_finite_is_told_where_it_is_not_drawn(num_steps):
    lines = list(run_lines(num_steps=num_steps, lost_at=-99))
    for line in lines:
        if line["event"] == "step" and 5 <= line["step"] < 8:
            line["means"]["loss"] = "nan"
    loss, accuracy, *_ = curves.learning(history_of(*lines))
    assert loss.note.endswith("Not finite, so not drawn: 3 steps.")
    assert "finite" not in accuracy.note


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"command": ["python", "my train.py", "--lr", "1"]}, "python 'my train.py' --lr 1"),
        (
            {"command": ["python", "t.py"], "identity": {"threads": 4}},
            "UNISONO_THREADS=4 python t.py",
        ),
        ({"command": ["python", "t.py"], "identity": {"threads": "4; rm"}}, "python t.py"),
        ({"command": ["a", "; rm -r x"]}, "a '; rm -r x'"),
    ],
)
def test_the_command_can_be_run_again(change, line):
    assert command_line(history_of(start_line(**change)).progress.first) == line


def test_what_its_steps_show_is_said(tmp_path):
    (said,) = why_not_faster(gather(write_run(tmp_path, slow=2)))
    assert said.startswith("Worker 2 is slow in its passes: ")
    assert re.search(r", which costs 3\d % of the time: check ", said)


@pytest.mark.parametrize(
    ("num_workers", "findings", "words"),
    [
        (1, (), "Nothing stands out: the time goes into computing."),
        (2, None, "The steps were too few to tell whether a worker is slow."),
        (2, (), "Nothing stands out: no worker is slow, and the machine was not too busy."),
    ],
)
def test_that_nothing_stands_out_is_said(num_workers, findings, words):
    rows = [[0.0, 1.0, 2.0, 1.0, 0.0, 0.0]] * num_workers
    made = history_of(step_line(0, ranks=list(range(num_workers)), phases=rows, seconds=4.0))
    made.findings = findings
    assert why_not_faster(made) == [words]


def ended(digest, *, seed=7, step=3):
    lines = [start_line(seed=seed, identity={"seed": seed})]
    if digest:
        lines.append({"event": "end", "step": step, "digest": digest})
    return lines


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (ended("a"), ended("a"), "All digests are equal"),
        (ended("a"), ended("b", step=4), "ended after different numbers of steps"),
        (
            ended("a"),
            ended("b", seed=8),
            "below are the settings that determine the result and differ",
        ),
        (ended("a"), ended("b"), "compare their code and data"),
        (ended("a"), ended(None), "is unknown: no digest of y."),
    ],
)
def test_digests_are_compared_in_words(one, other, words):
    assert words in digests_in_words([history_of(*one, name="x"), history_of(*other, name="y")])


def called(*words):
    result = CliRunner().invoke(main, list(map(str, words)))
    return result.exit_code, result.output


def test_the_commands_say_where_their_files_are(small_library, tmp_path):
    runs = [write_run(tmp_path / name / "run", num_steps=4) for name in "ab"]
    assert called("report", runs[0]) == (0, f"{runs[0] / 'report.html'}\n")
    page = tmp_path / "p.html"
    assert called("report", runs[0], "-o", page) == (0, f"{page}\n")
    page = tmp_path / "compare.html"
    assert called("compare", *runs, "-o", page) == (0, f"{page}\n")
    assert "All digests are equal" in page.read_text()
    assert str(runs[1]) in page.read_text()  # as the last parts of their names are the same


def test_no_command_minds_a_process_that_is_not_known(small_library, tmp_path):
    come = {"event": "workers", "step": 2, "ranks": [0, 1], "pids": [None, None], "joined": [1]}
    run = write_run(tmp_path / "run", [start_line(pids=[None, 12]), come])
    for words in (["top", "--once"], ["report"]):
        assert called(*words, run)[0] == 0
    assert gather(run).num_unreadable == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["report", "none"], "DIRECTORY must be a run's folder, but 'none' is none"),
        (["report", "empty"], r"DIRECTORY must hold events.jsonl, but 'empty' does not"),
        (["report", "run", "-o", "train.py"], "`-o` must name a page, but 'train.py' does not"),
        (["compare", "run"], "DIRECTORY must name 2 to 8 runs, but names 1"),
        (["compare", *["run"] * 9], "DIRECTORY must name 2 to 8 runs, but names 9"),
    ],
)
def test_a_mistake_gets_one_sentence(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    write_run("run", num_steps=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.py").write_text("import torch\n")
    code, output = called(*words)
    assert (code, output.count("\n")) == (2, 1)
    assert told in output
    assert (tmp_path / "train.py").read_text() == "import torch\n"


@pytest.mark.parametrize("library", ["plotly.offline", "jinja2"])
def test_without_its_libraries_one_sentence_says_what_to_install(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    code, output = called("report", write_run(tmp_path, num_steps=2))
    assert code == 2
    assert output == (
        "unisono: To draw a page, plotly and jinja2 must be installed, but are not: install them "
        "with `pip install 'unisono[report]'`.\n"
    )


def test_a_file_is_written_and_written_again(tmp_path):
    path = tmp_path / "a page.html"
    assert write_page(path, "page") == path
    write_page(path, "newer")
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["a page.html"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_a_link_leads_to_is_kept(tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "page.html").symlink_to("train.py")
    write_page(tmp_path / "page.html", "page")
    assert (tmp_path / "train.py").read_text() == "import torch"


@pytest.mark.parametrize("name", ["none/page.html", "file/page.html", "folder.html"])
def test_a_place_that_takes_no_file_is_told(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ValueError, match="must name a file that can be written"):
        write_page(tmp_path / name, "page")


@pytest.mark.parametrize(
    ("unix_s", "shown"), [(0.0, "1970-01-01 00:00:00 UTC"), (1e12, "–"), (-1e12, "–"), (None, "–")]
)
def test_a_moment_that_no_calendar_has_is_not_shown(unix_s, shown):
    assert text.moment(unix_s) == shown


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ("a<b", "a<b"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\u202eb", "a\\u202eb"),
        ("a\nb", "a\nb"),
        ("x" * 3000, "x" * 1999 + "…"),
        ("naïve 日本 😀", "naïve 日本 😀"),
    ],
)
def test_nothing_is_hidden_in_text(found, shown):
    assert text.plain(found) == shown


def test_a_name_is_escaped_for_a_plot():
    assert text.in_plot("<b>\n&") == "&lt;b&gt; &amp;"


@pytest.mark.parametrize(
    ("found", "shown"), [(True, "yes"), (None, "none"), (3, "3"), ([1, "é"], '[1, "é"]'), ("", "")]
)
def test_a_value_is_shown_in_few_words(found, shown):
    assert text.value(found) == shown


def test_the_commands_move_the_finished_run_aside(tmp_path, small_library):
    history = gather(write_run(tmp_path / "a run", slow=None))
    page = report(history)
    moved = f"mv &#39;{tmp_path}/a run&#39; &#39;{tmp_path}/a run-before&#39;\n"
    assert moved in page


def test_no_count_is_called_best():
    from unisono.tools.report.history import is_at_least_as_good, word_of_best

    assert [word_of_best(one) for one in ("seen/loss", "macro_f1", "area")] == ["Best"] * 2 + [
        "Last"
    ]
    assert is_at_least_as_good("loss", 1.0, 2.0)
    assert not is_at_least_as_good("loss", 3.0, 2.0)
    assert is_at_least_as_good("accuracy", 3.0, 2.0)
    assert not is_at_least_as_good("Accuracy", 1.0, 2.0)
    assert is_at_least_as_good("area", 1.0, 2.0)
    assert is_at_least_as_good("area", 3.0, 2.0)


def test_pages_speak_of_what_fixed_a_run_as_the_field_does(small_library, tmp_path):
    usual = start_line(identity={"arithmetic": "as usual", "precision": "float32"})
    metrics = event("evaluation", 1, 1.0, means={"area": 24944.0, "accuracy": 0.5})
    page = page_of([usual, step(0, 0.5), metrics])
    assert "torch&#39;s defaults" in page
    assert "workers at the beginning" in page
    assert "Last validation area" in page
    assert "Best validation accuracy" in page
    assert [words for words in ("as usual", "at the begin<", "Highest") if words in page] == []


def test_what_holds_of_all_charts_is_said_once(small_library, tmp_path):
    runs = [write_run(tmp_path / name, num_steps=40) for name in "ab"]
    page = tmp_path / "compare.html"
    assert called("compare", *runs, "-o", page)[0] == 0
    figures = re.findall(r"<figcaption>(.*?)</figcaption>", page.read_text(), re.S)
    assert len(figures) > 1
    assert not any("the first is seen beneath" in figure for figure in figures)
    assert page.read_text().count("Where curves are equal") == 1


def test_a_checkpoint_that_was_asked_for_is_not_said_to_be_written(small_library):
    """The event file does not know: a full disk is told on the terminal."""
    page = report(history_of(step(0, 1.0), event("checkpoint", 1, 1.0), event("end", 1, 2.0)))
    assert "No trouble is recorded. 1 checkpoint begun, the last after step 1: " in page

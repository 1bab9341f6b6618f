"""A report says what was measured, in one file that opens anywhere."""

import html
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from browser import chromium
from hypothesis import given, settings
from hypothesis import strategies as st
from made_results import adapted, asking, model_record, reading, scoring
from markupsafe import escape

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import comparisons
from ropepatch.evaluation.ranking import rank
from ropepatch.report import print_ranking, print_results, write_report
from ropepatch.report.tables import perplexity_text
from ropepatch.report.verdict import Verdict, measured, origin

EVIL = '<script>document.title = "taken"</script>&"\'$x'

RESULTS = [
    reading("floor", [0.4, 0.39, 0.38]),
    reading("baseline", [0.6, 2.0, 12.0], gain=[-0.5, -6.0]),
    reading("linear", [0.9, 0.8, 2.75], method="linear", gain=[0.1, 0.2]),
    reading("yarn", [0.65, 0.6, 0.55], method="yarn", gain=[0.2, 0.3]),
    asking("baseline", [4, 0, 0]),
    asking("linear", [2, 2, 1], method="linear"),
    asking("yarn", [4, 4, 3], method="yarn"),
    scoring("baseline", {("long_task", "acc"): 0.1, ("short_task", "acc"): 0.5}),
    scoring("yarn", {("long_task", "acc"): 0.4}, method="yarn"),
]
RANKED = [result for result in RESULTS if result.task != "lm-eval"]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_report(RESULTS, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def page(file) -> str:
    return file.read_text(encoding="utf-8")


def plain(page: str) -> str:
    """The text of a page, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """The rows of every table, its heads included, by its caption."""
    found = {}
    for caption, table in re.findall(r"<caption>(.*?)</caption>(.*?)</table>", page, re.DOTALL):
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        found[plain(caption)] = [list(map(plain, re.findall(r"<t[hd].*?</t[hd]>", row))) for row in rows]
    return found


# What it says of an extension, before and after its training

BEFORE = reading("yarn", [0.6] * 3, method="yarn")
AFTER = adapted(reading("yarn + mine", [0.5] * 3, method="yarn"))


def advice(*results):
    return " ".join(Verdict.on(comparisons(results)).advice)


def test_scalings_maps_and_what_was_trained_are_counted_and_named():
    map_ = reading("dca", [0.9] * 3, method="dca")
    linear = reading("linear", [0.9] * 3, method="linear")
    assert measured(comparisons([BEFORE, AFTER, map_, linear])) == (
        "tiny was trained on 256 tokens. "
        "Measured here: 2 scalings of its rope to 1,024 tokens, training-free: "
        "yarn and linear; 1 attention map to 1,024 tokens, training-free: dca; trained for 1,024 tokens: "
        "yarn + mine."
    )
    assert measured(comparisons([reading("baseline", [0.9] * 3)])).endswith("the baseline, to 1,024 tokens.")


@pytest.mark.parametrize(
    ("nats", "gain", "words"),
    [
        ([0.5, 0.6, 0.65], "+0.017", "not significant"),
        ([0.7, 0.6, 0.55], "-0.017", "not significant"),
        ([0.7, 0.7, 0.7], "-0.100 (95 % interval -0.100 to -0.100)", "does harm"),
        ([0.5, 0.5, 0.5], "+0.100 (95 % interval +0.100 to +0.100)", ""),
    ],
)
def test_what_the_training_gained_is_stated_with_its_significance(nats, gain, words):
    results = [
        reading("yarn", [[0.6] * 3] * 3, method="yarn"),
        adapted(reading("yarn + mine", [nats] * 3, method="yarn")),
    ]
    (sentence,) = re.findall(r"Training gains yarn \+ mine (.*? over yarn.*?)\.$", advice(*results))
    assert sentence.startswith(gain)
    assert sentence.partition("over yarn")[2].endswith(words)
    assert bool(words) == bool(sentence.partition("over yarn")[2])


def test_a_scaling_that_was_read_from_a_file_is_the_same():
    made, read = (BEFORE.scaling | {"parameters": {"factors": of}} for of in ((1.0, 2.0), [1.0, 2.0]))
    results = [replace(BEFORE, scaling=read), replace(AFTER, scaling=made)]
    assert "over yarn" in advice(*results)


def without_clusters(result):
    return replace(result, rows=[replace(row, clusters=[]) for row in result.rows])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            reading("yarn", [[0.6, 0.6]] * 3, method="yarn"),
            adapted(reading("yarn + mine", [[0.5, 0.5]] * 3, method="yarn")),
        ),
        (BEFORE, without_clusters(AFTER)),
        (without_clusters(BEFORE), AFTER),
        (reading("ntk", [0.6] * 3, method="ntk"), AFTER),
        (replace(BEFORE, model=model_record() | {"weights": "else"}), AFTER),
        (reading("baseline", [0.6] * 3), AFTER),
    ],
    ids=["two documents", "none after", "none before", "another scaling", "other weights", "no scaling"],
)
def test_without_documents_of_the_same_scaling_of_the_same_weights_nothing_is_said_of_the_training(
    before, after
):
    assert "Training gains" in advice(BEFORE, AFTER)
    assert "Training gains" not in advice(before, after)


# What it says


def box(page: str) -> list[str]:
    """The lines of the verdicts at its head."""
    found = re.findall(r'<div class="verdict">(.*?)</div>', page, re.DOTALL)
    return [plain(line) for part in found for line in re.findall(r"<p>(.*?)</p>", part)]


def test_the_verdict_of_the_ranking_is_stated_once_at_the_head(page, tmp_path):
    lines = Verdict.of(rank(RANKED, base="baseline")).lines
    assert box(page) == lines
    assert [plain(page).count(line) for line in lines] == [1] * len(lines)
    assert measured(comparisons(RESULTS)) in plain(page)
    nothing = [reading("baseline", [0.4] * 3), reading("yarn", [0.5] * 3, method="yarn")]
    (line,) = box(write_report(nothing, tmp_path / "r.html").read_text())
    assert line.startswith("Do not extend")


@pytest.mark.parametrize(("documents", "haystacks"), [(2, 4), (4, 2), (10, 10)])
def test_every_warning_of_the_terminal_is_in_the_report_before_the_verdict(
    documents, haystacks, tmp_path, capsys
):
    def read(label, nats, method=None):
        losses = [nats + 0.01 * (-1) ** number for number in range(documents)]
        return reading(label, [losses] * 3, method=method)

    results = [
        read("baseline", 2.0),
        read("yarn", 1.0, "yarn"),
        asking("baseline", [haystacks, 0, 0], n=haystacks),
        asking("yarn", [haystacks] * 3, n=haystacks, method="yarn"),
    ]
    few = [(documents, "documents"), (haystacks, "haystacks")]
    expected = [f"{count} {unit}" for count, unit in few if count < 5]
    print_results(results)
    print_ranking(rank(results, base="baseline"), results)
    printed = re.findall(r"^Warning: .*$", capsys.readouterr().out, re.MULTILINE)
    assert [line.split(":")[1].strip() for line in printed] == expected * 2
    lines = box(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert lines[: len(expected)] == list(dict.fromkeys(printed))
    assert len(lines) > len(expected)
    assert not any(line.startswith("Warning") for line in lines[len(expected) :])


def test_below_the_title_stands_where_it_all_comes_from(tmp_path):
    page = write_report(RESULTS[3:4], tmp_path / "r.html", command="ropepatch eval x --text <b>").read_text()
    line = plain(re.search(r'<p class="origin">.*?</p>', page, re.DOTALL)[0])
    assert re.search(r"cpu.* · books.* · \d{4}-\d\d-\d\d · ropepatch eval x --text <b>$", line), line
    assert "<b>" not in page
    measured = RESULTS[-1]
    assert origin([replace(measured, label="floor", env={}), measured]) == origin([measured])


def test_without_several_documents_or_scalings_there_is_no_advice():
    results = [reading("baseline", [0.6, 2.0, 9.0]), reading("yarn", [0.65, 0.6, 0.55], method="yarn")]
    assert advice(*results).startswith("Take yarn")
    assert not advice(*map(without_clusters, results))
    assert not advice(results[1])
    assert not advice(*results, replace(results[0], scaling=results[1].scaling))


def test_the_best_of_a_column_is_marked_and_the_floor_is_not(page):
    marked = [plain(cell) for cell in re.findall(r'<td class="best".*?</td>', page, re.DOTALL)]
    assert [cell.partition(" ")[0] for cell in marked[:4]] == ["0.550", "1.733", "75%", "-0.83"]
    assert "0.600 0.500 to 0.700" in marked
    assert not any(cell.startswith("0.38") for cell in marked)


def test_how_it_was_measured_and_everything_that_stands_behind_a_result_is_in_the_file(page):
    text = plain(page)
    assert "10 pieces of books, 10,240 tokens in all. Each piece is read once" in text
    assert "4 haystacks of ropepatch's own filler, seed 0" in text
    lines = ["model weights sha256:0123", "scaling factor 4.0", '"beta_fast": 32.0', "digest f00d"]
    for line in (*lines, "torch 2.8.0", "seconds 1.5", "n 1000 clusters 10", "n 12 clusters 4"):
        assert line in text, line
    assert len(re.findall(r"<summary>tiny, ", page)) == len(RESULTS)


def test_models_targets_and_protocols_stand_apart(tmp_path):
    sliding = {"digest": "beef", "bos": True, "stride": 128}
    results = [
        reading("yarn", [1.0] * 3, method="yarn"),
        reading("yarn", [2.0] * 3, method="yarn", **sliding),
        reading("yarn", [3.0] * 2, method="yarn", lengths=[256, 512]),
        reading("yarn", [4.0] * 3, method="yarn", model=model_record("other")),
    ]
    page = write_report(results, tmp_path / "r.html").read_text(encoding="utf-8")
    rows = tables_of(page)["The outcome at the target"]
    assert [row[:3] for row in rows[1:]] == [
        ["tiny", "1k", "yarn"],
        ["tiny", "512", "yarn"],
        ["other", "1k", "yarn"],
    ]
    assert "Nats per token stride 128, bos True" in rows[0]
    assert [row[3][:5] for row in rows[1:]] == ["1.000", "–", "–"]
    titles = [plain(title) for title in re.findall(r"<h2>.*?</h2>", page)]
    assert titles == ["tiny to 1k", "tiny to 512", "other to 1k", "Provenance"]
    text = plain(page)
    assert "Perplexity: stride 128, bos True" in text
    assert "128 tokens at a time" in text
    assert "before each document" in text


@settings(deadline=None)
@given(st.floats(0, 2000))
def test_any_loss_has_a_perplexity_to_write(nats):
    text = perplexity_text(nats)
    assert text == "∞" or float(text) == pytest.approx(math.exp(nats), rel=0.05)


# The file


def test_the_file_needs_nothing_else(page):
    assert "http" not in page.replace("http-equiv", "")
    drawn = re.sub(r'href="data:image/png;base64,[\w+/=\s]+"', "", page)  # the cells of a heat map
    assert not re.search(r'\b(src|href|srcset|action|data)="[^#]', drawn)
    assert not {*re.findall(r"<(\w+)", page)} & {"link", "img", "iframe", "object", "embed", "base"}
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_ids_are_unique_and_what_refers_to_them_finds_them(page):
    ids = re.findall(r'\bid="(.*?)"', page)
    assert len({*ids}) == len(ids) > 100
    targets = {*re.findall(r"url\(#(.*?)\)", page), *re.findall(r'href="#(.*?)"', page)}
    assert targets
    assert targets <= {*ids}


def test_a_map_has_its_distances_on_the_page_and_no_rotary_pairs(tmp_path):
    results = [reading(name, [1.0] * 3, method=name) for name in ("self-extend", "yarn")]
    page = write_report(results, tmp_path / "both.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 + 1 + 1
    assert page.count("<image ") == 3 + 1  # the baseline and two methods; their colours
    assert "The distance at which every query reads every key" in page
    assert "<summary>yarn</summary>" in page
    assert "<summary>self-extend</summary>" not in page
    page = write_report(results[:1], tmp_path / "one.html").read_text(encoding="utf-8")
    assert "rotary pairs" not in page


def test_whatever_is_named_by_others_is_escaped(tmp_path):
    model = model_record(EVIL)
    results = [
        reading(EVIL, [1.0] * 3, method="yarn", model=model, text=EVIL),
        asking(EVIL, [1, 2, 3], method="yarn", model=model, text=EVIL),
        scoring(EVIL, {(EVIL, EVIL): 0.5}),
    ]
    page = write_report(results, tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.lower().count("<script") == 1
    assert EVIL not in page
    assert f"<title>{escape(EVIL)}" in page
    assert plain(page).count(EVIL.removeprefix("<script>")[:10]) > 5


def test_labels_that_no_file_can_hold_are_replaced(tmp_path):
    file = write_report([reading("a\ud800b", [1.0] * 3), reading("日本\x07", [1.0] * 3)], tmp_path / "r.html")
    assert "日本" in file.read_text(encoding="utf-8")


def test_the_same_results_are_the_same_file(page, tmp_path):
    again = write_report(RESULTS, tmp_path / "again.html")
    assert again.read_text(encoding="utf-8") == page


def test_nothing_is_overwritten_and_what_cannot_be_written_is_an_error_of_one_line(tmp_path):
    scores, taken = [scoring("baseline", {("a", "b"): 0.5})], tmp_path / "r.html"
    taken.write_text("mine")
    for results, file, words in (
        (scores, taken, "already exists"),
        ([], tmp_path / "new.html", "no results to report"),
        (scores, tmp_path / "nowhere" / "r.html", "cannot write .*No such file or directory"),
    ):
        with pytest.raises(RopepatchError, match=words):
            write_report(results, file)
    assert taken.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [taken]


def test_a_report_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RopepatchError, match="No space left"):
        write_report([scoring("baseline", {("a", "b"): 0.5})], tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


# In a browser

PROBE = """() => {
const findings = {};
const rows = (table) => [...table.tBodies[0].rows];
const column = (table, number) => rows(table).map((row) => row.cells[number].firstChild.textContent);
const colour = (element, name) => getComputedStyle(element)[name];
const [summary] = document.querySelectorAll("table");
const scores = [...document.querySelectorAll("table")].at(-1);
const press = (table, number) => {
  const head = table.tHead.rows[0].cells[number], button = head.querySelector("button");
  button.focus();
  button.click();
  return {order: column(table, 0), values: column(table, number), sort: head.ariaSort,
          focused: document.activeElement === button,
          sorted: table.querySelectorAll("[aria-sort]").length};
};
findings.width = innerWidth;
findings.scrolls = document.documentElement.scrollWidth;
findings.unsorted = column(summary, 0);
findings.nats = press(summary, 1);
findings.natsAgain = press(summary, 1);
findings.methods = press(summary, 0);
findings.effective = press(summary, 4);
findings.score = press(scores, 4);
findings.scoreAgain = press(scores, 4);
findings.title = document.title;
document.querySelectorAll("details").forEach((part) => (part.open = true));
findings.figures = [...document.querySelectorAll("svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height, box.right];
});
findings.opened = document.documentElement.scrollWidth;
findings.paper = colour(document.body, "backgroundColor");
findings.ink = colour(document.body, "color");
findings.texts = [...new Set([...document.querySelectorAll("svg text")]
  .filter((text) => !text.closest("g[id*=patch]")).map((text) => colour(text, "fill")))];
const paths = [...document.querySelectorAll("svg path")];
findings.lines = [...new Set(paths.map((path) => colour(path, "stroke")))];
return findings;
}"""


class Visit(NamedTuple):
    """What a browser found on a page."""

    findings: dict[str, Any]
    console: list[str]


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Opens a page from the disk and probes it."""
    with chromium() as browser:

        def open_page(page: str, width: int = 1200, scheme: str = "light") -> Visit:
            file = tmp_path_factory.mktemp("visited") / "page.html"
            file.write_text(page, encoding="utf-8")
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            console: list[str] = []
            tab.on("console", lambda message: console.append(message.text))
            tab.on("pageerror", lambda error: console.append(str(error)))
            tab.goto(file.as_uri())
            return Visit(tab.evaluate(PROBE), console)

        yield open_page


@pytest.fixture(scope="module")
def wide(page, visit) -> Visit:
    return visit(page)


@pytest.fixture(scope="module")
def narrow(page, visit) -> Visit:
    return visit(page, 390, "dark")


def test_it_opens_from_the_disk_without_an_error(wide, narrow):
    for seen in (wide, narrow):
        assert seen.console == []
        assert seen.findings["title"] == "tiny to 1k tokens"


def test_a_click_on_a_head_sorts_by_number_and_another_reverses_it(wide):
    found = wide.findings
    assert found["unsorted"] == ["baseline", "linear", "yarn"]
    assert found["nats"]["order"] == ["yarn", "linear", "baseline"]
    assert found["nats"]["values"] == ["0.550", "2.750", "12.000"]
    assert found["nats"]["sort"] == "ascending"
    assert found["natsAgain"]["order"] == ["baseline", "linear", "yarn"]
    assert found["natsAgain"]["sort"] == "descending"
    assert found["methods"]["order"] == ["baseline", "linear", "yarn"]
    assert found["effective"]["values"] == ["none", "256", "512"]
    for press in ("score", "scoreAgain"):  # what is missing comes last in both directions
        assert found[press]["values"] == ["0.4", "–"]
    for press in ("nats", "natsAgain", "methods", "effective", "score"):
        assert (found[press]["sorted"], found[press]["focused"]) == (1, True)


def test_every_figure_shrinks_to_the_window_and_none_is_cut(wide, narrow):
    for seen, least in ((wide, 500), (narrow, 300)):
        assert len(seen.findings["figures"]) == 7
        for width, height, right in seen.findings["figures"]:
            assert width >= least
            assert height >= least / 4
            assert right <= seen.findings["width"]

"""A report says what was measured, in one file that opens anywhere."""

import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_results import adapted, asking, model_record, reading, scoring
from markupsafe import escape

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import comparisons
from ropepatch.evaluation.ranking import rank
from ropepatch.evaluation.tasks.losses import perplexity_text
from ropepatch.report import write_report
from ropepatch.report.plots.style import COLOURS, FAINT, GRID, INK, PLAIN, QUIET
from ropepatch.report.words import origin as origin_of
from ropepatch.report.words import outcome

EVIL = '<script>document.title = "taken"</script>&"\'$x'

RESULTS = [
    reading("floor", [0.4, 0.39, 0.38]),
    reading("as it is", [0.6, 2.0, 12.0], gain=[-0.5, -6.0], documents=True),
    reading("linear", [0.9, 0.8, 2.75], method="linear", gain=[0.1, 0.2], documents=True),
    reading("yarn", [0.65, 0.6, 0.55], method="yarn", gain=[0.2, 0.3], documents=True),
    asking("as it is", [4, 0, 0]),
    asking("linear", [2, 2, 1], method="linear"),
    asking("yarn", [4, 4, 3], method="yarn"),
    scoring("as it is", {("long_task", "acc"): 0.1, ("short_task", "acc"): 0.5}),
    scoring("yarn", {("long_task", "acc"): 0.4}, method="yarn"),
]


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


@pytest.fixture(scope="module")
def tables(page) -> dict[str, list[list[str]]]:
    return tables_of(page)


# What it says of an extension, before and after its training

EXTENSION = [
    reading("floor", [0.4, 0.39, 0.38], documents=True),
    reading("as it is", [0.6, 2.0, 12.0], documents=True),
    reading("yarn", [0.65, 0.6, 0.55], method="yarn", documents=True),
    adapted(reading("yarn + mine", [0.61, 0.5, 0.45], method="yarn", documents=True)),
    asking("as it is", [4, 0, 0]),
    asking("yarn", [4, 4, 1], method="yarn"),
    adapted(asking("yarn + mine", [4, 4, 3], method="yarn")),
]


def test_training_free_and_trained_are_told_apart_and_named_before_and_after():
    begin, sentences, _ = outcome(comparisons(EXTENSION))
    assert begin == (
        "tiny was trained on 256 tokens. Measured here: 1 scaling of its rope to 1,024 tokens, "
        "training-free: yarn; trained for 1,024 tokens: yarn + mine."
    )
    assert sentences == (
        "Over 1,024 tokens of books, yarn + mine reads best: 0.450 nats per token (95 % interval 0.350 to "
        "0.550), a perplexity of 1.568; the model as it is, 12.000, a perplexity of 1.6e5; yarn, 0.550, a "
        "perplexity of 1.733. By its training yarn + mine gains +0.100 nats per token over yarn (95 % "
        "interval +0.100 to +0.100). No model can be below 0.380. Of the passkeys at 1,024 tokens, yarn + "
        "mine finds 9 of 12 (95 % interval 47% to 91%), the model as it is finds 0 of 12 (95 % interval 0% "
        "to 24%) and yarn finds 3 of 12 (95 % interval 9% to 53%)."
    )


def of_documents(result, nats):
    documents = [{"nats": 100 * n, "tokens": 100} for n in nats]
    return replace(result, tables={**result.tables, "by_document": documents})


@pytest.mark.parametrize(
    ("nats", "words"),
    [
        ([0.5, 0.6, 0.65], r"\+0.017 nats per token over yarn \(.* to \+0.\d+\), which may be nothing\."),
        ([0.7, 0.6, 0.55], r"-0.017 nats per token over yarn \(.* to \+0.\d+\), which may be nothing\."),
        ([0.7, 0.7, 0.7], r"-0.100 nats per token over yarn \(.* -0.100 to -0.100\): it does harm\."),
        ([0.5, 0.5, 0.5], r"\+0.100 nats per token over yarn \(.* \+0.100 to \+0.100\)\."),
    ],
)
def test_what_the_training_brought_is_said_with_its_doubt(nats, words):
    before = of_documents(reading("yarn", [0.6] * 3, method="yarn"), [0.6] * 3)
    after = of_documents(adapted(reading("yarn + mine", [0.6] * 3, method="yarn")), nats)
    sentences = outcome(comparisons([before, after]))[1]
    assert re.search(f"By its training yarn \\+ mine gains {words}", sentences)


def test_a_scaling_that_was_read_from_a_file_is_the_same():
    made, read = (
        reading("yarn", [0.6] * 3, method="yarn", documents=True).scaling
        | {"parameters": {"factors": numbers}}
        for numbers in ((1.0, 2.0), [1.0, 2.0])
    )
    before, after = (reading(name, [0.6] * 3, documents=True) for name in ("yarn", "yarn + mine"))
    results = [replace(before, scaling=read), adapted(replace(after, scaling=made))]
    assert "over yarn" in outcome(comparisons(results))[1]


BEFORE = reading("yarn", [0.6] * 3, method="yarn", documents=True)
AFTER = adapted(reading("yarn + mine", [0.5] * 3, method="yarn", documents=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (of_documents(BEFORE, [0.6]), of_documents(AFTER, [0.5])),
        (BEFORE, adapted(reading("yarn + mine", [0.5] * 3, method="yarn"))),
        (reading("yarn", [0.6] * 3, method="yarn"), AFTER),
        (reading("ntk", [0.6] * 3, method="ntk", documents=True), AFTER),
        (replace(BEFORE, model=model_record() | {"weights": "else"}), AFTER),
        (reading("as it is", [0.6] * 3, documents=True), AFTER),
    ],
    ids=["one document", "none after", "none before", "another scaling", "other weights", "no scaling"],
)
def test_without_documents_of_the_same_scaling_of_the_same_weights_nothing_is_said_of_the_training(
    before, after
):
    assert "By its training" in outcome(comparisons([BEFORE, AFTER]))[1]
    assert "By its training" not in " ".join(outcome(comparisons([before, after])))


# What it says


def test_the_page_says_which_method_reads_best_and_gives_the_advice_of_the_ranking(page):
    begin, sentences, advice = outcome(comparisons(RESULTS))
    assert begin.endswith("Measured here: 2 scalings of its rope to 1,024 tokens: linear and yarn.")
    assert "yarn reads best: 0.550 nats per token (95 % interval 0.450 to 0.650)" in sentences
    results = [result for result in RESULTS if result.task != "lm-eval" and result.label != "floor"]
    assert advice == " ".join(rank(results, base="as it is").advice)
    for paragraph in (begin, sentences, advice):
        assert paragraph in plain(page)


def test_the_box_says_what_to_take_and_what_it_brings_and_costs(page, tmp_path):
    box = plain(re.search(r'<dl class="verdict">.*?</dl>', page, re.DOTALL)[0])
    assert box == (
        "Take yarn Loss over 1,024 tokens 0.595, -11.450 nats against as it is "
        "Short-context cost, 256 tokens +0.050 nats Found at 1,024 tokens 75% of 12 questions"
    )
    nothing = [reading("as it is", [0.6, 0.5, 0.4], documents=True)]
    nothing.append(reading("yarn", [0.7, 0.6, 0.5], method="yarn", documents=True))
    assert "verdict" not in write_report(nothing, tmp_path / "r.html").read_text().partition("</style>")[2]


def test_below_the_title_stands_where_it_all_comes_from(tmp_path):
    page = write_report(RESULTS, tmp_path / "r.html", command="ropepatch eval x --text <b>").read_text()
    origin = plain(re.search(r'<p class="origin">.*?</p>', page, re.DOTALL)[0])
    assert re.search(r"cpu.* · books.* · \d{4}-\d\d-\d\d · ropepatch eval x --text <b>$", origin), origin
    assert "<b>" not in page
    measured = RESULTS[-1]
    assert origin_of([replace(measured, label="floor", env={}), measured]) == origin_of([measured])


def test_results_without_documents_are_reported_without_advice():
    results = [reading("as it is", [0.6, 2.0, 9.0]), reading("yarn", [0.65, 0.6, 0.55], method="yarn")]
    paragraphs = outcome(comparisons(results))
    assert len(paragraphs) == 2
    assert "yarn reads best: 0.550" in paragraphs[1]


def test_a_model_alone_is_not_called_the_best():
    paragraphs = outcome(comparisons([reading("as it is", [0.6, 0.5, 0.4], width=None)]))
    assert paragraphs == [
        "tiny was trained on 256 tokens. Measured here: the model as it is, to 1,024 tokens.",
        "Over 1,024 tokens of books, it loses 0.400 nats per token, a perplexity of 1.492.",
    ]


def test_the_summary_has_a_row_for_every_method(tables):
    rows = tables["The outcome at the target"]
    assert rows[0] == ["Method", "Nats per token", "Perplexity", "Passkeys", "Effective length"]
    assert rows[1:] == [
        ["as it is", "12.000 11.900 to 12.100", "1.6e5 1.5e5 to 1.8e5", "0/12 0% to 24%", "256"],
        ["linear", "2.750 2.650 to 2.850", "15.64 14.15 to 17.29", "3/12 9% to 53%", "none"],
        ["yarn", "0.550 0.450 to 0.650", "1.733 1.568 to 1.916", "9/12 47% to 91%", "512"],
    ]


def test_the_best_of_a_column_is_marked_and_the_floor_is_not(page):
    marked = [plain(cell) for cell in re.findall(r'<td class="best".*?</td>', page, re.DOTALL)]
    assert marked[:3] == ["0.550 0.450 to 0.650", "1.733 1.568 to 1.916", "9/12 47% to 91%"]
    assert "0.600 0.500 to 0.700" in marked
    assert not any(cell.startswith("0.38") for cell in marked)


def test_how_it_was_measured_and_everything_that_stands_behind_a_result_is_in_the_file(page):
    text = plain(page)
    assert "10 pieces of books, 10,240 tokens in all. Each piece is read once" in text
    assert "4 keys per length and depth (0%, 50%, 100%), seed 0." in text
    lines = ["model weights sha256:0123", "scaling factor 4.0", '"beta_fast": 32.0', "digest f00d"]
    for line in (*lines, "torch 2.8.0", "seconds 1.5", "tokens read 1000", "documents read 10"):
        assert line in text, line
    assert len(re.findall(r"<summary>tiny, ", page)) == len(RESULTS)


def test_models_targets_and_protocols_stand_apart(tmp_path):
    results = [
        reading("yarn", [1.0] * 3, method="yarn"),
        reading(
            "yarn", [2.0] * 3, method="yarn", digest="beef", protocol="sliding", bos="window", stride=128
        ),
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
    assert "Nats per token sliding, bos window, stride 128" in rows[0]
    assert [row[3][:5] for row in rows[1:]] == ["1.000", "–", "–"]
    titles = [plain(title) for title in re.findall(r"<h2>.*?</h2>", page)]
    assert titles == ["tiny to 1k", "tiny to 512", "other to 1k", "Provenance"]
    text = plain(page)
    assert "Perplexity: sliding, bos window, stride 128" in text
    assert "128 tokens at a time" in text
    assert "before each window" in text


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


def test_figures_are_drawn_with_text_in_the_colours_of_the_page(page):
    assert page.count("<svg") == 4 + 1 + 2 * 2  # four of measurements, all distances, two of each scaling
    style = page[: page.index("</style>")]
    for colour in (*COLOURS, INK, QUIET, FAINT, GRID, PLAIN):
        assert re.search(rf"--[a-z0-9-]+: {colour};", style), colour
        assert not re.search(rf"(fill|stroke): {colour}", page)
    for name in set(re.findall(r"var\((--[a-z0-9-]+)", page)):
        assert f"{name}: #" in style
    assert re.search(r"<text[^>]*>yarn</text>", page)


def test_a_map_has_its_distances_on_the_page_and_no_rotary_pairs(tmp_path):
    results = [reading(name, [1.0] * 3, method=name) for name in ("self-extend", "yarn")]
    page = write_report(results, tmp_path / "both.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 + 1 + 2
    assert page.count("<image ") == 3 + 1  # as it is and two methods; their colours
    assert "The distance at which every query reads every key" in page
    assert "<summary>yarn</summary>" in page
    assert "<summary>self-extend</summary>" not in page
    page = write_report(results[:1], tmp_path / "one.html").read_text(encoding="utf-8")
    assert "rotary pairs" not in page


def test_whatever_is_named_by_others_is_escaped(tmp_path):
    model = model_record(EVIL)
    results = [
        reading(EVIL, [1.0] * 3, method="yarn", model=model, text=EVIL),
        asking(EVIL, [1, 2, 3], method="yarn", model=model, template=EVIL),
        scoring(EVIL, {(EVIL, EVIL): 0.5}),
    ]
    page = write_report(results, tmp_path / "r.html", title=EVIL).read_text(encoding="utf-8")
    assert page.lower().count("<script") == 1
    assert EVIL not in page
    assert f"<title>{escape(EVIL)}</title>" in page
    assert plain(page).count(EVIL.removeprefix("<script>")[:10]) > 5


def test_labels_that_no_file_can_hold_are_mended(tmp_path):
    file = write_report([reading("a\ud800b", [1.0] * 3), reading("日本\x07", [1.0] * 3)], tmp_path / "r.html")
    assert "日本" in file.read_text(encoding="utf-8")


def test_the_same_results_are_the_same_file(page, tmp_path):
    again = write_report(RESULTS, tmp_path / "again.html")
    assert again.read_text(encoding="utf-8") == page


def test_nothing_is_overwritten_and_what_cannot_be_written_is_an_error_of_one_line(tmp_path):
    scores, taken = [scoring("as it is", {("a", "b"): 0.5})], tmp_path / "r.html"
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
        write_report([scoring("as it is", {("a", "b"): 0.5})], tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


# In a browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    *("--virtual-time-budget=2000", "--dump-dom"),
]

PROBE = """
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
findings.score = press(scores, 3);
findings.scoreAgain = press(scores, 3);
findings.title = document.title;
document.querySelectorAll("details").forEach((part) => (part.open = true));
findings.figures = [...document.querySelectorAll("svg")].map((svg) => {
  const box = svg.getBoundingClientRect(), scroll = svg.parentElement;
  return [box.width, box.height, scroll.getBoundingClientRect().right];
});
findings.opened = document.documentElement.scrollWidth;
findings.paper = colour(document.body, "backgroundColor");
findings.ink = colour(document.body, "color");
findings.texts = [...new Set([...document.querySelectorAll("svg text")]
  .filter((text) => !text.closest("g[id*=patch]")).map((text) => colour(text, "fill")))];
const paths = [...document.querySelectorAll("svg path")];
findings.lines = [...new Set(paths.map((path) => colour(path, "stroke")))];
parent.postMessage(JSON.stringify(findings), "*");
"""
FRAME = """<!doctype html><html style="color-scheme: light dark"><body>
<iframe src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe>
<pre id="findings"></pre>
<script>addEventListener("message", (event) => (findings.textContent = event.data));</script>
</body></html>"""  # the window of a browser is at least 500 wide, a frame as narrow as one likes


class Visit(NamedTuple):
    """What a browser found on a page."""

    findings: dict[str, Any]
    console: list[str]


def visit(page: str, folder: Path, *, width: int = 1200, dark: bool = False) -> Visit:
    """Open a copy of the page from the disk, with the probe at its end, in a frame of that width."""
    if BROWSER is None:
        pytest.skip("no browser found: chromium, chromium-browser, google-chrome or chrome")
    folder.mkdir()
    probed = page.replace("</body>", f"<script>{PROBE}</script></body>")
    (folder / "page.html").write_text(probed, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    options = [
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1300,1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    command = [BROWSER, *FLAGS, *options, (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="findings">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the probe did not end: {console}\n{done.stderr[-2000:]}"
    return Visit(json.loads(html.unescape(found[1])), console)


@pytest.fixture(scope="module")
def wide(page, tmp_path_factory) -> Visit:
    return visit(page, tmp_path_factory.mktemp("wide") / "it")


@pytest.fixture(scope="module")
def narrow(page, tmp_path_factory) -> Visit:
    return visit(page, tmp_path_factory.mktemp("narrow") / "it", width=375, dark=True)


def test_it_opens_from_the_disk_without_an_error(wide, narrow):
    for seen in (wide, narrow):
        assert seen.console == []
        assert seen.findings["title"] == "tiny to 1k tokens"


def test_whatever_it_asked_of_the_network_would_be_refused_and_seen(page, tmp_path):
    image = '<img src="https://nowhere.invalid/missing.png">'
    (line,) = visit(page.replace("</main>", f"{image}</main>"), tmp_path / "it").console
    assert "https://nowhere.invalid/missing.png" in line
    assert "Content Security Policy" in line


def test_a_click_on_a_head_sorts_by_number_and_another_turns_it_round(wide):
    found = wide.findings
    assert found["unsorted"] == ["as it is", "linear", "yarn"]
    assert found["nats"]["order"] == ["yarn", "linear", "as it is"]
    assert found["nats"]["values"] == ["0.550", "2.750", "12.000"]
    assert found["nats"]["sort"] == "ascending"
    assert found["natsAgain"]["order"] == ["as it is", "linear", "yarn"]
    assert found["natsAgain"]["sort"] == "descending"
    assert found["methods"]["order"] == ["as it is", "linear", "yarn"]
    assert found["effective"]["values"] == ["none", "256", "512"]
    for press in ("score", "scoreAgain"):  # what is missing comes last in both directions
        assert found[press]["values"] == ["0.4", "–"]
    for press in ("nats", "natsAgain", "methods", "effective", "score"):
        assert (found[press]["sorted"], found[press]["focused"]) == (1, True)


def test_a_narrow_window_scrolls_tables_not_the_page(narrow):
    assert narrow.findings["width"] == 375
    assert narrow.findings["scrolls"] <= 375
    assert narrow.findings["opened"] <= 375


def test_every_figure_has_a_size_and_stays_in_its_box(wide, narrow):
    for seen, least in ((wide, 500), (narrow, 300)):
        assert len(seen.findings["figures"]) == 9
        for width, height, right in seen.findings["figures"]:
            assert width >= least
            assert height >= least / 4
            assert right <= seen.findings["width"]


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_dark_mode_turns_paper_and_figures_dark_and_light(wide, narrow):
    assert luminance(wide.findings["paper"]) > 0.9
    assert luminance(narrow.findings["paper"]) < 0.02
    assert luminance(narrow.findings["ink"]) > 0.5
    assert not set(wide.findings["texts"]) & set(narrow.findings["texts"]) - {"rgb(255, 255, 255)"}
    assert not set(wide.findings["lines"]) & set(narrow.findings["lines"]) - {"none"}


def test_the_text_of_figures_can_be_read_in_light_and_dark(wide, narrow):
    for seen in (wide, narrow):
        texts = set(seen.findings["texts"]) - {"rgb(255, 255, 255)"}  # white stands on cells of the map
        assert texts
        for colour in texts:
            assert contrast(colour, seen.findings["paper"]) >= 4.5, colour

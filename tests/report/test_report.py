"""A report says what was measured, in one file that opens anywhere."""

import html
import re
from pathlib import Path

import numpy as np
import pytest
from browser import chromium
from made_results import asking, model_record, reading, scoring
from markupsafe import escape

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.ranking import rank
from ropepatch.report.page import write_report
from ropepatch.report.tables import ranking_text, results_text
from ropepatch.report.verdict import ranking_lines

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


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_report(RESULTS, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def page(file) -> str:
    return file.read_text(encoding="utf-8")


def plain(page: str) -> str:
    """The text of a page, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


# The verdict


def recommendation(*results):
    return ranking_lines(rank(results, base="baseline"))


@pytest.mark.parametrize(("apart", "named"), [(0.01, True), (1.0, False)])
def test_a_significant_cost_within_the_original_length_is_named(apart, named):
    base = np.linspace(0.4, 0.6, 10)
    costly = base + 0.1 + apart * np.tile([1.0, -1.0], 5)
    losses = (
        reading("baseline", [list(base), 3.0, 3.0]),
        reading("a", [list(costly), 1.0, 1.0]),
    )
    lines = recommendation(*losses)
    assert lines[0].startswith(
        "Use a. Gain at 1,024 tokens, in nats/token (95 %): loss +2.000 (+1.800 to "
    )
    cost = "It is significantly worse within the original length of 256 tokens: loss +0.100 (+0.09"
    assert [line.startswith(cost) for line in lines if "worse" in line] == [
        True
    ] * named


def test_the_advice_for_a_remapping_names_a_method_for_other_engines():
    losses = {"lambda": 1.0, "rerope": 1.1, "yarn": 1.2}
    readings = [
        reading(method, [0.5, nats, nats], method=method)
        for method, nats in losses.items()
    ]
    assert recommendation(reading("baseline", [0.5, 9.0, 9.0]), *readings)[1:] == [
        "Only transformers runs rerope, with code from the checkpoint.",
        "The best method for other engines is yarn.",
        "Do not use lambda, a control that ignores distant tokens.",
    ]


def test_a_low_accuracy_and_a_method_with_a_higher_one_are_named():
    labels = {"baseline": 0, "a": 6, "b": 12}
    losses = [
        reading(label, [0.5, 9.0 - found / 100, 9.0]) for label, found in labels.items()
    ]
    answers = [
        asking(label, [12, 12, found], n=12, log_prob=[-0.1, -0.1, log_prob])
        for (label, found), log_prob in zip(
            labels.items(), (-9.0, -1.0, -1.1), strict=True
        )
    ]
    lines = recommendation(*losses, *answers)
    assert any(
        line.startswith("b has a higher passkey accuracy, by 50% (95 % interval ")
        for line in lines
    )
    assert (
        lines[-1] == "Its passkey accuracy is 50%. Train it, or use a shorter target."
    )


# What it says


def box(page: str) -> list[str]:
    """The lines of the verdicts at its head."""
    found = re.findall(r'<div class="verdict">(.*?)</div>', page, re.DOTALL)
    return [plain(line) for part in found for line in re.findall(r"<p>(.*?)</p>", part)]


def test_the_verdict_of_the_ranking_is_stated_once_at_the_head(page, tmp_path):
    lines = recommendation(*RESULTS[:-2])
    assert box(page) == lines
    assert [plain(page).count(line) for line in lines] == [1] * len(lines)
    assert "tiny was trained on 256 tokens." in plain(page)
    nothing = [
        reading("baseline", [0.4] * 3),
        reading("yarn", [0.5] * 3, method="yarn"),
    ]
    (line,) = box(write_report(nothing, tmp_path / "r.html").read_text())
    assert line.startswith("Do not extend")


@pytest.mark.parametrize("few", [True, False])
def test_every_warning_of_the_terminal_is_in_the_report_before_the_verdict(
    few, tmp_path
):
    documents, haystacks = (4, 2) if few else (10, 10)
    losses = [[0.01 * (-1) ** number for number in range(documents)]] * 3
    results = [
        reading("baseline", [[2 + more for more in row] for row in losses]),
        reading("yarn", losses, method="yarn"),
        asking("baseline", [haystacks, 0, 0], n=haystacks),
        asking("yarn", [haystacks] * 3, n=haystacks, method="yarn"),
    ]
    expected = ["documents: 4", "prompts: 2"] * few
    ranking = ranking_text(rank(results, base="baseline"), results)
    text = f"{results_text(results)}\n{ranking}"
    printed = re.findall(r"^Warning: .*$", text, re.MULTILINE)
    assert [
        line.removeprefix("Warning: ").split(";")[0] for line in printed
    ] == expected * 2
    lines = box(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert lines[: len(expected)] == list(dict.fromkeys(printed))
    assert len(lines) > len(expected)
    assert not any(line.startswith("Warning") for line in lines[len(expected) :])


def test_how_it_was_measured_and_everything_that_stands_behind_a_result_is_in_the_file(
    page,
):
    text = plain(page)
    assert (
        "10 pieces of books, 10,240 tokens in total. One pass over each piece" in text
    )
    assert "4 prompts of the built-in filler, seed 0" in text
    lines = [
        '"weights": "sha256:0123"',
        '"factor": 4.0',
        '"beta_fast": 32.0',
        '"digest": "f00d"',
    ]
    for line in (
        *lines,
        '"torch": "2.8.0"',
        '"seconds": 1.5',
    ):
        assert line in text, line
    assert len(re.findall(r"<summary>tiny, ", page)) == len(RESULTS)


def test_models_targets_and_protocols_stand_apart(tmp_path):
    sliding = {"digest": "beef", "bos": "document", "stride": 128}
    results = [
        reading("yarn", [1.0] * 3, method="yarn"),
        reading("yarn", [2.0] * 3, method="yarn", **sliding),
        reading("yarn", [3.0] * 2, method="yarn", lengths=[256, 512]),
        reading("yarn", [4.0] * 3, method="yarn", model=model_record("other")),
    ]
    page = write_report(
        results, tmp_path / "r.html", command="ropepatch eval ~/x '<b>'"
    ).read_text("utf-8")
    assert plain(re.search(r'<p class="origin">.*?</p>', page, re.DOTALL)[0]).endswith(
        " · ropepatch eval x '<b>'"
    )
    titles = [plain(title) for title in re.findall(r"<h2>.*?</h2>", page)]
    assert titles == [
        "tiny to 1k tokens",
        "tiny to 512 tokens",
        "other to 1k tokens",
        "Provenance",
    ]
    assert "128 tokens at a time" in plain(page)


# The file


def test_the_file_needs_nothing_else(page):
    assert "http" not in page.replace("http-equiv", "")
    drawn = re.sub(r'src="data:image/svg\+xml;base64,[\w+/=]+"', "", page)
    assert not re.search(r'\b(src|href|srcset|action|data)="[^#]', drawn)
    assert not {*re.findall(r"<(\w+)", page)} & {
        "link",
        "iframe",
        "object",
        "embed",
        "base",
    }
    assert "@import" not in page
    assert "default-src 'none'" in page


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_from_outside_are_escaped(tmp_path):
    model = model_record(EVIL)
    results = [
        reading(EVIL, [1.0] * 3, method="yarn", model=model, text=EVIL),
        asking(EVIL, [1, 2, 3], method="yarn", model=model, text=EVIL),
        scoring(EVIL, {(EVIL, EVIL): 0.5}),
        reading("a\ud800b 日本\x07", [1.0] * 3, model=model),  # which no file can hold
    ]
    page = write_report(results, tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.lower().count("<script") == 1
    assert EVIL not in page
    assert f"<title>{escape(EVIL)}" in page
    assert "日本" in page


def test_nothing_is_overwritten_and_what_cannot_be_written_is_an_error_of_one_line(
    tmp_path,
):
    scores, taken = [scoring("baseline", {("a", "b"): 0.5})], tmp_path / "r.html"
    taken.write_text("mine")
    for results, file, words in (
        (scores, taken, "already exists"),
        ([], tmp_path / "new.html", "no results to report"),
        (
            scores,
            tmp_path / "nowhere" / "r.html",
            "cannot write .*No such file or directory",
        ),
    ):
        with pytest.raises(RopepatchError, match=words):
            write_report(results, file)
    assert taken.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [taken]


# In a browser

PROBE = """() => {
const findings = {};
const rows = (table) => [...table.tBodies[0].rows];
const column = (table, number) => rows(table).map((row) => row.cells[number].firstChild.textContent);
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
findings.unsorted = column(summary, 0);
findings.nats = press(summary, 3);
findings.natsAgain = press(summary, 3);
findings.score = press(scores, 4);
findings.title = document.title;
document.querySelectorAll("details").forEach((part) => (part.open = true));
findings.figures = [...document.querySelectorAll("figure img")].map((image) => {
  const box = image.getBoundingClientRect();
  return [box.width, box.height, box.right];
});
return findings;
}"""


@pytest.fixture(scope="module")
def visits(page, tmp_path_factory):
    """What a browser found on the page, and what it logged, on a wide screen and on a narrow dark one."""
    file = tmp_path_factory.mktemp("visited") / "page.html"
    file.write_text(page, encoding="utf-8")
    found = []
    with chromium() as browser:
        for width, scheme in ((1200, "light"), (390, "dark")):
            tab = browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            console: list[str] = []
            tab.on(
                "console", lambda message, console=console: console.append(message.text)
            )
            tab.on(
                "pageerror", lambda error, console=console: console.append(str(error))
            )
            tab.goto(file.as_uri())
            found.append((tab.evaluate(PROBE), console))
    return found


def test_it_opens_from_the_disk_without_an_error_and_every_figure_fits_the_window(
    visits,
):
    for (found, console), least in zip(visits, (500, 300), strict=True):
        assert console == []
        assert found["title"] == "tiny to 1k tokens"
        assert len(found["figures"]) == 4
        for width, height, right in found["figures"]:
            assert width >= least
            assert height >= least / 4
            assert right <= found["width"]


def test_a_click_on_a_head_sorts_by_number_and_another_reverses_it(visits):
    (found, _), _ = visits
    assert found["unsorted"] == ["baseline", "linear", "yarn", "floor"]
    assert found["nats"]["order"] == ["floor", "yarn", "linear", "baseline"]
    assert found["nats"]["sort"] == "ascending"
    assert found["natsAgain"]["order"] == ["baseline", "linear", "yarn", "floor"]
    assert found["natsAgain"]["sort"] == "descending"
    assert found["score"]["values"] == ["0.4", "–"]  # what is missing comes last
    for press in ("nats", "natsAgain", "score"):
        assert (found[press]["sorted"], found[press]["focused"]) == (1, True)

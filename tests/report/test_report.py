"""A report says what was measured, in one file that opens anywhere."""

import html
import re

import numpy as np
import pytest
from browser import chromium
from made_results import asking, model_record, reading, scoring
from markupsafe import escape

from ropepatch.evaluation.ranking import rank
from ropepatch.report.page import write_report
from ropepatch.report.tables import ranking_lines, ranking_text, results_text

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
def file(tmp_path_factory):
    return write_report(RESULTS, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def page(file):
    return file.read_text(encoding="utf-8")


def plain(page):
    """The text of a page, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


# The verdict


def recommendation(*results):
    return ranking_lines(rank(results))


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
    cost = "It is significantly worse within the original length of 256 tokens: loss +0.1000 (+0.09"
    assert [line.startswith(cost) for line in lines if "worse" in line] == [
        True
    ] * named


def test_advice_for_a_remapping_names_one_for_other_engines():
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


def test_a_low_accuracy_and_a_higher_one_are_named():
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
        line.startswith("b has a higher passkey accuracy, by 50% (") for line in lines
    )
    assert (
        lines[-1]
        == "The passkey accuracy of a is 50% (27% to 73%). Train it, or use a shorter target."
    )


# What it says


def box(page):
    """The lines of the verdicts at its head."""
    found = re.findall(r'<div class="verdict">(.*?)</div>', page, re.DOTALL)
    return [plain(line) for part in found for line in re.findall(r"<p>(.*?)</p>", part)]


def test_the_verdict_is_stated_once_at_the_head(page, tmp_path):
    lines = recommendation(*RESULTS[:-2])
    assert box(page) == lines
    assert [plain(page).count(line) for line in lines] == [1] * len(lines)
    assert "tiny was trained on 256 tokens. 10 pieces of books, " in plain(page)
    assert '"weights": "sha256:0123"' in plain(page)
    assert len(re.findall(r"<summary>tiny, ", page)) == len(RESULTS)
    nothing = [
        reading("baseline", [0.4] * 3),
        reading("yarn", [0.5] * 3, method="yarn"),
    ]
    (line,) = box(write_report(nothing, tmp_path / "r.html").read_text())
    assert line.startswith("Do not extend")


def test_every_warning_is_in_the_report_before_the_verdict(tmp_path):
    haystacks = 2
    losses = [[0.01 * (-1) ** number for number in range(4)]] * 3
    results = [
        reading("baseline", [[2 + more for more in row] for row in losses]),
        reading("yarn", losses, method="yarn"),
        asking("baseline", [haystacks, 0, 0], n=haystacks),
        asking("yarn", [haystacks] * 3, n=haystacks, method="yarn"),
    ]
    ranking = ranking_text(rank(results), results)
    text = f"{results_text(results)}\n{ranking}"
    printed = re.findall(r"^Warning: .*$", text, re.MULTILINE)
    begun = [line.split(";")[0] for line in printed]
    assert begun == ["Warning: documents: 4", "Warning: prompts: 2"] * 2
    lines = box(write_report(results, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert lines[:2] == printed[:2]
    assert not any(line.startswith("Warning") for line in lines[2:])


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
            console = []
            tab.on(
                "console", lambda message, console=console: console.append(message.text)
            )
            tab.on(
                "pageerror", lambda error, console=console: console.append(str(error))
            )
            tab.goto(file.as_uri())
            found.append((tab.evaluate(PROBE), console))
    return found


@pytest.mark.slow
def test_it_opens_from_the_disk_and_figures_fit(
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


@pytest.mark.slow
def test_a_click_on_a_head_sorts_by_number(visits):
    (found, _), _ = visits
    assert found["unsorted"] == ["baseline", "linear", "yarn", "floor"]
    assert found["nats"]["order"] == ["floor", "yarn", "linear", "baseline"]
    assert found["nats"]["sort"] == "ascending"
    assert found["natsAgain"]["order"] == ["baseline", "linear", "yarn", "floor"]
    assert found["natsAgain"]["sort"] == "descending"
    assert found["score"]["values"] == ["0.4", "–"]  # what is missing comes last
    for press in ("nats", "natsAgain", "score"):
        assert (found[press]["sorted"], found[press]["focused"]) == (1, True)

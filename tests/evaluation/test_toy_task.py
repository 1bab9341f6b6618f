"""A task is one class and one entry, a measure another: its rows are shown everywhere."""

from typing import ClassVar

import pytest
from made_results import reading, result_of

import ropepatch
import ropepatch.evaluation.tasks as tasks
from ropepatch.evaluation.comparisons import summary
from ropepatch.evaluation.measuring import measure
from ropepatch.evaluation.ranking import rank
from ropepatch.evaluation.results import MEASURES, Measure, Row
from ropepatch.evaluation.suites import Suite, read_suite
from ropepatch.extension.record import Record
from ropepatch.publishing.card.model import Extended
from ropepatch.publishing.card.writing import card_text
from ropepatch.report import print_results, results_tables, write_report


class Echo(tasks.Task):
    """Say again what was said.

    Args:
        words: How many.
    """

    name: ClassVar[str] = "echo"
    title: ClassVar[str] = "Echo"
    identity: ClassVar[tuple[str, ...]] = ("words",)
    words: int = 3

    def prepare(self, model, tokenizer, *, trained, to):
        """Nothing is needed."""
        rows = rows_of([trained, to], [self.words] * 2)
        return tasks.Measurement(self, {"words": self.words}, lambda model, tokenizer, keep, advance: rows)


def rows_of(lengths: list[int], words: list[float]) -> list[Row]:
    return [
        Row(measure="words", at={"length": length}, value=float(said), n=1)
        for length, said in zip(lengths, words, strict=True)
    ]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "echo", Echo)
    monkeypatch.setitem(MEASURES, "words", Measure("Words", "{:.1f}".format, 1))


@pytest.fixture
def results():
    """A baseline and a scaling."""

    def of(label, words, method=None):
        return result_of("echo", label, rows_of([256, 512, 1024], words), {"words": 3}, method=method)

    return [of("baseline", (3.0, 2.0, 0.0)), of("yarn", (3.0, 3.0, 2.5), "yarn")]


def test_a_suite_names_it_and_measures_it(tmp_path):
    file = tmp_path / "echo.yaml"
    file.write_text("to: [2x]\ntasks: [{task: echo, words: 5}]")
    suite = read_suite(str(file))
    assert suite.tasks == (Echo(words=5),)
    (result,) = measure(Suite(models=("tiny",), to=suite.to, tasks=suite.tasks))
    assert (result.task, result.parameters) == ("echo", {"words": 5})
    assert [row.value for row in result.of("words", "length")] == [5.0, 5.0]


def test_it_has_a_table_in_the_terminal(results, capsys):
    print_results(results)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["tiny,", "trained", "on", "256", "tokens:", "Echo"],
        ["baseline", "yarn"],
        ["Words"],
        ["256", "tokens", "3.0", "3.0"],
        ["512", "tokens", "2.0", "3.0"],
        ["1,024", "tokens", "0.0", "2.5"],
    ]


def test_it_has_tables_in_the_report(results, tmp_path):
    assert [table.caption for table in results_tables(results)] == ["The outcome at the target", "Words"]
    page = write_report(results, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h3>Echo</h3>" in page
    assert '<td class="best" data-value="2.5">2.5</td>' in page


def test_it_has_a_section_on_a_card(results):
    record = Record.of(ropepatch.plan("tiny", to=1024, method="yarn"))
    card = card_text(Extended("x", record, results, weights="sha256:0123"))
    assert "Words at 1,024 tokens: this checkpoint 2.5, the base model 0.0." in card
    section = card.partition("### Echo\n")[2].partition("###")[0]
    assert "| 1,024 tokens | 0.0 | 2.5 |" in section
    assert "- Words at 256 tokens: 3.0 before, 3.0 after." in card


def test_it_has_its_numbers_in_a_summary(results):
    (task,) = summary(results)["tasks"]
    assert task["words"] == 3
    assert [(row["length"], row["value"]) for row in task["results"]["yarn"]] == [(256, 3.0), (1024, 2.5)]


def test_a_ranking_does_without_it(results):
    losses = [
        reading("baseline", [0.6, 2.0, 12.0]),
        reading("yarn", [0.65, 0.6, 0.55], method="yarn"),
    ]
    assert rank([*losses, *results], base="baseline") == rank(losses, base="baseline")


def test_a_result_of_a_task_that_is_not_known_shows_its_rows_by_their_names(
    results, capsys, tmp_path, monkeypatch
):
    monkeypatch.delitem(tasks.TASKS, "echo")
    monkeypatch.delitem(MEASURES, "words")
    print_results(results)
    assert ["1,024", "tokens", "0", "2.5"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "<h3>echo</h3>" in write_report(results, tmp_path / "r.html").read_text(encoding="utf-8")

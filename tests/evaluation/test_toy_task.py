"""A task is one class and one entry, a measure another: its rows are shown everywhere."""

from dataclasses import dataclass
from typing import ClassVar

import ropepatch.evaluation.tasks as tasks
from ropepatch.evaluation.measuring import measure, read_suite
from ropepatch.evaluation.results import MEASURES, Measure, Row
from ropepatch.report.tables import results_text


class Echo(tasks.Task):
    """Say again what was said."""

    name: ClassVar[str] = "echo"
    words: int = 3

    def prepare(self, goal):
        return Said(
            task=self.name,
            parameters=self.model_dump(),
            lengths=[goal.trained, goal.to],
        )


@dataclass(frozen=True, kw_only=True)
class Said(tasks.Data):
    """Lengths, at which the model says as many words."""

    lengths: list[int]

    def measure(self, model, keep=None, advance=None):
        said = float(self.parameters["words"])
        return [
            Row(measure="words", at={"length": length}, value=said, n=1)
            for length in self.lengths
        ]


def test_a_task_of_ones_own_is_read_measured_and_printed(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(tasks.TASKS, "echo", Echo)
    monkeypatch.setitem(MEASURES, "words", Measure("Words", "{:.1f}".format, 1))
    (file := tmp_path / "echo.yaml").write_text(
        "models: [tiny]\nto: [2x]\ntasks: [{task: echo, words: 5}]"
    )
    (measured,) = measure(read_suite(str(file)))
    assert (measured.task, measured.parameters) == ("echo", {"words": 5})
    assert [row.value for row in measured.of("words", "length")] == [5.0, 5.0]
    text = " ".join(results_text([measured]).split())
    assert "Words Method 256 tokens 512 tokens baseline 5.0 5.0" in text

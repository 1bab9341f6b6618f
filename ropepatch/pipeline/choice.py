"""Choose a method for a model by measuring several on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import BASELINE
from ropepatch.evaluation.ranking import RULE, Ranking, rank
from ropepatch.evaluation.results import results_json
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.table import data_frame
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask, Task, check_text
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.pipeline.evaluation import WINDOWS, MeasureOptions, participants, without
from ropepatch.pipeline.inputs import Listed, Tokens, check_places
from ropepatch.pipeline.results import Results
from ropepatch.report import html_table, ranking_tables, ranking_text
from ropepatch.report.verdict import ranking_lines
from ropepatch.settings import relative_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True, repr=False)
class Choice:
    """The chosen method and the ranking; a notebook shows it as a table.

    Attributes:
        ranking: All methods, best first, with the reasons for the choice.
        method: A name from `METHODS` or `REMAPPINGS`, or a scaling file; None if nothing helps
            significantly.
        results: The measurements.
        left_out: The reason for each method that was left out, by name.
    """

    ranking: Ranking
    method: str | None
    results: Results
    left_out: dict[str, str]

    def to_json(self) -> str:
        """Rule, ranking and results as JSON."""
        results = [asdict(result) for result in self.results]
        return results_json({"rule": RULE, "ranking": self.ranking.record(), "results": results})

    def to_pandas(self) -> DataFrame:
        """The ranking as a pandas frame: a row for each method, the best first.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        return data_frame(row.columns() for row in self.ranking.rows)

    def plot(self, name: str | None = None) -> Figure:
        """A figure of the measurements; see `Results.plot`."""
        return self.results.plot(name)

    def __str__(self) -> str:
        return ranking_text(self.ranking, self.results)

    def __repr__(self) -> str:
        return f"Choice({self.method or 'none'} of {len(self.ranking.rows)})"

    def _repr_html_(self) -> str:
        verdict = "".join(f"<p>{escape(line)}</p>" for line in ranking_lines(self.ranking))
        return "".join(map(html_table, ranking_tables(self.ranking, self.results))) + verdict


class CompareOptions(MeasureOptions):
    """The arguments of one call of `compare`; None for those left out."""

    to: Tokens
    methods: Listed
    windows: int | None = None
    haystacks: int | None = None
    keys: int | None = None


def compare(options: CompareOptions) -> Choice:
    """Measure methods on a model without training, rank them, and choose one; see `rank`."""
    source, say = options.source, options.say
    check_text(options.text, source.name)
    check_places(options.out, options.report)
    target = relative_length(options.to, source.window)
    found = participants(source, options.methods, to=target)
    entrants, left_out = without(found, say), found[1]
    asking: dict[str, Any] = {
        "windows": WINDOWS if options.windows is None else options.windows,
        "haystacks": options.haystacks,
        "keys": options.keys,
    }
    suite, reason = ranking_suite(source, entrants, to=target, **options.reading, **asking)
    if reason is not None:
        left_out["retrieval"] = str(reason)
        say(f"warning: no retrieval: {reason}")
    results = options.measured(suite.narrowed(None, options.seed))
    ranking = rank(results, base=BASELINE)
    names_by_label = {method.label: method.name for method in suite.methods}
    best = names_by_label.get(ranking.recommended or "")
    return Choice(ranking=ranking, method=best, results=results, left_out=left_out)


def ranking_suite(
    source: Checkpoint,
    methods: Sequence[Method],
    *,
    to: int,
    haystacks: int | None = None,
    keys: int | None = None,
    **reading: Any,
) -> tuple[Suite, RopepatchError | None]:
    """The suite of a ranking: the loss over windows of the target length, and retrieval.

    Returns:
        The suite, and the reason why retrieval is left out, if the tokenizer cannot encode the keys or no
        length has room for them.
    """
    tasks: list[Task] = [PerplexityTask(**{"windows": WINDOWS} | reading)]
    reason = None
    if haystacks != 0:
        retrieval, tokenizer = RetrievalTask(haystacks=haystacks, keys=keys), source.complete().tokenizer
        try:
            retrieval.limited(1).prepare(source.name, tokenizer, trained=source.window, to=to)
            tasks.append(retrieval)
        except RopepatchError as error:
            reason = error
    return Suite(models=(source.name,), methods=tuple(methods), to=(to,), tasks=tuple(tasks)), reason

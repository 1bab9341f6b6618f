"""Choose a method for a model by measuring several on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import BASELINE
from ropepatch.evaluation.ranking import RULE, Ranking, rank
from ropepatch.evaluation.results import results_json
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.table import data_frame
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask, Task, check_text
from ropepatch.fitting import fitting
from ropepatch.fitting.fitting import Fitted
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.pipeline.evaluation import ALL, EVERY_REMAPPING, WINDOWS, MeasureOptions, participants, without
from ropepatch.pipeline.inputs import Listed, Tokens, check_places
from ropepatch.pipeline.results import Results
from ropepatch.report import html_table, ranking_tables, ranking_text
from ropepatch.report.verdict import Verdict
from ropepatch.scaling.file import FIT
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
        parameters: The parameters of that method that differ from their defaults; those of a position
            remapping follow from model and target.
        results: The measurements.
        fitted: The outcome of `fit`, chosen or not; None if `fit` was not among the methods.
        left_out: The reason for each method that was left out, by name.
    """

    ranking: Ranking
    method: str | None
    parameters: dict[str, Any]
    results: Results
    fitted: Fitted | None
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
        verdict = "".join(f"<p>{escape(line)}</p>" for line in Verdict.of(self.ranking).lines)
        return "".join(map(html_table, ranking_tables(self.ranking, self.results))) + verdict


class CompareOptions(MeasureOptions):
    """The arguments of one call of `compare` or `choose`; None for those left out."""

    to: Tokens
    methods: Listed | None = None
    allow_code: bool
    windows: int | None = None
    haystacks: int | None = None
    keys: int | None = None


def choose(options: CompareOptions) -> Choice:
    """Measure methods and a fit on a model without training, rank them, and choose one; see `rank`."""
    source, say = options.source, options.say
    check_text(options.text, source.name)
    folder, _ = check_places(options.out, options.report)
    everything = (ALL, *[EVERY_REMAPPING] * options.allow_code, FIT)
    names = dict.fromkeys(options.methods or everything)
    target = relative_length(options.to, source.window)
    found = participants(source, [method for method in names if method != FIT], to=target)
    entrants, left_out = without(found, say), found[1]
    asking: dict[str, Any] = {
        "windows": WINDOWS if options.windows is None else options.windows,
        "haystacks": options.haystacks,
        "keys": options.keys,
    }
    suite, reason = ranking_suite(source, entrants, to=target, **options.reading, **asking)
    suite = suite.narrowed(None, options.seed)
    if reason is not None:
        left_out["retrieval"] = str(reason)
        say(f"warning: no retrieval: {reason}")
    fitted = None
    with TemporaryDirectory(prefix="ropepatch-") as place:
        if FIT in names:
            try:
                fits = Path(place) if folder is None else folder / FIT
                method, fitted = fit_apart(suite, fits, options)
                suite = suite.model_copy(update={"methods": (*suite.methods, method)})
            except RopepatchError as error:
                if options.methods is not None:
                    raise
                left_out[FIT] = str(error)
                say(f"warning: without {FIT}: {error}")
        results = options.measured(suite)
    ranking = rank(results, base=BASELINE)
    names_by_label = {method.label: method.name for method in suite.methods}
    best, parameters = names_by_label.get(ranking.recommended or ""), dict[str, Any]()
    if fitted is not None and ranking.recommended == FIT:
        best, parameters = fitted.scaling.name, fitted.scaling.parameters()
    return Choice(
        ranking=ranking, method=best, parameters=parameters, results=results, fitted=fitted, left_out=left_out
    )


def fit_apart(suite: Suite, folder: Path, options: CompareOptions) -> tuple[Method, Fitted]:
    """Fit the model of a ranking on text that the ranking does not use.

    The folder gets `fit.json` and the state of the fit.
    """
    task, (to,) = suite.tasks[0], suite.to
    assert isinstance(task, PerplexityTask)
    assert task.windows is not None
    folder.mkdir(parents=True, exist_ok=True)
    fitted = fitting.fit(
        options.source,
        to=to,
        text=task.text,
        field=task.field,
        split=task.split,
        spare=task.windows,
        device=options.processes.device,
        work=folder / "work",
        progress=options.feedback.announced,
        say=options.say,
    )
    file = folder / f"{FIT}.json"

    def save() -> Path:
        file.unlink(missing_ok=True)  # from an earlier call
        return fitted.save(file)

    return Method(name=str(options.processes.write_once(save))), fitted


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

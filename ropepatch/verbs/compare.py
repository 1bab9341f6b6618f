"""`compare`: rank methods on a model by measuring them, and choose one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ropepatch.columns import data_frame
from ropepatch.errors import RopepatchError
from ropepatch.evaluation import measuring
from ropepatch.evaluation.measuring import Suite, participants
from ropepatch.evaluation.ranking import RULE, Ranking, rank
from ropepatch.evaluation.results import results_json
from ropepatch.evaluation.tasks import (
    Goal,
    PerplexityTask,
    RetrievalTask,
    Task,
    check_text,
)
from ropepatch.extension.planning import Plan
from ropepatch.progress import Progress, Say, bar, say_on_stderr
from ropepatch.report.tables import ranking_text
from ropepatch.settings import Length, listed, relative_length
from ropepatch.verbs.evaluate import (
    Results,
    check_places,
    find_checkpoint,
    read_results,
    reported,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True, repr=False)
class Choice:
    """The chosen method and the ranking; a notebook shows it as a table.

    Attributes:
        ranking: All methods, best first, with the reasons for the choice.
        method: A name from `METHODS` or `REMAPPINGS`; None if nothing helps
            significantly.
        results: The measurements.
    """

    ranking: Ranking
    method: str | None
    results: Results

    def to_json(self) -> str:
        """Rule, ranking and results as JSON."""
        results = [asdict(result) for result in self.results]
        return results_json(
            {"rule": RULE, "ranking": self.ranking.record(), "results": results}
        )

    def to_pandas(self) -> DataFrame:
        """The ranking as a pandas frame: a row for each method, the best first.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        return data_frame(row.columns() for row in self.ranking.rows)

    def plot(self, name: str | None = None) -> Figure:
        """A figure of the measurements; see `Results.plot`."""
        return self.results.plot(name)

    def __repr__(self) -> str:
        return ranking_text(self.ranking, self.results)


def compare(
    model: str | os.PathLike[str],
    *,
    to: Length,
    methods: str | Iterable[str] = ("linear", "ntk", "ntk-by-parts", "llama3", "yarn"),
    original: Length | None = None,
    text: str | Path | None = None,
    field: str = "text",
    split: str = "test",
    windows: int = 24,
    haystacks: int | None = None,
    keys: int | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    say: Say = say_on_stderr,
    progress: Progress = bar,
) -> Choice:
    """Rank methods on a model without training, and recommend one.

    It measures retrieval at the target length, the loss over it, and the short-context loss. The guide
    "Measure" contains the rule of the ranking, and `--json` prints it. If no method can be recommended, the
    advice is not to extend.

    Args:
        model: A checkpoint folder, a Hub id, or tiny.
        to: The target length in tokens, e.g. 8k, or 4x the original length.
        methods: Names separated by commas (see `ropepatch methods`). all stands for every
            static scaling without required parameters, remappings for every position remapping.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        text: A text, JSONL, CSV or Parquet file, a folder of text and JSONL files, a `datasets` id, or a
            dataset saved with `datasets`. Default, for tiny only: its stories.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        windows: Use at most N windows of the text.
        haystacks: The number of retrieval prompts; 0 for none. Default: 10, or 20 for tiny.
        keys: Questions of each kind per prompt and length. Default: 8, or 1 for tiny.
        out: A folder for the results. Results that it already contains are not measured again.
        report: An HTML file to write, with tables and figures.
        revision: The branch, tag or commit of a Hub id.
        device: A device such as cpu, cuda or cuda:1. Default: a GPU if there is one.
        dtype: float32, bfloat16 or float16. Default: that of the weights, or the faster one on a CPU.
        seed: The random seed of the retrieval prompts.
        say: A function that takes lines of progress, and the methods that are left out.
        progress: See `ropepatch.progress.bar`.

    Raises:
        RopepatchError: If the model, the target, a named method or the text does not allow it.
    """
    source = find_checkpoint(model, revision, original)
    place = None if text is None else os.fspath(text)
    check_text(place, source.name)
    folder, page = check_places(out, report)
    target = relative_length(to, source.config.window)
    entrants = participants(source, listed(methods), to=target, say=say)
    tasks: list[Task] = [
        PerplexityTask(text=place, field=field, split=split, windows=windows)
    ]
    if haystacks != 0:
        retrieval = RetrievalTask(haystacks=haystacks, keys=keys, seed=seed)
        tokenizer, window = source.complete().tokenizer, source.config.window
        try:
            retrieval.limited(1).prepare(Goal(source.name, tokenizer, window, target))
        # No room for the keys, or a tokenizer that cannot encode them
        except RopepatchError as error:
            say(f"warning: no retrieval: {error}")
        else:
            tasks.append(retrieval)
    suite = Suite(
        models=(source.name,),
        methods=entrants,
        to=(target,),
        tasks=tuple(tasks),
    )
    machine = measuring.Machine.of(device, dtype, say)
    measurements = measuring.measure(
        suite,
        source,
        out=folder,
        machine=machine,
        progress=progress,
    )
    results = reported(measurements, folder, page, machine)
    ranking = rank(results)
    names_by_label = {method.label: method.name for method in suite.methods}
    best = names_by_label.get(ranking.recommended or "")
    return Choice(ranking=ranking, method=best, results=results)


def plot(what: Plan | Choice | Results | str | Path, name: str | None = None) -> Figure:
    """Draw a plan, measurements, or the results in a folder or a file; see `read_results`.

    Args:
        what: A `Plan`, a `Choice`, `Results`, or a folder or file of results.
        name: The name of the figure, as in `Results.plot`; a plan has only one.

    Raises:
        RopepatchError: If there is nothing to draw, no figure of that name, or no matplotlib.
    """
    if isinstance(what, Plan):
        from ropepatch.report.plots.changes import plot_plan

        return plot_plan(what)
    return (read_results(what) if isinstance(what, str | Path) else what).plot(name)

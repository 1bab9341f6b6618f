"""Choose a scaling for a model by measuring them on it: what `--method auto` and `ropepatch compare` do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ropepatch.data.templates import PasskeyTemplate
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR
from ropepatch.evaluation.measuring import AS_IT_IS, Progress, measure
from ropepatch.evaluation.ranking import Ranking, rank
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.tasks import PasskeyTask, PerplexityTask, Task, askable, check_text, doublings
from ropepatch.extension.planning import plan
from ropepatch.model.loading import load_tokenizer
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey_folder
from ropepatch.scaling import formulas

if TYPE_CHECKING:
    from ropepatch.evaluation.results import Result
    from ropepatch.fitting.fitted import Fitted

FIT = "fit"  # the label of what is fitted to the model itself
WINDOWS, TRIALS = 24, 4  # of text, and pass keys per length and depth


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and from what.

    Attributes:
        ranking: All that took part, and why one was chosen.
        method: A name from `METHODS`; None where no scaling is seen to help.
        parameters: Of that method; those that are not left at their defaults.
        results: What was measured.
        fitted: What `fit` found, chosen or not; None if it took no part.
        left_out: What took no part, and why.
    """

    ranking: Ranking
    method: str | None
    parameters: dict[str, Any]
    results: tuple[Result, ...]
    fitted: Fitted | None
    left_out: dict[str, str]


def candidates() -> tuple[str, ...]:
    """The methods of the registry that take part by themselves: static ones that need no parameters.

    A method that follows the length is held at the target where it is measured, and there it is its static
    twin, which takes part; let go, it contradicts the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # which is the model as it is


def allowed(
    model: str | Path, names: Iterable[str], *, to: int, revision: str | None = None
) -> tuple[list[Method], dict[str, str]]:
    """Those of some methods that a model allows, and why it does not allow the others.

    Raises:
        RopepatchError: It allows none.
    """
    methods, errors = [], {}
    for name in names:
        try:
            plan(model, to=to, method=name, revision=revision)
        except RopepatchError as error:
            errors[name] = error
        else:
            methods.append(Method(name=name))
    if errors and not methods:
        raise next(iter(errors.values()))
    return methods, {name: str(error) for name, error in errors.items()}


def fit_beside(
    suite: Suite,
    folder: Path,
    *,
    revision: str | None = None,
    device: str = "cpu",
    progress: Progress = lambda name: nullcontext(lambda done, total: None),
) -> tuple[Method, Fitted]:
    """Fit the model of a suite to its target on that part of its text that the suite does not read.

    Args:
        suite: Of one model, one target in tokens and a first task that reads windows.
        folder: Where `fit.json` is written, and the state of the fit is kept.
        revision: Of a Hub id.
        device: Where the model is put.
        progress: As in `measure`.

    Returns:
        The method, labelled `fit`, and what was found.

    Raises:
        RopepatchError: Too little text, several processes, or what `ropepatch.fit` refuses.
    """
    from ropepatch.fitting.fitting import fit

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RopepatchError(
            "a fit runs in one process", hint="`ropepatch fit` before, and its file in the list"
        )
    read = suite.tasks[0]
    assert isinstance(read, PerplexityTask)
    assert read.windows is not None
    (model,), (to,) = suite.models, suite.to
    assert isinstance(to, int)
    folder.mkdir(parents=True, exist_ok=True)
    found = fit(
        model,
        to=to,
        text=read.text,
        field=read.field,
        split=read.split,
        spare=read.windows,
        revision=revision,
        device=device,
        work=folder / "work",
        progress=progress,
    )
    file = folder / f"{FIT}.json"
    file.unlink(missing_ok=True)  # of an earlier call, which the work folder has just repeated
    return Method(name=str(found.save(file))), found


def ranking_suite(
    model: str | Path,
    methods: Sequence[Method],
    *,
    to: int,
    text: str | None = None,
    field: str = "text",
    split: str = "test",
    windows: int = WINDOWS,
    trials: int = TRIALS,
    revision: str | None = None,
) -> tuple[Suite, RopepatchError | None]:
    """What is measured for a ranking: the loss over windows of the target, and pass keys.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        methods: What is ranked.
        to: The target, in tokens.
        text: As in `PerplexityTask`, with `field`, `split` and `windows`.
        field: Of its documents.
        split: Of its sets.
        windows: At most so many.
        trials: Pass keys per length and depth; 0 for none.
        revision: Of a Hub id.

    Returns:
        The suite, and why no pass keys are asked for where the tokenizer cannot write them.

    Raises:
        RopepatchError: No such model, or no text for one that has none of its own.
    """
    check_text(text, str(model))
    tasks: list[Task] = [PerplexityTask(text=text, field=field, split=split, windows=windows)]
    reason = None
    if trials:
        folder = find_source(model, revision, weights=True).folder
        lengths = doublings(survey_folder(folder).rope.original_max_position_embeddings, to)
        written, reason = askable(PasskeyTask(), PasskeyTemplate(), load_tokenizer(folder), lengths)
        if written:
            tasks.append(PasskeyTask(lengths=tuple(written), trials=trials))
            reason = None
    return Suite(models=(str(model),), methods=tuple(methods), to=(to,), tasks=tuple(tasks)), reason


def choose(
    model: str | Path,
    *,
    to: int,
    text: str | None = None,
    field: str = "text",
    split: str = "test",
    windows: int = WINDOWS,
    trials: int = TRIALS,
    fit: bool = True,
    out: Path | None = None,
    revision: str | None = None,
    device: str = "cpu",
    progress: Progress = lambda name: nullcontext(lambda done, total: None),
) -> Choice:
    """Measure every method of `candidates` on a model, and a fit to it, and choose one; see `rank`.

    The windows of text that rank are none of those that the fit has seen, and the tales of tiny are others.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        to: The target, in tokens.
        text: A file, a folder, a `datasets` id or a saved set; None for the tales of tiny.
        field: The column or key of a document's text.
        split: Of a `datasets` id or a saved set.
        windows: So many windows of the target's length rank, if the text has them.
        trials: Pass keys per length and depth; 0 for none.
        fit: Whether a fit takes part.
        out: A folder for results and fit; what it holds already is not measured again.
        revision: Of a Hub id.
        device: Where the model is put.
        progress: As in `measure`.

    Raises:
        RopepatchError: The model, the target or the text does not allow it.
    """
    methods, left_out = allowed(model, candidates(), to=to, revision=revision)

    suite, reason = ranking_suite(
        model,
        methods,
        to=to,
        text=text,
        field=field,
        split=split,
        windows=windows,
        trials=trials,
        revision=revision,
    )
    if reason is not None:
        left_out["pass keys"] = str(reason)
    found = None
    with TemporaryDirectory(prefix="ropepatch-") as place:
        if fit:
            folder = Path(place) if out is None else out / FIT
            try:
                method, found = fit_beside(suite, folder, revision=revision, device=device, progress=progress)
            except RopepatchError as error:
                left_out[FIT] = str(error)
            else:
                suite = replace(suite, methods=(*methods, method))
        results = tuple(measure(suite, out=out, revision=revision, device=device, progress=progress))
    ranking = rank(results, base=AS_IT_IS, ignored=[FLOOR])
    name, parameters = ranking.recommended, dict[str, Any]()
    if found is not None and name == FIT:
        name, parameters = found.scaling.name, found.scaling.parameters()
    return Choice(
        ranking=ranking,
        method=name,
        parameters=parameters,
        results=results,
        fitted=found,
        left_out=left_out,
    )

"""The methods that take part where scalings are measured against each other, and what is measured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from ropepatch.attention import MAPS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Progress
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask, Task, check_text
from ropepatch.extension.planning import plan
from ropepatch.fitting import fitting
from ropepatch.fitting.fitting import Fitted
from ropepatch.model.loading import load_tokenizer
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey_checkpoint
from ropepatch.scaling import formulas
from ropepatch.scaling.file import FIT

ALL, EVERY_MAP = "all", "maps"  # stand for every candidate, and every attention map, that the model allows
WINDOWS = 24  # of text


def candidates() -> tuple[str, ...]:
    """The methods of the registry that take part by themselves: static ones that need no parameters.

    A method that follows the length is held at the target where it is measured, and there it is its static
    twin, which takes part; let go, it contradicts the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # the baseline


def participants(
    model: str | Path, names: Iterable[str], *, to: int, revision: str | None = None
) -> tuple[list[Method], dict[str, str]]:
    """The methods of a comparison, each once.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        names: Names of `METHODS` or `MAPS`, or scaling files, all of which the model must allow; `all` for
            those of `candidates` that it allows, `maps` for the attention maps that it allows.
        to: The target, in tokens.
        revision: The revision of a Hub id.

    Returns:
        The methods, and of `all` and `maps` the names that the model does not allow, with the reason.

    Raises:
        RopepatchError: The model does not allow a method that is named, or none at all.
    """
    groups = {ALL: candidates(), EVERY_MAP: tuple(MAPS)}
    methods: dict[str, Method] = {}
    errors: dict[str, RopepatchError] = {}
    for name in names:
        for candidate in groups.get(name, [name]):
            try:
                plan(model, to=to, method=candidate, revision=revision)
            except RopepatchError as error:
                if name not in groups:
                    raise
                errors[candidate] = error
            else:
                methods[candidate] = Method(name=candidate)
    if errors and not methods:
        raise next(iter(errors.values()))
    return list(methods.values()), {name: str(error) for name, error in errors.items()}


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
        suite: It has one model, one target in tokens and a first task that reads windows.
        folder: Where `fit.json` is written, and the state of the fit is kept.
        revision: The revision of a Hub id.
        device: Where the model is put.
        progress: As in `measure`.

    Returns:
        The method, labelled `fit`, and the fit itself.

    Raises:
        RopepatchError: Too little text, several processes, or what `ropepatch.fit` refuses.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RopepatchError(
            "a fit runs in one process", hint="`ropepatch fit` before, and its file in the list"
        )
    task = suite.tasks[0]
    assert isinstance(task, PerplexityTask)
    assert task.windows is not None
    (model,), (to,) = suite.models, suite.to
    assert isinstance(to, int)
    folder.mkdir(parents=True, exist_ok=True)
    fitted = fitting.fit(
        model,
        to=to,
        text=task.text,
        field=task.field,
        split=task.split,
        spare=task.windows,
        revision=revision,
        device=device,
        work=folder / "work",
        progress=progress,
    )
    file = folder / f"{FIT}.json"
    file.unlink(missing_ok=True)  # of an earlier call, which the work folder has just repeated
    return Method(name=str(fitted.save(file))), fitted


def ranking_suite(
    model: str | Path,
    methods: Sequence[Method],
    *,
    to: int,
    text: str | None = None,
    field: str = "text",
    split: str = "test",
    windows: int = WINDOWS,
    haystacks: int | None = None,
    keys: int | None = None,
    revision: str | None = None,
) -> tuple[Suite, RopepatchError | None]:
    """The suite of a ranking: the loss over windows of the target, and retrieval.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        methods: The methods to rank.
        to: The target, in tokens.
        text: As in `PerplexityTask`, with `field`, `split` and `windows`.
        field: The column or key of a document's text.
        split: The split of a `datasets` id or a saved set.
        windows: So many windows of the target's length are read, if the text has them.
        haystacks: As in `RetrievalTask`; 0 for no retrieval.
        keys: As in `RetrievalTask`.
        revision: The revision of a Hub id.

    Returns:
        The suite, and the reason for leaving retrieval out where the tokenizer cannot write the keys or no
        length has room for them.

    Raises:
        RopepatchError: No such model, or no text for one that has none of its own.
    """
    check_text(text, str(model))
    tasks: list[Task] = [PerplexityTask(text=text, field=field, split=split, windows=windows)]
    reason = None
    if haystacks != 0:
        source = find_source(model, revision, weights=True)
        trained = survey_checkpoint(source).rope.original_max_position_embeddings
        retrieval, tokenizer = RetrievalTask(haystacks=haystacks, keys=keys), load_tokenizer(source.folder)
        try:
            retrieval.limited(1).prepare(str(model), tokenizer, trained=trained, to=to)
            tasks.append(retrieval)
        except RopepatchError as error:
            reason = error
    return Suite(models=(str(model),), methods=tuple(methods), to=(to,), tasks=tuple(tasks)), reason

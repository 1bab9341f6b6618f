"""The methods `fit` and `auto`: found once, kept until a checkpoint has it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropepatch.data.texts import Texts
from ropepatch.data.tokens import default_cache
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.ranking import RULE
from ropepatch.evaluation.results import as_read
from ropepatch.evaluation.tasks import check_text
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan, plan
from ropepatch.files import absent, check_resumed, read_json, whole_file, write_json
from ropepatch.fitting import fitting
from ropepatch.model.config import text_config
from ropepatch.model.loading import load_tokenizer
from ropepatch.model.source import Source, find_source
from ropepatch.model.survey import survey_folder
from ropepatch.model.weights import fingerprint, read_headers
from ropepatch.pipeline import choice
from ropepatch.pipeline.running import Feedback, device, num_processes
from ropepatch.scaling.file import AUTO, FIT
from ropepatch.settings import refuse_unknown
from ropepatch.training.recipe import Recipe
from ropepatch.training.sections import Fit
from ropepatch.training.supply import write_windows

# In the work folder; the state is of `ropepatch.fit`, the last a folder of `ropepatch.choose`.
START, WINDOWS, STATE, MEASURED = "start.json", "text.jsonl", "fit.json", "measured"
EVIDENCE = ("fit", "ranking")  # in records: what the choice of the method rests on

Search = Callable[[Path], dict[str, Any]]  # of a work folder: method, parameters, factor and `EVIDENCE`


@dataclass(frozen=True)
class Learned:
    """A scaling that was found on the model itself.

    Args:
        plan: The plan of that scaling.
        record: What `ropepatch.json` says of it: what was asked for, what was found, and how.
        work: The folder that holds it until the checkpoint is written.
    """

    plan: Plan
    record: dict[str, Any]
    work: Path

    def put_on_record(self, folder: Path) -> None:
        """Say in the record of a checkpoint how its scaling was found; the work folder has served then."""
        records.amend(folder, **self.record)
        if self.work.is_dir() and not _others(self.work):
            shutil.rmtree(self.work)


def fit_settings(parameters: dict[str, Any], text: dict[str, Any], *, measured: bool, recipe: bool) -> Fit:
    """The parameters of the method `fit`.

    Args:
        parameters: Those that are set, in the call or in a recipe.
        text: The text of the call, with its field and split.
        measured: Whether a suite measures on that text, so that nothing may be learned from it.
        recipe: Whether there is a recipe, which has texts.

    Raises:
        RopepatchError: An unknown parameter, one that is not what it must be, or no text but the one that is
            measured.
    """
    refuse_unknown(parameters, Fit.model_fields, "parameter of fit")
    if text["text"] and measured and not recipe and "text" not in parameters:
        raise RopepatchError("--text is what --eval measures; a fit needs another", hint="--set text=FILE")
    return Fit(**(text if text["text"] and not measured else {}) | parameters)


def fitted_plan(
    model: str,
    to: int,
    revision: str | None,
    settings: Fit,
    recipe: Recipe | None,
    folder: Path,
    feedback: Feedback,
    *,
    keep: bool,
) -> Learned:
    """The plan of frequencies that are fitted to a model, or were when this was asked for before.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        to: The target, in tokens.
        revision: Of a Hub id.
        settings: How it is fitted.
        recipe: Whose texts are read where the settings name none.
        folder: The checkpoint to make.
        feedback: How the fit speaks; it shows what it found.
        keep: Whether the work folder beside the checkpoint is made.

    Raises:
        RopepatchError: The folders hold something else, or what `ropepatch.fit` refuses.
    """
    source = find_source(model, revision, weights=True)
    sources = recipe.data.sources if recipe and settings.text is None else ()
    texts = [kind.text for kind in sources if isinstance(kind, Texts)]
    if not texts:
        check_text(settings.text, source.name)
    seed = recipe.seed if recipe else 0

    def search(work: Path) -> dict[str, Any]:
        options = settings.model_dump()
        if texts and recipe:
            options |= {"text": _windows_of(recipe, source, to, work), "field": "input_ids"}
        fitted = fitting.fit(
            model,
            to=to,
            **options,
            seed=seed,
            revision=revision,
            device=device(),
            work=work,
            progress=feedback.progress,
        )
        feedback.show(fitted)
        record = fitted.record | {"text": ", ".join(texts) or fitted.record["text"]}
        start = {"method": fitted.scaling.name, "factor": fitted.scaling.factor}
        return start | {"parameters": fitted.scaling.parameters(), "fit": record}

    request = {"method": FIT} | settings.model_dump() | {"recipe_texts": texts, "seed": seed}
    return _learned(request, search, source, to, folder, keep=keep)


def chosen_plan(
    model: str,
    to: int,
    revision: str | None,
    text: dict[str, Any],
    folder: Path,
    feedback: Feedback,
    *,
    keep: bool,
) -> Learned:
    """The plan of the method that measuring chooses, or chose when this was asked for before.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        to: The target, in tokens.
        revision: Of a Hub id.
        text: What is read, with its field and split.
        folder: The checkpoint to make.
        feedback: How the choice speaks; it shows what it chose from.
        keep: Whether the work folder beside the checkpoint is made.

    Raises:
        NothingHelpsError: No scaling is seen to help.
        RopepatchError: The folders hold something else, there are several processes, or what `choose`
            refuses.
    """
    source = find_source(model, revision, weights=True)

    def search(work: Path) -> dict[str, Any]:
        chosen = choice.choose(
            model,
            to=to,
            **text,
            out=work / MEASURED,
            revision=revision,
            say=feedback.say,
            progress=feedback.progress,
        )
        feedback.show(chosen)
        if chosen.method is None:
            raise choice.NothingHelpsError(" ".join(chosen.ranking.advice))
        ranking = {"rule": RULE, **chosen.ranking.record()}
        outcome = {"method": chosen.method, "parameters": chosen.parameters, "ranking": ranking}
        if chosen.fitted is not None:  # of the checkpoint, or of one that was ranked
            (outcome if chosen.ranking.recommended == FIT else ranking)["fit"] = chosen.fitted.record
        return outcome

    return _learned({"method": AUTO} | text, search, source, to, folder, keep=keep)


def _learned(
    request: dict[str, Any], search: Search, source: Source, to: int, folder: Path, *, keep: bool
) -> Learned:
    """What was found earlier, if the same was asked for, or is found now."""
    work = _work_of(folder)
    weights = fingerprint(read_headers(source.folder))
    request = as_read(request | {"to": to, "weights": weights})
    earlier, finished = {}, {}
    with suppress(OSError):  # a name that is too long: whoever writes says so
        if records.exists(folder):
            finished = records.read(folder).to_dict()
        if (work / START).is_file():
            earlier = read_json(work / START)
    record = finished if finished.get("start", {}).get("asked") == request else earlier
    if record:
        asked, what = record["start"]["asked"], f"{work} holds what something else was found by"
        hint = "choose another --out, or remove that folder to start anew"
        check_resumed(what, asked, dict.fromkeys(asked) | request, hint=hint)
    if "method" not in record.get("start", {}):  # it was asked for, and not found yet
        if num_processes() > 1:
            raise RopepatchError(
                f"--method {request['method']} runs in one process",
                hint="`ropepatch fit` or `compare` before, and --method with what they give",
            )
        absent(folder)
        record = _search_and_keep(request, search, work) if keep else _search_once(request, search)
    start = record["start"]
    options = start["parameters"] | ({"factor": start["factor"]} if "factor" in start else {})
    learned = plan(source.name, to=to, method=start["method"], revision=source.revision, **options)
    return Learned(learned, {key: record[key] for key in ("start", *EVIDENCE) if key in record}, work)


def _search_once(request: dict[str, Any], search: Search) -> dict[str, Any]:
    """What is found now, as the record says it."""
    with TemporaryDirectory(prefix="ropepatch-") as place:
        return _recorded(request, as_read(search(Path(place))))


def _search_and_keep(request: dict[str, Any], search: Search, work: Path) -> dict[str, Any]:
    """The same; kept in a folder, from which an interrupted search goes on, too."""
    if work.exists() and _others(work):
        raise RopepatchError(f"{work} exists and holds other files", hint="choose another --out")
    _keep({"start": {"asked": request}}, work)
    try:
        record = _recorded(request, as_read(search(work)))
    except RopepatchError:
        if work.is_dir() and not any((work / state).exists() for state in (STATE, MEASURED)):
            shutil.rmtree(work)
        raise
    _keep(record, work)
    return record


def _keep(record: dict[str, Any], work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with whole_file(work / START) as partial:
        write_json(partial, record)


def _recorded(request: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
    evidence = {key: outcome.pop(key) for key in EVIDENCE if key in outcome}
    return {"start": {"asked": request} | outcome} | evidence


def _windows_of(recipe: Recipe, source: Source, to: int, work: Path) -> Path:
    """A file of windows of what a recipe trains on."""
    survey = survey_folder(source.folder)
    write_windows(
        recipe,
        load_tokenizer(source.folder),
        work / WINDOWS,
        trained=survey.rope.original_max_position_embeddings,
        target=to,
        vocabulary=text_config(survey.config).vocab_size,
        cache=default_cache(),
    )
    return work / WINDOWS


def _work_of(folder: Path) -> Path:
    absolute = folder.expanduser().absolute()
    return absolute.with_name(f"{absolute.name}.{FIT}")


def _others(work: Path) -> list[str]:
    ours = {START, WINDOWS, STATE, MEASURED}
    return [file.name for file in work.iterdir() if file.name not in ours and not file.name.startswith(".")]

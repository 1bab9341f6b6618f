"""`--method fit` and `--method auto` of `ropepatch extend`: found once, kept until a checkpoint has it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ropepatch.cli.arguments import AUTO, FIT
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan
    from ropepatch.model.source import Source
    from ropepatch.training.recipe import Recipe
    from ropepatch.training.sections import Fit

# In the work folder; the state is of `ropepatch.fit`, the last a folder of `ropepatch.fitting.choosing`.
START, WINDOWS, STATE, MEASURED = "start.json", "text.jsonl", "fit.json", "measured"
FOUND = ("fit", "ranking")  # records of how a method was found

Find = Callable[[Path], dict[str, Any]]  # given a work folder: method, parameters, factor and `FOUND`


@dataclass(frozen=True)
class Learned:
    """A scaling that was found on the model itself.

    Args:
        plan: Of it.
        record: What `ropepatch.json` says of it: what was asked for, what was found, and how.
        work: The folder that holds it until the checkpoint is written.
    """

    plan: Plan
    record: dict[str, Any]
    work: Path

    def put_on_record(self, folder: Path) -> None:
        """Say in the record of a checkpoint how its scaling was found; the work folder has served then."""
        from ropepatch.extension.writing import amend_record

        amend_record(folder, **self.record)
        if self.work.is_dir() and not _others(self.work):
            shutil.rmtree(self.work)


def fit_settings(
    given: dict[str, Any], settings: list[str] | None, read: dict[str, Any], *, measured: bool, taught: bool
) -> Fit:
    """The parameters of the method `fit`.

    Args:
        given: Those of a recipe.
        settings: NAME=VALUE pairs of the command line, which go before.
        read: `--text`, with its field and split.
        measured: Whether a suite measures on that text, so that nothing may be learned from it.
        taught: Whether there is a recipe, which has texts.

    Raises:
        RopepatchError: An unknown parameter, one that is not what it must be, or no text but the one that is
            measured.
    """
    from ropepatch.settings import refuse_unknown
    from ropepatch.training.sections import Fit

    values = given | (read if read["text"] and not measured else {})
    for setting in settings or []:
        name, _, value = setting.partition("=")
        refuse_unknown([name], [field.name for field in fields(Fit)], "parameter of fit")
        values[name] = int(value) if name == "steps" and value.isdecimal() else value
    if read["text"] and measured and not taught and "text" not in values:
        raise RopepatchError("--text is what --eval measures; a fit needs another", hint="--set text=FILE")
    return Fit(**values)


def fitted_plan(
    model: str,
    to: int,
    revision: str | None,
    settings: Fit,
    recipe: Recipe | None,
    folder: Path,
    *,
    keep: bool,
) -> Learned:
    """The plan of frequencies that are fitted to a model, or were when this was asked for before.

    Args:
        model: As the user gave it.
        to: The target, in tokens.
        revision: Of a Hub id.
        settings: How it is fitted.
        recipe: Whose texts are read where the settings name none.
        folder: The checkpoint to make.
        keep: Whether the work folder beside it is made.

    Raises:
        RopepatchError: The folders hold something else, or what `ropepatch.fit` refuses.
    """
    from ropepatch.data.texts import Texts
    from ropepatch.evaluation.tasks import check_text
    from ropepatch.model.source import find_source

    source = find_source(model, revision, weights=True)
    sources = recipe.data.sources if recipe and settings.text is None else ()
    texts = [kind.text for kind in sources if isinstance(kind, Texts)]
    if not texts:
        check_text(settings.text, source.name)
    seed = recipe.seed if recipe else 0
    asked = asdict(settings) | {"recipe_texts": texts, "seed": seed}

    def find(work: Path) -> dict[str, Any]:
        from ropepatch.cli.running import device, progress
        from ropepatch.fitting.fitting import fit

        options = asdict(settings)
        if texts and recipe:
            options |= {"text": _windows_of(recipe, source, to, work), "field": "input_ids"}
        found = fit(
            model,
            to=to,
            **options,
            seed=seed,
            revision=revision,
            device=device(),
            work=work,
            progress=progress,
        )
        print(found, file=sys.stderr, flush=True)
        record = found.record | {"text": ", ".join(texts) or found.record["text"]}
        named = {"method": found.scaling.name, "factor": found.scaling.factor}
        return named | {"parameters": found.scaling.parameters(), "fit": record}

    return _learned({"method": FIT} | asked, find, source, to, folder, keep=keep)


def chosen_plan(
    model: str,
    to: int,
    revision: str | None,
    settings: list[str] | None,
    text: dict[str, Any],
    folder: Path,
    *,
    keep: bool,
) -> Learned:
    """The plan of the method that measuring chooses, or chose when this was asked for before.

    Args:
        model: As the user gave it.
        to: The target, in tokens.
        revision: Of a Hub id.
        settings: What the user set beside it, which is refused.
        text: What is read, with its field and split.
        folder: The checkpoint to make.
        keep: Whether the work folder beside it is made.

    Raises:
        RopepatchError: The folders hold something else, or what `resolve_auto` refuses.
    """
    from ropepatch.cli.auto import resolve_auto
    from ropepatch.evaluation.ranking import RULE
    from ropepatch.model.source import find_source

    source = find_source(model, revision, weights=True)

    def find(work: Path) -> dict[str, Any]:
        choice = resolve_auto(model, to, **text, revision=revision, settings=settings, out=work / MEASURED)
        ranking = {"rule": RULE, **choice.ranking.record()}
        found = {"method": choice.method, "parameters": choice.parameters, "ranking": ranking}
        if choice.fitted is not None:  # of the checkpoint, or of one that was ranked
            (found if choice.ranking.recommended == FIT else ranking)["fit"] = choice.fitted.record
        return found

    return _learned({"method": AUTO} | text, find, source, to, folder, keep=keep)


def _learned(
    asked: dict[str, Any], find: Find, source: Source, to: int, folder: Path, *, keep: bool
) -> Learned:
    """What was found earlier, if the same was asked for, or is found now."""
    from ropepatch.evaluation.results import as_read
    from ropepatch.extension.planning import plan
    from ropepatch.files import absent, read_json
    from ropepatch.model.weights import fingerprint, read_headers

    work = _work_of(folder)
    weights = fingerprint(read_headers(source.folder))
    known = as_read(asked | {"to": to, "weights": weights})
    kept, finished = {}, {}
    with suppress(OSError):  # a name that is too long: whoever writes says so
        if (folder / "ropepatch.json").is_file():
            finished = read_json(folder / "ropepatch.json")
        if (work / START).is_file():
            kept = read_json(work / START)
    record = finished if finished.get("start", {}).get("asked") == known else kept
    if record and record["start"]["asked"] != known:
        differing = (key for key, value in known.items() if record["start"]["asked"].get(key) != value)
        raise RopepatchError(
            f"{work} holds what something else was found by: it differs in {', '.join(differing)}",
            hint="choose another --out, or remove that folder to start anew",
        )
    if "method" not in record.get("start", {}):  # it was asked for, and not found yet
        absent(folder)
        record = _found_and_kept(known, find, work) if keep else _found(known, find)
    start = record["start"]
    options = start["parameters"] | ({"factor": start["factor"]} if "factor" in start else {})
    made = plan(source.name, to=to, method=start["method"], revision=source.revision, **options)
    return Learned(made, {key: record[key] for key in ("start", *FOUND) if key in record}, work)


def _found(known: dict[str, Any], find: Find) -> dict[str, Any]:
    """What is found now, as the record says it."""
    from ropepatch.evaluation.results import as_read

    with TemporaryDirectory(prefix="ropepatch-") as place:
        return _recorded(known, as_read(find(Path(place))))


def _found_and_kept(known: dict[str, Any], find: Find, work: Path) -> dict[str, Any]:
    """The same; kept in a folder, from which an interrupted search goes on, too."""
    from ropepatch.evaluation.results import as_read

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RopepatchError(
            f"--method {known['method']} runs in one process",
            hint="`ropepatch fit` or `compare` before, and --method with what they give",
        )
    if work.exists() and _others(work):
        raise RopepatchError(f"{work} exists and holds other files", hint="choose another --out")
    _keep({"start": {"asked": known}}, work)
    try:
        record = _recorded(known, as_read(find(work)))
    except RopepatchError:
        if work.is_dir() and not any((work / kept).exists() for kept in (STATE, MEASURED)):
            shutil.rmtree(work)
        raise
    _keep(record, work)
    return record


def _keep(record: dict[str, Any], work: Path) -> None:
    from ropepatch.files import whole_file

    work.mkdir(parents=True, exist_ok=True)
    with whole_file(work / START) as partial:
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _recorded(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    told = {key: found.pop(key) for key in FOUND if key in found}
    return {"start": {"asked": known} | found} | told


def _windows_of(recipe: Recipe, source: Source, to: int, work: Path) -> Path:
    """A file of windows of what a recipe trains on."""
    from ropepatch.data.tokens import default_cache
    from ropepatch.model.config import text_config
    from ropepatch.model.loading import load_tokenizer
    from ropepatch.model.survey import survey_folder
    from ropepatch.training.supply import write_windows

    found = survey_folder(source.folder)
    write_windows(
        recipe,
        load_tokenizer(source.folder),
        work / WINDOWS,
        trained=found.rope.original_max_position_embeddings,
        target=to,
        vocabulary=text_config(found.config).vocab_size,
        cache=default_cache(),
    )
    return work / WINDOWS


def _work_of(folder: Path) -> Path:
    absolute = folder.expanduser().absolute()
    return absolute.with_name(f"{absolute.name}.{FIT}")


def _others(work: Path) -> list[str]:
    ours = {START, WINDOWS, STATE, MEASURED}
    return [file.name for file in work.iterdir() if file.name not in ours and not file.name.startswith(".")]

"""Write the card of a checkpoint folder, with its figures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import read_result
from ropepatch.extension import record as records
from ropepatch.files import read_text, whole_file
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.publishing.card import evidence, making
from ropepatch.publishing.card.extended import Extended
from ropepatch.publishing.card.markdown import code, fenced, plain, table
from ropepatch.publishing.card.metadata import front_matter
from ropepatch.publishing.gguf.layout import fits_gguf
from ropepatch.report.plots import Picture, looks_of, pictures_of_results
from ropepatch.report.plots.style import house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropepatch.extension.record import Engine

CARD = "README.md"
TOKENIZERS = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}
ENGINES = ("engine", "reads it", "note")
NEWLINE = "\0"  # of a value, while empty lines of the template are joined
MARKER = (
    "<!-- written by ropepatch, which writes it anew; without this line it is yours and stays as it is -->"
)


def write_card(folder: Path, repo: str | None = None, revision: str | None = None) -> list[Path]:
    """Write README.md and its figures into a folder that ropepatch model, whole or not at all.

    Figures need matplotlib; without it there are none.

    Args:
        folder: Of a checkpoint or an adapter.
        repo: The Hub id under which it can be loaded; None for the folder's name.
        revision: The branch of it; None for main.

    Returns:
        The files; none if README.md is there and not ropepatch's: it is not touched.

    Raises:
        RopepatchError: Not a folder that ropepatch made, a damaged record or result, weights that are missing
            or damaged, or a disk that cannot be written.
    """
    card = folder / CARD
    try:
        if card.exists() and MARKER not in read_text(card, errors="replace"):
            return []
        model = _read(folder, repo, revision)
        pictures = dict(_pictures(model)) if find_spec("matplotlib") else {}
        text = card_text(
            replace(model, captions={stem: picture.caption for stem, picture in pictures.items()})
        )
        files = {folder / evidence.FIGURES.format(stem): picture for stem, picture in pictures.items()}
        with ExitStack() as stack:
            # The last to take its name: a card never shows figures that are not there.
            stack.enter_context(whole_file(card)).write_text(text, encoding="utf-8", errors="replace")
            for file, picture in files.items():
                _save(picture.figure, stack.enter_context(whole_file(file)))
    except OSError as error:
        raise RopepatchError(
            f"cannot write {card}: {error.strerror or error}", hint="choose a folder you may write to"
        ) from error
    return [card, *files]


def card_text(model: Extended) -> str:
    """The card: the same for the same record and results, and no number that is in neither."""
    body = _template().render(
        marker=MARKER,
        model=model,
        record=model.record,
        trained=model.record.adaptation,
        has_tokenizer=bool(model.files & TOKENIZERS),
        paper=making.paper(model),
        headline=evidence.headline(model),
        warnings=evidence.warnings(model),
        engines=table(
            ENGINES, [[plain(one.engine), plain(one.reads), plain(one.note)] for one in model.record.engines]
        ),
        measured=[*evidence.parts(model)],
        old_context=[*evidence.old_context(model)],
        recipe=making.recipe(model),
        plan=making.plan(model),
        teaching=making.teaching(model.record.adaptation),
        citation=making.citation(model),
    )
    paragraphs = re.sub(r"\n{3,}", "\n\n", body).strip("\n").replace(NEWLINE, "\n")
    return f"---\n{front_matter(model)}\n---\n\n{paragraphs}\n"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        finalize=_kept_lines,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": plain,
        "code": code,
        "fenced": fenced,
        "quote": shlex.quote,
        "count": "{:,}".format,
        "reservation": _reservation,
    }
    return environment.get_template("card.md.jinja")


def _kept_lines(value: object) -> str:
    """A value whose empty lines are its own, and not between paragraphs."""
    return str(value).replace(NEWLINE, "").replace("\n", NEWLINE)


def _reservation(engine: Engine) -> str:
    only = "Only partly: " if engine.reads == "partly" else "Note: "
    return f"{only}{plain(engine.note)}." if engine.note else ""


def _read(folder: Path, repo: str | None, branch: str | None) -> Extended:
    if not records.exists(folder):
        raise RopepatchError(
            f"no ropepatch.json in {folder}: ropepatch did not make it",
            hint="a card is written for what `ropepatch extend` made",
        )
    model = Extended(
        name=repo or folder.resolve().name or "model",
        record=records.read(folder),
        results=[read_result(file) for file in sorted((folder / "evaluation").glob("*.json"))],
        files=frozenset(file.name for file in folder.iterdir()),
        branch=branch,
    )
    if model.is_adapter:
        return model
    checkpoint = Checkpoint(folder)
    return replace(model, weights=checkpoint.fingerprint, fits_gguf=fits_gguf(checkpoint))


def _pictures(model: Extended) -> Iterator[tuple[str, Picture]]:
    """One for every comparison by length, by the stem of its file."""
    look = looks_of([result for part in model.evidence for result in part.group.results.values()])
    for part in model.evidence:
        for picture in pictures_of_results(part.group, look):
            if picture.name == part.group.task:
                yield part.stem, picture


def _save(figure: Figure, file: Path) -> None:
    with house_style():
        figure.savefig(file, format="png", metadata={"Software": None})

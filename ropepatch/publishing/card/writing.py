"""Write the card of a checkpoint folder, with figures and the Hub's front matter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
)

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import measure_of, read_result
from ropepatch.evaluation.tasks import task_of
from ropepatch.extension import record as records
from ropepatch.files import read_text, whole_file
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.publishing.card import parts
from ropepatch.publishing.card.model import Evidence, Extended
from ropepatch.report.plots.lines import Picture, looks_of, pictures_of_results
from ropepatch.report.plots.style import drawn
from ropepatch.report.printers import markdown_rows, one_line, plain
from ropepatch.settings import yaml_text

if TYPE_CHECKING:
    from ropepatch.extension.record import Engine

CARD = "README.md"
DIGITS = 4  # after the point, of a metric
BOARDS = ".eval_results"  # the folder that the Hub's boards read
# The boards, which take no other data sets, and their tasks, by the task of lm-eval and its metric
BENCHMARKS = {
    ("mmlu_pro", "exact_match (custom-extract)"): ("TIGER-Lab/MMLU-Pro", "mmlu_pro"),
    ("gpqa_diamond_zeroshot", "acc"): ("Idavidrein/gpqa", "diamond"),
    ("gpqa_diamond_cot_zeroshot", "exact_match (flexible-extract)"): (
        "Idavidrein/gpqa",
        "diamond",
    ),
}
TOKENIZERS = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}
MARKER = "<!-- written by ropepatch, which writes it anew; without this line it is yours and stays as it is -->"


def write_card(
    folder: Path, repo: str | None = None, revision: str | None = None
) -> list[Path]:
    """Write README.md, its figures and the scores of boards into a folder that ropepatch wrote.

    Each file is written whole. Figures need matplotlib; without it there are none. The user's own README.md
    is kept.
    """
    card = folder / CARD
    try:
        if has_own_card(folder):
            return []
        model = read_folder(folder, repo, revision)
        pictures = dict(_pictures(model)) if find_spec("matplotlib") else {}
        captions = {stem: picture.caption for stem, picture in pictures.items()}
        text = card_text(replace(model, captions=captions))
        drawings = {
            folder / parts.FIGURES.format(stem): drawn(picture.figure, "png")
            for stem, picture in pictures.items()
        }
        scores = {folder / BOARDS / name: one for name, one in board_scores(model)}
        for file, content in (drawings | scores).items():
            file.parent.mkdir(exist_ok=True)
            with whole_file(file) as partial:
                partial.write_bytes(content)
        for task, _ in BENCHMARKS:  # an earlier score that no result supports
            if (file := folder / BOARDS / f"{task}.yaml") not in scores:
                file.unlink(missing_ok=True)
        with whole_file(card) as partial:  # last: a card never shows missing figures
            partial.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RopepatchError(
            f"cannot write {card}: {error.strerror or error}",
            hint="choose a folder you may write to",
        ) from error
    return [card, *drawings, *scores]


def has_own_card(folder: Path) -> bool:
    """Whether the folder has a card that ropepatch did not write."""
    card = folder / CARD
    return card.exists() and MARKER not in read_text(card, errors="replace")


def card_text(model: Extended) -> str:
    """Render the card; all its numbers are from the record and the results."""
    engines = [
        [plain(one.engine), plain(one.reads), one.how or "", plain(one.note)]
        for one in model.record.engines
    ]
    card = ModelCard.from_template(
        _front_matter(model),
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        plain=plain,
        code=parts.code,
        fenced=parts.fenced,
        count="{:,}".format,
        reservation=_reservation,
        marker=MARKER,
        model=model,
        record=model.record,
        trained=model.record.training,
        has_tokenizer=bool(model.files & TOKENIZERS),
        paper=parts.paper(model),
        headline=parts.headline(model),
        warnings=parts.warnings(model),
        engines=markdown_rows(("engine", "supported", "evidence", "note"), engines),
        measured=[*parts.parts(model)],
        short_context=parts.short_context(model),
        command=parts.command(model),
        plan=parts.plan(model),
        teaching=parts.teaching(model.record.training),
        citation=parts.citation(model),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _reservation(engine: Engine) -> str:
    if engine.reads == "not known":
        return (
            ": ".join(
                filter(
                    None,
                    (
                        "It is not known whether it supports this RoPE scaling",
                        plain(engine.note),
                    ),
                )
            )
            + "."
        )
    only = "Partly supported: " if engine.reads == "partly" else "Note: "
    return f"{only}{plain(engine.note)}." if engine.note else ""


def read_folder(
    folder: Path, repo: str | None = None, branch: str | None = None
) -> Extended:
    """Read what a card tells of a folder that ropepatch wrote."""
    if not records.exists(folder):
        raise RopepatchError(
            f"{folder} contains no ropepatch.json, so ropepatch did not write it",
            hint="give a folder that `ropepatch extend` wrote",
        )
    model = Extended(
        name=repo or folder.resolve().name or "model",
        record=records.read(folder),
        results=[
            read_result(file) for file in sorted((folder / "evaluation").glob("*.json"))
        ],
        files=frozenset(file.name for file in folder.iterdir()),
        branch=branch,
    )
    if model.is_adapter:
        return model
    checkpoint = Checkpoint(folder)
    return replace(
        model, weights=checkpoint.fingerprint, loader=checkpoint.stock.auto_class
    )


def _pictures(model: Extended) -> Iterator[tuple[str, Picture]]:
    """Yield a figure for every comparison by length, with its file stem."""
    look = looks_of(
        [result for part in model.evidence for result in part.group.results.values()]
    )
    for part in model.evidence:
        for picture in pictures_of_results(part.group, look):
            if picture.name == part.group.task:
                yield part.stem, picture


# The Hub's metadata


def board_scores(model: Extended) -> Iterator[tuple[str, bytes]]:
    """Yield the files for the Hub's boards, in percent: names in `BOARDS`, and YAML."""
    for evidence in model.evidence:
        result = evidence.group.results[evidence.own]
        for row in result.rows:
            place = str(row.at.get("task")), row.measure
            is_whole = not result.parameters.get("limit")
            if place not in BENCHMARKS or row.value is None or not is_whole:
                continue
            dataset, task = BENCHMARKS[place]
            entry = EvalResultEntry(
                dataset, task, round(100 * row.value, 2), notes=f"lm-eval, {place[0]}"
            )
            text = yaml_text(eval_result_entries_to_yaml([entry]))
            yield f"{place[0]}.yaml", text.encode()


def _front_matter(model: Extended) -> ModelCardData:
    """Return the metadata."""
    results = [result for evidence in model.evidence for result in _results(evidence)]
    base: Any = model.record.base
    relation = (
        "adapter" if model.is_adapter else "finetune" if model.record.training else None
    )
    return ModelCardData(
        base_model=model.base_id,
        base_model_relation=relation if model.base_id else None,
        license=base.license,
        license_name=base.license_name,
        license_link=base.license_link,
        language=base.language,
        library_name="peft" if model.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[
            "ropepatch",
            "long-context",
            "position-remapping" if model.code else "rope-scaling",
            model.record.method,
        ],
        model_name=model.short_name if results else None,
        eval_results=results or None,
    )


def _results(evidence: Evidence) -> Iterator[EvalResult]:
    """Yield the results at the greatest length up to the target, and all lm-eval scores."""
    group, own = evidence.group, evidence.group.results[evidence.own]
    identity = task_of(group.task).identity
    settings = {
        key: value
        for key in identity
        if (value := group.parameters.get(key)) is not None
    }
    counted = [series for series in group.series if group.counts(series)]
    last = [group.last(evidence.own, series) for series in counted]
    for row in own.rows:
        length = row.at.get("length")
        if row.value is None or (
            "task" not in row.at and not any(row is one for one in last)
        ):
            continue
        dataset = one_line(
            row.at.get("task") or group.parameters.get("text") or "generated text"
        )
        name = one_line(
            ", ".join(
                filter(None, [measure_of(row.measure).hub, str(row.at.get("kind", ""))])
            )
        )
        stated = {**row.at, "n": row.n, **({} if "task" in row.at else settings)}
        yield EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=one_line(measure_of(row.measure).hub),
            metric_name=f"{name} at {length:,} tokens" if length else name,
            metric_value=round(row.value, DIGITS),
            metric_args={
                k: one_line(v) if isinstance(v, str) else v for k, v in stated.items()
            },
        )

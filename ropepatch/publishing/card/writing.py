"""Write the card of a checkpoint folder, with figures and the Hub's front matter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
)

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import Row, read_result
from ropepatch.evaluation.tasks import TASKS
from ropepatch.extension import record as records
from ropepatch.files import read_text, whole_file
from ropepatch.model.checkpoint import CODE, Checkpoint
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.publishing.card.model import Evidence, Extended
from ropepatch.report.plots.lines import looks_of, pictures_of_results
from ropepatch.report.plots.style import drawn
from ropepatch.report.printers import markdown_table, one_line, plain
from ropepatch.report.tables import tables_of
from ropepatch.settings import yaml_text

CARD = "README.md"
DIGITS = 4  # after the point, of a metric
ON_THE_HUB = {"found": "accuracy", "acc": "accuracy"}  # measures with another name
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
MARKER = "<!-- written by ropepatch, which writes it anew; without this line it is yours and stays as it is -->"


PLANNED = (
    "method",
    "factor",
    "parameters",
    "original_max_position_embeddings",
    "target",
    "rope_theta",
    "layer_type",
    "attention_factor",
)
WIDTH = 60  # characters of the longest list to print


def write_card(
    folder: Path, repo: str | None = None, revision: str | None = None
) -> list[Path]:
    """Write README.md, its figures and the scores of boards into a folder that ropepatch wrote.

    Each file is written whole. Figures need matplotlib; without it there are none. The user's own README.md
    is kept.
    """
    if is_others(folder / CARD):
        return []
    model = read_folder(folder, repo, revision)
    files: dict[Path, bytes] = {}
    captions = {}
    if find_spec("matplotlib"):
        for evidence in model.evidence:
            look = looks_of([*evidence.group.results.values()])
            for picture in pictures_of_results(evidence.group, look):
                if picture.name == evidence.group.task:
                    file = folder / "evaluation" / f"{evidence.stem}.png"
                    files[file] = drawn(picture.figure, "png")
                    captions[evidence.stem] = picture.caption
    for task, text in board_scores(model).items():
        files[folder / BOARDS / f"{task}.yaml"] = text.encode()
    text = card_text(model, captions)
    # Last: a card never shows missing figures
    files[folder / CARD] = text.encode("utf-8", errors="replace")
    try:
        for task, _ in BENCHMARKS:  # an earlier score that no result supports
            (folder / BOARDS / f"{task}.yaml").unlink(missing_ok=True)
        for file, content in files.items():
            file.parent.mkdir(exist_ok=True)
            with whole_file(file) as partial:
                partial.write_bytes(content)
    except OSError as error:
        raise RopepatchError(
            f"cannot write {folder / CARD}: {error.strerror or error}",
            hint="choose a folder you may write to",
        ) from error
    return [*files]


def is_others(card: Path) -> bool:
    """Whether there is a card that ropepatch did not write."""
    return card.exists() and MARKER not in read_text(card, errors="replace")


def card_text(model: Extended, captions: Mapping[str, str] | None = None) -> str:
    """Render the card; all its numbers are from the record and the results.

    Args:
        model: The checkpoint.
        captions: The captions of its figures, by file stem.
    """
    card = ModelCard.from_template(
        _front_matter(model),
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        plain=plain,
        code=code,
        fenced=fenced,
        one_line=one_line,
        count="{:,}".format,
        method=method,
        tables=tables,
        marker=MARKER,
        code_file=CODE,
        model=model,
        record=model.record,
        trained=model.record.training,
        address=address(model.paper),
        captions=captions or {},
        headline=headline(model),
        warnings=warnings(model),
        plan=plan(model),
        citation=citation(model.paper),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def read_folder(
    folder: Path, repo: str | None = None, branch: str | None = None
) -> Extended:
    """Read what a card tells of a folder that ropepatch wrote."""
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
        model,
        weights=checkpoint.fingerprint,
        loader=checkpoint.stock.loader,
        needs_trust=checkpoint.config.needs_trust,
    )


# The Hub's metadata


def board_scores(model: Extended) -> dict[str, str]:
    """Return the scores for the Hub's boards, in percent, as YAML by task of lm-eval."""
    scores = {}
    for evidence in model.evidence:
        result = evidence.group.results[evidence.own]
        rows = [] if result.parameters.get("limit") else result.rows
        for row in rows:
            task = str(row.at.get("task"))
            board = BENCHMARKS.get((task, row.measure))
            if board is not None and row.value is not None:
                percent = round(100 * row.value, 2)
                entry = EvalResultEntry(*board, percent, notes=f"lm-eval, {task}")
                scores[task] = yaml_text(eval_result_entries_to_yaml([entry]))
    return scores


def _front_matter(model: Extended) -> ModelCardData:
    """Return the metadata."""
    results = [result for evidence in model.evidence for result in _results(evidence)]
    relation = (
        "adapter" if model.is_adapter else "finetune" if model.record.training else None
    )
    return ModelCardData(
        base_model=model.base_id,
        base_model_relation=relation if model.base_id else None,
        **model.record.base.to_dict(),
        library_name="peft" if model.is_adapter else "transformers",
        # The Hub knows those of other heads
        pipeline_tag="text-generation" if model.loader.startswith("Auto") else None,
        tags=[
            "ropepatch",
            "long-context",
            "position-remapping" if model.record.code else "rope-scaling",
            model.record.method,
        ],
        model_name=model.short_name if results else None,
        eval_results=results or None,
    )


def _results(evidence: Evidence) -> Iterator[EvalResult]:
    """Yield the results at the greatest length up to the target, and all lm-eval scores."""
    group, own = evidence.group, evidence.group.results[evidence.own]
    rows = [group.last(evidence.own, one) for one in group.series if group.counts(one)]
    rows += [row for row in own.rows if "task" in row.at]
    for row in rows:
        if row is None or row.value is None:
            continue
        text = row.at.get("task") or group.parameters.get("text") or "generated text"
        metric = name = one_line(ON_THE_HUB.get(row.measure, row.measure))
        if "kind" in row.at:
            name += f", {row.at['kind']}"
        if "length" in row.at:
            name += f" at {row.length:,} tokens"
        yield EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=one_line(text),
            dataset_name=one_line(text),
            metric_type=metric,
            metric_name=name,
            metric_value=round(row.value, DIGITS),
            metric_args={**row.at, "n": row.n},
        )


# Markdown that no name from a file can break


def code(text: object) -> str:
    """Put text between backticks."""
    line = one_line(text)
    ticks = "`" * (_longest_run(line) + 1)
    pad = " " if "`" in line else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def fenced(text: str, language: str) -> str:
    """Put lines into a fenced code block."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


# What was measured


def headline(model: Extended) -> str:
    """Summarise the results at the target, in one sentence per series."""
    sentences = []
    for group, own_name, base_name, _ in model.evidence:
        for series in group.main:
            own = group.last(own_name, series)
            if own is None:
                continue
            at = f"{series.title} at {own.length:,} tokens"
            figures = f"this checkpoint {_figure(own)}"
            if base_name is not None:
                base = group.last(base_name, series)
                figures += f", the base model {_figure(base)}" if base else ""
            sentences.append(plain(f"{at}: {figures}{group.reservation(series)}."))
    return " ".join(sentences)


def _figure(row: Row) -> str:
    interval = f", 95 % interval {row.interval}" if row.interval else ""
    return f"{row.text} (n = {row.n:,}{interval})"


def warnings(model: Extended) -> list[str]:
    """Return the warnings about the results."""
    lines = (
        plain(warning)
        for evidence in model.evidence
        for warning in evidence.group.warnings()
    )
    return list(dict.fromkeys(lines))


def tables(evidence: Evidence) -> str:
    """Return the tables of a comparison."""
    return "\n\n".join(
        f"**{plain(one.caption)}**\n\n{markdown_table(one, evidence.own)}"
        for one in tables_of(evidence.group)
    )


def method(evidence: Evidence) -> str:
    """Describe how a comparison was measured, with the device and the versions."""
    env = evidence.group.results[evidence.own].env
    names = ("device", "dtype", "transformers", "torch")
    machine = ", ".join(f"{name} {env[name]}" for name in names if name in env)
    task = TASKS.find(evidence.group.task)
    return plain(f"{task.method(evidence.group.parameters)} Measured with {machine}.")


# What was done


def plan(model: Extended) -> str:
    """Return the plan in the record, as YAML."""
    content = model.record.to_dict()
    planned = {key: content[key] for key in PLANNED if content.get(key)}
    if not model.is_adapter:
        changes = content["config_changes"].items()
        planned["config_changes"] = {
            key: value for key, value in changes if key not in LEGACY_KEYS
        }
    return fenced(yaml_text(_readable(planned)), "yaml")


def _readable(value: Any) -> Any:
    """Drop empty values and long lists."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and len(str(value)) > WIDTH:
        return "a list, see ropepatch.json"
    return value


# Whom to cite


def address(paper: str) -> str:
    """Return the web address of a paper; empty for a method without one."""
    site = paper.replace("arXiv:", "arxiv.org/abs/")
    return f"https://{site}" if "/" in site else ""


def citation(paper: str) -> str:
    """Return BibTeX for a method's paper, if papers.bib has it, and for ropepatch."""
    text = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8")
    wanted = f"= {{{address(paper)}}}", "@misc{ropepatch,"
    entries = text.strip().split("\n\n")
    found = [one for one in entries if any(part in one for part in wanted)]
    return fenced("\n\n".join(found), "bibtex")

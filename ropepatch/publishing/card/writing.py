"""Write the card of a checkpoint folder, with figures and the Hub's front matter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
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
from ropepatch.evaluation.results import Row, measure_of, read_result
from ropepatch.evaluation.tasks import task_of
from ropepatch.extension import record as records
from ropepatch.extension.record import Training
from ropepatch.files import read_text, whole_file
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.publishing.card.model import Evidence, Extended
from ropepatch.report.plots.lines import Picture, looks_of, pictures_of_results
from ropepatch.report.plots.style import drawn
from ropepatch.report.printers import markdown_rows, markdown_table, one_line, plain
from ropepatch.report.tables import tables_of
from ropepatch.settings import yaml_text

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
    if has_own_card(folder):
        return []
    model = read_folder(folder, repo, revision)
    files: dict[Path, bytes] = {}
    captions = {}
    if find_spec("matplotlib"):
        for evidence, picture in _pictures(model):
            files[folder / evidence.figure] = drawn(picture.figure, "png")
            captions[evidence.stem] = picture.caption
    for task, text in board_scores(model).items():
        files[folder / BOARDS / f"{task}.yaml"] = text.encode()
    text = card_text(replace(model, captions=captions))
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
        code=code,
        fenced=fenced,
        count="{:,}".format,
        method=method,
        tables=tables,
        marker=MARKER,
        model=model,
        record=model.record,
        trained=model.record.training,
        paper=paper(model),
        headline=headline(model),
        warnings=warnings(model),
        engines=markdown_rows(("engine", "supported", "evidence", "note"), engines),
        short_context=short_context(model),
        command=command(model),
        plan=plan(model),
        teaching=teaching(model.record.training),
        citation=citation(model),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


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
        model,
        weights=checkpoint.fingerprint,
        loader=checkpoint.stock.loader,
        needs_trust=checkpoint.config.needs_trust,
    )


def _pictures(model: Extended) -> Iterator[tuple[Evidence, Picture]]:
    """Yield a figure for every comparison by length."""
    look = looks_of(
        [result for part in model.evidence for result in part.group.results.values()]
    )
    for part in model.evidence:
        for picture in pictures_of_results(part.group, look):
            if picture.name == part.group.task:
                yield part, picture


# The Hub's metadata


def board_scores(model: Extended) -> dict[str, str]:
    """Return the scores for the Hub's boards, in percent, as YAML by task of lm-eval."""
    scores = {}
    for evidence in model.evidence:
        result = evidence.group.results[evidence.own]
        for row in result.rows:
            task = str(row.at.get("task"))
            board = BENCHMARKS.get((task, row.measure))
            if board is None or row.value is None or result.parameters.get("limit"):
                continue
            percent = round(100 * row.value, 2)
            entry = EvalResultEntry(*board, percent, notes=f"lm-eval, {task}")
            scores[task] = yaml_text(eval_result_entries_to_yaml([entry]))
    return scores


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
    identity = {key: group.parameters.get(key) for key in task_of(group.task).identity}
    counted = [series for series in group.series if group.counts(series)]
    last = [group.last(evidence.own, series) for series in counted]
    for row in own.rows:
        is_score = "task" in row.at
        if row.value is None or not (is_score or any(row is one for one in last)):
            continue
        text = row.at.get("task") or group.parameters.get("text") or "generated text"
        metric = one_line(measure_of(row.measure).hub)
        name = ", ".join([metric, *([str(row.at["kind"])] if "kind" in row.at else [])])
        length = row.at.get("length")
        stated = {**row.at, "n": row.n, **({} if is_score else identity)}
        yield EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=one_line(text),
            dataset_name=one_line(text),
            metric_type=metric,
            metric_name=f"{name} at {length:,} tokens" if length else name,
            metric_value=round(row.value, DIGITS),
            metric_args={
                key: one_line(value) if isinstance(value, str) else value
                for key, value in stated.items()
                if value is not None
            },
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
            if series.measure == "loss" and (text := group.parameters.get("text")):
                at += f" of {text}"
            figures = f"this checkpoint {_figure(own)}"
            if base_name is not None:
                place = series.at(own.length)
                base = group.results[base_name].row(series.measure, **place)
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
        f"**{plain(one.caption)}**\n\n"
        + markdown_table(one, marked=evidence.own, note=" (this checkpoint)")
        for one in tables_of(evidence.group)
    )


def method(evidence: Evidence) -> str:
    """Describe how a comparison was measured, with the device and the versions."""
    env = evidence.group.results[evidence.own].env
    names = ("device", "dtype", "transformers", "torch")
    machine = ", ".join(f"{name} {env[name]}" for name in names if name in env)
    task = task_of(evidence.group.task)
    return plain(f"{task.method(evidence.group.parameters)} Measured with {machine}.")


def short_context(model: Extended) -> str:
    """Return the outcome of the short-context check; empty for a model that was not trained."""
    if model.record.training is None:
        return ""
    check = model.record.training.short_context
    change = (
        f"{check.base:.3f} nats per token before, {check.now:.3f} after ({check.rise})"
    )
    verdict = (
        check.verdict if check.passed else check.verdict.replace("above", "**above**")
    )
    return f"Short-context check on held-out text{model.folded}: {change}, {verdict}."


# What was done


def command(model: Extended) -> str:
    """Return the command that wrote the checkpoint, if it is recorded."""
    line = model.record.command
    return "" if line is None else fenced(one_line(line), "bash")


def plan(model: Extended) -> str:
    """Return the plan in the record, as YAML."""
    record = model.record
    planned = {
        key: value
        for key in PLANNED
        if (value := getattr(record, key)) not in (None, {})
    }
    if not model.is_adapter:
        changes = record.config_changes.items()
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


def teaching(training: Training | None) -> str:
    """Describe the targets of a self-distillation; empty for other models."""
    distil = training.recipe.get("distil") if training else None
    if training is None or not isinstance(distil, dict):
        return ""
    remapping = distil.get("remapping")
    name = remapping.get("name") if isinstance(remapping, dict) else remapping
    text = (
        "Self-distillation: the targets were the base model's token distributions. "
        f"Beyond its context length, the base model ran with {code(name)}."
    )
    if training.taught:
        kinds = ", ".join(map(code, training.taught))
        text += (
            f" Some sequences asked questions of the kinds {kinds}, in other words than an evaluation asks"
            " them: high accuracy at these is partly learned."
        )
    return text


# Whom to cite


def paper(model: Extended) -> str:
    """Link the method's paper; one that only the record names gets no link, since it is not trusted."""
    if model.known_paper is None:
        return code(model.record.paper) if model.record.paper.strip() else ""
    where = address(model.known_paper)
    return f"[{plain(model.known_paper)}]({where})" if where else ""


def address(paper: str) -> str | None:
    """Return the web address of a paper; None if its site is unknown."""
    if match := re.fullmatch(r"arXiv:(\d{4}\.\d{4,5})", paper):
        return f"https://arxiv.org/abs/{match[1]}"
    return (
        f"https://{paper}" if re.fullmatch(r"[a-z.]+\.[a-z]+/[\w/.-]+", paper) else None
    )


@cache
def entries() -> dict[str, str]:
    """Read the entries of papers.bib, by the addresses of their papers."""
    text = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8")
    return {
        one.rpartition(" {")[2].partition("}")[0]: one
        for one in text.strip().split("\n\n")
    }


def bibtex(paper: str) -> str | None:
    """Return the BibTeX entry of a method's `paper`; None if papers.bib has none."""
    return entries().get(address(paper) or "")


def citation(model: Extended) -> str:
    """Return BibTeX for the method, the base model and ropepatch."""
    found = [bibtex(model.known_paper) if model.known_paper else None]
    if model.base_id:
        owner, _, name = (
            part.replace("_", r"\_") for part in model.base_id.rpartition("/")
        )
        about = {"title": f"{{{name}}}"} | ({"author": f"{{{owner}}}"} if owner else {})
        where = {"note": f"revision {model.record.revision}", "url": model.base_address}
        found.append(_entry("base-model", about | where))
    about = {"title": "{ropepatch: longer context for RoPE checkpoints}"}
    if version := model.record.versions.get("ropepatch"):
        about["note"] = f"version {version}"
    return fenced(
        "\n\n".join(filter(None, [*found, _entry("ropepatch", about)])), "bibtex"
    )


def _entry(key: str, fields: dict[str, str]) -> str:
    lines = [f"  {name:<13} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@misc{{{key},", *lines, "}"])

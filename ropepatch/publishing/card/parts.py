"""The parts of a card, as Markdown: results, method, and citations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ropepatch.evaluation.comparisons import Comparison
from ropepatch.evaluation.results import Row, Series
from ropepatch.evaluation.tasks import task_of
from ropepatch.extension.record import Training
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.publishing.card.model import Evidence, Extended
from ropepatch.report.printers import markdown_table, one_line, plain
from ropepatch.report.tables import perplexity_text, tables_of
from ropepatch.settings import yaml_text

FIGURES = "evaluation/{}.png"  # in the folder of the checkpoint
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
    for evidence in model.evidence:
        for series in evidence.group.main:
            if (own := evidence.group.last(evidence.own, series)) is not None:
                rows = {"this checkpoint": own}
                if (
                    before := evidence.row(series, own.length, evidence.before)
                ) is not None:
                    rows["the base model"] = before
                sentences.append(
                    plain(_sentence(evidence.group, series, own.length, rows))
                )
    return " ".join(sentences)


def _sentence(
    group: Comparison, series: Series, length: int, rows: Mapping[str, Row]
) -> str:
    """Write a sentence on a series of several models at a length."""
    figures = []
    for name, row in rows.items():
        details = []
        if series.measure == "loss" and row.value is not None:
            details.append(f"perplexity {perplexity_text(row.value)}")
        if series.measure == "found":
            details.append(f"n = {row.n:,}")
        if row.interval:
            details.append(f"95 % interval {row.interval}")
        figures.append(
            f"{name} {row.text}" + (f" ({', '.join(details)})" if details else "")
        )
    text = group.parameters.get("text")
    of = f" of {text}" if text and series.measure == "loss" else ""
    return f"{series.title} at {length:,} tokens{of}: {', '.join(figures)}{group.reservation(series)}."


def warnings(model: Extended) -> list[str]:
    """Return the warnings about the results."""
    lines = (
        plain(warning)
        for evidence in model.evidence
        for warning in evidence.group.warnings()
    )
    return list(dict.fromkeys(lines))


class Part(NamedTuple):
    """A section of a card, about one comparison. All texts but the title are Markdown."""

    title: str
    method: str
    table: str
    stem: str
    figure: str


def parts(model: Extended) -> Iterator[Part]:
    """Yield a section for every comparison."""
    for evidence in model.evidence:
        task = task_of(evidence.group.task)
        method = plain(task.method(evidence.group.parameters))
        tables = [
            f"**{plain(one.caption)}**\n\n"
            + markdown_table(one, marked=evidence.own, note=" (this checkpoint)")
            for one in tables_of(evidence.group)
        ]
        yield Part(
            title=task.title,
            method=" ".join(filter(None, [method, _machine(evidence)])),
            table="\n\n".join(tables),
            stem=evidence.stem,
            figure=FIGURES.format(evidence.stem),
        )


def _machine(evidence: Evidence) -> str:
    """Name the device and the versions of an evaluation."""
    env = evidence.group.results[evidence.own].env
    versions = [
        f"{name} {env[name]}" for name in ("transformers", "torch") if name in env
    ]
    place = [
        str(env[name]).removeprefix("torch.")
        for name in ("device", "dtype")
        if name in env
    ]
    return (
        f"Measured on {plain(', '.join([*place, *versions]))}."
        if versions and place
        else ""
    )


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

"""What was measured, in a sentence, in tables and in figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ropepatch.evaluation.comparisons import Comparison
from ropepatch.evaluation.results import Row, measure_of
from ropepatch.evaluation.tasks import task_of
from ropepatch.publishing.card.extended import Evidence, Extended
from ropepatch.report.printers import markdown_table, plain
from ropepatch.report.tables import perplexity_text, row_cell, tables_of

FIGURES = "evaluation/{}.png"  # within the folder of the checkpoint


def headline(model: Extended) -> str:
    """What came out at the target, a sentence for every task that measures by length."""
    sentences = []
    for evidence in model.evidence:
        measure = evidence.group.measure
        if measure is not None and (own := evidence.group.last(evidence.own, measure)) is not None:
            length = own.length
            rows = {"this checkpoint": own}
            if (before := evidence.row(measure, length, evidence.before)) is not None:
                rows["the base model"] = before
            sentences.append(plain(_sentence(evidence.group, measure, length, rows)))
    return " ".join(sentences)


def _sentence(group: Comparison, measure: str, length: int, rows: Mapping[str, Row]) -> str:
    """A measure at a length of each method, by what it is called."""
    figures = []
    for name, row in rows.items():
        details = []
        if measure == "loss" and row.value is not None:
            details.append(f"perplexity {perplexity_text(row.value)}")
        if measure == "found":
            details.append(f"n = {row.n:,}")
        if row.interval:
            details.append(f"95 % interval {row.interval}")
        figures.append(f"{name} {row.text}" + (f" ({', '.join(details)})" if details else ""))
    text = group.parameters.get("text")
    of = f" of {text}" if text and measure == "loss" else ""
    return f"{measure_of(measure).title} at {length:,} tokens{of}: {', '.join(figures)}."


def warnings(model: Extended) -> list[str]:
    """What makes the headline doubtful."""
    lines = (plain(warning) for part in model.evidence for warning in part.group.warnings())
    return list(dict.fromkeys(lines))


class Part(NamedTuple):
    """A section of a card: one comparison. The texts are Markdown, but for the title."""

    title: str
    method: str
    table: str
    stem: str
    figure: str


def parts(model: Extended) -> Iterator[Part]:
    """A section for every comparison."""
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
            method=" ".join(filter(None, [method, _place(evidence)])),
            table="\n\n".join(tables),
            stem=evidence.stem,
            figure=FIGURES.format(evidence.stem),
        )


def _place(evidence: Evidence) -> str:
    """Where this checkpoint was measured."""
    env = evidence.group.results[evidence.own].env
    versions = [f"{name} {env[name]}" for name in ("transformers", "torch") if name in env]
    place = [str(env[name]).removeprefix("torch.") for name in ("device", "dtype") if name in env]
    return f"Measured on {plain(', '.join([*place, *versions]))}." if versions and place else ""


def old_context(model: Extended) -> Iterator[str]:
    """What the extension did to what the model could before."""
    window = model.record.original_max_position_embeddings
    for evidence in model.evidence:
        if (measure := evidence.group.measure) is None:
            continue
        own, before = (evidence.row(measure, window, name) for name in (evidence.own, evidence.before))
        if own is not None and before is not None:
            text = evidence.group.parameters.get("text")
            of = f" of {plain(text)}" if text else ""
            then, now = (plain(row_cell(row).line) for row in (before, own))
            yield f"{measure_of(measure).title} at {window:,} tokens{of}: {then} before, {now} after."
    if model.record.adaptation:
        gate = model.record.adaptation.gate
        change = f"{gate.base:.3f} nats per token before, {gate.now:.3f} after ({gate.increase:+.2%})"
        verdict = f"{'within' if gate.passed else '**beyond**'} the {gate.most:.2%} allowed"
        watched = f"Loss on the text that was watched during the training{model.folded}"
        yield f"{watched}: {change}, {verdict}."

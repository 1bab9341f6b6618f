"""What was measured, in a sentence, in tables and in figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ropepatch.evaluation.table import Table
from ropepatch.evaluation.tasks import task_of
from ropepatch.publishing.card.extended import Evidence, Extended
from ropepatch.report.markdown import markdown_table, plain

FIGURES = "evaluation/{}.png"  # within the folder of the checkpoint


def headline(model: Extended) -> str:
    """What came out at the target, a sentence for each task that tells of lengths."""
    sentences = []
    for evidence in model.evidence:
        if (last := evidence.group.last(evidence.own)) is not None:
            length, own = last
            rows = {"this checkpoint": own}
            if (before := evidence.row(length, evidence.before)) is not None:
                rows["the base model"] = before
            task = task_of(evidence.group.task)
            sentences.append(plain(task.sentence(evidence.group, length, rows, best=False)))
    return " ".join(sentences)


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
        tables = task.tables(evidence.group)
        method = plain(task.method(evidence.group.parameters))
        yield Part(
            title=task.title,
            method=" ".join(filter(None, [method, _cells(tables), _place(evidence)])),
            table=markdown_table(tables, marked=evidence.own, note=" (this checkpoint)"),
            stem=evidence.stem,
            figure=FIGURES.format(evidence.stem),
        )


def _cells(tables: Sequence[Table]) -> str:
    """What stands in a cell where that is several values."""
    captions = [table.caption[0].lower() + table.caption[1:] for table in tables]
    return f"In each cell {', below it '.join(captions)}." if len(captions) > 1 else ""


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
        own, before = (evidence.row(window, name) for name in (evidence.own, evidence.before))
        if own is not None and before is not None:
            caption, cell = next(iter(task_of(evidence.group.task).columns.items()))
            text = evidence.group.parameters.get("text")
            of = f" of {plain(text)}" if text else ""
            yield (
                f"{caption} at {window:,} tokens{of}: {plain(cell(before).line)} before, "
                f"{plain(cell(own).line)} after."
            )
    if model.record.adaptation:
        gate = model.record.adaptation.gate
        change = f"{gate.base:.3f} nats per token before, {gate.now:.3f} after ({gate.increase:+.2%})"
        verdict = f"{'within' if gate.passed else '**beyond**'} the {gate.most:.2%} allowed"
        watched = f"Loss on the text that was watched during the training{model.folded}"
        yield f"{watched}: {change}, {verdict}."

"""The front matter of a card, which the Hub reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ropepatch.evaluation.results import measure_of
from ropepatch.evaluation.tasks import task_of
from ropepatch.publishing.card.extended import Evidence, Extended

DIGITS = 4  # after the point, of a metric


def front_matter(model: Extended) -> str:
    """The metadata as YAML, without the lines around it."""
    results = [result for evidence in model.evidence for result in _results(evidence)]
    base: Any = model.record.base
    relation = "adapter" if model.is_adapter else "finetune" if model.record.adaptation else None
    data = ModelCardData(
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
            "attention-map" if model.code else "rope-scaling",
            model.record.method,
        ],
        model_name=model.short_name if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _results(evidence: Evidence) -> Iterator[EvalResult]:
    """The measures of this checkpoint at the greatest length up to the target, and all scores of lm-eval."""
    group, own = evidence.group, evidence.group.results[evidence.own]
    identity = task_of(group.task).identity
    settings = {key: value for key in identity if (value := group.parameters.get(key)) is not None}
    for row in own.rows:
        length = row.at.get("length")
        last = group.last(evidence.own, row.measure)
        if row.value is None or ("task" not in row.at and row is not last):
            continue
        dataset = str(row.at.get("task") or group.parameters.get("text") or "generated text")
        name = measure_of(row.measure).hub
        yield EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=name,
            metric_name=f"{name} at {length:,} tokens" if length else name,
            metric_value=round(row.value, DIGITS),
            metric_args={**row.at, "n": row.n, **({} if "task" in row.at else settings)},
        )

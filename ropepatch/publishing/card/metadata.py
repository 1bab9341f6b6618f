"""The front matter of a card, which the Hub reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

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
    for metric in task_of(evidence.group.task).metrics(evidence.group, evidence.own):
        kind, name = metric.dataset
        settings: Any = {
            key: round(value, DIGITS) if isinstance(value, float) else value
            for key, value in metric.settings.items()
        }
        yield EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=kind,
            dataset_name=name,
            metric_type=metric.kind,
            metric_name=metric.name,
            metric_value=round(metric.value, DIGITS),
            metric_args=settings,
        )

"""The front matter of a card, which the Hub reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData

from ropepatch.evaluation.tasks import task_of
from ropepatch.publishing.card.evidence import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ropepatch.publishing.card.extended import Evidence, Extended

DIGITS = 4  # after the point, of a metric


def front_matter(made: Extended) -> str:
    """The metadata as YAML, without the lines around it."""
    results = [result for evidence in made.evidence for result in _results(evidence)]
    base: Any = made.record.base
    relation = "adapter" if made.is_adapter else "finetune" if made.record.adaptation else None
    data = ModelCardData(
        base_model=made.base_id,
        base_model_relation=relation if made.base_id else None,
        license=base.license,
        license_name=base.license_name,
        license_link=base.license_link,
        language=base.language,
        library_name="peft" if made.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["ropepatch", "long-context", "rope-scaling", made.record.method],
        model_name=made.short_name if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _results(evidence: Evidence) -> Iterator[EvalResult]:
    group = shown(evidence.group)
    for metric in task_of(group.task).metrics(group, evidence.own):
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

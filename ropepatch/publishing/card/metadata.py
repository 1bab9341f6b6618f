"""The front matter of a card, which the Hub reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData

from ropepatch.publishing.card.names import shown_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ropepatch.evaluation.results import Row
    from ropepatch.publishing.card.extended import Evidence, Extended

DIGITS = 4  # after the point, of a metric
TASK: dict[str, Any] = {"task_type": "text-generation", "task_name": "Text Generation"}
METRICS = {"acc": "accuracy"}  # what the Hub calls a metric of lm-eval, where it has another name for it


def front_matter(made: Extended) -> str:
    """The metadata as YAML, without the lines around it."""
    results = [result for found in made.evidence for result in _results(found)]
    base = made.record.get("base", {})
    relation = "adapter" if made.is_adapter else "finetune" if made.adaptation else None
    data = ModelCardData(
        base_model=made.base_id,
        base_model_relation=relation if made.base_id else None,
        license=base.get("license"),
        license_name=base.get("license_name"),
        license_link=base.get("license_link"),
        language=base.get("language"),
        library_name="peft" if made.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["ropepatch", "long-context", "rope-scaling", made.record["method"]],
        model_name=made.short_name if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _results(found: Evidence) -> Iterator[EvalResult]:
    if found.group.task == "lm-eval":
        for row in found.group.results[found.own].tables["scores"]:
            if row["value"] is not None:
                yield _score(row)
    elif found.last:
        yield (_reading if found.group.task == "perplexity" else _retrieval)(found, *found.last)


def _reading(found: Evidence, length: int, row: Row) -> EvalResult:
    text = shown_name(str(found.group.parameters.get("text", "text")))
    kind, value = ("loss", row["nats"]) if row["perplexity"] is None else ("perplexity", row["perplexity"])
    return _result(found, text, text, kind, value, length, ("protocol", "stride", "bos"))


def _retrieval(found: Evidence, length: int, row: Row) -> EvalResult:
    share = row["correct"] / row["n"]
    asked = ("trials", "depths", "seed", "distractors", "queries")
    return _result(found, "passkey", "pass keys in generated text", "accuracy", share, length, asked)


def _result(
    found: Evidence, kind: str, name: str, metric: str, value: float, length: int, asked: tuple[str, ...]
) -> EvalResult:
    given = found.group.parameters
    told: dict[str, Any] = {key: given[key] for key in asked if given.get(key) is not None}
    return EvalResult(
        **TASK,
        dataset_type=kind,
        dataset_name=name,
        metric_type=metric,
        metric_name=f"{metric} at {length:,} tokens",
        metric_value=round(value, DIGITS),
        metric_args={"length": length} | told,
    )


def _score(row: Row) -> EvalResult:
    told: dict[str, Any] = {key: row[key] for key in ("version", "n") if row.get(key) is not None}
    if row.get("stderr") is not None:
        told["stderr"] = round(row["stderr"], DIGITS)
    return EvalResult(
        **TASK,
        dataset_type=row["task"],
        dataset_name=row["task"],
        metric_type=str(METRICS.get(row["metric"], row["metric"])),
        metric_name=row["metric"],
        metric_value=round(row["value"], DIGITS),
        metric_args=told,
    )

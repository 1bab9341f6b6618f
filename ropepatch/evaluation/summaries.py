"""Results in few numbers, as a checkpoint's record and its card quote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR, Comparison, comparisons
from ropepatch.evaluation.results import Result, as_read
from ropepatch.evaluation.tasks import task_of


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """What is known at the trained context and at the target, by task and label, as JSON-ready data.

    Args:
        results: What was measured of one model for one target.

    Returns:
        ``model``, ``trained`` and ``target`` (both in tokens), and ``tasks``: each with its settings and, by
        label, of perplexity the mean loss in nats over the first ``trained`` and over the first ``target``
        tokens, of passkeys those found in prompts of these lengths, all by length; of lm-eval the scores. A
        length that was not measured gives way to the next below it.

    Raises:
        RopepatchError: No results, or those of several models or targets.
    """
    groups = comparisons(results)
    places = {(group.model, group.trained, group.target) for group in groups}
    if len(places) != 1:
        raise RopepatchError(f"a summary is of one model and one target, got {len(places)} of these")
    ((model, trained, target),) = places
    tasks = [_task(group) for group in groups if group.results]
    content: dict[str, Any] = as_read({"model": model, "trained": trained, "target": target, "tasks": tasks})
    return content


def _task(group: Comparison) -> dict[str, Any]:
    task = task_of(group.task)
    settings = {key: group.parameters[key] for key in task.identity if key in group.parameters}
    floor = {} if group.floor is None else {FLOOR: group.floor}
    results = {name: task.quotation(group, result) for name, result in (floor | dict(group.results)).items()}
    return {"task": group.task, **settings, "results": results}

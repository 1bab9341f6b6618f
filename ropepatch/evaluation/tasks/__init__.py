"""The tasks of evaluation: each one class, and its entry here."""

from __future__ import annotations

from ropepatch.evaluation.tasks.lm_eval import LmEvalTask
from ropepatch.evaluation.tasks.perplexity import PerplexityTask, check_text
from ropepatch.evaluation.tasks.retrieval import RetrievalTask
from ropepatch.evaluation.tasks.task import Measurement, Task, doublings

__all__ = [
    "TASKS",
    "LmEvalTask",
    "Measurement",
    "PerplexityTask",
    "RetrievalTask",
    "Task",
    "check_text",
    "doublings",
    "task_of",
]

TASKS: dict[str, type[Task]] = {task.name: task for task in (PerplexityTask, RetrievalTask, LmEvalTask)}


def task_of(name: str) -> type[Task]:
    """The task of a result; one that shows nothing for a result of another version, which has others."""
    return TASKS.get(name, Task)

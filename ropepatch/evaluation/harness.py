"""Run tasks of lm-eval on a model in memory, without truncation."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.errors import RopepatchError, requiring
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.results import Row
from ropepatch.model.head import evaluating
from ropepatch.settings import nearest

RULER = ("niah_", "ruler")  # the names of its tasks in lm-eval begin so
UNASKED = -1.0  # the value of RULER's tasks for lengths that were not requested


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    include_path: Path,
    metadata: Mapping[str, Any] | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    chat: bool = False,
) -> list[Row]:
    """The metrics of tasks or groups of lm-eval.

    A prompt that lm-eval would truncate raises RopepatchError. The log-likelihood of a whole document leaves
    out a beginning-of-sequence token that the tokenizer adds, which lm-eval would also score. No code of a
    repository is run for the tokenizer. With ``chat`` the prompts are in its chat template.
    """
    lm_eval = _lm_eval("lm_eval")
    with _quiet(), evaluating(model), TemporaryDirectory() as folder:
        reader = _reader(model, _saved(tokenizer, folder), tasks, max_length=max_length)
        values = {
            **(metadata or {}),
            "tokenizer": folder,
            "max_length": reader.max_length,
            "add_bos_token": False,  # see loglikelihood_rolling
        }
        try:
            results = lm_eval.simple_evaluate(
                model=reader,
                tasks=list(tasks),
                task_manager=task_manager(tasks, include_path, values),
                limit=limit,
                apply_chat_template=chat,
                bootstrap_iters=0,  # intervals are over documents
            )
        # A missing package, no room for a prompt next to the answer, no network
        except (ImportError, AssertionError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RopepatchError(
                f"lm-eval cannot run {', '.join(tasks)}: {reason}"
            ) from error
    return [row for task in results["results"] for row in _rows(task, results)]


def _lm_eval(module: str) -> Any:
    with requiring("a task of lm-eval", "ropepatch[eval]"):
        return import_module(module)


@contextmanager
def _quiet() -> Iterator[None]:
    """Run lm-eval quietly."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


def _saved(tokenizer: PreTrainedTokenizerBase, folder: str) -> PreTrainedTokenizerBase:
    """A copy, because lm-eval sets a padding token; also saved, for tasks that load it from the folder."""
    own = copy.deepcopy(tokenizer)
    own.init_kwargs.pop("auto_map", None)  # RULER would run that code
    own.save_pretrained(folder)
    return own


def task_manager(
    tasks: Sequence[str], include_path: Path, metadata: Mapping[str, Any]
) -> Any:
    """The task manager; it lists the thousands of tasks of lm-eval only if they are needed.

    Raises:
        RopepatchError: If a task is unknown.
    """
    for bundled in (False, True):
        manager = _lm_eval("lm_eval.tasks").TaskManager(
            include_path=str(include_path),
            include_defaults=bundled,
            metadata=dict(metadata),
        )
        unknown = [task for task in tasks if task not in manager.all_tasks]
        if not unknown:
            return manager
    near = nearest(unknown[0], manager.all_tasks)
    raise RopepatchError(
        f"lm-eval has no task {', '.join(unknown)}",
        hint=near or "list them with `lm-eval ls tasks`",
    )


def _reader(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    **options: Any,
) -> Any:
    """The model for lm-eval, with errors instead of truncation."""
    huggingface = _lm_eval("lm_eval.models.huggingface")

    class WholePrompts(huggingface.HFLM):  # type: ignore[name-defined,misc]
        """HFLM that raises if a prompt is too long; the original truncates it and logs a warning."""

        add_bos_token: Any  # of HFLM

        def refuse(self, size: int) -> None:
            """Refuse a prompt with its answer that is longer than the model's length."""
            if size > self.max_length:
                raise RopepatchError(
                    f"a prompt of {', '.join(tasks)} takes {size} tokens with its answer, more than the "
                    f"{self.max_length} of the model",
                    hint="use shorter prompts, or extend the model to more",
                )

        def _loglikelihood_tokens(
            self, requests: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # The last token is predicted, but no input.
            sizes = [len(context) + len(answer) - 1 for _, context, answer in requests]
            self.refuse(max(sizes, default=0))
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

        def loglikelihood_rolling(self, requests: Any, **kwargs: Any) -> Any:
            # lm-eval puts a beginning-of-sequence token before the text; a second one, added by the
            # tokenizer, would be predicted and scored (lm-evaluation-harness#3333).
            setting, self.add_bos_token = self.add_bos_token, False
            try:
                return super().loglikelihood_rolling(requests, **kwargs)
            finally:
                self.add_bos_token = setting

        def tok_batch_encode(self, strings: Any, *args: Any, **kwargs: Any) -> Any:
            # The model's length less the answer's
            room = kwargs.pop("left_truncate_len", None)
            ids, mask = super().tok_batch_encode(strings, *args, **kwargs)
            if room is not None:
                self.refuse(ids.shape[1] + self.max_length - room)
            return ids, mask

    return WholePrompts(pretrained=model, tokenizer=tokenizer, **options)


def _rows(task: str, results: Mapping[str, Any]) -> list[Row]:
    """The rows of a task or a group; of means over documents with intervals, Wilson's for a share."""
    scores = results["results"][task]
    at: Any = {"task": task, "version": str(results["versions"].get(task))}
    rows = []
    for key, value in scores.items():
        metric, comma, which = key.partition(",")
        if not comma or not isinstance(value, int | float):
            continue
        samples = [
            sample.get(metric, UNASKED)
            for sample in results["samples"].get(task, [])
            if sample["filter"] == which
        ]
        values = [sample for sample in samples if sample != UNASKED]
        if samples and not values:
            continue
        name = metric if which == "none" else f"{metric} ({which})"
        count = len(values) or scores.get("sample_len") or 0
        low = high = None
        if values and all(isinstance(one, int | float) for one in values):
            # RULER's scores are in [0, 1], which Student's t would leave
            share = task.startswith(RULER) or all(one in (0, 1) for one in values)
            mean = Mean(tuple((float(one), 1.0) for one in values), share=share)
            if math.isclose(value, mean.value):
                _, low, high, _ = mean.figures
        number = float(value) if math.isfinite(value) else None
        rows.append(Row(measure=name, at=at, value=number, low=low, high=high, n=count))
    return rows

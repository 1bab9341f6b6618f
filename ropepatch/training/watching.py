"""Evaluation during training: loss at the original and the target length, and passkeys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.retrieval import retrieve
from ropepatch.extension.record import ShortContextCheck
from ropepatch.progress import Advance, unseen
from ropepatch.training.arguments import engine
from ropepatch.training.run import Run

DEPTHS = 5  # equal parts of the target, with equally many passkeys


def measure(
    run: Run, pieces: Sequence[Tensor], model: PreTrainedModel
) -> dict[str, float]:
    """Measure loss (nats/token) within the original length and at the target, and passkey accuracy.

    Args:
        run: The run.
        pieces: Held-out text, [target] each, or [L] for no loss at the target.
        model: The model.
    """
    watch, target = run.recipe.watch, run.plan.target
    split = engine() is None  # else the model is split over the processes
    measured = {}
    if watch.target and len(pieces[0]) >= target:
        curve = perplexity(model, None, pieces, split=split)
        measured["short_loss"] = curve.at(run.trained).value
        measured["target_loss"] = curve.between(target // 2, target).value
    else:
        short = short_context_loss(run, pieces, model, split=split)
        measured["short_loss"] = short.value
    if watch.target and watch.passkey_trials:
        found = retrieve(
            model,
            run.tokenizer,
            lengths=[target],
            haystacks=DEPTHS * watch.passkey_trials,
            keys=1,
            kinds=("passkey",),
            split=split,
        )
        measured["target_passkey"] = found.found(target).value
    return measured


def short_context_loss(
    run: Run,
    pieces: Sequence[Tensor],
    model: PreTrainedModel,
    advance: Advance = unseen,
    *,
    split: bool,
) -> Mean:
    """Measure the loss (nats/token) of the first L tokens, without running beyond them.

    With ``split``, the processes share the work.
    """
    begins = [piece[: run.trained] for piece in pieces]
    curve = perplexity(model, None, begins, split=split, progress=advance)
    return curve.at(run.trained)


def short_context_check(base: Mean, now: Mean, most: float) -> ShortContextCheck:
    """Compare the losses of two models within the original length, paired by text."""
    change, interval = difference(now, base), None
    if not change.missing:
        low, high = change.interval()
        interval = low / base.value, high / base.value
    return ShortContextCheck.of(base.value, now.value, most, interval)

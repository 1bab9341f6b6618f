"""What a training changed on held-out data, with intervals paired by text or prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ropepatch.evaluation.exam import Exam
from ropepatch.evaluation.intervals import Interval, Mean, difference
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.results import finite
from ropepatch.extension.record import ShortContextCheck
from ropepatch.model.precision import placed
from ropepatch.progress import passes
from ropepatch.training.run import Run


@dataclass(frozen=True)
class Effect:
    """A measurement before and after a training."""

    name: str
    before: Mean
    after: Mean
    higher_is_better: bool

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the change; None with fewer than three texts or prompts."""
        change = difference(self.after, self.before)
        return None if change.missing else change.interval()

    @property
    def is_worse(self) -> bool:
        """Whether the whole interval is on the harmful side of no change."""
        if self.interval is None:
            return False
        low, high = self.interval
        return high < 0 if self.higher_is_better else low > 0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        low, high = self.interval or (None, None)
        found = {"before": self.before.value, "after": self.after.value, "low": low, "high": high}
        return {key: None if value is None else finite(value) for key, value in found.items()}

    def __str__(self) -> str:
        places = ".1%" if self.after.share else ".4f"
        change = format(self.after.value - self.before.value, "+" + places)
        if self.interval is not None:
            low, high = (format(end, "+" + places) for end in self.interval)
            change += f", {low} to {high}"
        return f"{self.name} {self.before.value:{places}} -> {self.after.value:{places}} ({change})"


def measured(run: Run, windows: Sequence[Tensor], exam: Exam, model: Any, stage: str) -> dict[str, Mean]:
    """Measure the losses and answers of a model, by the name of the measurement.

    Args:
        run: The run.
        windows: Held-out texts of the target length.
        exam: The prompts.
        model: The model, which is moved to the device.
        stage: The name of the model, for the progress.
    """
    target, trained = run.plan.target, run.trained
    with run.progress(f"{stage}, held-out data") as advance:
        texts, prompts = passes(advance, [sum(map(len, windows)), exam.tokens])
        curve = perplexity(placed(model, run.processes.device), None, windows, progress=texts)
        answers = exam.of_model(model, progress=prompts)
    found = {
        f"loss within {trained} tokens": curve.at(trained),
        "loss beyond": curve.between(trained, target),
    }
    for kind in exam.kinds:
        found[f"{kind} accuracy"] = answers.found(target, kind)
        found[f"{kind} log-prob"] = answers.log_prob(target, kind)
    return found


def effects(before: dict[str, Mean], after: dict[str, Mean]) -> list[Effect]:
    """Pair the measurements of a model before and after its training."""
    return [
        Effect(name, before[name], after[name], higher_is_better=not name.startswith("loss"))
        for name in before
    ]


def said(found: Sequence[Effect], method: str) -> str:
    """One line on the effects of a training, a warning if one of them is harmful."""
    worse = [effect.name for effect in found if effect.is_worse]
    line = f"trained, against {method} only, on held-out data (95 % intervals): {'; '.join(map(str, found))}"
    if not worse:
        return line
    return f"warning: {line}; significantly worse: {', '.join(worse)}"


def short_context_check(base: Mean, now: Mean, most: float) -> ShortContextCheck:
    """Compare the losses of two models within the original length, paired by text."""
    change, interval = difference(now, base), None
    if not change.missing:
        low, high = change.interval()
        interval = low / base.value, high / base.value
    return ShortContextCheck.of(base.value, now.value, most, interval)

"""Learning without a text: the share of YaRN's excess loss that remains on held-out text, and passkeys.

    python eval/studies/fit/taught_study.py [--only "model=tiny,factor=4"]

`ropepatch.fit` learns on sequences that the model writes itself. Every other one has questions on distant
context, if the model answers such questions within its original length. `--distil` does the same. Results
are measured on windows of TinyStories and of fairy tales, and for tiny on held-out stories, next to the base
model within its original length, the teacher and YaRN; for tiny also on 100 passkeys. No setting was chosen
on the stories and passkeys of tiny. The file also has rows of an earlier fit without questions (no
`questions`), of tiny on its first 24 held-out stories: also learned from stories, and of frequencies only.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.attention import teaching_window
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.fitting.loss import SHORT
from ropepatch.model.checkpoint import Checkpoint as Source
from ropepatch.report.printers import markdown_rows
from ropepatch.training.self_taught import self_taught
from ropepatch.training.supply import SELF_READ

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import (
    FLOOR,
    OWN,
    SHARED,
    Checkpoint,
    Row,
    Study,
    adapted,
    averaged,
    by,
    checkpoint,
    counted,
    excess,
    log_line,
    signed,
    table,
)

BASE, TEACHER, YARN, FIT, DISTIL = "base", "teacher", "yarn", "fit", "distil"
KEYS = 100  # prompts of tiny with one key each
FIRST, TALES = 72, 72  # the first of the held-out stories of tiny after those of the trials, and their number
SEEDS = 3
HOW = ("of", "keys", "rows", "queries", "questions", "within", "reads")  # equal for all seeds of a setting
CASES = (("tiny", 4), ("tiny", 8), ("babyllama-361", 4), ("stories-260k", 4))


class Untried(Checkpoint):
    """tiny with stories and passkeys on which no trial was measured."""

    @property
    def tales(self) -> list[Tale]:
        """Held-out stories after those of the trials."""
        return held_out_tales(self.loaded[1], length=self.target, count=FIRST + self.windows)[FIRST:]

    def keys(self, model: Any, count: int = KEYS, seed: int = 2) -> Row:
        """Passkeys of another seed."""
        return super().keys(model, count, seed)


class OnFairyTales(Checkpoint):
    """A checkpoint that is measured on fairy tales."""

    @cached_property
    def pieces(self) -> list[tuple[int, Any]]:
        """The windows, each with the index of the tale in which it begins."""
        documents = list(stream_documents(SHARED / "texts" / "fairytales"))
        return cut_windows(self.loaded[1], documents, length=self.target, count=self.windows)


def cases(given: Namespace) -> Iterator[Row]:
    """The measurements of each checkpoint."""
    for name, factor in CASES:
        case = checkpoint(name, factor).named | ({"first": FIRST, "windows": TALES} if name == "tiny" else {})
        keys = {"keys": KEYS} if name == "tiny" else {}
        yield from (case | {"of": of} for of in ((FLOOR,) if name == "tiny" else (OWN,)))
        yield from (case | {"of": of} | keys for of in (BASE, TEACHER, YARN))
        for seed in range(SEEDS):
            yield case | {"of": FIT, "queries": True, "questions": True, "within": SHORT, "seed": seed} | keys
        for seed in range(SEEDS) if name == "tiny" else ():
            yield case | {"of": DISTIL, "questions": True, "reads": SELF_READ, "seed": seed} | keys


def measure(case: Row, given: Namespace) -> list[Row]:
    """The row of each text."""
    place = checkpoint(case["model"], case["factor"])
    if "first" in case:
        place = Untried(place.name, place.factor, case["windows"])
    of = case["of"]
    texts: dict[str, Checkpoint] = {"tales": place}
    if place.name != "tiny":
        texts = {"TinyStories": place, "fairy tales": OnFairyTales(place.name, place.factor)}
    if of == FLOOR:
        return [{"text": "tales"} | place.floor()]
    if of == OWN:
        return [{"text": text} | where.through_own_window() for text, where in texts.items()]
    if of == DISTIL:
        source = Source.find(place.place, weights=True)
        recipe = self_taught(source, place.target, None)[0].model_copy(update={"seed": case["seed"]})
        with tempfile.TemporaryDirectory() as work:
            plan = ropepatch.plan(place.place, to=place.target)
            with adapted(plan, recipe, Path(work, "out")) as (trained, record):
                learned = {key: record.get(key) for key in ("found", "gate", "steps", "tokens", "seconds")}
                learned |= {"kinds": [*(record.get("found") or {}).get("answers", {})]}
                return [learned | {"text": "tales"} | place.losses(trained) | place.keys(trained, KEYS)]
    model, learned = place.loaded[0], Row()
    method: Any = "none" if of == BASE else of
    options: Row = {"to": case["target"]}
    if of == TEACHER:
        method, options = "rerope", options | {"window": teaching_window(place.trained)}
    elif of == FIT:
        fitted = ropepatch.fit(place.place, to=case["target"], seed=case["seed"], device="cpu", say=log_line)
        method, options = fitted.plan, {}
        learned = {name: getattr(fitted.scaling, name) for name in ("divisors", "attention_factor")}
        kept = ("start", "decided_by", "held_out", "kinds", "seconds")
        learned |= {key: fitted.record[key] for key in kept}
    with ropepatch.patch(model, method, **options):
        keys = place.keys(model, KEYS) if place.name == "tiny" else {}
        return [learned | {"text": text} | where.losses(model) | keys for text, where in texts.items()]


STUDY = Study(name="fit-taught", about=__doc__, cases=cases, measure=measure)


# The table, for docs/tables.py


def taught_table(rows: list[Row]) -> str:
    """The share of YaRN's excess loss that remains on other text after a fit by self-distillation."""
    groups = []
    for here in by(rows, "model", "factor", "text", "first").values():
        of = {(row["of"], row.get("keys")): row for row in here}
        for (_, keys, *_), seeds in by([row for row in here if row["of"] in (FIT, DISTIL)], *HOW).items():
            references = of.get((FLOOR, None)) or of[OWN, None], of[TEACHER, keys], of[YARN, keys]
            groups.append((averaged(seeds, "all", "short"), seeds, *references, of.get((BASE, keys))))

    def mean_of(place: int) -> Any:
        return lambda group: f"{Mean.of(group[place]['all']).value:.4f}"

    columns = {
        "checkpoint, measured on": lambda group: f"{group[0]['model']}, {group[0]['text']}",
        "factor": lambda group: f"{group[0]['factor']}",
        "n": lambda group: f"{len(group[0]['all'])}",
        "learned": lambda group: (
            ("weights (`--distil`)" if group[0]["of"] == DISTIL else "frequencies")
            + " and queries" * bool(group[0].get("queries"))
            + (f", on {group[0]['rows']}" if group[0].get("rows") else "")
            + (f", with questions for {', '.join(group[0]['kinds'])}" if group[0].get("kinds") else "")
            + (f", {group[0]['within']:.0%} of the weight within L" if group[0].get("within") else "")
            + (f", text read {group[0]['reads']} times" if group[0].get("reads") else "")
            + "; it answers no questions" * bool(group[0].get("questions") and not group[0].get("kinds"))
        ),
        "reference loss": mean_of(2),
        "teacher's loss": mean_of(3),
        "YaRN's loss": mean_of(4),
        "loss": mean_of(0),
        "YaRN's excess loss remaining": lambda group: left(group[0], group),
        "by seed": lambda group: ", ".join(left(row, group).split(" ")[0] for row in group[1]),
        "loss less YaRN's": lambda group: signed(excess(group[0], group[4])),
        "the same, first L tokens": lambda group: signed(excess(group[0], group[4], "short")),
        "first L tokens, less the base model's": lambda group: cost(group[0], group[5]),
        "passkey accuracy, answer log-prob": lambda group: "; ".join(found(row) for row in group[1]),
        "YaRN's": lambda group: found(group[4]),
        "passkey accuracy less YaRN's": lambda group: ", ".join(more(row, group[4]) for row in group[1]),
    }
    return table(groups, columns)


def in_short(rows: list[Row]) -> str:
    """The results of tiny without a text, by factor and command, next to YaRN's."""
    lines = []
    for (factor,), here in by([row for row in rows if "first" in row], "factor").items():
        of = {row["of"]: row for row in here}
        for name in (FIT, DISTIL):
            if seeds := [row for row in here if row["of"] == name]:
                groups = (averaged(seeds, "all", "short"), seeds, of[FLOOR], of[TEACHER], of[YARN], of[BASE])
                lines.append(
                    {
                        "": f"`{name}`" if name == FIT else "`--distil`",
                        "to": f"{seeds[0]['target']:,} tokens ({factor} x)",
                        "held-out stories": f"{len(of[YARN]['all'])}",
                        "passkey accuracy by seed, n = 100": ", ".join(keys_of(row) for row in seeds),
                        "YaRN's passkey accuracy": keys_of(of[YARN]),
                        "YaRN's excess loss remaining": left(groups[0], groups),
                        "loss within the original length, less the base model's": cost(groups[0], of[BASE]),
                    }
                )
    return markdown_rows([*lines[0]], [[*line.values()] for line in lines]) if lines else "Not measured yet."


def keys_of(row: Row) -> str:
    """The number of correct passkeys."""
    found = Mean.of(row["found"])
    return f"{found.value * found.weight:.0f}"


def cost(fit: Row, base: Row | None) -> str:
    """The cost within the original length, also as a share of the base model's loss there."""
    if base is None:
        return "–"
    lost = excess(fit, base, "short")
    return f"{signed(lost)}, {lost.value / Mean.of(base['short']).value:.1%}"


def more(fit: Row, yarn: Row) -> str:
    """The difference in passkey accuracy, paired by prompt."""
    if "log_prob" not in fit:
        return "–"
    gain = difference(Mean.of(fit["found"]), Mean.of(yarn["found"]))
    low, high = gain.interval()
    return f"{gain.value:+.0%} [{low:+.0%}, {high:+.0%}]"


def left(fit: Row, group: Any) -> str:
    """The remaining share of YaRN's excess loss, with its interval over documents."""
    base, yarn = group[2], group[4]
    over, before = (excess(row, base).clusters for row in (fit, yarn))
    mean = Mean(tuple((part, whole) for (part, _), (whole, _) in zip(over, before, strict=True)))
    low, high = mean.interval()
    return f"{mean.value:.0%} [{low:.0%}, {high:.0%}]"


def found(row: Row) -> str:
    """The passkey accuracy, and the mean log-prob of the answers' tokens."""
    if "log_prob" not in row:
        return "–"
    return f"{counted(Mean.of(row['found'], share=True))}, {Mean.of(row['log_prob']).value:.3f} nats"


if __name__ == "__main__":
    STUDY.main()

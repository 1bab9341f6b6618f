"""The tables of `pages_study.py`, from its rows; the study prints them, docs/tables.py writes them.

A row is a page with a method: `losses` has the sum of each block, and `KIND LENGTH` the answers. Kinds of
questions are never pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any

from study import Row, counted, signed

from ropepatch.data.haystack import KINDS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean, difference, significant
from ropepatch.evaluation.results import BASELINE
from ropepatch.evaluation.retrieval import why_not_counted
from ropepatch.report.printers import markdown_rows

# The scaling with which all others are compared at the target length
REFERENCE = "yarn"
Pages = Mapping[int, Row]  # the rows of a method by page
Of = Callable[[Row], tuple[float, float]]  # a sum over a page, and its weight


def mean(pages: Pages, of: Of, *, share: bool = False) -> Mean:
    """A mean whose clusters are pages."""
    return Mean(tuple(of(pages[number]) for number in sorted(pages)), share)


def log_prob(row: Row, kind: str, *lengths: int) -> tuple[float, float]:
    """The sum of the answer log-probs, and their number."""
    every = [
        value for length in lengths for value in row[f"{kind} {length}"]["log_prob"]
    ]
    return sum(every), float(len(every))


def found(row: Row, kind: str, *lengths: int) -> tuple[float, float]:
    """The number of correct answers, and of all answers; of quotes, of tokens."""
    cells = [row[f"{kind} {length}"] for length in lengths]
    right = sum(float(one) for cell in cells for one in cell["found"])
    parts = sum(len(cell["found"]) * cell.get("parts", 1) for cell in cells)
    return right, float(parts)


def answers_of(
    measure: Callable[..., tuple[float, float]], kind: str, *lengths: int
) -> Of:
    """A measure of the answers of a kind at some lengths."""
    return lambda row: measure(row, kind, *lengths)


def block_of(window: int) -> int:
    """The number of tokens in a block of losses, for an original length."""
    return min(512, window // 4)


def loss(row: Row, begin: int, end: int, block: int) -> tuple[float, float]:
    """The sum of the losses of tokens ``begin`` to ``end``, and their number."""
    blocks = row["losses"][begin // block : end // block]
    return sum(blocks), float(block * len(blocks))


def over(pages: Pages, base: Pages, of: Of, *, share: bool = False) -> Mean:
    """The difference from a base, paired by page, over the pages that both have."""
    both = sorted(pages.keys() & base.keys())
    share = share and not any(
        "seeds" in row for row in pages.values()
    )  # means are no counts
    first, second = (
        mean({one: rows[one] for one in both}, of, share=share)
        for rows in (pages, base)
    )
    return difference(first, second)


def kinds_of(row: Row) -> list[str]:
    """The kinds of questions in a row."""
    return list(
        dict.fromkeys(
            key.partition(" ")[0] for key in row if key.partition(" ")[0] in KINDS
        )
    )


def lengths_of(row: Row) -> list[int]:
    """The lengths of the prompts in a row."""
    first = kinds_of(row)[0]
    return sorted(
        int(key.removeprefix(first)) for key in row if key.startswith(f"{first} ")
    )


def keys_of(row: Row) -> int:
    """The number of questions of each kind at each length."""
    return len(row[f"{kinds_of(row)[0]} {lengths_of(row)[0]}"]["found"])


def of_seeds(rows: Sequence[Row]) -> Row:
    """A row with the mean of each answer and block over trainings that differ in their seed."""
    mean = dict(rows[0]) | {"seeds": len(rows)}
    taught = [{*row.get("taught", [])} for row in rows]
    mean["taught"] = sorted(set.intersection(*taught))
    mean["partly taught"] = sorted(set.union(*taught) - set.intersection(*taught))
    mean["losses"] = [
        fmean(of) for of in zip(*(row["losses"] for row in rows), strict=True)
    ]
    for kind, length in product(kinds_of(mean), lengths_of(mean)):
        place = f"{kind} {length}"
        mean[place] = dict(mean[place])
        for name in ("found", "log_prob"):
            answers = zip(*(row[place][name] for row in rows), strict=True)
            mean[place][name] = [fmean(map(float, of)) for of in answers]
    return mean


def over_seeds(methods: Mapping[str, Pages]) -> dict[str, Pages]:
    """The rows by method and page; of trainings NAME-0, NAME-1 ... the mean of those with the page, as NAME."""
    whole: dict[str, Pages] = {}
    trained: dict[str, dict[int, list[Row]]] = {}
    for method, pages in methods.items():
        name, _, seed = method.rpartition("-")
        if not seed.isdecimal():
            whole[method] = pages
            continue
        for page, row in pages.items():
            trained.setdefault(name, {}).setdefault(page, []).append(row)
    of_all = {
        name: {page: of_seeds(rows) for page, rows in sorted(pages.items())}
        for name, pages in trained.items()
    }
    return whole | of_all


@dataclass(frozen=True)
class Outcome:
    """The rows of one model at one target length.

    Args:
        rows: The rows of the study.
        window: The original context length L in tokens.
        target: The target length N in tokens.
    """

    rows: list[Row]
    window: int
    target: int

    @cached_property
    def methods(self) -> dict[str, Pages]:
        """The rows of each method by page, the baseline first."""
        methods: dict[str, dict[int, Row]] = {BASELINE: {}}
        for row in self.rows:
            if row["target"] == self.target:
                methods.setdefault(row["method"], {})[row["page"]] = row
        if not any(methods.values()):
            raise RopepatchError(
                f"the file has no page of this model to {self.target} tokens"
            )
        return over_seeds(methods)

    @cached_property
    def first(self) -> Row:
        """Any row, for the settings that all have in common."""
        return next(row for pages in self.methods.values() for row in pages.values())

    @property
    def within(self) -> list[int]:
        """The lengths within the original context length."""
        return [length for length in lengths_of(self.first) if length <= self.window]

    @cached_property
    def not_counted(self) -> dict[str, str]:
        """The reason for each kind of question that does not count; see `why_not_counted`."""
        base, keys = self.methods[BASELINE], keys_of(self.first)
        if not base:  # nothing is known
            return {}
        reasons = {}
        for kind in kinds_of(self.first):
            shares = {
                n: mean(base, answers_of(found, kind, n), share=True)
                for n in self.within
            }
            reasons[kind] = why_not_counted(
                shares, kind=kind, keys=keys, trained=self.window
            )
        return {kind: reason for kind, reason in reasons.items() if reason}

    def by_log_prob(self, kind: str) -> list[str]:
        """The methods by answer log-prob at the target length, the best first."""
        of = answers_of(log_prob, kind, self.target)
        nats = {
            name: mean(pages, of).value for name, pages in self.methods.items() if pages
        }
        return sorted(nats, key=lambda name: -nats[name])

    @cached_property
    def contrasts(self) -> dict[tuple[str, str, str], Mean]:
        """The answers within the original length less the baseline's, and at the target length less yarn's.

        Keys: the kind, the method, and `within` or `target` with `nats` or `share` (accuracy).
        """
        bases = {
            "within": (BASELINE, self.within),
            "target": (REFERENCE, [self.target]),
        }
        return {
            (kind, name, f"{place} {measure}"): over(
                pages, self.methods[base], answers_of(of, kind, *at), share=of is found
            )
            for kind in kinds_of(self.first)
            for name, pages in self.methods.items()
            for place, (base, at) in bases.items()
            for measure, of in (("nats", log_prob), ("share", found))
            if name != base and pages.keys() & self.methods.get(base, {}).keys() and at
        }

    @cached_property
    def apart(self) -> set[Any]:
        """The significant contrasts of the log-prob of the kinds that count, by Holm's procedure."""
        return significant({place: self.contrasts[place] for place in self.tested})

    @property
    def tested(self) -> list[tuple[str, str, str]]:
        """The contrasts of the log-prob of the kinds that count; those of accuracy are tested alone."""
        return [
            place
            for place in self.contrasts
            if place[0] not in self.not_counted and place[2].endswith("nats")
        ]

    def cell(self, *place: str) -> str:
        """A contrast as text."""
        if place not in self.contrasts:
            return ""
        one = self.contrasts[place]
        text = points(one) if place[2].endswith("share") else signed(one)
        return text + "*" * (place in self.apart)


def answers_tables(outcome: Outcome) -> str:
    """Tables of accuracy and log-prob by kind and length, the best at the target length first."""
    return "\n\n".join(_answers(outcome))


def _answers(outcome: Outcome) -> Iterator[str]:
    lengths = lengths_of(outcome.first)
    for kind in kinds_of(outcome.first):
        reason = outcome.not_counted.get(kind)
        yield f"`{kind}`, {KINDS[kind].title}" + (
            f"; *not counted*: {reason}:" if reason else ":"
        )
        lines = []
        for name in outcome.by_log_prob(kind):
            line = [f"`{name}`" if name != BASELINE else name]
            for length in lengths:
                share = mean(
                    outcome.methods[name], answers_of(found, kind, length), share=True
                )
                nats = mean(
                    outcome.methods[name], answers_of(log_prob, kind, length)
                ).value
                line.append(f"{counted(share)}, {nats:.2f}")
            lines.append(line)
        yield markdown_rows(["", *(f"{length:,}" for length in lengths)], lines)


def contrasts_table(outcome: Outcome) -> str:
    """The contrasts of each method by kind; see `Outcome.contrasts`."""
    heads = [
        *("kind", "", "prompts"),
        *(
            "within the original length: answer log-prob less the baseline's",
            "accuracy, points",
        ),
        *(
            f"at {outcome.target:,}: answer log-prob less {REFERENCE}'s",
            "accuracy, points",
        ),
    ]
    parts = ("within nats", "within share", "target nats", "target share")
    lines = [
        [
            kind + " (not counted)" * (kind in outcome.not_counted),
            f"`{name}`" if name != BASELINE else name,
            str(len(outcome.methods[name])),
            *(outcome.cell(kind, name, part) for part in parts),
        ]
        for kind in kinds_of(outcome.first)
        for name in outcome.by_log_prob(kind)
    ]
    return markdown_rows(heads, lines)


def gains_table(outcome: Outcome, trained: str) -> str:
    """The gain of a training over the reference at the target length, by kind; taught kinds less the others."""
    pages, base = outcome.methods[trained], outcome.methods[REFERENCE]
    both = sorted(pages.keys() & base.keys())
    first = next(iter(pages.values()))
    taught = first.get("taught", [])
    told = dict.fromkeys(first.get("partly taught", []), "taught by some seeds")
    told |= dict.fromkeys(taught, "taught")
    lines, gains = [], dict[str, list[float]]()
    for kind in kinds_of(outcome.first):
        of = answers_of(found, kind, outcome.target)
        shares = [
            mean({page: rows[page] for page in both}, of, share=True)
            for rows in (base, pages)
        ]
        gains[kind] = [
            (new - old) / weight
            for (old, weight), (new, _) in zip(
                *(one.clusters for one in shares), strict=True
            )
        ]
        lines.append(
            [
                f"`{kind}`",
                told.get(kind, "not taught"),
                *(counted(share) for share in shares),
                *(
                    outcome.cell(kind, trained, f"target {of}")
                    for of in ("share", "nats")
                ),
            ]
        )
    if taught:
        practice = [
            fmean(gains[kind][page] for kind in gains if kind in taught)
            - fmean(gains[kind][page] for kind in gains if kind not in told)
            for page in range(len(both))
        ]
        cell = points(Mean(tuple((gain, 1.0) for gain in practice)))
        lines.append(["", "taught less not taught", "", "", cell, ""])
    heads = ["kind", "", f"`{REFERENCE}`", f"`{trained}`"]
    return markdown_rows(
        [*heads, "more, in points", "more log-prob (nats/token)"], lines
    )


def trials_table(
    outcome: Outcome, heads: Sequence[str], cells: Mapping[str, Sequence[str]]
) -> str:
    """The gain of each training over the reference, by kind, after cells that say what it is."""
    base, kinds = outcome.methods[REFERENCE], kinds_of(outcome.first)
    heads = [
        *heads,
        *(f"`{kind}` at {outcome.target:,}" for kind in kinds),
        f"`{kinds[0]}` at {outcome.window:,}",
    ]
    lines = []
    of = answers_of(found, kinds[0], outcome.window)
    for name, about in cells.items():
        if name in outcome.methods:
            gains = [outcome.cell(kind, name, "target share") for kind in kinds]
            within = points(over(outcome.methods[name], base, of))
            lines.append([*about, *gains, within])
    return markdown_rows(heads, lines)


def points(share: Mean) -> str:
    """A difference of shares in points, with its interval."""
    low, high = share.interval()
    return f"{100 * share.value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def losses_table(outcome: Outcome) -> str:
    """The loss of each method less the baseline's, beyond and within the original length."""
    methods, block = dict(outcome.methods), block_of(outcome.window)
    base = methods.pop(BASELINE)
    parts: dict[str, Of] = {
        "loss beyond the original length": lambda row: loss(
            row, outcome.window, outcome.target, block
        ),
        "loss within it": lambda row: loss(row, 0, outcome.window, block),
    }
    gains = {
        (part, name): over(pages, base, of)
        for part, of in parts.items()
        for name, pages in methods.items()
    }
    apart = significant(gains)
    beyond, _ = parts
    lines = [
        [
            f"`{name}`",
            str(len(methods[name].keys() & base.keys())),
            *(
                signed(gains[part, name]) + "*" * ((part, name) in apart)
                for part in parts
            ),
        ]
        for name in sorted(methods, key=lambda name: gains[beyond, name].value)
    ]
    return markdown_rows(["", "prompts", *parts], lines)


def in_short(outcome: Outcome) -> str:
    """By kind: the cost of yarn within the original length, and the best method beyond it."""
    lines = []
    for kind in kinds_of(outcome.first):
        if kind in outcome.not_counted:
            lines.append(f"- `{kind}` is not counted: {outcome.not_counted[kind]}.")
            continue
        others = (name for name in outcome.by_log_prob(kind) if name != REFERENCE)
        best = next(others, REFERENCE)
        within, beyond = (
            "answer log-prob {}, accuracy {} points".format(
                *(outcome.cell(kind, *at, f"{place} {of}") for of in ("nats", "share"))
            )
            for *at, place in ((REFERENCE, "within"), (best, "target"))
        )
        lines.append(
            f"- `{kind}`: within the original length `{REFERENCE}` less the baseline: {within}; "
            f"at {outcome.target:,} tokens `{best}` less `{REFERENCE}`: {beyond}."
        )
    note = (
        "Paired by prompt; a star: a log-prob different from 0 at an error rate of 5 % over all "
        f"{len(outcome.tested)} contrasts (Holm); accuracy is tested alone."
    )
    return "\n".join([*lines, "", note])


def measured(
    record: Mapping[str, Any], outcome: Outcome, model: str, command: str, file: str
) -> str:
    """The line under a table: model, size, n, kinds, interval, machine, date, command and file."""
    pages = max(map(len, outcome.methods.values()))
    n = pages * keys_of(outcome.first)
    used = {
        row["recorded"] for rows in outcome.methods.values() for row in rows.values()
    }
    starts = [record["recorded"][number] for number in sorted(used)]
    dates = sorted({start["date"] for start in starts})
    machines = {device for start in starts for device in _machines(start)}
    kinds = ", ".join(kinds_of(outcome.first))
    return (
        f"{model}; {pages} prompts, n = {n} answers of each kind ({kinds}) and length; "
        f"95 % intervals over prompts; {outcome.first['dtype']} on {', '.join(sorted(machines))}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; `{command}`; {file}."
    )


def _machines(start: Mapping[str, Any]) -> Iterator[str]:
    if "env" in start:
        yield from (env["device"] for env in start["env"].values())
    else:
        yield start.get("gpu") or start["cpu"]


def all_tables(rows: list[Row], window: int, target: int) -> str:
    """The tables of one model at one target length, each below its title."""
    outcome = Outcome(rows, window, target)
    apart = "a star: different from 0, at an error rate of 5 % over the table (Holm)"
    parts = {
        "Retrieval accuracy (95 % interval over prompts), and the mean answer log-prob": answers_tables(
            outcome
        ),
        f"Paired by prompt; {apart}; accuracy is tested alone": contrasts_table(
            outcome
        ),
        f"Loss (nats/token) less the baseline's, paired by prompt; {apart}": losses_table(
            outcome
        ),
        "In short": in_short(outcome),
    }
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in parts.items())

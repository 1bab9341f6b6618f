"""The tables of the study of position encodings, for docs/tables.py.

Losses are nats/token above the floor, the least possible loss on the same tokens: means over seeds, with
minimum and maximum if there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from encoding_properties import MEANINGS, parameters_of, properties_of
from study import table

from ropepatch.encodings import ENCODINGS

Row = Mapping[str, Any]
Run = tuple[str, list[Row]]


def from_scratch(rows: Sequence[Row]) -> Iterator[Run]:
    """The runs from scratch of each encoding, one per seed, in the order of the registry."""
    for name in ENCODINGS:
        runs = [row for row in rows if row["study"] == "scratch" and row["encoding"] == name]
        if runs:
            yield name, sorted(runs, key=lambda row: row["seed"])


def lengths(rows: Sequence[Row]) -> list[str]:
    """The measured lengths, ascending."""
    return sorted(rows[0]["nats"], key=int)


def excess(row: Row, length: str) -> float:
    """The excess loss up to a length, in nats per token."""
    return float(row["nats"][length] - row["floor"]["nats"][length])


def recall(row: Row, length: str, span: str) -> float | None:
    """The excess loss of tokens that repeat a fact, near (within the original length) or farther back."""
    found, least = row["told"][span][length]["nats"], row["floor"]["told"][span][length]["nats"]
    return None if found is None else found - least


def spread(values: Sequence[float | None], form: str = "{:.3f}") -> str:
    """The mean, with minimum and maximum if there are several values."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = form.format(sum(known) / len(known))
    return mean if len(known) == 1 else f"{mean} ({form.format(min(known))} to {form.format(max(known))})"


def keys(runs: Sequence[Row], length: str) -> str:
    """The correct passkeys, of all."""
    correct, count = (sum(row["keys"][length][part] for row in runs) for part in (0, 1))
    return f"{correct}/{count}"


def of_runs(value: Callable[..., float | None], *where: str) -> Callable[[Run], str]:
    """A cell with a value over the seeds."""
    return lambda run: spread([value(row, *where) for row in run[1]])


def loss_table(rows: Sequence[Row]) -> str:
    """The excess loss by length, with a line for each encoding."""
    columns = {"encoding": lambda run: f"`{run[0]}`", "seeds": lambda run: f"{len(run[1])}"}
    columns |= {f"{length} tokens": of_runs(excess, length) for length in lengths(rows)}
    return table(from_scratch(rows), columns)


def recall_table(rows: Sequence[Row]) -> str:
    """The excess loss of repeated facts and the passkey accuracy by length, with a line for each encoding."""
    at = lengths(rows)
    shown = [(at[0], "near"), (at[2], "near"), (at[2], "far"), (at[-1], "near"), (at[-1], "far")]
    columns: dict[str, Callable[[Run], str]] = {"encoding": lambda run: f"`{run[0]}`"}
    columns |= {f"{span}, {length}": of_runs(recall, length, span) for length, span in shown}
    columns |= {
        f"passkey accuracy at {length}": lambda run, length=length: keys(run[1], length) for length in at
    }
    columns["minutes of training"] = lambda run: spread(
        [row["seconds"] and row["seconds"] / 60 for row in run[1]], "{:.1f}"
    )
    return table(from_scratch(rows), columns)


def recalibration_table(rows: Sequence[Row]) -> str:
    """The model trained with RoPE under other encodings, before and after the further steps."""
    at = lengths(rows)
    again = [row for row in rows if row["study"] == "recalibrated"]
    items = [(row, when, at) for row in again for when, at in (("before", row["before"]), ("after", row))]
    columns: dict[str, Callable[[Any], str]] = {
        "encoding": lambda one: f"`{one[0]['encoding']}`",
        "sequences of": lambda one: f"{one[0]['window']}",
        "": lambda one: one[1],
    }
    columns |= {f"{n} tokens": lambda one, n=n: f"{excess(one[2], n):.3f}" for n in at}
    columns |= {f"passkey accuracy at {n}": lambda one, n=n: keys([one[2]], n) for n in at}
    return table(items, columns)


def cost_table(result: dict[str, Any]) -> str:
    """The time and memory of each encoding relative to stock RoPE."""
    cells = {(cell["encoding"], cell["tokens"]): cell for cell in result["cells"]}
    at = sorted({tokens for _, tokens in cells})
    ratio, memory = "{median:.2f} ({min:.2f} to {max:.2f})", "{memory_ratio:.2f} ({mib:.0f} MiB)"
    columns: dict[str, Callable[[str], str]] = {"encoding": lambda name: f"`{name}`"}
    for kind in ("step", "forward"):
        columns |= {
            f"{kind}, {n:,} tokens": lambda name, at=(n, kind): ratio.format(
                **cells[name, at[0]][at[1]]["ratio"]
            )
            for n in at
        }
    columns |= {f"memory, {n:,} tokens": lambda name, n=n: memory.format(**cells[name, n]) for n in at}
    return table(dict.fromkeys(name for name, _ in cells), columns)


def properties_table() -> str:
    """The properties of each encoding, measured anew, and the number of its parameters."""
    words = {True: "yes", False: "no", None: "–"}
    columns: dict[str, Callable[[Any], str]] = {"encoding": lambda one: f"`{one[0]}`"}
    for name in MEANINGS:
        columns[name.replace("_", " ")] = lambda one, name=name: words[one[2][name].holds]
    columns["parameters"] = lambda one: f"{parameters_of(one[1]):,}"
    return table([(name, kind, properties_of(kind)) for name, kind in ENCODINGS.items()], columns)

"""What the study of position encodings found: its tables and its figure, which docs/tables.py writes.

Losses are nats per token above the least that any model can have on the same tokens; means over seeds, with
the least and the greatest of them where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from encoding_gallery import TRAINED, from_scratch, mean_curves, plot_extrapolation
from encoding_properties import MEANINGS, properties_of

from ropepatch.encodings import ENCODINGS
from ropepatch.report.printers import markdown_rows

Row = Mapping[str, Any]


def lengths(rows: Sequence[Row]) -> list[str]:
    """The lengths at which all was read, ascending."""
    return sorted(rows[0]["nats"], key=int)


def excess(row: Row, length: str) -> float:
    """Nats per token before a length, above the floor."""
    return float(row["nats"][length] - row["floor"]["nats"][length])


def recall(row: Row, length: str, span: str) -> float | None:
    """The same of the tokens that repeat what the tale has told, near (within the window) or farther back."""
    found, least = row["told"][span][length]["nats"], row["floor"]["told"][span][length]["nats"]
    return None if found is None else found - least


def loss_table(rows: Sequence[Row]) -> str:
    """Excess loss by length, a line per encoding, as Markdown."""
    at = lengths(rows)
    return markdown_rows(
        ["encoding", "seeds", *(f"{length} tokens" for length in at)],
        [
            [f"`{name}`", str(len(runs)), *(_spread([excess(row, length) for row in runs]) for length in at)]
            for name, runs in from_scratch(rows)
        ],
    )


def recall_table(rows: Sequence[Row]) -> str:
    """Told tokens and passkeys by length, a line per encoding, as Markdown."""
    at = lengths(rows)
    shown = [(at[0], "near"), (at[2], "near"), (at[2], "far"), (at[-1], "near"), (at[-1], "far")]
    return markdown_rows(
        [
            "encoding",
            *(f"{span}, {length}" for length, span in shown),
            *(f"keys at {length}" for length in at),
            "minutes of training",
        ],
        [
            [
                f"`{name}`",
                *(_spread([recall(row, length, span) for row in runs]) for length, span in shown),
                *(_keys(runs, length) for length in at),
                _spread([row["seconds"] and row["seconds"] / 60 for row in runs], "{:.1f}"),
            ]
            for name, runs in from_scratch(rows)
        ],
    )


def recalibration_table(rows: Sequence[Row]) -> str:
    """The trained rope with other encodings, before and after their steps, as Markdown."""
    at = lengths(rows)
    lines = []
    for row in (row for row in rows if row["study"] == "recalibrated"):
        for when, read in (("before", row["before"]), ("after", row)):
            lines.append(
                [
                    f"`{row['encoding']}`",
                    str(row["window"]),
                    when,
                    *(f"{excess(read, length):.3f}" for length in at),
                    *(_keys([read], length) for length in at),
                ]
            )
    return markdown_rows(
        [
            "put in",
            "rows of",
            "",
            *(f"{length} tokens" for length in at),
            *(f"keys at {length}" for length in at),
        ],
        lines,
    )


def cost_table(result: dict[str, Any]) -> str:
    """Time and memory of each encoding against the stock rope, as Markdown."""
    cells = {(cell["encoding"], cell["tokens"]): cell for cell in result["cells"]}
    at = sorted({tokens for _, tokens in cells})
    heads = [f"{what}, {tokens:,} tokens" for what in ("step", "forward", "memory") for tokens in at]
    lines = []
    for name in dict.fromkeys(encoding for encoding, _ in cells):
        line = [f"`{name}`"]
        for kind in ("step", "forward"):
            ratios = (cells[name, tokens][kind]["ratio"] for tokens in at)
            line += [f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for one in ratios]
        line += [
            f"{cells[name, tokens]['memory_ratio']:.2f} ({cells[name, tokens]['mib']:.0f} MiB)"
            for tokens in at
        ]
        lines.append(line)
    return markdown_rows(["encoding", *heads], lines)


def _keys(runs: Sequence[Row], length: str) -> str:
    found, asked = (sum(row["keys"][length][part] for row in runs) for part in (0, 1))
    return f"{found}/{asked}"


def _spread(values: Sequence[float | None], form: str = "{:.3f}") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = form.format(sum(known) / len(known))
    return mean if len(known) == 1 else f"{mean} ({form.format(min(known))} to {form.format(max(known))})"


def properties_table() -> str:
    """Which properties each encoding has, measured anew, and what it costs, as Markdown."""
    words = {True: "yes", False: "no", None: "–"}
    rows = []
    for name, kind in ENCODINGS.items():
        measured = properties_of(kind)
        cells = [words[one.holds] for one in measured.findings().values()]
        counts = [f"{getattr(measured, count):,}" for count in ("parameters", "per_token", "per_pair")]
        rows.append([f"`{name}`", *cells, *counts])
    return markdown_rows(["encoding", *(name.replace("_", " ") for name in MEANINGS)], rows)


def figure(rows: Sequence[Row]) -> Any:
    """Losses by length of what was trained from scratch."""
    means, floor = mean_curves(rows)
    return plot_extrapolation(means, TRAINED, floor)

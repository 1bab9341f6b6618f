"""What the study of position encodings found: tables and the figure from its result file.

    python eval/studies/encodings/encoding_tables.py eval/results/encodings.json --figures eval/results

Losses are nats per token above the least that any model can have on the same tokens; means over seeds, with
the least and the greatest of them where there are several.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encoding_gallery import TRAINED, from_scratch, mean_curves, plot_extrapolation

from ropepatch.report.plots import save_figure
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


def main() -> None:
    """Print the tables, and draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--figures", type=Path, help="a folder")
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text(encoding="utf-8"))["rows"]
    print(*(make(rows) for make in (loss_table, recall_table, recalibration_table)), sep="\n\n")
    if arguments.figures:
        means, floor = mean_curves(rows)
        save_figure(plot_extrapolation(means, TRAINED, floor), arguments.figures / "encodings-extrapolation")


if __name__ == "__main__":
    main()

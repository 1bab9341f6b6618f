"""The table of `smollm2_distil.py`, from its result file.

python eval/studies/distil/smollm2_distil_tables.py eval/results/smollm2-distil.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from distil_tables import mean
from smollm2_distil import AS_IT_IS, DISTILLED, QUESTIONS, TARGET, TRAINED, YARN

from ropepatch.evaluation.grid import Passkey

Row = dict[str, Any]
SPANS = {"row": "first 2,048", "trained": f"first {TRAINED:,}", "beyond": f"{TRAINED:,} to {2 * TRAINED:,}"}
LENGTHS = (TRAINED, 2 * TRAINED, TARGET)
NONE = "–"


def smollm2_table(rows: list[Row]) -> str:
    """Every model: its losses on novels, the passkeys that it finds, and the base model's answers."""
    heads = ["", *(f"novels, {span}" for span in SPANS.values())]
    heads += [*(f"passkeys at {length:,}" for length in LENGTHS), "its own answers"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in (AS_IT_IS, YARN, DISTILLED):
        found = {row["measure"]: row for row in rows if row["of"] == name}
        cells = [name]
        cells += [f"{mean(found['loss'][span]):.3f}" for span in SPANS]
        cells += [keys(found.get(f"passkeys at {length}")) for length in LENGTHS]
        cells.append(chat(found["chat"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def training_line(rows: list[Row]) -> str:
    """What the training took, and its gate."""
    (row,) = (row for row in rows if row["measure"] == "training")
    return (
        f"{row['steps']} steps, {row['tokens']:,} tokens, {row['seconds'] / 60:.0f} minutes on "
        f"{row['device']}; loss within {TRAINED:,} tokens of wikitext "
        f"{row['gate']['increase']:+.2%} from the base model's."
    )


def answer_lines(rows: list[Row]) -> str:
    """The first sentence of what each model answers."""
    said = {row["of"]: row["answers"] for row in rows[::-1] if row["measure"] == "chat"}
    heads = ["question", *said]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for number, question in enumerate(QUESTIONS):
        cells = [question, *(" ".join(texts[number].split())[:80] for texts in said.values())]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def keys(row: Row | None) -> str:
    """How many are found, with Wilson's interval."""
    if row is None:
        return NONE
    correct, asked = (sum(cell[i] for cell in row["cells"]) for i in (1, 2))
    low, high = Passkey(correct, asked).interval
    return f"{correct}/{asked} ({low:.0%} to {high:.0%})"


def chat(row: Row) -> str:
    """Nats per token of the base model's answers, and how many of their tokens are still the likeliest."""
    return f"{mean(row['nats']):.3f}, {row['same'] / sum(count for _, count in row['nats']):.0%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    content = json.loads(parser.parse_args().results.read_text(encoding="utf-8"))["rows"]
    print(smollm2_table(content), training_line(content), answer_lines(content), sep="\n\n")

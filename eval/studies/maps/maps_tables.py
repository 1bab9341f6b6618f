"""The table of `maps_study.py`, from its result file.

python eval/studies/maps/maps_tables.py eval/results/attention-maps.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maps_study import AS_IT_IS, OWN

from ropepatch.evaluation.bootstrap import bootstrap_interval
from ropepatch.evaluation.grid import Passkey

Parts = list[tuple[float, int]]
HEADS = ("method", "settings", "excess", "first L", "passkeys at the target")


def of(rows: Iterable[dict[str, Any]], method: str, kind: str) -> list[dict[str, Any]]:
    """The parts of one method, in order."""
    mine = [row for row in rows if (row["method"], row["kind"]) == (method, kind) and "refused" not in row]
    return sorted(mine, key=lambda row: row["part"])


def difference(rows: list[dict[str, Any]], base: list[dict[str, Any]], span: str) -> tuple[float, Parts]:
    """Nats per token above the base, and what each window adds to it; of the windows that both have read."""
    digests = {row["part"]: row["digest"] for row in base}
    rows = [row for row in rows if digests.get(row["part"]) == row["digest"]]
    others = {row["part"]: row[span] for row in base}
    pairs = [(one, other) for row in rows for one, other in zip(row[span], others[row["part"]], strict=True)]
    parts = [(nats - least, count) for (nats, count), (least, _) in pairs]
    return sum(part for part, _ in parts) / sum(count for _, count in parts), parts


def cells(rows: list[dict[str, Any]], method: str) -> Iterator[str]:
    """A row of the table."""
    read, base, asked = of(rows, method, "loss"), of(rows, OWN, "loss"), of(rows, method, "passkey")
    yield method
    yield (read[0]["settings"] or "–") if method not in (OWN, AS_IT_IS) else "–"
    for span in ("all", "short"):
        mean, parts = difference(read, base, span)
        low, high = bootstrap_interval(parts)
        yield f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    if not asked:
        yield "–"
        return
    keys = Passkey(*(sum(row[key] for row in asked) for key in ("correct", "n")))
    low, high = keys.interval
    yield f"{keys.correct}/{keys.n} ({low:.0%} to {high:.0%})"


def maps_table(rows: list[dict[str, Any]]) -> str:
    """For each checkpoint and factor, the methods by what they add to the loss through the own window."""
    places = dict.fromkeys((row["model"], row["factor"], row["target"]) for row in rows)
    blocks = []
    for model, factor, target in places:
        here = [row for row in rows if (row["model"], row["factor"]) == (model, factor)]
        base = of(here, OWN, "loss")
        nats, tokens = (sum(part[i] for row in base for part in row["all"]) for i in (0, 1))
        count = sum(len(row["all"]) for row in base)
        names = dict.fromkeys(row["method"] for row in here if row["method"] != OWN and "digest" in row)
        ordered = sorted(names, key=lambda name: difference(of(here, name, "loss"), base, "all")[0])
        lines = [
            f"**{model}, {target // factor:,} to {target:,} tokens**: through its own window "
            f"{nats / tokens:.4f} nats per token; {count} windows.",
            "",
        ]
        lines += [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        lines += [f"| {' | '.join(cells(here, name))} |" for name in ordered]
        refused = {row["method"]: row["refused"] for row in here if "refused" in row}
        lines += [f"\nRefused: {refusal}." for refusal in refused.values()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


SHORT = (AS_IT_IS, "yarn", "llama3", "self-extend", "rerope", "leaky-rerope", "dca", "lampe", "lambda")


def short_table(rows: list[dict[str, Any]]) -> str:
    """What each method adds to the loss through the own window, and the passkeys, by checkpoint."""
    cases = dict.fromkeys((row["model"], row["factor"]) for row in rows)
    asked = {(row["model"], row["factor"]) for row in rows if row["kind"] == "passkey"}
    heads = [f"{model}, {factor} x{', keys' * ((model, factor) in asked)}" for model, factor in cases]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for method in SHORT:
        line = [f"`{method}`" if method != AS_IT_IS else method]
        for case in cases:
            here = [row for row in rows if (row["model"], row["factor"]) == case]
            read, keys = of(here, method, "loss"), of(here, method, "passkey")
            loss = f"{difference(read, of(here, OWN, 'loss'), 'all')[0]:+.3f}" if read else "–"
            found, n = (sum(row[key] for row in keys) for key in ("correct", "n"))
            line.append(f"{loss}, {found}/{n}" if n else loss)
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


def cost_table(result: dict[str, Any]) -> str:
    """Of `eval/benchmarks/attention_cost.py`: ratios to stock sdpa, and the memory of a training step."""
    heads = ("map", "tokens", "prefill", "decode step", "training step", "memory")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in result["cells"]:
        ratios = (cell[kind]["ratio"] for kind in ("prefill", "decode", "training"))
        shown = [f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for one in ratios]
        row = (cell["map"], f"{cell['tokens']:,}", *shown, f"{cell['training_mib']:.0f} MiB")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("json", type=Path)
    print(maps_table(json.loads(parser.parse_args().json.read_text(encoding="utf-8"))["rows"]))


if __name__ == "__main__":
    main()

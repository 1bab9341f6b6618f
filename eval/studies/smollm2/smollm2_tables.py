"""The tables of `smollm2_study.py`, from its record.

python eval/studies/smollm2/smollm2_tables.py eval/results/smollm2.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from smollm2_study import FIRST, HARNESS, HARNESS_LENGTH, OTHERS

from ropepatch.evaluation.curves import Perplexity, difference
from ropepatch.evaluation.grid import wilson
from ropepatch.evaluation.measuring import AS_IT_IS
from ropepatch.evaluation.ranking import Ranking, rank
from ropepatch.evaluation.results import Result
from ropepatch.report.markdown import table

Record = dict[str, Any]
Row = dict[str, Any]


def methods(record: Record) -> list[str]:
    """The model as it is, then the scalings."""
    names = dict.fromkeys(row["method"] for row in record["rows"])
    return sorted(names, key=lambda name: name != AS_IT_IS)


def losses(record: Record, method: str) -> list[Row]:
    """The documents that a method has read, of those that all have that have read any."""
    read_by = [of(record, name, "loss") for name in methods(record)]
    shared = set.intersection(*({row["digest"] for row in rows} for rows in read_by if rows))
    return [row for row in of(record, method, "loss") if row["digest"] in shared]


def read_by(record: Record) -> list[str]:
    """The methods whose loss was measured."""
    return [name for name in methods(record) if of(record, name, "loss")]


def lengths(record: Record) -> list[int]:
    """At which was asked, the target first."""
    return sorted({row["length"] for row in record["rows"] if "found" in row}, reverse=True)


def of(record: Record, method: str, kind: str, length: int | None = None) -> list[Row]:
    """The rows of a method and kind, in the order of the rounds."""
    mine = [row for row in record["rows"] if (row["method"], row["kind"]) == (method, kind)]
    return sorted((row for row in mine if length in (None, row["length"])), key=lambda row: row["round"])


def counted(rows: Iterable[Row]) -> tuple[int, int]:
    """Answers found, of how many."""
    rows = list(rows)
    return sum(sum(row["found"]) for row in rows), sum(len(row["found"]) * row["wanted"] for row in rows)


def found_cell(rows: Sequence[Row], *, seconds: bool = True) -> str:
    """Answers found, with the interval and the time that it took."""
    found, n = counted(rows)
    if not n:
        return "–"
    took = f", {sum(row['seconds'] for row in rows):.0f} s" if seconds else ""
    return bare_cell(found, n) + took


def bare_cell(found: int, n: int) -> str:
    """Answers found, with Wilson's interval."""
    low, high = wilson(found, n)
    return f"{found}/{n} ({low:.0%} to {high:.0%})"


def retrieval_tables(record: Record) -> str:
    """For every length, what each method finds of every kind."""
    blocks = []
    for length in lengths(record):
        rows = [
            [name, *(found_cell(of(record, name, kind, length)) for kind in (*FIRST, *OTHERS))]
            for name in methods(record)
        ]
        blocks.append(f"**{length:,} tokens**\n\n{table(['', *FIRST, *OTHERS], rows)}")
    return "\n\n".join(blocks)


def harness_table(record: Record) -> str:
    """What each method finds of the tasks of lm-eval."""
    rows = []
    for name in methods(record):
        scores = [row for kind in HARNESS for row in of(record, name, kind, HARNESS_LENGTH)]
        if scores:
            cells = [bare_cell(row["correct"], row["n"]) for row in scores]
            rows.append([name, *cells, f"{sum(row['seconds'] for row in scores):.0f} s"])
    return table([f"at {HARNESS_LENGTH:,} tokens", *HARNESS, "time"], rows)


def read(rows: Sequence[Row], begin: int = 0, end: int | None = None) -> Perplexity:
    """The loss of all documents at the positions from begin to end."""
    parts = []
    for row in rows:
        inside = [span for span in row["spans"] if span[0] >= begin and (end is None or span[1] <= end)]
        parts.append((math.fsum(span[2] for span in inside), sum(span[3] for span in inside)))
    return Perplexity(math.fsum(nats for nats, _ in parts), sum(n for _, n in parts), tuple(parts))


def alone(record: Record, method: str, length: int) -> Perplexity | None:
    """The loss of windows of a length that were read on their own."""
    parts = [tuple(part) for row in of(record, method, "short", length) for part in row["parts"]]
    return Perplexity(sum(n for n, _ in parts), sum(n for _, n in parts), tuple(parts)) if parts else None


def loss_cell(mean: float, interval: tuple[float, float], *, sign: str = "") -> str:
    """Nats per token and the interval over documents, if there are several."""
    low, high = interval
    return f"{mean:{sign}.3f}" + f" [{low:{sign}.3f}, {high:{sign}.3f}]" * math.isfinite(low)


def loss_table(record: Record) -> str:
    """Loss by position, on short text alone, and what the trained context pays, document by document."""
    trained, target = record["model"]["trained"], record["target"]
    edges = [0, trained // 4, trained, target]
    heads = [
        "",
        *(f"positions {begin:,} to {end:,}" for begin, end in pairwise(edges)),
        f"all {target:,}",
        f"first {trained:,}, above as it is",
        f"windows of {trained // 4:,} alone",
        "time",
    ]
    rows = []
    base = losses(record, AS_IT_IS)
    for name in read_by(record):
        mine = losses(record, name)
        above = difference(read(mine, 0, trained), read(base, 0, trained))
        short = alone(record, name, trained // 4)
        seconds = sum(row["seconds"] for kind in ("loss", "short") for row in of(record, name, kind))
        spans = [*(read(mine, *span) for span in pairwise(edges)), read(mine)]
        rows.append(
            [
                name,
                *(loss_cell(one.mean, one.interval) for one in spans),
                "–" if name == AS_IT_IS else loss_cell(*above, sign="+"),
                loss_cell(short.mean, short.interval) if short else "–",
                f"{seconds:.0f} s",
            ]
        )
    return table(heads, rows)


def apart(record: Record, kinds: Sequence[str], length: int) -> list[tuple[str, int, int]]:
    """The most methods no two of whose intervals touch, the least found first: name, answers found, asked."""
    shares = []
    for name in methods(record):
        found, n = counted(row for kind in kinds for row in of(record, name, kind, length))
        if n:
            shares.append((wilson(found, n)[::-1], name, found, n))
    chain: list[tuple[str, int, int]] = []
    end = -1.0
    for (high, low), name, found, n in sorted(shares):  # the interval that ends first leaves most room
        if low > end:
            chain.append((name, found, n))
            end = high
    return chain


def losses_agree(record: Record, names: Sequence[str], length: int) -> bool | None:
    """Whether each one's mean loss over so many tokens lies within the interval of every other.

    None where there are no intervals: of windows of that length, or else of the first tokens of documents.
    """
    by_name = [alone(record, name, length) or read(losses(record, name), 0, length) for name in names]
    if len(names) < 2 or any(loss.num_documents < 2 for loss in by_name):
        return None
    return all(
        b.interval[0] <= a.mean <= b.interval[1] and a.interval[0] <= b.mean <= a.interval[1]
        for a, b in combinations(by_name, 2)
    )


def apart_table(record: Record) -> str:
    """How many methods retrieval tells apart, and whether loss does."""
    rows = []
    for length in lengths(record):
        for kinds, title in (
            *(([kind], kind) for kind in FIRST),
            (FIRST, "both"),
            ((*FIRST, *OTHERS), "all kinds"),
        ):
            chain = apart(record, kinds, length)
            told = " < ".join(f"{name} {found}/{n}" for name, found, n in chain)
            names = [name for name, _, _ in chain]
            agree = losses_agree(record, names, length)
            loss = {None: "–", True: "does not tell them apart", False: "does"}[agree]
            rows.append([f"{length:,}", title, str(len(chain)), told if len(chain) > 1 else "–", loss])
    return table(
        ["tokens", "asked for", "told apart", "whose intervals do not touch", "loss over as many tokens"],
        rows,
    )


def results(record: Record) -> list[Result]:
    """The rounds of each method as one result of loss and one of retrieval, for a ranking."""
    model, target = record["model"], record["target"]
    pooled = []
    for name in read_by(record):
        common: dict[str, Any] = {"label": name, "model": model, "scaling": None, "target": target, "env": {}}
        loss = losses(record, name)
        edges = sorted({(span[0], span[1]) for row in loss for span in row["spans"]})
        stretches = [(begin, end, read(loss, begin, end)) for begin, end in edges]
        tables = {
            "by_position": [
                {"begin": begin, "end": end, "nats": one.mean, "tokens": one.num_tokens}
                for begin, end, one in stretches
            ],
            "by_document": _documents(read(loss)),
            "by_document_inside": _documents(read(loss, 0, model["trained"])),
        }
        digest = " ".join(row["digest"] for row in loss)
        pooled.append(Result(task="perplexity", parameters={"digest": digest}, tables=tables, **common))
        by_kind = []
        for kind in (*FIRST, *OTHERS):
            for length in lengths(record):
                rounds = [
                    {row["round"] for row in of(record, other, kind, length)} for other in read_by(record)
                ]
                asked_all = set.intersection(*rounds)  # an interrupted round has not asked all
                mine = [row for row in of(record, name, kind, length) if row["round"] in asked_all]
                found, n = counted(mine)
                if n:
                    row = {
                        "kind": kind,
                        "length": length,
                        "share": found / n,
                        "interval": list(wilson(found, n)),
                    }
                    prompts = [count for one in mine for count in one["found"]]
                    by_kind.append(row | {"n": len(prompts), "found": prompts, "wanted": mine[0]["wanted"]})
        pooled.append(
            Result(task="retrieval", parameters={}, tables={"by_kind": by_kind, "by_length": []}, **common)
        )
    return pooled


def _documents(loss: Perplexity) -> list[Row]:
    return [{"nats": nats, "tokens": tokens} for nats, tokens in loss.documents]


def choice(record: Record) -> Ranking:
    """What `compare` and `auto` make of the same figures."""
    return rank(results(record), base=AS_IT_IS)


def choice_text(record: Record) -> str:
    """The choice and its reasons."""
    ranking = choice(record)
    return f"**{ranking.recommended or 'none'}**: {' '.join(ranking.advice)}"


def short_table(record: Record) -> str:
    """Of every method what it finds and how it reads at the target."""
    target = record["target"]
    chosen = choice(record).recommended
    rows = [
        [
            (f"`{name}`" if name != AS_IT_IS else name) + ", auto's choice" * (name == chosen),
            *(found_cell(of(record, name, kind, target), seconds=False) for kind in FIRST),
            loss_cell(loss.mean, loss.interval),
        ]
        for name in read_by(record)
        for loss in [read(losses(record, name))]
    ]
    return table([f"at {target:,} tokens", *FIRST, "nats per token"], rows)


def machine_text(record: Record) -> str:
    """Where and how it was measured."""
    env, machine, fit = record["env"], record["machine"], record["fit"]
    minutes = sum(row["seconds"] for row in record["rows"]) / 60
    texts = [
        f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}, {env['device']},",
        f"{env['dtype'].removeprefix('torch.')}; torch {env['torch']}, transformers {env['transformers']}.",
        f"Documents read: {len(losses(record, AS_IT_IS))}. In all {minutes:,.0f} minutes.",
    ]
    if fit is not None:
        texts.append(f"The fit began with {fit['start']} and took {fit['found']['step']} steps.")
    return " ".join(texts)


def precision_text(record: Record) -> str:
    """Whether float32 gives the verdicts and losses of the precision that was taken."""
    pairs: list[tuple[int, int]] = []
    apart: list[float] = []
    for row in record["float32"]:
        others = of(record, row["method"], row["kind"], row["length"])
        here = (row["round"], row.get("digest"))
        (other,) = (one for one in others if (one["round"], one.get("digest")) == here)
        if "found" in row:
            pairs += zip(row["found"], other["found"], strict=True)
        else:
            read_twice = zip(row["parts"], other["parts"], strict=True)
            apart += [abs(a - b) / n for (a, n), (b, _) in read_twice]
    if not apart:
        return "Not checked."
    dtype = record["env"]["dtype"].removeprefix("torch.")
    return (
        f"Of {len(pairs)} prompts float32 answers {sum(a == b for a, b in pairs)} as {dtype} does, in all "
        f"{sum(a for a, _ in pairs)} where that finds {sum(b for _, b in pairs)}; the losses of {len(apart)} "
        f"windows differ by {max(apart):.4f} nats per token at most."
    )


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="The tables of a record.")
    parser.add_argument("json", type=Path)
    record = json.loads(parser.parse_args().json.read_text(encoding="utf-8"))
    for block in (
        machine_text,
        precision_text,
        retrieval_tables,
        harness_table,
        loss_table,
        apart_table,
        choice_text,
        short_table,
    ):
        print(f"{block(record)}\n")


if __name__ == "__main__":
    main()

r"""The cost of quantised weights and a quantised KV cache, by length: a llama.cpp server of SmolLM2 at 16k.

    python eval/studies/served/served_study.py --work DIR --version b10434 \
      "llama-server -m {weights} -ctk {kv} -ctv {kv} -fa on -c 16384 -np 1 --port {port} ..."

DIR has the checkpoint, `smollm2`, and its GGUF files, `smollm2-f16.gguf` and others; "..." are the
switches of `ropepatch plan DIR/smollm2 --to 16k --for llama.cpp`. A page is a novel with needles, as in
../pages. The study requests the losses of 16 tokens of each block of 512, then the answers at every length,
the longest first, so that the server processes the page once. All combinations have one page before any has
two.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ropepatch.data.texts import digest
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.probing.client import Server
from ropepatch.probing.served import Served

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py
sys.path.insert(0, str(Path(__file__).parents[1] / "pages"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from engines_study import once_started, served_by
from pages_study import Pages, by_kind, doubled
from pages_tables import block_of, kinds_of
from study import Row, Study, counted, share, signed, table

WINDOW, TARGET = 8192, 16384
PAGES, KEYS, SAMPLED = 2, 16, 16
REFERENCE = ("f16", "f16")  # weights and cache with which all others are compared
CELLS = (REFERENCE, ("q8_0", "f16"), ("q4_k_m", "f16"))
CELLS += (
    ("f16", "q8_0"),
    ("f16", "q4_0"),
    ("q4_k_m", "q4_0"),
    ("q8_0", "q8_0"),
    ("q4_k_m", "q8_0"),
    ("q8_0", "q4_0"),
)


def cases(given: Namespace) -> Iterator[Row]:
    """Every combination, page by page."""
    for page in range(PAGES):
        for weights, kv in CELLS:
            yield {"model": "smollm2", "target": TARGET, "weights": weights, "kv": kv, "page": page}


@cache
def checkpoint(work: Path) -> Checkpoint:
    return Checkpoint.find(work / "smollm2")


@cache
def page(index: int, work: Path) -> tuple[str, Any]:
    """The names of the texts of a page, and its haystack."""
    lengths = doubled(WINDOW, TARGET)
    return Pages(WINDOW, TARGET, lengths, PAGES, KEYS).page(index, checkpoint(work).tokenizer)


def sampled(tokens: int, block: int) -> list[int]:
    """The indices of the scored tokens, in the middle of each stretch."""
    stretch = block // SAMPLED
    return list(range(stretch // 2, tokens - tokens % block, stretch))


def measure(case: Row, given: Namespace) -> Row:
    """The answers and the losses of one page."""
    weights = given.work / f"smollm2-{case['weights']}.gguf"
    command = given.server.replace("{weights}", str(weights)).replace("{kv}", case["kv"])
    name, haystack = page(case["page"], given.work)
    source, block = checkpoint(given.work), block_of(WINDOW)
    with served_by(command, given.work / "server.log") as address, Server(address) as server:
        once_started(server.look)
        served = Served(server, source.tokenizer, source.config.vocab_size)
        ids = haystack.ids[: max(haystack.stops.values())]
        losses = torch.tensor(served.losses(ids, sampled(len(ids), block)))
        longest_first = dict(reversed(haystack.stops.items()))
        answers = served.answers(replace(haystack, stops=longest_first))
    means = losses.view(-1, SAMPLED).nanmean(dim=1)
    return {
        "version": given.version,
        "bytes": weights.stat().st_size,
        "novel": name,
        "digest": digest([haystack.ids.tolist()]),
        "sampled": [SAMPLED, int(losses.isnan().sum())],
        "losses": [round(block * value, 3) for value in means.tolist()],
        **by_kind(answers, haystack.stops),
    }


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("server", help="starts the server, with {weights}, {kv} and {port}")
    parser.add_argument("--version", required=True, help="the version of the server")


STUDY = Study(
    name="served",
    about=__doc__,
    cases=cases,
    measure=measure,
    options=add_options,
    work=True,
    inputs=lambda case: (),
)


# The tables, for docs/tables.py


Cell = tuple[str, str]
Values = Callable[[Row], list[float]]  # of a page, one for each block or question


def cells(rows: list[Row]) -> dict[Cell, dict[int, Row]]:
    """The pages of each cell."""
    held: dict[Cell, dict[int, Row]] = {}
    for row in rows:
        held.setdefault((row["weights"], row["kv"]), {})[row["page"]] = row
    return held


def compared(of: dict[Cell, dict[int, Row]], cell: Cell, values: Values) -> str:
    """The mean of a cell; for all but the reference the paired difference from it."""

    def mean(of_cell: Cell) -> Mean:
        both = sorted(of[cell].keys() & of[REFERENCE].keys())
        return Mean(tuple((value, 1.0) for page in both for value in values(of[of_cell][page])), False)

    own = mean(cell)
    return f"{own.value:.3f}" if cell == REFERENCE else signed(difference(own, mean(REFERENCE)))


def block_losses(begin: int, end: int) -> Values:
    """The mean losses of the blocks between two positions."""
    block = block_of(WINDOW)
    return lambda row: [total / block for total in row["losses"][begin // block : end // block]]


HEADS: dict[str, Callable[[Cell], str]] = {"weights": lambda cell: cell[0], "KV cache": lambda cell: cell[1]}


def served_losses(rows: list[Row]) -> str:
    """The table of nats per token by position, less those of the reference."""
    of, ends = cells(rows), [0, *doubled(WINDOW, TARGET)]
    columns = dict(HEADS)
    for begin, end in pairwise(ends):
        values = block_losses(begin, end)
        columns[f"{begin:,} to {end:,}"] = lambda cell, values=values: compared(of, cell, values)
    columns["blocks"] = lambda cell: f"{sum(len(row['losses']) for row in of[cell].values())}"
    return table(of, columns)


def served_answers(rows: list[Row]) -> str:
    """The table of accuracy within and beyond the original length, and of log-prob beyond it."""
    of, columns = cells(rows), dict(HEADS)

    def shares(key: str) -> Callable[[Cell], str]:
        return lambda cell: counted(share(*count([row[key]["found"] for row in of[cell].values()])))

    def nats(key: str) -> Callable[[Cell], str]:
        return lambda cell: compared(of, cell, lambda row: row[key]["log_prob"])

    for kind in kinds_of(rows[0]):
        for length in (WINDOW, TARGET):
            columns[f"{kind}, {length:,}"] = shares(f"{kind} {length}")
        columns[f"{kind}, {TARGET:,}: answer log-prob"] = nats(f"{kind} {TARGET}")
    return table(of, columns)


def count(found: list[str]) -> tuple[int, int]:
    """The number of correct answers, and of all."""
    return sum(one.count("1") for one in found), sum(map(len, found))


if __name__ == "__main__":
    STUDY.main()

r"""Which engines compute the checkpoints that ropepatch saves, checked through their servers by `probe`.

    python eval/studies/engines/engines_study.py --work DIR vLLM 0.32.0 \
      "vllm serve {folder} --port {port} {switches}"

Every saved RoPE type of tiny at 4 times its original length is served with and without its scaling. yarn is
also served with every other mistake that a fingerprint detects. As a control, `probe` must name each mistake.
{switches} are those of `ropepatch plan` for the engine. {gguf} is the file of llama.cpp's own converter; the
environment variable CONVERTER has its path.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.probing.judging import WORDS
from ropepatch.probing.making import ropes
from ropepatch.probing.reading import (
    DOUBLED,
    FACTORLESS,
    MISREAD,
    RIGHT,
    TWICE,
    UNSCALED,
)

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import Item, Row, Study, by, table

RISING = [1.0 + 0.2 * pair for pair in range(16)]
METHODS: dict[
    str, dict[str, Any]
] = {  # those with a static RoPE type, with parameters for tiny
    **{
        name: {}
        for name in (
            "linear",
            "ntk",
            "ntk-by-parts",
            "yarn",
            "llama3",
            "ntk-fixed",
            "ntk-mixed",
            "giraffe-power",
            "giraffe-truncated",
            "p-rope",
            "resonance",
            "cope",
        )
    },
    "longrope": {"long_factor": RISING},
    "abf": {"rope_theta": 80_000.0},
    "custom": {"divisors": RISING, "attention_factor": 1.1},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} | parameters for name, parameters in METHODS.items()},
    "yarn, truncate false": {"method": "yarn", "truncate": False},
    "yarn, attention factor 1.5": {"method": "yarn", "attention_factor": 1.5},
    "yarn, betas 16 and 2": {"method": "yarn", "beta_fast": 16.0, "beta_slow": 2.0},
}
STARTS = 300  # seconds, at most
MISTAKES = (UNSCALED, FACTORLESS, TWICE, DOUBLED, MISREAD)


def served(case: str) -> tuple[str, ...]:
    """The checkpoints of a case to serve: the right one, and those with a mistake."""
    return (RIGHT, *(MISTAKES if case == "yarn" else (UNSCALED,)))


@cache
def checkpoint_of(case: str, kind: str, work: Path) -> Path:
    """The checkpoint of a case; or one with the RoPE parameters of a mistake."""
    folder = work / f"{case} {kind}".replace(" ", "-")
    if folder.exists():
        return folder
    how = CASES[case]
    if kind == UNSCALED:
        how = {"method": "none"}
    elif kind != RIGHT:
        record = records.read(checkpoint_of(case, RIGHT, work))
        wrong = ropes(record)[kind]
        divisors = (torch.tensor(record.inv_freq_before) / wrong.inv_freq).tolist()
        how = {
            "method": "custom",
            "divisors": divisors,
            "attention_factor": wrong.attention_factor,
        }
    reading = kind == RIGHT
    return ropepatch.extend(
        "tiny", folder, to="4x", reading=reading, say=lambda line: None, **how
    ).folder


def command_for(command: str, engine: str, folder: Path) -> str:
    """The command that serves a checkpoint, with {port} left; makes the GGUF file if it needs one."""
    supported = {one.engine: one for one in records.read(folder).engines}
    switches = " ".join(supported[engine].switches) if engine in supported else ""
    gguf = folder.with_suffix(".gguf")
    if "{gguf}" in command and not gguf.exists():
        words = [
            sys.executable,
            os.environ["CONVERTER"],
            str(folder),
            "--outfile",
            str(gguf),
        ]
        subprocess.run(words, check=True)
    return command.format(folder=folder, gguf=gguf, port="{port}", switches=switches)


@contextmanager
def served_by(command: str, output: Path) -> Iterator[str]:
    """Start a server at a free {port}, yield its address, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(command.format(port=port))
    with output.open("w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def once_started(ask: Callable[[], Item]) -> Item:
    """Repeat a request until the server has started, and return its answer."""
    end = time.monotonic() + STARTS
    while True:
        try:
            return ask()
        except RopepatchError as error:
            starting = "no answer from" in str(error) or " answers 503" in str(error)
            if not starting or time.monotonic() > end:
                raise
            time.sleep(1)


def cases(given: Namespace) -> Iterator[Row]:
    """Every checkpoint for this engine."""
    engine = {"engine": given.engine, "version": given.version}
    for case in CASES:
        yield from (engine | {"case": case, "served": kind} for kind in served(case))


def measure(case: Row, given: Namespace) -> Row:
    """The judgement of `probe` on a server, or its error."""
    folder = checkpoint_of(case["case"], case["served"], given.work)
    right = checkpoint_of(case["case"], RIGHT, given.work)
    try:
        command = command_for(given.server, case["engine"], folder)
        with served_by(command, folder.with_suffix(".log")) as address:
            found = once_started(
                partial(ropepatch.probe, address, right)
            ).judgement.to_dict()
    except RopepatchError as error:
        return {"verdict": None, "why": str(error)}
    del found["divergences"]
    return found


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "engine", help="as in `ropepatch plan`: vLLM, llama.cpp, mlx-lm"
    )
    parser.add_argument("version")
    parser.add_argument(
        "server", help="starts the server, with {folder} or {gguf}, {port}, {switches}"
    )


STUDY = Study(
    name="engines",
    about=__doc__,
    cases=cases,
    measure=measure,
    options=add_options,
    work=True,
)


# The tables, for docs/tables.py


def probed_table(rows: list[Row]) -> str:
    """The verdict of `probe` on each saved RoPE type by engine, and the number of named mistakes."""
    engines = by(rows, "engine", "version")

    def cell(engine: tuple[str, str]) -> Any:
        def verdict(case: tuple[str]) -> str:
            own = [row for row in engines[engine] if (row["case"],) == case]
            right = [verdict_of(row) for row in own if row["served"] == RIGHT]
            wrong = [
                row["verdict"] == row["served"] for row in own if row["served"] != RIGHT
            ]
            return (
                f"{right[0]}; {sum(wrong)} of {len(wrong)}" if right else "not probed"
            )

        return verdict

    columns = {"saved as": lambda case: case[0]} | {
        " ".join(engine): cell(engine) for engine in engines
    }
    return table(by(rows, "case"), columns)


def verdict_of(row: Row) -> str:
    """The verdict on a server in words, with the divergence."""
    if row["verdict"] is None:
        return "no answer"
    nats = "" if row["beyond"] is None else f" ({row['beyond']:.0e} nats)"
    return WORDS.get(row["verdict"], row["verdict"]) + nats


def trainers_table(rows: list[Row]) -> str:
    """The number of right verdicts by the way of loading."""
    columns = {
        "loaded by": lambda way: way[0][0],
        "version": lambda way: way[0][1],
        "named rightly": lambda way: (
            f"{sum(row['verdict'] == row['served'] for row in way[1])} of {len(way[1])}"
        ),
    }
    return table(by(rows, "engine", "version").items(), columns)


if __name__ == "__main__":
    STUDY.main()

r"""Which engines compute what ropepatch saves, asked by `ropepatch probe` through their servers.

    python eval/studies/engines/engines_study.py vLLM 0.32.0 "vllm serve {folder} --port {port} {switches}"
    CONVERTER=llama.cpp/convert_hf_to_gguf.py \
      python eval/studies/engines/engines_study.py llama.cpp b11739 "llama-server -m {gguf} --port {port}"

Every saved rope type of tiny at 4 times its window is served, right and without its scaling; yarn also
with every other mistake that a reading knows. What is served wrongly must be called so: the control. Rows
that are in the file already stay. {switches} are those that `ropepatch plan` names for the engine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from study import Rows

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.model.reading_file import RIGHT
from ropepatch.probing.mistakes import UNSCALED, ropes

RESULTS = Path(__file__).parents[2] / "results" / "engines.json"
RISING = [1.0 + 0.2 * pair for pair in range(16)]
METHODS: dict[str, dict[str, Any]] = {  # that a static rope type holds, with what tiny's rope asks for
    **{name: {} for name in ("linear", "ntk", "ntk-by-parts", "yarn", "llama3", "ntk-fixed", "ntk-mixed")},
    **{name: {} for name in ("giraffe-power", "giraffe-truncated", "p-rope", "resonance", "cope")},
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


def checkpoints(case: str, place: Path) -> dict[str, Path]:
    """The checkpoint of a case, and those that an engine serves which makes a mistake, by that mistake."""
    quiet: dict[str, Any] = {"say": lambda line: None, "to": "4x"}
    right = ropepatch.extend("tiny", place / "right", **CASES[case], reading=True, **quiet).folder
    served = {RIGHT: right}
    record = records.read(right)
    for mistake, frequencies in ropes(record).items():
        if mistake == UNSCALED:
            how: dict[str, Any] = {"method": "none"}
        elif mistake != RIGHT and case == "yarn":
            divisors = (torch.tensor(record.inv_freq_before) / frequencies.inv_freq).tolist()
            how = {"method": "custom", "divisors": divisors, "attention_factor": frequencies.attention_factor}
        else:
            continue
        folder = place / mistake.replace(" ", "-")
        served[mistake] = ropepatch.extend("tiny", folder, **how, reading=False, **quiet).folder
    return served


@contextmanager
def serving(command: str, engine: str, folder: Path) -> Iterator[str]:
    """The address of a server of a checkpoint, which is stopped afterwards."""
    supported = {one.engine: one for one in records.read(folder).engines}
    switches = " ".join(supported[engine].switches) if engine in supported else ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gguf = folder.with_suffix(".gguf")
    if "{gguf}" in command and not gguf.exists():
        subprocess.run(
            [sys.executable, os.environ["CONVERTER"], str(folder), "--outfile", str(gguf)], check=True
        )
    words = shlex.split(command.format(folder=folder, gguf=gguf, port=port, switches=switches))
    log = folder.with_suffix(".log").open("w")
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
        log.close()


def ask(address: str, checkpoint: Path) -> ropepatch.Probed:
    """The verdict on a server that may still be starting."""
    end = time.monotonic() + STARTS
    while True:
        try:
            return ropepatch.probe(address, checkpoint)
        except RopepatchError as error:
            starting = "no answer from" in str(error) or " answers 503" in str(error)
            if not starting or time.monotonic() > end:
                raise
            time.sleep(1)


def measure(engine: str, version: str, command: str, rows: Rows, only: str | None) -> None:
    """Add a row for every checkpoint that has none yet."""
    model, _ = ropepatch.load("tiny", device="cpu")
    for case in CASES:
        if only is not None and case != only:
            continue
        with tempfile.TemporaryDirectory(prefix="ropepatch-") as place:
            for served, folder in checkpoints(case, Path(place)).items():
                named = {"engine": engine, "version": version, "case": case, "served": served}
                if rows.of(**named):
                    continue
                began = time.monotonic()
                try:
                    with serving(command, engine, folder) as address:
                        probed = ask(address, Path(place) / "right")
                    found = {**probed.judgement.to_dict()}
                    del found["divergences"]
                except RopepatchError as error:
                    found = {"verdict": None, "why": str(error)}
                row = named | found | {"date": datetime.now(UTC).date().isoformat()}
                rows.add(row | {"seconds": round(time.monotonic() - began)}, model)
                print(f"{engine}, {case}, served {served}: {found['verdict']}, {found['why']}", flush=True)


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", help="as in `ropepatch plan`: vLLM, llama.cpp, mlx-lm")
    parser.add_argument("version")
    parser.add_argument("command", help="starts its server, with {folder} or {gguf}, {port}, {switches}")
    parser.add_argument("--case", choices=CASES, help="this one alone")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the rows, which are added to")
    given = parser.parse_args()
    measure(given.engine, given.version, given.command, Rows(given.json, "engines"), given.case)


if __name__ == "__main__":
    main()

r"""Whether llama.cpp computes the GGUF files that ropepatch extends, beyond the original length.

    python eval/studies/engines/gguf_study.py --work DIR --llama "PYTHON" tiny.gguf tiny 1k

The last of 43 random tokens, spread over the target length, attends to all others. llama.cpp runs the
extended file (gguf_last_token.py, with a Python that has llama-cpp-py-sync), transformers the patched
checkpoint that the file was converted from. The control is the original file. tiny runs with every static
method, others with yarn.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ropepatch
from ropepatch.settings import parse_length

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from engines_study import CASES
from study import Row, Study, table

SPREAD, NEAR = 30, 13  # tokens over the whole target length, and at its end
LAST_TOKEN = Path(__file__).with_name("gguf_last_token.py")


def cases(given: Namespace) -> Iterator[Row]:
    """Every method of one file."""
    named = {"file": given.file.name, "target": parse_length(given.to)}
    yield from (
        named | {"case": case}
        for case in (CASES if given.checkpoint == "tiny" else ("yarn",))
    )


def measure(case: Row, given: Namespace) -> Row:
    """The KL divergence of llama.cpp's distribution from that of transformers, in nats."""
    target, how = case["target"], CASES[case["case"]]
    written = given.work / f"{case['case']}-{case['file']}".replace(" ", "-")
    if not written.exists():
        ropepatch.extend(given.file, written, to=target, say=lambda line: None, **how)
    model, _ = ropepatch.load(given.checkpoint, dtype="float32")
    places = {
        *np.linspace(0, target - 40, SPREAD).astype(int).tolist(),
        *range(target - NEAR, target),
    }
    positions = sorted(places)
    ids = (
        np.random.default_rng(0)
        .integers(5, model.config.vocab_size - 300, len(positions))
        .tolist()
    )
    request = given.work / "asked.json"
    request.write_text(json.dumps({"ids": ids, "positions": positions}))
    with ropepatch.patch(model, to=target, **how):
        right = last_token(model, ids, positions)
    found, version = by_llama_cpp(written, request, given)
    unscaled, _ = by_llama_cpp(given.file, request, given)
    return {
        "version": version,
        "kl": kl(right, found),
        "kl_unscaled": kl(right, unscaled),
    }


@torch.inference_mode()
def last_token(
    model: Any, ids: list[int], positions: list[int]
) -> np.ndarray[Any, Any]:
    """The log-probs after the last token, by transformers."""
    attended = torch.eye(len(ids), dtype=torch.bool)
    attended[-1] = True
    places = torch.tensor(positions)

    def mask(attended: torch.Tensor) -> torch.Tensor:
        return torch.where(attended, 0.0, torch.finfo(torch.float32).min)[None, None]

    attention: Any = mask(attended)
    if model.config.model_type.startswith("gemma3"):
        near = places[:, None] - places < model.config.sliding_window
        attention = {
            "full_attention": mask(attended),
            "sliding_attention": mask(attended & near),
        }
    out = model(
        torch.tensor([ids]),
        position_ids=places[None],
        attention_mask=attention,
        use_cache=False,
    )
    return np.asarray(out.logits[0, -1].double().log_softmax(-1))


def by_llama_cpp(
    file: Path, request: Path, given: Namespace
) -> tuple[np.ndarray[Any, Any], str]:
    """The log-probs after the last token, by llama.cpp, and its version."""
    out = given.work / "logits.npy"
    words = [
        *shlex.split(given.llama),
        str(LAST_TOKEN),
        str(file),
        str(request),
        str(out),
    ]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return np.asarray(
        torch.tensor(np.load(out)).double().log_softmax(-1)
    ), printed.split()[-1]


def kl(right: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    """The KL divergence in nats."""
    return float((np.exp(right) * (right - found)).sum())


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--llama", required=True, help="a Python that has llama-cpp-py-sync"
    )
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("checkpoint", help="the checkpoint that it was converted from")
    parser.add_argument("to", help="the target length")


STUDY = Study(
    name="gguf",
    about=__doc__,
    cases=cases,
    measure=measure,
    options=add_options,
    work=True,
)


def gguf_table(rows: list[Row]) -> str:
    """The divergence of llama.cpp from transformers by file, with the new and the original RoPE."""
    files = {
        row["file"]: [one for one in rows if one["file"] == row["file"]] for row in rows
    }
    columns = {
        "file": lambda item: f"`{item[0]}`",
        "target": lambda item: f"{item[1][0]['target']:,}",
        "cases": lambda item: f"{len(item[1])}",
        "llama.cpp": lambda item: item[1][0]["version"],
        "extended, largest KL": lambda item: f"{max(row['kl'] for row in item[1]):.1g}",
        "original, least KL": lambda item: (
            f"{min(row['kl_unscaled'] for row in item[1]):.1g}"
        ),
    }
    return table(files.items(), columns)


if __name__ == "__main__":
    STUDY.main()

"""Whether llama.cpp computes from a GGUF file what transformers computes from the checkpoint, per method.

    pip install "ropepatch[gguf]" llama-cpp-python==0.3.36
    python eval/studies/gguf/gguf_agreement.py --checkpoint FOLDER --text FILE \
        --json eval/results/llama-cpp.json

Every static method at 4 times the window of a checkpoint with float32 weights: the perplexity of the first
windows of a text, by `ropepatch.perplexity` and from the logits of llama.cpp, and by how much any two logits
differ.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import torch
import torch.nn.functional as F

import ropepatch
from ropepatch.publishing.gguf import export_gguf
from ropepatch.scaling import METHODS

FACTOR, WINDOWS = 4, 4
# Both compute angles in float32, in another order of operations.
TOLERANCE = {"perplexity_relative": 1e-4, "logit": 0.02}
# Methods whose parameters must be given: for 8 rotary pairs, rising to the factor.
RISING = [1 + (FACTOR - 1) * pair / 7 for pair in range(8)]
GIVEN: dict[str, dict[str, Any]] = {
    "abf": {"rope_theta": 100_000.0},
    "longrope": {"long_factor": RISING},
    "custom": {"divisors": RISING, "attention_factor": 1.1},
}


def measured() -> list[str]:
    """The static methods that need no more than the target, and those that are given something here."""
    return [
        name
        for name, method in METHODS.items()
        if not method.length_dependent and (name in GIVEN or not method.required())
    ]


def logits_of_llama_cpp(file: Path, window: list[int]) -> torch.Tensor:
    """[T, vocabulary], with the keys and values kept in float32."""
    model = llama_cpp.Llama(
        str(file),
        n_ctx=len(window),
        n_batch=len(window),
        logits_all=True,
        type_k=0,
        type_v=0,
        flash_attn=False,
        verbose=False,
    )
    model.eval(window)
    logits = torch.from_numpy(model.scores[: len(window)].copy())
    model.close()
    return logits


def compare(source: Path, method: str, target: int, windows: list[list[int]]) -> dict[str, Any]:
    """One method: perplexities, the largest difference of a logit, and whether they agree."""
    with tempfile.TemporaryDirectory() as folder:
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in GIVEN.get(method, {}).items()}
        plan = ropepatch.plan(source, to=target, method=method, **given)
        ropepatch.extend(plan, Path(folder, "extended"))
        file = export_gguf(Path(folder, "extended"), Path(folder, "extended.gguf")).file
        model, _ = ropepatch.load(Path(folder, "extended"), device="cpu")
        ours = ropepatch.perplexity(model, None, windows).between(0, target).value
        nats, largest = 0.0, 0.0
        for window in windows:
            theirs = logits_of_llama_cpp(file, window)
            with torch.inference_mode():
                difference = (model(torch.tensor([window])).logits[0] - theirs).abs().max().item()
            largest = max(largest, difference)
            expected = torch.tensor(window[1:])
            nats += F.cross_entropy(theirs[:-1].double(), expected, reduction="sum").item()
    perplexity = math.exp(nats / sum(len(window) - 1 for window in windows))
    return {
        "agrees": abs(perplexity / ours - 1) <= TOLERANCE["perplexity_relative"]
        and largest <= TOLERANCE["logit"],
        "perplexity_ours": round(ours, 6),
        "perplexity_llama_cpp": round(perplexity, 6),
        "largest_logit_difference": float(f"{largest:.2e}"),
    }


def main() -> None:
    """Measure every method and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    model, tokenizer = ropepatch.load(asked.checkpoint, device="cpu")
    target = FACTOR * model.config.max_position_embeddings
    text = asked.text.read_text(encoding="utf-8")[: 16 * WINDOWS * target]
    ids = tokenizer(text, verbose=False).input_ids[: WINDOWS * target]
    windows = [ids[start : start + target] for start in range(0, len(ids), target)]
    record: dict[str, Any] = {
        "command": f"python eval/studies/gguf/gguf_agreement.py --checkpoint {asked.checkpoint} "
        f"--text {asked.text} --json {asked.json}",
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "gguf": importlib.metadata.version("gguf"),
        "transformers": importlib.metadata.version("transformers"),
        "ropepatch": ropepatch.__version__,
        "model": asked.checkpoint.name,
        "text": f"{asked.text.parent.name}/{asked.text.name}",
        "factor": FACTOR,
        "tokens": len(ids),
        "window": target,
        "tolerance": TOLERANCE,
        "given": GIVEN,
        "methods": {},
    }
    for method in measured():
        print(method, file=sys.stderr, flush=True)
        record["methods"][method] = compare(asked.checkpoint, method, target, windows)
    asked.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

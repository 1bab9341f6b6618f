"""The logits that an engine computes; a script that types_study.py runs in the engine's environment.

    python next_tokens.py mlx-lm

For each input line [folder, ids, positions] it prints a file name of the logits [P, V], or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def by_mlx_lm(folder: str, ids: list[int]) -> Any:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder))
    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def by_transformers(folder: str, ids: list[int]) -> Any:
    import torch
    import transformers

    [name] = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    model = (
        getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    )
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


ENGINES = {"mlx-lm": by_mlx_lm, "transformers 4.x": by_transformers}


def main(engine: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        folder, ids, positions = json.loads(line)
        file = f"{folder} {engine}.npy"
        try:
            np.save(
                file,
                ENGINES[engine](folder, ids[: positions[-1]])[np.array(positions) - 1],
            )
            answer = {"file": file}
        except Exception as error:  # any error is a result
            answer = {"why": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A script that saves the logits of checkpoints in mlx-lm on a CPU."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from second_transformers import ACROSS, STEPS, TARGET, WINDOW, tokens
from torch import Tensor

PACKAGES = ("mlx-lm==0.32.2", "mlx==0.32.4", "mlx-cpu==0.32.4")


def read(folder: Path) -> dict[str, Tensor]:
    """The logits of `second_transformers.read`."""
    import mlx.core as mx
    from mlx_lm.models import llama
    from mlx_lm.models.cache import make_prompt_cache

    config = json.loads((folder / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = model.sanitize(mx.load(str(folder / "model.safetensors")))
    model.load_weights(list(weights.items()))
    ids = mx.array(tokens(config["vocab_size"]).numpy())

    def logits(piece: mx.array, **cache: object) -> Tensor:
        return torch.tensor(model(piece, **cache)[0].tolist())

    answers = {
        name: logits(ids[:, :length])
        for name, length in (("window", WINDOW), ("across", ACROSS), ("target", TARGET))
    }
    cache = make_prompt_cache(model)
    logits(ids[:, : ACROSS - STEPS], cache=cache)
    decoded = [
        logits(ids[:, i : i + 1], cache=cache)[-1]
        for i in range(ACROSS - STEPS, ACROSS)
    ]
    return answers | {"decoded": torch.stack(decoded)}


if __name__ == "__main__":
    found = {Path(folder).name: read(Path(folder)) for folder in sys.argv[2:]}
    torch.save(found | {"version": version("mlx-lm")}, sys.argv[1])

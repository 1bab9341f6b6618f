"""A script that saves the logits of checkpoints in mlx-lm on a CPU."""

import json
from importlib.metadata import version

import torch
from second_transformers import logits_of, save, tokens

PACKAGES = ("mlx-lm==0.32.2", "mlx==0.32.4", "mlx-cpu==0.32.4")


def read(folder):
    """The logits of `second_transformers.read`."""
    import mlx.core as mx
    from mlx_lm.models import llama
    from mlx_lm.models.cache import make_prompt_cache

    config = json.loads((folder / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = model.sanitize(mx.load(str(folder / "model.safetensors")))
    model.load_weights(list(weights.items()))

    def logits(ids, cache):
        return torch.tensor(model(mx.array(ids.numpy()), cache=cache)[0].tolist())

    ids = tokens(config["vocab_size"])
    return logits_of(logits, ids, make_prompt_cache(model))


if __name__ == "__main__":
    save(read, version("mlx-lm"))

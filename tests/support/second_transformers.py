"""Logits of a checkpoint in the installed transformers; run as a script, in transformers 4.57."""

import sys
from inspect import signature
from pathlib import Path

import torch

PACKAGES = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
WINDOW, TARGET = 64, 256
STEPS = 8  # tokens decoded one by one, half of them beyond the original length
ACROSS = WINDOW + STEPS // 2


def tokens(vocabulary):
    """The tokens [1, TARGET] that every engine processes."""
    return torch.randint(
        3, vocabulary, (1, TARGET), generator=torch.Generator().manual_seed(0)
    )


def logits_of(logits, ids, cache):
    """What every engine computes, by a function of ids and of a cache that it fills, or None."""
    answers = {
        name: logits(ids[:, :length], None)
        for name, length in (("window", WINDOW), ("across", ACROSS), ("target", TARGET))
    }
    pieces = ids[:, :ACROSS].split([ACROSS - STEPS, *[1] * STEPS], dim=1)
    decoded = [logits(piece, cache)[-1] for piece in pieces]
    return answers | {"decoded": torch.stack(decoded[1:])}


@torch.inference_mode()
def read(folder):
    """Run a checkpoint.

    Returns:
        The logits [T, V] of the first tokens in one pass: `window` (the original length), `across` (a few
        more) and `target`; `decoded`, the logits of the last tokens of `across`, decoded one by one; and
        `inv_freq` and `attention_factor` after `target`.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    taken = signature(model.forward).parameters
    # The first since transformers 5.24
    cached = "cache" if "cache" in taken else "past_key_values"
    rope, factors = model.base_model.rotary_emb, {}

    def logits(ids, cache):
        out = model(ids, use_cache=cache is not None, **{cached: cache}).logits[0]
        if ids.shape[1] == TARGET:
            factors["inv_freq"] = rope.inv_freq.clone()
            scaling = torch.tensor(rope.attention_scaling, dtype=torch.float64)
            factors["attention_factor"] = scaling
        return out

    cache = DynamicCache(config=model.config)
    return logits_of(logits, tokens(model.config.vocab_size), cache) | factors


def save(read, version):
    """Run the checkpoints and save the results, which are empty where transformers rejects one."""
    out, *folders = sys.argv[1:]
    answers = {"version": version}
    for folder in map(Path, folders):
        try:
            answers[folder.name] = read(folder)
        except (KeyError, ValueError):
            answers[folder.name] = {}
    torch.save(answers, out)


if __name__ == "__main__":
    import transformers

    save(read, transformers.__version__)

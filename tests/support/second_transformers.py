"""Logits of a checkpoint in the installed transformers; run as a script, in transformers 4.57."""

import sys
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor

PACKAGES = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
WINDOW, TARGET = 64, 256
STEPS = 8  # tokens decoded one by one, half of them beyond the original length
ACROSS = WINDOW + STEPS // 2


def tokens(vocabulary: int) -> Tensor:
    """The tokens [1, TARGET] that every engine processes."""
    return torch.randint(
        3, vocabulary, (1, TARGET), generator=torch.Generator().manual_seed(0)
    )


@torch.inference_mode()
def read(folder: Path) -> dict[str, Tensor]:
    """Run a checkpoint.

    Returns:
        The logits [T, V] of the first tokens in one pass: `window` (the original length), `across` (a few
        more) and `target`; `inv_freq` and `attention_factor` after that; and `decoded`, the logits of the
        last tokens of `across`, decoded one by one.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokens(model.config.vocab_size)
    answers = {
        name: model(ids[:, :length], use_cache=False).logits[0]
        for name, length in (("window", WINDOW), ("across", ACROSS), ("target", TARGET))
    }
    rope = model.base_model.rotary_emb
    answers["inv_freq"] = rope.inv_freq.clone()
    answers["attention_factor"] = torch.tensor(
        rope.attention_scaling, dtype=torch.float64
    )
    taken = signature(model.forward).parameters
    # The first since transformers 5.24
    cached = "cache" if "cache" in taken else "past_key_values"
    cache, decoded = None, []
    for piece in ids[:, :ACROSS].split([ACROSS - STEPS, *[1] * STEPS], dim=1):
        out = model(piece, use_cache=True, **{cached: cache})
        cache = out[cached]
        decoded.append(out.logits[0, -1])
    return answers | {"decoded": torch.stack(decoded[1:])}


def main(out: str, *folders: str) -> None:
    """Run the checkpoints and save the results, which are empty where transformers rejects one."""
    import transformers

    answers: dict[str, object] = {"version": transformers.__version__}
    for folder in map(Path, folders):
        try:
            answers[folder.name] = read(folder)
        except (KeyError, ValueError):
            answers[folder.name] = {}
    torch.save(answers, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

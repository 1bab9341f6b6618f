"""A script that runs checkpoints with a position remapping without ropepatch."""

import pickle
import sys
from inspect import signature
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.utils import logging


class NoRopepatch:
    """An import hook that hides an installed ropepatch."""

    @staticmethod
    def find_spec(name, *_):
        if name.partition(".")[0] == "ropepatch":
            raise ModuleNotFoundError(f"{name} is not installed here")


sys.meta_path.insert(0, NoRopepatch)

IDS = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(1))
PADDED = (torch.arange(24) >= torch.tensor([[7], [0]])).long()
PIECES = [13, 1, 1, 9, 16]
TAKEN = signature(LlamaForCausalLM.forward).parameters
# The first since transformers 5.24
CACHE = "cache" if "cache" in TAKEN else "past_key_values"


def load(folder, **more):
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, **more
    ).eval()


def cached(model, sizes, cache=None):
    parts = []
    for piece in IDS.split(sizes, 1):
        out = model(piece, use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        parts.append(out.logits)
    return torch.cat(parts, 1)


COMPUTATIONS = {
    "logits": lambda model: model(IDS, use_cache=False).logits,
    "cached": lambda model: cached(model, PIECES),
    "one by one": lambda model: cached(model, [1] * 40),
    "static": lambda model: cached(
        model, PIECES, StaticCache(config=model.config, max_cache_len=56)
    ),
}


@torch.no_grad()
def read(folder, names):
    """The selected results for a checkpoint."""
    model = load(folder)
    return {name: COMPUTATIONS[name](model) for name in names}


def more(folder, scratch):
    """Further results for one checkpoint."""
    model = load(folder)
    results = {"backend": type(model).is_backend_compatible()}
    with torch.no_grad():
        generated = model.generate(
            IDS[:, :24] * PADDED, attention_mask=PADDED, max_new_tokens=9, do_sample=False,
            eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        results["generated"], results["sequences"] = (
            torch.stack(generated.logits, 1),
            generated.sequences,
        )
        results["alone"] = torch.stack([
            model(generated.sequences[row : row + 1, padding:]).logits[0, -10:-1]
            for row, padding in enumerate((7, 0))
        ])  # fmt: skip
        model.save_pretrained(scratch / "again")
        results["again"] = load(scratch / "again")(IDS, use_cache=False).logits
        results["pickled"] = pickle.loads(pickle.dumps(model))(
            IDS, use_cache=False
        ).logits
    try:
        model.set_attn_implementation("sdpa")
        model(IDS)
    except ValueError as error:
        results["sdpa"] = str(error)
    return results


def main(out, selection, *folders):
    """Save the results for the folders by name; without a selection, also `more` for the first folder."""
    try:
        import ropepatch  # noqa: F401
    except ModuleNotFoundError:
        logging.disable_progress_bar()
    else:
        raise SystemExit("ropepatch can be imported")
    names = selection.split(",") if selection else list(COMPUTATIONS)
    answers = {Path(folder).name: read(Path(folder), names) for folder in folders}
    torch.save(
        answers
        if selection
        else answers | {"more": more(Path(folders[0]), Path(out).parent)},
        out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Documents that a model writes itself, by its own probabilities; kept with the tokens of texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.texts import first_token
from ropepatch.data.tokens import TokenStore, find, tokenizer_digest, write, writing
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import text_config
from ropepatch.model.head import reading_on
from ropepatch.model.loading import load_model
from ropepatch.settings import seed_of

FORMAT = 1  # of how documents are drawn
AT_ONCE = 2**14  # tokens that are written side by side, and kept as soon as they are there
NAME = "what the model writes itself"


def self_written(
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    tokens: int,
    seed: int,
    cache: Path,
    say: Callable[[str], None] = lambda line: None,
) -> TokenStore:
    """At least ``tokens`` tokens of a checkpoint's own, in documents of ``length``, each begun as a text is.

    What is written is kept: whoever asks again gets the same, and whoever asks for more, or was interrupted,
    goes on.

    Args:
        checkpoint: The checkpoint.
        tokenizer: Its tokenizer.
        length: Tokens of a document; no more than the model was trained to read.
        tokens: How many are wanted.
        seed: The seed of the draws.
        cache: The folder of tokens.
        say: Called with a line on how far it is.

    Raises:
        RopepatchError: The model cannot be loaded, or the disk does not take the tokens.
    """
    config = json.dumps(checkpoint.raw, sort_keys=True)
    decisive = (FORMAT, checkpoint.fingerprint, config, tokenizer_digest(tokenizer), length, seed)
    key = hashlib.sha256(repr(decisive).encode()).hexdigest()[:24]
    entry, model = cache / f"{key}-self", None
    with writing(entry, NAME):
        store = find(entry, 1)
        while store is None or len(store) < tokens:
            documents = [] if store is None else list(torch.split(store.tokens, store.starts.diff().tolist()))
            say(f"the model writes its own text: {sum(map(len, documents)):,} of {tokens:,} tokens")
            if model is None:
                model = load_model(checkpoint).to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
            draws = torch.Generator().manual_seed(seed_of(seed, "self", len(documents)))
            documents += written(model, tokenizer, length, draws)
            store = write(entry, documents, source=NAME)
    return store.first(tokens)


@torch.no_grad()
def written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, draws: torch.Generator
) -> list[Tensor]:
    """Documents of ``length`` tokens, int32, drawn token by token at temperature 1.

    Where the model ends a text, it goes on with the next: so rows of that length are one document each.
    """
    first, rows = first_token(tokenizer), max(1, AT_ONCE // length)
    if first is None:
        ids = torch.randint(text_config(model.config).vocab_size, (rows, 1), generator=draws)
    else:
        ids = torch.full((rows, 1), first)
    columns, read = [ids], reading_on(model)
    while len(columns) < length:
        ids = (
            read(ids.to(model.device)).logits[:, -1].float().softmax(-1).cpu().multinomial(1, generator=draws)
        )
        columns.append(ids)
    return list(torch.cat(columns, 1).int())

"""Self-generated text for training, stored in the token cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache as once
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.texts import first_token
from ropepatch.data.tokens import TokenStore, cached, tokenizer_digest
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import text_config
from ropepatch.model.cost import cache_bytes
from ropepatch.model.head import incremental_forward
from ropepatch.model.precision import fastest, memory_of, placed
from ropepatch.progress import Progress, no_bar
from ropepatch.settings import key_of, seed_of

FORMAT = 2  # the version of the sampling
TEMPERATURE = 0.8  # at 1 a small model's text becomes incoherent
SHARD = 2**14  # tokens per batch on a CPU, each an entry of the cache
CACHED = 1 / 4  # the share of a GPU's memory for a batch
SELF_WRITTEN = "self-generated text"


def self_written(
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    tokens: int,
    seed: int,
    progress: Progress = no_bar,
) -> TokenStore:
    """Generate at least ``tokens`` tokens with a checkpoint, in documents of ``length`` tokens.

    Each shard is an entry of the cache. A later call returns the same tokens; if it needs more, or the last
    one was interrupted, it resumes after the last complete shard.
    """
    config = json.dumps(checkpoint.raw, sort_keys=True)
    weights, splits = checkpoint.fingerprint, tokenizer_digest(tokenizer)
    decisive = (FORMAT, weights, config, splits, length, seed, fastest())
    key = key_of(decisive)[:24]
    entries, done = list[Any](), 0

    @once
    def model() -> PreTrainedModel:
        return placed(checkpoint.load())

    def shard() -> list[Tensor]:
        draws = torch.Generator(model().device).manual_seed(
            seed_of(seed, "self", done // length)
        )
        rows = side_by_side(model(), length, tokens - done)

        def report(column: int) -> None:
            """Show the tokens so far, when every document of a shard has so many."""
            now = done + rows * column
            advance(now, max(tokens, now))

        return generated(model(), tokenizer, length, draws, rows, report)

    with progress(SELF_WRITTEN) as advance:
        while done < tokens:
            entries.append(cached(f"{key}-self-{done}", shard, SELF_WRITTEN))
            done += length * len(entries[-1])
            advance(done, max(done, tokens))
    return TokenStore.of(SELF_WRITTEN, *entries).first(tokens)


def side_by_side(model: PreTrainedModel, length: int, tokens: int) -> int:
    """Choose the batch size, in documents of ``length`` tokens, to generate ``tokens`` tokens.

    A GPU takes about as long for many documents as for one, so there its memory is the limit: KV cache, and
    logits in float32 with their intermediate results.
    """
    if model.device.type == "cpu":
        return max(1, SHARD // length)
    config = text_config(model.config)
    cached = cache_bytes(config, length, model.dtype.itemsize) or 0
    room: int = int(CACHED * memory_of(model.device)) // (
        cached + 4 * 4 * config.vocab_size
    )
    return max(1, min(room, -(-tokens // length)))


@torch.no_grad()
def generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    draws: torch.Generator,
    rows: int,
    report: Callable[[int], None] = lambda column: None,
) -> list[Tensor]:
    """Sample ``rows`` documents of ``length`` tokens (int32) at `TEMPERATURE`.

    After an end-of-text token, a document continues with the next text. ``report`` receives the length of the
    documents after every token.
    """
    first = first_token(tokenizer)
    if first is None:
        vocabulary = text_config(model.config).vocab_size
        ids = torch.randint(vocabulary, (rows, 1), generator=draws, device=model.device)
    else:
        ids = torch.full((rows, 1), first, device=model.device)
    columns, run = [ids], incremental_forward(model)
    while len(columns) < length:
        output = run(ids)
        p = (output.logits[:, -1].float() / TEMPERATURE).softmax(-1)
        if not p.isfinite().all():
            raise RopepatchError(
                f"the model generates no text: its logits are no numbers after {len(columns)} tokens",
                hint="`ropepatch doctor` looks for weights that are not finite",
            )
        ids = p.multinomial(1, generator=draws)
        columns.append(ids)
        report(len(columns))
    return list(torch.cat(columns, 1).int().cpu())

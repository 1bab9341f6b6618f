"""What a model answers to prompts: read by teacher forcing, or generated.

Shapes: R prompts of N tokens, B of a batch, the answers among the last A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.prompts import Prompt
from ropepatch.data.texts import digest
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.prefixes import read_in_batches
from ropepatch.evaluation.processes import distribute, rank_and_ranks
from ropepatch.model.head import input_device


def dealt(
    prompts: Sequence[Prompt],
    read: Callable[[list[Prompt], list[int]], Iterator[dict[int, int]]],
    advance: Callable[[list[int]], None],
    *,
    split: bool,
) -> list[int]:
    """What is found of every prompt; of several processes each reads its share, and all return the same.

    Args:
        prompts: The same on every process.
        read: Reads some of them, which stand at these places: `forced` or `generated`.
        advance: Called with what this process found in a batch.
        split: Whether the processes share the work.
    """
    _, ranks = rank_and_ranks(split)
    shares = [list(range(share, len(prompts), ranks)) for share in range(ranks)]

    def found(places: list[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for batch in read([prompts[place] for place in places], places) if places else ():
            counts |= {places[row]: count for row, count in batch.items()}
            advance(list(batch.values()))
        return counts

    counts: dict[int, int] = {}
    for share in distribute(shares, found, key=lambda own: digest(prompts[i].ids for i in own), split=split):
        counts |= share
    return [counts[place] for place in range(len(prompts))]


def forced(
    model: PreTrainedModel, prompts: Sequence[Prompt], rows: int, *, share: bool
) -> Iterator[dict[int, int]]:
    """How many answers the model says of the prompts of each batch, each after the true ones before it.

    Args:
        model: Read by teacher forcing.
        prompts: All of one length.
        rows: At most so many at once.
        share: Whether what prompts have in common is read once where that is faster.
    """
    ids = torch.stack([prompt.ids for prompt in prompts])
    _check_vocabulary(model, ids)
    end = ids.shape[1]
    answers = end - min(prompt.answers[0][0] for prompt in prompts)  # tokens from the first answer on
    batches = read_in_batches(model, ids.to(input_device(model)), answers, rows=rows, share=share)
    for batch, logits in batches:
        said = logits.argmax(dim=-1).cpu()  # [B, A]
        yield {
            row: sum(
                torch.equal(tokens[begin - end : stop - end or None], ids[row, begin:stop])
                for begin, stop in prompts[row].answers
            )
            for row, tokens in zip(batch, said, strict=True)
        }


def generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    rows: int,
    *,
    room: Callable[[int], int],
    count: Callable[[int, str], int],
) -> Iterator[dict[int, int]]:
    """What counts of the text that the model generates greedily after each prompt of each batch.

    Args:
        model: Asked with each prompt up to its first answer.
        tokenizer: The model's.
        prompts: All of one length.
        rows: At most so many at once.
        room: How many tokens are generated for a row; as many for all whose questions end at one token.
        count: How many answers of a row a text gives.
    """
    _check_vocabulary(model, torch.stack([prompt.ids for prompt in prompts]))

    generate: Any = model.generate
    # What stands after an answer that has ended; one that cannot end needs none.
    padding = next(
        token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None
    )

    def end_of(row: int) -> int:
        return prompts[row].answers[0][0]

    for stop, alike in groupby(sorted(range(len(prompts)), key=end_of), key=end_of):
        order = list(alike)
        for batch in (order[first : first + rows] for first in range(0, len(order), rows)):
            ids = torch.stack([prompts[row].ids[:stop] for row in batch]).to(input_device(model))
            said = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=room(batch[0]),
                pad_token_id=padding,
            )
            texts = tokenizer.batch_decode(said[:, stop:], skip_special_tokens=True)
            yield {row: count(row, text) for row, text in zip(batch, texts, strict=True)}


def _check_vocabulary(model: PreTrainedModel, ids: Tensor) -> None:
    embedding: Any = model.get_input_embeddings().weight
    if (vocabulary := len(embedding)) <= (largest := int(ids.max())):
        raise RopepatchError(
            f"the tokenizer gives token {largest}, the model knows 0 to {vocabulary - 1}",
            hint="use the tokenizer that belongs to the model",
        )

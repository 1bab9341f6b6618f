"""The windows of a fit: what a vector is judged by, and how much the loss of each token counts.

Shapes: N rows of T tokens; M passkey prompts of as many. Losses are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.data.haystack import Haystacks
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, digest
from ropepatch.data.tiny.tales import Narrator
from ropepatch.errors import RopepatchError
from ropepatch.fitting.objective import Objective
from ropepatch.settings import seed_of

HELD_OUT = 16  # windows, at most, that decide, and as many that are read once at the end; else 1 in 6
FEWEST = 10  # windows without which nothing is learned
TALES = 200  # that tiny learns from
# A key token, by LongPPL (arXiv:2410.23771): the long context makes it e^2 times as likely, and likely.
GAIN, LIKELY = 2.0, -2.0


@dataclass(frozen=True, eq=False)
class Material:
    """Windows, all of one length, and the name of the text they are from.

    Args:
        train: What the fit learns from.
        held_out: What decides.
        unseen: What tells at the end what came out: neither learned from nor decided by.
        sources: Of each of these the index of the document in which it begins.
        text: The name of the source.
    """

    train: Sequence[Tensor]
    held_out: Sequence[Tensor]
    unseen: Sequence[Tensor]
    sources: Sequence[int]
    text: str

    @property
    def windows(self) -> list[Tensor]:
        """All of them."""
        return [*self.train, *self.held_out, *self.unseen]

    @property
    def digest(self) -> str:
        """SHA-256 of all their tokens."""
        return digest(self.windows)

    def check_ids(self, vocabulary: int) -> None:
        """Refuse token ids that a model does not have.

        Raises:
            RopepatchError: With the first.
        """
        for ids in self.windows:
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise RopepatchError(
                    f"{self.text} holds token id {ids.max().item()}, the model has {vocabulary}",
                    hint="give texts, or ids of the model's own tokenizer",
                )


def read_material(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path | None,
    *,
    field: str,
    split: str,
    length: int,
    spare: int,
) -> Material:
    """Windows cut from a text, joined as `ropepatch.data.texts.cut_windows` joins it; or tales of tiny.

    Args:
        tokenizer: The model's tokenizer.
        text: A file, a folder, a `datasets` id or a saved set; None for tales.
        field: The column or key of a document's text.
        split: The split of a `datasets` id or a saved set.
        length: Tokens of a window.
        spare: Leave out the windows that a perplexity task with so many would read.

    Raises:
        RopepatchError: No such text, or too little of it.
    """
    if text is None:
        narrator = Narrator(tokenizer)
        tales = [narrator.tale(length, seed_of("fit", i)).ids for i in range(TALES + 2 * HELD_OUT)]
        held_out, unseen = tales[:HELD_OUT], tales[HELD_OUT : 2 * HELD_OUT]
        return Material(tales[2 * HELD_OUT :], held_out, unseen, range(HELD_OUT), "tales")
    documents = stream_documents(text, field=field, split=split)
    joined = cut_windows(tokenizer, documents, length=length, count=None)
    cut = [(document, torch.tensor(window)) for document, window in joined]
    spared = {index * len(cut) // spare for index in range(spare)}
    left = [window for index, window in enumerate(cut) if index not in spared]
    if len(left) < FEWEST:
        less = f", {len(spared)} of them left out," if spared else ""
        raise RopepatchError(
            f"{text} makes {len(cut)} windows of {length} tokens{less} and a fit needs {FEWEST}",
            hint="give more text",
        )
    held = 2 * min(HELD_OUT, max(2, len(left) // 6))
    apart = [index * len(left) // held for index in range(held)]
    return Material(
        [window for index, (_, window) in enumerate(left) if index not in set(apart)],
        [left[index][1] for index in apart[::2]],
        [left[index][1] for index in apart[1::2]],
        [left[index][0] for index in apart[1::2]],
        str(text),
    )


@dataclass(frozen=True, eq=False)
class Examples:
    """Rows of tokens with weights.

    Args:
        ids: [N, T] int64.
        weights: [N, T - 1] float32, of the tokens from the second on.
    """

    ids: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """T, tokens of a row."""
        return self.ids.shape[1]

    def rows(self, indices: Sequence[int]) -> Examples:
        """Some of the rows."""
        chosen = torch.tensor(indices, dtype=torch.long)
        return Examples(self.ids[chosen], self.weights[chosen])


def text_examples(pieces: Sequence[Sequence[int] | Tensor], objective: Objective, trained: int) -> Examples:
    """Windows of text under an objective, but for its key tokens."""
    ids = torch.stack([torch.as_tensor(piece, dtype=torch.long) for piece in pieces])
    weights = objective.weights(ids.shape[1], trained)
    return Examples(ids, weights.expand(len(ids), -1).clone())


def with_keys(examples: Examples, far: Tensor, near: Tensor, weight: float) -> Examples:
    """The same with more weight on key tokens.

    Args:
        examples: Windows of text.
        far: The losses [N, T - 1] with all of the window before each token.
        near: The same tokens' losses with the trained context alone.
        weight: What is added to a key token's weight.
    """
    is_key = (near - far > GAIN) & (-far > LIKELY)
    return Examples(examples.ids, examples.weights * (1 + weight * is_key))


def needle_examples(tokenizer: PreTrainedTokenizerBase, *, length: int, count: int, seed: int) -> Examples:
    """Passkey prompts of a length, at evenly spread depths; only the answers' tokens count.

    Raises:
        RopepatchError: The tokenizer cannot write such a prompt, or the length has no room for one.
    """
    plan = Haystacks(lengths=[length], count=count, keys=1, kinds=("passkey",), seed=seed)
    rows, weights = [], torch.zeros(count, length - 1)
    for index, haystack in enumerate(plan.make(tokenizer)):
        (question,) = haystack.asked[length]
        rows.append(torch.cat([haystack.ids[: haystack.stops[length]], question.ids, question.answer]))
        weights[index, -len(question.answer) :] = 1.0
    return Examples(torch.stack(rows), weights)

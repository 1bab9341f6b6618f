"""Retrieval of a pass key from filler: prompts of an exact length, scored by teacher forcing.

Shapes: B prompts of a batch, A tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.losses import evaluating, gives_positions
from ropepatch.evaluation.prompts import PasskeyTemplate, passkey_prompt
from ropepatch.seeds import seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropepatch.evaluation.prompts import Prompt


@dataclass(frozen=True)
class Passkey:
    """How many of ``n`` keys were retrieved."""

    correct: int
    n: int

    @property
    def accuracy(self) -> float:
        """The share retrieved."""
        return self.correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy (J. Am. Stat. Assoc. 22, 1927)."""
        z = 1.959964

        def least(correct: int) -> float:
            root = math.sqrt(correct * (self.n - correct) / self.n + z * z / 4)
            return (correct + z * z / 2 - z * root) / (self.n + z * z)

        return least(self.correct), 1 - least(self.n - self.correct)


@dataclass(frozen=True)
class PasskeyGrid:
    """What was retrieved at every length and depth.

    Attributes:
        cells: By (length in tokens, depth).
    """

    cells: Mapping[tuple[int, float], Passkey]

    def at(self, length: int) -> Passkey:
        """All depths of a length together.

        Raises:
            RopepatchError: The grid has no such length.
        """
        read = [cell for (tokens, _), cell in self.cells.items() if tokens == length]
        if not read:
            lengths = sorted({tokens for tokens, _ in self.cells})
            raise RopepatchError(f"no pass key was asked for at {length} tokens", hint=f"measured: {lengths}")
        return Passkey(sum(cell.correct for cell in read), sum(cell.n for cell in read))

    def __str__(self) -> str:
        lengths = sorted({length for length, _ in self.cells})
        depths = sorted({depth for _, depth in self.cells})
        rows = [("tokens", *(f"depth {depth:.2f}" for depth in depths), "all")]
        for length in lengths:
            cells = [*(self.cells[length, depth] for depth in depths), self.at(length)]
            rows.append((f"{length}", *(f"{cell.correct}/{cell.n}" for cell in cells)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    template: PasskeyTemplate | None = None,
    seed: int = 0,
    tokens_per_batch: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> PasskeyGrid:
    """Ask for pass keys at every length and depth.

    A key counts as retrieved if each of its tokens is the most probable one after the true ones before it:
    exactly when greedy decoding would say these tokens. Every key is drawn from a seed of its own, made of
    the seed, length, depth and trial.

    Args:
        model: A causal language model of transformers; put in eval mode and back into the mode it was in.
        tokenizer: The model's, with character offsets.
        lengths: Tokens of the prompts, answer included; one given twice is read once, as is a depth.
        depths: Where the needle stands, from 0, before all filler, to 1, after it.
        trials: Keys per length and depth.
        template: The words; the bundled ones if None.
        seed: Of the keys.
        tokens_per_batch: How many tokens are read at once, at most, but for a single longer prompt.
        progress: Called as (prompts read, prompts in all) after each batch.

    Raises:
        RopepatchError: No lengths, depths or trials, a prompt that cannot be made (see `passkey_prompt`), or
            logits that are no numbers.
    """
    if not len(lengths) or not len(depths) or trials < 1:
        raise RopepatchError(
            f"need lengths, depths and trials, got {lengths}, {depths}, {trials}",
            hint="e.g. lengths=[1024, 2048], depths=[0.0, 0.5, 1.0], trials=4",
        )
    words = template or PasskeyTemplate()
    # Each once, as Python's numbers, which the seeds are made of; the shortest, that may be too short, first.
    tokens, places = sorted({int(length) for length in lengths}), sorted({float(depth) for depth in depths})
    total, done = len(tokens) * len(places) * trials, 0
    correct: Counter[tuple[int, float]] = Counter()
    with evaluating(model), torch.inference_mode():
        for length in tokens:
            cells = [(length, depth) for depth in places for _ in range(trials)]
            prompts = [
                passkey_prompt(tokenizer, length=length, depth=depth, key=key, template=words)
                for depth in places
                for key in (_key(words.digits, seed, length, depth, trial) for trial in range(trials))
            ]
            batch = max(1, tokens_per_batch // length)
            for begin in range(0, len(prompts), batch):
                retrieved = _retrieved(model, prompts[begin : begin + batch])
                correct.update(cell for cell, found in zip(cells[begin:], retrieved, strict=False) if found)
                done += len(retrieved)
                if progress is not None:
                    progress(done, total)
    return PasskeyGrid({(n, depth): Passkey(correct[n, depth], trials) for n in tokens for depth in places})


def _key(digits: int, *parts: object) -> str:
    draw = random.Random(seed_of("passkey", *parts))
    return "".join(draw.choices("0123456789", k=digits))


def _retrieved(model: PreTrainedModel, prompts: Sequence[Prompt]) -> list[bool]:
    """Whether the model says the answer of each prompt; all prompts have the same length."""
    embedding: Any = model.get_input_embeddings().weight
    device = torch.device("cpu") if embedding.is_meta else embedding.device  # meta: offloaded by accelerate
    ids = torch.stack([prompt.ids for prompt in prompts]).to(device)
    if (vocabulary := len(embedding)) <= (largest := int(ids.max())):
        raise RopepatchError(
            f"the tokenizer gives token {largest}, the model knows 0 to {vocabulary - 1}",
            hint="use the tokenizer that belongs to the model",
        )
    kept = max(prompt.answer for prompt in prompts) + 1  # the token before the answer predicts its first
    takes_some = any(map(gives_positions, model.modules()))  # any: wrappers such as PEFT's pass keywords on
    options: dict[str, Any] = {"logits_to_keep": kept} if takes_some else {}
    logits = model(input_ids=ids, use_cache=False, **options).logits[:, -kept:-1]  # [B, A, V]
    if logits.isnan().any():
        raise RopepatchError(
            f"{type(model).__name__} gave logits that are no numbers",
            hint="load the model in float32 or bfloat16; check its weights and its rope scaling",
        )
    said = logits.argmax(dim=-1).cpu()  # [B, A]
    return [
        torch.equal(row[-prompt.answer :], prompt.ids[-prompt.answer :])
        for row, prompt in zip(said, prompts, strict=True)
    ]

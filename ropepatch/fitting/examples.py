"""What a vector is judged by: rows of tokens, and how much the loss of each token counts.

Shapes: N rows of T tokens; M passkey prompts of as many. Losses are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from ropepatch.data.templates import bundled
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.passkey import trial_prompt
from ropepatch.settings import OneOf, Settings, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A key token, by LongPPL (arXiv:2410.23771): the long context makes it e^2 times as likely, and likely.
GAIN, LIKELY = 2.0, -2.0


class Objective(Settings):
    """What is minimised: a weighted mean over tokens, in nats.

    Args:
        short: The weight of a token within the trained context, against 1 beyond it.
        keys: Added to the weight of a key token, one that needs far context: by the loss difference between a
            long and a short window.
        needles: The weight of the loss of passkeys, asked for in prompts of the target's length, against 1
            for the text.
        lengths: `target`: all tokens of a window count alike. `all`: one vector for all lengths; the means
            over the first L, 2 L ... tokens up to the target count alike.
        text: The weight of the text; 0 to be driven by passkeys alone.
    """

    short: Weight = 1.0
    keys: Weight = 0.0
    needles: Weight = 0.0
    lengths: Annotated[str, OneOf(("target", "all"))] = "target"
    text: Weight = 1.0

    def check(self) -> None:
        """Refuse what counts nothing."""
        if not self.text and not self.needles:
            raise RopepatchError("neither text nor needles count: both are 0", hint="needles=1.0")

    def weights(self, length: int, trained: int) -> Tensor:
        """The weights [T - 1] of the tokens of a window from the second on; their mean is 1."""
        ends = [length]
        while self.lengths == "all" and ends[-1] > trained:
            ends.append(max(ends[-1] // 2, trained))
        weights = torch.zeros(length - 1)
        for end in ends:
            weights[: end - 1] += 1 / (end - 1)
        weights[: trained - 1] *= self.short
        if weights.sum() == 0:
            raise RopepatchError(
                "no token counts: short is 0 and the windows end there", hint="raise --short"
            )
        return weights / weights.mean()


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


def text_examples(windows: Sequence[Sequence[int] | Tensor], objective: Objective, trained: int) -> Examples:
    """Windows of text under an objective, but for its key tokens."""
    ids = torch.stack([torch.as_tensor(window, dtype=torch.long) for window in windows])
    weights = objective.weights(ids.shape[1], trained)
    return Examples(ids, weights.expand(len(ids), -1).clone())


def with_keys(examples: Examples, far: Tensor, near: Tensor, weight: float) -> Examples:
    """The same with more weight on key tokens.

    Args:
        examples: Text.
        far: The losses [N, T - 1] with all of the window before each token.
        near: The same tokens' losses with the trained context alone.
        weight: What is added to a key token's weight.
    """
    is_key = (near - far > GAIN) & (-far > LIKELY)
    return Examples(examples.ids, examples.weights * (1 + weight * is_key))


def needle_examples(tokenizer: PreTrainedTokenizerBase, *, length: int, count: int, seed: int) -> Examples:
    """Passkey prompts of a length, at evenly spread depths; only the answers' tokens count.

    Raises:
        RopepatchError: If the tokenizer cannot write such a prompt.
    """
    words = bundled(distractors=0)
    ids, weights = [], torch.zeros(count, length - 1)
    for index in range(count):
        depth = index / max(count - 1, 1)
        prompt = trial_prompt(tokenizer, words, length=length, depth=depth, trial=index, seed=seed)
        ids.append(prompt.ids)
        for begin, end in prompt.answers:
            weights[index, begin - 1 : end - 1] = 1.0
    return Examples(torch.stack(ids), weights)

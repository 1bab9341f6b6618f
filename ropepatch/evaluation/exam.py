"""Questions beyond the original length of a model, of the kinds that it answers within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ropepatch.data.haystack import Haystack, Haystacks
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.retrieval import Retrieval, ask, why_not_counted
from ropepatch.progress import Advance, Progress, no_bar
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS = 2**16  # approximate tokens of the prompts of an exam
MOST, LEAST = 32, 4  # prompts of an exam
SHORTER, SHORTEST = 8, 512  # prompts have at least this share of the original length, and so many tokens
KEYS = 8  # questions of each kind per prompt
FALLBACK = "passkey"  # one per prompt; used only if no other kind is possible


@dataclass(frozen=True, eq=False)
class Exam:
    """Prompts of one length with questions, the same for every state of a model.

    Args:
        kinds: The kinds of questions.
        length: The length of the prompts in tokens.
        haystacks: The prompts with their questions.
    """

    kinds: Sequence[str]
    length: int
    haystacks: Sequence[Haystack]
    _checked: set[int] = field(default_factory=set, init=False)  # see `ask`

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        kinds: Sequence[str],
        length: int,
        *,
        seed: int,
        most: int = TOKENS,
    ) -> Exam:
        """Make an exam of about ``most`` tokens, with at least `LEAST` prompts."""
        keys = 1 if FALLBACK in kinds else KEYS
        plan = Haystacks(**_settings(length, seed, most), keys=keys, kinds=kinds)
        return cls(kinds, length, list(plan.make(tokenizer)))

    @property
    def tokens(self) -> int:
        """The tokens of its prompts."""
        return sum(len(haystack.ids) for haystack in self.haystacks)

    def of_model(self, model: PreTrainedModel, *, progress: Advance | None = None) -> Retrieval:
        """The answers of a model; see `ropepatch.evaluation.retrieval.ask`."""
        return ask(model, self.haystacks, progress=progress, checked=self._checked)


def answerable(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    *,
    seed: int,
    most: int = TOKENS,
    progress: Progress = no_bar,
) -> list[str]:
    """The kinds of questions that a model answers better than by guessing within its original length.

    Passkeys, one per prompt, are tried only if it answers none of the other kinds. The prompts have about
    ``most`` tokens; they are shorter than the original length where even `LEAST` prompts would have more.
    """
    length = window
    while LEAST * length > most and length > max(window // SHORTER, SHORTEST):
        length //= 2
    settings = _settings(length, seed_of("answerable", seed), most)
    for keys in (KEYS, 1):
        try:
            if keys == 1:
                plan = Haystacks(**settings, keys=keys, kinds=[FALLBACK])
            else:
                plan, _ = Haystacks.by_default(tokenizer, length, **settings, keys=keys)
            exam = Exam(plan.kinds, length, list(plan.make(tokenizer)))
        except RopepatchError:  # no room, or a tokenizer that cannot encode the keys
            continue
        with progress("questions within the original length") as advance:
            answers = exam.of_model(model, progress=advance)
        shares = {kind: {length: answers.found(length, kind)} for kind in exam.kinds}
        if found := [k for k in shares if why_not_counted(shares[k], keys=keys, trained=window) is None]:
            return found
    return []


def _settings(length: int, seed: int, most: int) -> dict[str, Any]:
    count = max(LEAST, min(MOST, min(most, TOKENS) // length))
    return {"lengths": [length], "count": count, "seed": seed}

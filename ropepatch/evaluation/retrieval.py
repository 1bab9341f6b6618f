"""What a model finds in a text: questions in prompts of an exact length, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.prompts import Prompt, page_prompt
from ropepatch.data.questions import KINDS, Question, draw_question
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.grid import THRESHOLD, wilson
from ropepatch.evaluation.results import Row
from ropepatch.evaluation.verdicts import dealt, forced, generated

MEAN = "mean"  # of all kinds, where a kind would be named
OWN = 0.85  # the share of a model's own short score that counts as reading a length, as in NoLiMa and HELMET
SPARE = 16  # tokens of a prompt that are left for what an answer says beside the wanted
PLAIN = ("", " ")


class Asked(NamedTuple):
    """A question and its prompt."""

    question: Question
    prompt: Prompt


class Grid(NamedTuple):
    """Which questions are asked of every kind and length.

    Args:
        depths: Where the needle stands that is asked for.
        trials: Questions for each depth.
        seed: From which they are drawn.
        templates: Names of `TEMPLATES`, which the trials take in turn.
        chat: What a chat template puts before a prompt, and between question and answer.
    """

    depths: Sequence[float]
    trials: int
    seed: int
    templates: Sequence[str]
    chat: tuple[str, str] = PLAIN

    def ask(self, tokenizer: PreTrainedTokenizerBase, kind: str, length: int) -> list[Asked]:
        """All questions of a kind and length, by depth and trial.

        With the answer each has so many tokens; `SPARE` less, where the answer is generated.

        Raises:
            RopepatchError: A prompt that cannot be made of so many tokens, or of this tokenizer's.
        """
        return [self._asked(tokenizer, kind, length, *at) for at in product(self.depths, range(self.trials))]

    def _asked(
        self, tokenizer: PreTrainedTokenizerBase, kind: str, length: int, depth: float, trial: int
    ) -> Asked:
        template = self.templates[trial % len(self.templates)]
        question = draw_question(kind, template, length=length, depth=depth, trial=trial, seed=self.seed)
        page = question.page(f"{kind} prompt", *self.chat)
        spare = 0 if KINDS[kind].forced else SPARE
        prompt = page_prompt(tokenizer, page, length=length - spare)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt.ids.tolist():
            raise RopepatchError(f"the tokenizer has no token for some of the words of a {kind} prompt")
        return Asked(question, prompt)


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the tokenizer's chat template puts before what a user says, and between that and the answer.

    Raises:
        RopepatchError: There is no chat template, or one that does not say what a user says once.
    """
    if not tokenizer.chat_template:
        raise RopepatchError("the tokenizer has no chat template", hint="form: plain asks without one")
    mark = "WHAT THE USER SAYS"
    turn = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    parts = str(text).split(mark)
    if len(parts) != 2:
        raise RopepatchError(
            f"the chat template says {len(parts) - 1} times what a user says, expected once",
            hint="form: plain asks without it",
        )
    return parts[0], parts[1]


def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Asked],
    *,
    force: bool,
    tokens_per_batch: int = 2048,
    share_prefixes: bool = True,
    split: bool = False,
    advance: Callable[[list[int]], None] = lambda found: None,
) -> list[int]:
    """How much of what is wanted a model finds, of every question.

    Args:
        model: In eval mode.
        tokenizer: The model's.
        asked: Questions of one kind and length.
        force: Whether answers are forced; else they are generated.
        tokens_per_batch: How many tokens are read at once, at most, but for a single longer prompt.
        share_prefixes: Whether what forced prompts have in common is read once where that is faster.
        split: Whether the processes of torch.distributed share the work, as in `passkey`.
        advance: Called with what this process found of each prompt of a batch.
    """
    prompts = [prompt for _, prompt in asked]
    rows = max(1, tokens_per_batch // len(prompts[0].ids))

    def read(prompts: list[Prompt], places: list[int]) -> Iterator[dict[int, int]]:
        if force:
            return forced(model, prompts, rows, share=share_prefixes)
        return generated(
            model,
            tokenizer,
            prompts,
            rows,
            room=lambda row: len(prompts[row].ids) - prompts[row].answers[0][0] + SPARE,
            count=lambda row, text: asked[places[row]].question.found(text),
        )

    return dealt(prompts, read, advance, split=split)


def share_row(found: Sequence[int], wanted: int) -> Row:
    """The share found, RULER's: of every prompt the share of what is wanted, and their mean.

    Wilson's interval is that of as many prompts that are found wholly or not at all: prompts differ least in
    their shares where these are 0 and 1, so it is too wide rather than too narrow.
    """
    share = sum(found) / (wanted * len(found))
    return {"share": share, "n": len(found), "interval": list(wilson(share * len(found), len(found)))}


def mean_row(rows: Sequence[Row]) -> Row:
    """The mean of the shares of several kinds, each of as many prompts as any other."""
    share, n = fmean(row["share"] for row in rows), sum(row["n"] for row in rows)
    return {"share": share, "n": n, "interval": list(wilson(share * n, n))}


def effective_row(kind: str, rows: Iterable[Row]) -> Row:
    """The greatest lengths that are read well enough: by RULER's threshold, and by the model's own.

    Its own is `OWN` of its share at its shortest length; a model that finds nothing there has none.
    """
    shares = {row["length"]: row["share"] for row in rows}
    own = OWN * shares[min(shares)]

    def greatest(threshold: float) -> int | None:
        reached = (length for length, share in shares.items() if share >= threshold > 0)
        return max(reached, default=None)

    return {"kind": kind, "length": greatest(THRESHOLD), "own": greatest(own), "shortest": min(shares)}

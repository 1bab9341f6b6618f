"""Measure a served model: losses of texts, and answers to questions about long prompts."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.remote import Remote
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.source import KNOWN
from ropepatch.probing.client import Answer, RefusedError, Server, Told
from ropepatch.probing.text import draw_source, source_ids
from ropepatch.settings import Length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ropepatch.data.haystack import Haystack

PROMPT = 24  # tokens of the prompt that tests which log-probabilities a server returns
TRIED = 5  # forced tokens of that test, at most
NEAR = 0.3  # nats between two answers to one request; with the bias of a forced token it is 0.7 or more
ONE, WHOLE, TEXT = "one token at a time", "all tokens of a prompt at once", "the text that it writes"


class Served(Remote):
    """A model on a server, and how it returns log-probabilities.

    Most servers return the log-probability of a token that a logit bias forces, one token per request. Some
    echo a prompt with those of all its tokens. Others only list the most probable tokens; a mean loss
    without the tokens that are not listed would be too low, so only their generated text is used.

    Args:
        server: The server; call `Server.look` first.
        tokenizer: The tokenizer of the checkpoint that it serves.
        vocabulary: The size of the checkpoint's vocabulary.

    Raises:
        RopepatchError: If the server answers no prompt.
    """

    def __init__(self, server: Server, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self.server, self.tokenizer, self.vocabulary = server, tokenizer, vocabulary
        self.label = Path(server.model).name or "served"
        drawn = source_ids(draw_source(tokenizer, vocabulary, PROMPT, 0), tokenizer, vocabulary, server.shown)
        prompts = [drawn[:length] for length in range(PROMPT, PROMPT // 2, -1)]
        self._prompt = next((ids for ids in prompts if self._spelled(ids) is not None), drawn)
        self._ordinary = 0  # a token that can be forced with its log-probability
        self.echoes = self.forces = False
        self._find_ways()
        self.limit = server.limit
        if self.limit is not None and self.echoes and not self.forces:
            self.limit -= 1  # an echo generates one token after the prompt
        self.environment = {
            "ropepatch": importlib.metadata.version("ropepatch"),
            "server": server.shown,
            "model": server.model,
            "answers": ONE if self.forces else WHOLE if self.echoes else TEXT,
        }
        if self.tells_losses:
            self.environment["losses"] = WHOLE if self.echoes else ONE
        if self.limit is not None:
            self.environment["limit"] = str(self.limit)

    def __str__(self) -> str:
        of = self.environment
        reads = "" if self.limit is None else f", at most {self.limit} tokens"
        losses = f"losses: {of['losses']}" if self.tells_losses else "no losses"
        return f"{of['server']}, {of['model'] or 'its model'}{reads}; {losses}; answers: {of['answers']}"

    @property
    def tells_losses(self) -> bool:
        """Whether the server returns the log-probability of any token."""
        return self.echoes or self.forces

    def losses(self, ids: Tensor, scored: Sequence[int]) -> list[float]:
        """Return the losses of tokens by their indices; see `Remote`."""
        tokens: list[int] = ids.tolist()
        told: list[Told] = []
        if self.echoes:
            room = len(tokens) if self.server.limit is None else self.server.limit - 1
            told = self.server.echoed(tokens[:room], self._text(tokens[:room]))
        return [
            -told[index - 1].log_prob if index <= len(told) else self._loss(tokens, index) for index in scored
        ]

    def answers(self, haystack: Haystack) -> list[tuple[int, str, float, bool, float]]:
        """Return the answers to a long prompt's questions; see `Remote`."""
        answered = []
        for length in filter(self.reads, haystack.stops):
            stop = haystack.stops[length]
            before: list[int] = haystack.ids[:stop].tolist()
            for question in haystack.asked[length]:
                found, log_prob = self._answer(before + question.ids.tolist(), question.answer.tolist())
                answered.append((length, question.kind, round(question.end / stop, 6), found, log_prob))
        return answered

    def _answer(self, prompt: list[int], answer: list[int]) -> tuple[bool, float]:
        """Return whether greedy decoding gives the answer, and the mean log-probability of its tokens."""
        whole = prompt + answer
        if self.forces:
            told = [self._told(whole[:place], whole[place]) for place in range(len(prompt), len(whole))]
        elif self.echoes:
            told = self.server.echoed(whole, self._text(whole))[-len(answer) :]
        else:
            ids, text = self.server.greedy(prompt, self._text(prompt), len(answer))
            same = text.strip() == str(self.tokenizer.decode(answer)).strip()
            return (ids == answer if ids and None not in ids else same), math.nan
        found = all(one.log_prob >= one.greatest for one in told)
        return found, math.fsum(one.log_prob for one in told) / len(told)

    def _loss(self, ids: list[int], index: int) -> float:
        """Return the loss of a token in a text; NaN beyond the limit, or if the server returns none."""
        if not (self.forces and self.reads(index + 1)):
            return math.nan
        try:
            return -self._told(ids[:index], ids[index]).log_prob
        except RefusedError as error:
            try:
                self._told(self._prompt, self._ordinary)
            except RefusedError:
                raise RopepatchError(
                    f"{self.server.shown} stopped answering: {error}",
                    hint="restart the server, and check its log",
                ) from error
            return math.nan

    def _told(self, ids: list[int], token: int) -> Told:
        """Return the log-probability of a token after others.

        For an incomplete UTF-8 character llama.cpp returns it only in the list of all tokens.
        """
        text = self._text(ids)
        try:
            return self.server.forced(ids, text, token)
        except RefusedError:
            return self.server.forced(ids, text, token, written=self._ordinary, count=self.vocabulary)

    def _text(self, ids: list[int]) -> str | None:
        """Return the text of tokens for a server that accepts no token ids."""
        if self.server.form and self.server.form["by_ids"]:
            return None
        if (text := self._spelled(ids)) is None:
            raise RopepatchError(
                f"{self.server.shown} accepts only text, and would tokenize this text differently",
                hint="use llama.cpp, vLLM or SGLang, which accept token ids",
            )
        return text

    def _spelled(self, ids: list[int]) -> str | None:
        """Return the text that is tokenized into these tokens; None if there is none."""
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return text if list(self.tokenizer(text, verbose=False).input_ids) == ids else None

    def _find_ways(self) -> None:
        ids, text = self._prompt, self._spelled(self._prompt)
        try:
            answer = self.server.next_token(ids, text)
        except RefusedError as refusal:
            self._find_form(text, refusal)
            return
        try:
            self.server.echoed(ids, text)
            self.echoes = True
        except RefusedError:
            pass
        self.forces = self._forces(text, answer)

    def _find_form(self, text: str | None, refusal: RefusedError) -> None:
        """Find a form of request that the server answers without log-probabilities."""
        for by_ids in (True, False)[: 1 if text is None else 2]:
            self.server.form = {"by_ids": by_ids, "way": {}}
            try:
                self.server.greedy(self._prompt, text, 1)
            except RefusedError:
                continue
            return
        raise refusal

    def _forces(self, text: str | None, answer: Answer) -> bool:
        """Return whether a forced token keeps its log-probability.

        Servers that add the bias first return a probability near 1.
        """
        likeliest = sorted(answer.by_id, key=answer.by_id.__getitem__, reverse=True)
        for token in likeliest[1:TRIED]:
            try:
                told = self.server.forced(self._prompt, text, token)
            except RefusedError:
                continue
            self._ordinary = token
            return abs(told.log_prob - answer.by_id[token]) < NEAR
        return False


def served_checkpoint(name: str, revision: str | None, original: Length | None) -> Checkpoint:
    """Find the checkpoint that is served; of a Hub id, without its weights."""
    try:
        return Checkpoint.find(name, revision, original=original, include=KNOWN)
    except RopepatchError as error:
        hint = f"give the {argument('checkpoint')} that is served: its tokenizer is needed"
        raise RopepatchError(str(error), hint=hint) from error

"""Request next-token probabilities from an engine, and compare them with a checkpoint's fingerprint."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ropepatch.columns import as_text, columns
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.files import json_text
from ropepatch.model.checkpoint import READING, Checkpoint
from ropepatch.model.config import stock_code
from ropepatch.model.head import in_eval_mode, input_device, log_probs_at
from ropepatch.model.rotary import base_model
from ropepatch.probing import reading as readings
from ropepatch.probing.client import Answer, RefusedError, Server
from ropepatch.probing.judging import Judgement, judge, named
from ropepatch.probing.making import make_reading, most_probable, tokenizer_of
from ropepatch.probing.reading import HINT, Reading, Top
from ropepatch.progress import Advance, Say, silent, unseen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Probed:
    """The result of `probe`; see `Judgement`.

    Args:
        engine: The address of the server, or the class of a loaded model.
        checkpoint: The checkpoint that the engine was compared with.
        reading: The fingerprint of that checkpoint.
        judgement: The verdict.
        answers: The most probable next tokens at each position; None for no answer.
    """

    engine: str
    checkpoint: str
    reading: Reading
    judgement: Judgement
    answers: tuple[Top | None, ...]

    @property
    def is_right(self) -> bool:
        """Whether the engine applies the checkpoint's RoPE scaling."""
        return self.judgement.is_right

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "engine": self.engine,
            "checkpoint": self.checkpoint,
            "window": self.reading.window,
            "target": self.reading.target,
            "positions": self.reading.positions,
        } | self.judgement.to_dict()

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json_text(self.to_dict())

    def __repr__(self) -> str:
        reading, judged = self.reading, self.judgement.divergences
        rows = []
        for position, fars in zip(
            reading.positions, zip(*judged.values(), strict=True), strict=True
        ):
            cells = ["no answer" if far is None else f"{far:.5f}" for far in fars]
            rows.append([str(position), *cells])
        heads = ["position", *map(named, judged)]
        table = as_text([columns(rows, heads, right=range(len(heads)))], 80)
        mark = f"--- beyond the original context length of {reading.window} tokens"
        lines = table.splitlines()
        lines.insert(len(lines) - reading.beyond.count(True), mark)
        title = f"{self.engine}, {self.checkpoint}: KL divergence (nats) from each hypothesis"
        return "\n".join([printable(title), *lines, "", str(self.judgement)])


def probe(
    server: str | nn.Module,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    model: str = "",
    save_reading: bool = False,
    timeout: float = 600.0,
    revision: str | None = None,
    say: Say = silent,
    progress: Advance = unseen,
) -> Probed:
    """Check that a server applies the RoPE scaling of an extended checkpoint.

    It asks the server for the next token after prefixes of the text in the fingerprint reading.json, which
    `extend` writes. An API key, if the server needs one, is read from ROPEPATCH_API_KEY.

    Args:
        server: The address of a server with OpenAI's completions API, such as http://localhost:8000.
        checkpoint: The checkpoint that the server runs: a folder or a Hub id. Default: the server's own model
            name.
        model: The model name on the server. Default: the first that it lists.
        save_reading: Run the checkpoint and write its reading.json anew.
        timeout: Seconds to wait for one answer.
        revision: The branch, tag or commit of a Hub id.
        say: A function that takes lines of progress.
        progress: A function of (answered positions, positions in total).

    In place of a server, a model that is loaded for its training can be checked. It runs in eval mode and
    stays as it was.

    Returns:
        The verdict and the differences, as a `Probed`.

    Raises:
        RopepatchError: If there is no server, no checkpoint written by ropepatch, or no fingerprint of it.
    """
    # Never write into a folder that only the server names
    if save_reading and not checkpoint:
        raise RopepatchError(
            f"{argument('save_reading')} needs a checkpoint", hint="add CHECKPOINT"
        )
    if isinstance(server, nn.Module):
        name = str(base_model(server).config.name_or_path)
        found = find(checkpoint or name, revision)
        return probe_model(server, found, read_reading(found, save_reading, say))
    asked = Server(server, model, timeout)
    with asked.client:
        asked.look()
        found = find(checkpoint or asked.model, revision)
        reading = read_reading(found, save_reading, say)
        asking = _Asking(asked, reading, tokenizer_of(found), say)
        answers = asking.all(progress)
    judgement = judge(reading, answers, asking.limit, refuses=asking.refuses)
    return Probed(asked.shown, found.name, reading, judgement, tuple(answers))


def probe_model(model: nn.Module, checkpoint: Checkpoint, reading: Reading) -> Probed:
    """Compare a loaded model with the fingerprint of a checkpoint."""
    answers = tuple(next_tokens(model, reading.ids, reading.positions))
    name = f"{type(base_model(model)).__name__} in memory"
    judgement = replace(judge(reading, answers), engine="the model")
    return Probed(name, checkpoint.name, reading, judgement, answers)


def next_tokens(model: nn.Module, ids: list[int], positions: list[int]) -> list[Top]:
    """Compute the most probable next tokens at each position, in one pass.

    The whole model runs, with its wrappers, without gradients, and temporarily in eval mode.
    """
    base: Any = base_model(model)
    name = type(base).__name__
    if max(ids) >= base.get_input_embeddings().num_embeddings:
        raise RopepatchError(
            f"{name} has a smaller vocabulary than the checkpoint: it is another model"
        )
    tokens = torch.tensor([ids[: positions[-1]]], device=input_device(base))
    # no_grad: a module may cache what it computes here, and inference tensors cannot be used in training
    hint = f"check that it runs at {positions[-1]} tokens"
    with in_eval_mode(model), torch.no_grad(), stock_code(f"run {name}", hint):
        log_probs = log_probs_at(model, tokens, positions)
    return most_probable(log_probs, name)


def find(name: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """Find the checkpoint that an engine serves or a trainer trains."""
    try:
        return Checkpoint.find(name, revision, weights=True)
    except RopepatchError as error:
        raise RopepatchError(
            str(error), hint="give the CHECKPOINT that the engine serves"
        ) from error


def read_reading(
    checkpoint: Checkpoint,
    save: bool = False,
    say: Say = silent,
) -> Reading:
    """Read the fingerprint in a checkpoint's folder, or compute it now."""
    if readings.exists(checkpoint.folder) and not save:
        reading = readings.read(checkpoint.folder)
        if reading.weights != checkpoint.fingerprint:
            raise RopepatchError(
                f"the {READING} of {checkpoint.name} belongs to other weights",
                hint=HINT,
            )
        return reading
    if not save:
        say(
            f"no {READING} in {checkpoint.name}: computing it now ({argument('save_reading')} saves it)"
        )
    reading = make_reading(checkpoint)
    if save:
        readings.write(checkpoint.folder, reading)
    return reading


@dataclass
class _Asking:
    """The requests to one server."""

    server: Server
    reading: Reading
    tokenizer: PreTrainedTokenizerBase | None
    say: Say
    refuses: bool = False  # whether the server refused a long prompt
    limit: int | None = None  # the most tokens that it reads; None if it reads all

    def all(self, advance: Advance) -> list[Top | None]:
        """Return the answers at every position, and find the server's limit."""
        positions = self.reading.positions
        answers: list[Top | None] = []
        for done, position in enumerate(positions):
            advance(done, len(positions))
            answers.append(self._at(position) if self.limit is None else None)
        if self.limit is None and self._is_truncating(answers):
            self.limit = self.reading.window
        return answers

    def _ask(self, count: int) -> Answer:
        """Request an answer to the first tokens."""
        return self.server.next_token(self.reading.ids[:count], self._text(count))

    def _at(self, position: int) -> Top | None:
        """Return the answer at a position; if the prompt is too long, note the limit."""
        first, server = self.reading.positions[0], self.server
        try:
            answer = self._ask(position)
        except RefusedError as error:
            if position == first:
                raise
            self.say(f"{position} tokens: {error}")
            try:  # a request that succeeded before
                self._ask(first)
            except RefusedError:
                raise RopepatchError(
                    f"{server.shown} stopped answering: {error}",
                    hint="restart the server, and check its log",
                ) from error
            self.refuses = True
            self.limit = max(one for one in self.reading.positions if one < position)
            return None
        # the BOS token may not count
        if answer.tokens is not None and answer.tokens < position - 1:
            self.limit = answer.tokens
            return None
        return self._read(answer)

    def _is_truncating(self, answers: list[Top | None]) -> bool:
        """Return whether a server silently reads no more than the last tokens of a prompt.

        Such a server returns the same distribution for the whole prompt as for its last tokens only.
        """
        reading, form, last = self.reading, self.server.form, answers[-1]
        if not last or not form or not form.by_ids or judge(reading, answers).is_right:
            return False
        end = reading.positions[-1]
        try:
            ids = reading.ids[end - reading.window : end]
            answer = self.server.next_token(ids, None)
        except RefusedError:
            return False
        return _are_equal(last, self._read(answer) or {})

    def _text(self, position: int) -> str | None:
        """Return the text of the first tokens; None if it would be tokenized differently."""
        if self.tokenizer is None:
            return None
        begin = self.reading.ids[:position]
        text = str(self.tokenizer.decode(begin, skip_special_tokens=True))
        again = self.tokenizer(text, verbose=False).input_ids
        return text if list(again) == begin else None

    def _read(self, answer: Answer) -> Top | None:
        """Return the log-probabilities by token id; None if too few token texts are known."""
        known: Top = {}
        for token, log_prob in answer.log_probs.items():
            number = token if isinstance(token, int) else self.texts.get(token)
            if number is not None:
                known[number] = log_prob
        return known if len(known) >= max(1, min(3, len(answer.log_probs))) else None

    @cached_property
    def texts(self) -> dict[str, int]:
        """The token ids by their texts, without ambiguous texts."""
        if self.tokenizer is None:
            return {}
        every = range(self.reading.vocabulary)
        texts = self.tokenizer.batch_decode([[number] for number in every])
        counts = Counter(texts)
        pairs = zip(texts, every, strict=True)
        return {text: number for text, number in pairs if counts[text] == 1}


def _are_equal(one: Top, other: Top) -> bool:
    """Return whether two answers have the same tokens, but for one, and log-probabilities."""
    common = one.keys() & other.keys()
    if len(common) < len(one) - 1:
        return False
    return all(abs(one[token] - other[token]) < 1e-3 for token in common)

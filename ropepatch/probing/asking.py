"""Request next-token probabilities from an engine, and compare them with a checkpoint's fingerprint."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from ropepatch.probing.judging import Judgement, judge
from ropepatch.probing.making import make_reading, most_probable, tokenizer_of
from ropepatch.probing.reading import HINT, RIGHT, Reading, Top, source_ids
from ropepatch.progress import Say, silent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Advance = Callable[[int, int], None]


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
        return f"Probed({self.engine}: {self.judgement})"

    def __str__(self) -> str:
        names = list(self.judgement.divergences)
        heads = [
            "position",
            *("the checkpoint" if name == RIGHT else name for name in names),
        ]
        read = zip(*(self.judgement.divergences[name] for name in names), strict=True)
        rows = [
            [
                str(position),
                *("no answer" if value is None else f"{value:.5f}" for value in values),
            ]
            for position, values in zip(self.reading.positions, read, strict=True)
        ]
        table = as_text([columns(rows, heads, right=range(len(heads)))]).splitlines()
        if {*self.reading.beyond} == {False, True}:
            mark = f"--- beyond the original context length of {self.reading.window} tokens"
            table.insert(1 + self.reading.beyond.index(True), mark)
        title = f"{self.engine}, {self.checkpoint}: KL divergence (nats) from each hypothesis"
        return "\n".join([printable(title), *table, "", str(self.judgement)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def probe(
    server: str | nn.Module,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    model: str = "",
    save_reading: bool = False,
    timeout: float = 600.0,
    revision: str | None = None,
    say: Say = silent,
    progress: Advance = lambda done, total: None,
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
    if (
        save_reading and not checkpoint
    ):  # never write into a folder that only the server names
        raise RopepatchError(
            f"{argument('save_reading')} needs a checkpoint", hint="add CHECKPOINT"
        )
    if isinstance(server, nn.Module):
        found = find(
            checkpoint or str(base_model(server).config.name_or_path), revision
        )
        return probe_model(server, found, read_reading(found, save_reading, say))
    with Server(server, model, timeout) as asked:
        asked.look()
        found = find(checkpoint or asked.model, revision)
        reading = read_reading(found, save_reading, say)
        tokenizer = tokenizer_of(found)
        ids = source_ids(reading.source, tokenizer, reading.vocabulary, found.name)[
            : reading.positions[-1]
        ]
        asking = _Asking(asked, reading, ids, tokenizer, say)
        answers, limit = asking.all(progress)
    judgement = judge(reading, answers, limit, refuses=asking.refuses)
    return Probed(asked.shown, found.name, reading, judgement, tuple(answers))


def probe_model(model: nn.Module, checkpoint: Checkpoint, reading: Reading) -> Probed:
    """Compare a loaded model with the fingerprint of a checkpoint."""
    tokenizer = tokenizer_of(checkpoint)
    ids = source_ids(reading.source, tokenizer, reading.vocabulary, checkpoint.name)
    answers = tuple(next_tokens(model, ids, reading.positions))
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
        return Checkpoint.find(
            name if isinstance(name, str) else Path(name), revision, weights=True
        )
    except RopepatchError as error:
        raise RopepatchError(
            str(error), hint="give the CHECKPOINT that the engine serves"
        ) from error


def read_reading(
    checkpoint: Checkpoint,
    save: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Reading:
    """Read the fingerprint in a checkpoint's folder, or compute it now."""
    if readings.exists(checkpoint.folder) and not save:
        reading = readings.read(checkpoint.folder)
        if reading.weights != checkpoint.fingerprint:
            raise RopepatchError(
                f"the {READING} of {checkpoint.name} belongs to other weights",
                hint=HINT,
            )
        if reading.target > checkpoint.config.window:
            raise RopepatchError(
                f"{READING} covers {reading.target} tokens, config.json allows "
                f"{checkpoint.config.window}",
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
    ids: list[int]
    tokenizer: PreTrainedTokenizerBase | None
    say: Callable[[str], None]
    refuses: bool = False  # whether the server refused a long prompt

    def all(self, advance: Advance) -> tuple[list[Top | None], int | None]:
        """Return the answers at every position, and the server's limit in tokens; None if it reads all."""
        positions = self.reading.positions
        answers: list[Top | None] = []
        limit: int | None = None
        for done, position in enumerate(positions):
            advance(done, len(positions))
            answer = None
            if limit is None:
                answer, limit = self._at(position, bool(answers))
            answers.append(answer)
        if limit is None:
            limit = self._hidden_limit(answers)
        return answers, limit

    def _at(self, position: int, has_answered: bool) -> tuple[Top | None, int | None]:
        """Return the answer at a position, or the server's limit in tokens if the prompt is too long."""
        text = self._text(position)
        if (
            self.server.form is not None
            and not self.server.form.by_ids
            and text is None
        ):
            return None, None
        try:
            answer = self.server.next_token(self.ids[:position], text)
        except RefusedError as error:
            if not has_answered:
                raise
            self.say(f"{position} tokens: {error}")
            first = self.reading.positions[0]
            try:  # a request that succeeded before
                self.server.next_token(self.ids[:first], self._text(first))
            except RefusedError:
                raise RopepatchError(
                    f"{self.server.shown} stopped answering: {error}",
                    hint="restart the server, and check its log",
                ) from error
            self.refuses = True
            return None, self._longest(position)
        if (
            answer.tokens is not None and answer.tokens < position - 1
        ):  # the BOS token may not count
            return None, answer.tokens
        return self._read(answer), None

    def _longest(self, refused: int) -> int:
        """Find the longest prompt that a server answers: as it states, else by bisection."""
        earlier = max(
            (one for one in self.reading.positions if one < refused), default=1
        )
        if self.server.limit is not None and earlier <= self.server.limit <= refused:
            return self.server.limit
        low, high = earlier, refused
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self.server.next_token(self.ids[:middle], self._text(middle))
                low = middle
            except RefusedError:
                high = middle
        return low + 1  # including the generated token

    def _hidden_limit(self, answers: list[Top | None]) -> int | None:
        """Find how many tokens a silently truncating server uses; None if it uses all.

        Such a server returns the same distribution for the whole prompt as for its last tokens only.
        """
        last = next(
            (row for row in reversed(range(len(answers))) if answers[row]), None
        )
        if last is None or not self.reading.beyond[last] or not self.server.form:
            return None
        if judge(self.reading, answers).is_right or not self.server.form.by_ids:
            return None
        beyond = [
            one
            for one, is_beyond in zip(answers, self.reading.beyond, strict=True)
            if one and is_beyond
        ]
        if len(beyond) > 2 and all(one == beyond[0] for one in beyond):
            return self.reading.window  # it uses only the first tokens, at least these
        low, high = 0, self.reading.positions[last]
        if not self._is_same(answers[last], last, self.reading.window):
            return None
        high = self.reading.window
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (low, middle)
                if self._is_same(answers[last], last, middle)
                else (middle, high)
            )
        return high

    def _is_same(self, all_read: Top | None, row: int, count: int) -> bool:
        position = self.reading.positions[row]
        try:
            answer = self._read(
                self.server.next_token(self.ids[position - count : position], None)
            )
        except RefusedError:
            return False
        if answer is None or all_read is None:
            return False
        pairs = [
            (all_read[token], answer[token])
            for token in all_read.keys() & answer.keys()
        ]
        return len(pairs) >= len(all_read) - 1 and all(
            abs(one - two) < 1e-3 for one, two in pairs
        )

    def _text(self, position: int) -> str | None:
        """Return the text of the first tokens; None if it would be tokenized differently."""
        if self.tokenizer is None or self.reading.source.kind != "tales":
            return None
        begin = self.ids[:position]
        text = str(self.tokenizer.decode(begin, skip_special_tokens=True))
        return (
            text
            if list(self.tokenizer(text, verbose=False).input_ids) == begin
            else None
        )

    def _read(self, answer: Answer) -> Top | None:
        """Return the log-probabilities by token id; None if too few token texts are known."""
        if answer.by_id or not answer.by_text or self.tokenizer is None:
            return answer.by_id or None
        best: Top = {}
        for table in self._spellings():
            known = {
                table[text]: value
                for text, value in answer.by_text.items()
                if table.get(text, -1) >= 0
            }
            best = max(best, known, key=len)
        return best if len(best) >= min(3, len(answer.by_text)) else None

    def _spellings(self) -> list[dict[str, int]]:
        """Map the token texts that engines use to token ids; -1 for an ambiguous text."""
        if not hasattr(self, "_tables"):
            assert self.tokenizer is not None
            every = range(self.reading.vocabulary)
            pieces = [
                str(piece)
                for piece in self.tokenizer.convert_ids_to_tokens(list(every))
            ]
            texts = self.tokenizer.batch_decode([[number] for number in every])
            spaced = [
                piece.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")
                for piece in pieces
            ]
            numbers = [str(number) for number in every]
            self._tables = [
                _by_text(spelling) for spelling in (texts, pieces, spaced, numbers)
            ]
        return self._tables


def _by_text(spelling: Sequence[str]) -> dict[str, int]:
    table: dict[str, int] = {}
    for number, text in enumerate(spelling):
        table[text] = -1 if text in table else number
    return table

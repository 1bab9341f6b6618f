"""Compute a checkpoint's fingerprint: its predictions with the right RoPE and with each common error.

Shapes: T tokens of the text, C candidate positions, P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.extension.record import Record
from ropepatch.extension.writing import Written
from ropepatch.model.checkpoint import READING, Checkpoint
from ropepatch.model.config import Config, generates, scaled_twin, stock_code
from ropepatch.model.cost import HOUR, forward_bytes, forward_operations, kind_of
from ropepatch.model.head import log_probs_at
from ropepatch.model.precision import available_bytes
from ropepatch.model.rotary import rotating_by
from ropepatch.probing import reading as readings
from ropepatch.probing.judging import divergence, typical
from ropepatch.probing.reading import (
    DOUBLED,
    FACTORLESS,
    MISREAD,
    RIGHT,
    TWICE,
    UNSCALED,
    Reading,
    Top,
)
from ropepatch.progress import Advance, Progress, Say, unseen
from ropepatch.scaling import METHODS
from ropepatch.scaling.rope import Frequencies, Rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIDE = 24  # positions within, and as many beyond, the original context length
CANDIDATES = 16  # per position; the one with the least certain next token is chosen
TOP = 20
DIGITS = 4
PLACES = 6
UNIT = 2**-8  # relative error of a number in bfloat16, and of a weight in 8 bits
TOLD_APART = 4e-3  # nats: an error with a smaller effect is negligible
# Operations that `extend` spends at most: a minute or two
MOST_WORK = {"cpu": 1e13, "cuda": 1e16}
IN_FLOAT32 = 2  # times as long as in the precision of `HOUR`


def why_none(config: Config, method: str, window: int, target: int) -> str | None:
    """Return why a checkpoint with this configuration cannot have a fingerprint; None if it can.

    Args:
        config: The configuration of the checkpoint, or of the one it is made from.
        method: The method that extends it.
        window: The original context length, in tokens.
        target: The target length, in tokens.
    """
    if config.kind != "stock" or method in REMAPPINGS:
        return "it needs ropepatch's own code, which no engine runs"
    if method in METHODS and METHODS[method].length_dependent:
        return f"{method} changes with the prompt length, differently in each engine"
    if config.unloaded:
        return config.unloaded
    if not config.has_rope:
        return "its attention has no RoPE"
    if not generates(config.whole):
        return "it has no language model head"
    if config.is_quantised:
        return "its weights are quantised"
    if target - window < SIDE:
        return (
            f"the target length is less than {SIDE} tokens beyond the original length"
        )
    return None


def check_fingerprint(plan: Plan) -> None:
    """Raise an error if a checkpoint cannot have a fingerprint."""
    window = plan.source.config.window
    if reason := why_none(plan.config, plan.method.name, window, plan.target):
        raise RopepatchError(reason, hint=f"leave out {argument('reading')}")


def add_fingerprint(
    plan: Plan,
    written: Written,
    *,
    asked: bool,
    device: str,
    say: Say,
    progress: Progress,
) -> None:
    """Write the fingerprint of a checkpoint if requested or quick, or say why there is none.

    An existing fingerprint of the same weights is kept.
    """
    checkpoint = Checkpoint(written.path)
    try:
        if (
            readings.exists(written.path)
            and readings.read(written.path).weights == checkpoint.fingerprint
        ):
            return
        check_fingerprint(plan)
        # A model in memory may be a part of its checkpoint
        is_whole = isinstance(plan.source, Checkpoint)
        config = plan.config if is_whole else checkpoint.config
        job = Job(checkpoint, written.record, config, device, written.model)
        if asked:
            say(f"computing {READING}: {job.duration}")
        else:
            job.check_affordable()
        with progress("fingerprint") as advance:
            readings.write(written.path, job.reading(advance))
    except RopepatchError as error:
        if asked:
            raise
        say(f"no {READING}: {error}")


def make_reading(checkpoint: Checkpoint) -> Reading:
    """Compute the fingerprint of an extended checkpoint on the CPU."""
    record = records.read(checkpoint.folder)
    window = record.original_max_position_embeddings
    if reason := why_none(checkpoint.config, record.method, window, record.target):
        raise RopepatchError(f"{checkpoint.folder.name} cannot be probed: {reason}")
    return Job(checkpoint, record, checkpoint.config).reading()


@dataclass(frozen=True)
class Job:
    """The computation of a fingerprint with stock transformers, once per hypothesis.

    Args:
        checkpoint: The extended checkpoint.
        record: Its record.
        config: Its configuration, or that of its source, for which the model is alike.
        device: Where the model runs.
        model: The loaded model, which is cast and moved in place; loaded if not given.
    """

    checkpoint: Checkpoint
    record: Record
    config: Config
    device: str = "cpu"
    model: PreTrainedModel | None = None

    @cached_property
    def ropes(self) -> dict[str, Frequencies]:
        """The frequencies of each hypothesis."""
        return ropes(self.record)

    @cached_property
    def operations(self) -> int:
        """The operations of all hypotheses, and of the right one in 16 bits."""
        weights = sum(map(math.prod, self.checkpoint.weights.shapes.values()))
        once = forward_operations(self.config.text, weights, self.record.target)
        return (len(self.ropes) + 1) * once

    @property
    def room(self) -> float:
        """The available memory, in passes; infinite on devices with memory of their own."""
        if torch.device(self.device).type not in ("cpu", "mps"):
            return math.inf
        pass_bytes = forward_bytes(self.config.text, self.record.target, 4)
        return available_bytes() / (self.checkpoint.weights.num_bytes + pass_bytes)

    @property
    def duration(self) -> str:
        """How long it takes, as text."""
        kind = kind_of(torch.device(self.device).type)
        minutes = max(1, round(60 * IN_FLOAT32 * self.operations / HOUR[kind]))
        return f"about {minutes:,} min at {self.record.target} tokens"

    def check_affordable(self) -> None:
        """Raise a `RopepatchError` if `extend` has not the time or the memory for it."""
        if self.room < 1:
            raise RopepatchError("the memory is too small for one pass")
        if self.operations > MOST_WORK[kind_of(torch.device(self.device).type)]:
            raise RopepatchError(
                f"computing it takes {self.duration}; {argument('reading')} does it anyway"
            )

    def reading(self, progress: Advance = unseen) -> Reading:
        """Compute the fingerprint; ``progress`` takes the number of hypotheses done and of all."""
        record, name = self.record, self.checkpoint.folder.name
        window, errors = record.original_max_position_embeddings, dict(self.ropes)
        del errors[RIGHT]  # that of the checkpoint itself
        passes = len(errors) + 2
        model = self._placed()
        vocabulary = model.get_output_embeddings().weight.shape[0]
        tokenizer = tokenizer_of(self.checkpoint)
        ids = readings.draw_ids(tokenizer, vocabulary, record.target)
        groups = _candidates(ids, tokenizer, window, record.target)
        site = self.config.site
        stock = model.get_submodule(site.path)
        rows: dict[str, list[Top]] = {}

        with (
            torch.inference_mode(),
            stock_code(f"run {name}"),
            rotating_by(model, site.path, stock),
        ):
            tokens = torch.tensor([ids[:-1]], device=self.device)
            progress(0, passes)
            every = log_probs_at(model, tokens, list(chain.from_iterable(groups)))
            positions, right = _least_certain(every, groups)
            rows[RIGHT] = most_probable(right, name)
            with _in_16_bits(model):
                rounded = log_probs_at(model, tokens, positions)
            for error, table in errors.items():
                progress(1 + len(rows), passes)
                here = table._replace(inv_freq=table.inv_freq.to(self.device))
                model.set_submodule(site.path, scaled_twin(stock, site, here))
                wrong = log_probs_at(model, tokens, positions)
                rows[error] = most_probable(wrong, name)

        inexact = most_probable(rounded, name)
        first = sum(position <= window for position in positions)
        alike = []
        for error in errors:
            far = list(map(divergence, rows[RIGHT][first:], rows[error][first:]))
            if typical(far) <= TOLD_APART:
                alike.append(error)
        return Reading(
            version=1,
            weights=self.checkpoint.fingerprint,
            window=window,
            target=record.target,
            vocabulary=vocabulary,
            ids=ids,
            positions=positions,
            tops={key: row for key, row in rows.items() if key not in alike},
            alike=alike,
            rounded=[
                round(far, PLACES) for far in map(divergence, rows[RIGHT], inexact)
            ],
        )

    def _placed(self) -> Any:
        """Return the model on its device, in float32 where there is the memory for it."""
        small = self.room > 2
        model: Any = self.model
        if model is None:
            model = self.checkpoint.load(torch.float32 if small else None)
        return (model.float() if small else model).to(self.device)


def ropes(record: Record) -> dict[str, Frequencies]:
    """Return the frequencies of the extended model, and of each error that differs from all before it."""
    right = Frequencies(torch.tensor(record.inv_freq), record.attention_factor)
    before = Frequencies(
        torch.tensor(record.inv_freq_before), record.attention_factor_before
    )
    ratio = (right.inv_freq / before.inv_freq).nan_to_num(1.0)
    a = right.attention_factor / before.attention_factor
    window, factor = record.original_max_position_embeddings, record.factor
    different = {RIGHT: right}
    for name, table in (
        (UNSCALED, before),
        (FACTORLESS, right._replace(attention_factor=before.attention_factor)),
        (TWICE, Frequencies(right.inv_freq * ratio, right.attention_factor * a)),
        (DOUBLED, _rescaled(record, 2 * factor, window)),
        (MISREAD, _rescaled(record, factor, record.target)),
    ):
        tables = different.values()
        if table and all(table.distance(other) > 1e-7 for other in tables):
            different[name] = table
    return different


def _rescaled(record: Record, factor: float, window: int) -> Frequencies | None:
    """Apply a record's method with another factor or original length; None if it accepts none."""
    carried = tuple(record.inv_freq_before) if record.already_scaled else None
    dim, theta = record.rotary_dim, record.rope_theta
    parameters = record.parameters | {"factor": factor}
    try:
        rope = Rope(dim, theta, window, carried, float(record.attention_factor_before))
        return METHODS.make(record.method, **parameters).frequencies(rope)
    except RopepatchError:
        return None


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """Return the checkpoint's tokenizer, or None."""
    try:
        return checkpoint.tokenizer
    except RopepatchError:
        return None


def _candidates(
    ids: list[int], tokenizer: PreTrainedTokenizerBase | None, window: int, length: int
) -> list[list[int]]:
    """Return groups of candidate positions, at the ends of words if there are any.

    A prompt that ends with a word is tokenized like the beginning of the whole text.
    """
    pieces = (
        [""] * length if tokenizer is None else tokenizer.convert_ids_to_tokens(ids)
    )
    begins = [str(piece)[:1] in ("Ġ", "▁", " ") for piece in pieces]
    within = (max(2, window // 4), window)
    beyond = (window + 1 + (length - window) // 32, length - 1)
    groups = []
    for first, last in (within, beyond):
        count = min(SIDE, last + 1 - first)
        edges = torch.linspace(first, last + 1, count + 1).long().tolist()
        for begin, end in pairwise(edges):
            words = [position for position in range(begin, end) if begins[position]]
            groups.append((words or list(range(begin, end)))[:CANDIDATES])
    return groups


def _least_certain(
    log_probs: Tensor, groups: list[list[int]]
) -> tuple[list[int], Tensor]:
    """Choose the position with the greatest entropy in each group: certain predictions hide errors.

    Args:
        log_probs: Those at all positions of the groups: [C, V].
        groups: The candidates of each position.

    Returns:
        The positions, and their log-probabilities [P, V].
    """
    positions, chosen = [], []
    parts = torch.split(log_probs, list(map(len, groups)))
    for group, part in zip(groups, parts, strict=True):
        entropy = torch.special.entr(part.exp()).sum(-1)
        row = int(entropy.argmax())
        positions.append(group[row])
        chosen.append(part[row])
    return positions, torch.stack(chosen)


def most_probable(log_probs: Tensor, name: str) -> list[Top]:
    """Return the most probable tokens of log-probabilities [P, V] of a model, most probable first."""
    if not log_probs.isfinite().any(-1).all():
        raise RopepatchError(
            f"{name} computes logits that are NaN or infinite",
            hint="load the model anew; `ropepatch doctor` checks its weights",
        )
    values, ids = log_probs.topk(min(TOP, log_probs.shape[1]))
    return [
        {token: round(value, DIGITS) for token, value in zip(*row, strict=True)}
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]


@contextmanager
def _in_16_bits(model: PreTrainedModel) -> Iterator[None]:
    """Change the outputs of all modules within the block by errors as large as those of bfloat16."""
    generator = torch.Generator(model.device).manual_seed(0)

    def inexact(value: Any) -> Any:
        if type(value) is tuple:  # of cosines and sines, or with attention weights
            return tuple(map(inexact, value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        uniform = torch.rand(value.shape, generator=generator, device=value.device)
        return (value * (1 + UNIT * (uniform * 2 - 1))).to(value.dtype)

    def change(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return inexact(output)

    hooks = [module.register_forward_hook(change) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

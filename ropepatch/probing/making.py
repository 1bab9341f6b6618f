"""Compute a checkpoint's fingerprint: its predictions with the right RoPE and with each common error.

Shapes: T tokens of the text, C candidate positions, P positions, V vocabulary.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Sequence
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
from ropepatch.model.config import Config, scaled_twin, stock_code
from ropepatch.model.cost import HOUR, forward_bytes, forward_operations, kind_of
from ropepatch.model.head import log_probs_at
from ropepatch.model.precision import available_bytes
from ropepatch.model.rotary import rotating_by
from ropepatch.probing import reading as readings
from ropepatch.probing.judging import FEWEST, divergences, effects, shows_no_error
from ropepatch.probing.reading import (
    DOUBLED,
    FACTORLESS,
    MISREAD,
    RIGHT,
    TWICE,
    UNSCALED,
    Reading,
    Top,
    Tops,
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
    """Return why a checkpoint cannot have a fingerprint; None if it can.

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
    if config.is_quantised:
        return "its weights are quantised"
    if target - window < SIDE:
        return (
            f"the target length is less than {SIDE} tokens beyond the original length"
        )
    return None


def _why_none_of(plan: Plan) -> str | None:
    window = plan.source.config.window
    return why_none(plan.config, plan.method.name, window, plan.target)


def check_fingerprint(plan: Plan) -> None:
    """Refuse a requested fingerprint if none is possible."""
    if reason := _why_none_of(plan):
        raise RopepatchError(f"{argument('reading')}: {reason}", hint="leave it out")


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
        if reason := _why_none_of(plan):
            raise RopepatchError(reason)
        # A model in memory may be a part of its checkpoint
        is_whole = isinstance(plan.source, Checkpoint)
        config = plan.config if is_whole else checkpoint.config
        job = Job(checkpoint, written.record, config, device, written.model)
        ropes = job.ropes if asked else job.affordable()
        if asked:
            say(f"computing {READING}: {job.duration}")
        with progress("fingerprint") as advance:
            reading = job.reading(ropes, progress=advance)
        readings.write(written.path, reading)
    except RopepatchError as error:
        if asked:
            raise
        say(f"no {READING}: {error}")
        return
    if shows_no_error(reading):
        say(
            f"warning: {READING} cannot show a RoPE error: none changes this model "
            f"up to {reading.target:,} tokens"
        )


def make_reading(
    checkpoint: Checkpoint, hypotheses: Sequence[str] | None = None
) -> Reading:
    """Compute the fingerprint of an extended checkpoint on the CPU.

    Args:
        checkpoint: The extended checkpoint.
        hypotheses: The names of the hypotheses to compute; None for all.
    """
    record = records.read(checkpoint.folder)
    window = record.original_max_position_embeddings
    if reason := why_none(checkpoint.config, record.method, window, record.target):
        raise RopepatchError(f"{checkpoint.folder.name} cannot be probed: {reason}")
    job = Job(checkpoint, record, checkpoint.config)
    names = job.ropes if hypotheses is None else hypotheses
    return job.reading({name: job.ropes[name] for name in names if name in job.ropes})


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
        """The operations of one pass."""
        weights = sum(map(math.prod, self.checkpoint.weights.shapes.values()))
        return forward_operations(self.config.text, weights, self.record.target)

    @cached_property
    def bytes_needed(self) -> int:
        """The memory of one pass: the weights, and the activations of a layer or the logits."""
        pass_bytes = forward_bytes(self.config.text, self.record.target, 4)
        return self.checkpoint.weights.num_bytes + pass_bytes

    @cached_property
    def available(self) -> float:
        """The bytes of the machine, in which CPUs and Apple's GPUs compute; infinite for other devices."""
        shared = torch.device(self.device).type in ("cpu", "mps")
        return available_bytes() if shared else math.inf

    @property
    def kind(self) -> str:
        """The kind of device, in `HOUR`."""
        return kind_of(torch.device(self.device).type)

    @property
    def duration(self) -> str:
        """How long all hypotheses take, as text."""
        work = (len(self.ropes) + 1) * self.operations
        minutes = max(1, round(60 * IN_FLOAT32 * work / HOUR[self.kind]))
        return f"about {minutes:,} min at {self.record.target} tokens"

    def affordable(self) -> dict[str, Frequencies]:
        """Return the hypotheses that `extend` has time to compute.

        Raises:
            RopepatchError: If it has not the time or the memory for two.
        """
        if self.bytes_needed > self.available:
            raise RopepatchError(
                f"it needs {self.bytes_needed / 1e9:.1f} GB of memory, "
                f"{self.available / 1e9:.1f} GB are available"
            )
        for count in (len(self.ropes), FEWEST):
            work = (count + 1) * self.operations  # once more in 16 bits
            if work <= MOST_WORK[self.kind]:
                return dict(list(self.ropes.items())[:count])
        raise RopepatchError(
            f"computing it takes {self.duration}; {argument('reading')} does it anyway"
        )

    def reading(
        self, ropes: dict[str, Frequencies], *, progress: Advance = unseen
    ) -> Reading:
        """Compute the fingerprint.

        Args:
            ropes: The hypotheses to compute, `right` first.
            progress: Called with the number of hypotheses done and of all.
        """
        record, name = self.record, self.checkpoint.folder.name
        window, passes = record.original_max_position_embeddings, len(ropes) + 1
        model = self._placed()
        vocabulary = model.get_output_embeddings().weight.shape[0]
        tokenizer = tokenizer_of(self.checkpoint)
        source, ids = readings.draw_source(tokenizer, vocabulary, record.target, 0)
        candidates = _candidates(ids, tokenizer, window, record.target)
        site = self.config.site
        stock = model.get_submodule(site.path)
        log_probs: dict[str, Tensor] = {}
        with (
            torch.inference_mode(),
            stock_code(f"run {name}"),
            rotating_by(model, site.path, stock),
        ):
            tokens = torch.tensor([ids[:-1]], device=self.device)
            progress(0, passes)
            every = list(chain.from_iterable(candidates))
            positions, log_probs[RIGHT] = _least_certain(
                log_probs_at(model, tokens, every), candidates
            )
            with _in_16_bits(model):
                inexact = log_probs_at(model, tokens, positions)
            for error in list(ropes)[1:]:
                progress(1 + len(log_probs), passes)
                table = ropes[error]._replace(
                    inv_freq=ropes[error].inv_freq.to(self.device)
                )
                model.set_submodule(site.path, scaled_twin(stock, site, table))
                log_probs[error] = log_probs_at(model, tokens, positions)
        rows = {
            key: most_probable(values, name, DIGITS)
            for key, values in log_probs.items()
        }
        rounded = most_probable(inexact, name, DIGITS)
        tops = {key: _tops(row) for key, row in rows.items()}
        by_error = effects(rows, [position > window for position in positions])
        far = divergences(rows[RIGHT], rounded)
        alike = [error for error, effect in by_error.items() if effect <= TOLD_APART]
        for error in alike:
            del tops[error]
        libraries = "ropepatch", "transformers", "torch"
        return Reading(
            version=1,
            weights=self.checkpoint.fingerprint,
            window=window,
            target=record.target,
            vocabulary=vocabulary,
            dtype=str(model.dtype).removeprefix("torch."),
            source=source,
            positions=positions,
            tops=tops,
            **({"alike": alike} if alike else {}),
            rounded=[round(value or 0.0, PLACES) for value in far],
            versions={
                library: importlib.metadata.version(library) for library in libraries
            },
        )

    def _placed(self) -> Any:
        """Return the model on its device, in float32 where there is the memory for it."""
        small = 2 * self.bytes_needed < self.available
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
    every = {
        RIGHT: right,
        UNSCALED: before,
        FACTORLESS: right._replace(attention_factor=before.attention_factor),
        TWICE: Frequencies(right.inv_freq * ratio, right.attention_factor * a),
        DOUBLED: _rescaled(record, 2 * factor, window),
        MISREAD: _rescaled(record, factor, record.target),
    }
    different: dict[str, Frequencies] = {}
    for name, table in every.items():
        if table is None:
            continue
        if all(table.distance(other) > 1e-7 for other in different.values()):
            different[name] = table
    return different


def _rescaled(record: Record, factor: float, window: int) -> Frequencies | None:
    """Apply a record's method with another factor or original length; None if it accepts none."""
    carried = tuple(record.inv_freq_before) if record.already_scaled else None
    parameters = record.parameters | {"factor": factor}
    try:
        rope = Rope(
            record.rotary_dim,
            record.rope_theta,
            window,
            carried,
            float(record.attention_factor_before),
        )
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
        entropy = -(part.exp() * part).nan_to_num().sum(-1)
        row = int(entropy.argmax())
        positions.append(group[row])
        chosen.append(part[row])
    return positions, torch.stack(chosen)


def most_probable(log_probs: Tensor, name: str, digits: int | None = None) -> list[Top]:
    """Return the most probable tokens of log-probabilities [P, V] of a model, most probable first."""
    if not log_probs.isfinite().any(-1).all():
        raise RopepatchError(
            f"{name} computes logits that are NaN or infinite",
            hint="run `ropepatch.diagnose(model)` to check its RoPE",
        )
    values, ids = log_probs.topk(min(TOP, log_probs.shape[1]))
    if digits is None:
        numbers = values.tolist()
    else:
        numbers = [[round(value, digits) for value in row] for row in values.tolist()]
    pairs = zip(ids.tolist(), numbers, strict=True)
    return [dict(zip(*pair, strict=True)) for pair in pairs]


def _tops(rows: list[Top]) -> Tops:
    return Tops(
        ids=[list(row) for row in rows], log_probs=[list(row.values()) for row in rows]
    )


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

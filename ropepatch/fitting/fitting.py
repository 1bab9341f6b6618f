"""Fit frequencies, attention factor and query factors to a target length, with frozen weights."""

from __future__ import annotations

import io
import logging
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.attention import Remapped, make_remapping, remap_positions, teaching_window
from ropepatch.data.positions import PoSE
from ropepatch.data.questions import TAUGHT, QuestionRow, Questions
from ropepatch.data.tokens import default_cache
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.exam import Exam, answerable, compared, verdict
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.results import environment
from ropepatch.extension.planning import Plan, plan_by
from ropepatch.extension.queries import QueryLayers
from ropepatch.files import check_resumed, whole_file
from ropepatch.fitting.descent import FitSettings, FitState, begin, proceed, stopped
from ropepatch.fitting.examples import SKIPPING, read_splits, row_length, windows_to_write
from ropepatch.fitting.loss import FitLoss, learnable
from ropepatch.fitting.vectors import Vector
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import check_device
from ropepatch.model.precision import describe_placement, prefers_float32, without_subnormals
from ropepatch.processes import Processes, join
from ropepatch.progress import Progress, no_bar
from ropepatch.scaling.file import write_scaling
from ropepatch.scaling.searched import CustomDivisors
from ropepatch.settings import Length, Queries, relative_length, seed_of

logger = logging.getLogger(__name__)

STATE = "fit.pt"  # in the work folder
SAVING = 60  # seconds between two saved states, unless a validation ends
TEACHER, NO_TEACHER = "rerope", "none"  # the remapping for `auto`, and the word for no remapping
STARTING = 3  # one in so many parts of the time budget is for the starts


@dataclass(frozen=True)
class Fitted:
    """A fitted scaling, its history, and its gain with an interval."""

    plan: Plan  # the scaling on its model, for `ropepatch.patch` and `extend`
    record: dict[str, Any]  # settings, history and held-out results, JSON-ready

    @property
    def scaling(self) -> CustomDivisors:
        """The divisors, the attention factor and the query factors."""
        return cast("CustomDivisors", self.plan.scaling)

    def save(self, file: str | Path) -> Path:
        """Write a JSON file that every command accepts as a method."""
        plan = self.plan
        return write_scaling(file, plan.scaling, plan.rope, plan.target, fit=self.record)

    def __repr__(self) -> str:
        span = f"{self.plan.rope.original_max_position_embeddings} -> {self.plan.target} tokens"
        gain = self.record.get("held_out", {}).get("gain")
        found = "" if gain is None else f", gain {gain:.4f} nats per token"
        return f"Fitted({self.plan.model}, {span}{found})"

    def __str__(self) -> str:
        held, window = self.record["held_out"], self.plan.rope.original_max_position_embeddings
        gain, behind = held["gain"], held["after"] - held["own_window"]
        count = held["documents"]
        doubt = f"windows of {count} document{'s' * (count > 1)}: no interval"
        if held["gain_interval"] is not None:
            doubt = "95 % {:.3f} to {:.3f}".format(*held["gain_interval"])
        stopped = f", stopped after {self.record['minutes']:g} min" if self.record.get("stopped") else ""
        divisors = ", ".join(f"{divisor:.3g}" for divisor in self.scaling.divisors)
        return "\n".join(
            [
                f"{self.plan.model}: {window} -> {self.plan.target} tokens",
                f"{_better(gain)} than {self.record['start']}, {doubt}; "
                f"{_better(-behind)} than the base model in blocks of its original length",
                f"frequency scale factors (θ -> θ/d), fastest pair first: {divisors}",
                f"attention factor: {self.scaling.attention_factor:.4g}",
                *_described(self.scaling.queries),
                f"{self.record['forward_tokens'] / 1e6:.2f} M forward tokens, "
                f"{self.record['seconds']:.0f} s{stopped}",
                verdict((self.record["start"], "fit"), held, window),
            ]
        )


def _described(queries: Queries | None) -> Iterator[str]:
    if queries:
        factors = torch.tensor(queries, dtype=torch.float64)
        (least, most), phase = factors[..., 0].aminmax(), factors[..., 1].abs().max()
        yield (
            f"{factors[..., 0].numel()} query factors: amplitudes {least:.2f} to {most:.2f}, "
            f"phases within {phase:.2f} rad"
        )


def _better(gain: float) -> str:
    return f"{abs(gain):.3f} nats/token {'worse' if gain < 0 else 'better'}"


@torch.inference_mode(False)
@torch.enable_grad()  # also within a block without gradients
@without_subnormals()
def fit(
    model: str | Path | Checkpoint,
    *,
    to: Length,
    original: Length | None = None,
    text: str | Path | None = None,
    field: str = "text",
    split: str = "train",
    steps: int = 200,
    init: str = "auto",
    teacher: str = "auto",
    queries: bool = True,
    seed: int = 0,
    spare: int = 0,
    revision: str | None = None,
    device: str | None = None,
    work: Path | None = None,
    minutes: float | None = None,
    progress: Progress = no_bar,
    say: Callable[[str], None] = lambda line: None,
) -> Fitted:
    """Learn frequency divisors, an attention factor and query factors for a target length.

    Query factors are an amplitude and a phase per query head and rotary pair. The loss is the KL divergence
    from the base model under a position remapping, which keeps every distance within the original length.
    Every other sequence asks a retrieval question, if the base model answers that kind within its original
    length; the loss of its answer is the cross-entropy. Sequences shorter than the target skip positions,
    and there the base model teaches without a remapping. With `spare`, texts that a perplexity task with so
    many windows would measure are left out.

    Returns the vector with the lowest validation loss among those with neither a higher short-context loss
    nor a lower answer log-prob than YaRN, if YaRN is a start. If a whole descent has none, it tries vectors
    nearer to YaRN. The record contains the losses and answers on texts that were not used for the choice.
    """
    settings = FitSettings(steps=steps, init=init, queries=queries, seed=seed)
    if minutes is not None and not 0 < minutes < math.inf:
        raise RopepatchError(f"minutes must be a number above 0, got {minutes}", hint="leave it out")
    began = time.perf_counter()
    processes = join(device)
    is_split = processes.count > 1
    check_device(processes.device)
    if isinstance(model, Checkpoint):
        source = model.complete()
    else:
        source = Checkpoint.find(model, revision, original=original, weights=True)
    if source.is_quantised:
        raise RopepatchError(
            f"the weights of {source.name} are quantised: fit needs gradients through them",
            hint="fit the unquantised checkpoint without query factors, and use the result here",
        )
    window = source.window
    target = relative_length(to, window)
    if target <= window:
        raise RopepatchError(
            f"{source.name} already covers {window} tokens; nothing to fit at {target}",
            hint=argument("to", 4 * window),
        )
    writes = text is None and source.name != "tiny"
    missing = RopepatchError(
        f"{argument('text')} is missing",
        hint=f"{argument('text', 'FILE')}, a folder, a JSONL file or a `datasets` id",
    )
    if writes and teacher == NO_TEACHER:
        raise missing
    if teacher not in ("auto", NO_TEACHER):
        make_remapping(teacher)
    tokenizer = source.tokenizer
    reading: dict[str, Any] = {"field": field, "split": split, "length": target}
    if not writes:  # an unsuitable text is an error before weights are loaded
        splits = read_splits(tokenizer, text, spare=spare, **reading)
    loaded: Any = source.load()
    length = row_length(loaded, window, target, settings.planned_steps(), processes.device)
    mapped, taught_by = _teacher(loaded, teacher, window, target, say, source.original)
    if writes:
        if mapped is None:
            raise missing
        wanted = windows_to_write(length, target) * target
        written = import_module("ropepatch.training.self_written").self_written(
            source, tokenizer, length=window, tokens=wanted, seed=seed, cache=default_cache()
        )
        splits = read_splits(tokenizer, written, spare=0, **reading)
    splits.check_ids(loaded.config.get_text_config().vocab_size)
    request = {
        "model": source.name,
        "revision": source.revision,
        "weights": source.fingerprint,
        "to": target,
        **({} if length == target else {"row": length}),
        "text": splits.text,
        "digest": splits.digest,
        "windows": len(splits.train),
        "teacher": taught_by,
        **({"original": window} if source.original_window else {}),
        **settings.model_dump(),
    }
    kept = read_state(work, request)
    layers = _query_layers(loaded, source, say) if queries and mapped else None
    factors, heads = (2 * math.prod(layers.shape), layers.shape[1]) if layers else (0, 1)
    placed = _placed(loaded, processes, kept)
    if kept:
        kinds = kept["kinds"]
    else:
        say(f"asking {source.name} questions within its original length of {window:,} tokens")
        kinds = answerable(placed, tokenizer, window, seed=seed, split=is_split)
        say(f"kinds of questions that it answers: {', '.join(kinds) or 'none'}")
    exams = {part: _exam(tokenizer, kinds, target, part, seed) for part in ("validation", "test")}
    with learnable(placed, source, layers) as module:
        for line in describe_placement(loaded):
            say(line)
        parts = loaded, module, source.rope
        rows = [row for window in splits.train for row in torch.split(window, length) if len(row) == length]
        rows, answers = _with_questions(rows, tokenizer, kinds, seed)
        places = None
        if length < target:
            places, answers = _skipped(rows, target, seed), [SKIPPING * weights for weights in answers]
        how: dict[str, Any] = {"answers": answers, "positions": places, "target": target}
        train = FitLoss(*parts, rows, mapped, processes, **how)
        validation = FitLoss(*parts, splits.validation, mapped, processes, exam=exams["validation"])
        began -= kept.get("seconds", 0.0)
        budget = math.inf if minutes is None else 60 * minutes

        def save(state: FitState) -> None:
            if work is not None and processes.first:
                seconds, dtype = time.perf_counter() - began, str(loaded.dtype)
                terms = {"asked": request, "seconds": seconds, "dtype": dtype, "kinds": kinds}
                write_state(work, terms | {"fit": state.state_dict()})

        if kept:
            state = FitState.from_state_dict(kept["fit"])
        else:
            with progress("starts") as advance:
                until = began + budget / STARTING
                state = begin(train, validation, settings, factors=factors, until=until, advance=advance)
            save(state)
        saved = time.perf_counter()
        with progress("fit") as advance:
            for now in proceed(train, validation, settings, state):
                advance(now.steps, now.planned_steps(settings))
                if len(now.history) > len(state.history) or time.perf_counter() > saved + SAVING:
                    save(now)
                    saved = time.perf_counter()
                state = now
                if not now.finished and budget < math.inf and _late(began + budget, processes):
                    state = stopped(validation, now)
                    break
        seconds = time.perf_counter() - began
        record = request | {
            **({} if minutes is None else {"minutes": minutes, "stopped": not state.finished}),
            "kinds": kinds,
            "start": state.reference.start,
            "found": {"start": state.best.start, "step": state.best.step},
            "decided_by": {
                "windows": len(splits.validation),
                "before": state.reference.loss,
                "after": state.best.loss,
                "log_prob_before": state.reference.log_prob,
                "log_prob_after": state.best.log_prob,
            },
            "held_out": _outcome(
                FitLoss(*parts, splits.test, processes=processes, exam=exams["test"]), splits.sources, state
            ),
            "history": list(state.history),
            "forward_tokens": state.forward_tokens,
            "seconds": round(seconds, 1),
            "env": environment(loaded),
        }
    scaling = Vector.from_flat(state.best.vector, source.rope.num_pairs).scaling(target / window, heads)
    return Fitted(plan_by(source, scaling, target), record)


def _with_questions(
    windows: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str], seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Add as many sequences with questions to windows [T]; return them and their tokens' answer weights."""
    taught = [kind for kind in kinds if kind in TAUGHT]
    rows = list[QuestionRow]()
    if taught:
        texts = [str(tokenizer.decode(window, skip_special_tokens=True)) for window in windows]
        questions = Questions(tokenizer, texts, taught, seed)
        rows = [questions.row(number, len(window)) for number, window in enumerate(windows)]
    none = torch.zeros(len(windows[0]))
    return [*windows, *(row.ids for row in rows)], [none] * len(windows) + [row.answers for row in rows]


def _skipped(rows: Sequence[Tensor], target: int, seed: int) -> list[Tensor]:
    """Draw skipped positions up to the target for each row [T]."""
    draws = (random.Random(seed_of("positions", seed, number)) for number in range(len(rows)))
    return [PoSE().sample(len(row), target, draw) for row, draw in zip(rows, draws, strict=True)]


def _exam(
    tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str], length: int, part: str, seed: int
) -> Exam | None:
    return Exam.of(tokenizer, kinds, length, seed=seed_of("fit", part, seed)) if kinds else None


def _outcome(test: FitLoss, sources: Sequence[int], state: FitState) -> dict[str, Any]:
    """Measure loss and answers before and after, and the base model's loss, on test windows."""
    window, pairs = test.rope.original_max_position_embeddings, test.rope.num_pairs
    ends = [Vector.from_flat(end.vector, pairs) for end in (state.reference, state.best)]
    before, after = map(test.token_losses, ends)
    exam, answers = test.exam, dict[str, Any]()
    if exam is not None:
        answers = compared(exam, *(test.answers(vector, exam) for vector in ends))
    test.module.vector = Vector.unscaled(test.rope)
    own = perplexity(test.model, None, list(test.ids), window=window, stride=window // 2, split=True)
    gain = LossCurve(tuple(before - after), tuple(sources)).between(0, test.ids.shape[1])
    return {
        "windows": len(test.ids),
        "documents": len(gain.clusters),
        "before": before.mean().item(),
        "after": after.mean().item(),
        "gain": gain.value,
        "gain_interval": None if gain.missing else list(gain.interval()),
        "short_before": before[:, : window - 1].mean().item(),
        "short_after": after[:, : window - 1].mean().item(),
        "far_before": before[:, window - 1 :].mean().item(),
        "far_after": after[:, window - 1 :].mean().item(),
        "own_window": torch.stack(list(own.nll)).mean().item(),
        **({"answers": answers} if answers else {}),
    }


def _teacher(
    model: Any,
    name: str,
    window: int,
    target: int,
    say: Callable[[str], None],
    original: Length | None = None,
) -> tuple[Remapped | None, str | dict[str, Any]]:
    """Return the teacher's remapping, removed from the model again, and its name and parameters."""
    if name == NO_TEACHER:
        return None, NO_TEACHER
    given = {"window": teaching_window(window)} if name == "auto" else {}
    try:
        called = TEACHER if name == "auto" else name
        with remap_positions(model, called, to=target, original=original, **given) as mapped:
            distances = mapped.distances
            return mapped, {"name": distances.name, **distances.parameters()}
    except RopepatchError as error:
        if name != "auto":
            raise RopepatchError(
                error.args[0], hint=f"{argument('teacher', NO_TEACHER)}, and a text"
            ) from error
        say(f"training on the text's cross-entropy, without a teacher: {error.args[0]}")
        return None, NO_TEACHER


def _query_layers(model: Any, source: Checkpoint, say: Callable[[str], None]) -> QueryLayers | None:
    """Return the layers with query factors; None if their weights cannot contain the factors."""
    try:
        layers = QueryLayers(model, source)
        layers.check_held(source)
        return layers
    except RopepatchError as error:
        say(f"learning frequencies only, no query factors: {error.args[0]}")
        return None


def _placed(model: Any, processes: Processes, kept: dict[str, Any]) -> Any:
    """Move the model to its device, in the precision of the start of the fit."""
    if kept:
        float32 = kept["dtype"] == str(torch.float32)
    else:
        choose = partial(prefers_float32, device=processes.device)
        (float32,) = processes.deal([model], choose, lambda model: "")
    return (model.float() if float32 else model).to(processes.device)


def _late(end: float, processes: Processes) -> bool:
    """Whether a time is over, by the clock of the first process."""
    (late,) = processes.deal([end], lambda end: time.perf_counter() > end, lambda end: "")
    return late


# The state of a fit


def read_state(work: Path | None, request: dict[str, Any]) -> dict[str, Any]:
    """Load the state of a fit from a work folder; empty if there is none."""
    if work is None or not (file := work / STATE).exists():
        return {}
    hint = f"remove it, or choose another {argument('out')}"
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise RopepatchError(f"{file} cannot be read: {type(error).__name__}", hint=hint) from error
    check_resumed(f"{file} belongs to another fit", state["asked"], request, hint=hint)
    return state


def write_state(work: Path, state: dict[str, Any]) -> None:
    """Save the state of a fit atomically in a work folder."""
    work.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()  # for a file, torch turns an OSError into a RuntimeError
    torch.save(state, content)
    with whole_file(work / STATE) as partial:
        partial.write_bytes(content.getbuffer())


def remove_finished(work: Path) -> None:
    """Remove the work folder of a fit that was killed after it had finished."""
    with suppress(
        OSError, EOFError, RuntimeError, UnpicklingError, LookupError, TypeError
    ):  # not a folder of ours
        names = [path.name for path in work.iterdir()]
        if not names or (names == [STATE] and torch.load(work / STATE, weights_only=True)["fit"]["finished"]):
            logger.warning("removing %s, which a process left that was killed", printable(str(work)))
            shutil.rmtree(work)

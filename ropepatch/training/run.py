"""A run: a training over all of its calls and processes, its folder, and the file that records it."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from pydantic import Field

from ropepatch.attention.remapped import check_mappable
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.results import as_read
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.extension.writing import check_outside
from ropepatch.files import (
    absent,
    check_resumed,
    read_json,
    remove,
    whole_file,
    write_json,
)
from ropepatch.model.architectures import BOS_IN_EACH_WINDOW
from ropepatch.model.checkpoint import Keys, Number, Part, Text, validated
from ropepatch.model.config import stock_code
from ropepatch.model.precision import fastest
from ropepatch.processes import Processes, join
from ropepatch.progress import Progress, Say, no_bar, silent
from ropepatch.settings import seed_of
from ropepatch.training.adapter import Weights
from ropepatch.training.arguments import announced, check_launcher, checked_arguments
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.recipe import FREE, Recipe, refuse_map, remapping_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainingArguments

    from ropepatch.model.checkpoint import Checkpoint

# In the folder of a run
RECORD = "run.json"
TRAINED = "trained"  # the weights after the last step
PARTIAL = ".partial"  # where the next checkpoint is written, to be renamed once it is complete
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Recipe keys that the plan or the digest of the text covers, or that change no weight.
NOT_DECISIVE: dict[str, Any] = {
    "model": True,
    "to": True,
    "method": True,
    "watch": True,
    "save": True,
    "trainer": {"save_total_limit", *FREE},
    "data": {"sources": {"__all__": {"text", "field", "split"}}},
}


class RunRecord(Part):
    """All of a run but its weights.

    Args:
        precision: The dtype of the computations.
        decisive: The settings that decide the weights; None until the run has begun.
        base: The base model's loss on each held-out text within the original length: nats and tokens.
        history: A row for each step with a loss or an evaluation; empty until all steps are done.
        seconds: The time of all steps, over all calls.
        device: The device of the last of them.
    """

    precision: Text
    decisive: Keys | None = None
    base: list[list[Number]] = Field(default_factory=list)
    history: list[Keys] = Field(default_factory=list)
    seconds: Number | None = None
    device: Text | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """One training, over all of its processes. What it is made from is read once, when it is needed.

    Args:
        plan: The plan.
        recipe: The recipe.
        out: The folder to write, absolute.
        include: Patterns of further files of the checkpoint.
        say: Takes lines for the user.
        progress: See `ropepatch.progress.bar`.
        processes: The processes.
    """

    plan: Plan
    recipe: Recipe
    out: Path
    include: Sequence[str] = ()
    say: Say = silent
    progress: Progress = no_bar
    processes: Processes = field(default_factory=join)

    @cached_property
    def source(self) -> Checkpoint:
        """The checkpoint with its weights, downloaded if necessary."""
        return self.plan.checkpoint(self.include)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self.source.tokenizer

    @cached_property
    def counted(self) -> Weights:
        """The counts of its weights; raises `RopepatchError` if the model cannot have the adapter."""
        return Weights.of(copy.deepcopy(self.plan.config.skeleton), self.recipe.lora)

    @cached_property
    def earlier(self) -> RunRecord:
        """The record of earlier calls as the first process reads it; of a new run only the precision."""
        return self.processes.write_once(self._read)

    @cached_property
    def arguments(self) -> TrainingArguments:
        """The Trainer's arguments; raises `RopepatchError` if transformers rejects the recipe's."""
        with announced(self.recipe):
            return checked_arguments(self.recipe, self.folder, self.earlier.precision)

    @property
    def folder(self) -> Path:
        """The folder with the files that it needs to resume."""
        return self.out.with_name(f"{self.out.name}.run")

    @property
    def trained(self) -> int:
        """The original context length, in tokens."""
        return self.plan.source.config.window

    @property
    def first_token(self) -> int | None:
        """The token at the start of every sequence, if the model's family needs it."""
        if self.plan.config.model_type not in BOS_IN_EACH_WINDOW:
            return None
        token: int | None = self.tokenizer.bos_token_id
        return token

    def decisive(self, text: str) -> dict[str, Any]:
        """Return the settings that decide the weights; ``text`` is the digest of its texts."""
        plan = self.plan.to_dict()
        return {
            "recipe": self.recipe.model_dump(exclude=NOT_DECISIVE),
            "method": {
                key: plan[key]
                for key in ("method", "factor", "parameters", "target", "inv_freq")
            },
            "weights": self.source.fingerprint,
            "config": seed_of(json.dumps(self.plan.config.raw, sort_keys=True)),
            "text": text,
            "processes": self.processes.count,
        }

    def check_out(self) -> None:
        """Raise `RopepatchError` if the output folder has other content or lies in the checkpoint."""
        if not records.exists(self.out):
            absent(self.out)
        check_outside(self.source, self.out)

    def check_resumed(self, decisive: dict[str, Any]) -> None:
        """Raise `RopepatchError` if the folder is that of a run with other settings."""
        if self.earlier.decisive is not None:
            check_resumed(
                f"{self.folder} belongs to another run",
                self.earlier.decisive,
                decisive,
                hint=f"choose another {argument('out')}, or remove that folder to start again",
            )

    def is_finished(self, decisive: dict[str, Any]) -> bool:
        """Whether the output folder contains the result of this run."""
        if not self.out.exists():
            return False
        training = records.read(self.out).training
        done = training and (training.run, training.recipe.get("save"))
        if done != (name_of(decisive), self.recipe.save):
            absent(self.out)
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against other calls within the block, and remove it if nothing is in it then."""
        earlier = self.earlier
        if not self.processes.first:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RopepatchError(
                f"another process is training in {self.folder}",
                hint=f"wait for it, or choose another {argument('out')}",
            ) from error
        try:
            if self._read() != earlier:
                raise RopepatchError(
                    f"another process has trained in {self.folder} meanwhile",
                    hint="run the same command again",
                )
            yield
        finally:
            if {path.name for path in self.folder.glob("*")} <= {".lock"}:
                shutil.rmtree(self.folder, ignore_errors=True)
            lock.release()

    def write(self, record: RunRecord) -> RunRecord:
        """Write the record."""
        with whole_file(self.folder / RECORD) as partial:
            write_json(partial, record.to_dict(), indent=1)
        return record

    def remove(self) -> None:
        """Remove all files; RECORD goes last, so that an interrupted removal can be completed."""
        for path in self.folder.iterdir():
            if path.name not in (RECORD, ".lock"):
                remove(path)
        remove(self.folder / RECORD)

    def _read(self) -> RunRecord:
        file = self.folder / RECORD
        if self.folder.is_symlink() or not (
            self.folder.is_dir() or not self.folder.exists()
        ):
            raise RopepatchError(
                f"{self.folder} is not a folder, but the run needs a folder there",
                hint=f"choose another {argument('out')}",
            )
        if file.exists():
            hint = f"remove {self.folder} to start again"
            return validated(RunRecord, read_json(file), hint, str(file))
        names = []
        if self.folder.exists():
            names = [path.name for path in self.folder.iterdir()]
        # Hidden are the lock and a partial record.
        if any(not name.startswith(".") for name in names):
            raise RopepatchError(
                f"{self.folder} exists and is not a run",
                hint=f"choose another {argument('out')}",
            )
        return RunRecord(precision=self.recipe.precision or fastest().dtype)


def name_of(decisive: dict[str, Any]) -> str:
    """Return the name of a run, derived from the settings that decide its weights."""
    return f"{seed_of(as_read(decisive)):016x}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the newest last."""
    steps = {}
    for path in folder.glob("checkpoint-*"):
        if match := CHECKPOINT.fullmatch(path.name):
            steps[int(match[1])] = path
    return [steps[step] for step in sorted(steps)]


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None; remove a partial one."""
    remove(folder / PARTIAL)
    complete = checkpoints(folder)
    return complete[-1] if complete else None


# What is checked before a weight is loaded


def checks(run: Run) -> list[Callable[[], object]]:
    """Return the checks of a run, which raise `RopepatchError`; a dry run collects their errors."""
    return [
        partial(_check_4_bits, run.recipe),
        partial(check_trainable, run.plan, run.recipe),
        partial(check_launcher, run.recipe),
        partial(_check_attention, run.plan, run.recipe),
        lambda: run.arguments,
        lambda: run.counted,
    ]


def check_trainable(plan: Plan, recipe: Recipe) -> None:
    """Raise `RopepatchError` if a model with this plan cannot be trained with this recipe."""
    refuse_map(plan.method.name)
    if plan.length_dependent and not plan.method.length_dependent:
        raise RopepatchError(
            f"{plan.source.name} follows the length: there are no fixed frequencies to train for",
            hint="give config.json one list for all lengths, its long_factor for short_factor, too",
        )
    if plan.length_dependent:
        raise RopepatchError(
            f"{plan.method.name} follows the length: there are no fixed frequencies to train for",
            hint="train with a static method",
        )
    if plan.config.is_quantised:
        raise RopepatchError(
            f"the weights of {plan.source.name} are quantised",
            hint="train the checkpoint it was made from",
        )
    window = plan.config.rope.original_max_position_embeddings
    longest = max(recipe.data.lengths(window)[0])
    if longest > plan.target:
        raise RopepatchError(
            f"data.windows contains {longest} tokens, more than the target length of {plan.target}",
            hint="lower data.windows, or raise the target length",
        )
    if recipe.distil and recipe.reads_beyond(window):
        check_mappable(plan.config.skeleton, window)
        remapping_of(recipe.distil.remapping).fitted(window, plan.target)


def _check_attention(plan: Plan, recipe: Recipe) -> None:
    model: Any = copy.deepcopy(plan.config.skeleton)
    if recipe.packed_by_us:
        with packed_attention(model):
            return
    with stock_code(
        f"use {recipe.attention}", "attention: sdpa needs no further package"
    ):
        model.set_attn_implementation(recipe.attention)


def _check_4_bits(recipe: Recipe) -> None:
    if recipe.quantization is None:
        return
    if not torch.cuda.is_available():
        raise RopepatchError(
            "quantization: 4bit needs a CUDA GPU, and none was found",
            hint="drop quantization",
        )
    if find_spec("bitsandbytes") is None:
        raise RopepatchError(
            "quantization: 4bit needs bitsandbytes", hint="pip install bitsandbytes"
        )

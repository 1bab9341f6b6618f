"""A run: a training over all of its calls and processes, its folder, and the file that records it."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from pydantic import Field
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import integration_utils

from ropepatch.attention import REMAPPINGS
from ropepatch.attention.remapped import check_mappable
from ropepatch.errors import RopepatchError, argument, is_out_of_memory
from ropepatch.evaluation.results import as_read
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.files import (
    absent,
    check_outside,
    check_resumed,
    read_json,
    remove,
    shipped,
    whole_file,
    write_json,
)
from ropepatch.model.architectures import GLOBAL_LAYERS, SLIDING_LAYERS
from ropepatch.model.checkpoint import Keys, Number, Part, Text, validated
from ropepatch.model.precision import fastest
from ropepatch.processes import Processes, join, on_cpu
from ropepatch.progress import Progress, Say, no_bar, silent
from ropepatch.settings import seed_of
from ropepatch.training.adapter import Weights, can_offload
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.recipe import FREE, Recipe, remapping_of

if TYPE_CHECKING:
    from ropepatch.model.checkpoint import Checkpoint

# In the folder of a run
RECORD = "run.json"
TRAINED = "trained"  # the weights after the last step
LAUNCHERS = shipped("recipes/accelerate")
PARTIAL = ".partial"  # where the next checkpoint is written, to be renamed once it is complete
# Recipe keys that the plan or the digest of the text covers, or that change no weight.
NOT_DECISIVE: dict[str, Any] = {
    "model": True,
    "to": True,
    "method": True,
    "watch": True,
    "save": True,
    "gradient_checkpointing": True,
    "trainer": {*FREE},
    "data": {"sources": {"__all__": {"text", "field", "split"}}},
}


class RunRecord(Part):
    """All of a run but its weights.

    Args:
        precision: The dtype of the computations.
        decisive: The settings that decide the weights; None until the run has begun.
        base: The base model's loss on each held-out text within the original length: nats and tokens.
        history: A row for each step with a loss or an evaluation; empty until all steps are done.
    """

    precision: Text
    decisive: Keys | None = None
    base: list[list[Number]] = Field(default_factory=list)
    history: list[Keys] = Field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Run:
    """One training, over all of its processes. What it is made from is read once, when it is needed.

    Args:
        plan: The plan.
        recipe: The recipe.
        out: The folder to write, absolute.
        include: Patterns of further files of the checkpoint.
        command: The command line, for the record.
        say: Takes lines for the user.
        progress: See `ropepatch.progress.bar`.
        processes: The processes.
    """

    plan: Plan
    recipe: Recipe
    out: Path
    include: Sequence[str] = ()
    command: str | None = None
    say: Say = silent
    progress: Progress = no_bar
    processes: Processes = field(default_factory=join)

    @cached_property
    def source(self) -> Checkpoint:
        """The checkpoint with its weights, downloaded if necessary."""
        return self.plan.checkpoint(self.include)

    @cached_property
    def counted(self) -> Weights:
        """The counts of its weights; raises `RopepatchError` if the model cannot have the adapter."""
        return Weights.of(self.plan.config.skeleton, self.recipe.lora)

    @cached_property
    def earlier(self) -> RunRecord:
        """The record of earlier calls as the first process reads it; of a new run only the precision."""
        return self.processes.write_once(self._read)

    @cached_property
    def arguments(self) -> TrainingArguments:
        """The Trainer's arguments; raises `RopepatchError` if transformers rejects the recipe's."""
        return trainer_arguments(self.recipe, self.folder, self.earlier.precision)

    @property
    def folder(self) -> Path:
        """The folder with the files that it needs to resume."""
        return self.out.with_name(f"{self.out.name}.run")

    @property
    def trained(self) -> int:
        """The original context length, in tokens."""
        return self.plan.source.config.window

    def check(self) -> None:
        """Raise `RopepatchError` for all that is wrong before a weight is loaded."""
        check_trainable(self.plan, self.recipe)
        check_machine(self.recipe)
        check_launcher(self.plan.config.text)
        with packed_attention(self.plan.config.skeleton):
            pass  # raises if its attention cannot be replaced
        _ = self.arguments
        _ = self.counted

    def check_out(self) -> None:
        """Raise `RopepatchError` if the output folder has other content or lies in the checkpoint."""
        if not records.exists(self.out):
            absent(self.out)
        check_outside(self.source.folder, self.out)

    def decisive(self, text: str) -> dict[str, Any]:
        """Return the settings that decide the weights; ``text`` is the digest of its texts."""
        plan = self.plan.to_dict()
        method = ("method", "factor", "parameters", "target", "inv_freq")
        return {
            "recipe": self.recipe.model_dump(exclude=NOT_DECISIVE),
            "method": {key: plan[key] for key in method},
            "weights": self.source.fingerprint,
            "config": seed_of(json.dumps(self.plan.config.raw, sort_keys=True)),
            "text": text,
            "processes": self.processes.count,
        }

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
        if file.exists():
            hint = f"remove {self.folder} to start again"
            return validated(RunRecord, read_json(file), hint, str(file))
        is_file = self.folder.exists() and not self.folder.is_dir()
        # Hidden are the lock and a partial record.
        if is_file or any(self.folder.glob("[!.]*")):
            raise RopepatchError(
                f"{self.folder} exists and is not a run",
                hint=f"choose another {argument('out')}",
            )
        return RunRecord(precision=self.recipe.precision or fastest())


def name_of(decisive: dict[str, Any]) -> str:
    """Return the name of a run, derived from the settings that decide its weights."""
    return f"{seed_of(as_read(decisive)):016x}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the newest last."""
    found = folder.glob("checkpoint-[0-9]*")
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None; remove a partial one."""
    remove(folder / PARTIAL)
    return next(reversed(checkpoints(folder)), None)


# What is checked before a weight is loaded


def check_trainable(plan: Plan, recipe: Recipe) -> None:
    """Raise `RopepatchError` if a model with this plan cannot be trained with this recipe."""
    if plan.method.name in REMAPPINGS:
        raise RopepatchError(
            f"a model cannot be trained with a position remapping, got {plan.method.name}",
            hint="use a scaling such as yarn",
        )
    if plan.length_dependent:
        raise RopepatchError(
            "the saved frequencies follow the length: there are no fixed ones to train for",
            hint="train with a static method; of a list for each length config.json must contain one",
        )
    if plan.config.is_quantised:
        raise RopepatchError(
            f"the weights of {plan.source.name} are quantised",
            hint="train the checkpoint it was made from",
        )
    window = plan.config.window
    longest = max(recipe.data.lengths(window)[0])
    if longest > plan.target:
        raise RopepatchError(
            f"data.windows contains {longest} tokens, more than the target length of {plan.target}",
            hint="lower data.windows, or raise the target length",
        )
    if recipe.distil and recipe.reads_beyond(window):
        check_mappable(plan.config.skeleton, window)
        remapping_of(recipe.distil.remapping).fitted(window, plan.target)


# Launchers and transformers' Trainer


def splits_weights() -> bool:
    """Return whether accelerate's launcher splits the weights over processes, by FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def check_machine(recipe: Recipe) -> None:
    """Raise `RopepatchError` if this machine or its launcher cannot train a recipe."""
    if recipe.quantization and not torch.cuda.is_available():
        raise RopepatchError(
            "quantization: 4bit needs a CUDA GPU, and none was found",
            hint="drop quantization",
        )
    if recipe.quantization and find_spec("bitsandbytes") is None:
        raise RopepatchError(
            "quantization: 4bit needs bitsandbytes", hint="pip install bitsandbytes"
        )
    if recipe.gradient_checkpointing == "offload" and not (
        torch.cuda.is_available() and can_offload()
    ):
        raise RopepatchError(
            "gradient_checkpointing: offload needs a CUDA GPU, and a transformers that has it (5.23)",
            hint="set gradient_checkpointing: true",
        )
    for section in ("distil", "quantization"):
        if getattr(recipe, section) and splits_weights():
            raise RopepatchError(
                f"{section} needs the whole model in each process, and FSDP splits it",
                hint=f"DDP takes them: {LAUNCHERS}/ddp.yaml; or leave {section} out",
            )


def check_launcher(config: Any) -> None:
    """Raise `RopepatchError` for DeepSpeed, and for split sequences; name the layers that cannot be split."""
    message = "several processes train a recipe by DDP or FSDP2 alone"
    hint = (
        f"{LAUNCHERS}/fsdp2.yaml, or positions: pose, whose sequences one GPU holds; "
        "or train what `extend` writes with a trainer of your own"
    )
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        message = f"packed sequences cannot be split: {message}"
        # As accelerate 1.15 does
        is_sliding = getattr(config, "sliding_window", None)
        kinds = [SLIDING_LAYERS] * config.num_hidden_layers if is_sliding else []
        counts = Counter(getattr(config, "layer_types", None) or kinds)
        for kind, count in counts.items():
            if kind != GLOBAL_LAYERS:
                hint += f", where accelerate refuses to split {count} {kind} layers"
    elif os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    raise RopepatchError(message, hint=hint)


def trainer_arguments(recipe: Recipe, folder: Path, dtype: str) -> TrainingArguments:
    """Make the Trainer's arguments: our defaults, the recipe's, and what only ropepatch sets.

    Raises `RopepatchError` if transformers has no such arguments, trackers, optimiser or schedule.
    """
    defaults: dict[str, Any] = {
        "report_to": "none",
        "logging_steps": 10,
        "save_steps": 100,
        "save_total_limit": 2,
    }
    ours: dict[str, Any] = {
        "output_dir": str(folder),
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "eval_strategy": "steps",
        "eval_steps": recipe.watch.every,
        "per_device_train_batch_size": 1,  # an item of `Batches` is one forward pass
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "logging_nan_inf_filter": False,  # `log` raises on a loss that is not finite
        "use_cpu": on_cpu(),
    }
    try:
        arguments = TrainingArguments(**defaults | recipe.trainer | ours)
        trackers = integration_utils.get_reporting_integration_callbacks(
            arguments.report_to
        )  # type: ignore[no-untyped-call]
        for tracker in trackers:
            tracker()
        Trainer.get_optimizer_cls_and_kwargs(arguments)
        get_scheduler(
            arguments.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
            num_warmup_steps=arguments.get_warmup_steps(recipe.max_steps),
            num_training_steps=recipe.max_steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )
    except (TypeError, ValueError, ImportError, RuntimeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise RopepatchError(
            f"transformers rejects the recipe's trainer section: {' '.join(str(error).split())[:300]}",
            hint="fix the trainer section of the recipe",
        ) from error
    if arguments.n_gpu > 1:  # without a launcher: one GPU instead of nn.DataParallel
        arguments._n_gpu = 1
    return arguments

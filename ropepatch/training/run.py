"""A run: the folder of a training, and the settings that decide its outcome."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.intervals import Mean
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
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.precision import Precision
from ropepatch.processes import Processes, join
from ropepatch.progress import Progress, no_bar
from ropepatch.settings import seed_of
from ropepatch.training.parallel import Sharing
from ropepatch.training.preparation import Prepared, prepare
from ropepatch.training.recipe import Recipe

Say = Callable[[str], None]
RECORD = "run.json"  # in the folder of a run: the decisive settings, and the measurements of `begin`
TRAINED = "trained"  # in the folder of a run: the weights after the last step
# Recipe keys that the plan or the digest of the text covers, or that change no weight.
NOT_DECISIVE: dict[str, Any] = {
    **dict.fromkeys(("model", "to", "method", "watch", "save"), True),
    "trainer": {
        *("report_to", "run_name", "project", "trackio_space_id", "log_level"),
        *("logging_steps", "logging_first_step", "logging_strategy"),
        *("save_steps", "save_total_limit", "save_on_each_node", "ddp_timeout"),
        *(
            "dataloader_num_workers",
            "dataloader_prefetch_factor",
            "dataloader_pin_memory",
        ),
        "dataloader_persistent_workers",
    },
    "data": {"sources": {"__all__": {"text", "field", "split"}}},
}


def no_line(line: str) -> None:
    """Print nothing."""


@dataclass(frozen=True, eq=False)
class Run:
    """One training, over all of its processes."""

    plan: Plan
    recipe: Recipe
    source: Checkpoint
    out: Path
    sharing: Sharing
    precision: Precision  # of a new run; a resumed one keeps its own
    processes: Processes
    tokenizer: PreTrainedTokenizerBase
    say: Say  # takes lines for the user
    progress: Progress

    @classmethod
    def of(
        cls,
        plan: Plan,
        recipe: Recipe,
        out: str | Path,
        prepared: Prepared | None = None,
        say: Say = no_line,
        progress: Progress = no_bar,
    ) -> Run:
        """Prepare the run whose output is the folder ``out``."""
        prepared = prepared or prepare(plan, recipe)
        prepared.check()
        folder = Path(out).expanduser().absolute()
        if not records.exists(folder):
            absent(folder)
        source = plan.checkpoint()
        check_outside(source, folder)
        sharing, precision = prepared.sharing, prepared.precision
        tokenizer, processes = source.tokenizer, join()
        run = cls(
            plan,
            recipe,
            source,
            folder,
            sharing,
            precision,
            processes,
            tokenizer,
            say,
            progress,
        )
        if run.folder.is_symlink() or (run.folder.exists() and not run.folder.is_dir()):
            raise RopepatchError(
                f"{run.folder} is not a folder, but the run needs a folder there",
                hint=f"choose another {argument('out')}",
            )
        return run

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
        is_needed = self.plan.config.model_type in BOS_IN_EACH_WINDOW
        token: int | None = self.tokenizer.bos_token_id if is_needed else None
        return token

    def record(self, text: str) -> dict[str, Any]:
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

    def is_finished(self, record: dict[str, Any]) -> bool:
        """Whether the output folder contains the result of this run."""
        if not self.out.exists():
            return False
        training = records.read(self.out).training
        done = training and (training.run, training.recipe.get("save"))
        if done != (digest_of(record), self.recipe.save):
            absent(self.out)
        return True

    def remove_rest(self) -> None:
        """Remove the folder of a run that was interrupted after it had finished."""
        left = self.processes.first and self.folder.is_dir()
        if left and (
            (self.folder / RECORD).is_file() or not any(self.folder.iterdir())
        ):
            self.remove()

    def remove(self) -> None:
        """Remove the folder; RECORD goes last, so that an interrupted removal can be completed."""
        for path in self.folder.iterdir():
            if path.name != RECORD:
                remove(path)
        shutil.rmtree(self.folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against other calls within the block."""
        if not self.processes.first:
            yield
            return
        is_new = not self.folder.exists()
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
            yield
        finally:
            lock.release()
            if is_new and [path.name for path in self.folder.glob("*")] == [".lock"]:
                shutil.rmtree(self.folder)

    def resumed(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Return the record that `begin` wrote, if this run has begun before."""
        file = self.folder / RECORD
        if file.exists():
            earlier = read_json(file)
            hint = f"choose another {argument('out')}, or remove that folder to start again"
            decided = {
                key: earlier[key] for key in earlier if key not in ("base", "precision")
            }  # measured
            check_resumed(
                f"{self.folder} belongs to another run", decided, record, hint=hint
            )
            return earlier
        names = (
            [path.name for path in self.folder.iterdir()]
            if self.folder.exists()
            else []
        )
        if any(
            not name.startswith(".") for name in names
        ):  # hidden: the lock, a partial record
            raise RopepatchError(
                f"{self.folder} exists and is not a run",
                hint=f"choose another {argument('out')}",
            )
        return None

    def begin(self, record: dict[str, Any], base: Mean) -> dict[str, Any]:
        """Record the settings that decide the weights, the precision, and the losses of the base model."""

        def write() -> dict[str, Any]:
            begun = record | {
                "base": base.clusters,
                "precision": self.precision.to_dict(),
            }
            with whole_file(self.folder / RECORD) as partial:
                write_json(partial, begun)
            return begun

        return self.processes.write_once(
            write
        )  # measurements may differ between processes


def digest_of(record: dict[str, Any]) -> str:
    """Return the fingerprint of a run."""
    return f"{seed_of(as_read(record)):016x}"

"""A run: the folder in which a model is trained, and what decides its outcome."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.results import as_read
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.extension.writing import source_of
from ropepatch.files import absent, check_resumed, read_json, remove, whole_file, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.precision import Precision
from ropepatch.processes import Processes, join
from ropepatch.settings import seed_of
from ropepatch.training.parallel import Sharing
from ropepatch.training.preparation import Prepared, prepare
from ropepatch.training.recipe import Recipe
from ropepatch.training.supply import RecipeReader, Supply, is_at_hand

RECORD = "run.json"  # in the folder of a run: what decides its outcome, and what `begin` measures
TRAINED = "trained"  # within it: what the last step left
# Of a recipe, what the plan or the digest of the text says, or what changes no weight.
NOT_DECISIVE: dict[str, Any] = {
    **dict.fromkeys(("model", "to", "method", "watch", "save"), True),
    "trainer": {
        *("report_to", "run_name", "project", "trackio_space_id", "log_level"),
        *("logging_steps", "logging_first_step", "logging_strategy"),
        *("save_steps", "save_total_limit", "save_on_each_node", "ddp_timeout"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"),
        "dataloader_persistent_workers",
    },
    "data": {"sources": {"__all__": {"text", "field", "split"}}},
}


@dataclass(frozen=True, eq=False)
class Run:
    """One adaptation, in all of its processes."""

    plan: Plan
    recipe: Recipe
    source: Checkpoint
    out: Path
    sharing: Sharing
    precision: Precision  # in which it computes, if it begins here
    processes: Processes
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, plan: Plan, recipe: Recipe, out: str | Path, prepared: Prepared | None = None) -> Run:
        """The run that makes a folder."""
        prepared = prepared or prepare(plan, recipe)
        prepared.check()
        folder = Path(out).expanduser().absolute()
        if not records.exists(folder):
            absent(folder)
        source = source_of(plan, out=folder)
        sharing, precision = prepared.sharing, prepared.precision
        tokenizer = source.tokenizer
        run = cls(plan, recipe, source, folder, sharing, precision, join(), tokenizer)
        if run.folder.is_symlink() or (run.folder.exists() and not run.folder.is_dir()):
            raise RopepatchError(
                f"{run.folder} is not a folder, but the run needs a folder there",
                hint=f"choose another {argument('out')}",
            )
        return run

    @property
    def folder(self) -> Path:
        """Where it keeps what it needs to resume."""
        return self.out.with_name(f"{self.out.name}.run")

    @property
    def trained(self) -> int:
        """The original context length, in tokens."""
        return self.plan.source.window

    def supply(self, say: Callable[[str], None] = lambda line: None) -> Supply:
        """What it reads; ``say`` is called with lines on what takes its time."""
        accumulated = self.recipe.trainer.get("gradient_accumulation_steps", 1)
        return self._reader(say=say).supply(per_step=self.processes.count * accumulated)

    def check(self) -> None:
        """Refuse what stops it before a weight is read: its text, or what stands in its place."""
        with TemporaryDirectory(prefix="ropepatch-") as cache:
            self._reader(cache=Path(cache)).check()
        at_hand = all(map(is_at_hand, self.recipe.data.sources))
        if at_hand and (self.out.exists() or self.folder.exists()):
            record = self.record(self.supply())
            if not self.is_finished(record):
                self.resumed(record)

    def _reader(self, **options: Any) -> RecipeReader:
        return RecipeReader(
            recipe=self.recipe,
            tokenizer=self.tokenizer,
            trained=self.trained,
            target=self.plan.target,
            vocabulary=self.plan.source.config.vocab_size,
            folder=self.source.folder,
            **options,
        )

    def record(self, supply: Supply) -> dict[str, Any]:
        """All that decides the weights."""
        plan = self.plan.to_dict()
        return {
            "recipe": self.recipe.model_dump(exclude=NOT_DECISIVE),
            "method": {key: plan[key] for key in ("method", "factor", "parameters", "target", "inv_freq")},
            "weights": self.source.fingerprint,
            "config": seed_of(json.dumps(self.plan.source.raw, sort_keys=True)),
            "text": supply.digest,
            "processes": self.processes.count,
        }

    def is_finished(self, record: dict[str, Any]) -> bool:
        """Whether the folder holds what this run makes."""
        if not self.out.exists():
            return False
        adaptation = records.read(self.out).adaptation
        done = adaptation and (adaptation.run, adaptation.recipe.get("save"))
        if done != (digest_of(record), self.recipe.save):
            absent(self.out)
        return True

    def remove_rest(self) -> None:
        """Remove the folder of a run that was interrupted when it was finished."""
        left = self.processes.first and self.folder.is_dir()
        if left and ((self.folder / RECORD).is_file() or not any(self.folder.iterdir())):
            self.remove()

    def remove(self) -> None:
        """Remove the folder; what it is known by goes last, so that the next call removes what is left."""
        for path in self.folder.iterdir():
            if path.name != RECORD:
                remove(path)
        shutil.rmtree(self.folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other calls from training in the same folder."""
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
        """What `begin` put on record, if this run was begun before."""
        file = self.folder / RECORD
        if file.exists():
            earlier = read_json(file)
            hint = f"choose another {argument('out')}, or remove that folder to start again"
            decided = {key: earlier[key] for key in earlier if key not in ("base", "precision")}  # measured
            check_resumed(f"{self.folder} belongs to another run", decided, record, hint=hint)
            return earlier
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if any(not name.startswith(".") for name in names):  # hidden: the lock, a record half written
            raise RopepatchError(
                f"{self.folder} exists and is not a run", hint=f"choose another {argument('out')}"
            )
        return None

    def begin(self, record: dict[str, Any], base: float) -> dict[str, Any]:
        """Put on record what decides the weights, the precision, and the loss of the base model."""

        def write() -> dict[str, Any]:
            begun = record | {"base": base, "precision": self.precision.to_dict()}
            with whole_file(self.folder / RECORD) as partial:
                write_json(partial, begun)
            return begun

        return self.processes.write_once(write)  # two processes may measure two things


def digest_of(record: dict[str, Any]) -> str:
    """What names a run."""
    return f"{seed_of(as_read(record)):016x}"

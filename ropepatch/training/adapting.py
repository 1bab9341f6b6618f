"""Adapt a model to its longer context: patch, train by a recipe, merge, save, verify."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments, set_seed

from ropepatch.adapters import stock_code, text_config
from ropepatch.errors import RopepatchError
from ropepatch.folders import absent
from ropepatch.lengths import relative_length
from ropepatch.loading import load_model, load_tokenizer, no_progress_bars
from ropepatch.patching import patch
from ropepatch.seeds import seed_of
from ropepatch.source import Source, find_source, read_json
from ropepatch.training.adapter import loraplus_optimizer, trainable
from ropepatch.training.attention import packed_attention
from ropepatch.training.checkpoints import damage, newest_sound, seal
from ropepatch.training.progress import StepLines
from ropepatch.training.saving import save_adaptation
from ropepatch.training.supply import Supply, make_supply
from ropepatch.training.tokens import default_cache
from ropepatch.training.trainer import HISTORY, LongContextTrainer
from ropepatch.training.watching import Gate, Watcher
from ropepatch.weights import fingerprint, read_headers
from ropepatch.whole_files import whole_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ropepatch.planning import Plan
    from ropepatch.training.recipe import Recipe

RECORD = "run.json"  # in the folder of a run: what decides its outcome, and the base model's loss
TRAINED = "trained"  # within it: what the last step left
UNMEASURED = ("model", "to", "method", "watch")  # of a recipe: the plan says it, or it changes no weight


@dataclass(frozen=True)
class Adapted:
    """What came out.

    Args:
        folder: The checkpoint, or the adapter.
        gate: The loss within the old context, before and after.
    """

    folder: Path
    gate: Gate


def adapt(
    plan: Plan,
    recipe: Recipe,
    out: str | Path,
    *,
    max_short_loss_increase: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Adapted:
    """Train a model to read at the target of a plan, and write what came out.

    Meanwhile the folder ``OUT.run`` holds the checkpoints. Called again after an interruption, it goes on
    from the last sound one, and what comes out is the same, on a CPU to the bit. Under torchrun or accelerate
    every process calls it.

    Args:
        plan: What is extended, and how.
        recipe: How it is trained; its own model, target and method are left aside.
        out: The folder to make.
        max_short_loss_increase: By how much the loss within the old context may rise, as a share; None for
            what the recipe says.
        say: Takes lines that tell how far it is.

    Raises:
        RopepatchError: If the plan cannot be saved, the recipe does not fit the model, a text is not there,
            the folder exists, holds another run or cannot be written, or the loss is no number.
    """
    run = _Run.of(plan, recipe, out)
    with run.state.main_process_first():
        supply = run.read()
    record = run.record(supply)
    most = (
        recipe.watch.max_short_loss_increase if max_short_loss_increase is None else max_short_loss_increase
    )
    if finished := run.is_finished(record):
        say(f"{run.out} is finished")
    run.state.wait_for_everyone()  # or a slow process would find what a fast one has just finished
    if not finished:
        run.finish(record, supply, most, say)
    gate = read_json(run.out / "ropepatch.json")["adaptation"]["gate"]
    return Adapted(run.out, Gate(gate["base"], gate["now"], most))


@dataclass(frozen=True, eq=False)
class _Run:
    plan: Plan
    recipe: Recipe
    source: Source
    out: Path
    state: Any
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, plan: Plan, recipe: Recipe, out: str | Path) -> _Run:
        if not plan.exportable:
            raise RopepatchError(
                f"no stock rope type can hold {plan.scaling.name}", hint="adapt with a static method"
            )
        if plan.scaling.length_dependent:
            raise RopepatchError(
                f"{plan.scaling.name} follows the length: there are no fixed frequencies to adapt to",
                hint="adapt with a static method",
            )
        revision = None if Path(plan.model).is_dir() else plan.revision
        source = find_source(plan.model, revision, weights=True)
        if "quantization_config" in plan.survey.raw:
            raise RopepatchError(
                f"the weights of {plan.model} are quantised", hint="adapt the checkpoint it was made from"
            )
        folder = Path(out).expanduser().absolute()
        if not (folder / "ropepatch.json").is_file():
            absent(folder)
        if folder.resolve().is_relative_to(source.folder.resolve()):
            raise RopepatchError(
                f"{folder} lies inside the source checkpoint", hint="choose an --out beside it"
            )
        state = PartialState(cpu=not torch.cuda.is_available())
        return cls(plan, recipe, source, folder, state, load_tokenizer(source.folder))

    @property
    def folder(self) -> Path:
        """Where it keeps what it needs to go on."""
        return self.out.with_name(f"{self.out.name}.run")

    @property
    def trained(self) -> int:
        return self.plan.rope.original_max_position_embeddings

    @property
    def row_parts(self) -> int:
        """Over how many processes accelerate's context parallelism splits a row."""
        return int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))

    @property
    def attention(self) -> str:
        """How the trainer attends: `packed`, `varlen` or `whole`.

        Raises:
            RopepatchError: A row that is split over several processes is not one document, or not alone.
        """
        if self.row_parts == 1:
            return "packed" if self.recipe.attention == "sdpa" else "varlen"
        data = self.recipe.data
        alone = all(
            relative_length(window, self.trained) == relative_length(data.tokens_per_batch, self.trained)
            for window in data.windows
        )
        if data.boundaries or not alone or self.recipe.attention != "sdpa":
            raise RopepatchError(
                "context parallelism splits one row without boundaries, by sdpa",
                hint="attention: sdpa, boundaries: false, and tokens_per_batch the same as the window",
            )
        return "whole"

    def read(self) -> Supply:
        accumulated = self.recipe.trainer.get("gradient_accumulation_steps", 1)
        return make_supply(
            self.recipe,
            self.tokenizer,
            trained=self.trained,
            target=self.plan.target,
            vocabulary=text_config(self.plan.survey.config).vocab_size,
            per_step=self.state.num_processes // self.row_parts * accumulated,
            cache=default_cache(),
        )

    def record(self, supply: Supply) -> dict[str, Any]:
        """All that decides the weights."""
        recipe = {key: value for key, value in self.recipe.to_dict().items() if key not in UNMEASURED}
        plan = self.plan.to_dict()
        return {
            "recipe": recipe,
            "method": {key: plan[key] for key in ("method", "factor", "parameters", "target", "inv_freq")},
            "weights": fingerprint(read_headers(self.source.folder)),
            "text": supply.digest,
            "processes": self.state.num_processes,
        }

    def is_finished(self, record: dict[str, Any]) -> bool:
        """Whether the folder holds what this run makes.

        Raises:
            RopepatchError: It holds something else.
        """
        if not self.out.exists():
            return False
        made = read_json(self.out / "ropepatch.json").get("adaptation", {})
        if made.get("run") != _digest(record):
            absent(self.out)
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def finish(self, record: dict[str, Any], supply: Supply, most: float, say: Callable[[str], None]) -> None:
        """Train, or train on, and write what comes out."""
        began = time.perf_counter()
        for note in supply.notes:
            say(note)
        base = self.begin(record, supply, say)
        self.train(supply, say)
        if self.state.is_main_process:
            history = json.loads((self.folder / HISTORY).read_text(encoding="utf-8"))
            now = next(row["short_loss"] for row in reversed(history) if "short_loss" in row)
            adaptation = {
                "recipe": self.recipe.to_dict(),
                "run": _digest(record),
                "steps": self.recipe.max_steps,
                "tokens": supply.tokens,
                "processes": self.state.num_processes,
                "seconds": round(time.perf_counter() - began, 1),
                "gate": Gate(base, now, most).to_dict(),
            }
            say("saving, and reloading with stock transformers" if self.recipe.save == "merged" else "saving")
            save_adaptation(self.plan, self.recipe, self.source, self.folder / TRAINED, self.out, adaptation)
            shutil.rmtree(self.folder)
        self.state.wait_for_everyone()

    def begin(self, record: dict[str, Any], supply: Supply, say: Callable[[str], None]) -> float:
        """Open the run's folder; the base model's loss within the old context.

        Raises:
            RopepatchError: The folder is of another run.
        """
        file = self.folder / RECORD
        if file.exists():
            found = read_json(file)
            known = json.loads(json.dumps(record))
            if differing := [key for key in known if found.get(key) != known[key]]:
                raise RopepatchError(
                    f"{self.folder} is of another run: it differs in {', '.join(differing)}",
                    hint="choose another --out, or remove that folder to start anew",
                )
            return float(found["base"])
        say("measuring the base model within its context")
        model: Any = load_model(self.source.folder)
        base = self.watcher(supply).short_loss(model.to(self.state.device))
        if self.state.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as partial:
                partial.write_text(json.dumps(record | {"base": base}, indent=1) + "\n", encoding="utf-8")
        self.state.wait_for_everyone()
        return base

    def watcher(self, supply: Supply, *, split: bool = True) -> Watcher:
        trials = self.recipe.watch.passkey_trials
        return Watcher(self.tokenizer, supply.pieces, self.trained, self.plan.target, trials, split)

    def train(self, supply: Supply, say: Callable[[str], None]) -> None:
        """Train from the last sound checkpoint on; leaves TRAINED and the history in the run's folder."""
        if damage(self.folder / TRAINED) is None:
            return
        with self.state.main_process_first():
            last = newest_sound(self.folder)
        if last is not None:
            say(f"going on from {last.name}")
        set_seed(self.recipe.seed)  # of the adapter's first weights
        arguments = self.arguments(resumed=last is not None)
        mixed = arguments.bf16 or arguments.fp16
        loaded: Any = load_model(self.source.folder)
        patch(loaded, self.plan)
        if self.attention == "packed":
            with packed_attention(loaded):  # refuses a model that cannot, before anything is measured
                pass
        elif self.attention == "varlen":
            with stock_code(f"use {self.recipe.attention}", "attention: sdpa needs no further package"):
                loaded.set_attn_implementation(self.recipe.attention)
        model = trainable(loaded if mixed else loaded.float(), self.recipe.lora)
        if self.recipe.gradient_checkpointing:
            _checkpoint_activations(loaded)
        ratio = self.recipe.lora and self.recipe.lora.loraplus_lr_ratio
        optimizer = loraplus_optimizer(model, ratio, arguments) if ratio else None
        sharded = bool(os.environ.get("ACCELERATE_USE_FSDP") or os.environ.get("ACCELERATE_USE_DEEPSPEED"))
        trainer = LongContextTrainer(
            watcher=self.watcher(supply, split=not sharded),
            attention=self.attention,
            model=model,
            args=arguments,
            train_dataset=supply.batches,
            optimizers=(optimizer, None),
            callbacks=[StepLines(say, supply.tokens / self.recipe.max_steps)],
        )
        with no_progress_bars():
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        shutil.rmtree(self.folder / TRAINED, ignore_errors=True)
        trainer.save_model(str(self.folder / TRAINED))
        self.state.wait_for_everyone()
        if self.state.is_main_process:
            seal(self.folder / TRAINED)

    def arguments(self, *, resumed: bool) -> TrainingArguments:
        tracker = ["tensorboard"] if find_spec("tensorboard") or find_spec("tensorboardX") else []
        ours = {
            "output_dir": str(self.folder),
            "seed": self.recipe.seed,
            "data_seed": self.recipe.seed,
            "eval_strategy": "steps",
            "eval_steps": self.recipe.watch.every,
            "eval_on_start": not resumed,
            "per_device_train_batch_size": 1,  # an item of the batches is a whole forward pass
            "remove_unused_columns": False,
            "save_strategy": "steps",
            "disable_tqdm": True,
            "use_cpu": not torch.cuda.is_available(),
            "average_tokens_across_devices": True,
            "logging_nan_inf_filter": False,  # a loss that is no number must be seen
        }
        defaults = {"report_to": tracker, "logging_steps": 10, "save_steps": 100, "save_total_limit": 2}
        try:
            arguments = TrainingArguments(**{**defaults, **self.recipe.trainer, **ours})
        except (TypeError, ValueError, ImportError) as error:
            raise RopepatchError(
                f"transformers refuses the recipe's trainer: {' '.join(str(error).split())[:300]}",
                hint="mend the trainer section of the recipe",
            ) from error
        if arguments.n_gpu > 1:  # without torchrun or accelerate: one GPU, rather than nn.DataParallel
            arguments._n_gpu = 1
        return arguments


def _checkpoint_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.19
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _digest(record: dict[str, Any]) -> str:
    return f"{seed_of(json.loads(json.dumps(record))):016x}"

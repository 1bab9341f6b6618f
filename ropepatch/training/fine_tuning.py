"""Train a model for its target length: patch, train with a recipe, merge, save, verify."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from ropepatch.attention import remap_positions
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.results import as_read
from ropepatch.extension import record as records
from ropepatch.extension.patching import put
from ropepatch.extension.planning import Plan
from ropepatch.extension.record import without_paths
from ropepatch.extension.verification import largest_change, probe_logits
from ropepatch.extension.writing import copy_files, origin_of, write_trained
from ropepatch.files import absent, new_folder, read_json, write_json
from ropepatch.model.checkpoint import ADAPTER, Checkpoint
from ropepatch.model.config import no_progress_bars
from ropepatch.model.precision import FLOAT32, placed, without_subnormals
from ropepatch.progress import Progress, no_bar
from ropepatch.settings import yaml_text
from ropepatch.training.adapter import (
    WEIGHTS,
    load_in_4_bits,
    recompute_activations,
    trainable,
    without_deprecations,
)
from ropepatch.training.arguments import training_arguments
from ropepatch.training.parallel import load_whole_models
from ropepatch.training.preparation import Prepared
from ropepatch.training.recipe import Recipe, remapping_of
from ropepatch.training.run import TRAINED, Run, Say, digest_of, no_line
from ropepatch.training.run_checkpoints import PARTIAL, newest
from ropepatch.training.supply import Supply, read_supply
from ropepatch.training.teacher import Teacher
from ropepatch.training.trainer import (
    SECONDS,
    LongContextTrainer,
    ProgressLines,
    explaining_disk,
    history,
)
from ropepatch.training.watching import short_context_check, short_context_loss

COST = "cost.json"  # in the folder of the trained weights
TRAINING = "training"  # the folder within the checkpoint: recipe and history
RECIPE = "recipe.yaml"
HISTORY = "history.json"
RUNS = "runs"  # TensorBoard's logs, if the recipe has them
MERGED = 1e-3  # largest change of a logit by merging in float32, relative to the largest logit


@dataclass(frozen=True)
class FineTuned:
    """The result of `fine_tune`: the checkpoint or the adapter, and the short-context check."""

    folder: Path
    short_context: records.ShortContextCheck


@torch.inference_mode(False)
@torch.enable_grad()  # also within a block without gradients
@without_subnormals()
def fine_tune(
    plan: Plan,
    recipe: Recipe,
    out: str | Path,
    *,
    say: Say = no_line,
    progress: Progress = no_bar,
    prepared: Prepared | None = None,
) -> FineTuned:
    """Train a model for the target length of a plan and save the result."""
    run = Run.of(plan, recipe, out, prepared, say, progress)
    supplies: list[Supply] = []
    run.processes.write_once(lambda: supplies.append(read_supply(run)))
    (supply,) = supplies or [read_supply(run)]  # the other processes use the cache
    record = run.record(supply.digest)
    limit = recipe.watch.max_short_loss_increase
    if finished := run.is_finished(record):
        say(f"{run.out} is finished")
        run.remove_rest()
    run.processes.wait()  # else a slow process could take the run of a fast one for finished
    if not finished:
        with run.alone(), run.sharing.announced(recipe):
            _finish(run, record, supply, limit)
    training = records.read(run.out).training
    assert training is not None  # checked by `is_finished`, or written by `_finish`
    check = training.short_context.limited(limit)
    if (
        run.processes.first and training.short_context.to_dict() != check.to_dict()
    ):  # the limit has changed
        records.amend(
            run.out, training=training.to_dict() | {"short_context": check.to_dict()}
        )
    return FineTuned(run.out, check)


def _finish(run: Run, record: dict[str, Any], supply: Supply, limit: float) -> None:
    """Start or resume the training, and save the result."""
    for note in supply.notes:
        run.say(note)
    gpus = torch.cuda.device_count()
    if run.processes.count == 1 < gpus:
        run.say(
            f"training on one of {gpus} GPUs; `torchrun --nproc-per-node {gpus} ...` takes all"
        )
    begun = run.resumed(record)
    if begun is None:
        run.say(f"precision: {run.precision}")
        begun = run.begin(record, _base_loss(run, supply))
    done = (run.folder / TRAINED).is_dir()
    run.processes.wait()  # until all processes have checked
    if not done:
        _train(run, supply, begun)
    if run.processes.first:
        _save(run, record, supply, begun, limit)
        run.remove()
    run.processes.wait()


def _base_loss(run: Run, supply: Supply) -> Mean:
    """Measure the base model's loss within the original context length."""
    with run.progress("base model, short context") as advance:
        model = placed(run.source.load(), run.processes.device)
        return short_context_loss(run, supply.pieces, model, advance, split=True)


def _train(run: Run, supply: Supply, begun: dict[str, Any]) -> None:
    """Train from the last checkpoint, and save TRAINED in the run's folder."""
    recipe, dtype = run.recipe, begun["precision"]["dtype"]
    last = run.processes.write_once(lambda: newest(run.folder))
    if last is not None:
        run.say(f"resuming from {last.name}")
    arguments = training_arguments(
        recipe, run.folder, dtype=dtype, resumed=last is not None
    )
    if recipe.quantization:
        loaded: Any = load_in_4_bits(run.source, dtype, run.processes.device)
    else:
        loaded = run.source.load(torch.float32 if dtype == FLOAT32 else None)
    mapped = None
    if recipe.distil and recipe.reads_beyond(run.trained):
        teaching, original = (
            remapping_of(recipe.distil.remapping),
            run.plan.source.config.original,
        )
        with remap_positions(
            loaded, teaching, to=run.plan.target, original=original
        ) as mapped:
            pass  # `Teacher` applies it again
    put(loaded, run.plan)
    if not recipe.packed_by_us:
        loaded.set_attn_implementation(recipe.attention)
    set_seed(recipe.seed)  # for the adapter's initial weights
    model = trainable(loaded, recipe.lora)
    if recipe.gradient_checkpointing:
        recompute_activations(loaded)
    with no_progress_bars(), run.progress("training") as advance:
        per_step, base_loss = (
            supply.tokens // recipe.max_steps,
            Mean.of(begun["base"]).value,
        )
        trainer = LongContextTrainer(
            run=run,
            pieces=supply.pieces,
            teacher=None
            if recipe.distil is None
            else Teacher(model, run.trained, mapped, recipe.distil),
            model=model,
            args=arguments,
            train_dataset=supply.batches,
            callbacks=[ProgressLines(run.say, advance, per_step, base_loss)],
        )
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    _keep(run, trainer)


def _keep(run: Run, trainer: Any) -> None:
    """Save the trained weights and the history in the run's folder."""
    trained = run.folder / PARTIAL / TRAINED
    with explaining_disk("the trained weights", trained), no_progress_bars():
        trainer.save_model(str(trained))
        load_whole_models(run.sharing)
        run.processes.wait()
        if run.processes.first:
            if run.recipe.lora is None:
                # The saved config is that of the patched model; `put` needs the RoPE of the base.
                shutil.copyfile(
                    run.source.folder / "config.json", trained / "config.json"
                )
            seconds = sum(
                logged.get(SECONDS, 0.0) for logged in trainer.state.log_history
            )
            cpu = f"CPU, {torch.get_num_threads()} threads"
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
            write_json(trained / COST, {"seconds": round(seconds, 1), "device": device})
            write_json(trained / HISTORY, history(trainer.state.log_history), indent=1)
            trained.rename(run.folder / TRAINED)


def _save(
    run: Run,
    record: dict[str, Any],
    supply: Supply,
    begun: dict[str, Any],
    limit: float,
) -> None:
    """Merge the trained weights, evaluate them, and save the checkpoint or adapter with its record."""
    recipe, trained, plan = run.recipe, run.folder / TRAINED, run.plan
    run.say(
        "saving, and reloading with stock transformers"
        if recipe.save == "merged"
        else "saving"
    )
    model: Any = merged_model(plan, recipe, run.source, trained)
    dtype = model.dtype
    with run.progress("trained model, short context") as advance:
        on_device = placed(model, run.processes.device)
        now = short_context_loss(run, supply.pieces, on_device, advance, split=False)
    check = short_context_check(Mean.of(begun["base"]), now, limit)
    model.to(dtype).cpu()
    training = {
        "recipe": recipe.to_dict(),
        "run": digest_of(record),
        "steps": recipe.max_steps,
        "tokens": supply.tokens,
        "processes": run.processes.count,
        "precision": begun["precision"],
        **read_json(trained / COST),
        "short_context": check.to_dict(),
    }
    extras = {"training": training, "base_weights": record["weights"]}

    text = yaml_text(without_paths(as_read(recipe.to_dict())))
    (run.folder / RECIPE).write_text(text, encoding="utf-8")
    files = {
        f"{TRAINING}/{HISTORY}": trained / HISTORY,
        f"{TRAINING}/{RECIPE}": run.folder / RECIPE,
    }
    for file in (run.folder / RUNS).rglob("*"):
        if file.is_file():
            files[f"{TRAINING}/{file.relative_to(run.folder).as_posix()}"] = file
    if recipe.save == "merged":
        write_trained(plan, model, run.out, record=extras, files=files)
        return
    with new_folder(absent(run.out)) as folder:
        shutil.copyfile(trained / WEIGHTS, folder / WEIGHTS)
        base = {
            "base_model_name_or_path": plan.source.name,
            "revision": plan.source.revision,
        }
        write_json(folder / ADAPTER, read_json(trained / ADAPTER) | base)
        copy_files(files, folder)
        records.write(
            folder, records.Record.of(plan, **extras, **origin_of(run.source))
        )


def merged_model(
    plan: Plan, recipe: Recipe, source: Checkpoint, trained: Path
) -> PreTrainedModel:
    """Return the patched model with its adapter merged in float32, in the dtype of the base."""
    model: Any = source.load()
    dtype = model.dtype
    if recipe.lora is None:
        model = Checkpoint(trained).load()
    put(model, plan)
    if recipe.lora is not None:
        from peft import PeftModel

        with without_deprecations():
            fine_tuned: Any = PeftModel.from_pretrained(
                model.float(), str(trained)
            ).eval()
        before = probe_logits(fine_tuned, plan.target, plan.source.name)
        model = fine_tuned.merge_and_unload()
        after = probe_logits(model.eval(), plan.target, plan.source.name)
        difference = largest_change(before, after)
        if not difference <= MERGED:
            raise RopepatchError(
                f"merging the adapter changes the logits by {difference:.1%} of the largest",
                hint="use save: adapter; please report the model type and the recipe",
            )
    merged: PreTrainedModel = model.to(dtype)
    return merged

"""Adapt a model to its longer context: patch, train by a recipe, merge, save, verify."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from ropepatch.attention import map_attention
from ropepatch.evaluation.measuring import Progress
from ropepatch.extension import record as records
from ropepatch.extension.patching import patch
from ropepatch.extension.planning import Plan
from ropepatch.files import read_json, write_json
from ropepatch.model.loading import load_model
from ropepatch.model.precision import Precision, fastest
from ropepatch.model.stock import no_progress_bars, stock_code
from ropepatch.training.adapter import recompute_activations, trainable
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.parallel import load_whole_models
from ropepatch.training.progress import SECONDS, StepLines
from ropepatch.training.recipe import Recipe
from ropepatch.training.recipe_sections import map_of
from ropepatch.training.run import TRAINED, Run, digest_of
from ropepatch.training.run_checkpoints import damage, newest_sound, seal
from ropepatch.training.saving import merged_model, save_adaptation
from ropepatch.training.supply import Supply
from ropepatch.training.teacher import Teacher
from ropepatch.training.trained_frequencies import as_divisors, frozen, train_frequencies
from ropepatch.training.trainer import explaining_disk, make_trainer, training_arguments
from ropepatch.training.watching import Watcher

COST = "cost.json"  # in the folder of what was trained


@dataclass(frozen=True)
class Adapted:
    """The outcome of `adapt`.

    Args:
        folder: The checkpoint, or the adapter.
        gate: The loss within the old context, before and after.
    """

    folder: Path
    gate: records.Gate


def adapt(
    plan: Plan,
    recipe: Recipe,
    out: str | Path,
    *,
    max_short_loss_increase: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda name: nullcontext(lambda done, total: None),
) -> Adapted:
    """Train a model to read at the target of a plan, and write what came out.

    Meanwhile the folder ``OUT.run`` holds the checkpoints. Called again after an interruption, it goes on
    from the last sound one, and what comes out is the same, on a CPU to the bit. Under torchrun or accelerate
    every process calls it. The global random seeds are set to the recipe's.

    Args:
        plan: What is extended, and how.
        recipe: How it is trained; its own model, target and method are left aside.
        out: The folder to make.
        max_short_loss_increase: By how much the loss within the old context may rise, as a share; None for
            what the recipe says.
        say: Called with lines that tell how far it is.
        progress: Takes how many steps are done; see `ropepatch.evaluation.measuring.measure`.

    Raises:
        RopepatchError: If the plan cannot be saved, the recipe does not fit the model, a text is not there,
            the folder exists, holds another run or cannot be written, or the loss is no number.
    """
    run = Run.of(plan, recipe, out)
    with run.state.main_process_first():
        supply = run.supply(say)
    record = run.record(supply)
    limit = max_short_loss_increase
    limit = recipe.watch.max_short_loss_increase if limit is None else limit
    if finished := run.is_finished(record):
        say(f"{run.out} is finished")
    run.state.wait_for_everyone()  # or a slow process would find what a fast one has just finished
    if not finished:
        with run.alone():
            _finish(run, record, supply, limit, say, progress)
    adaptation = records.read(run.out).adaptation
    assert adaptation is not None  # `is_finished` has looked, or `_finish` has written it
    gate = records.Gate.of(adaptation.gate.base, adaptation.gate.now, limit)
    if run.state.is_main_process and adaptation.gate.to_dict() != gate.to_dict():  # with another limit
        records.amend(run.out, adaptation=adaptation.to_dict() | {"gate": gate.to_dict()})
    return Adapted(run.out, gate)


def _finish(
    run: Run,
    record: dict[str, Any],
    supply: Supply,
    limit: float,
    say: Callable[[str], None],
    progress: Progress,
) -> None:
    """Train, or train on, and write what comes out."""
    for note in supply.notes:
        say(note)

    def measured() -> dict[str, Any]:
        say("measuring the base model within its context")
        model: Any = load_model(run.source)
        stated = run.recipe.precision
        precision = fastest() if stated is None else Precision(stated)
        say(f"precision: {precision}")
        base = _watcher(run, supply).short_loss(model.to(run.state.device))
        return {"base": base, "precision": precision.to_dict()}

    begun = run.begin(record, measured)
    _train(run, supply, begun, say, progress)
    if run.state.is_main_process:
        recipe, trained, plan = run.recipe, run.folder / TRAINED, run.plan
        say("saving, and reloading with stock transformers" if recipe.save == "merged" else "saving")
        frequencies = {}
        if recipe.frequencies:
            plan = frozen(run.plan, trained)
            start = as_divisors(run.plan.frequencies(), plan.rope, plan.scaling.factor).parameters()
            frequencies["frequencies"] = {"start": start, "end": plan.scaling.parameters()}
        model: Any = merged_model(plan, recipe, run.source, trained)
        now = _watcher(run, supply, split=False).short_loss(model.to(run.state.device))
        adaptation = {
            "recipe": recipe.to_dict(),
            "run": digest_of(record),
            "steps": recipe.max_steps,
            "tokens": supply.tokens,
            "processes": run.state.num_processes,
            "precision": begun["precision"],
            **read_json(trained / COST),
            "gate": records.Gate.of(begun["base"], now, limit).to_dict(),
            **frequencies,
        }
        record = {"adaptation": adaptation, "base_weights": record["weights"]}
        save_adaptation(plan, recipe, model.cpu(), trained, run.out, record)
        run.remove()
    run.state.wait_for_everyone()


def _watcher(run: Run, supply: Supply, *, split: bool = True) -> Watcher:
    watch = run.recipe.watch
    target = run.plan.target if watch.target else None
    return Watcher(run.tokenizer, supply.pieces, run.trained, target, watch.passkey_trials, split)


def _train(
    run: Run, supply: Supply, begun: dict[str, Any], say: Callable[[str], None], progress: Progress
) -> None:
    """Train from the last sound checkpoint on; leaves TRAINED and the history in the run's folder."""
    recipe, trained = run.recipe, run.folder / TRAINED
    done = damage(trained) is None
    run.state.wait_for_everyone()  # until all have looked
    if done:
        return
    with run.state.main_process_first():
        last = newest_sound(run.folder)
    if last is not None:
        say(f"going on from {last.name}")
    set_seed(recipe.seed)  # of the adapter's first weights
    loaded: Any = load_model(run.source)
    arguments = training_arguments(
        recipe, run.folder, dtype=begun["precision"]["dtype"], resumed=last is not None
    )
    mixed = arguments.bf16 or arguments.fp16
    mapped = None
    if recipe.distil and recipe.reads_beyond(run.trained):
        with map_attention(loaded, map_of(recipe.distil.map), to=run.plan.target) as mapped:
            pass  # it is taken out again, and in force where the teacher reads
    patch(loaded, run.plan)
    attention = run.sharing.attention(recipe)
    if attention in ("packed", "shared"):
        with packed_attention(loaded):  # refuses a model that cannot, before it is wrapped
            pass
    elif attention == "varlen":
        with stock_code(f"use {recipe.attention}", "attention: sdpa needs no further package"):
            loaded.set_attn_implementation(recipe.attention)
    model = trainable(loaded if mixed else loaded.float(), recipe.lora)
    if recipe.gradient_checkpointing:
        recompute_activations(loaded)
    rope = None
    if recipe.frequencies:
        rope = train_frequencies(model, run.plan, recipe.frequencies.learning_rate)
        if last is not None:
            rope.restore(last)
    trainer = make_trainer(
        watcher=_watcher(run, supply, split=run.sharing.engine is None),
        attention=attention,
        sharing=run.sharing,
        rope=rope,
        teacher=recipe.distil and Teacher(model, run.trained, mapped, recipe.distil),
        loraplus_lr_ratio=recipe.lora and recipe.lora.loraplus_lr_ratio,
        model=model,
        args=arguments,
        train_dataset=supply.batches,
        callbacks=[steps := StepLines(say, supply.tokens / recipe.max_steps, begun["base"])],
    )
    with no_progress_bars(), progress("training") as steps.advance:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    if run.state.is_main_process:
        shutil.rmtree(trained, ignore_errors=True)
    run.state.wait_for_everyone()
    with explaining_disk("what was trained", trained), no_progress_bars():
        trainer.save_model(str(trained))
        load_whole_models(run.sharing)
        run.state.wait_for_everyone()
        if run.state.is_main_process:
            if recipe.lora is None:
                # What was saved describes the patched model; the patch wants the rope of the base.
                shutil.copyfile(run.source.folder / "config.json", trained / "config.json")
            if rope is not None:
                rope.save(trained)
            seconds = sum(logged.get(SECONDS, 0.0) for logged in trainer.state.log_history)
            cpu = f"CPU, {torch.get_num_threads()} threads"
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
            write_json(trained / COST, {"seconds": round(seconds, 1), "device": device})
            seal(trained)

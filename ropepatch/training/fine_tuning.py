"""Train a model for its target length: load, patch, train with a recipe, merge, measure, write, verify."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, set_seed

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.results import as_read
from ropepatch.extension import record as records
from ropepatch.extension.patching import put
from ropepatch.extension.record import Record, Training, without_paths
from ropepatch.extension.verification import largest_change, probe_logits
from ropepatch.extension.writing import (
    Copy,
    Written,
    copy_files,
    included_files,
    origin_of,
    small_files,
)
from ropepatch.files import absent, new_folder, read_json, write_json
from ropepatch.model.checkpoint import (
    ADAPTER,
    ADAPTER_BASE,
    ADAPTER_WEIGHTS,
    Checkpoint,
)
from ropepatch.model.config import no_progress_bars
from ropepatch.model.precision import placed, without_subnormals
from ropepatch.settings import yaml_text
from ropepatch.training.adapter import (
    recompute_activations,
    trainable,
    without_deprecations,
)
from ropepatch.training.run import (
    PARTIAL,
    RECORD,
    TRAINED,
    Run,
    RunRecord,
    name_of,
    newest,
    splits_weights,
)
from ropepatch.training.supply import Supply, read_supply
from ropepatch.training.teacher import Teacher, teaching
from ropepatch.training.trainer import (
    LongContextTrainer,
    ProgressLines,
    explaining_disk,
    history,
    short_context_check,
    short_context_loss,
)

TRAINING = "training"  # the folder within the checkpoint: recipe and record of the run
RECIPE = "recipe.yaml"
RUNS = "runs"  # TensorBoard's logs, if the recipe has them
MERGED = 1e-3  # largest change of a logit by merging in float32, relative to the largest logit


@torch.inference_mode(False)
@torch.enable_grad()  # also within a block without gradients
@without_subnormals()
def fine_tune(run: Run) -> Written:
    """Train a model for the target length of a plan, and write the result; resume what an earlier call began.

    `Run.check` comes before.
    """
    processes, reloaded = run.processes, None
    run.check_out()
    with run.alone():
        supply = _supply(run)
        decisive = run.decisive(supply.digest)
        if processes.write_once(lambda: run.is_finished(decisive)):
            run.say(f"{run.out} is finished")
            processes.write_once(lambda: _limit(run))
        else:
            run.check_resumed(decisive)
            for note in supply.notes:
                run.say(note)
            record, model = run.earlier, None
            if record.decisive is None:
                record, model = _measured(run, supply, decisive)
            if not processes.write_once((run.folder / TRAINED).is_dir):
                record = _trained(run, supply, record, model)
            del model
            if processes.first:
                reloaded = _save(run, supply, record)
        if processes.first:
            run.remove()
        processes.wait()
    return Written(run.out, records.read(run.out), reloaded)


def _supply(run: Run) -> Supply:
    """Read the texts: first in one process, then from the cache in the others."""
    read: list[Supply] = []
    run.processes.write_once(lambda: read.append(read_supply(run)))
    return read[0] if read else read_supply(run)


def _measured(
    run: Run, supply: Supply, decisive: dict[str, Any]
) -> tuple[RunRecord, PreTrainedModel | None]:
    """Record the base model's loss within the original length; return the model too if it can be trained on."""
    run.say(f"precision: {run.earlier.precision}")
    model: Any = run.source.load()
    dtype = model.dtype
    with run.progress("base model, short context") as advance:
        placed(model, run.processes.device)
        base = short_context_loss(run, supply.pieces, model, advance, split=True)
    begun = {"decisive": decisive, "base": [list(map(float, c)) for c in base.clusters]}
    # Measurements may differ between processes.
    record = run.processes.write_once(
        lambda: run.write(run.earlier.model_copy(update=begun))
    )
    is_whole = not splits_weights() and run.recipe.quantization is None
    return record, model.cpu() if is_whole and model.dtype == dtype else None


def _trained(run: Run, supply: Supply, record: RunRecord, model: Any) -> RunRecord:
    """Train from the last checkpoint, and save the weights and what was measured in the run's folder."""
    recipe = run.recipe
    last = run.processes.write_once(lambda: newest(run.folder))
    if last is not None:
        run.say(f"resuming from {last.name}")
    run.arguments.eval_on_start = last is None
    model = _loaded(run, model)
    mapped = teaching(run, model)
    put(model, run.plan)
    set_seed(recipe.seed)  # for the adapter's initial weights
    student = trainable(model, recipe.lora)
    if recipe.gradient_checkpointing:
        offload = recipe.gradient_checkpointing == "offload"
        recompute_activations(model, offload=offload)
    teacher = None
    if recipe.distil is not None:
        teacher = Teacher(student, run.trained, mapped, recipe.distil)
    with no_progress_bars(), run.progress("training") as advance:
        per_step = supply.tokens // recipe.max_steps
        trainer = LongContextTrainer(
            run=run,
            pieces=supply.pieces,
            teacher=teacher,
            model=student,
            args=run.arguments,
            train_dataset=supply.batches,
            callbacks=[ProgressLines(run.say, advance, per_step)],
        )
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    trained = run.folder / PARTIAL / TRAINED
    with explaining_disk("the trained weights", trained), no_progress_bars():
        trainer.save_model(str(trained))
    run.processes.wait()
    rows = history(trainer.state.log_history)
    record = record.model_copy(update={"history": rows})
    if run.processes.first:
        with explaining_disk("the trained weights", trained):
            if recipe.lora is None:
                # The saved config is that of the patched model; `put` needs the RoPE of the base.
                shutil.copyfile(
                    run.source.folder / "config.json", trained / "config.json"
                )
            run.write(record)
            trained.rename(run.folder / TRAINED)
    return record


def _loaded(run: Run, model: Any) -> Any:
    """Return the base model in the precision of the training; it is loaded unless it is at hand."""
    dtype: torch.dtype = getattr(torch, run.earlier.precision)
    if run.recipe.quantization:  # QLoRA (arXiv:2305.14314)
        four_bits = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        return run.source.load(dtype, {"": run.processes.device}, four_bits)
    if model is None:
        model = run.source.load()
    return model.float() if dtype == torch.float32 else model


def _save(run: Run, supply: Supply, record: RunRecord) -> PreTrainedModel | None:
    """Merge the trained weights, measure them, and write the checkpoint or adapter.

    A checkpoint is verified; returns the reloaded model, if it was reloaded.
    """
    recipe, trained, plan = run.recipe, run.folder / TRAINED, run.plan
    model: Any = merged_model(run, trained)
    dtype = model.dtype
    with run.progress("trained model, short context") as advance:
        on_device = placed(model, run.processes.device)
        now = short_context_loss(run, supply.pieces, on_device, advance, split=False)
    model.to(dtype).cpu()
    limit = recipe.watch.max_short_loss_increase
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    assert record.decisive is not None
    training = Training(
        recipe=recipe.to_dict(),
        run=name_of(record.decisive),
        steps=recipe.max_steps,
        tokens=supply.tokens,
        taught=supply.taught,
        processes=run.processes.count,
        precision={"dtype": record.precision},
        device=device,
        short_context=short_context_check(Mean.of(record.base), now, limit),
    )
    more = {"training": training.to_dict(), "base_weights": record.decisive["weights"]}
    if run.command:
        more["command"] = run.command
    files = included_files(run.source.folder, run.include) | _evidence(run)
    out = absent(run.out)
    if recipe.save == "merged":
        carried = small_files(run.source.folder) | files
        copy = Copy.of(plan, run.source, out, carried)
        return copy.write_trained(model, **more).model
    with new_folder(out) as folder:
        shutil.copyfile(trained / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
        base = {
            ADAPTER_BASE: plan.source.name,
            "revision": plan.source.revision,
        }
        write_json(folder / ADAPTER, read_json(trained / ADAPTER) | base)
        copy_files(files, folder)
        records.write(folder, Record.of(plan, **more, **origin_of(run.source)))
    return None


def _evidence(run: Run) -> dict[str, Path]:
    """Write the recipe, and return the files about the training by their paths in the checkpoint."""
    text = yaml_text(without_paths(as_read(run.recipe.to_dict())))
    (run.folder / RECIPE).write_text(text, encoding="utf-8")
    files = [run.folder / RECORD, run.folder / RECIPE]
    files += [file for file in (run.folder / RUNS).rglob("*") if file.is_file()]
    return {
        f"{TRAINING}/{file.relative_to(run.folder).as_posix()}": file for file in files
    }


def merged_model(run: Run, trained: Path) -> PreTrainedModel:
    """Return the patched model with its adapter merged in float32, in the dtype of the base."""
    model: Any = run.source.load()
    dtype, name = model.dtype, run.plan.source.name
    if run.recipe.lora is None:
        model = Checkpoint(trained).load()
    put(model, run.plan)
    if run.recipe.lora is not None:
        from peft import PeftModel

        with without_deprecations():
            fine_tuned: Any = PeftModel.from_pretrained(
                model.float(), str(trained)
            ).eval()
        before = probe_logits(fine_tuned, run.plan.target, name)
        model = fine_tuned.merge_and_unload()
        after = probe_logits(model.eval(), run.plan.target, name)
        difference = largest_change(before, after)
        if not difference <= MERGED:
            raise RopepatchError(
                f"merging the adapter changes the logits by {difference:.1%} of the largest",
                hint="use save: adapter; please report the model type and the recipe",
            )
    merged: PreTrainedModel = model.to(dtype)
    return merged


def _limit(run: Run) -> None:
    """Judge the short-context check of a finished checkpoint by the limit of this call."""
    training = records.read(run.out).training
    assert training is not None
    limit = run.recipe.watch.max_short_loss_increase
    check = training.short_context.limited(limit)
    training = training.model_copy(update={"short_context": check})
    records.amend(run.out, training=training.to_dict())

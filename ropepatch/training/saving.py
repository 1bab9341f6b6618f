"""What a run leaves behind: a merged checkpoint, or an adapter with the plan it needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import as_read
from ropepatch.extension import record as records
from ropepatch.extension.patching import patch
from ropepatch.extension.planning import Plan
from ropepatch.extension.verification import largest_change, probe_logits
from ropepatch.extension.writing import origin_of, save_trained, source_of
from ropepatch.files import absent, new_folder, read_json, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import load_model
from ropepatch.training.adapter import WEIGHTS, without_deprecations
from ropepatch.training.recipe import Recipe
from ropepatch.training.trainer import HISTORY

ADAPTATION = "adaptation"  # the folder within the checkpoint: recipe and history
RECIPE = "recipe.yaml"
MERGED = 1e-3  # by how much of the largest logit merging may change others, in float32


def save_adaptation(
    plan: Plan, recipe: Recipe, model: PreTrainedModel, trained: Path, out: Path, record: dict[str, Any]
) -> None:
    """Write the outcome of a run, whole or not at all.

    Args:
        plan: The plan it trained under.
        recipe: The recipe, which says whether a merged checkpoint or an adapter is written.
        model: The model that `merged_model` gave.
        trained: The folder that the trainer left.
        out: The folder to make.
        record: Further keys of the record.

    Raises:
        RopepatchError: If it cannot be written, or stock transformers computes something else from it.
    """

    def enclose(folder: Path) -> None:
        (folder / ADAPTATION).mkdir()
        shutil.copyfile(trained.parent / HISTORY, folder / ADAPTATION / HISTORY)
        text = yaml.safe_dump(as_read(recipe.to_dict()), sort_keys=False, allow_unicode=True)
        (folder / ADAPTATION / RECIPE).write_text(text, encoding="utf-8")

    if recipe.save == "merged":
        save_trained(plan, model, out, record=record, enclose=enclose)
        return
    with new_folder(absent(out)) as folder:
        shutil.copyfile(trained / WEIGHTS, folder / WEIGHTS)
        base = {"base_model_name_or_path": plan.model, "revision": plan.revision}
        write_json(folder / "adapter_config.json", read_json(trained / "adapter_config.json") | base)
        enclose(folder)
        origin = origin_of(source_of(plan, beside=out))
        records.write(folder, records.Record.of(plan, **record | origin))


def merged_model(plan: Plan, recipe: Recipe, source: Checkpoint, trained: Path) -> PreTrainedModel:
    """The trained model, patched, its adapter merged in float32, in the dtype of the base checkpoint.

    Raises:
        RopepatchError: If merging changes what the model computes.
    """
    model: Any = load_model(source)
    dtype = model.dtype
    if recipe.lora is None:
        model = load_model(Checkpoint(trained))
    patch(model, plan)
    if recipe.lora is not None:
        from peft import PeftModel

        with without_deprecations():
            adapted: Any = PeftModel.from_pretrained(model.float(), str(trained)).eval()
        before = probe_logits(adapted, plan.target, plan.model)
        model = adapted.merge_and_unload()
        after = probe_logits(model.eval(), plan.target, plan.model)
        difference = largest_change(before, after)
        if not difference <= MERGED:
            raise RopepatchError(
                f"merging the adapter changes the logits by {difference:.1%} of the largest",
                hint="save: adapter keeps it apart; please report the model type and the recipe",
            )
    whole: PreTrainedModel = model.to(dtype)
    return whole

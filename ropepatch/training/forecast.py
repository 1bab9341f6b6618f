"""What a recipe will do to a model, and whether it can here; no weight is read and nothing downloaded."""

from __future__ import annotations

import html
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ropepatch.attention.mapping import check_mappable
from ropepatch.data.sources import FORMATS, local_files
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.extension.planning import Plan
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.precision import BFLOAT16, Precision, fastest
from ropepatch.model.stock import stock_code
from ropepatch.training.adapter import trainable
from ropepatch.training.estimates import SHAPES, DecoderShape, estimate, trained_weights
from ropepatch.training.recipe import Recipe, refuse_map
from ropepatch.training.recipe_sections import map_of
from ropepatch.training.rows import Schedule

EXTRA = 'pip install "ropepatch[train]"'
ADAM = 12  # bytes of a trained weight in a checkpoint of a run: float32, and two moments


@dataclass(frozen=True)
class Forecast:
    """What a training will do.

    Args:
        content: All of it, JSON-ready; sizes are in bytes.
        obstacles: Why it cannot run here; nothing where it can.
        warnings: What the user may not have meant.
    """

    content: dict[str, Any]
    obstacles: tuple[RopepatchError, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        obstacles = [{"error": str(error), "hint": error.hint} for error in self.obstacles]
        return self.content | {"obstacles": obstacles, "warnings": list(self.warnings)}

    def __str__(self) -> str:
        lines = [f"  {name:<10} {line}" for name, line in _lines(self.content)]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(["training", *lines])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def forecast(plan: Plan, recipe: Recipe, out: str | Path, *, processes: int = 1) -> Forecast:
    """What `ropepatch.adapt` will do with the same arguments.

    Tokens, rows and weights are counted, on a model without memory for its weights. Memory, and time on a
    GPU, are arithmetic, see `ropepatch.training.estimates`.

    Raises:
        RopepatchError: A text of the recipe is not there, or its windows do not fit its batches.
    """
    model = blueprint(load_config(plan.survey.raw))
    obstacles = list(_obstacles(plan, recipe, model))
    weights = sum(parameter.numel() for parameter in model.parameters())
    shape = DecoderShape.of(plan.survey.config)
    if shape is not None and shape.parameters != weights:
        shape = None  # a decoder that is built otherwise
    precision = fastest() if recipe.precision is None else Precision(recipe.precision)
    cost = None if shape is None else _cost(recipe, shape, precision, processes)
    trained = None
    try:
        adapted = trainable(model, recipe.lora)
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    except RopepatchError as error:
        obstacles.append(error)
        if shape is not None and find_spec("peft") is None:
            trained = sum(trained_weights(recipe.lora, shape))
    content = {
        "recipe": recipe.to_dict(),
        "out": str(out),
        **_reading(plan, recipe, processes),
        "weights": weights,
        "trained_weights": trained,
        "precision": precision.to_dict() | {"text": str(precision)},
        "cost": cost,
        "disk": _disk(plan, recipe, Path(out), weights, trained or weights),
    }
    disk = content["disk"]
    warnings = list(other_model(plan, recipe))
    if disk["needed"] > disk["free"]:
        warnings.append(f"the disk of {out} has {_size(disk['free'])} free; it takes {_size(disk['needed'])}")
    return Forecast(content, tuple(obstacles), tuple(warnings))


def other_model(plan: Plan, recipe: Recipe) -> Iterator[str]:
    """A warning, if a recipe is written for a model of another size."""
    meant, here = SHAPES.get(recipe.model), DecoderShape.of(plan.survey.config)
    if Path(plan.model).name == Path(recipe.model).name or (meant is not None and meant == here):
        return
    yield (
        f"the recipe is written for {recipe.model}, and this is {plan.model}: its learning rate, its windows "
        "and its target were chosen for the other"
    )


def _obstacles(plan: Plan, recipe: Recipe, model: PreTrainedModel) -> Iterator[RopepatchError]:
    """What the training would refuse, the packages first."""
    texts = [source.text for source in recipe.data.sources if isinstance(source, Texts)]
    needs_datasets = any(_needs_datasets(text) for text in [*texts, recipe.watch.text] if text is not None)
    if find_spec("accelerate") is None:
        yield RopepatchError("a recipe needs accelerate", hint=EXTRA)
    if needs_datasets and find_spec("datasets") is None:
        yield RopepatchError("datasets is needed to read this source", hint=EXTRA)
    try:
        check_adaptable(plan, recipe)
        if recipe.attention != "sdpa":
            with stock_code(f"use {recipe.attention}", "attention: sdpa needs no further package"):
                model.set_attn_implementation(recipe.attention)
    except RopepatchError as error:
        yield error


def check_adaptable(plan: Plan, recipe: Recipe) -> None:
    """Refuse a plan under which no model can be trained, or not by this recipe.

    Raises:
        RopepatchError: Its method is an attention map, no checkpoint can hold it, or it follows the length;
            the weights are quantised; or the model cannot have the map of the recipe's teacher.
    """
    refuse_map(plan.method.name)
    if not plan.savable:
        raise RopepatchError(
            f"no stock rope type can hold {plan.scaling.name}", hint="adapt with a static method"
        )
    if plan.scaling.length_dependent:
        raise RopepatchError(
            f"{plan.scaling.name} follows the length: there are no fixed frequencies to adapt to",
            hint="adapt with a static method",
        )
    if "quantization_config" in plan.survey.raw:
        raise RopepatchError(
            f"the weights of {plan.model} are quantised", hint="adapt the checkpoint it was made from"
        )
    window = plan.rope.original_max_position_embeddings
    if recipe.distil and recipe.reads_beyond(window):
        check_mappable(blueprint(load_config(plan.survey.raw)), window)
        map_of(recipe.distil.map).fitted(window, plan.target)


def _needs_datasets(text: str) -> bool:
    files = local_files(text)
    return files is None or any(file.suffix in FORMATS for file in files)


def _reading(plan: Plan, recipe: Recipe, processes: int) -> dict[str, Any]:
    """Steps, rows, tokens, and where they come from."""
    trained = plan.rope.original_max_position_embeddings
    windows, room = recipe.data.lengths(trained)
    schedule = Schedule.of(
        recipe.data,
        trained=trained,
        steps=recipe.max_steps,
        per_step=processes * recipe.trainer.get("gradient_accumulation_steps", 1),
        seed=recipe.seed,
    )
    sources = []
    for number, source in enumerate(recipe.data.sources):
        found: dict[str, Any] = {"name": getattr(source, "generated", None), "kind": "generated"}
        if isinstance(source, Texts):
            found = {"name": source.text} | _found(source.text)
        sources.append(found | {"tokens": schedule.tokens(number)})
    watch = recipe.watch
    held = {"name": watch.text} | _found(watch.text) if watch.text else {"name": sources[0]["name"]}
    return {
        "steps": recipe.max_steps,
        "processes": processes,
        "windows": windows,
        "rows": len(schedule.windows),
        "tokens_per_batch": room,
        "tokens": int(schedule.windows.sum()),
        "sources": sources,
        "watched": held
        | {
            "every": watch.every,
            "windows": watch.windows,
            "tokens": plan.target if watch.target else trained,
        },
    }


def _found(text: str) -> dict[str, Any]:
    files = local_files(text)
    if files is None:
        return {"kind": "hub"}
    return {"kind": "local", "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _cost(recipe: Recipe, shape: DecoderShape, precision: Precision, processes: int) -> dict[str, Any]:
    """Memory of one process, time of all, and what that rests on."""
    stated = {"bf16": precision.dtype == BFLOAT16, "fp16": precision.dtype == "float16"}
    counted = recipe.model_copy(update={"trainer": recipe.trainer | stated})
    cost = estimate(counted, shape, processes=processes)
    content = {key: value for key, value in cost.to_dict().items() if key != "h100_hours"}
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        basis = f"on {processes} H100 at 40 % of 989 TFLOP/s, assumed; this machine has {name}"
        return content | {"hours": cost.hours() / processes, "time_basis": basis}
    return content | {"hours": None, "time_basis": "how fast this CPU is was not measured"}


def _disk(plan: Plan, recipe: Recipe, out: Path, weights: int, trained: int) -> dict[str, int]:
    """What the run's checkpoints and what is saved take, and what is free."""
    stated = plan.survey.config.dtype or load_config(plan.survey.raw).dtype or "float32"
    dtype = getattr(torch, str(stated).removeprefix("torch."))
    saved = weights * dtype.itemsize if recipe.save == "merged" else 4 * trained
    kept = recipe.trainer.get("save_total_limit", 2) + 1  # one more while it is written
    run = kept * ADAM * trained + 4 * trained
    place = out.expanduser().absolute()
    there = next(folder for folder in (place, *place.parents) if folder.is_dir())
    return {"checkpoint": saved, "run": run, "needed": saved + run, "free": shutil.disk_usage(there).free}


def _lines(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The name and the text of every line."""
    recipe, disk, cost = content["recipe"], content["disk"], content["cost"]
    shared = f" in each of {content['processes']} processes" if content["processes"] > 1 else ""
    windows = dict.fromkeys(content["windows"])
    yield "steps", f"{content['steps']:,}, {content['tokens']:,} tokens in all"
    yield (
        "rows",
        f"{content['rows']:,} of {' and '.join(map(str, windows))} tokens, {content['tokens_per_batch']:,} "
        f"at most in a pass{shared}, positions {recipe['positions']['name']}",
    )
    for source in content["sources"]:
        yield "data", f"{source['name']}: {source['tokens']:,} tokens, {_origin(source)}"
    watched = content["watched"]
    yield (
        "measured",
        f"every {watched['every']} steps on {watched['windows']} windows of {watched['tokens']:,} tokens "
        f"of {watched['name']} that are not trained on",
    )
    trained, lora = content["trained_weights"], recipe["lora"]
    share = "unknown" if trained is None else f"{trained:,} of {content['weights']:,} weights"
    share += "" if trained is None else f" ({trained / content['weights']:.2%})"
    modules = "" if lora is None else lora["target_modules"]
    modules = modules if isinstance(modules, str) else ", ".join(modules)
    yield "trains", share + ("" if lora is None else f": LoRA r {lora['r']} on {modules}")
    yield "precision", content["precision"]["text"]
    if cost is None:
        yield "cost", "no estimate of memory and time: the model is not built like LLaMA"
    else:
        parts = (f"{cost[f'{part}_gib']:.2g} {part}" for part in ("weights", "optimizer", "activations"))
        yield "memory", f"{cost['total_gib']:.2g} GiB{shared}, by arithmetic: {' + '.join(parts)}"
        yield (
            "time",
            f"at least {_time(cost['hours'])}: {cost['time_basis']}; measuring and saving come on top",
        )
    yield (
        "disk",
        f"{_size(disk['needed'])}, of which {_size(disk['run'])} for the time of the training; "
        f"{_size(disk['free'])} free",
    )
    yield "makes", f"{content['out']} (save: {recipe['save']})"


def _origin(source: dict[str, Any]) -> str:
    if source["kind"] == "local":
        files = "1 file" if source["files"] == 1 else f"{source['files']} files"
        return f"from {files} of {_size(source['bytes'])}"
    return "made here" if source["kind"] == "generated" else "streamed from the Hub"


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _time(hours: float | None) -> str:
    if hours is None:
        return "an unknown time"
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"

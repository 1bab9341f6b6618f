"""Forecast of a training: sequences, weights, and memory estimated from config.json.

It loads no weights and downloads nothing. The memory estimate is for decoders with attention and an MLP in
every layer, no [T, T] mask, and a loss that computes logits in chunks.
"""

from __future__ import annotations

import html
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ropepatch.data.sources import local_files
from ropepatch.data.texts import Texts
from ropepatch.data.tokens import amount
from ropepatch.errors import RopepatchError
from ropepatch.extension.planning import Plan
from ropepatch.files import read_json
from ropepatch.model.architectures import published
from ropepatch.model.config import blueprint, head_dim_of, key_value_heads_of, load_config, text_config
from ropepatch.model.precision import BFLOAT16, FLOAT32
from ropepatch.model.source import TINY
from ropepatch.settings import relative_length
from ropepatch.training.preparation import Prepared, Weights, prepare
from ropepatch.training.recipe import SELF, Recipe
from ropepatch.training.rows import Schedule
from ropepatch.training.supply import SELF_READ, held_out_of
from ropepatch.training.watching import DEPTHS

GIB = 2**30
CHUNK = 1024  # positions whose logits are in memory at once
ADAM = 12  # bytes per trained weight in a checkpoint of a run: float32, and two moments
GEOMETRY = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
FOUR_BITS = 0.516  # bytes per weight: NF4 in blocks of 64 with quantised scales (arXiv:2305.14314)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak memory of one process in GiB, without fragmentation of the allocator."""

    weights_gib: float  # if one process holds all of them
    optimizer_gib: float  # gradients and both moments of Adam
    activations_gib: float  # of a forward and backward pass, with the logits of a chunk
    evaluation_gib: float  # of a forward pass over the longest evaluated sequence

    @property
    def total_gib(self) -> float:
        """The peak: gradients and Adam's moments also stay during evaluation."""
        return self.weights_gib + self.optimizer_gib + max(self.activations_gib, self.evaluation_gib)

    def to_dict(self) -> dict[str, float]:
        """As JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        peak = max(self.activations_gib, self.evaluation_gib)
        when = "a step" if peak == self.activations_gib else "an evaluation"
        return (
            f"{self.total_gib:.1f} GiB: {self.weights_gib:.1f} weights, {self.optimizer_gib:.1f} optimizer, "
            f"{peak:.1f} activations of {when}"
        )


def stored_dtype(config: Any) -> torch.dtype:
    """Return the dtype of a checkpoint's weights as its config states it, else float32."""
    stated = config.dtype or text_config(config).dtype or FLOAT32
    dtype: torch.dtype = getattr(torch, str(stated).removeprefix("torch."))
    return dtype


def memory(recipe: Recipe, whole: Any, counted: Weights, dtype: str, window: int, target: int) -> Memory:
    """Estimate the memory of a recipe in one process.

    Frozen weights take the bytes of the checkpoint's dtype in mixed precision, `FOUR_BITS` in 4 bits, else 4.
    Trained weights take 4, their gradients 4 and Adam's moments 8. Training all weights in mixed precision
    also keeps autocast's copies of 2 bytes. ``whole`` is the config of the checkpoint; ``window`` and
    ``target`` are the original context length and the target length.
    """
    config = text_config(whole)
    size, trained = 4 if dtype == FLOAT32 else 2, counted.trained or 0
    if recipe.lora is None:
        held: float = counted.all * (4 if size == 4 else 6)
    else:
        is_cast = dtype == FLOAT32 or recipe.quantization is not None
        frozen = size if is_cast else stored_dtype(whole).itemsize
        held = counted.all * frozen + 4 * trained
    if recipe.quantization:
        held -= counted.linear * (size - FOUR_BITS)
    windows, room = recipe.data.lengths(window)
    tokens = max(room // length * length for length in windows)
    evaluated = target if recipe.watch.target else window
    has_passkeys = recipe.watch.target and recipe.watch.passkey_trials > 0
    return Memory(
        weights_gib=held / GIB,
        optimizer_gib=ADAM * trained / GIB,
        activations_gib=activation_bytes(recipe, config, tokens, size) / GIB,
        evaluation_gib=evaluation_bytes(config, evaluated, size, cached=has_passkeys) / GIB,
    )


@dataclass(frozen=True)
class Widths:
    """Widths of a layer: numbers per token of its hidden state, queries, keys, and MLP."""

    hidden: int
    queries: int
    keys: int
    mlp: int

    @classmethod
    def of(cls, config: Any) -> Widths:
        """Read the widths from a text config; a mixture of experts counts the experts of one token."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        head = head_dim_of(config)
        groups = key_value_heads_of(config)
        mlp = getattr(config, "intermediate_size", None) or 4 * hidden
        mlp = mlp if isinstance(mlp, int) else max(mlp)
        if experts := getattr(config, "num_experts_per_tok", None):
            mlp = experts * (getattr(config, "moe_intermediate_size", None) or mlp)
            mlp += getattr(config, "shared_expert_intermediate_size", None) or 0
        return cls(hidden, heads * head, groups * head, mlp)


def activation_bytes(recipe: Recipe, config: Any, tokens: int, size: int) -> int:
    """Estimate the memory of one forward and backward pass, without weights and gradients.

    With checkpointing: the hidden state of every layer, and one layer at its peak, the backward pass of its
    MLP. The peak holds six tensors of the MLP's width, four of the attention's and eight float32 ones of the
    hidden size, as measured on transformers' LLaMA. The last vary by a fifth with the trained weights; an
    adapter on the MLP takes a fifth more in all. Hidden states take 4 bytes a number if the embeddings are
    trained, which are then float32. Without checkpointing all layers are held. The loss adds three float32
    copies of a chunk of logits.
    """
    widths, layers, vocabulary = Widths.of(config), int(config.num_hidden_layers), int(config.vocab_size)
    stream = 4 if recipe.lora is None or recipe.lora.train_embeddings else size
    layer = 32 * widths.hidden + size * (2 * (widths.queries + widths.keys) + 6 * widths.mlp)
    held = stream * widths.hidden * layers + layer if recipe.gradient_checkpointing else layer * layers
    return tokens * held + 3 * 4 * min(CHUNK, tokens) * vocabulary


def evaluation_bytes(config: Any, tokens: int, size: int, *, cached: bool) -> int:
    """Estimate the peak of one forward pass without gradients: a layer's MLP, or a chunk of logits.

    Passkeys (``cached``) add a KV cache.
    """
    widths = Widths.of(config)
    layer = tokens * size * (9 * widths.hidden // 2 + 3 * widths.mlp)
    logits = tokens * size * widths.hidden + 3 * 4 * min(CHUNK, tokens) * int(config.vocab_size)
    cache = tokens * size * 2 * widths.keys * int(config.num_hidden_layers)
    return max(layer + cached * cache, logits)


@cache
def published_config(model: str) -> dict[str, Any] | None:
    """Return the config.json of a model that bundled recipes are for; None for others."""
    if model == "tiny":
        return read_json(TINY / "config.json")
    return published().get(model)


@dataclass(frozen=True)
class Estimate:
    """Costs of a recipe in one process on the model it is written for."""

    tokens: int
    weights: Weights
    memory: Memory

    @classmethod
    def of(cls, recipe: Recipe) -> Estimate | None:
        """Estimate a recipe; None if the config of its model is unknown."""
        raw = published_config(recipe.model)
        if raw is None:
            return None
        config = load_config({"dtype": BFLOAT16} | raw)  # published weights have 16 bits
        counted = Weights.of(blueprint(config), recipe)
        window = text_config(config).max_position_embeddings
        target = relative_length(recipe.to, window)
        needed = memory(recipe, config, counted, recipe.precision or BFLOAT16, window, target)
        return cls(int(_schedule(recipe, window, 1).windows.sum()), counted, needed)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        counts = {"tokens": self.tokens, "weights": self.weights.all, "trained_weights": self.weights.trained}
        return counts | self.memory.to_dict() | {"total_gib": self.memory.total_gib}

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens; {self.memory}"


@dataclass(frozen=True)
class Forecast:
    """The forecast of a training."""

    content: dict[str, Any]  # JSON-ready; sizes are in bytes
    obstacles: tuple[RopepatchError, ...]  # why it cannot run here
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


def forecast(
    plan: Plan,
    recipe: Recipe,
    out: str | Path,
    *,
    processes: int = 1,
    prepared: Prepared | None = None,
) -> Forecast:
    """Forecast what `ropepatch.adapt` does with the same arguments."""
    prepared, window = prepared or prepare(plan, recipe), plan.source.window
    counted, cost = prepared.counted, None
    if counted.trained is not None:
        config, dtype = plan.checkpoint.whole_config, prepared.precision.dtype
        cost = memory(recipe, config, counted, dtype, window, plan.target).to_dict()
    content = {
        "recipe": recipe.to_dict(),
        "out": str(out),
        **_reading(plan, recipe, processes),
        "weights": counted.all,
        "trained_weights": counted.trained,
        "precision": prepared.precision.to_dict() | {"text": str(prepared.precision)},
        "memory": cost,
        "disk": _disk(plan, recipe, Path(out), counted),
    }
    disk = content["disk"]
    warnings = list(other_model(plan, recipe))
    if disk["needed"] > disk["free"]:
        warnings.append(
            f"training needs {_size(disk['needed'])} on the disk of {out}, {_size(disk['free'])} are free"
        )
    return Forecast(content, prepared.obstacles, tuple(warnings))


def other_model(plan: Plan, recipe: Recipe) -> Iterator[str]:
    """Yield a warning if the recipe is written for a model of another size."""
    if Path(plan.model).name == Path(recipe.model).name:
        return
    if meant := published_config(recipe.model):
        geometries = [
            [getattr(config, size, None) for size in GEOMETRY]
            for config in (text_config(load_config(meant)), plan.checkpoint.config)
        ]
        if geometries[0] == geometries[1]:
            return
    yield (
        f"the recipe is for {recipe.model}, this model is {plan.model}: its learning rate, lengths "
        "and target were chosen for that model"
    )


def _schedule(recipe: Recipe, window: int, processes: int) -> Schedule:
    per_step = processes * recipe.trainer.get("gradient_accumulation_steps", 1)
    return Schedule.of(
        recipe.data, trained=window, steps=recipe.max_steps, per_step=per_step, seed=recipe.seed
    )


def _reading(plan: Plan, recipe: Recipe, processes: int) -> dict[str, Any]:
    """Count steps, sequences and tokens per source, and describe the evaluation."""
    window, watch = plan.source.window, recipe.watch
    schedule = _schedule(recipe, window, processes)
    windows, room = recipe.data.lengths(window)
    sources = []
    for number, source in enumerate(recipe.data.sources):
        if isinstance(source, Texts):
            found = {"name": source.text} | _found(source.text)
        else:
            found = {"name": source.generated, "kind": "self" if source.generated == SELF else "generated"}
        sources.append(found | {"tokens": schedule.tokens(number)})
    held = held_out_of(recipe, window, plan.target)
    text = {} if watch.text is None else _found(watch.text)
    times = 1 + -(-recipe.max_steps // watch.every)
    passkeys = DEPTHS * watch.passkey_trials if watch.target else 0
    each = held.count * held.length + passkeys * plan.target
    watched = {"name": held.name, "every": watch.every, "windows": held.count, "length": held.length}
    return {
        "steps": recipe.max_steps,
        "processes": processes,
        "windows": windows,
        "rows": len(schedule.windows),
        "tokens_per_batch": room,
        "tokens": int(schedule.windows.sum()),
        "sources": sources,
        "watched": watched | text | {"passkeys": passkeys, "times": times, "tokens": times * each},
    }


def _found(text: str) -> dict[str, Any]:
    files = local_files(text)
    if files is None:
        return {"kind": "hub"}
    return {"kind": "local", "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _disk(plan: Plan, recipe: Recipe, out: Path, counted: Weights) -> dict[str, int]:
    """Return the bytes of the run's checkpoints and of the output, and the free space."""
    trained = counted.trained or counted.all
    saved = (
        counted.all * stored_dtype(plan.checkpoint.whole_config).itemsize
        if recipe.save == "merged"
        else 4 * trained
    )
    checkpoints = recipe.trainer.get("save_total_limit", 2) + 1  # one more while it is written
    run = checkpoints * ADAM * trained + 4 * trained
    place = out.expanduser().absolute()
    there = next(folder for folder in (place, *place.parents) if folder.is_dir())
    return {"checkpoint": saved, "run": run, "needed": saved + run, "free": shutil.disk_usage(there).free}


def _lines(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every line."""
    recipe, disk, watched, cost = (content[key] for key in ("recipe", "disk", "watched", "memory"))
    shared = f" in each of {content['processes']} processes" if content["processes"] > 1 else ""
    windows = dict.fromkeys(content["windows"])
    yield "steps", f"{content['steps']:,}, {content['tokens']:,} tokens in all"
    yield (
        "sequences",
        f"{content['rows']:,} of {' and '.join(map(str, windows))} tokens, at most "
        f"{content['tokens_per_batch']:,} tokens per forward pass{shared}, positions: "
        f"{recipe['positions']['name']}",
    )
    for source in content["sources"]:
        yield "data", f"{source['name']}: {source['tokens']:,} tokens, {_origin(source)}"
    keys = f", and {watched['passkeys']} passkeys at the target" if watched["passkeys"] else ""
    yield (
        "evaluation",
        f"every {watched['every']} steps ({watched['times']} times), {watched['windows']} held-out texts of "
        f"{watched['length']:,} tokens of {watched['name']}{keys}; {amount(watched['tokens'])} tokens",
    )
    trained, lora = content["trained_weights"], recipe["lora"]
    share = "unknown" if trained is None else f"{trained:,} of {content['weights']:,} weights"
    share += "" if trained is None else f" ({trained / content['weights']:.2%})"
    modules = "" if lora is None else lora["target_modules"]
    modules = modules if isinstance(modules, str) else ", ".join(modules)
    yield "trains", share + ("" if lora is None else f": LoRA r {lora['r']} on {modules}")
    yield "precision", content["precision"]["text"]
    if cost is not None:
        yield "memory", f"{Memory(**cost)}{shared} (estimate)"
    yield (
        "disk",
        f"{_size(disk['needed'])}, of which {_size(disk['run'])} only during training; "
        f"{_size(disk['free'])} free",
    )
    yield "output", f"{content['out']} (save: {recipe['save']})"


def _origin(source: dict[str, Any]) -> str:
    if source["kind"] == "local":
        files = "1 file" if source["files"] == 1 else f"{source['files']} files"
        return f"from {files} of {_size(source['bytes'])}"
    origins = {
        "generated": "generated here",
        "self": f"generated by the model before training, token by token, and read {SELF_READ} times",
        "hub": "streamed from the Hub",
    }
    return origins[source["kind"]]


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"

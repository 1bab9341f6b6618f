"""Time, memory and MFU of training steps of random LLaMAs, as the bundled recipes train.

    python eval/benchmarks/step_cost.py [--shapes 1B 8B] [--hows lora full] [--lengths 8k 128k]

A step is one sequence at true positions with our Trainer: forward, backward, clipping, AdamW. `lora` is the
adapter of llama3-8b-yarn-64k with cross-entropy; `qlora` the same on weights in 4 bits; `distil` as
`--distil` trains, with the teacher under ReRoPE for sequences beyond the original length of 8,192; `full` is
smollm2-135m-32k-full. Activations are recomputed. The first step is not counted. Memory is the most that the
allocator reserved. Operations are the model's own, without recomputation; MFU is their share of the GPU's
stated bfloat16 rate. A step that does not fit becomes a row that states it.
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import ropepatch
from ropepatch.attention import remap_positions, teaching_window
from ropepatch.data.positions import TrueLength
from ropepatch.extension.patching import put
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import forward_operations, load_config
from ropepatch.model.precision import best_device, fastest
from ropepatch.processes import join
from ropepatch.settings import relative_length
from ropepatch.training.adapter import load_in_4_bits, recompute_activations, trainable
from ropepatch.training.forecast import GIB, memory, published_config
from ropepatch.training.parallel import Sharing
from ropepatch.training.preparation import Weights
from ropepatch.training.recipe import Distil, Recipe, read_recipe, remapping_of
from ropepatch.training.rows import Batches, Row, Schedule
from ropepatch.training.teacher import Teacher
from ropepatch.training.trainer import LongContextTrainer, training_arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))

import study
from reporting import resident_mib, spread
from study import Study

SHAPES = {
    "8B": "meta-llama/Meta-Llama-3-8B",
    "1B": "meta-llama/Llama-3.2-1B",
    "3B": "meta-llama/Llama-3.2-3B",
    "tiny": "tiny",
}
LORA, QLORA, DISTIL, FULL = "lora", "qlora", "distil", "full"
LENGTHS = ("8k", "32k", "16k", "64k", "128k")
WINDOW = 8192  # of all shapes but tiny
STEPS, ENOUGH = 4, 40.0  # at most; only two if they take so many seconds
OPERATIONS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # per second, bfloat16 without sparsity


def cases(given: Namespace) -> Iterator[study.Row]:
    """The cases, the longest sequences last; 4-bit ones only if possible."""
    can_quantise = torch.cuda.is_available() and find_spec("bitsandbytes") is not None
    for length in given.lengths:
        for shape in given.shapes:
            for how in given.hows:
                if how != QLORA or can_quantise:
                    yield {"shape": shape, "how": how, "tokens": relative_length(length, WINDOW)}


class RandomRows:
    """Training sequences of random tokens.

    Args:
        vocabulary: The size of the vocabulary.
    """

    name, digest, size = "random tokens", "", None

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def row(self, index: int, window: int) -> Row:
        """A training sequence; see `TokenRows.row`."""
        ids = torch.randint(self._vocabulary, (window,), generator=torch.Generator().manual_seed(index))
        return Row(ids, ids.clone(), (window,))


class Clock(TrainerCallback):
    """Times the steps, and ends the training without a measurement or a checkpoint."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait for earlier work on the device."""
        self._began = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the step, and record its time."""
        self.seconds.append(self._now() - self._began)
        control.should_evaluate = control.should_save = control.should_log = False
        if len(self.seconds) > 2 and sum(self.seconds) > ENOUGH:
            control.should_training_stop = True

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def recipe_of(how: str, tokens: int, window: int) -> Recipe:
    """The recipe with one sequence of so many tokens per step."""
    recipe = read_recipe("smollm2-135m-32k-full" if how == FULL else "llama3-8b-yarn-64k")
    rows = {"windows": (tokens,), "tokens_per_batch": tokens, "boundaries": False}
    distances = {"name": "rerope", "window": teaching_window(window)}
    trainer = recipe.trainer | {"max_steps": STEPS, "warmup_steps": 0, "gradient_accumulation_steps": 1}
    changes: dict[str, Any] = {
        "data": recipe.data.model_copy(update=rows),
        "positions": TrueLength(),
        "trainer": {key: value for key, value in trainer.items() if key != "bf16"},  # the fastest
        "distil": Distil(remapping=distances) if how == DISTIL else None,
        "quantization": "4bit" if how == QLORA else None,
        "attention": "sdpa",
    }
    return recipe.model_copy(update=changes)


def config_of(shape: str) -> Any:
    """The configuration of a shape, with unscaled RoPE."""
    raw = dict(published_config(SHAPES[shape]) or {})
    if shape != "tiny":
        raw |= {"max_position_embeddings": WINDOW, "rope_scaling": None}
    return load_config(raw)


def made(shape: str, dtype: torch.dtype) -> Any:
    """A model with random weights."""
    torch.manual_seed(0)
    with torch.device(best_device()):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)


@cache
def saved(shape: str, dtype: torch.dtype) -> tuple[Path, Any]:
    """The folder of a model for loading in 4 bits, and the object that removes it at the end."""
    place = tempfile.TemporaryDirectory()
    made(shape, dtype).save_pretrained(place.name)
    return Path(place.name), place


def measure(case: study.Row, given: Namespace) -> study.Row:
    """The time and memory of a step, or the error that it does not fit."""
    shape, how, tokens = (case[key] for key in ("shape", "how", "tokens"))
    config = config_of(shape)
    window = config.max_position_embeddings
    recipe = recipe_of(how, tokens, window)
    dtype = fastest().dtype
    plan = ropepatch.plan(config, to=max(tokens, 2 * window), method="yarn")
    counted = Weights.of(copy.deepcopy(plan.source.skeleton), recipe)
    expected = memory(recipe, config, counted, dtype, window, plan.target)
    parts = (expected.weights_gib, expected.optimizer_gib, expected.activations_gib)
    row: study.Row = {
        "parameters": counted.all,
        "trained": counted.trained,
        "dtype": dtype,
        "operations": operations(config, counted.all, how, tokens),
        "estimated_gib": round(sum(parts), 2),
    }
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return row | stepped(shape, recipe, plan, getattr(torch, dtype))
    except torch.OutOfMemoryError:
        return row | {"out_of_memory": True}


def stepped(shape: str, recipe: Recipe, plan: Any, dtype: torch.dtype) -> study.Row:
    """The time and memory of some steps of a model prepared as for a run."""
    window, target, name = plan.source.window, plan.target, str(dtype).removeprefix("torch.")
    device = best_device()
    if recipe.quantization:
        model = load_in_4_bits(Checkpoint(saved(shape, dtype)[0]), name, device)
    else:
        model = made(shape, dtype)
    source = Checkpoint.of(model)
    mapped = None
    if recipe.distil and recipe.reads_beyond(window):
        with remap_positions(model, remapping_of(recipe.distil.remapping), to=target) as mapped:
            pass
    put(model, source, ropepatch.plan(model, to=target, method="yarn"))
    student = trainable(model, recipe.lora)
    recompute_activations(model)
    schedule = Schedule.of(recipe.data, trained=window, steps=STEPS, per_step=1, seed=0)
    streams: Any = [RandomRows(model.config.vocab_size)] * len(recipe.data.sources)
    batches = Batches(schedule, streams, recipe.positions, boundaries=False, target=target, seed=0)
    nobody: Any = None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = LongContextTrainer(
            watcher=nobody,
            packed=True,
            sharing=Sharing(),
            processes=join(device),
            teacher=recipe.distil and Teacher(student, window, mapped, recipe.distil),
            model=student,
            args=training_arguments(recipe, folder, dtype=name, resumed=True),
            train_dataset=batches,
            callbacks=[clock := Clock()],
        )
        trainer.train()
    counted = clock.seconds[1:]
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else resident_mib("VmHWM") * 2**20
    return {"steps": len(counted), "step_seconds": spread(counted), "peak_gib": round(peak / GIB, 2)}


def operations(config: Any, weights: int, how: str, tokens: int) -> int:
    """The operations of a step, without gradients of frozen weights, but with those of a teacher."""
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = forward_operations(config, 0, tokens)
    linear = forward_operations(config, weights - looked_up, tokens) - attention
    passes = {FULL: (3, 3), DISTIL: (3, 4)}.get(how, (2, 3))
    return passes[0] * linear + passes[1] * attention


def mfu(row: study.Row, gpu: str) -> float | None:
    """The share of the peak operations of a GPU; None if they are not in `OPERATIONS`."""
    stated = next((most for name, most in OPERATIONS.items() if name in gpu), None)
    seconds = row["step_seconds"]["median"]
    return row["operations"] / seconds / stated if stated else None


def steps_table(rows: list[study.Row], gpu_of: Callable[[float], str]) -> str:
    """The table of rows with the name of a GPU, by shape, the shortest first."""
    fits = "step_seconds"

    def shown(form: Callable[[study.Row], str]) -> Callable[[study.Row], str]:
        return lambda row: form(row) if fits in row else "–"

    def share(row: study.Row) -> str:
        found = mfu(row, row["gpu"])
        return "–" if found is None else f"{found:.0%}"

    def hours(row: study.Row) -> str:
        return f"{1e7 / row['tokens'] * row[fits]['median'] / 3600:.1f} h"

    columns: dict[str, Callable[[study.Row], str]] = {
        "LLaMA of": lambda row: row["shape"],
        "trained": lambda row: row["how"],
        "tokens of a row": lambda row: f"{row['tokens']:,}",
        "measured on": lambda row: row["gpu"],
        "GiB (estimate)": lambda row: (
            f"{row['peak_gib']:.1f} ({row['estimated_gib']:.1f})"
            if fits in row
            else f"does not fit ({row['estimated_gib']:.1f})"
        ),
        "one GPU": shown(lambda row: gpu_of(row["peak_gib"])),
        "a step": shown(lambda row: f"{row[fits]['median']:.2f} s"),
        "tokens/s": shown(lambda row: f"{row['tokens'] / row[fits]['median']:,.0f}"),
        "MFU": shown(share),
        "10 M tokens": shown(hours),
    }
    return study.table(sorted(rows, key=lambda row: (row["parameters"], row["how"], row["tokens"])), columns)


def add_options(parser: ArgumentParser) -> None:
    hows = (LORA, DISTIL, QLORA, FULL)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES][:3])
    parser.add_argument("--hows", nargs="+", choices=hows, default=hows)
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, help="tokens of a sequence")


STUDY = Study(
    name="step_cost", about=__doc__, cases=cases, measure=measure, options=add_options, inputs=lambda case: ()
)

if __name__ == "__main__":
    STUDY.main()

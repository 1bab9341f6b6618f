"""How the processes of a run share it: rows of their own, parts of the weights, or parts of each row."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from ropepatch.errors import RopepatchError
from ropepatch.files import shipped
from ropepatch.training.fused_loss import IGNORED
from ropepatch.training.packed_attention import SHARED, packed_attention
from ropepatch.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import PartialState

NEEDS_ALL_WEIGHTS = {
    "distil": "there is no teacher to distil from",
    "quantization": "weights in 4 bits cannot be held",
}
PREFIX = "PARALLELISM_CONFIG_"  # of what accelerate's launcher hands on
SPLIT = ("input_ids", "position_ids", "shift_labels")  # of a row, [1, T]


@dataclass(frozen=True)
class Sharing:
    """What accelerate's launcher put into the environment of this process."""

    processes: int
    engine: str | None = None  # what splits the weights: `FSDP` or `DEEPSPEED`
    # Of ZeRO: of rows that processes share, stages 1 and 2 add up gradients of which 3 takes the mean.
    zero: int | None = None
    sequence: int = 1  # over how many processes DeepSpeed's Ulysses splits a row (arXiv:2309.14509)

    @classmethod
    def of(cls, recipe: Recipe) -> Sharing:
        """That of this process; what the recipe says goes before the launcher's file."""
        named = os.environ.get
        engines = [name for name in ("FSDP", "DEEPSPEED") if named(f"ACCELERATE_USE_{name}") == "true"]
        return cls(
            processes=int(named("WORLD_SIZE", "1")),
            engine=engines[0] if engines else None,
            zero=int(named("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")) if "DEEPSPEED" in engines else None,
            sequence=recipe.parallel.sequence if recipe.parallel else int(named(f"{PREFIX}SP_SIZE", "1")),
        )

    @property
    def rows_at_once(self) -> int:
        """Rows, or batches of rows, that all processes read side by side."""
        return self.processes // self.sequence

    def attention(self, recipe: Recipe) -> str:
        """How the trainer attends: `packed`, `varlen` or `shared`."""
        if self.sequence > 1:
            return "shared"
        return "packed" if recipe.attention == "sdpa" else "varlen"

    def check(self, recipe: Recipe, config: Any, trained: int) -> None:
        """Refuse what these processes cannot share, before anything is read."""
        place = shipped("recipes/accelerate")
        launch = f"accelerate launch --config_file {place}/alst.yaml --num_processes {self.sequence}"
        if self.sequence > 1 and not (self.zero == 3 and os.environ.get(f"{PREFIX}SP_SIZE")):
            raise RopepatchError(
                f"rows are to be split over {self.sequence} processes, and nothing that splits them runs",
                hint=f"{launch} -m ropepatch ...",
            )
        if os.environ.get(f"{PREFIX}CP_SIZE", "1") != "1":
            raise RopepatchError(
                "no recipe is trained by accelerate's context parallelism",
                hint=f"parallel: {{sequence: N}} and {place}/alst.yaml split rows",
            )
        for section, reason in NEEDS_ALL_WEIGHTS.items():
            if getattr(recipe, section) and self.engine:
                raise RopepatchError(
                    f"{reason} where FSDP or DeepSpeed split the model",
                    hint=f"DDP takes them: {place}/ddp.yaml; or leave {section} out",
                )
        if self.engine == "DEEPSPEED" and find_spec("deepspeed") is None:
            raise RopepatchError("DeepSpeed is not installed", hint="pip install deepspeed")
        for problem, holds in self._uneven(recipe, config, trained) if self.sequence > 1 else ():
            if holds:
                raise RopepatchError(
                    f"rows cannot be split over {self.sequence} processes: {problem}",
                    hint="choose another parallel.sequence, or leave it out",
                )

    def _uneven(self, recipe: Recipe, config: Any, trained: int) -> list[tuple[str, Any]]:
        """What may keep a row from being split, and whether it does."""
        parts, heads, keys = self.sequence, config.num_attention_heads, config.num_key_value_heads
        windows, room = recipe.data.lengths(trained)
        uneven = [length for length in {*windows, room} if length % parts]
        slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
        return [
            (f"{self.processes} processes are not a multiple of it", self.processes % parts),
            (f"{heads} attention heads are not", heads % parts),
            (f"{keys} key heads neither divide it nor are a multiple", keys % parts and parts % keys),
            (f"rows of {uneven} tokens are not", uneven),
            (f"attention: {recipe.attention} is not sdpa", recipe.attention != "sdpa"),
            (f"{config.model_type} has a sliding window", getattr(config, "sliding_window", None) and slides),
        ]

    def join(self, recipe: Recipe) -> PartialState:
        """Join the processes, once the environment that accelerate reads says what the recipe does."""
        from accelerate import PartialState

        self.announce(recipe)
        # The others wait while the first tokenises, merges and saves, which may take hours.
        state = PartialState(cpu=on_cpu(), timeout=timedelta(days=2))
        atexit.register(state.destroy_process_group)  # or its threads may abort a process that has ended well
        if state.num_processes != self.processes:
            raise RopepatchError(
                f"accelerate counts {state.num_processes} where {self.processes} processes were started",
                hint="without GPUs it has no FSDP: start them by torchrun, or with DeepSpeed",
            )
        return state

    def announce(self, recipe: Recipe) -> None:
        """Let the launcher's environment follow the recipe."""
        if self.engine == "DEEPSPEED":
            steps = recipe.trainer.get("gradient_accumulation_steps", 1)
            os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
            os.environ["ACCELERATE_GRADIENT_CLIPPING"] = str(_clipping(recipe))
        if self.sequence > 1:
            sizes = {"SP_SIZE": self.sequence, "DP_SHARD_SIZE": self.processes // self.sequence}
            os.environ |= {f"{PREFIX}{name}": str(size) for name, size in sizes.items()}


def on_cpu() -> bool:
    """Whether accelerate is kept on the CPU, where it has no FSDP."""
    return not torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_FSDP") != "true"


def launch_arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of the Trainer by which accelerate finds the devices, and DeepSpeed what it was announced."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return {"use_cpu": on_cpu()}
    clipping = {"max_grad_norm": _clipping(recipe)}
    # With `use_cpu` DeepSpeed would not start.
    return clipping if torch.cuda.is_available() else clipping | {"ddp_backend": "gloo"}


def _clipping(recipe: Recipe) -> float:
    """The largest norm of gradients; accelerate takes 0, which is none, for 1."""
    norm: Any = recipe.trainer.get("max_grad_norm", 1.0)
    return float(norm) or 1e9


def load_whole_models(sharing: Sharing) -> None:
    """Let transformers load models whole again: since ZeRO-3 began it would split each over the processes."""
    if sharing.engine == "DEEPSPEED":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


class Repeated(Dataset[Any]):
    """Batches each of which so many processes after each other read."""

    def __init__(self, batches: Sequence[Any], times: int) -> None:
        self.batches, self.times = batches, times

    def __len__(self) -> int:
        return len(self.batches) * self.times

    def __getitem__(self, number: int) -> Any:
        return self.batches[number // self.times]


def part_of_row(batch: dict[str, Any], rank: int, parts: int) -> dict[str, Any]:
    """The part of a row that one process holds, with labels of what follows and all segments of the row."""
    whole = batch | {"shift_labels": F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]}
    del whole["labels"]
    split: dict[str, Tensor] = {name: whole[name].chunk(parts, dim=-1)[rank] for name in SPLIT}
    return whole | split


def share_rows(accelerator: Any, model: Any) -> None:
    """Let Ulysses attend by our function of packed rows, and leave the splitting of rows to `part_of_row`.

    accelerate knows sdpa and flash attention by name alone, and a run does not go on behind DeepSpeed's
    adapter of batches.
    """
    prepare = accelerator.prepare
    accelerator.parallelism_config.sp_handler.sp_attn_implementation = SHARED
    accelerator.deepspeed_ulysses_dl_adapter = lambda batches, model: batches

    def attending(*parts: Any, **how: Any) -> Any:
        with packed_attention(model, SHARED):  # DeepSpeed wraps what the model attends by
            return prepare(*parts, **how)

    accelerator.prepare = attending

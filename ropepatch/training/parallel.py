"""How the processes of a run share it: each has rows of its own, and all or a part of the weights."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.files import shipped
from ropepatch.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import PartialState

NEEDS_ALL_WEIGHTS = {
    "distil": "there is no teacher to distil from",
    "quantization": "weights in 4 bits cannot be held",
}


@dataclass(frozen=True)
class Sharing:
    """What accelerate's launcher put into the environment of this process."""

    processes: int
    engine: str | None = None  # what splits the weights: `FSDP` or `DEEPSPEED`

    @classmethod
    def of_environment(cls) -> Sharing:
        """That of this process."""
        named = os.environ.get
        engines = [name for name in ("FSDP", "DEEPSPEED") if named(f"ACCELERATE_USE_{name}") == "true"]
        return cls(int(named("WORLD_SIZE", "1")), engines[0] if engines else None)

    def check(self, recipe: Recipe) -> None:
        """Refuse what these processes cannot share, before anything is read."""
        place = shipped("recipes/accelerate")
        for size in ("CP_SIZE", "SP_SIZE"):
            if os.environ.get(f"PARALLELISM_CONFIG_{size}", "1") != "1":
                raise RopepatchError(
                    "a recipe reads packed rows, which accelerate cannot split over processes",
                    hint=f"{place}/fsdp2.yaml; or train what `extend` writes with a trainer of your own",
                )
        for section, reason in NEEDS_ALL_WEIGHTS.items():
            if getattr(recipe, section) and self.engine:
                raise RopepatchError(
                    f"{reason} where FSDP or DeepSpeed split the model",
                    hint=f"DDP takes them: {place}/ddp.yaml; or leave {section} out",
                )
        if self.engine == "DEEPSPEED" and find_spec("deepspeed") is None:
            raise RopepatchError("DeepSpeed is not installed", hint="pip install deepspeed")

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

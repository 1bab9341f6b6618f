"""Data parallelism: each process has its own sequences, and all weights or a part of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.files import shipped
from ropepatch.processes import on_cpu
from ropepatch.training.recipe import Recipe

NEEDS_ALL_WEIGHTS = {
    "distil": "self-distillation is not possible",
    "quantization": "4-bit weights are not possible",
}


@dataclass(frozen=True)
class Sharing:
    """Settings of accelerate's launcher in the environment of this process."""

    # The engine that splits the weights: `FSDP` or `DEEPSPEED`
    engine: str | None = None

    @classmethod
    def of_environment(cls) -> Sharing:
        """Read the environment of this process."""
        engines = [
            name
            for name in ("FSDP", "DEEPSPEED")
            if os.environ.get(f"ACCELERATE_USE_{name}") == "true"
        ]
        return cls(engines[0] if engines else None)

    def check(self, recipe: Recipe) -> None:
        """Raise `RopepatchError` if these processes cannot share the training of a recipe."""
        place = shipped("recipes/accelerate")
        for size in ("CP_SIZE", "SP_SIZE"):
            if os.environ.get(f"PARALLELISM_CONFIG_{size}", "1") != "1":
                raise RopepatchError(
                    "a recipe's packed sequences cannot be split over processes by accelerate",
                    hint=f"{place}/fsdp2.yaml; or train what `extend` writes with a trainer of your own",
                )
        for section, reason in NEEDS_ALL_WEIGHTS.items():
            if getattr(recipe, section) and self.engine:
                raise RopepatchError(
                    f"{reason} if FSDP or DeepSpeed splits the model",
                    hint=f"DDP takes them: {place}/ddp.yaml; or leave {section} out",
                )
        if self.engine == "DEEPSPEED" and find_spec("deepspeed") is None:
            raise RopepatchError(
                "DeepSpeed is not installed", hint="pip install deepspeed"
            )

    @contextmanager
    def announced(self, recipe: Recipe) -> Iterator[None]:
        """Set the launcher's environment variables from the recipe within the block."""
        values: dict[str, str] = {}
        if self.engine == "DEEPSPEED":
            values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(recipe.accumulated)
            values["ACCELERATE_GRADIENT_CLIPPING"] = str(_clipping(recipe))
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def launch_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the Trainer's arguments about devices, and those that DeepSpeed compares with its settings."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return {"use_cpu": on_cpu()}
    clipping = {"max_grad_norm": _clipping(recipe)}
    # With `use_cpu` DeepSpeed would not start.
    return clipping if torch.cuda.is_available() else clipping | {"ddp_backend": "gloo"}


def _clipping(recipe: Recipe) -> float:
    """Return the largest norm of gradients; accelerate would treat 0, for none, as 1."""
    norm: Any = recipe.trainer.get("max_grad_norm", 1.0)
    return float(norm) or 1e9


def load_whole_models(sharing: Sharing) -> None:
    """Let transformers load complete models again; under ZeRO-3 it splits each over the processes."""
    if sharing.engine == "DEEPSPEED":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]

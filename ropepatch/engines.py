"""Which inference engine reads an extended checkpoint, and how much of it.

Derived from the engines' sources, not from running them: transformers 4.57 and 5.23, vLLM, SGLang,
llama.cpp's converter and runtime, and mlx-lm as they stood in autumn 2026.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from ropepatch.rope import Rope


class EngineSupport(NamedTuple):
    """How one engine reads a checkpoint: all of it, partly, or not at all, and what to know."""

    engine: str
    reads: Literal["yes", "partly", "no"]
    note: str = ""


def engine_support(parameters: dict[str, Any], rope: Rope, target: int) -> list[EngineSupport]:
    """One line per engine for these `rope_parameters` (of the global layers, where layers differ)."""
    kind = parameters["rope_type"]
    return [
        EngineSupport("transformers 5.x", "yes", "not 5.4" if kind == "proportional" else ""),
        _transformers_4(kind),
        _vllm("vLLM", kind, parameters, target),
        _vllm("SGLang", kind, parameters, target),
        _llama_cpp(kind, parameters),
        _mlx_lm(kind, parameters, rope, target),
    ]


def _usual_temperature(parameters: dict[str, Any]) -> bool:
    usual = 0.1 * math.log(parameters["factor"]) + 1
    return math.isclose(parameters["attention_factor"], usual, rel_tol=1e-6)


def _transformers_4(kind: str) -> EngineSupport:
    if kind == "proportional":
        return EngineSupport("transformers 4.x", "no", "unknown rope type")
    return EngineSupport("transformers 4.x", "yes", "through rope_theta and rope_scaling")


def _vllm(engine: str, kind: str, parameters: dict[str, Any], target: int) -> EngineSupport:
    if kind == "proportional":
        return EngineSupport(engine, "no", "for Gemma 4 only")
    if kind == "dynamic":
        return EngineSupport(engine, "partly", "one static base for the whole engine")
    if kind == "linear":
        return EngineSupport(engine, "yes", f"multiplies the length again: pass a maximum length of {target}")
    if kind == "longrope":
        return EngineSupport(engine, "yes", "half-split layouts only; attention factor from short_mscale")
    if kind == "yarn" and engine == "SGLang" and not _usual_temperature(parameters):
        return EngineSupport(engine, "partly", "ignores attention_factor")
    if kind == "yarn" and not _usual_temperature(parameters):
        return EngineSupport(engine, "yes", "builds before attention_factor was read recompute 0.1 ln s + 1")
    return EngineSupport(engine, "yes")


def _llama_cpp(kind: str, parameters: dict[str, Any]) -> EngineSupport:
    if kind in ("longrope", "proportional", "dynamic"):
        return EngineSupport("llama.cpp", "no", f"its converter drops {kind} for LLaMA architectures")
    if kind == "yarn" and not (_usual_temperature(parameters) and parameters.get("truncate", True)):
        return EngineSupport("llama.cpp", "partly", "recomputes 0.1 ln s + 1 and truncates the ramp")
    return EngineSupport("llama.cpp", "yes")


def _mlx_lm(kind: str, parameters: dict[str, Any], rope: Rope, target: int) -> EngineSupport:
    if kind == "longrope":
        window = rope.original_max_position_embeddings
        derived = math.sqrt(1 + math.log(target / window) / math.log(window))
        if not math.isclose(derived, parameters["attention_factor"], rel_tol=1e-6):
            return EngineSupport("mlx-lm", "partly", f"derives its own attention factor, {derived:.4f}")
    if kind == "yarn" and not (_usual_temperature(parameters) and parameters.get("truncate", True)):
        return EngineSupport("mlx-lm", "partly", "ignores attention_factor and truncate")
    if kind == "dynamic":
        return EngineSupport("mlx-lm", "partly", "recomputed from the offset: cached keys go stale")
    return EngineSupport("mlx-lm", "yes", "through rope_theta and rope_scaling")

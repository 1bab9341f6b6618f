"""The commands that serve a plan with the unchanged checkpoint, if the engine allows it.

The options are from the sources of vLLM 0.32.0, SGLang 0.5.23, llama.cpp 0c1e57098 and mlx-lm 0.32.2, and
ollama's documentation; those of llama.cpp were probed with yarn, linear and ntk on tiny (b10434).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ropepatch.extension.engines import Engine
from ropepatch.extension.gguf import GgufPlan
from ropepatch.extension.planning import Plan
from ropepatch.model.architectures import gguf_architecture
from ropepatch.model.config import LEGACY_KEYS, differs_by_layer, head_dim_of, key_value_heads_of
from ropepatch.model.gguf import BETAS, GgufRope
from ropepatch.scaling.ramps import yarn_temperature
from ropepatch.settings import find_named

SWITCHED = ("default", "linear", "yarn")  # rope types for which llama.cpp has options
FOLDED = "the method changes query weights"
FILE = "FILE.gguf"  # of the unchanged checkpoint


@dataclass(frozen=True)
class Serving:
    """How to serve a plan with one engine.

    Args:
        engine: The engine's name.
        commands: The command lines, or the lines of a Modelfile; empty if the engine cannot serve the plan.
        why_not: Why the engine cannot serve it, or needs a written checkpoint; the commands then write one.
        note: A remark, or empty.
        cache: Bytes of the KV cache of one sequence of the target length, at 16 bits; None if unknown.
    """

    engine: str
    commands: tuple[str, ...]
    why_not: str | None = None
    note: str = ""
    cache: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**vars(self), "commands": [*self.commands]}

    def __str__(self) -> str:
        verdict = "needs a written checkpoint" if self.commands else "cannot serve this"
        about = [f"{self.engine} {verdict}: {self.why_not}"] if self.why_not else []
        about += [self.note] if self.note else []
        if self.cache is not None:
            about.append(
                f"KV cache of one sequence of the target length, at 16 bits: {self.cache / 2**20:,.0f} MiB"
            )
        return "\n".join([*(f"# {line}" for line in about), *self.commands])


def serving(plan: Plan | GgufPlan, engine: str) -> Serving:
    """Return how to serve a plan with vllm, sglang, llama.cpp, ollama or mlx-lm.

    Raises:
        RopepatchError: If the engine has another name.
    """
    backend = find_named(engine, ENGINES, "engine", {})
    cache = None if isinstance(plan, GgufPlan) else cache_bytes(plan.source.config, plan.target)
    if never := _never(plan, backend):
        return Serving(engine, (), never, cache=cache)
    if why := FOLDED if getattr(plan.method, "queries", None) else backend.why_not(plan):
        written = (line.format(target=plan.target) for line in backend.written)
        return Serving(engine, (_extend(plan, backend.gguf), *written), why, cache=cache)
    note = ""
    if isinstance(plan, Plan):
        row = _row(plan, backend)
        known = row.note if row.reads == "partly" else "not known whether it supports this RoPE here"
        note = f"{FILE} is the unchanged checkpoint" if backend.gguf else known * (row.reads != "yes")
    return Serving(engine, tuple(backend.direct(plan)), note=note, cache=cache)


def _never(plan: Plan | GgufPlan, backend: _Backend) -> str | None:
    """Return why an engine cannot serve a plan at all; None if it can."""
    if isinstance(plan, GgufPlan):
        return None if backend.gguf else "it cannot override the RoPE of a GGUF file"
    row = _row(plan, backend)
    if plan.remapping or (row.reads == "no" and not backend.gguf):
        return row.note
    if backend.gguf and gguf_architecture(plan.model_type) is None:
        return f"llama.cpp's support of {plan.model_type} is not known"
    if backend.gguf and plan.scaling.length_dependent:
        return "a GGUF file cannot contain frequencies that depend on the length"
    return None


def _row(plan: Plan, backend: _Backend) -> Engine:
    return next(row for row in plan.engines if row.engine == backend.row)


def cache_bytes(config: PreTrainedConfig, tokens: int) -> int | None:
    """Return the bytes of the KV cache of one sequence at 16 bits, or None if unknown.

    Sliding-window layers cache their window. Multi-head latent attention caches its latents. The state of
    linear attention has a fixed size and is not counted.
    """
    held, by_layer = 0, differs_by_layer(config)
    for index, layer in enumerate(DynamicCache(config=config).layers):
        of: Any = config.per_layer_config[index] if by_layer else config
        if rank := getattr(of, "kv_lora_rank", None):
            width = rank + of.qk_rope_head_dim
        else:
            width = 2 * key_value_heads_of(of) * head_dim_of(of)
        if not isinstance(width, int):
            return None
        grows = isinstance(layer, DynamicLayer)
        held += width * min(tokens, getattr(layer, "sliding_window", None) or tokens) if grows else 0
    return 2 * held


# The engines


@dataclass(frozen=True)
class _Backend:
    """How an engine is configured to use other RoPE parameters.

    Args:
        row: The engine's name in `Plan.engines`.
        written: The command lines for a written checkpoint.
        why_not: Why it needs a written checkpoint for a plan; None if options suffice.
        direct: The command lines with these options.
        gguf: Whether it runs GGUF files.
    """

    row: str
    written: tuple[str, ...]
    why_not: Callable[[Any], str | None] = lambda plan: None
    direct: Callable[[Any], Iterator[str]] = lambda plan: iter(())
    gguf: bool = False


def _vllm(plan: Plan) -> Iterator[str]:
    # vLLM also uses the tokenizer's length, which `model_max_length` overrides.
    keys = _keys(plan, model_max_length=plan.target)
    yield f"vllm serve {_named(plan)} \\"
    yield f"  --hf-overrides {shlex.quote(json.dumps(keys))} \\"
    yield f"  --max-model-len {plan.target}"


def _sglang(plan: Plan) -> Iterator[str]:
    yield f"python -m sglang.launch_server --model-path {_named(plan)} \\"
    yield f"  --json-model-override-args {shlex.quote(json.dumps(_keys(plan)))} \\"
    yield f"  --context-length {plan.target}"


def _keys(plan: Plan, **more: int) -> dict[str, Any]:
    """Return the changes of config.json, in its section for the language model."""
    keys = {key: value for key, value in plan.changes.items() if key not in LEGACY_KEYS} | more
    return {plan.source.section: keys} if plan.source.section else keys


def _named(plan: Plan) -> str:
    """Return the model as a command-line argument."""
    if plan.revision is None:
        return shlex.quote(str(plan.source.place or plan.model))
    return f"{shlex.quote(plan.model)} --revision {plan.revision}"


def _llama_cpp(plan: Plan | GgufPlan) -> Iterator[str]:
    if isinstance(plan, GgufPlan):
        yield _llama_server(shlex.quote(plan.model), plan.source.architecture, plan.target, plan.gguf_rope)
        return
    parameters = plan.rope_parameters
    kind, factor = parameters["rope_type"], parameters.get("factor", 1.0)
    kind = "none" if kind == "default" else kind
    original = parameters.get("original_max_position_embeddings", 0)
    own = plan.frequencies().attention_factor / (yarn_temperature(factor) if kind == "yarn" else 1.0)
    rope = GgufRope(parameters["rope_theta"], kind, factor, original, own)
    betas = (parameters["beta_fast"], parameters["beta_slow"]) if kind == "yarn" else BETAS
    yield _llama_server(FILE, str(gguf_architecture(plan.model_type)), plan.target, rope, betas)


def _llama_server(
    file: str, architecture: str, target: int, rope: GgufRope, betas: tuple[float, float] = BETAS
) -> str:
    """Return the command that serves a file with another RoPE, without a table of divisors."""
    # Builds before 2026-08-30 (llama.cpp#28030) serve no more than the file's length.
    words = [f"llama-server -m {file} -c {target} --override-kv {architecture}.context_length=int:{target}"]
    words.append(f"--rope-freq-base {rope.base:.10g} --rope-scaling {rope.kind}")
    if rope.kind != "none":
        words.append(f"--rope-scale {rope.factor:.10g}")
    if rope.kind == "yarn":
        words.append(f"--yarn-orig-ctx {rope.original}")
    if betas != BETAS:
        words.append("--yarn-beta-fast {:g} --yarn-beta-slow {:g}".format(*betas))
    if not math.isclose(rope.attn_factor, 1, rel_tol=1e-6):
        words.append(f"--override-kv {architecture}.rope.scaling.attn_factor=float:{rope.attn_factor:.8g}")
    return " ".join(words)


def _without_switch(plan: Plan | GgufPlan) -> str | None:
    """Return why llama.cpp has no options for a RoPE; None if it has."""
    if isinstance(plan, GgufPlan):
        return "it has no option for a table of frequencies" if plan.tensors else None
    parameters, kind = plan.rope_parameters, plan.rope_parameters["rope_type"]
    before = plan.site.of(plan.before["rope_parameters"]).get("rope_type", "default")
    if plan.site.layer_type:
        return f"its options apply to all layers, not only to the {plan.site.layer_type} ones"
    if before not in SWITCHED:
        return f"its options would scale on top of the file's {before} scaling"
    if kind not in SWITCHED:
        return f"it has no option for {kind}"
    return "it truncates the ramp" if kind == "yarn" and not parameters.get("truncate", True) else None


def _extend(plan: Plan | GgufPlan, gguf: bool) -> str:
    """Return the command that writes the plan, as a GGUF file or a checkpoint."""
    source = FILE if gguf and isinstance(plan, Plan) else plan.model
    given = {key: plan.method.parameters().get(key) for key in sorted(plan.method.model_fields_set)}
    settings = [f"--set={key}={_text(value)}" for key, value in given.items() if value is not None]
    to = ["--to", f"{plan.target}", "--method", plan.method.name]
    return shlex.join(["ropepatch", "extend", source, *to, *settings, "--out", "NEW.gguf" if gguf else "DIR"])


def _text(value: Any) -> str:
    """Return a parameter as `--set` expects it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"


ENGINES = {
    "vllm": _Backend("vLLM", ("vllm serve DIR --max-model-len {target}",), direct=_vllm),
    "sglang": _Backend(
        "SGLang",
        ("python -m sglang.launch_server --model-path DIR --context-length {target}",),
        direct=_sglang,
    ),
    "llama.cpp": _Backend(
        "llama.cpp",
        ("llama-server -m NEW.gguf -c {target}",),
        _without_switch,
        _llama_cpp,
        gguf=True,
    ),
    "ollama": _Backend(
        "llama.cpp",
        ("# Modelfile, for `ollama create NAME`:", "FROM ./NEW.gguf", "PARAMETER num_ctx {target}"),
        lambda plan: "a Modelfile has no RoPE parameters",
        gguf=True,
    ),
    "mlx-lm": _Backend(
        "mlx-lm", ("mlx_lm.server --model DIR",), lambda plan: "mlx_lm.server has no RoPE option"
    ),
}

"""The commands that serve a plan with the unchanged checkpoint, if the engine allows it.

The options are from the sources of the engines; see `VERSIONS` of `ropepatch.extension.engines`. Those of
llama.cpp were probed with yarn, linear and ntk on tiny.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ropepatch.extension.changes import Planned
from ropepatch.extension.engines import SWITCHES, support_of
from ropepatch.model.architectures import GGUF_GLOBAL, GGUF_YARN_KEYS
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import (
    DUAL_CHUNK,
    LEGACY_KEYS,
    dual_chunk_original,
    generates,
)
from ropepatch.model.cost import cache_bytes
from ropepatch.model.gguf import GgufModel, GgufRope
from ropepatch.scaling import Scaling
from ropepatch.scaling.ramps import BETAS
from ropepatch.settings import refuse_unknown

# vllm#58080: the acceptance of a draft without the scaling falls to 0 beyond the original length
DRAFT = "for speculative decoding serve written checkpoints: these options do not reach a draft model"


@dataclass(frozen=True)
class Serving:
    """How to serve a plan with one engine.

    Args:
        engine: The engine's name.
        commands: The command lines, or the lines of a Modelfile; empty if the engine cannot serve the plan.
        why_not: Why the engine cannot serve it, or needs a written file; the commands then write one.
        note: A remark, or empty.
        cache: Bytes of the KV cache of one sequence of the target length, at 16 bits; None if unknown.
    """

    engine: str
    commands: tuple[str, ...]
    why_not: str | None = None
    note: str = ""
    cache: int | None = None

    def __str__(self) -> str:
        verdict = "needs a written file" if self.commands else "cannot serve this"
        about = [f"{self.engine} {verdict}: {self.why_not}"] if self.why_not else []
        if self.cache is not None:
            about.append(
                f"KV cache of one sequence of the target length, at 16 bits: {self.cache / 2**20:,.0f} MiB"
            )
        if self.note:
            about.append(self.note)
        return "\n".join([*(f"# {line}" for line in about), *self.commands])


def serving(plan: Planned, engine: str) -> Serving:
    """Return how to serve a plan with vllm, sglang, llama.cpp, ollama or mlx-lm.

    Raises:
        RopepatchError: If the engine has another name.
    """
    refuse_unknown([engine], ENGINES, "engine")
    if isinstance(plan.source, GgufModel):
        if engine not in GGUF_ENGINES:
            return Serving(engine, (), "it cannot override the RoPE of a GGUF file")
        return GGUF_ENGINES[engine](plan, plan.source)
    serve = _of_converted if engine in GGUF_ENGINES else _of_config
    served = serve(plan, engine)
    if not generates(plan.config.whole):
        return served
    return replace(served, cache=cache_bytes(plan.config.text, plan.target))


# The engines that read config.json: the command that serves a folder, and its option for other keys
SERVERS = {
    "vllm": ("vllm serve", "--hf-overrides"),
    "sglang": (
        "python -m sglang.launch_server --model-path",
        "--json-model-override-args",
    ),
    "mlx-lm": ("mlx_lm.server --model", None),
}


def _of_config(plan: Planned, engine: str) -> Serving:
    """Return how an engine serves a plan: with options, else a written checkpoint."""
    support = next(one for one in support_of(plan) if one.engine.lower() == engine)
    if support.reads == "no":
        return Serving(engine, (), support.note)
    note = support.note if support.reads == "partly" else ""
    if support.reads == "not known":
        note = "not known whether it supports this RoPE here"
    command = ropepatch_command("extend", plan, plan.source.name)
    if (other := plan.config.stand_in) and other.is_draft:
        return Serving(engine, (f"{command} --out DIR",), "no option reaches a draft")
    serve, option = SERVERS[engine]
    written, why = f"{serve} DIR", "it has no RoPE option"
    if option:
        length = f"{SWITCHES[support.engine]} {plan.target}"
        scales = plan.method.changes_frequencies
        if not (scales and dual_chunk_original(plan.config.text)):
            direct = (
                f"{serve} {_named(plan)} \\",
                f"  {option} {_keys(plan, engine)} \\",
                f"  {length}",
            )
            return Serving(engine, direct, note=f"{note}; {DRAFT}" if note else DRAFT)
        written = f"{written} {length}"
        why = f"{DUAL_CHUNK} of the unchanged one would replace the scaling"
    return Serving(engine, (f"{command} --out DIR", written), why, note)


def _keys(plan: Planned, engine: str) -> str:
    """Return the changes of config.json, in its section for the language model, as an argument."""
    keys = {
        key: value for key, value in plan.change.keys.items() if key not in LEGACY_KEYS
    }
    if engine == "vllm":  # it also uses the tokenizer's length, which this overrides
        keys["model_max_length"] = plan.target
    section = plan.config.section
    return shlex.quote(json.dumps({section: keys} if section else keys))


def _named(plan: Planned) -> str:
    """Return the model as a command-line argument."""
    source = plan.source
    if isinstance(source, Checkpoint) and source.revision is None:
        return shlex.quote(str(source.folder))
    revision = f" --revision {source.revision}" if source.revision else ""
    return f"{shlex.quote(source.name)}{revision}"


# llama.cpp, and what is built on it


def _of_converted(plan: Planned, engine: str) -> Serving:
    """Return the command that plans the GGUF file of a checkpoint."""
    if not isinstance(plan.method, Scaling) or plan.length_dependent:
        why = f"a GGUF file cannot contain this {plan.method.name}"
        return Serving(engine, (), why)
    command = ropepatch_command("plan", plan, "FILE.gguf")
    note = "FILE.gguf is the unchanged checkpoint, converted"
    return Serving(engine, (f"{command} --for {engine}",), note=note)


def _llama_cpp(plan: Planned, model: GgufModel) -> Serving:
    rope = model.find_equivalent(plan.method, by_options=True)
    if model.sliding_window and model.architecture not in GGUF_GLOBAL:
        why = "its options do not change sliding-window layers"
    elif rope is not None and _has_options(model, rope):
        return Serving("llama.cpp", (_llama_server(model, plan.target, rope),))
    else:
        why = f"its options do not contain this {plan.method.name}"
    command = ropepatch_command("extend", plan, model.name)
    run = f"llama-server -m NEW.gguf -c {plan.target}"
    return Serving("llama.cpp", (f"{command} --out NEW.gguf", run), why)


def _has_options(model: GgufModel, rope: GgufRope) -> bool:
    """Return whether llama-server's options change a file's RoPE to this one."""
    if rope.kind == "longrope" or model.architecture in GGUF_YARN_KEYS:
        return False
    return rope.divisors == model.gguf_rope.divisors


def _ollama(plan: Planned, model: GgufModel) -> Serving:
    commands = (
        f"{ropepatch_command('extend', plan, model.name)} --out NEW.gguf",
        "# Modelfile, for `ollama create NAME`:",
        "FROM ./NEW.gguf",
        f"PARAMETER num_ctx {plan.target}",
    )
    return Serving("ollama", commands, "a Modelfile has no RoPE parameters")


def _llama_server(model: GgufModel, target: int, rope: GgufRope) -> str:
    """Return the command that serves a file with another RoPE, without a table of divisors."""
    # Builds before 2026-08-30 (llama.cpp#28030) serve no more than the file's length.
    override = f"--override-kv {model.architecture}"
    words = [
        f"llama-server -m {shlex.quote(model.name)} -c {target}",
        f"{override}.context_length=int:{target}",
        f"--rope-freq-base {rope.base:.10g} --rope-scaling {rope.kind}",
    ]
    if rope.kind != "none":
        words.append(f"--rope-scale {rope.factor:.10g}")
    if rope.kind == "yarn":
        words.append(f"--yarn-orig-ctx {rope.original}")
    if rope.betas != BETAS:
        words.append("--yarn-beta-fast {:g} --yarn-beta-slow {:g}".format(*rope.betas))
    if not math.isclose(rope.attn_factor, model.gguf_rope.attn_factor, rel_tol=1e-6):
        words.append(
            f"{override}.rope.scaling.attn_factor=float:{rope.attn_factor:.8g}"
        )
    return " ".join(words)


# Commands of ropepatch


def ropepatch_command(verb: str, plan: Planned, model: str) -> str:
    """Return the command that makes the same plan, of a checkpoint or of its GGUF file."""
    method, config = plan.method, plan.source.config
    words = ["ropepatch", verb, model, "--to", f"{plan.target}"]
    words += ["--method", method.name]
    for key in sorted(method.model_fields_set - {"factor"}):
        value = getattr(method, key)
        words += [f"--set={key}={_text(value)}"] if value is not None else []
    if plan.factor != plan.target / config.window:
        words.append(f"--set=factor={plan.factor}")
    if config.original_window:
        words += ["--original", f"{config.original_window}"]
    if plan.source.revision:
        words += ["--revision", plan.source.revision]
    return shlex.join(words)


def _text(value: Any) -> str:
    """Return a parameter as `--set` expects it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"


GGUF_ENGINES: dict[str, Callable[[Planned, GgufModel], Serving]] = {
    "llama.cpp": _llama_cpp,
    "ollama": _ollama,
}
ENGINES = *SERVERS, *GGUF_ENGINES

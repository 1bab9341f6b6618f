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
from ropepatch.extension.engines import converted, support_of
from ropepatch.model.architectures import GGUF_GLOBAL, gguf_architecture
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import DUAL_CHUNK, LEGACY_KEYS, Config, dual_chunk_original
from ropepatch.model.cost import cache_bytes
from ropepatch.model.gguf import GgufModel, GgufRope
from ropepatch.scaling import Scaling
from ropepatch.scaling.ramps import BETAS
from ropepatch.settings import refuse_unknown

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


def serving(plan: Planned, engine: str) -> Serving:
    """Return how to serve a plan with vllm, sglang, llama.cpp, ollama or mlx-lm.

    Raises:
        RopepatchError: If the engine has another name.
    """
    refuse_unknown([engine], ENGINES, "engine")
    serve = ENGINES[engine]
    if not isinstance(plan.source, GgufModel):
        return replace(
            serve(plan), cache=cache_bytes(plan.source.config.text, plan.target)
        )
    if engine not in GGUF_ENGINES:
        return Serving(engine, (), "it cannot override the RoPE of a GGUF file")
    return serve(plan)


# The engines that read config.json


def _vllm(plan: Planned) -> Serving:
    # vLLM also uses the tokenizer's length, which `model_max_length` overrides.
    keys = _keys(plan, model_max_length=plan.target)
    direct = (
        f"vllm serve {_named(plan)} \\",
        f"  --hf-overrides {shlex.quote(json.dumps(keys))} \\",
        f"  --max-model-len {plan.target}",
    )
    return _of_config(
        "vllm", "vLLM", plan, direct, f"vllm serve DIR --max-model-len {plan.target}"
    )


def _sglang(plan: Planned) -> Serving:
    serve = "python -m sglang.launch_server --model-path"
    direct = (
        f"{serve} {_named(plan)} \\",
        f"  --json-model-override-args {shlex.quote(json.dumps(_keys(plan)))} \\",
        f"  --context-length {plan.target}",
    )
    return _of_config(
        "sglang", "SGLang", plan, direct, f"{serve} DIR --context-length {plan.target}"
    )


def _mlx_lm(plan: Planned) -> Serving:
    return _of_config("mlx-lm", "mlx-lm", plan, (), "mlx_lm.server --model DIR")


def _of_config(
    name: str, row: str, plan: Planned, direct: tuple[str, ...], written: str
) -> Serving:
    """Return how an engine serves a plan: with options, else a written checkpoint.

    Args:
        name: The engine's name here.
        row: Its name in `Plan.engines`.
        plan: The plan.
        direct: The command lines with options; empty if it has no RoPE options.
        written: The command line for a written checkpoint.
    """
    support = next(line for line in support_of(plan.method, plan) if line.engine == row)
    if support.reads == "no":
        return Serving(name, (), support.note)
    note = support.note if support.reads == "partly" else ""
    if support.reads == "not known":
        note = "not known whether it supports this RoPE here"
    why = "it has no RoPE option"
    if (
        direct
        and plan.method.changes_frequencies
        and dual_chunk_original(plan.config.text)
    ):
        why = f"{DUAL_CHUNK} of the unchanged one would replace the scaling"
    elif direct:
        return Serving(name, direct, note=note)
    commands = (
        extend_command(plan, plan.source.name, plan.source.config, "DIR"),
        written,
    )
    return Serving(name, commands, why, note)


def _keys(plan: Planned, **more: int) -> dict[str, Any]:
    """Return the changes of config.json, in its section for the language model."""
    keys = {
        key: value for key, value in plan.change.keys.items() if key not in LEGACY_KEYS
    } | more
    return {plan.config.section: keys} if plan.config.section else keys


def _named(plan: Planned) -> str:
    """Return the model as a command-line argument."""
    source = plan.source
    if isinstance(source, Checkpoint) and source.revision is None:
        return shlex.quote(str(source.folder))
    revision = f" --revision {source.revision}" if source.revision else ""
    return f"{shlex.quote(source.name)}{revision}"


# llama.cpp, and what is built on it


def _llama_cpp(plan: Planned) -> Serving:
    model = _gguf_model(plan)
    if isinstance(model, str):
        return Serving("llama.cpp", (), model)
    file = shlex.quote(plan.source.name) if model is plan.source else FILE
    note = "" if model is plan.source else f"{FILE} is the unchanged checkpoint"
    rope = model.find_equivalent(plan.method, by_options=True)
    applies = model.architecture in GGUF_GLOBAL or not model.sliding_window
    if applies and rope is not None and rope.divisors == model.gguf_rope.divisors:
        return Serving(
            "llama.cpp", (_llama_server(file, model, plan.target, rope),), note=note
        )
    run = f"llama-server -m NEW.gguf -c {plan.target}"
    why = f"its options do not contain this {plan.method.name}"
    if not applies:
        why = "its options do not change sliding-window layers"
    return _of_gguf("llama.cpp", plan, model, why, note, run)


def _ollama(plan: Planned) -> Serving:
    model = _gguf_model(plan)
    if isinstance(model, str):
        return Serving("ollama", (), model)
    modelfile = (
        "# Modelfile, for `ollama create NAME`:",
        "FROM ./NEW.gguf",
        f"PARAMETER num_ctx {plan.target}",
    )
    note = "" if model is plan.source else f"{FILE} is the unchanged checkpoint"
    return _of_gguf(
        "ollama", plan, model, "a Modelfile has no RoPE parameters", note, *modelfile
    )


def _gguf_model(plan: Planned) -> GgufModel | str:
    """Return the model of the GGUF file that is served, or why llama.cpp cannot serve the plan."""
    if isinstance(plan.source, GgufModel):
        return plan.source
    if not isinstance(plan.method, Scaling):
        return "has no such attention"
    if plan.length_dependent:
        return "a GGUF file cannot contain frequencies that depend on the length"
    if gguf_architecture(plan.config.model_type) is None:
        return f"llama.cpp's support of {plan.config.model_type} is not known"
    return (
        converted(plan.source.name, plan.source.config)
        or "its converter does not write the RoPE that the model has"
    )


def _of_gguf(
    name: str, plan: Planned, model: GgufModel, why: str, note: str, *run: str
) -> Serving:
    """Return the commands that write and run a GGUF file, if one can contain the plan."""
    if model.find_equivalent(plan.method) is None:
        return Serving(
            name,
            (),
            f"llama.cpp's {model.architecture} does not support this {plan.method.name}",
        )
    file = plan.source.name if model is plan.source else FILE
    return Serving(
        name, (extend_command(plan, file, model, "NEW.gguf"), *run), why, note
    )


def _llama_server(file: str, model: GgufModel, target: int, rope: GgufRope) -> str:
    """Return the command that serves a file with another RoPE, without a table of divisors."""
    # Builds before 2026-08-30 (llama.cpp#28030) serve no more than the file's length.
    override = f"--override-kv {model.architecture}"
    words = [
        f"llama-server -m {file} -c {target} {override}.context_length=int:{target}"
    ]
    words.append(f"--rope-freq-base {rope.base:.10g} --rope-scaling {rope.kind}")
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


# Writing the plan


def extend_command(
    plan: Planned, model: str, config: Config | GgufModel, out: str
) -> str:
    """Return the command that writes a plan.

    Args:
        plan: The plan.
        model: The checkpoint or the GGUF file that the command names.
        config: Its RoPE.
        out: The folder or file to write.
    """
    words = [
        "ropepatch",
        "extend",
        model,
        "--to",
        f"{plan.target}",
        "--method",
        plan.method.name,
    ]
    for key in sorted(plan.method.model_fields_set - {"factor"}):
        value = getattr(plan.method, key)
        words += [f"--set={key}={_text(value)}"] if value is not None else []
    if plan.factor != plan.target / config.window:
        words.append(f"--set=factor={plan.factor}")
    if plan.source.config.original_window:
        words += ["--original", f"{plan.source.config.original_window}"]
    if plan.scales_only_local:
        words += ["--layers", "sliding"]
    if plan.source.revision:
        words += ["--revision", plan.source.revision]
    return shlex.join([*words, "--out", out])


def _text(value: Any) -> str:
    """Return a parameter as `--set` expects it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"


GGUF_ENGINES: dict[str, Callable[[Any], Serving]] = {
    "llama.cpp": _llama_cpp,
    "ollama": _ollama,
}
ENGINES: dict[str, Callable[[Any], Serving]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    **GGUF_ENGINES,
    "mlx-lm": _mlx_lm,
}

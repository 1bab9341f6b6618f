"""Which inference engines support an extended checkpoint, and how completely: one table of rules.

A rule holds for a rope type in LLaMA's architecture, by the engine's source (for llama.cpp, by its converter
and runtime). `ropepatch.model.architectures` lists the other architectures that behave the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from ropepatch.attention import Remapping
from ropepatch.extension.changes import Planned
from ropepatch.model.architectures import (
    ABSENT,
    GGUF_DROPPED,
    GGUF_FREQS,
    GGUF_OTHERWISE,
    NOT_KNOWN,
    Found,
    found,
    gguf_architecture,
)
from ropepatch.model.checkpoint import Part, Text
from ropepatch.model.config import ORIGINAL, QUERY_TEMPERATURE, switches
from ropepatch.model.gguf import FREQS, LLAMA_CPP, GgufModel
from ropepatch.scaling.ramps import BETAS, shared_temperature, yarn_temperature
from ropepatch.scaling.rope import Rope
from ropepatch.scaling.searched import longrope_attention_factor

Reads = Literal["yes", "partly", "no", "not known"]
How = Literal["run", "probed", "read"] | None
VERSIONS = {  # of the sources
    "transformers 5.x": "5.24.0",
    "transformers 4.x": "4.57.6",
    "vLLM": "0.33.0",
    "SGLang": "0.5.23",
    "llama.cpp": LLAMA_CPP,
    "mlx-lm": "0.32.2",
}
# Engines without a list of architectures, with the evidence
BY_ROPE_TYPE: dict[str, How] = {"transformers 5.x": "run", "llama.cpp": "read"}
# Engines whose server was probed, with a model of that architecture
PROBED = {"vLLM": "llama"}
WHY_NOT = {
    ABSENT: "does not support {}",
    "unscaled": "silently ignores the scaling in {}",
    "refused": "rejects this rope_type in {}",
    "another rope": "computes other frequencies in {}",
}
# Options for the target length
SWITCHES = {
    "vLLM": "--max-model-len",
    "SGLang": "--context-length",
}

# Model cards print it in a command
Switch = Annotated[Text, StringConstraints(pattern=r"^--[a-z-]+ \d+$")]


class Engine(Part):
    """One inference engine's support of a checkpoint.

    Args:
        engine: The engine's name.
        reads: Whether it supports the RoPE: `yes`, `partly`, `no` or `not known`.
        how: The evidence: `run` (small random models of the architecture were run in it), `probed` (its
            server was probed) or `read` (from its source code); None if there is none.
        note: A remark.
        switches: Command-line options that it needs to serve the target length.
    """

    engine: Text
    reads: Reads
    how: How
    note: Text
    switches: list[Switch]

    @classmethod
    def of(
        cls, engine: str, reads: Reads, how: How, note: str = "", *switches: str
    ) -> Engine:
        """Make the row of an engine."""
        return cls(engine=engine, reads=reads, how=how, note=note, switches=[*switches])


@dataclass(frozen=True)
class WrittenRope:
    """The RoPE in config.json.

    Args:
        parameters: The `rope_parameters`; those of the global layers if layers differ.
        rope: The RoPE before the extension.
        target: The target length, in tokens.
        architecture: The architecture as llama.cpp names it; None if its graph was not examined.
    """

    parameters: dict[str, Any]
    rope: Rope
    target: int
    architecture: str | None

    @property
    def kind(self) -> str:
        """The rope type."""
        return str(self.parameters["rope_type"])

    @property
    def factor(self) -> float:
        """The scaling factor."""
        return float(self.parameters.get("factor", 1.0))

    @property
    def window(self) -> int:
        """The original length that an engine uses, in tokens."""
        stated = self.parameters.get(ORIGINAL)
        return int(stated or self.rope.original_max_position_embeddings)

    @property
    def reach(self) -> int:
        """The original length times the factor, in tokens."""
        return math.ceil(self.window * self.factor)

    @property
    def by_yarn(self) -> float:
        """The attention factor by YaRN's formula."""
        if of_softmax := self.parameters.get("mscale_all_dim"):  # DeepSeek's family
            return shared_temperature(
                self.factor, self.parameters.get("mscale", 1.0), of_softmax
            )
        return yarn_temperature(self.factor)

    @property
    def attention_factor(self) -> float:
        """The attention factor."""
        stated = self.parameters.get("attention_factor")
        if stated is not None:
            return float(stated)
        return self.by_yarn if self.kind == "yarn" else 1.0

    def has(self, attention_factor: float) -> bool:
        """Return whether it has this attention factor."""
        return math.isclose(attention_factor, self.attention_factor, rel_tol=1e-6)


# What an engine does with a RoPE: whether it supports it, and a remark
Row = tuple[Reads, str]
STALE: Row = "partly", "frequencies change as the sequence grows: cached keys go stale"
TRUNCATED: Row = "partly", "truncates the ramp"
OLDER_KEYS: Row = "yes", "through rope_theta and rope_scaling"
HALVES: Row = "yes", "only for Llama-style (half-split) RoPE"


def _transformers_5(rope: WrittenRope, switch: str) -> Iterator[Row]:
    if rope.kind == "dynamic" or switches(rope.parameters):
        yield STALE


def _transformers_4(rope: WrittenRope, switch: str) -> Iterator[Row]:
    yield from _transformers_5(rope, switch)
    yield OLDER_KEYS


def _vllm(rope: WrittenRope, switch: str) -> Iterator[Row]:
    if rope.kind == "dynamic":
        garbage = ", and produces garbage beyond them" if rope.factor > 1 else ""
        yield "no", f"does not scale, has a table of {rope.window} tokens{garbage}"
    if rope.kind == "linear" and rope.factor > 1:
        yield "yes", f"multiplies the length again: pass {switch}"
    if rope.kind == "longrope":
        if switches(rope.parameters):
            yield (
                "partly",
                f"uses one list at every length: short_factor up to {rope.window} tokens, else long_factor",
            )
        if rope.window < rope.target:
            yield "yes", f"serves {rope.window} tokens without {switch}"
        yield HALVES
    if rope.kind == "yarn":
        if rope.reach < rope.target:
            yield "partly", f"its table ends at {rope.reach} tokens"
        if not rope.has(rope.by_yarn):
            yield (
                "yes",
                f"builds that ignore attention_factor use {rope.by_yarn:.4f}",
            )
    if rope.parameters.get(QUERY_TEMPERATURE):
        yield (
            "partly",
            "scales queries with the position only with Mistral's params.json",
        )


def _sglang(rope: WrittenRope, switch: str) -> Iterator[Row]:
    if rope.kind == "dynamic":
        if rope.factor == 1:
            yield "no", f"does not scale, serves {rope.window} tokens"
        yield "partly", "uses one base at every length"
        if rope.reach < rope.target:
            yield "partly", f"serves {rope.reach} tokens"
    if rope.kind == "linear" and rope.factor > 1:
        yield "yes", f"multiplies the length again: pass {switch}"
    if rope.kind == "longrope":
        if switches(rope.parameters):
            yield STALE
        if rope.window < rope.target:
            yield (
                "partly",
                f"rotates position {rope.window} as position 0 while it is the last",
            )
        yield HALVES
    if rope.kind == "yarn" and rope.factor == 1 and not rope.has(1):
        yield "partly", "uses 1.0000 as attention factor"


def _llama_cpp(rope: WrittenRope, switch: str) -> Iterator[Row]:
    parameters, dropped = rope.parameters, rope.architecture in GGUF_DROPPED
    if dropped and rope.kind != "default":
        yield "no", "its converter drops the scaling"
    if dropped or rope.architecture in {None, *GGUF_OTHERWISE}:
        yield "not known", ""
    if rope.kind == "dynamic":
        yield (
            "no",
            f"its converter drops the scaling, the context is {rope.window} tokens",
        )
    if rope.kind == "longrope":
        yield (
            "no",
            "its converter drops the factors: `ropepatch extend FILE.gguf` on a converted file may keep them",
        )
    if rope.kind == "llama3" and rope.architecture not in GGUF_FREQS:
        yield "no", f"its {rope.architecture} reads no {FREQS}: it runs unscaled"
    if rope.kind == "proportional":
        yield "not known", ""
    if rope.kind == "yarn":
        if not rope.has(rope.by_yarn):
            yield "partly", f"uses {rope.by_yarn:.4f} as attention factor"
        fast, slow = BETAS
        betas = parameters.get("beta_fast", fast), parameters.get("beta_slow", slow)
        if betas != BETAS:
            yield "partly", f"uses {fast:g} and {slow:g} as beta_fast and beta_slow"
        if not parameters.get("truncate", True):
            yield TRUNCATED


def _mlx_lm(rope: WrittenRope, switch: str) -> Iterator[Row]:
    if rope.kind == "dynamic":
        yield STALE
    if switches(rope.parameters):
        yield "partly", "uses long_factor at every length"
    a = rope.attention_factor
    if rope.kind == "longrope":
        a = longrope_attention_factor(rope.target / rope.window, rope.window)
    if rope.kind == "yarn" and rope.factor == 1:
        a = 1.0
    if not rope.has(a):
        yield (
            "partly",
            f"uses {a:.4f} as attention factor; `ropepatch export --fold-attention` may help",
        )
    if rope.kind == "yarn" and not rope.parameters.get("truncate", True):
        yield TRUNCATED
    yield OLDER_KEYS


# The rows that an engine yields hold together, but the first `no` or `not known` holds alone; without one it
# is `yes`.
RULES: dict[str, Callable[[WrittenRope, str], Iterator[Row]]] = {
    "transformers 5.x": _transformers_5,
    "transformers 4.x": _transformers_4,
    "vLLM": _vllm,
    "SGLang": _sglang,
    "llama.cpp": _llama_cpp,
    "mlx-lm": _mlx_lm,
}


def support(engine: str, rope: WrittenRope, how: How) -> Engine:
    """Return the support of a RoPE in an architecture that an engine treats like LLaMA."""
    switch = f"{SWITCHES.get(engine)} {rope.target}"
    rows = list(RULES[engine](rope, switch))
    rows = [row for row in rows if row[0] in ("no", "not known")][:1] or rows
    reads: Reads = next((reads for reads, _ in rows if reads != "yes"), "yes")
    note = "; ".join(note for _, note in rows)
    needed = [switch] if switch in note else []
    return Engine.of(
        engine, reads, None if reads == "not known" else how, note, *needed
    )


def engine_support(
    parameters: dict[str, Any],
    rope: Rope,
    target: int,
    model_type: str = "llama",
    whole: str | None = None,
) -> list[Engine]:
    """Return one row per engine of `VERSIONS`.

    "yes" means that the frequencies, the attention factor and the whole target length are supported, possibly
    with the option in the note.

    Args:
        parameters: The `rope_parameters` to be written; those of the global layers if layers differ.
        rope: The RoPE before the extension.
        target: The target length, in tokens.
        model_type: The architecture of the language model, as transformers names it.
        whole: The architecture of the whole model, if the language model is a part of it.
    """
    written = WrittenRope(parameters, rope, target, gguf_architecture(model_type))
    whole, kind = whole or model_type, written.kind
    others = VERSIONS.keys() - BY_ROPE_TYPE.keys()
    tried = {name: found(name, whole, model_type, kind) for name in others}
    return [
        support(engine, written, BY_ROPE_TYPE[engine])
        if engine in BY_ROPE_TYPE
        else _by_architecture(engine, written, whole, model_type, tried[engine])
        for engine in VERSIONS
    ]


def _by_architecture(
    engine: str, rope: WrittenRope, whole: str, model_type: str, tried: Found
) -> Engine:
    """Return the support of an engine that may not treat an architecture like LLaMA."""
    how, verdict = tried
    if verdict == "right":
        row = support(engine, rope, how)
        probed = row.reads == "yes" and PROBED.get(engine) == model_type
        return row.model_copy(update={"how": "probed"}) if probed else row
    if verdict == ABSENT and engine in ("vLLM", "SGLang"):
        note = f"has no {whole} of its own, but may run transformers' code"
        return Engine.of(engine, "not known", how, note)
    if verdict == NOT_KNOWN:
        return Engine.of(engine, "not known", how)
    return Engine.of(engine, "no", how, WHY_NOT[verdict].format(whole))


def support_of(plan: Planned) -> list[Engine]:
    """Return the engines' support of a plan."""
    if isinstance(plan.source, GgufModel):
        return [Engine.of("llama.cpp", "yes", "read", "and programs built on it")]
    if isinstance(plan.method, Remapping):
        note = "has no such attention"
        rows = [Engine.of(engine, "no", "read", note) for engine in VERSIONS]
        code = "with trust_remote_code=True, for the code in its folder"
        rows[0] = Engine.of("transformers 5.x", "yes", "run", code)
        return rows
    config = plan.source.config
    if config.unloaded:
        return [Engine.of(engine, "not known", None) for engine in VERSIONS]
    return engine_support(
        plan.rope_parameters or {"rope_type": "default"},  # without RoPE
        config.rope,
        plan.target,
        config.model_type,
        str(config.whole.model_type),
    )

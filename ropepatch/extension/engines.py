"""Which inference engines support an extended checkpoint, and how completely: one table of rules.

A rule holds for a rope type in LLaMA's architecture, by the engine's source (for llama.cpp, by its converter
and runtime). `ropepatch.model.architectures` lists the other architectures that behave the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import StringConstraints

from ropepatch.attention import Remapping
from ropepatch.extension.changes import Planned
from ropepatch.extension.queries import folds_attention
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
from ropepatch.model.config import ORIGINAL, QUERY_TEMPERATURE, Config, switches
from ropepatch.model.gguf import FREQS, LLAMA_CPP, GgufModel, GgufRope
from ropepatch.scaling import Scaling
from ropepatch.scaling.ramps import BETAS, shared_temperature, yarn_temperature
from ropepatch.scaling.rope import Method, Rope, divisors
from ropepatch.scaling.searched import longrope_attention_factor

VERSIONS = {  # of the sources
    "transformers 5.x": "5.23.0",
    "transformers 4.x": "4.57.6",
    "vLLM": "0.33.0",
    "SGLang": "0.5.23",
    "llama.cpp": LLAMA_CPP,
    "mlx-lm": "0.32.2",
}
# Whose support depends on the architecture by their own rules or not at all
BY_ROPE_TYPE = {"transformers 5.x", "llama.cpp"}
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

Reads = Literal["yes", "partly", "no", "not known"]
How = Literal["run", "probed", "read"] | None
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
        folds: Whether the attention factor can be folded into the query weights.
    """

    parameters: dict[str, Any]
    rope: Rope
    target: int
    architecture: str | None
    folds: Callable[[], bool] = lambda: True

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
        if isinstance(stated, int | float):
            return int(stated)
        return self.rope.original_max_position_embeddings

    @property
    def reach(self) -> int:
        """The original length times the factor, in tokens."""
        return math.ceil(self.window * self.factor)

    @property
    def garbage(self) -> str:
        """What vLLM does beyond the table of a `dynamic` RoPE."""
        return ", and produces garbage beyond them" if self.factor > 1 else ""

    def switches(self) -> bool:
        """Return whether short and long factors differ."""
        return switches(self.parameters)

    def is_extended(self) -> bool:
        """Return whether the factor is above 1."""
        return self.factor > 1

    def starts_early(self) -> bool:
        """Return whether the original length is below the target."""
        return self.window < self.target

    def ends_early(self) -> bool:
        """Return whether the original length times the factor is below the target."""
        return self.reach < self.target

    def is_open(self) -> bool:
        """Return whether YaRN's ramp begins and ends between pairs."""
        return not self.parameters.get("truncate", True)

    @cached_property
    def by_yarn(self) -> float:
        """The attention factor by YaRN's formula."""
        if of_softmax := self.parameters.get("mscale_all_dim"):  # DeepSeek's family
            return shared_temperature(
                self.factor, self.parameters.get("mscale", 1.0), of_softmax
            )
        return yarn_temperature(self.factor)

    @property
    def by_mlx(self) -> float:
        """The attention factor of mlx-lm."""
        if self.kind == "longrope":
            return longrope_attention_factor(self.target / self.window, self.window)
        if self.kind == "yarn" and self.factor == 1:
            return 1.0
        return self.attention_factor

    @cached_property
    def attention_factor(self) -> float:
        """The attention factor."""
        stated = self.parameters.get("attention_factor")
        if stated is not None:
            return float(stated)
        return self.by_yarn if self.kind == "yarn" else 1.0

    @property
    def betas(self) -> tuple[float, float]:
        """YaRN's betas."""
        return self.parameters.get("beta_fast", BETAS[0]), self.parameters.get(
            "beta_slow", BETAS[1]
        )

    def has(self, attention_factor: float) -> bool:
        """Return whether it has this attention factor."""
        return math.isclose(attention_factor, self.attention_factor, rel_tol=1e-6)


class Rule(NamedTuple):
    """What an engine does with a rope type.

    Args:
        rope_type: The rope type; `*` for all.
        reads: Whether the engine supports it; see `Engine`.
        note: A remark, with values of a `WrittenRope` and the engine's switch for the target length.
        when: The condition.
    """

    rope_type: str
    reads: Reads
    note: str = ""
    when: Callable[[WrittenRope], bool] = lambda rope: True


STALE = "frequencies change as the sequence grows: cached keys go stale"
FOLD = "fix: `ropepatch export --fold-attention`"
SWITCHING = Rule("longrope", "partly", STALE, WrittenRope.switches)
GROWING = Rule("dynamic", "partly", STALE)
TWICE = Rule(
    "linear",
    "yes",
    "multiplies the length again: pass {switch}",
    WrittenRope.is_extended,
)
HALVES = Rule("longrope", "yes", "only for Llama-style (half-split) RoPE")
TRUNCATED = Rule("yarn", "partly", "truncates the ramp", WrittenRope.is_open)
OLDER_KEYS = Rule("*", "yes", "through rope_theta and rope_scaling")
# Those that apply hold together, but the first `no` or `not known` holds alone; without one it is `yes`.
RULES = {
    "transformers 5.x": (GROWING, SWITCHING),
    "transformers 4.x": (GROWING, SWITCHING, OLDER_KEYS),
    "vLLM": (
        Rule(
            "dynamic",
            "no",
            "does not scale, has a table of {rope.window} tokens{rope.garbage}",
        ),
        TWICE,
        Rule(
            "longrope",
            "partly",
            "uses one list at every length: short_factor up to {rope.window} tokens, else long_factor",
            WrittenRope.switches,
        ),
        Rule(
            "longrope",
            "yes",
            "serves {rope.window} tokens without {switch}",
            WrittenRope.starts_early,
        ),
        HALVES,
        Rule(
            "yarn",
            "partly",
            "its table ends at {rope.reach} tokens",
            WrittenRope.ends_early,
        ),
        Rule(
            "yarn",
            "yes",
            "builds that ignore attention_factor use {rope.by_yarn:.4f}",
            lambda rope: not rope.has(rope.by_yarn),
        ),
        Rule(
            "*",
            "partly",
            "scales queries with the position only with Mistral's params.json",
            lambda rope: bool(rope.parameters.get(QUERY_TEMPERATURE)),
        ),
    ),
    "SGLang": (
        Rule(
            "dynamic",
            "no",
            "does not scale, serves {rope.window} tokens",
            lambda rope: rope.factor == 1,
        ),
        Rule("dynamic", "partly", "uses one base at every length"),
        Rule("dynamic", "partly", "serves {rope.reach} tokens", WrittenRope.ends_early),
        TWICE,
        SWITCHING,
        Rule(
            "longrope",
            "partly",
            "rotates position {rope.window} as position 0 while it is the last",
            WrittenRope.starts_early,
        ),
        HALVES,
        Rule(
            "yarn",
            "partly",
            "uses 1.0000 as attention factor",
            lambda rope: rope.factor == 1 and not rope.has(1),
        ),
    ),
    "llama.cpp": (
        Rule(
            "*",
            "no",
            "its converter drops the scaling",
            lambda rope: rope.kind != "default" and rope.architecture in GGUF_DROPPED,
        ),
        Rule(
            "*",
            "not known",
            when=lambda rope: (
                rope.architecture in {None, *GGUF_DROPPED, *GGUF_OTHERWISE}
            ),
        ),
        Rule(
            "dynamic",
            "no",
            "its converter drops the scaling, the context is {rope.window} tokens",
        ),
        Rule("longrope", "no", "its converter drops the factors"),
        Rule(
            "llama3",
            "no",
            f"its {{rope.architecture}} reads no {FREQS}: it runs unscaled",
            lambda rope: rope.architecture not in GGUF_FREQS,
        ),
        Rule("proportional", "not known"),
        Rule(
            "yarn",
            "partly",
            "uses {rope.by_yarn:.4f} as attention factor",
            lambda rope: not rope.has(rope.by_yarn),
        ),
        Rule(
            "yarn",
            "partly",
            f"uses {BETAS[0]:g} and {BETAS[1]:g} as beta_fast and beta_slow",
            lambda rope: rope.betas != BETAS,
        ),
        TRUNCATED,
    ),
    "mlx-lm": (
        GROWING,
        Rule(
            "longrope",
            "partly",
            "uses long_factor at every length",
            WrittenRope.switches,
        ),
        Rule(
            "*",
            "partly",
            "uses {rope.by_mlx:.4f} as attention factor",
            lambda rope: not rope.has(rope.by_mlx),
        ),
        Rule(
            "*", "partly", FOLD, lambda rope: not rope.has(rope.by_mlx) and rope.folds()
        ),
        TRUNCATED,
        OLDER_KEYS,
    ),
}


def support(engine: str, rope: WrittenRope, how: How) -> Engine:
    """Return the support of a RoPE in an architecture that an engine treats like LLaMA."""
    rules = [
        rule
        for rule in RULES[engine]
        if rule.rope_type in (rope.kind, "*") and rule.when(rope)
    ]
    rules = [rule for rule in rules if rule.reads in ("no", "not known")][:1] or rules
    reads: Reads = next((rule.reads for rule in rules if rule.reads != "yes"), "yes")
    switch = f"{SWITCHES.get(engine)} {rope.target}"
    needed = [switch] if any("{switch}" in rule.note for rule in rules) else []
    note = "; ".join(rule.note for rule in rules).format(rope=rope, switch=switch)
    return Engine.of(
        engine, reads, None if reads == "not known" else how, note, *needed
    )


def engine_support(
    parameters: dict[str, Any],
    rope: Rope,
    target: int,
    model_type: str = "llama",
    whole: str | None = None,
    *,
    folds: Callable[[], bool] = lambda: True,
    in_gguf: Callable[[], bool] = lambda: False,
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
        folds: Whether the attention factor can be folded into the query weights.
        in_gguf: Whether a GGUF file can contain it, though llama.cpp's converter does not write it.
    """
    written = WrittenRope(
        parameters, rope, target, gguf_architecture(model_type), folds
    )
    whole = whole or model_type
    kind, others = written.kind, VERSIONS.keys() - BY_ROPE_TYPE
    tried = {name: found(name, whole, model_type, kind) for name in others}
    rows = []
    for engine in VERSIONS:
        if engine == "transformers 5.x":
            row = support(engine, written, "run")
        elif engine == "llama.cpp":
            row = support(engine, written, "read")
            if row.reads != "yes" and in_gguf():
                instead = "use `ropepatch extend FILE.gguf` on a converted file"
                note = "; ".join(filter(None, (row.note, instead)))
                row = row.model_copy(update={"note": note})
        else:
            row = _by_architecture(engine, written, whole, model_type, tried[engine])
        rows.append(row)
    return rows


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


@singledispatch
def support_of(method: Method, plan: Planned) -> list[Engine]:
    """Return the engines' support of a plan with a method."""
    raise TypeError(f"{method!r} is neither a scaling nor a position remapping")


@support_of.register(Remapping)
def _of_remapping(method: Remapping, plan: Planned) -> list[Engine]:
    """Only transformers runs the code of a position remapping."""
    first, *others = VERSIONS
    own = Engine.of(
        first, "yes", "run", "with trust_remote_code=True, for the code in its folder"
    )
    return [
        own,
        *(
            Engine.of(engine, "no", "read", "has no such attention")
            for engine in others
        ),
    ]


@support_of.register(Scaling)
def _of_scaling(method: Scaling, plan: Planned) -> list[Engine]:
    if isinstance(plan.source, GgufModel):
        return [Engine.of("llama.cpp", "yes", "read", "and programs built on it")]
    name, config = plan.source.name, plan.source.config

    def in_gguf() -> bool:
        model = None if plan.length_dependent else converted(name, config)
        return model is not None and model.find_equivalent(method) is not None

    return engine_support(
        plan.rope_parameters,
        config.rope,
        plan.target,
        config.model_type,
        str(config.whole.model_type),
        folds=lambda: folds_attention(config),
        in_gguf=in_gguf,
    )


def converted(name: str, config: Config) -> GgufModel | None:
    """Return the GGUF model that llama.cpp's converter makes of a checkpoint; None if its RoPE is lost."""
    rope, architecture = config.rope, gguf_architecture(config.model_type)
    written = WrittenRope(config.rope_parameters, rope, config.window, architecture)
    if architecture is None or written.window < 1:
        return None
    if rope.is_scaled and support("llama.cpp", written, "read").reads != "yes":
        return None
    stated = GgufRope(rope.rope_theta, original=written.window)
    if rope.is_scaled and written.kind in ("linear", "yarn"):
        stated = replace(stated, kind=written.kind, factor=written.factor)
    elif rope.is_scaled:
        stated = replace(
            stated, divisors=tuple(divisors(rope.unscaled(), rope.inv_freq()).tolist())
        )
    sliding_window = getattr(config.text, "sliding_window", None) or 0
    has_local_base = config.layer_type is not None
    return GgufModel(
        name,
        architecture,
        rope.rotary_dim,
        config.window,
        stated,
        sliding_window,
        has_local_base,
    )

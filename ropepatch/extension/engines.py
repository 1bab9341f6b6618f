"""Which inference engines support an extended checkpoint, and how completely.

The rules are derived from each engine's source for LLaMA's architecture (for llama.cpp, from its converter
and runtime); `ropepatch.model.engine_types` lists the other architectures that behave the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import StringConstraints

from ropepatch.model.architectures import (
    GGUF_DROPPED,
    GGUF_FREQS,
    GGUF_OTHERWISE,
    gguf_architecture,
)
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.engine_types import ABSENT, NOT_KNOWN, Found, found
from ropepatch.model.gguf import FREQS, LLAMA_CPP, GgufModel, GgufRope
from ropepatch.model.record_file import Part, Text
from ropepatch.model.rotary import switches
from ropepatch.scaling.ramps import shared_temperature, yarn_temperature
from ropepatch.scaling.rope import Rope, divisors
from ropepatch.scaling.searched import longrope_attention_factor

VERSIONS = {  # of the sources
    "transformers 5.x": "5.23.0",
    "transformers 4.x": "4.57.6",
    "vLLM": "0.33.0",
    "SGLang": "0.5.23",
    "llama.cpp": LLAMA_CPP,
    "mlx-lm": "0.32.2",
}
PROBED = {"vLLM": "llama"}  # engines whose server was probed, with a model of that architecture
WHY_NOT = {
    ABSENT: "does not support {}",
    "unscaled": "silently ignores the scaling in {}",
    "refused": "rejects this rope_type in {}",
    "another rope": "computes other frequencies in {}",
}
HALVES = "Llama-style (half-split) RoPE"
STALE = "frequencies change as the sequence grows: cached keys go stale"


Reads = Literal["yes", "partly", "no", "not known"]
How = Literal["run", "probed", "read"] | None
Switch = Annotated[Text, StringConstraints(pattern=r"^--[a-z-]+ \d+$")]  # model cards print it in a command


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


class Support(NamedTuple):
    """An engine's support of a RoPE in LLaMA's architecture, from its source code; see `Engine`."""

    reads: Reads
    note: str = ""
    switch: str = ""

    def by(self, engine: str, how: How) -> Engine:
        """Make the row of an engine."""
        switches = [self.switch] if self.switch else []
        return Engine(engine=engine, reads=self.reads, how=how, note=self.note, switches=switches)


def engine_support(
    parameters: dict[str, Any],
    rope: Rope,
    target: int,
    model_type: str = "llama",
    whole: str | None = None,
    *,
    folds: bool = True,
    in_gguf: bool = False,
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
    written = _Written(parameters, rope, target, folds)
    rows = [_transformers(written).by("transformers 5.x", "run")]
    for engine, rule in RULES.items():
        known = found(engine, whole or model_type, model_type, written.kind)
        support = (
            rule(written) if known.verdict == "right" else _otherwise(engine, known, whole or model_type)
        )
        probed = support.reads == "yes" and PROBED.get(engine) == model_type
        rows.append(support.by(engine, "probed" if probed else known.how))
    architecture = gguf_architecture(model_type)
    support = _llama_cpp(written, architecture)
    if support.reads != "yes" and in_gguf:
        instead = "use `ropepatch extend FILE.gguf` on a converted file"
        support = support._replace(note="; ".join(filter(None, (support.note, instead))))
    how: How = "read" if support.reads != "not known" else None
    rows.insert(list(VERSIONS).index("llama.cpp"), support.by("llama.cpp", how))
    return rows


def _otherwise(engine: str, known: Found, model_type: str) -> Support:
    """Return the support of an engine that does not, or may not, treat an architecture like LLaMA."""
    if engine in ("vLLM", "SGLang") and known.verdict == ABSENT:
        return Support("not known", f"has no {model_type} of its own, but may run transformers' code")
    if known.verdict == NOT_KNOWN:
        return Support("not known")
    return Support("no", WHY_NOT[known.verdict].format(model_type))


def gguf_support() -> list[Engine]:
    """Return the support of an extended GGUF file, which is planned for llama.cpp."""
    return [Support("yes", "and programs built on it").by("llama.cpp", "read")]


def remapping_support() -> list[Engine]:
    """Return the support of a checkpoint with a position remapping, whose code only transformers runs."""
    own = Support("yes", "with trust_remote_code=True, for the code in its folder").by(
        "transformers 5.x", "run"
    )
    others = [engine for engine in VERSIONS if engine != own.engine]
    return [own, *(Support("no", "has no such attention").by(engine, "read") for engine in others)]


@dataclass(frozen=True)
class _Written:
    """The RoPE in config.json."""

    parameters: dict[str, Any]
    rope: Rope
    target: int
    folds: bool

    @property
    def kind(self) -> str:
        return str(self.parameters["rope_type"])

    @property
    def factor(self) -> float:
        return float(self.parameters.get("factor", 1.0))

    @property
    def window(self) -> int:
        """The original length that an engine uses, in tokens."""
        here = self.rope.original_max_position_embeddings
        return int(self.parameters.get("original_max_position_embeddings", here))

    @property
    def attention_factor(self) -> float:
        stated = self.parameters.get("attention_factor")
        if stated is not None:
            return float(stated)
        return self.by_yarn if self.kind == "yarn" else 1.0

    @property
    def by_yarn(self) -> float:
        """The attention factor of an engine that always uses YaRN's formula."""
        if of_softmax := self.parameters.get("mscale_all_dim"):  # DeepSeek's family
            return shared_temperature(self.factor, self.parameters.get("mscale", 1.0), of_softmax)
        return yarn_temperature(self.factor)

    def is_written(self, attention_factor: float) -> bool:
        return math.isclose(attention_factor, self.attention_factor, rel_tol=1e-6)

    @property
    def usual_betas(self) -> bool:
        """Whether YaRN has llama.cpp's betas."""
        return (self.parameters.get("beta_fast", 32), self.parameters.get("beta_slow", 1)) == (32, 1)

    @property
    def truncates(self) -> bool:
        """Whether YaRN's ramp begins and ends at whole pairs, as in most engines."""
        return bool(self.parameters.get("truncate", True))


def _transformers(written: _Written, note: str = "") -> Support:
    if written.kind == "dynamic" or switches(written.parameters):
        return Support("partly", STALE)
    return Support("yes", note)


def _transformers_4(written: _Written) -> Support:
    return _transformers(written, "through rope_theta and rope_scaling")


def _vllm(written: _Written) -> Support:
    kind, window, switch = written.kind, written.window, f"--max-model-len {written.target}"
    if written.parameters.get("llama_4_scaling_beta"):
        return Support("partly", "scales queries with the position only with Mistral's params.json")
    if kind == "dynamic":
        garbage = ", and produces garbage beyond them" if written.factor > 1 else ""
        return Support("no", f"does not scale, has a table of {window} tokens{garbage}")
    if switches(written.parameters):
        note = f"uses one list at every length: short_factor up to {window} tokens, else long_factor"
        return Support("partly", f"{note} with {switch}", switch)
    if kind == "linear" and written.factor > 1:
        return Support("yes", f"multiplies the length again: pass {switch}", switch)
    if kind == "longrope" and window < written.target:
        note = f"serves {window} tokens without {switch}; only for {HALVES}"
        return Support("yes", note, switch)
    if kind == "longrope":
        return Support("yes", f"only for {HALVES}")
    if kind == "yarn" and (end := math.ceil(window * written.factor)) < written.target:
        return Support("partly", f"its table ends at {end} tokens")
    if kind == "yarn" and not written.is_written(written.by_yarn):
        return Support("yes", f"builds that ignore attention_factor use {written.by_yarn:.4f}")
    return Support("yes")


def _sglang(written: _Written) -> Support:
    kind, window = written.kind, written.window
    if kind == "dynamic":
        if written.factor == 1:
            return Support("no", f"does not scale, serves {window} tokens")
        reach = int(written.factor * window)
        serves = f", serves {reach} tokens" if reach < written.target else ""
        return Support("partly", f"uses one base at every length{serves}")
    if switches(written.parameters):
        return Support("partly", f"{STALE}; rotates position {window} as position 0 while it is the last")
    if kind == "linear" and written.factor > 1:
        switch = f"--context-length {written.target}"
        return Support("yes", f"multiplies the length again: pass {switch}", switch)
    if kind == "longrope" and window < written.target:
        note = f"rotates position {window} as position 0 while it is the last; only for {HALVES}"
        return Support("partly", note)
    if kind == "longrope":
        return Support("yes", f"only for {HALVES}")
    if kind == "yarn" and written.factor == 1 and not written.is_written(1):
        return Support("partly", "uses 1.0000 as attention factor")
    return Support("yes")


def _llama_cpp(written: _Written, architecture: str | None) -> Support:
    """Return the support of llama.cpp: its converter and its runtime."""
    kind = written.kind
    if kind != "default" and architecture in GGUF_DROPPED:
        return Support("no", "its converter drops the scaling")
    if architecture in {None, *GGUF_DROPPED, *GGUF_OTHERWISE}:
        return Support("not known")
    if kind == "dynamic":
        return Support("no", f"its converter drops the scaling, the context is {written.window} tokens")
    if kind == "longrope":
        return Support("no", "its converter drops the factors")
    if kind == "llama3" and architecture not in GGUF_FREQS:
        return Support("no", f"its {architecture} reads no {FREQS}: it runs unscaled")
    if kind not in ("default", "linear", "yarn", "llama3"):
        return Support("not known")
    if kind == "yarn":
        a, usual = written.by_yarn, written.is_written(written.by_yarn)
        off = [] if usual else [f"uses {a:.4f} as attention factor"]
        if not written.usual_betas:
            off.append("uses 32 and 1 as beta_fast and beta_slow")
        off += [] if written.truncates else ["truncates the ramp"]
        if off:
            return Support("partly", " and ".join(off))
    return Support("yes")


def converted(source: Checkpoint) -> GgufModel | None:
    """Return the GGUF model that llama.cpp's converter makes of a checkpoint; None if its RoPE is lost."""
    config: Any = source.config
    rope, architecture = source.rope, gguf_architecture(config.model_type)
    parameters = source.site.of(config.rope_parameters)
    written = _Written(parameters, rope, source.window, folds=False)
    if architecture is None:
        return None
    if rope.is_scaled and _llama_cpp(written, architecture).reads != "yes":
        return None
    stated = GgufRope(rope.rope_theta, original=written.window)
    if rope.is_scaled and written.kind in ("linear", "yarn"):
        stated = replace(stated, kind=written.kind, factor=written.factor)
    elif rope.is_scaled:
        stated = replace(stated, divisors=tuple(divisors(rope.unscaled(), rope.inv_freq()).tolist()))
    sliding_window = getattr(config, "sliding_window", None) or 0
    has_local_base = source.site.layer_type is not None
    return GgufModel(
        source.name, architecture, rope.rotary_dim, source.window, stated, sliding_window, has_local_base
    )


def _mlx_lm(written: _Written) -> Support:
    kind, off = written.kind, []
    if kind == "dynamic":
        return Support("partly", STALE)
    if switches(written.parameters):
        off.append("uses long_factor at every length")
    a = written.attention_factor
    if kind == "longrope":
        a = longrope_attention_factor(written.target / written.window, written.window)
    elif kind == "yarn" and written.factor == 1:
        a = 1.0
    if not written.is_written(a):
        off.append(f"uses {a:.4f} as attention factor")
        off += ["fix: `ropepatch export --fold-attention`"] if written.folds else []
    if kind == "yarn" and not written.truncates:
        off.append("truncates the ramp")
    if off:
        return Support("partly", "; ".join(off))
    return Support("yes", "through rope_theta and rope_scaling")


RULES = {"transformers 4.x": _transformers_4, "vLLM": _vllm, "SGLang": _sglang, "mlx-lm": _mlx_lm}

"""Which inference engine reads an extended checkpoint, and how much of it.

Derived from the engines' sources for LLaMA's architecture, and for some of them proven by running (`KNOWN`);
of llama.cpp its converter and its runtime. Of other architectures there are rows in
`ropepatch.model.architectures`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from ropepatch.model.architectures import IGNORED_BY_4, NEWER_THAN_4, REFUSED_BY_4, UNSCALED_IN_MLX
from ropepatch.model.record_file import Part, Text
from ropepatch.model.rotary import switches
from ropepatch.scaling.ramps import shared_temperature, yarn_temperature
from ropepatch.scaling.rope import Rope
from ropepatch.scaling.searched import longrope_attention_factor

VERSIONS = {  # whose sources were read
    "transformers 5.x": "5.23.0",
    "transformers 4.x": "4.57.6",
    "vLLM": "0.33.0",
    "SGLang": "0.5.23",
    "llama.cpp": "0c1e57098",
    "mlx-lm": "0.32.2",
}
KNOWN = {  # how, where its sources alone were not read: its logits were compared, or its server was probed
    **dict.fromkeys(("transformers 5.x", "transformers 4.x", "mlx-lm"), "run"),
    "vLLM": "probed",
}
STALE = "recomputed as the sequence grows: cached keys go stale"


Switch = Annotated[Text, StringConstraints(pattern=r"^--[a-z-]+ \d+$")]  # which a card prints as a command


class Engine(Part):
    """How one inference engine reads the checkpoint.

    Args:
        engine: Its name.
        reads: All of it, partly, or not at all.
        note: What to know.
        switches: Of its command line, without which it does not serve the target.
    """

    engine: Text
    reads: Literal["yes", "partly", "no"]
    note: Text
    switches: list[Switch]


def known(engine: Engine, *, of_map: bool = False) -> str:
    """How it is known what an engine reads of a rope: run, probed, or read in its sources."""
    how = KNOWN.get(engine.engine, "read")
    if engine.reads == "yes":  # what a server reads wrongly was not asked
        return how
    return how if how == "run" and not of_map else "read"


def _says(engine: str, reads: Literal["yes", "partly", "no"], note: str = "", *flags: str) -> Engine:
    return Engine(engine=engine, reads=reads, note=note, switches=list(flags))


def engine_support(
    parameters: dict[str, Any], rope: Rope, target: int, model_type: str = "llama"
) -> list[Engine]:
    """One line per engine of `VERSIONS`, and one per engine that does not scale this architecture.

    "yes" is: its frequencies, its attention factor, and all of the target, if need be by the switch that the
    note names.

    Args:
        parameters: The `rope_parameters` to be written, of the global layers where layers differ.
        rope: The rope before.
        target: The context to reach, in tokens.
        model_type: The architecture, in transformers' words.
    """
    written = _Written(parameters, rope, target)
    unscaled = ("mlx-vlm", "ollama (MLX)") if model_type in UNSCALED_IN_MLX else ()
    return [
        _transformers("transformers 5.x", written, ""),
        _transformers_4(written, model_type),
        _vllm(written),
        _sglang(written),
        _llama_cpp(written),
        _mlx_lm(written),
        *(_says(engine, "no", "leaves it unscaled, without a word") for engine in unscaled),
    ]


def map_support() -> list[Engine]:
    """The same of a checkpoint with an attention map, whose code transformers alone runs."""
    own = _says("transformers 5.x", "yes", "with trust_remote_code=True: the map is code beside it")
    others = [engine for engine in VERSIONS if engine != own.engine]
    return [own, *(_says(engine, "no", "has no such attention") for engine in others)]


@dataclass(frozen=True)
class _Written:
    """What config.json says."""

    parameters: dict[str, Any]
    rope: Rope
    target: int

    @property
    def kind(self) -> str:
        return str(self.parameters["rope_type"])

    @property
    def factor(self) -> float:
        return float(self.parameters.get("factor", 1.0))

    @property
    def window(self) -> int:
        """The length from which an engine reckons, in tokens."""
        here = self.rope.original_max_position_embeddings
        return int(self.parameters.get("original_max_position_embeddings", here))

    @property
    def attention_factor(self) -> float:
        return float(self.parameters.get("attention_factor", 1.0))

    @property
    def by_yarn(self) -> float:
        """The attention factor of an engine that takes YaRN's, whatever is written."""
        if of_softmax := self.parameters.get("mscale_all_dim"):  # DeepSeek's kin, whose readers know the keys
            return shared_temperature(self.factor, self.parameters.get("mscale", 1.0), of_softmax)
        return yarn_temperature(self.factor)

    def is_written(self, attention_factor: float) -> bool:
        return math.isclose(attention_factor, self.attention_factor, rel_tol=1e-6)


def _transformers(engine: str, written: _Written, note: str) -> Engine:
    if written.kind == "dynamic" or switches(written.parameters):
        return _says(engine, "partly", STALE)
    return _says(engine, "yes", note)


def _transformers_4(written: _Written, model_type: str) -> Engine:
    if model_type in NEWER_THAN_4:
        return _says("transformers 4.x", "no", f"does not have {model_type}")
    verb = "ignores" if model_type in IGNORED_BY_4 else "refuses" if model_type in REFUSED_BY_4 else None
    if written.kind != "default" and verb:
        return _says("transformers 4.x", "no", f"{verb} such a rope_scaling in {model_type}")
    return _transformers("transformers 4.x", written, "through rope_theta and rope_scaling")


def _vllm(written: _Written) -> Engine:
    support = functools.partial(_says, "vLLM")
    kind, window, switch = written.kind, written.window, f"--max-model-len {written.target}"
    if written.parameters.get("llama_4_scaling_beta"):
        return support("partly", "lets queries grow with the position by Mistral's params.json alone")
    if kind == "dynamic":
        garbage = ", and reads garbage beyond it" if written.factor > 1 else ""
        return support("no", f"leaves it unscaled, with a table of {window} tokens{garbage}")
    if switches(written.parameters):
        note = f"one list at every length: the short one up to {window} tokens, the long one with {switch}"
        return support("partly", note, switch)
    if kind == "linear" and written.factor > 1:
        return support("yes", f"multiplies the length again: pass {switch}", switch)
    if kind == "longrope" and window < written.target:
        note = f"serves {window} tokens without {switch}; half-split layouts only"
        return support("yes", note, switch)
    if kind == "longrope":
        return support("yes", "half-split layouts only")
    if kind == "yarn" and (end := math.ceil(window * written.factor)) < written.target:
        return support("partly", f"its table ends at {end} tokens")
    if kind == "yarn" and not written.is_written(written.by_yarn):
        return support("yes", f"builds that ignore attention_factor take {written.by_yarn:.4f}")
    return support("yes")


def _sglang(written: _Written) -> Engine:
    support = functools.partial(_says, "SGLang")
    kind, window = written.kind, written.window
    if kind == "dynamic":
        if written.factor == 1:
            return support("no", f"leaves it unscaled, and serves {window} tokens")
        reach = int(written.factor * window)
        serves = f", and serves {reach} tokens" if reach < written.target else ""
        return support("partly", f"one base at every length{serves}")
    if switches(written.parameters):
        return support("partly", f"{STALE}; position {window} as position 0 while last")
    if kind == "linear" and written.factor > 1:
        switch = f"--context-length {written.target}"
        return support("yes", f"multiplies the length again: pass {switch}", switch)
    if kind == "longrope" and window < written.target:
        note = f"rotates position {window} as position 0 while it is the last; half-split layouts only"
        return support("partly", note)
    if kind == "longrope":
        return support("yes", "half-split layouts only")
    if kind == "yarn" and written.factor == 1 and not written.is_written(1):
        return support("partly", "takes 1.0000 for the attention factor")
    return support("yes")


def _llama_cpp(written: _Written) -> Engine:
    support = functools.partial(_says, "llama.cpp")
    kind = written.kind
    if kind == "dynamic":
        return support("no", f"its converter drops it, and {written.window} tokens are its context")
    if kind == "longrope":
        return support("no", "its converter drops the factors")
    if kind == "yarn":
        a, usual = written.by_yarn, written.is_written(written.by_yarn)
        off = [] if usual else [f"takes {a:.4f} for the attention factor"]
        if (written.parameters.get("beta_fast", 32), written.parameters.get("beta_slow", 1)) != (32, 1):
            off.append("takes 32 and 1 for beta_fast and beta_slow")
        off += [] if written.parameters.get("truncate", True) else ["it truncates the ramp"]
        if off:
            return support("partly", " and ".join(off))
    return support("yes")


def _mlx_lm(written: _Written) -> Engine:
    support = functools.partial(_says, "mlx-lm")
    kind, off = written.kind, []
    if kind == "dynamic":
        return support("partly", STALE)
    if switches(written.parameters):
        off.append("the long list at every length")
    a = written.attention_factor
    if kind == "longrope":
        a = longrope_attention_factor(written.target / written.window, written.window)
    elif kind == "yarn" and written.factor == 1:
        a = 1.0
    if not written.is_written(a):
        off.append(f"takes {a:.4f} for the attention factor; `ropepatch export --fold-attention` writes 1")
    if kind == "yarn" and not written.parameters.get("truncate", True):
        off.append("truncates the ramp")
    if off:
        return support("partly", "; ".join(off))
    return support("yes", "through rope_theta and rope_scaling")

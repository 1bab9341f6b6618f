"""Comparison of a loaded model's rotary modules with those that its configuration gives.

The reference is stock transformers, which builds each module anew from its configuration, in float32 on the
CPU. A module that cannot be built this way is not compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropepatch.errors import RopepatchError
from ropepatch.model.checks.findings import MEMORY, Edit, Finding, Key
from ropepatch.model.config import ORIGINAL, SCALING_KEYS, text_config
from ropepatch.model.mistakes import UNSCALED, misread
from ropepatch.model.rotary import (
    RotarySubstitute,
    base_model,
    float32_on_cpu,
    holds_frequencies,
    language_ropes,
)
from ropepatch.model.stock import stock_code
from ropepatch.scaling.rope import Frequencies

SAME = 1e-5  # relative: devices differ by 1e-7, and 16 bits round by 1e-4 and more
NEAR = 2**-7  # relative, for a frequency rounded to 16 bits, even twice
LEAST = 2**-24  # radians: the smallest number above 0 of float16
REPAIR = "`ropepatch.diagnose(model, repair=True)` writes what the config computes"


def rope_findings(
    model: nn.Module, stated: PreTrainedConfig | None = None
) -> tuple[list[Finding], list[str]]:
    """Compare every rotary buffer of a loaded model, also within wrappers.

    Args:
        model: The model.
        stated: The expected configuration of its language model; its own configuration if None.

    Returns:
        The findings; and for each rotary module what was compared, or why it was not.

    Raises:
        RopepatchError: If it contains no transformers model.
    """
    base, kinds = base_model(model), (RotarySubstitute,)
    stated = stated or text_config(base.config)
    modules = {
        path: module
        for path, module in base.named_modules()
        if isinstance(module, kinds) or holds_frequencies(module)
    }
    findings, looked_at = list[Finding](), list[str]()
    for path, module in modules.items():
        if isinstance(module, kinds):
            looked_at.append(f"{path}: not compared, as {module.state}")
            continue
        config = _config_of(module, stated, is_alone=[*language_ropes(base)] == [path])
        try:
            ropes = _ropes(path, module, config)
        except RopepatchError as error:
            looked_at.append(f"{path}: not compared, as {error}")
            continue
        names = [name for rope in ropes for name in rope.names]
        unread = [name for rope in ropes for name in rope.names if rope.read(name) is None]
        looked_at.append(f"{path}: {', '.join(names)}")
        if unread:
            looked_at.append(f"but not {', '.join(unread)}, of which this process holds no whole copy")
        for rope in ropes:
            findings += rope.findings()
    return findings, looked_at or ["no rotary module"]


def check_rope(model: nn.Module, stated: PreTrainedConfig | None = None) -> list[Finding]:
    """Raise a `RopepatchError` if a loaded model's RoPE is not its config's; return milder findings.

    Rounding is only a warning: `model.to(torch.bfloat16)` causes it, and the user runs this model.
    """
    findings, _ = rope_findings(model, stated)
    for one in findings:
        if one.severity == "error":
            raise RopepatchError(
                f"the RoPE in memory is not the config's: {one.key} is {one.value}, {one.problem}",
                hint=REPAIR,
            )
    return findings


def write_ropes(model: nn.Module, findings: list[Finding]) -> None:
    """Write the config's frequencies of findings into the model: float32, on the buffer's device."""
    base = base_model(model)
    for edit in (edit for one in findings for edit in one.edits):
        path, name = edit.path
        module: Any = base.get_submodule(path)
        now = getattr(module, name)
        if isinstance(edit.value, float):
            setattr(module, name, edit.value)
            continue
        value = torch.tensor(edit.value, dtype=torch.float32, device=now.device)
        if now.dtype == value.dtype and now.shape == value.shape and not now.is_inference():
            with torch.no_grad():
                now.copy_(value)  # in place: CUDA graphs keep its address
        else:
            module.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)
    reset_dynamic(base)


def reset_dynamic(model: nn.Module) -> None:
    """Reset stock `dynamic` RoPE to its first frequencies, which transformers before 5.13 never does.

    This also resets the shift of text positions that an earlier image caused.
    """
    modules: list[Any] = [*model.modules()]
    for module in modules:
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None
        kinds = getattr(module, "rope_type", None) if hasattr(module, "original_max_seq_len") else None
        named = {f"{name}_": kind for name, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        for prefix in (prefix for prefix, kind in named.items() if "dynamic" in (kind or "")):
            now, first = (getattr(module, f"{prefix}{name}") for name in ("inv_freq", "original_inv_freq"))
            module.register_buffer(f"{prefix}inv_freq", first.to(now.device, copy=True), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _config_of(module: nn.Module, stated: PreTrainedConfig, *, is_alone: bool) -> Any:
    """Return the configuration of a rotary module: the language model's if it has only this one.

    One of several may have a changed copy, e.g. for layers with another base.
    """
    own = getattr(module, "config", None)
    return stated if is_alone and type(own) in (type(stated), type(None)) else own


def _ropes(path: str, module: Any, config: PreTrainedConfig) -> list[_Rope]:
    """Return one `_Rope`, or one for each layer type."""
    if config is None:
        raise RopepatchError(f"{type(module).__name__} has no config")
    fresh = _built(module, config)
    kinds = getattr(fresh, "rope_type", "default")
    every = kinds if isinstance(kinds, dict) else {None: kinds}
    return [_Rope(path, module, config, fresh, kind or "default", layer) for layer, kind in every.items()]


def _built(module: nn.Module, config: PreTrainedConfig) -> Any:
    with stock_code(f"build {type(module).__name__} from its config"), float32_on_cpu():
        return type(module)(config)


@dataclass(frozen=True, eq=False)
class _Rope:
    """The RoPE of a rotary module in memory, for one layer type.

    Args:
        path: The module's path in the model.
        module: The module.
        config: Its configuration.
        fresh: The module that stock transformers builds from the configuration.
        kind: The rope type.
        layer: The layer type; None if RoPE does not differ by layer.
    """

    path: str
    module: Any
    config: Any
    fresh: Any
    kind: str
    layer: str | None

    @property
    def names(self) -> list[str]:
        """The names of the buffers."""
        every = (self._named("inv_freq"), self._named("original_inv_freq"))
        return [name for name in every if isinstance(getattr(self.fresh, name, None), Tensor)]

    def _named(self, name: str) -> str:
        return name if self.layer is None else f"{self.layer}_{name}"

    def read(self, name: str) -> Tensor | None:
        """Return a buffer on the CPU; None if this process has only a part of it, or nothing."""
        held = getattr(self.module, name, None)
        if not isinstance(held, Tensor) or held.is_meta:
            return None
        placements = getattr(held, "placements", ())  # of a DTensor
        if not all(place.is_replicate() for place in placements):
            return None
        replicated: Any = held
        return (replicated.to_local() if placements else held).detach().cpu()

    def findings(self) -> Iterator[Finding]:
        """Yield the findings about the buffers and the attention factor."""
        for name in self.names:
            held, expected = self.read(name), getattr(self.fresh, name)
            if held is not None and (fault := self._fault(name, held, expected)):
                # Static RoPE never uses the original frequencies.
                is_harmless = "original" in name and self.kind != "longrope" and "dynamic" not in self.kind
                right = tuple(expected.tolist())
                yield self._finding(name, fault, _shown(held), _shown(expected), right, is_harmless)
        name = self._named("attention_scaling")
        expected, held = getattr(self.fresh, name, None), getattr(self.module, name, None)
        if expected is not None and held is not None:
            a, held_a = float(expected), float(held)
            if not math.isclose(held_a, a, rel_tol=SAME):
                code = "rope-rescaled" if math.isfinite(held_a) else "rope-garbage"
                fault = code, "another factor of cos and sin"
                yield self._finding(name, fault, f"{held_a:g}", f"{a:g}", a)

    def _finding(
        self,
        name: str,
        fault: tuple[str, str],
        value: str,
        expected: str,
        right: float | tuple[float, ...],
        is_harmless: bool = False,
    ) -> Finding:
        code, problem = fault
        return Key(MEMORY, (self.path, name)).finding(
            code,
            f"{problem}; the config ({self.kind}) computes {expected}",
            REMEDIES[code],
            fix=(Edit(MEMORY, (self.path, name), right),),
            severity="warning" if is_harmless else None,
            value=value,
        )

    def _fault(self, name: str, held: Tensor, expected: Tensor) -> tuple[str, str] | None:
        """Return code and description of a buffer's problem; None if there is none."""
        states = [expected, *(() if "original" in name else self._later_states)]
        values = held.float()
        if any(_is_same(values, state) for state in states):
            return None
        if values.shape != expected.shape:
            return "rope-rescaled", f"{values.numel()} frequencies, not {expected.numel()}"
        if not values.any():
            return "rope-zeros", "zeros"
        for state in states:
            if kind := _rounded_to(values, state):
                window = getattr(self.config, "max_position_embeddings", None) or 1
                radians = float((values - state).abs().max()) * window
                return "rope-rounded", f"rounded to {kind}, {radians:.2g} radians off at {window} tokens"
        if _is_garbage(values, expected):
            return "rope-garbage", "uninitialised memory"
        for length, table in self._tables_of_lengths(values).items():
            if _is_same(values, table):
                return "rope-of-other-length", f"the frequencies of a text of {length} tokens"
        return "rope-rescaled", f"another rope, {self._known(values) or 'by no scaling that is known'}"

    # Other frequencies of the same config

    @property
    def _parameters(self) -> dict[str, Any]:
        every = getattr(self.config, "rope_parameters", None) or {}
        return dict(every.get(self.layer) or {}) if self.layer else dict(every)

    def _at(self, length: int) -> Tensor:
        """Compute the frequencies of length-dependent RoPE at a length in tokens."""
        with stock_code(f"compute a {self.kind} rope"), float32_on_cpu():
            table, _ = ROPE_INIT_FUNCTIONS[self.kind](
                self.config, torch.device("cpu"), seq_len=length, layer_type=self.layer
            )
        return table

    @cached_property
    def _later_states(self) -> list[Tensor]:
        """The frequencies that length-dependent RoPE may have after a forward pass."""
        if self.kind == "longrope":
            return [self._at(int(self._parameters[ORIGINAL]) + 1)]
        if self.kind != "dynamic":
            return []
        layers = {"", self._named(""), f"{self.layer}_"}  # the last before transformers 5.13
        lengths = {int(getattr(self.module, f"{layer}max_seq_len_cached", 0)) for layer in layers}
        return [self._at(length) for length in lengths if length]

    def _tables_of_lengths(self, values: Tensor) -> dict[int, Tensor]:
        """Compute the frequencies of length-dependent RoPE at the lengths that may explain `values`."""
        if self.kind == "longrope":
            beyond = int(self._parameters[ORIGINAL]) + 1
            return {beyond: self._at(beyond)}
        if self.kind != "dynamic":
            return {}
        window, factor = self.config.max_position_embeddings, self._parameters["factor"]
        stretched = float(getattr(self.fresh, self._named("inv_freq"))[-1] / values[-1])
        length = round((stretched + factor - 1) * window / factor)
        return {length: self._at(length)} if 0 < length < 2**31 else {}

    def _known(self, values: Tensor) -> str | None:
        """Describe the known mistake, or the base, that explains a table of frequencies."""
        expected = getattr(self.fresh, self._named("inv_freq"))
        parameters, window = self._parameters, getattr(self.config, "max_position_embeddings", None)
        plain = {key: value for key, value in parameters.items() if key not in SCALING_KEYS}
        plain |= {"rope_type": "default", "rope_theta": parameters.get("rope_theta")}
        factor, before = parameters.get("factor"), self._otherwise(plain)
        if before is not None:
            doubled = self._otherwise(parameters | {"factor": 2 * factor}) if factor else None
            by_target = self._otherwise(parameters | {ORIGINAL: window}) if ORIGINAL in parameters else None
            right = Frequencies(expected, float(getattr(self.fresh, self._named("attention_scaling"), 1.0)))
            for name, table in misread(right, before, doubled, by_target).items():
                if _is_same(values, table.inv_freq):
                    return name if name == UNSCALED else f"that scaling {name}"
        pairs, first, last = len(values), float(values[0]), float(values[-1])
        base = (last / first) ** (-pairs / (pairs - 1)) if pairs > 1 and first > 0 and last > 0 else 1.0
        if _is_same(values, first * base ** -(torch.arange(pairs) / pairs).double()):
            return f"unscaled of base {base:.6g}" + (f", divided by {1 / first:.4g}" if first != 1 else "")
        return None

    def _otherwise(self, parameters: dict[str, Any]) -> Frequencies | None:
        """Compute the frequencies for other rope_parameters; None if the module rejects them."""
        config = copy.deepcopy(self.config)
        every = config.rope_parameters
        config.rope_parameters = every | {self.layer: parameters} if self.layer else parameters
        try:
            other = _built(self.module, config)
        except RopepatchError:
            return None
        factor = float(getattr(other, self._named("attention_scaling"), 1.0))
        return Frequencies(getattr(other, self._named("inv_freq")), factor)


UNWRITTEN = "after to_empty, or a load on the meta device, write it anew; from_pretrained does"
REMEDIES = {
    "rope-garbage": UNWRITTEN,
    "rope-zeros": UNWRITTEN,
    "rope-rounded": "from_pretrained(dtype=...) keeps it in float32, where .to(dtype) and .half() do not",
    "rope-rescaled": "change rope_parameters before the model is built; ropepatch.patch changes both",
    "rope-of-other-length": "let it start over with the first frequencies",
}


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=SAME, atol=1e-30)


def _rounded_to(values: Tensor, exact: Tensor) -> str | None:
    """Return the 16-bit dtype to which frequencies were rounded, if any."""
    for kind in (torch.bfloat16, torch.float16):
        near = torch.allclose(values, exact.to(kind).float(), rtol=NEAR, atol=LEAST)
        if near and torch.equal(values, values.to(kind).float()):
            return str(kind).removeprefix("torch.")
    return None


def _is_garbage(values: Tensor, expected: Tensor) -> bool:
    """Whether values cannot be frequencies: not finite, negative, huge, or unordered."""
    climbs, usual = (int((one.diff() > 0).sum()) for one in (values, expected))
    return (
        not bool(values.isfinite().all())
        or bool((values < 0).any())
        or bool(((values == 0) & (expected > 0)).any())
        or bool(values.max() > 10 * expected.max())
        or climbs > usual + len(values) // 8
    )


def _shown(values: Tensor) -> str:
    """Format the first values of a table."""
    first = [f"{value:.4g}" for value in values.flatten()[:4].tolist()]
    return f"[{', '.join([*first, '...'] if values.numel() > 4 else first)}]"

"""Extend a GGUF file: change the metadata and the table that llama.cpp computes RoPE from."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ropepatch.columns import Table, as_text
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.extension.planning import WIDTH, check_method, method_for, scaling_warnings
from ropepatch.extension.text import bands_text, changes_table, parameters_text
from ropepatch.files import absent, check_space, disk_error, json_text, whole_file
from ropepatch.model.architectures import GGUF_GLOBAL
from ropepatch.model.gguf import BETAS, FACTORS, FREQS, LLAMA_CPP, GgufModel, GgufRope, same_frequencies
from ropepatch.model.gguf_file import GgufFile, Keys, Tensors, check_numbers
from ropepatch.model.rotary import float32_on_cpu
from ropepatch.model.weights import Progress
from ropepatch.scaling import Scaling, make_scaling
from ropepatch.scaling.method import Method
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import Length


@dataclass(frozen=True, repr=False, eq=False)
class GgufPlan:
    """The plan of an extension of a GGUF file.

    Args:
        source: The model to extend.
        method: The RoPE scaling.
        target: The target length, in tokens.
    """

    source: GgufModel
    method: Scaling
    target: int
    remapping: ClassVar[None] = None
    revision: ClassVar[None] = None

    @property
    def scaling(self) -> Scaling:
        """The RoPE scaling."""
        return self.method

    @property
    def model(self) -> str:
        """The path that the user gave."""
        return self.source.name

    @property
    def rope(self) -> Rope:
        """The RoPE before the extension."""
        return self.source.rope

    @cached_property
    @float32_on_cpu()
    def gguf_rope(self) -> GgufRope:
        """The RoPE metadata of the new file.

        Raises:
            RopepatchError: If llama.cpp cannot compute it in this architecture.
        """
        source, scaling = self.source, self.method
        if (equivalent := source.find_equivalent(scaling)) is not None:
            return equivalent
        names = "yarn", "linear", "ntk"
        tried = [make_scaling(name, factor=scaling.factor) for name in names]
        can = [
            one.name
            for one in tried
            if (one.composes or not self.rope.is_scaled) and source.find_equivalent(one)
        ]
        methods = " or ".join(argument("method", name) for name in can)
        raise RopepatchError(
            f"llama.cpp's {source.architecture} does not support this {scaling.name}, only freq_base, "
            f"linear and YaRN with betas {BETAS[0]:g} and {BETAS[1]:g}",
            hint=f"use {methods}, without further parameters"
            if can
            else "extend the safetensors checkpoint for another engine",
        )

    @cached_property
    def tensors(self) -> Tensors:
        """The tensors that change; None removes a tensor."""
        here = self.source.file.tensors.keys() & {*FACTORS, FREQS} if self.source.tables else ()
        names = FACTORS if self.gguf_rope.kind == "longrope" else (FREQS,)
        table = np.array(self.gguf_rope.divisors, dtype=np.float32)
        return dict.fromkeys(here) | (dict.fromkeys(names, table) if self.gguf_rope.divisors else {})

    @cached_property
    def keys(self) -> Keys:
        """The metadata that change; None removes a key."""
        new, plain = self.gguf_rope, self.gguf_rope.kind in ("none", "longrope")
        named = new.kind != "none" or new.attn_factor != 1 or new.divisors
        scaling: dict[str, int | float | str | None] = {
            "type": new.kind if named else None,
            "factor": None if plain else float(new.factor),
            "original_context_length": None if plain else new.original or None,
            "attn_factor": None if new.attn_factor == 1 else new.attn_factor,
            **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        }
        source = self.source
        keys: dict[str, int | float | str | None] = {source.key("context_length"): self.target}
        keys[source.key("rope.freq_base")] = new.base
        keys |= {source.key(f"rope.scaling.{name}"): value for name, value in scaling.items()}
        keys[source.key("rope.scale_linear")] = None
        fields = source.file.fields
        return {
            key: value
            for key, value in keys.items()
            if (key in fields if value is None else key not in fields or source.file.get(key, value) != value)
        }

    def frequencies(self) -> Frequencies:
        """Return the frequencies that llama.cpp computes from the new file."""
        return self.gguf_rope.frequencies(self.source.rotary_dim)

    @cached_property
    @float32_on_cpu()
    def warnings(self) -> tuple[str, ...]:
        """Warnings, one sentence each."""
        return tuple(self._warnings())

    def _original_length(self) -> Iterator[str]:
        if self.source.original_window:
            stated = self.source.file.get(self.source.key("context_length"))
            yield f"original length {self.source.window}; the file states {stated}"

    def _warnings(self) -> Iterator[str]:
        source, rope = self.source, self.rope
        if rope.is_scaled:
            yield f"the model is already scaled: {self.method.name} is applied on top of its frequencies"
        yield from scaling_warnings(rope, self.method, self.target)
        if source.sliding_window and source.architecture in GGUF_GLOBAL:
            yield "the RoPE of the sliding-window layers does not change"
        elif 0 < source.sliding_window < self.target:
            yield (
                f"sliding_window {source.sliding_window} does not change: in layers that have it, tokens "
                "farther apart do not attend to each other"
            )
        if self.gguf_rope.divisors:
            yield f"forks of llama.cpp that ignore {FREQS} (ik_llama.cpp) silently run this file unscaled"
        yield "transformers drops every RoPE scaling when it loads a GGUF file"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        source, after = self.source, self.frequencies()
        fields = source.file.fields
        before = {
            key: source.file.get(key, value) for key, value in self.keys.items() if key in fields and value
        }
        original = source.original_window
        return {
            "model": self.model,
            "architecture": source.architecture,
            "llama_cpp": LLAMA_CPP,
            "method": self.method.name,
            "factor": self.method.factor,
            "parameters": self.method.parameters(),
            "paper": self.method.paper,
            "original_max_position_embeddings": source.window,
            **({"original": original} if original else {}),
            "target": self.target,
            "rotary_dim": source.rotary_dim,
            "rope_theta": self.rope.rope_theta,
            "already_scaled": self.rope.is_scaled,
            "attention_factor_before": self.rope.carried_attention_factor,
            "attention_factor": after.attention_factor,
            "inv_freq_before": self.rope.inv_freq().tolist(),
            "inv_freq": after.inv_freq.tolist(),
            "metadata_before": before,
            "metadata_changes": dict(self.keys),
            "tensors": {name: None if data is None else data.tolist() for name, data in self.tensors.items()},
            "warnings": list(self.warnings),
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json_text(self.to_dict())

    @float32_on_cpu()
    def __str__(self) -> str:
        method, source = self.method, self.source
        before: dict[str, Any] = {
            key: source.file.fields[key].contents() for key in self.keys if key in source.file.fields
        }
        held = {
            name: tensor.data.tolist() for name, tensor in source.file.tensors.items() if name in self.tensors
        }
        after = dict(self.keys) | {
            name: data if data is None else data.tolist() for name, data in self.tensors.items()
        }
        after = {key: "absent" if value is None else value for key, value in after.items()}
        lines: list[str | Table] = [
            f"{printable(self.model)} ({source.architecture}): {source.window} -> {self.target} tokens",
            f"{method.name} ({method.paper}): factor={method.factor:g}{parameters_text(method)}",
            *self._original_length(),
            "",
            *bands_text(self.rope, self.frequencies(), method.factor),
            "",
            "GGUF",
            changes_table(before | held, after, {}, {}),
            f"supported by llama.cpp and programs built on it (source code of {LLAMA_CPP})",
        ]
        lines += [f"warning: {printable(warning)}" for warning in self.warnings]
        return as_text(lines, WIDTH)

    def __repr__(self) -> str:
        return f"GgufPlan({self.model}: {self.source.window} -> {self.target} tokens, {self.method.name})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan(
    model: str | os.PathLike[str],
    *,
    to: Length | None = None,
    method: str | Path | Method = "yarn",
    original: Length | None = None,
    revision: str | None = None,
    layers: str | None = None,
    **parameters: Any,
) -> GgufPlan:
    """Plan the extension of a GGUF file from its header."""
    if layers is not None:
        raise RopepatchError(
            f"{argument('layers')} does not apply to a GGUF file", hint=f"drop {argument('layers')}"
        )
    if revision is not None:
        raise RopepatchError(
            f"{argument('revision')} does not apply to a GGUF file", hint=f"drop {argument('revision')}"
        )
    if parameters and not isinstance(method, Method):
        check_method(str(method), parameters, arguments=("to", "method", "original"))
    source = GgufModel.find(os.fspath(model), original)
    found, target = method_for(source, method, parameters, to)
    found = found.fitted(source.window, target)
    if not isinstance(found, Scaling):
        raise RopepatchError(
            f"a GGUF file cannot contain {found.name}: it is a position remapping",
            hint="extend the safetensors checkpoint, or use another method",
        )
    if found.length_dependent:
        raise RopepatchError(
            f"a GGUF file cannot contain {found.name}: its frequencies depend on the length",
            hint=f"use a static method, e.g. {argument('method', 'yarn')}",
        )
    made = GgufPlan(source, found, target)
    check_numbers(made.keys)
    return made


def check_place(plan: GgufPlan, out: str | Path) -> Path:
    """Return the absolute path of a new file.

    Raises:
        RopepatchError: If the file exists, or its folder is missing or has too little space.
    """
    file = absent(out)
    if file.suffix.lower() != ".gguf":
        raise RopepatchError(
            f"{argument('out')} of a GGUF file must end in .gguf, got {out}",
            hint=argument("out", f"{out}.gguf"),
        )
    if not file.parent.is_dir():
        raise RopepatchError(f"no folder {file.parent}", hint=f"mkdir -p {file.parent}")
    check_space(
        "the file", file.parent, plan.source.file.num_bytes, hint="free some space, or use another folder"
    )
    return file


def extend(plan: GgufPlan, out: str | Path, progress: Progress | None = None) -> tuple[Path, str]:
    """Write the file of a plan, and compare it with the source before renaming it.

    Returns:
        The file, and a description of the comparison.

    Raises:
        RopepatchError: If the file exists or cannot be written, or the source has changed.
    """
    file = check_place(plan, out)
    source, keys, tensors = GgufModel.find(plan.model, plan.source.original), plan.keys, plan.tensors
    if source.rope != plan.rope or source.file.fields.keys() != plan.source.file.fields.keys():
        raise RopepatchError(f"{plan.model} changed since it was planned", hint="plan it again")
    try:
        with whole_file(file, new=True) as partial:
            source.file.copy(partial, keys, tensors, progress)
            written = GgufFile.open(partial)
            source.file.check_copy(written, keys, tensors)
            reloaded = GgufModel.of(written)
            if not same_frequencies(reloaded.gguf_rope.frequencies(reloaded.rotary_dim), plan.frequencies()):
                raise RopepatchError(f"{file} does not have the planned RoPE", hint="the file was deleted")
    except OSError as error:
        raise disk_error(error, file) from error
    kept = len(written.fields) - sum(value is not None for value in keys.values())
    same = len(written.tensors.keys() - tensors.keys())
    return file, f"{same} tensors and {kept} keys are byte-identical, {len(keys) + len(tensors)} changed"

"""Extend a GGUF file: the metadata and the table by which llama.cpp computes another rope."""

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
from ropepatch.model.gguf import BETAS, FACTORS, FREQS, LLAMA_CPP, GgufModel, Said, same_frequencies
from ropepatch.model.gguf_file import GgufFile, Keys, Tensors
from ropepatch.model.rotary import float32_on_cpu
from ropepatch.model.weights import Progress
from ropepatch.scaling import Scaling, make_scaling
from ropepatch.scaling.method import Method
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import Length


@dataclass(frozen=True, repr=False, eq=False)
class GgufPlan:
    """One extension of a GGUF file.

    Args:
        source: The model that is extended.
        method: What extends it.
        target: The context to reach, in tokens.
    """

    source: GgufModel
    method: Scaling
    target: int
    remapping: ClassVar[None] = None

    @property
    def scaling(self) -> Scaling:
        """What scales the rope."""
        return self.method

    @property
    def model(self) -> str:
        """The file as the user gave it."""
        return self.source.name

    @property
    def rope(self) -> Rope:
        """The rope now."""
        return self.source.rope

    @cached_property
    @float32_on_cpu()
    def said(self) -> Said:
        """What the new file says of its rope.

        Raises:
            RopepatchError: If llama.cpp cannot compute it in this architecture.
        """
        source, scaling = self.source, self.method
        if (way := source.find_way(scaling)) is not None:
            return way
        names = "yarn", "linear", "ntk"
        tried = [make_scaling(name, factor=scaling.factor) for name in names]
        can = [
            one.name for one in tried if (one.composes or not self.rope.is_scaled) and source.find_way(one)
        ]
        methods = " or ".join(argument("method", name) for name in can)
        raise RopepatchError(
            f"llama.cpp's {source.architecture} cannot compute this {scaling.name}: it reads freq_base, "
            f"linear and YaRN with betas of {BETAS[0]:g} and {BETAS[1]:g}",
            hint=f"{methods}, without further parameters"
            if can
            else "extend the checkpoint for another engine",
        )

    @cached_property
    def tensors(self) -> Tensors:
        """The tensors that change; None is one that is left out."""
        here = self.source.file.tensors.keys() & {*FACTORS, FREQS} if self.source.tables else ()
        names = FACTORS if self.said.kind == "longrope" else (FREQS,)
        table = np.array(self.said.divisors, dtype=np.float32)
        return dict.fromkeys(here) | (dict.fromkeys(names, table) if self.said.divisors else {})

    @cached_property
    def keys(self) -> Keys:
        """The metadata that change; None is a key that is left out."""
        said, plain = self.said, self.said.kind in ("none", "longrope")
        named = said.kind != "none" or said.attn_factor != 1 or said.divisors
        scaling: dict[str, int | float | str | None] = {
            "type": said.kind if named else None,
            "factor": None if plain else float(said.factor),
            "original_context_length": None if plain else said.original or None,
            "attn_factor": None if said.attn_factor == 1 else said.attn_factor,
            **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        }
        source = self.source
        keys: dict[str, int | float | str | None] = {source.key("context_length"): self.target}
        keys[source.key("rope.freq_base")] = said.base
        keys |= {source.key(f"rope.scaling.{name}"): value for name, value in scaling.items()}
        keys[source.key("rope.scale_linear")] = None
        fields = source.file.fields
        return {
            key: value
            for key, value in keys.items()
            if (key in fields if value is None else key not in fields or source.file.get(key, value) != value)
        }

    def frequencies(self) -> Frequencies:
        """The frequencies that llama.cpp computes from the new file."""
        return self.said.frequencies(self.source.rotary_dim)

    @cached_property
    @float32_on_cpu()
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before going on, a sentence each."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        source, rope = self.source, self.rope
        if source.original_window:
            stated = source.file.get(source.key("context_length"))
            yield f"L = {source.window} is given (original); the file says {stated}"
        if rope.is_scaled:
            yield f"the model is already scaled: {self.method.name} is applied on top of its frequencies"
        yield from scaling_warnings(rope, self.method, self.target)
        if source.sliding_window and source.architecture in GGUF_GLOBAL:
            yield "the rope of the sliding-window layers stays"
        elif 0 < source.sliding_window < self.target:
            yield (
                f"sliding_window = {source.sliding_window} stays: in the layers that have it, tokens farther "
                "apart never attend to each other"
            )
        if self.said.divisors:
            yield (
                f"a fork of llama.cpp that loads {FREQS} and does not use it (ik_llama.cpp) runs this file "
                "unscaled, without a word"
            )
        yield "transformers' own reader of GGUF drops every scaling"

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data."""
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
        """`to_dict` as text."""
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
            "",
            *bands_text(self.rope, self.frequencies(), method.factor),
            "",
            "GGUF",
            changes_table(before | held, after, {}, {}),
            f"read by llama.cpp and what is built on it; by the sources of {LLAMA_CPP}",
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
    """Plan the extension of a GGUF file; its header alone is read."""
    if layers is not None:
        raise RopepatchError(
            f"{model} is a file, in which no layers are chosen", hint=f"leave {argument('layers')} out"
        )
    if revision is not None:
        raise RopepatchError(
            f"{model} is a file, which has no revisions", hint=f"leave {argument('revision')} out"
        )
    if parameters and not isinstance(method, Method):
        check_method(str(method), parameters, arguments=("to", "method", "original"))
    source = GgufModel.find(os.fspath(model), original)
    found, target = method_for(source, method, parameters, to)
    found = found.fitted(source.window, target)
    if not isinstance(found, Scaling) or getattr(found, "queries", None):
        what = "query weights change, too" if isinstance(found, Scaling) else "it is a remapping of positions"
        raise RopepatchError(
            f"a GGUF file cannot hold {found.name}: {what}",
            hint="extend the checkpoint, or take another method",
        )
    if found.length_dependent:
        raise RopepatchError(
            f"a GGUF file holds one table of frequencies, and {found.name} changes it with the length",
            hint="take a static method, yarn say",
        )
    made = GgufPlan(source, found, target)
    _ = made.said
    return made


def check_place(plan: GgufPlan, out: str | Path) -> Path:
    """Refuse a file that exists, or for which there is no folder or no room; its absolute path."""
    file = absent(out)
    if file.suffix.lower() != ".gguf":
        raise RopepatchError(f"{argument('out')} of a GGUF file ends in .gguf, got {out}", hint=f"{out}.gguf")
    if not file.parent.is_dir():
        raise RopepatchError(f"no folder {file.parent}", hint="make it first")
    check_space(
        "the file", file.parent, plan.source.file.num_bytes, hint="make room, or choose another folder"
    )
    return file


def extend(plan: GgufPlan, out: str | Path, progress: Progress | None = None) -> tuple[Path, str]:
    """Write the file of a plan, read back and compared before it gets its name; the source stays as it is.

    Returns:
        The file, and what the comparison found.

    Raises:
        RopepatchError: If the file exists or cannot be written, or the source has changed.
    """
    file = check_place(plan, out)
    source, keys, tensors = GgufModel.find(plan.model, plan.source.original), plan.keys, plan.tensors
    if source.rope != plan.rope or source.file.fields.keys() != plan.source.file.fields.keys():
        raise RopepatchError(f"{plan.model} has changed since the plan was made", hint="make the plan again")
    try:
        with whole_file(file, new=True) as partial:
            source.file.copy(partial, keys, tensors, progress)
            written = GgufFile.open(partial)
            source.file.check_copy(written, keys, tensors)
            judged = GgufModel(written)
            if not same_frequencies(judged.said.frequencies(judged.rotary_dim), plan.frequencies()):
                raise RopepatchError(f"{file} says another rope than planned", hint="nothing was kept")
    except OSError as error:
        raise disk_error(error, file) from error
    kept = len(written.fields) - sum(value is not None for value in keys.values())
    same = len(written.tensors.keys() - tensors.keys())
    return file, f"{same} tensors and {kept} keys equal byte for byte, {len(keys) + len(tensors)} changed"

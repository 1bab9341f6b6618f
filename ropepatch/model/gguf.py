"""The model of a GGUF file: its RoPE as llama.cpp computes it, and the metadata for a scaled one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropepatch.errors import RopepatchError, plain
from ropepatch.model.architectures import (
    GGUF_FACTORS,
    GGUF_FREQS,
    GGUF_GLOBAL,
    GGUF_KNOWN,
    GGUF_LOCAL_ROPE,
    GGUF_ROPE_SWITCH,
    GGUF_SHARED_FACTOR,
    GGUF_YARN_KEYS,
)
from ropepatch.model.config import StatedRope
from ropepatch.model.gguf_file import GgufFile
from ropepatch.scaling import Scaling, YaRN
from ropepatch.scaling.powers import AdjustedBase, NTKAware, Unscaled, ntk_theta
from ropepatch.scaling.ramps import BETAS, pair_turning, yarn_temperature
from ropepatch.scaling.rope import ORIGINAL, Frequencies, Method, Rope, divisors
from ropepatch.settings import Length

LLAMA_CPP = "b11434"  # the version whose source was read
FREQS = "rope_freqs.weight"
FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# By architecture
TABLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GGUF_FREQS, (FREQS,)),
    **dict.fromkeys(GGUF_FACTORS, FACTORS),
}
CLOSE = 1e-6  # numbers of the file are float32


@dataclass(frozen=True)
class GgufRope:
    """The RoPE parameters of a GGUF file.

    Args:
        base: `rope.freq_base`.
        kind: `rope.scaling.type`.
        factor: The divisor of positions; for YaRN that of slow pairs.
        original: The original context length that YaRN uses, in tokens.
        attn_factor: Multiplies cos and sin in addition to YaRN's own factor.
        betas: YaRN's betas; a file can state others only for `GGUF_YARN_KEYS`.
        divisors: The divisors of the frequencies: [D/2], fastest first; empty for none.
        switches: Whether a server whose context is at most `original` uses other divisors, which stay.
    """

    base: float
    kind: str = "none"
    factor: float = 1.0
    original: int = 0
    attn_factor: float = 1.0
    betas: tuple[float, float] = BETAS
    divisors: tuple[float, ...] = ()
    switches: bool = False

    def frequencies(self, rotary_dim: int) -> Frequencies:
        """Compute the frequencies as llama.cpp does."""
        pairs, a = np.arange(rotary_dim // 2), self.attn_factor
        fast = self.base ** (-2 * pairs / rotary_dim) / np.array(self.divisors or 1.0)
        inv_freq = fast / (1.0 if self.kind == "none" else self.factor)
        if self.kind == "yarn":
            low, high = (
                pair_turning(beta, rotary_dim, self.base, self.original)
                for beta in self.betas
            )
            low, high = max(0, math.floor(low)), min(rotary_dim - 1, math.ceil(high))
            ramp = np.clip((pairs - low) / max(0.001, high - low), 0, 1)
            inv_freq = fast * (1 - ramp) + inv_freq * ramp
            a *= yarn_temperature(max(1.0, self.factor))
        return Frequencies(torch.tensor(inv_freq, dtype=torch.float32, device="cpu"), a)


@dataclass(frozen=True, eq=False)
class GgufModel(StatedRope):
    """The model of a GGUF file.

    Args:
        name: The path that the user gave.
        architecture: The architecture, as llama.cpp names it.
        rotary_dim: D, the number of dimensions of a head that rotate.
        length: The context length that it states, in tokens.
        gguf_rope: The RoPE parameters that it states.
        sliding_window: The sliding window in tokens; 0 if there is none.
        original: The original context length that the user gave instead.
        file: The open file.
    """

    name: str
    architecture: str
    rotary_dim: int
    length: int
    gguf_rope: GgufRope
    sliding_window: int
    original: Length | None
    file: GgufFile
    revision = None
    file_name = "GGUF"
    layer_type = None
    local_rope = None

    @classmethod
    def find(cls, path: str | Path, original: Length | None = None) -> GgufModel:
        """Read the header of a file."""
        return cls.of(GgufFile.open(Path(path).expanduser()), original)

    @classmethod
    def of(cls, file: GgufFile, original: Length | None = None) -> GgufModel:
        """Read the RoPE of an open file.

        Raises:
            RopepatchError: If the architecture's graph in llama.cpp was not examined, or a key is invalid.
        """
        architecture = _architecture(file)
        rotary_dim = _rotary_dim(file, architecture)
        rope = _stated(file, architecture, rotary_dim)
        length = file.get(f"{architecture}.context_length")
        if rope.kind != "none":
            key = f"{architecture}.rope.scaling.original_context_length"
            length = max(length, round(rope.factor * file.get(key, 0)))
        return cls(
            name=str(file.path),
            architecture=architecture,
            rotary_dim=rotary_dim,
            length=length,
            gguf_rope=rope,
            sliding_window=file.get(f"{architecture}.attention.sliding_window", 0),
            original=original,
            file=file,
        )

    @property
    def config(self) -> GgufModel:
        """The model itself: a GGUF file contains its configuration."""
        return self

    @property
    def model_type(self) -> str:
        """The architecture, as llama.cpp names it."""
        return self.architecture

    @property
    def stated_length(self) -> int:
        """The context length of the file, in tokens."""
        return int(self.file.get(self.key("context_length")))

    def held(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the current values of some metadata and tensors, where set."""
        fields, tensors = self.file.fields, self.file.tensors
        values = {key: fields[key].contents() for key in keys if key in fields}
        tables = {key: tensors[key].data.tolist() for key in keys if key in tensors}
        return values | tables

    def key(self, name: str) -> str:
        """Return the full name of a key."""
        return f"{self.architecture}.{name}"

    @property
    def rotates(self) -> bool:
        """Whether layers that attend to the whole context use RoPE."""
        if self.architecture in GGUF_ROPE_SWITCH:
            return bool(self.file.get(self.key("rope.scaling.finetuned"), True))
        layers = GGUF_LOCAL_ROPE.get(self.architecture, 0)
        predicting = self.file.get(self.key("nextn_predict_layers"), 0)
        return (
            not layers or self.file.get(self.key("block_count")) != layers + predicting
        )

    @property
    def keeps_original(self) -> bool:
        """Whether `original_context_length` also says where divisors or queries change."""
        scale = self.file.get(self.key("attention.temperature_scale"), 0.0)
        return self.gguf_rope.switches or scale != 0

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the divisor tensors that llama.cpp reads in the architecture."""
        return TABLES.get(self.architecture, ())

    @cached_property
    def tied_yarn(self) -> dict[str, Any] | None:
        """A YaRN that no key or table of the file can scale further; one with a larger factor replaces it."""
        rope = self.gguf_rope
        is_yarn = rope.kind == "yarn" and rope.original < self.length
        if self.tables or not is_yarn or rope.attn_factor != 1:
            return None
        return {"factor": rope.factor, ORIGINAL: rope.original}

    @cached_property
    def stated_rope(self) -> Rope:
        """The RoPE parameters of the file."""
        d, base = self.rotary_dim, self.gguf_rope.base
        if self.tied_yarn:
            return Rope(d, base, self.gguf_rope.original)
        now = self.gguf_rope.frequencies(d)
        if same_frequencies(GgufRope(base).frequencies(d), now):
            return Rope(d, base, self.length)
        carried = tuple(now.inv_freq.tolist())
        return Rope(d, base, self.length, carried, now.attention_factor)

    def candidates(
        self, scaling: Scaling, scaled: Frequencies, by_options: bool
    ) -> Iterator[GgufRope]:
        """Yield parameters with which llama.cpp may compute a scaling, the most widely supported first."""
        rope, stated = self.rope, self.gguf_rope
        if isinstance(scaling, Unscaled):
            yield stated
        elif not stated.switches:
            yield from self._by_keys(scaling, scaled, by_options)
        if self.tables:
            listed = stated.switches or self.tables == FACTORS
            window = rope.original_max_position_embeddings
            table = divisors(rope.unscaled(), scaled.inv_freq).float()
            yield GgufRope(
                rope.rope_theta,
                "longrope" if listed else "none",
                original=stated.original if self.keeps_original else window,
                attn_factor=_whole(scaled.attention_factor),
                divisors=tuple(table.tolist()),
                switches=stated.switches,
            )

    def _by_keys(
        self, scaling: Scaling, scaled: Frequencies, by_options: bool
    ) -> Iterator[GgufRope]:
        rope, stated = self.rope, self.gguf_rope
        if scaling.name == "linear" and stated.kind in ("none", "linear"):
            yield replace(stated, kind="linear", factor=stated.factor * scaling.factor)
        if isinstance(scaling, NTKAware):
            yield replace(stated, base=ntk_theta(rope, scaling.factor))
        if isinstance(scaling, AdjustedBase):
            yield replace(stated, base=float(scaling.rope_theta))
        if not rope.is_scaled:
            s, window = scaling.factor, rope.original_max_position_embeddings
            a = _whole(scaled.attention_factor / yarn_temperature(s))
            yarn = GgufRope(rope.rope_theta, "yarn", s, window, a)
            has_betas = by_options or self.architecture in GGUF_YARN_KEYS
            if has_betas and isinstance(scaling, YaRN):
                yarn = replace(yarn, betas=(scaling.beta_fast, scaling.beta_slow))
            yield yarn

    def find_equivalent(
        self, scaling: Method, by_options: bool = False
    ) -> GgufRope | None:
        """Return the first parameters that reproduce a scaling's frequencies; None if none do.

        Args:
            scaling: The scaling; a GGUF file contains no other method.
            by_options: Whether llama.cpp gets them as options, which also set YaRN's betas.
        """
        if not isinstance(scaling, Scaling):
            return None
        wanted = scaling.frequencies(self.rope)
        for candidate in self.candidates(scaling, wanted, by_options):
            computed = candidate.frequencies(self.rotary_dim)
            if same_frequencies(computed, wanted) and not self._changes(candidate):
                return candidate
        return None

    def _changes(self, rope: GgufRope) -> bool:
        """Return whether parameters would change more than the RoPE of global layers."""
        stated = self.gguf_rope
        if self.keeps_original and rope.original != stated.original:
            return True
        is_rebased = rope.base != stated.base
        has_local_base = self.key("rope.freq_base_swa") in self.file.fields
        if self.architecture not in GGUF_GLOBAL or not self.sliding_window:
            return is_rebased and has_local_base
        if self.architecture in GGUF_SHARED_FACTOR:
            return rope.attn_factor != stated.attn_factor
        return is_rebased and not has_local_base


def _architecture(file: GgufFile) -> str:
    architecture: str = file.get("general.architecture", "")
    if architecture not in GGUF_KNOWN:
        raise RopepatchError(
            f"{file.path}: it is not known which scalings llama.cpp supports for {architecture!r}",
            hint=f"known are {', '.join(sorted(GGUF_KNOWN))}",
        )
    return architecture


def _rotary_dim(file: GgufFile, architecture: str) -> int:
    size: int = file.get(f"{architecture}.rope.dimension_count", 0)
    size = size or file.get(f"{architecture}.attention.key_length", 0)
    if size == 0:
        hidden = file.get(f"{architecture}.embedding_length")
        size = hidden // max(1, file.get(f"{architecture}.attention.head_count"))
    if not 0 < size <= 4096 or size % 2:
        raise RopepatchError(
            f"{file.path}: {size} dimensions rotate, expected an even number to 4096"
        )
    return size


def _stated(file: GgufFile, architecture: str, rotary_dim: int) -> GgufRope:
    """Return the RoPE parameters of a file."""
    get, scaling = file.get, f"{architecture}.rope.scaling"
    kind = get(f"{scaling}.type", "linear")
    old_factor = get(f"{architecture}.rope.scale_linear", 0.0)
    factor = get(f"{scaling}.factor", 0.0) or old_factor or 1.0
    length = get(f"{architecture}.context_length")
    original = get(f"{scaling}.original_context_length", 0) or length
    base = get(f"{architecture}.rope.freq_base", 10000.0)
    attn_factor = get(f"{scaling}.attn_factor", 1.0)
    multiplier = get(f"{scaling}.yarn_log_multiplier", 0.0)
    betas = fast, slow = BETAS
    if architecture in GGUF_YARN_KEYS:
        fast = get(f"{scaling}.yarn_beta_fast", fast)
        betas = fast, get(f"{scaling}.yarn_beta_slow", slow)
    elif multiplier:
        raise RopepatchError(
            f"{file.path} ties its softmax scale to the scaling it has",
            hint="extend the base checkpoint",
        )
    numbers = factor, attn_factor, original, base - 1, *betas, 1 + multiplier
    kinds = "none", "linear", "yarn", "longrope"
    if kind not in kinds or not all(0 < number < math.inf for number in numbers):
        raise RopepatchError(
            f"{file.path} scales RoPE by {kind} with factor {factor:g}, original_context_length {original}, "
            f"attn_factor {attn_factor:g}, freq_base {plain(base)}",
            hint="llama.cpp knows none, linear, yarn and longrope, and positive numbers",
        )
    names = TABLES.get(architecture, ())
    if kind == "longrope" and names:
        names = FACTORS
    tables = [file.tensors[name].data for name in names if name in file.tensors]
    pairs = rotary_dim // 2
    if any(table.shape != (pairs,) or not (table > 0).all() for table in tables):
        raise RopepatchError(
            f"{file.path}: {names[0]} must hold {pairs} positive numbers"
        )
    switches = not all(np.array_equal(table, tables[0]) for table in tables)
    if switches and (factor != 1 or kind == "yarn" or original >= length):
        raise RopepatchError(
            f"{file.path} divides its frequencies by other numbers beyond {original} tokens (longrope)",
            hint="extend the checkpoint with another method and convert that",
        )
    kind = "none" if kind == "linear" and factor == 1 else kind
    if kind == "yarn" and factor > 1:
        attn_factor /= yarn_temperature(factor, multiplier)
    held = tuple(tables[0].tolist()) if tables else ()
    return GgufRope(base, kind, factor, original, attn_factor, betas, held, switches)


def _whole(attn_factor: float) -> float:
    """Return 1 for a factor that differs from it by rounding only."""
    return 1.0 if math.isclose(attn_factor, 1, rel_tol=CLOSE) else attn_factor


def same_frequencies(one: Frequencies, other: Frequencies) -> bool:
    """Return whether two sets of frequencies agree up to float32 rounding."""
    near = np.allclose(one.inv_freq, other.inv_freq, rtol=CLOSE, atol=1e-20)
    return near and math.isclose(
        one.attention_factor, other.attention_factor, rel_tol=CLOSE
    )

"""The rope type, and whether transformers can compute it."""

from __future__ import annotations

from collections.abc import Iterator

from ropepatch.model.checks.case import Block, Case, positive
from ropepatch.model.checks.findings import CONFIG, Finding, Key, shown
from ropepatch.model.checks.interpretation import configured, keeps_no_head_dim
from ropepatch.model.config import is_known
from ropepatch.model.mapped import is_mapped
from ropepatch.model.record_file import NEEDS_ROPEPATCH

KNOWN_TYPES = {
    *("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
    *("axial", "ntk_alpha", "mrope", "xdrope"),  # of single architectures
}
HEAD_DIM_TYPES = ("yarn", "longrope", "dynamic")
REMEDIES = {
    "su": 'write "longrope", its name today',
    "ntk": "NTK-aware scaling is a larger rope_theta: write that, without a scaling",
}


def unknown_types(case: Case, block: Block) -> Iterator[Finding]:
    """A type that readers do not know, is missing, or keeps its own factor from being used."""
    names = [name for name in ("rope_type", "type") if name in block.values] or ["rope_type"]
    kind, shown_kind = block.kind, shown(block.kind)
    scaling = [block.at(name) for name in ("factor", "short_factor", "long_factor") if block.values.get(name)]
    if kind is None and scaling:
        yield block.at("rope_type").error(
            "type-missing",
            f"{scaling[0]} is there, but no rope_type says what it is for",
            "transformers 5 silently leaves the rope unscaled, older ones refuse to load",
            "write the rope_type that the model was made with",
        )
    elif kind == "default" and scaling and block.values.get("factor") != 1:
        yield block.at("rope_type").warning(
            "scaling-ignored",
            f"rope_type is default, so {scaling[0]} = {shown(scaling[0].value)} is ignored",
            "the rope is not scaled, whatever the factor says",
            "write the rope_type that the model was made with, or drop the factor",
            value=shown_kind,
        )
    elif kind is not None and kind not in KNOWN_TYPES:
        lists = all(isinstance(block.values.get(name), list) for name in ("short_factor", "long_factor"))
        edits = tuple(block.at(name).set("longrope") for name in names) if kind == "su" and lists else ()
        yield block.at(names[0]).error(
            "type-unknown",
            f"rope_type {shown_kind} is none that transformers knows",
            "transformers warns, then ends in a KeyError when it builds the model",
            REMEDIES.get(kind, f"one of {', '.join(sorted(KNOWN_TYPES))}"),
            value=shown_kind,
            mend=edits,
            meant=edits or None,
        )


def open_head_dim(case: Case) -> Iterator[Finding]:
    """A head size that is left open, under a type that computes with it."""
    kind = next((block.kind for block in case.blocks if block.kind in HEAD_DIM_TYPES), None)
    if kind is None or not keeps_no_head_dim(case.raw):
        return
    hidden, heads = (positive(case.stated.get(key)) for key in ("hidden_size", "num_attention_heads"))
    key, value = case.at("head_dim"), "null" if "head_dim" in case.stated else ""
    edits = (key.set(int(hidden // heads)),) if hidden and heads and hidden >= heads else ()
    yield key.error(
        "head-dim-null",
        f"head_dim is {value or 'missing'} under rope_type {kind}",
        "transformers 5 computes with it and ends in a TypeError",
        "write hidden_size / num_attention_heads, which is what null stands for",
        value=value,
        mend=edits,
        meant=edits or None,
    )


def refused(case: Case) -> Iterator[Finding]:
    """What transformers does not read at all, whatever the reason."""
    model_type = Key(CONFIG, ("model_type",), case.raw.get("model_type"))
    if model_type.value == NEEDS_ROPEPATCH:
        yield model_type.remark(
            "encoding-swapped",
            "ropepatch has put another position encoding in the place of the rope",
            "stock transformers refuses it on purpose; the rope that config.json states is not the model's",
            "load it by ropepatch.load, or use the checkpoint that it was made from",
            value=NEEDS_ROPEPATCH,
        )
    elif is_mapped(case.raw):
        yield model_type.remark(
            "attention-map",
            "its distances are mapped, by the code beside its weights",
            "transformers refuses it without that code on purpose; no other engine has such an attention",
            "load it with trust_remote_code=True, once you have read the code, or by ropepatch.load",
        )
    elif not is_known(model_type.value):
        shown_type = shown(model_type.value)
        yield model_type.remark(
            "not-in-transformers",
            f"transformers has no model_type {shown_type}",
            "only what config.json says could be checked, not what is computed from it",
            "none needed",
            value=shown_type,
        )
    elif isinstance(reason := configured(case.raw), str):
        why, remedy = "the checkpoint does not load", "mend what the message names"
        yield Finding("transformers-refuses", "error", reason, why, remedy)

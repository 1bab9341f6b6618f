"""The rope type, and whether transformers can compute it."""

from __future__ import annotations

from collections.abc import Iterator

from ropepatch.doctor.case import Block, Case, positive
from ropepatch.doctor.findings import Finding, Mend, shown
from ropepatch.doctor.interpretation import configured, keeps_no_head_dim
from ropepatch.model.config import is_known
from ropepatch.model.record_file import NEEDS_ROPEPATCH

KNOWN_TYPES = {
    *("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
    *("axial", "ntk_alpha", "mrope", "xdrope"),  # of single architectures
}
HEAD_DIM_TYPES = ("yarn", "longrope", "dynamic")


def rope_types_known(case: Case) -> Iterator[Finding]:
    """A type that readers do not know, is missing, or keeps its own factor from being used."""
    for block in case.blocks:
        kind = block.kind
        scaling = [key for key in ("factor", "short_factor", "long_factor") if block.values.get(key)]
        if kind is None and scaling:
            yield Finding(
                "type-missing",
                "error",
                f"{block.key(scaling[0])} is there, but no rope_type says what it is for",
                "transformers 5 silently leaves the rope unscaled, older ones refuse to load",
                "write the rope_type that the model was made with",
                key=block.key("rope_type"),
            )
        elif kind == "default" and scaling and block.values.get("factor") != 1:
            yield Finding(
                "scaling-ignored",
                "warning",
                f"rope_type is default, so {block.key(scaling[0])} = "
                f"{shown(block.values[scaling[0]])} is ignored",
                "the rope is not scaled, whatever the factor says",
                "write the rope_type that the model was made with, or drop the factor",
                key=block.key("rope_type"),
                value=shown(kind),
            )
        elif kind is not None and kind not in KNOWN_TYPES:
            yield _unknown_type(case, block)


def _unknown_type(case: Case, block: Block) -> Finding:
    lists = all(isinstance(block.values.get(key), list) for key in ("short_factor", "long_factor"))
    is_su = block.kind == "su" and lists
    names = [key for key in ("rope_type", "type") if key in block.values]
    edits = tuple(block.edit(key, "longrope") for key in names) if is_su else ()
    remedies = {
        "su": 'write "longrope", its name today',
        "ntk": "NTK-aware scaling is a larger rope_theta: write that, without a scaling",
    }
    return Finding(
        "type-unknown",
        "error",
        f"rope_type {shown(block.kind)} is none that transformers knows",
        "transformers warns, then ends in a KeyError when it builds the model",
        remedies.get(block.kind or "", f"one of {', '.join(sorted(KNOWN_TYPES))}"),
        key=block.key(names[0]),
        value=shown(block.kind),
        mend=Mend(edits) if edits else None,
        meant=edits or None,
    )


def open_head_dim(case: Case) -> Iterator[Finding]:
    """A head size that is left open, under a type that computes with it."""
    kind = next((block.kind for block in case.blocks if block.kind in HEAD_DIM_TYPES), None)
    if kind is None or not keeps_no_head_dim(case.raw):
        return
    hidden, heads = (positive(case.stated.get(key)) for key in ("hidden_size", "num_attention_heads"))
    edits = (case.edit("head_dim", int(hidden // heads)),) if hidden and heads and hidden >= heads else ()
    yield Finding(
        "head-dim-null",
        "error",
        f"head_dim is {'null' if 'head_dim' in case.stated else 'missing'} under rope_type {kind}",
        "transformers 5 computes with it and ends in a TypeError",
        "write hidden_size / num_attention_heads, which is what null stands for",
        key=case.key("head_dim"),
        value="null" if "head_dim" in case.stated else "",
        mend=Mend(edits) if edits else None,
        meant=edits or None,
    )


def refused(case: Case) -> Iterator[Finding]:
    """What transformers does not read at all, whatever the reason."""
    if case.raw.get("model_type") == NEEDS_ROPEPATCH:
        yield Finding(
            "encoding-swapped",
            "remark",
            "ropepatch has put another position encoding in the place of the rope",
            "stock transformers refuses it on purpose; the rope that config.json states is not the model's",
            "load it by ropepatch.load, or use the checkpoint that it was made from",
            key="model_type",
            value=NEEDS_ROPEPATCH,
        )
    elif not is_known(case.raw.get("model_type")):
        yield Finding(
            "not-in-transformers",
            "remark",
            f"transformers has no model_type {shown(case.raw.get('model_type'))}",
            "only what config.json says could be checked, not what is computed from it",
            "none needed",
            key="model_type",
            value=shown(case.raw.get("model_type")),
        )
    elif isinstance(reason := configured(case.raw), str):
        yield Finding(
            "transformers-refuses",
            "error",
            reason,
            "the checkpoint does not load",
            "mend what the message names",
        )

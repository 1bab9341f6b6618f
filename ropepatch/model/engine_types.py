"""Which engines support RoPE scaling of which architecture, from the generated `engine_types.json`."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

from ropepatch.files import PACKAGE, parse_json, read_text

FILE = (
    PACKAGE / "model" / "engine_types.json"
)  # from eval/results/engine-types.json, by docs/tables.py
OTHERS = "*"  # all other rope types
TESTED = "default", "linear", "yarn", "llama3", "longrope"
ABSENT, NOT_KNOWN = "absent", "not known"


class Found(NamedTuple):
    """The support of a rope type for an architecture in an engine.

    Args:
        how: `run` if small random models were run in the engine, `read` if its source was read, else None.
        verdict: `right`, `unscaled`, `refused`, `another rope`, `absent` or `not known`.
    """

    how: Literal["run", "read"] | None
    verdict: str


def found(engine: str, whole: str, text: str, rope_type: str) -> Found:
    """Look up whether an engine supports a rope type.

    Args:
        engine: transformers 4.x, vLLM, SGLang or mlx-lm.
        whole: The architecture, as transformers names it.
        text: The architecture of its language model; the same for a text-only model.
        rope_type: The rope type in config.json.
    """
    if not may_have(engine, whole):
        return Found("read", ABSENT)
    rows = _rows(engine)
    how, verdicts = rows.get(whole if whole == text else f"{whole}/{text}") or rows.get(
        text, (None, {})
    )
    verdict = NOT_KNOWN
    if (
        rope_type in TESTED or len({*verdicts} - {"default"}) == 1
    ):  # or all scalings share one verdict
        verdict = verdicts.get(rope_type) or verdicts.get(OTHERS, NOT_KNOWN)
    certain = (
        whole == text or verdict != ABSENT
    )  # it may exist as a part of the multimodal model only
    return (
        Found(how, verdict)
        if certain and verdict != NOT_KNOWN
        else Found(None, NOT_KNOWN)
    )


def may_have(engine: str, model_type: str) -> bool:
    """Return whether an engine has an architecture; True if its architectures are not listed."""
    types = _facts()[engine].get("types")
    return types is None or model_type in types.split()


def needing_older_keys(whole: str, text: str) -> list[str]:
    """Return the engines that are known to run an architecture without parsing its `rope_parameters`."""
    engines = []
    if may_have("transformers 4.x", whole) and may_have("transformers 4.x", text):
        engines.append("transformers 4.x")
    newer = _facts()["mlx-lm"]["new_keys"].split()
    was_tried = found("mlx-lm", whole, text, "default").verdict not in (
        ABSENT,
        NOT_KNOWN,
    )
    if was_tried and whole not in newer and text not in newer:
        engines.append("mlx-lm")
    return engines


def was_run(engine: str) -> bool:
    """Return whether small random models were run in an engine."""
    return any(how == "run" for how, *_ in _facts().get(engine, {"rows": []})["rows"])


@cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = parse_json(read_text(FILE))
    return facts


@cache
def _rows(engine: str) -> dict[str, tuple[Any, dict[str, str]]]:
    """How the verdicts were obtained, and the verdicts by rope type, for every architecture."""
    return {
        name: (how, verdicts)
        for how, verdicts, names in _facts()[engine]["rows"]
        for name in names.split()
    }

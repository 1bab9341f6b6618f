"""Which engines read the scaling of which architecture: what `engine_types.json` says, which is generated."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

from ropepatch.files import PACKAGE, parse_json, read_text

FILE = PACKAGE / "model" / "engine_types.json"  # from eval/results/engine-types.json, by docs/tables.py
OTHERS = "*"  # the rope types that are not named
ASKED = "default", "linear", "yarn", "llama3", "longrope"
ABSENT, NOT_KNOWN = "absent", "not known"


class Found(NamedTuple):
    """What is known of an engine, an architecture and a rope type.

    Args:
        how: Small random models were run in it, or its sources were read; None where it is not known.
        verdict: `right`, `unscaled`, `refused`, `another rope`, `absent` or `not known`.
    """

    how: Literal["run", "read"] | None
    verdict: str


def found(engine: str, whole: str, text: str, rope_type: str) -> Found:
    """What an engine makes of a rope type.

    Args:
        engine: transformers 4.x, vLLM, SGLang or mlx-lm.
        whole: The architecture, in transformers' words.
        text: That of its language model; the same where it neither sees nor hears.
        rope_type: As config.json names it.
    """
    if not may_have(engine, whole):
        return Found("read", ABSENT)
    rows = _rows(engine)
    how, verdicts = rows.get(whole if whole == text else f"{whole}/{text}") or rows.get(text, (None, {}))
    verdict = NOT_KNOWN
    if rope_type in ASKED or len({*verdicts} - {"default"}) == 1:  # or all scalings share their fate
        verdict = verdicts.get(rope_type) or verdicts.get(OTHERS, NOT_KNOWN)
    own = whole == text or verdict != ABSENT  # as a part it may be there all the same
    return Found(how, verdict) if own and verdict != NOT_KNOWN else Found(None, NOT_KNOWN)


def may_have(engine: str, model_type: str) -> bool:
    """Whether an engine has an architecture, as far as its types are listed."""
    types = _facts()[engine].get("types")
    return types is None or model_type in types.split()


def needing_older_keys(whole: str, text: str) -> list[str]:
    """The engines that have an architecture and do not look for its rope in `rope_parameters`."""
    parts = {whole, text}
    older = {"transformers 4.x": parts, "mlx-lm": {whole}}
    newer = {*_facts()["mlx-lm"]["new_keys"].split()}
    return [
        engine
        for engine, needed in older.items()
        if all(may_have(engine, one) for one in needed) and not (engine == "mlx-lm" and parts & newer)
    ]


def was_run(engine: str) -> bool:
    """Whether small random models were run in an engine."""
    return any(how == "run" for how, *_ in _facts().get(engine, {"rows": []})["rows"])


@cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = parse_json(read_text(FILE))
    return facts


@cache
def _rows(engine: str) -> dict[str, tuple[Any, dict[str, str]]]:
    """How and what is known, by architecture."""
    return {
        name: (how, verdicts) for how, verdicts, names in _facts()[engine]["rows"] for name in names.split()
    }

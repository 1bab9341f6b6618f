"""Attention maps: whether the code beside a checkpoint is ours, and whether anybody would run it.

The code is read, never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ropepatch.attention import make_map
from ropepatch.errors import RopepatchError
from ropepatch.extension.map_code import GENERATE, auto_map, map_code, other_code, sha256
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import CONFIG, Finding, Key
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.mapped import CODE, KEY, base_type, is_mapped, saved_map, without_map
from ropepatch.model.rotary import find_rotary
from ropepatch.model.source import check_inside

AGAIN = "copy it again from where the checkpoint came from, or write the checkpoint again"
PLAIN = "it would be read by the distances as they are, beyond those that it was trained on"


def map_findings(case: Case) -> Iterator[Finding]:
    """What is wrong with an attention map and its code."""
    key = Key(CONFIG, (KEY,), case.raw.get(KEY))
    if not is_mapped(case.raw):
        if key.value is not None:
            yield key.error(
                "map-not-read",
                f"config.json has a map, and the model_type {case.model_type}, whose classes know of none",
                f"transformers loads it without a word: {PLAIN}",
                "write the model_type that the checkpoint came with",
            )
        return
    try:
        described = saved_map(case.raw)
        distances = make_map(described["name"], **described["parameters"])
        distances.fitted(described["window"], described["target"])
    except RopepatchError as error:
        yield key.error("map-unknown", str(error), "nothing loads it", AGAIN)
        return
    try:
        ours = _ours(case)
    except (RopepatchError, KeyError) as error:
        named = Key(CONFIG, ("model_type",), case.raw.get("model_type"))
        problem = f"the architecture under the map cannot be read: {error}"
        yield named.error("map-unknown", problem, "nothing loads it", AGAIN)
        return
    named = Key(CONFIG, ("auto_map",), case.raw.get("auto_map"))
    if named.value != (expected := auto_map(base_type(case.raw))):
        yield named.error(
            "map-without-code",
            f"auto_map does not name the classes of {CODE}",
            "transformers does not find the code of the map, or runs other code",
            f"write {expected}",
        )
    yield from _of_file(case, ours)
    with suppress(RopepatchError):  # of a damaged file, which has a finding of its own
        for name in other_code(case.folder, [GENERATE] * (case.folder / GENERATE).exists()):
            yield Key(name, ("auto_map",) * (name != GENERATE)).error(
                "map-other-code",
                f"{name} brings code beside that of the map",
                "whoever loads the checkpoint with trust_remote_code=True runs it, too",
                "read it first, or take it out; ropepatch.load reads the checkpoint without it",
            )


def _ours(case: Case) -> str:
    """The sha256 of what we would write for the family."""
    model = blueprint(load_config(without_map(case.raw)))
    return sha256(map_code(base_type(case.raw), find_rotary(model).path).encode())


def _of_file(case: Case, ours: str) -> Iterator[Finding]:
    path, file = case.folder / CODE, Key(CODE, ("sha256",))
    if not path.exists():
        yield file.error(
            "map-without-code",
            f"{CODE} is missing",
            "transformers does not load the checkpoint; ropepatch does, which knows the map itself",
            AGAIN,
        )
        return
    try:
        check_inside(path, case.folder)
        here = sha256(path.read_bytes())
    except (RopepatchError, OSError) as error:
        yield file.error("map-code-changed", str(error), "it is run with trust_remote_code=True", AGAIN)
        return
    known = case.record.get("code", {}).get(CODE)
    if here == ours:
        return
    if known is not None and here != known:
        yield file.error(
            "map-code-changed",
            f"{CODE} is not the one that ropepatch.json names",
            "whoever loads the checkpoint with trust_remote_code=True runs what somebody else put there",
            f"do not load it with trust; {AGAIN}",
            value=here,
        )
        return
    yield file.warning(
        "map-code-unknown",
        f"{CODE} is not the one that this ropepatch writes"
        + (", and no record names it" if known is None else "; another version may have written it"),
        "whoever loads the checkpoint with trust_remote_code=True runs it",
        "read it first; ropepatch.load reads the checkpoint without it",
        value=here,
    )

"""The base, lost on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ropepatch.doctor.case import DEFAULT_THETA, FIRST_LAYERS, Block, Case, positive
from ropepatch.doctor.findings import Edit, Finding, Mend, shown
from ropepatch.model.architectures import STATE_THETA, STATE_THETA_LATELY

LLAMA_3_VOCABULARY, LLAMA_3_SIZES = range(128_256, 128_512), (2048, 3072, 4096, 8192, 16_384)


def lost_theta(case: Case) -> Iterator[Finding]:
    """A base that nobody states, or not where it is looked for."""
    stated = [theta for block in case.blocks if (theta := block.number("rope_theta"))]
    known = case.theta or next(iter(stated), None) or _recorded_theta(case)
    top = case.theta_key or "rope_theta"
    if case.theta_key and case.stated[case.theta_key] is None:
        edits = (case.edit(top, known),) if known else ()
        yield _null_theta(case, case.key(top), edits)
    for block in case.newer:
        if "rope_theta" not in block.values:
            yield _theta_not_in(case, block)
        elif block.values["rope_theta"] is None:
            theta = case.theta or _recorded_theta(case) if block.layer_type in (None, FIRST_LAYERS) else None
            edits = (block.edit("rope_theta", theta),) if theta else ()
            yield _null_theta(case, block.key("rope_theta"), edits)
    if case.older and case.theta_key is None and stated and stated[0] != DEFAULT_THETA:
        edit = case.edit("rope_theta", stated[0])
        within = any(block.number("rope_theta") for block in case.older)
        readers = "transformers 4" if within else "transformers, also 5 where rope_scaling is there,"
        yield Finding(
            "theta-lost",
            "warning" if within else "error",
            f"rope_scaling is there for older readers, but rope_theta ({stated[0]:g}) is not beside it",
            f"{readers} and mlx-lm look for the base at the top, and silently take 10000",
            f'write "rope_theta": {stated[0]:g} beside rope_scaling',
            key=case.key("rope_theta"),
            mend=Mend((edit,)),
            meant=(edit,),
            read=(case.edit("rope_theta", DEFAULT_THETA), case.without_newer()) if within else (),
        )
    if not case.newer and not stated and case.theta_key is None:
        yield from _theta_nowhere(case)
    if known == DEFAULT_THETA and (expected := _pretrained_theta(case)):
        yield _other_theta(case, "rope_theta is 10000", *expected)


def _null_theta(case: Case, key: str, edits: tuple[Edit, ...]) -> Finding:
    return Finding(
        "theta-lost",
        "error",
        "rope_theta is null",
        "transformers 5 ends in a TypeError (None ** Tensor) when it builds the model",
        "write the base that the model was pretrained with",
        key=key,
        value="null",
        mend=Mend(edits) if edits else None,
        meant=edits or None,
    )


def _theta_not_in(case: Case, block: Block) -> Finding:
    theta = (case.theta or _recorded_theta(case)) if block.layer_type in (None, FIRST_LAYERS) else None
    if theta:
        at_top = () if case.theta_key or not case.older else (case.edit("rope_theta", theta),)
        edits = (block.edit("rope_theta", theta), *at_top)
        return Finding(
            "theta-lost",
            "warning" if case.theta_key else "error",
            f"{block.key('rope_theta')} is missing; {case.theta_key or 'ropepatch.json'} says {theta:g}",
            "readers of rope_parameters take their own default, or stop, unless they look in both places",
            f'write "rope_theta": {theta:g} into {".".join(block.path)}',
            key=block.key("rope_theta"),
            mend=Mend(edits),
            meant=edits,
        )
    if expected := _pretrained_theta(case):
        return _other_theta(case, f"{block.key('rope_theta')} is missing", *expected)
    return Finding(
        "theta-lost",
        "error" if block.scaled else "warning",
        f"{block.key('rope_theta')} is missing, and so is rope_theta at the top",
        "transformers 5 silently takes its default, mostly 10000",
        "write the base that the model was pretrained with; its card or the original config.json says it",
        key=block.key("rope_theta"),
    )


def _theta_nowhere(case: Case) -> Iterator[Finding]:
    if expected := _pretrained_theta(case):
        yield _other_theta(case, "rope_theta is missing", *expected)
        return
    since = case.model_type in STATE_THETA_LATELY and _version(case) >= (4, 34)
    llama3 = any(block.kind == "llama3" for block in case.blocks)
    if llama3 or (not case.prefix and (case.model_type in STATE_THETA or since)):
        yield Finding(
            "theta-lost",
            "error" if llama3 else "warning",
            f"rope_theta is missing; configurations of {case.model_type} name it",
            "every reader takes its default, mostly 10000, whatever the model was pretrained with",
            "write the base that the model was pretrained with; its card or the original config.json says it",
            key=case.key("rope_theta"),
        )


def _other_theta(case: Case, problem: str, theta: float, reason: str) -> Finding:
    blocks = [block.edit("rope_theta", theta) for block in case.newer]
    return Finding(
        "theta-lost",
        "warning" if case.theta_key else "error",
        f"{problem}, and {reason}",
        f"with base 10000 all pairs but the first turn too fast, the slowest {theta / DEFAULT_THETA:g} times",
        f'write "rope_theta": {theta:g} if the base model\'s own config.json says so',
        key=case.key(case.theta_key or "rope_theta"),
        value=shown(case.stated[case.theta_key]) if case.theta_key else "",
        meant=(case.edit(case.theta_key or "rope_theta", theta), *blocks),
    )


def _pretrained_theta(case: Case) -> tuple[float, str] | None:
    """The base of the published models that look like this one, and how they look."""
    said = case.stated
    if case.model_type != "llama":
        return None
    if said.get("vocab_size") in LLAMA_3_VOCABULARY and said.get("hidden_size") in LLAMA_3_SIZES:
        return 500_000.0, "the models of Llama 3's size and vocabulary were pretrained with 500000"
    if said.get("vocab_size") == 32_016 and case.window == 16_384:
        return 1_000_000.0, "CodeLlama was pretrained with 1000000"
    return None


def _recorded_theta(case: Case) -> float | None:
    parameters = case.recorded().get("rope_parameters")
    flat = parameters if isinstance(parameters, dict) else {}
    flat = flat.get(FIRST_LAYERS, flat)
    return positive(flat.get("rope_theta")) if isinstance(flat, dict) else None


def _version(case: Case) -> tuple[int, ...]:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", str(case.raw.get("transformers_version")))
    return tuple(map(int, match.groups())) if match else (0, 0)

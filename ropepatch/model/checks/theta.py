"""The base, lost on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ropepatch.model.architectures import STATE_THETA, STATE_THETA_LATELY
from ropepatch.model.checks.case import DEFAULT_THETA, FIRST_LAYERS, Block, Case, positive
from ropepatch.model.checks.findings import DROP, Finding, Key, shown

LLAMA_3_VOCABULARY, LLAMA_3_SIZES = range(128_256, 128_512), (2048, 3072, 4096, 8192, 16_384)
LOOK_IT_UP = "write the base that the model was pretrained with; its card or the original config.json says it"


def lost_theta(case: Case) -> Iterator[Finding]:
    """A base that nobody states, or not where it is looked for."""
    stated = [theta for block in case.blocks if (theta := block.number("rope_theta"))]
    pretrained = case.theta or next(iter(stated), None) or _recorded_theta(case)
    top = case.at(case.theta_key or "rope_theta")
    if case.theta_key and top.value is None:
        yield _null_theta(top, pretrained)
    for block in case.newer:
        theta = case.theta or _recorded_theta(case) if block.layer_type in (None, FIRST_LAYERS) else None
        if "rope_theta" not in block.values:
            yield _theta_not_in(case, block, theta)
        elif block.values["rope_theta"] is None:
            yield _null_theta(block.at("rope_theta"), theta)
    if case.older and case.theta_key is None and stated and stated[0] != DEFAULT_THETA:
        edits = (top.set(stated[0]),)
        within = any(block.number("rope_theta") for block in case.older)
        readers = "transformers 4" if within else "transformers, also 5 where rope_scaling is there,"
        yield top.finding(
            "warning" if within else "error",
            "theta-lost",
            f"rope_scaling is there for older readers, but rope_theta ({stated[0]:g}) is not beside it",
            f"{readers} and mlx-lm look for the base at the top, and silently take 10000",
            f'write "rope_theta": {stated[0]:g} beside rope_scaling',
            mend=edits,
            meant=edits,
            read=(top.set(DEFAULT_THETA), case.at("rope_parameters").set(DROP)) if within else (),
        )
    if not case.newer and not stated and case.theta_key is None:
        yield from _theta_nowhere(case)
    if pretrained == DEFAULT_THETA:
        yield from _other_theta(case, "rope_theta is 10000")


def _null_theta(key: Key, theta: float | None) -> Finding:
    edits = (key.set(theta),) if theta else ()
    return key.error(
        "theta-lost",
        "rope_theta is null",
        "transformers 5 ends in a TypeError (None ** Tensor) when it builds the model",
        "write the base that the model was pretrained with",
        value="null",
        mend=edits,
        meant=edits or None,
    )


def _theta_not_in(case: Case, block: Block, theta: float | None) -> Finding:
    key = block.at("rope_theta")
    if theta:
        at_top = () if case.theta_key or not case.older else (case.at("rope_theta").set(theta),)
        edits = (key.set(theta), *at_top)
        return key.finding(
            "warning" if case.theta_key else "error",
            "theta-lost",
            f"{key} is missing; {case.theta_key or 'ropepatch.json'} says {theta:g}",
            "readers of rope_parameters take their own default, or stop, unless they look in both places",
            f'write "rope_theta": {theta:g} into {".".join(block.path)}',
            mend=edits,
            meant=edits,
        )
    for finding in _other_theta(case, f"{key} is missing"):
        return finding
    return key.finding(
        "error" if block.scaled else "warning",
        "theta-lost",
        f"{key} is missing, and so is rope_theta at the top",
        "transformers 5 silently takes its default, mostly 10000",
        LOOK_IT_UP,
    )


def _theta_nowhere(case: Case) -> Iterator[Finding]:
    if expected := [*_other_theta(case, "rope_theta is missing")]:
        yield from expected
        return
    since = case.model_type in STATE_THETA_LATELY and _version(case) >= (4, 34)
    llama3 = any(block.kind == "llama3" for block in case.blocks)
    if llama3 or (not case.prefix and (case.model_type in STATE_THETA or since)):
        yield case.at("rope_theta").finding(
            "error" if llama3 else "warning",
            "theta-lost",
            f"rope_theta is missing; configurations of {case.model_type} name it",
            "every reader takes its default, mostly 10000, whatever the model was pretrained with",
            LOOK_IT_UP,
        )


def _other_theta(case: Case, problem: str) -> Iterator[Finding]:
    """That the published models that look like this one were pretrained with another base."""
    if not (expected := _pretrained_theta(case)):
        return
    theta, reason = expected
    key = case.at(case.theta_key or "rope_theta")
    yield key.finding(
        "warning" if case.theta_key else "error",
        "theta-lost",
        f"{problem}, and {reason}",
        f"with base 10000 all pairs but the first turn too fast, the slowest {theta / DEFAULT_THETA:g} times",
        f'write "rope_theta": {theta:g} if the base model\'s own config.json says so',
        value=shown(key.value) if case.theta_key else "",
        meant=(key.set(theta), *(block.at("rope_theta").set(theta) for block in case.newer)),
    )


def _pretrained_theta(case: Case) -> tuple[float, str] | None:
    """The base of the published models that look like this one, and how they look."""
    vocabulary, hidden = case.stated.get("vocab_size"), case.stated.get("hidden_size")
    if case.model_type != "llama":
        return None
    if vocabulary in LLAMA_3_VOCABULARY and hidden in LLAMA_3_SIZES:
        return 500_000.0, "the models of Llama 3's size and vocabulary were pretrained with 500000"
    if vocabulary == 32_016 and case.window == 16_384:
        return 1_000_000.0, "CodeLlama was pretrained with 1000000"
    return None


def _recorded_theta(case: Case) -> float | None:
    parameters = case.recorded.get("rope_parameters")
    flat = parameters if isinstance(parameters, dict) else {}
    flat = flat.get(FIRST_LAYERS, flat)
    return positive(flat.get("rope_theta")) if isinstance(flat, dict) else None


def _version(case: Case) -> tuple[int, ...]:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", str(case.raw.get("transformers_version")))
    return tuple(map(int, match.groups())) if match else (0, 0)

"""Where a search begins: at the published methods, and between them.

Shapes: P rotary pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ropepatch.errors import RopepatchError
from ropepatch.fitting.vectors import Vector
from ropepatch.scaling import formulas, make_scaling
from ropepatch.scaling.rope import Rope
from ropepatch.settings import seed_of

SPREAD = 0.5  # of the noise on the slowest pair of a mixture, in logarithms; it falls to 0 at the fastest
STOPPED = 5.0  # the largest log-divisor that a mixture is made from
WARMEST = 0.15  # the largest log attention factor of a mixture


def published(rope: Rope, factor: float) -> dict[str, Vector]:
    """The static methods of the registry that need nothing but a factor, as far as they apply to a rope."""
    starts = {}
    for name in formulas():
        try:
            starts[name] = Vector.of(make_scaling(name, factor=factor).frequencies(rope), rope)
        except RopepatchError:  # a formula of rope_theta on a rope that is scaled already
            continue
    return starts


def named(name: str, rope: Rope, factor: float) -> Vector:
    """The vector of one method.

    Raises:
        RopepatchError: No such method, or one that cannot be the start of a static vector.
    """
    scaling = make_scaling(name, factor=factor)
    if scaling.length_dependent:
        raise RopepatchError(f"{name} follows the length: nothing static to start from", hint="--init auto")
    return Vector.of(scaling.frequencies(rope), rope)


def mixtures(starts: Mapping[str, Vector], *, count: int, seed: int) -> dict[str, Vector]:
    """Random vectors between pairs of starts, pair by pair, with noise that grows towards slow pairs."""
    vectors = list(starts.values())
    pairs = len(vectors[0].log_divisors)
    draw = torch.Generator().manual_seed(seed_of("mixtures", seed) % 2**63)
    noise = SPREAD * (torch.arange(pairs) + 1) / pairs
    mixed = {}
    for index in range(count):
        one, other = torch.randint(len(vectors), (2,), generator=draw).tolist()
        share = torch.rand(pairs, generator=draw)
        if torch.rand(1, generator=draw) < 0.5:
            share = share.round()
        ends = [vectors[chosen].log_divisors.clamp(-1.0, STOPPED) for chosen in (one, other)]
        divisors = ends[0].lerp(ends[1], share) + noise * torch.randn(pairs, generator=draw)
        mixed[f"mixture {index}"] = Vector(divisors, WARMEST * torch.rand(1, generator=draw)[0])
    return mixed

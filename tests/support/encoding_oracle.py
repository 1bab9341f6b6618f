"""Every position encoding as in its paper, pair by pair in float64; shares no code with ropepatch.

m is the position of a query, n that of a key; q, k, v are their vectors [D]; h is the head of the query, c
the case. Scores enter the softmax; values are weighted by its result.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from remapping_oracle import attending_by

Array = NDArray[np.float64]


class Case(NamedTuple):
    """One layer of a model with an encoding.

    parameters are those of the encoding; weights are the trained tensors of its module, by name. Without
    theta, frequencies are b^(-2i/D).
    """

    parameters: dict[str, Any]
    weights: dict[str, Array]
    layer: int
    heads: int
    key_value_heads: int
    D: int
    C: int
    b: float
    theta: Array | None = None
    a: float = 1.0

    @property
    def frequencies(self):
        return ladder(self.b, self.D) if self.theta is None else self.theta


def ladder(b, width):
    return np.array([b ** (-2 * i / width) for i in range(width // 2)])


def sinusoid(t, width, b=10000.0):
    angles = [t / b ** (2 * i / width) for i in range(width // 2)]
    return np.array([part(angle) for angle in angles for part in (math.sin, math.cos)])


# Absolute: the vector added to the embedding of the token at p, without a factor sqrt(C)


def integer(c, p):
    return np.full(c.C, p / math.sqrt(c.C))


def normalised(c, p):
    return np.full(c.C, p / (c.parameters["length"] - 1) / math.sqrt(c.C))


def binary(c, p):
    digits = [int(digit) for digit in reversed(f"{p:b}")]
    return np.array((digits + [0] * c.C)[: c.C]) / math.sqrt(c.C)


def sinusoidal(c, p):
    return sinusoid(p, c.C, c.parameters["base"]) / math.sqrt(c.C)


def learned(c, p):
    return c.weights["table"][p]


TABLES = {
    table.__name__: table
    for table in (integer, normalised, binary, sinusoidal, learned)
}


# Relative and rotary: the score of a pair


def nope(c, h, q, m, k, n):
    return q @ k / math.sqrt(c.D)


def drope(c, h, q, m, k, n):
    return c.parameters["temperature"] * nope(c, h, q, m, k, n)


def shaw(c, h, q, m, k, n):
    return (
        q
        @ (k + c.weights["keys"][c.layer, min(m - n, c.parameters["clip"])])
        / math.sqrt(c.D)
    )


def transformer_xl(c, h, q, m, k, n):
    r = c.weights["projection"][c.layer, h] @ sinusoid(m - n, c.C)
    u, v = c.weights["u"][h], c.weights["v"][h]
    return (q @ k + q @ r + u @ k + v @ r) / math.sqrt(c.D)


def nezha(c, h, q, m, k, n):
    return q @ (k + sinusoid(n - m, c.D)) / math.sqrt(c.D)


def bucket(distance, buckets, max_distance):
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + math.floor(share * (buckets - exact)))


def t5(c, h, q, m, k, n):
    row = bucket(m - n, c.parameters["buckets"], c.parameters["max_distance"])
    return nope(c, h, q, m, k, n) + c.weights["table"][row, h]


def slope(h, heads):
    power = 2 ** math.floor(math.log2(heads))
    return (
        2 ** (-8 * (h + 1) / power)
        if h < power
        else 2 ** (-8 * (2 * (h - power) + 1) / (2 * power))
    )


def alibi(c, h, q, m, k, n):
    return nope(c, h, q, m, k, n) - slope(h, c.heads) * (m - n)


def product(q, k, angles):
    """q . k where pair i of the first 2 len(angles) channels, (x_i, x_{i + len}), rotates by angle i."""
    pairs = len(angles)
    (z, w), turn = (
        (x[:pairs] + 1j * x[pairs : 2 * pairs] for x in (q, k)),
        np.exp(1j * angles),
    )
    return (z * w.conj() * turn).real.sum() + q[2 * pairs :] @ k[2 * pairs :]


def rope(c, h, q, m, k, n):
    return c.a**2 * product(q, k, (m - n) * c.frequencies) / math.sqrt(c.D)


def partial(c, h, q, m, k, n):
    rotated = math.floor(c.parameters["share"] * c.D / 2) * 2
    return product(q, k, (m - n) * ladder(c.b, rotated)) / math.sqrt(c.D)


def p_rope(c, h, q, m, k, n):
    theta = c.frequencies.copy()
    theta[math.floor(c.parameters["share"] * c.D / 2) :] = 0
    return c.a**2 * product(q, k, (m - n) * theta) / math.sqrt(c.D)


def place(p, grid):
    """The coordinates of p on a grid that is filled row by row."""
    where = []
    for axis in range(len(grid)):
        below = math.prod(grid[axis:])
        where.append(p // below)
        p %= below
    return [*where, p]


def axial(c, h, q, m, k, n):
    at, seen = place(m, c.parameters["grid"]), place(n, c.parameters["grid"])
    blocks = [
        (i - j) * ladder(c.b, c.D // len(at)) for i, j in zip(at, seen, strict=True)
    ]
    return product(q, k, np.concatenate(blocks)) / math.sqrt(c.D)


def xpos(c, h, q, m, k, n):
    gamma, tokens = c.parameters["gamma"], c.parameters["scale_base"]
    zeta = np.array([(2 * i / c.D + gamma) / (1 + gamma) for i in range(c.D // 2)] * 2)
    stretched, shrunk = q * zeta ** (m / tokens), k * zeta ** (-n / tokens)
    return c.a**2 * product(stretched, shrunk, (m - n) * c.frequencies) / math.sqrt(c.D)


def nope_heads(c, h, q, m, k, n):
    rotated = round(c.parameters["rotated"] * c.key_value_heads)
    group = h // (c.heads // c.key_value_heads)
    return (rope if group < rotated else nope)(c, h, q, m, k, n)


def nope_layers(c, h, q, m, k, n):
    return (nope if (c.layer + 1) % c.parameters["every"] == 0 else rope)(
        c, h, q, m, k, n
    )


SCORES = {
    score.__name__.replace("_", "-"): score
    for score in (
        *(shaw, transformer_xl, nezha, t5, alibi, rope, xpos, p_rope, partial, axial),
        *(nope, nope_heads, nope_layers, drope),
    )
}


def value(name, c, v, m, n):
    if name == "shaw":
        return v + c.weights["values"][c.layer, min(m - n, c.parameters["clip"])]
    return v + sinusoid(n - m, c.D) if name == "nezha" else v


def attention(name, c, q, k, v, positions):
    """Output [B, H, T, D] of causal attention of q [B, H, T, D] to k and v [B, K, T, D] at positions [B, T]."""
    score = nope if name in TABLES else SCORES[name]
    output = np.zeros(q.shape)
    for b, h, i in np.ndindex(*q.shape[:3]):
        group, m = h // (c.heads // c.key_value_heads), int(positions[b, i])
        at = [int(n) for n in positions[b, : i + 1]]
        scores = [
            score(c, h, q[b, h, i], m, k[b, group, j], n) for j, n in enumerate(at)
        ]
        shares = np.exp(np.array(scores) - max(scores))
        for j, n in enumerate(at):
            share = shares[j] / shares.sum()
            output[b, h, i] += share * value(name, c, v[b, group, j], m, n)
    return output


def by_formula(model, name, c, positions):
    """Run a model with attention by the formula of an encoding within the block."""
    return attending_by(
        model,
        lambda module, q, k, v, scaling: attention(
            name, c._replace(layer=module.layer_idx), q, k, v, positions
        ),
    )

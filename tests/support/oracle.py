"""Every formula of the papers in float64 NumPy: the second oracle, which shares no code with ropepatch.

d is the rotary dimension, b the base, L the original length, s the factor, theta the frequencies before
scaling, and a the attention factor. Every oracle takes a geometry, s and the method's parameters by name, and
returns (frequencies, attention factor).
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Table = tuple[Array, float]


class Geometry(NamedTuple):
    d: int
    b: float
    L: int
    carried: tuple[float, ...] | None = None
    carried_a: float = 1.0

    @property
    def i(self):
        return np.arange(self.d // 2, dtype=np.float64)

    @property
    def theta(self):
        return (
            self.b ** (-2 * self.i / self.d)
            if self.carried is None
            else np.array(self.carried)
        )

    @property
    def turns(self):
        """r: rotations within the original length."""
        return self.L * self.theta / (2 * np.pi)


def none(g, s):
    return g.theta, g.carried_a


def linear(g, s):
    return g.theta / s, g.carried_a


def ntk(g, s):
    return g.theta * s ** (-2 * g.i / (g.d - 2)), g.carried_a


def abf(g, s, rope_theta):
    return rope_theta ** (-2 * g.i / g.d), 1.0


def ntk_fixed(g, s):
    return g.theta * s ** (-2 * (g.i + 1) / g.d), g.carried_a


def ntk_mixed(g, s):
    A = math.log(s) / (g.d / 2) ** 0.75
    return g.theta * np.exp(-A * (g.i + 1) ** 0.75), g.carried_a


def ntk_by_parts(g, s, alpha=1.0, beta=32.0):
    gamma = np.clip((g.turns - alpha) / (beta - alpha), 0, 1)
    return (1 - gamma) * g.theta / s + gamma * g.theta, g.carried_a


def llama3(g, s, alpha=1.0, beta=4.0):
    """As in Meta's code: by wavelengths."""
    wavelength = 2 * np.pi / g.theta
    t = (g.L / wavelength - alpha) / (beta - alpha)
    middle = (1 - t) * g.theta / s + t * g.theta
    slow = np.where(wavelength > g.L / alpha, g.theta / s, middle)
    return np.where(wavelength < g.L / beta, g.theta, slow), g.carried_a


def yarn_temperature(s, attention_factor=None):
    return 0.1 * math.log(s) + 1 if attention_factor is None else attention_factor


def yarn_bounds(g, beta_fast, beta_slow, truncate):
    low, high = (
        g.d * math.log(g.L / (2 * math.pi * n)) / (2 * math.log(g.b))
        for n in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, g.d - 1)
    return low, high if high != low else high + 0.001


def index_ramp(g, beta_fast, beta_slow, truncate):
    low, high = yarn_bounds(g, beta_fast, beta_slow, truncate)
    return np.clip((g.i - low) / (high - low), 0, 1)


def yarn_index(g, s, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """The released code: a ramp over the pair's index, blending frequencies."""
    ramp = index_ramp(g, beta_fast, beta_slow, truncate)
    return g.theta / s * ramp + g.theta * (1 - ramp)


def yarn_rotations(g, s, beta_fast=32.0, beta_slow=1.0):
    """The paper: a ramp over rotations, blending frequencies."""
    return ntk_by_parts(g, s, alpha=beta_slow, beta=beta_fast)[0]


def yarn_wavelength(g, s, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """PoSE: a ramp over the pair's index, blending wavelengths."""
    ramp = index_ramp(g, beta_fast, beta_slow, truncate)
    return g.theta / (ramp * s + 1 - ramp)


def yarn(
    g, s, beta_fast=32.0, beta_slow=1.0, truncate=True, ramp="index", **temperature
):
    a = g.carried_a * yarn_temperature(s, **temperature)
    if ramp == "rotations":
        return yarn_rotations(g, s, beta_fast, beta_slow), a
    form = {"index": yarn_index, "wavelength": yarn_wavelength}[ramp]
    return form(g, s, beta_fast, beta_slow, truncate), a


def longrope(g, s, long_factor, attention_factor=None):
    return g.theta / np.array(long_factor), longrope_temperature(g, s, attention_factor)


def longrope_temperature(g, s, attention_factor=None):
    return (
        math.sqrt(1 + math.log(s) / math.log(g.L))
        if attention_factor is None
        else attention_factor
    )


def custom(g, s, divisors, attention_factor=1.0):
    return g.theta / np.array(divisors), g.carried_a * attention_factor


def giraffe_power(g, s, power=0.1, interpolate=False):
    return g.theta / (s if interpolate else 1) * (
        1 - 2 * g.i / g.d
    ) ** power, g.carried_a


def giraffe_truncated(g, s, cutoff=None, interpolate=False):
    theta = g.theta / (s if interpolate else 1)
    c = 2 * np.pi / (g.L if cutoff is None else cutoff)
    return np.select([theta >= c, theta >= c / 8], [theta, c / 16], 0.0), g.carried_a


def p_rope(g, s, partial=0.75):
    return np.where(g.i < int(partial * g.d / 2), g.theta, 0.0), g.carried_a


def resonance(g, s, over="yarn"):
    theta, a = ORACLES[over](g, s)
    with np.errstate(divide="ignore"):
        return 2 * np.pi / np.round(2 * np.pi / theta), a


def cope(g, s, over="ntk", pairs=20, hard=False, rope_theta=None):
    theta, a = ORACLES[over](
        g, s, **({"rope_theta": rope_theta} if over == "abf" else {})
    )
    n = min(pairs, g.d // 2)
    return theta * np.append(np.ones(g.d // 2 - n), cope_mask(n, hard)), a


def cope_mask(n, hard=False):
    mask = np.zeros(n) if hard else 0.5 * (1 + np.cos(np.linspace(0, np.pi, n)))
    mask[-1] = 0
    return mask


def dynamic(g, s, form="paper", length=None):
    reached = max(g.L if length is None else length, g.L)
    if form == "transformers":
        return ntk(g, s * reached / g.L - (s - 1))
    return ntk(g, reached / g.L)


def longrope_switch(
    g, s, long_factor, short_factor, attention_factor=None, length=None
):
    beyond = length is not None and length > g.L
    return longrope(g, s, long_factor if beyond else short_factor, attention_factor)


ORACLES = {
    formula.__name__.replace("_", "-"): formula
    for formula in (
        *(
            none,
            linear,
            ntk,
            ntk_by_parts,
            yarn,
            llama3,
            longrope,
            abf,
            ntk_fixed,
            ntk_mixed,
        ),
        *(giraffe_power, giraffe_truncated, p_rope, resonance, cope, custom),
        *(dynamic, longrope_switch),
    )
}

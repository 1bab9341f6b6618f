"""Every formula of the papers in float64 NumPy: the second oracle, which shares no code with ropepatch.

d rotary dimension, b base, L window, s factor, theta the frequencies before, a the attention factor. Every
oracle takes a geometry, s and the method's parameters by name, and gives (frequencies, attention factor).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
    def i(self) -> Array:
        return np.arange(self.d // 2, dtype=np.float64)

    @property
    def theta(self) -> Array:
        return self.b ** (-2 * self.i / self.d) if self.carried is None else np.array(self.carried)

    @property
    def turns(self) -> Array:
        """r: rotations inside the window."""
        return self.L * self.theta / (2 * np.pi)


def none(g: Geometry, s: float) -> Table:
    return g.theta, g.carried_a


def linear(g: Geometry, s: float) -> Table:
    return g.theta / s, g.carried_a


def ntk(g: Geometry, s: float) -> Table:
    return g.theta * s ** (-2 * g.i / (g.d - 2)), g.carried_a


def ntk_base(g: Geometry, s: float) -> float:
    return g.b * s ** (g.d / (g.d - 2))


def abf(g: Geometry, s: float, rope_theta: float) -> Table:
    return rope_theta ** (-2 * g.i / g.d), 1.0


def ntk_fixed(g: Geometry, s: float) -> Table:
    return g.theta * s ** (-2 * (g.i + 1) / g.d), g.carried_a


def ntk_mixed(g: Geometry, s: float) -> Table:
    A = math.log(s) / (g.d / 2) ** 0.75
    return g.theta * np.exp(-A * (g.i + 1) ** 0.75), g.carried_a


def ntk_by_parts(g: Geometry, s: float, alpha: float = 1.0, beta: float = 32.0) -> Table:
    gamma = np.clip((g.turns - alpha) / (beta - alpha), 0, 1)
    return (1 - gamma) * g.theta / s + gamma * g.theta, g.carried_a


def llama3(g: Geometry, s: float, alpha: float = 1.0, beta: float = 4.0) -> Table:
    """As Meta writes it: by wavelengths."""
    wavelength = 2 * np.pi / g.theta
    t = (g.L / wavelength - alpha) / (beta - alpha)
    middle = (1 - t) * g.theta / s + t * g.theta
    slow = np.where(wavelength > g.L / alpha, g.theta / s, middle)
    return np.where(wavelength < g.L / beta, g.theta, slow), g.carried_a


def yarn_temperature(
    s: float,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> float:
    if attention_factor is not None:
        return attention_factor
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(s) + 1) / (0.1 * mscale_all_dim * math.log(s) + 1)
    return 0.1 * math.log(s) + 1


def yarn_bounds(g: Geometry, beta_fast: float, beta_slow: float, truncate: bool) -> tuple[float, float]:
    low, high = (
        g.d * math.log(g.L / (2 * math.pi * n)) / (2 * math.log(g.b)) for n in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, g.d - 1)
    return low, high if high != low else high + 0.001


def index_ramp(g: Geometry, beta_fast: float, beta_slow: float, truncate: bool) -> Array:
    low, high = yarn_bounds(g, beta_fast, beta_slow, truncate)
    return np.clip((g.i - low) / (high - low), 0, 1)


def yarn_index(
    g: Geometry, s: float, beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True
) -> Array:
    """The released code: a ramp over the pair's index, blending frequencies."""
    ramp = index_ramp(g, beta_fast, beta_slow, truncate)
    return g.theta / s * ramp + g.theta * (1 - ramp)


def yarn_rotations(g: Geometry, s: float, beta_fast: float = 32.0, beta_slow: float = 1.0) -> Array:
    """The paper: a ramp over rotations, blending frequencies."""
    return ntk_by_parts(g, s, alpha=beta_slow, beta=beta_fast)[0]


def yarn_wavelength(
    g: Geometry, s: float, beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True
) -> Array:
    """PoSE: a ramp over the pair's index, blending wavelengths."""
    ramp = index_ramp(g, beta_fast, beta_slow, truncate)
    return g.theta / (ramp * s + 1 - ramp)


def yarn(
    g: Geometry,
    s: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    ramp: str = "index",
    **temperature: float | None,
) -> Table:
    a = g.carried_a * yarn_temperature(s, **temperature)
    if ramp == "rotations":
        return yarn_rotations(g, s, beta_fast, beta_slow), a
    form = {"index": yarn_index, "wavelength": yarn_wavelength}[ramp]
    return form(g, s, beta_fast, beta_slow, truncate), a


def longrope(
    g: Geometry, s: float, long_factor: tuple[float, ...], attention_factor: float | None = None
) -> Table:
    return g.theta / np.array(long_factor), longrope_temperature(g, s, attention_factor)


def longrope_temperature(g: Geometry, s: float, attention_factor: float | None = None) -> float:
    return math.sqrt(1 + math.log(s) / math.log(g.L)) if attention_factor is None else attention_factor


def custom(
    g: Geometry, s: float, divisors: tuple[float, ...], attention_factor: float = 1.0, queries: None = None
) -> Table:
    return g.theta / np.array(divisors), g.carried_a * attention_factor


def giraffe_power(g: Geometry, s: float, power: float = 0.1, interpolate: bool = False) -> Table:
    return g.theta / (s if interpolate else 1) * (1 - 2 * g.i / g.d) ** power, g.carried_a


def giraffe_truncated(g: Geometry, s: float, cutoff: float | None = None, interpolate: bool = False) -> Table:
    theta = g.theta / (s if interpolate else 1)
    c = 2 * np.pi / (g.L if cutoff is None else cutoff)
    return np.select([theta >= c, theta >= c / 8], [theta, c / 16], 0.0), g.carried_a


def p_rope(g: Geometry, s: float, partial: float = 0.75) -> Table:
    return np.where(g.i < int(partial * g.d / 2), g.theta, 0.0), g.carried_a


def resonance(g: Geometry, s: float, over: str = "yarn") -> Table:
    theta, a = ORACLES[over](g, s)
    with np.errstate(divide="ignore"):
        return 2 * np.pi / np.round(2 * np.pi / theta), a


def cope(
    g: Geometry,
    s: float,
    over: str = "ntk",
    pairs: int = 20,
    hard: bool = False,
    rope_theta: float | None = None,
) -> Table:
    theta, a = ORACLES[over](g, s, **({"rope_theta": rope_theta} if over == "abf" else {}))
    n = min(pairs, g.d // 2)
    return theta * np.append(np.ones(g.d // 2 - n), cope_mask(n, hard)), a


def cope_mask(n: int, hard: bool = False) -> Array:
    mask = np.zeros(n) if hard else 0.5 * (1 + np.cos(np.linspace(0, np.pi, n)))
    mask[-1] = 0
    return mask


def dynamic(g: Geometry, s: float, form: str = "paper", length: int | None = None) -> Table:
    reached = max(g.L if length is None else length, g.L)
    if form == "transformers":
        return ntk(g, s * reached / g.L - (s - 1))
    return ntk(g, reached / g.L)


def longrope_switch(
    g: Geometry,
    s: float,
    long_factor: tuple[float, ...],
    short_factor: tuple[float, ...],
    attention_factor: float | None = None,
    length: int | None = None,
) -> Table:
    beyond = length is not None and length > g.L
    return longrope(g, s, long_factor if beyond else short_factor, attention_factor)


ORACLES: dict[str, Callable[..., Table]] = {
    formula.__name__.replace("_", "-"): formula
    for formula in (
        *(none, linear, ntk, ntk_by_parts, yarn, llama3, longrope, abf, ntk_fixed, ntk_mixed),
        *(giraffe_power, giraffe_truncated, p_rope, resonance, cope, custom),
        *(dynamic, longrope_switch),
    )
}


# A plausible wrong version of every formula, which a comparison with the right one must reject.


def theta_of(change: Callable[[Geometry], Any]) -> Callable[..., Table]:
    return lambda g, s, **p: (change(g), 1.0)


def yarn_with(g: Geometry, s: float, ramp: Any) -> Table:
    return g.theta / s * ramp + g.theta * (1 - ramp), yarn_temperature(s)


def default_ramp(g: Geometry) -> Any:
    return index_ramp(g, 32.0, 1.0, True)


def yarn_rounded(g: Geometry, s: float) -> Table:
    low, high = (round(bound) for bound in yarn_bounds(g, 32.0, 1.0, False))
    return yarn_with(g, s, np.clip((g.i - low) / (high - low), 0, 1))


def yarn_temperature_as(change: Callable[[float], float]) -> Callable[..., Table]:
    return lambda g, s: (yarn_index(g, s), change(yarn_temperature(s)))


def longer_window(name: str) -> Callable[..., Table]:
    """L' where L belongs."""
    return lambda g, s, **p: ORACLES[name](g._replace(L=int(g.L * s)), s, **p)


def head_dim_for_rotary_dim(name: str) -> Callable[..., Table]:
    """The exponent runs over the whole head although half of it rotates."""

    def wrong(g: Geometry, s: float, **p: Any) -> Table:
        theta, a = ORACLES[name](g._replace(d=2 * g.d), s, **p)
        return theta[: g.d // 2], a

    return wrong


def default_base(name: str) -> Callable[..., Table]:
    """1e4 where the model has another rope_theta."""
    return lambda g, s, **p: ORACLES[name](g._replace(b=1e4), s, **p)


def wrong_ntk_print(g: Geometry, s: float) -> Table:
    """theta * alpha^(2i/d), alpha = s^(1/(d-2)): wrong sign, and a power d is missing."""
    return g.theta * (s ** (1 / (g.d - 2))) ** (2 * g.i / g.d), 1.0


def truncated_with(near: Callable[[float], float], far: Callable[[float], float]) -> Callable[..., Table]:
    def wrong(g: Geometry, s: float) -> Table:
        c = 2 * np.pi / g.L
        return np.select([g.theta >= c, g.theta >= c / 8], [g.theta, near(c)], far(c)), 1.0

    return wrong


def cope_with(mask: Callable[[Geometry], Any]) -> Callable[..., Table]:
    return lambda g, s: (ntk(g, s)[0] * mask(g), 1.0)


def ones_then(g: Geometry, tail: Any) -> Any:
    return np.append(np.ones(g.d // 2 - len(tail)), tail)


LONG = {"long_factor": tuple(np.linspace(1, 24, 64).tolist())}
SWITCH = LONG | {"short_factor": tuple(np.linspace(1, 1.25, 64).tolist())}
# (what is wrong, method, its parameters, the wrong twin)
SABOTAGE: list[tuple[str, str, dict[str, Any], Callable[..., Table]]] = [
    ("none: another base", "none", {}, default_base("none")),
    ("none: exponent 2i/(d-2)", "none", {}, theta_of(lambda g: g.b ** (-2 * g.i / (g.d - 2)))),
    ("none: exponent i/d", "none", {}, theta_of(lambda g: g.b ** (-g.i / g.d))),
    ("none: d = head_dim", "none", {}, head_dim_for_rotary_dim("none")),
    ("linear: times s", "linear", {}, lambda g, s: (g.theta * s, 1.0)),
    ("linear: s rounded down", "linear", {}, lambda g, s: (g.theta / math.floor(s - 0.5), 1.0)),
    ("linear: not applied", "linear", {}, ORACLES["none"]),
    ("ntk: the wrong print", "ntk", {}, wrong_ntk_print),
    ("ntk: exponent sign", "ntk", {}, lambda g, s: (g.theta * s ** (2 * g.i / (g.d - 2)), 1.0)),
    ("ntk: b times s", "ntk", {}, lambda g, s: abf(g, s, g.b * s)),
    ("ntk: b s^((d-2)/d)", "ntk", {}, lambda g, s: abf(g, s, g.b * s ** ((g.d - 2) / g.d))),
    ("ntk: another base", "ntk", {}, default_base("ntk")),
    ("ntk: d = head_dim", "ntk", {}, head_dim_for_rotary_dim("ntk")),
    ("abf: b' as a multiple of b", "abf", {"rope_theta": 8e6},
        lambda g, s, rope_theta: abf(g, s, g.b * rope_theta)),
    ("abf: divided as well", "abf", {"rope_theta": 8e6},
        lambda g, s, rope_theta: (abf(g, s, rope_theta)[0] / s, 1.0)),
    ("by-parts: ramp reversed", "ntk-by-parts", {},
        lambda g, s: (g.theta + g.theta / s - ntk_by_parts(g, s)[0], 1.0)),
    ("by-parts: alpha and beta swapped", "ntk-by-parts", {}, lambda g, s: ntk_by_parts(g, s, 32, 1)),
    ("by-parts: L' for L", "ntk-by-parts", {}, longer_window("ntk-by-parts")),
    ("by-parts: the index ramp", "ntk-by-parts", {}, lambda g, s: (yarn_index(g, s), 1.0)),
    ("by-parts: radians for rotations", "ntk-by-parts", {},
        lambda g, s: ntk_by_parts(g, s, 1 / (2 * np.pi), 32 / (2 * np.pi))),
    ("by-parts: wavelengths blended", "ntk-by-parts", {}, lambda g, s: (
        g.theta / (1 + (s - 1) * (1 - np.clip((g.turns - 1) / 31, 0, 1))), 1.0)),
    ("llama3: low and high swapped", "llama3", {}, lambda g, s: llama3(g, s, 4.0, 1.0)),
    ("llama3: ramp reversed", "llama3", {},
        lambda g, s: (g.theta + g.theta / s - llama3(g, s)[0], 1.0)),
    ("llama3: the betas of YaRN", "llama3", {}, lambda g, s: llama3(g, s, 1.0, 32.0)),
    ("llama3: L' for L", "llama3", {}, longer_window("llama3")),
    ("yarn: ramp reversed", "yarn", {}, lambda g, s: yarn_with(g, s, 1 - default_ramp(g))),
    ("yarn: rotations ramp for the index ramp", "yarn", {}, lambda g, s: yarn(g, s, ramp="rotations")),
    ("yarn: wavelength ramp for the index ramp", "yarn", {},
        lambda g, s: yarn(g, s, ramp="wavelength")),
    ("yarn: index ramp for the rotations ramp", "yarn", {"ramp": "rotations"},
        lambda g, s, ramp: yarn(g, s)),
    ("yarn: index ramp for the wavelength ramp", "yarn", {"ramp": "wavelength"},
        lambda g, s, ramp: yarn(g, s)),
    ("yarn: not truncated", "yarn", {}, lambda g, s: yarn(g, s, truncate=False)),
    ("yarn: truncated against the setting", "yarn", {"truncate": False},
        lambda g, s, truncate: yarn(g, s)),
    ("yarn: betas swapped", "yarn", {}, lambda g, s: yarn(g, s, 1.0, 32.0)),
    ("yarn: bounds rounded to the nearest", "yarn", {}, yarn_rounded),
    ("yarn: L' for L", "yarn", {}, lambda g, s: yarn(g._replace(L=int(g.L * s)), s)),
    ("yarn: another base", "yarn", {}, default_base("yarn")),
    ("yarn: d = head_dim", "yarn", {}, head_dim_for_rotary_dim("yarn")),
    ("yarn: NTK on slow pairs", "yarn", {}, lambda g, s: (
        ntk(g, s)[0] * default_ramp(g) + g.theta * (1 - default_ramp(g)), yarn_temperature(s))),
    ("yarn: a dropped", "yarn", {}, yarn_temperature_as(lambda a: 1.0)),
    ("yarn: a inverted", "yarn", {}, yarn_temperature_as(lambda a: 1 / a)),
    ("yarn: a squared", "yarn", {}, yarn_temperature_as(lambda a: a**2)),
    ("yarn: slope 0.05", "yarn", {}, yarn_temperature_as(lambda a: (a + 1) / 2)),
    ("yarn: log10", "yarn", {}, lambda g, s: (yarn_index(g, s), 0.1 * math.log10(s) + 1)),
    ("yarn: mscale alone", "yarn", {"mscale": 0.5, "mscale_all_dim": 1.0},
        lambda g, s, **p: (yarn_index(g, s), 0.05 * math.log(s) + 1)),
    ("yarn: mscales inverted", "yarn", {"mscale": 0.5, "mscale_all_dim": 1.0},
        lambda g, s, **p: yarn(g, s, mscale=1.0, mscale_all_dim=0.5)),
    ("longrope: factors inverted", "longrope", LONG, lambda g, s, long_factor: (
        g.theta * np.array(long_factor), longrope_temperature(g, s))),
    ("longrope: factors reversed", "longrope", LONG,
        lambda g, s, long_factor: longrope(g, s, long_factor[::-1])),
    ("longrope: divided by s too", "longrope", LONG, lambda g, s, long_factor: (
        longrope(g, s, long_factor)[0] / s, longrope_temperature(g, s))),
    ("longrope: a dropped", "longrope", LONG,
        lambda g, s, long_factor: (g.theta / np.array(long_factor), 1.0)),
    ("longrope: a of L'", "longrope", LONG, longer_window("longrope")),
    ("longrope: a of YaRN", "longrope", LONG, lambda g, s, long_factor: (
        g.theta / np.array(long_factor), yarn_temperature(s))),
    ("longrope: a without the root", "longrope", LONG, lambda g, s, long_factor: (
        g.theta / np.array(long_factor), longrope_temperature(g, s) ** 2)),
    ("ntk-fixed: i for i+1", "ntk-fixed", {}, lambda g, s: (g.theta * s ** (-2 * g.i / g.d), 1.0)),
    ("ntk-fixed: exponent sign", "ntk-fixed", {}, lambda g, s: (g.theta * s ** (2 * (g.i + 1) / g.d), 1.0)),
    ("ntk-fixed: plain NTK", "ntk-fixed", {}, ORACLES["ntk"]),
    ("ntk-mixed: exponent 1", "ntk-mixed", {}, ORACLES["ntk-fixed"]),
    ("ntk-mixed: i for i+1", "ntk-mixed", {}, lambda g, s: (
        g.theta * np.exp(-math.log(s) * (g.i / (g.d / 2)) ** 0.75), 1.0)),
    ("ntk-mixed: d for d/2 in A", "ntk-mixed", {}, lambda g, s: (
        g.theta * np.exp(-math.log(s) * ((g.i + 1) / g.d) ** 0.75), 1.0)),
    ("giraffe-power: i/d", "giraffe-power", {}, lambda g, s: (g.theta * (1 - g.i / g.d) ** 0.1, 1.0)),
    ("giraffe-power: power forgotten", "giraffe-power", {},
        lambda g, s: (g.theta * (1 - 2 * g.i / g.d), 1.0)),
    ("giraffe-power: fast pairs fade", "giraffe-power", {},
        lambda g, s: (g.theta * ((2 * g.i + 2) / g.d) ** 0.1, 1.0)),
    ("giraffe-power: always interpolated", "giraffe-power", {},
        lambda g, s: giraffe_power(g, s, 0.1, True)),
    ("giraffe-truncated: bands swapped", "giraffe-truncated", {}, truncated_with(
        lambda c: 0.0, lambda c: c / 16)),
    ("giraffe-truncated: held at c/8", "giraffe-truncated", {}, truncated_with(
        lambda c: c / 8, lambda c: 0.0)),
    ("giraffe-truncated: slow pairs kept", "giraffe-truncated", {}, lambda g, s: (
        np.where(g.theta >= 2 * np.pi / g.L, 0.0, g.theta), 1.0)),
    ("giraffe-truncated: cutoff at L'", "giraffe-truncated", {}, longer_window("giraffe-truncated")),
    ("giraffe-truncated: radians for turns", "giraffe-truncated", {},
        lambda g, s: giraffe_truncated(g, s, 2 * np.pi * g.L)),
    ("p-rope: the slowest kept", "p-rope", {},
        lambda g, s: (np.where(g.i >= 0.25 * g.d / 2, g.theta, 0.0), 1.0)),
    ("p-rope: 1 - p kept", "p-rope", {}, lambda g, s: p_rope(g, s, 0.25)),
    ("p-rope: one pair more", "p-rope", {},
        lambda g, s: (np.where(g.i <= 0.75 * g.d / 2, g.theta, 0.0), 1.0)),
    ("p-rope: exponent over the kept pairs", "p-rope", {}, lambda g, s: (
        np.where(g.i < 0.75 * g.d / 2, g.b ** (-2 * g.i / (0.75 * g.d)), 0.0), 1.0)),
    ("resonance: without rounding", "resonance", {}, ORACLES["yarn"]),
    ("resonance: rounding down", "resonance", {}, lambda g, s: (
        2 * np.pi / np.floor(2 * np.pi / yarn_index(g, s)), yarn_temperature(s))),
    ("resonance: rounding frequencies", "resonance", {}, lambda g, s: (
        np.round(yarn_index(g, s), 3), yarn_temperature(s))),
    ("resonance: over nothing", "resonance", {}, lambda g, s: resonance(g, s, "none")),
    ("resonance: a of the inner method lost", "resonance", {}, lambda g, s: (resonance(g, s)[0], 1.0)),
    ("cope: the fastest clipped", "cope", {}, cope_with(
        lambda g: ones_then(g, cope_mask(20))[::-1])),
    ("cope: mask reversed", "cope", {}, cope_with(lambda g: ones_then(g, cope_mask(20)[::-1]))),
    ("cope: linear fade", "cope", {}, cope_with(lambda g: ones_then(g, np.linspace(1, 0, 20)))),
    ("cope: last pair never stops", "cope", {}, cope_with(
        lambda g: ones_then(g, cope_mask(21)[:20]))),
    ("cope: over ntk for abf", "cope", {"over": "abf", "rope_theta": 1e7}, lambda g, s, **p: cope(g, s)),
    ("cope: hard for soft", "cope", {}, lambda g, s: cope(g, s, hard=True)),
    ("cope: soft for hard", "cope", {"hard": True}, lambda g, s, hard: cope(g, s)),
    ("custom: multiplied", "custom", {"divisors": LONG["long_factor"], "attention_factor": 1.2},
        lambda g, s, divisors, attention_factor: (g.theta * np.array(divisors), attention_factor)),
    ("custom: a dropped", "custom", {"divisors": LONG["long_factor"], "attention_factor": 1.2},
        lambda g, s, divisors, attention_factor: (g.theta / np.array(divisors), 1.0)),
    ("dynamic: transformers form for the paper's", "dynamic", {},
        lambda g, s, length: dynamic(g, s, "transformers", length)),
    ("dynamic: paper's form for transformers'", "dynamic", {"form": "transformers"},
        lambda g, s, form, length: dynamic(g, s, "paper", length)),
    ("dynamic: s of the target", "dynamic", {}, lambda g, s, length: ntk(g, s)),
    ("dynamic: switched off", "dynamic", {}, lambda g, s, length: none(g, s)),
    ("longrope-switch: lists swapped", "longrope-switch", SWITCH,
        lambda g, s, long_factor, short_factor, length: (
        longrope_switch(g, s, short_factor, long_factor, length=length))),
    ("longrope-switch: a of the length", "longrope-switch", SWITCH,
        lambda g, s, long_factor, short_factor, length: (
        g.theta / np.array(long_factor), longrope_temperature(g, length / g.L))),
]  # fmt: skip

"""A valid instance of every registered method, so that tests over METHODS cover a new one automatically."""

from ropepatch.scaling import METHODS
from ropepatch.scaling.rope import Rope

STATIC = [name for name, method in METHODS.items() if not method.length_dependent]
FACTORS = (1.0, 1.5, 2.0, 4.0, 16.0, 40.0)

GEOMETRIES = {
    "llama-2": Rope(128, 1e4, 4096),
    "llama-1": Rope(128, 1e4, 2048),
    "tinyllama": Rope(64, 1e4, 2048),
    "llama-3": Rope(128, 5e5, 8192),
    "qwen3": Rope(128, 1e6, 32768),
    "gpt-oss": Rope(64, 1.5e5, 4096),
    "babyllama": Rope(16, 1e4, 256),
    # Half of a head dimension of 64 rotates, as in GPT-NeoX models
    "partial": Rope(32, 1e4, 2048),
}


def rising(pairs, first, last):
    """Divisors from `first` at the fastest pair to `last` at the slowest, in even steps."""
    return tuple(first + (last - first) * i / max(pairs - 1, 1) for i in range(pairs))


# Examples of each required parameter by name, as functions of the number of rotary pairs and the factor.
EXAMPLES = {
    "rope_theta": lambda pairs, factor: 2e6 * factor,
    "divisors": lambda pairs, factor: rising(pairs, 1.0, factor),
    "long_factor": lambda pairs, factor: rising(pairs, 1.0, 1.5 * factor),
    "short_factor": lambda pairs, factor: rising(pairs, 1.0, 1.25),
}


NEED_MORE = [name for name in METHODS if METHODS[name].required()]


def example(name, rope_pairs, factor=4.0):
    """An instance with its defaults, and examples for its required parameters."""
    required = METHODS[name].required()
    given = {
        parameter: EXAMPLES[parameter](rope_pairs, factor) for parameter in required
    }
    return METHODS[name](factor=factor, **given)


def applied(plan, raw):
    """The content of config.json after the extension."""
    return plan.config.read_from(raw).changed(plan.change.keys).raw

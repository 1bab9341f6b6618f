"""Configurations damaged by chance, one to a seed."""

import json
import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oldest import BROKEN
from tiny_models import tiny_config

Json = Any  # as json.loads makes it, with Objects in place of dicts
METHODS = ("yarn", "linear", "ntk", "llama3", "dynamic", "p-rope", "none")
ALL_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "glm4", "olmo3"),
    *("deepseek_v3", "gpt_oss", "qwen3_5_text", "falcon", "mixtral", "cohere2", "stablelm", "smollm3"),
)
FAMILIES = tuple(family for family in ALL_FAMILIES if family not in BROKEN)
COMPOSITE = ("gemma3", "fuyu", "emu3", "got_ocr2", "llama4", "mllama", "qwen3_5")
HUB = json.loads((Path(__file__).parent / "public_configs.json").read_text(encoding="utf-8"))
PUBLISHED: tuple[
    dict[str, Json], ...
] = (  # of models with several parts; what they leave out transformers knows
    *(entry["config"] for entry in HUB if "text_config" in entry["config"]),
    {"model_type": "fuyu", "hidden_size": 4096, "max_position_embeddings": 16384, "rope_theta": 25000.0},
    *({"model_type": family, "tie_word_embeddings": False, "dtype": "bfloat16"} for family in COMPOSITE),
    *({"model_type": family, "text_config": {"num_hidden_layers": 4}} for family in COMPOSITE),
)
WINDOW = 64
SCALED: tuple[dict[str, Json], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)


class Objects(list[tuple[str, Json]]):
    """An object of JSON as pairs, in which a key may stand twice."""


class Raw(str):
    """A piece of JSON that is written as it is, whether it is JSON or not."""


@dataclass(frozen=True)
class Mutant:
    """A damaged config.json, and how it is asked for.

    Args:
        seed: Makes the same one again.
        family: The model type it was.
        damage: What was done to which key.
        text: The file.
        method: The scaling to plan.
        to: The target.
    """

    seed: int
    family: str
    damage: tuple[str, ...]
    text: str
    method: str
    to: int | str

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.family}, {self.method}: {'; '.join(self.damage)}"


def original(draw: random.Random) -> tuple[str, dict[str, Json]]:
    """The configuration of a small model, its rope scaled or not, in today's keys or in the older ones.

    Or one that is published, with its part for text in the file, or left to transformers.
    """
    if draw.random() < 0.2:
        config = deepcopy(draw.choice(PUBLISHED))
        text = config.get("text_config", config)
        if draw.random() < 0.5:
            text["rope_scaling"] = draw.choice(SCALED) | {"original_max_position_embeddings": WINDOW // 4}
        return config["model_type"], config
    family = draw.choice(FAMILIES)
    config = json.loads(tiny_config(family).to_json_string())
    rope = config["rope_parameters"]
    if "rope_theta" in rope and draw.random() < 0.6:
        scaled = draw.choice(SCALED) | {"original_max_position_embeddings": WINDOW // 4}
        config["rope_parameters"] = rope = rope | deepcopy(scaled)
    if "rope_theta" in rope and draw.random() < 0.4:
        theta = {"rope_theta": rope["rope_theta"]}
        older = {key: value for key, value in rope.items() if key != "rope_theta"}
        del config["rope_parameters"]
        config |= theta | ({} if rope["rope_type"] == "default" else {"rope_scaling": older})
    return family, config


def mutant(seed: int) -> Mutant:
    """The damaged configuration of a seed."""
    draw = random.Random(seed)
    family, config = original(draw)
    tree = as_objects(config)
    damage = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if not (places := [*walk(tree)]):
            break
        of_rope = [
            place for place in places if re.search(r"rope|rotary|position|head_dim|model_type", place.name)
        ]
        place = draw.choice(of_rope if of_rope and draw.random() < 0.6 else places)
        kind = draw.choice([*DAMAGES])
        DAMAGES[kind](draw, place)
        damage.append(f"{kind} {place.name}")
    to = "4x" if family in COMPOSITE else draw.choice((256, 100, 512))
    return Mutant(seed, family, tuple(damage), written(tree), draw.choice(METHODS), to)


@dataclass(frozen=True)
class Place:
    """A key of an object.

    Args:
        name: The keys that lead there.
        holder: The object.
        index: Where in it the key is.
    """

    name: str
    holder: Objects
    index: int

    @property
    def key(self) -> str:
        return self.holder[self.index][0]

    @property
    def value(self) -> Json:
        return self.holder[self.index][1]

    def put(self, value: Json) -> None:
        self.holder[self.index] = self.key, value


def walk(tree: Objects, above: str = "") -> Iterator[Place]:
    """Every key of an object and of those within it."""
    for index, (key, value) in enumerate(tree):
        name = f"{above}{key[:40]}"
        yield Place(name, tree, index)
        if isinstance(value, Objects):
            yield from walk(value, f"{name}.")


def as_objects(value: Json) -> Json:
    """A copy in which objects are pairs."""
    if isinstance(value, dict):
        return Objects((key, as_objects(item)) for key, item in value.items())
    return [as_objects(item) for item in value] if isinstance(value, list) else value


def written(value: Json) -> str:
    """The text of a value."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, Objects):
        return "{" + ", ".join(f"{written(key)}: {written(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value)


# --- what is done to a key ---------------------------------------------------------------------------

NOT_FINITE = (
    "NaN",
    "Infinity",
    "-Infinity",
    '"nan"',
    '"Infinity"',
    '{"__float__": "NaN"}',
    '{"__float__": 3}',
)
TOO_LARGE = (
    "1e999",
    "-1e999",
    "1e308",
    "-1e308",
    "5e-324",
    "1e30",
    "9" * 400,
    "9" * 5000,
    str(2**63),
    "1e-400",
)
ILL_TEXTS = (
    r"\ud800",
    r"x\udfffy",
    r"\u001b[31mred",
    r"a\u0000b",
    r"two\nlines",
    r"\u202eback",
    r"\ud83d\ude00",
)
OTHER_TYPES: tuple[Json, ...] = (
    None,
    True,
    False,
    "yarn",
    "16",
    "",
    [],
    [[]],
    Objects(),
    [1, "x", None] * 2,
    0,
    0.5,
)


def retyped(draw: random.Random, place: Place) -> None:
    as_text = place.value if isinstance(place.value, str) else written(place.value)
    place.put(draw.choice([*OTHER_TYPES, as_text, [place.value]]))


def resigned(draw: random.Random, place: Place) -> None:
    place.put(Raw(f"-{written(place.value).lstrip('-')}") if is_number(place.value) else -1)


def resized(draw: random.Random, place: Place) -> None:
    if isinstance(place.value, list):
        place.put(place.value * draw.choice((0, 2, 50)))
    elif is_number(place.value) and abs(place.value) < 1e100:
        # Not thousands of layers or experts, which are no error and take minutes to build.
        place.put(
            draw.choice((0, 1, 3, place.value + 1, place.value - 1, place.value / 3, place.value * 10**12))
        )
    else:
        place.put(draw.choice((0, 1, 10**12)))


def dropped(draw: random.Random, place: Place) -> None:
    del place.holder[place.index]


def doubled(draw: random.Random, place: Place) -> None:
    place.holder.append((place.key, draw.choice([*OTHER_TYPES, place.value])))


def nested(draw: random.Random, place: Place) -> None:
    depth = draw.choice((1, 1, 2, 3000))
    if depth == 3000:
        place.put(Raw('{"x":' * depth + "1" + "}" * depth))
        return
    key = draw.choice((place.key, "full_attention", "text_config", "0"))
    for _ in range(depth):
        place.put(Objects([(key, place.value)]))


def swapped(draw: random.Random, place: Place) -> None:
    other = Place("", place.holder, draw.randrange(len(place.holder)))
    mine = place.value
    place.put(other.value)
    other.put(mine)


def not_finite(draw: random.Random, place: Place) -> None:
    place.put(Raw(draw.choice(NOT_FINITE)))


def too_large(draw: random.Random, place: Place) -> None:
    place.put(Raw(draw.choice(TOO_LARGE)))


def ill_text(draw: random.Random, place: Place) -> None:
    place.put(Raw(f'"{draw.choice(ILL_TEXTS)}"'))


def ill_key(draw: random.Random, place: Place) -> None:
    place.holder[place.index] = Raw(f'"{draw.choice(ILL_TEXTS)}"'), place.value


def huge(draw: random.Random, place: Place) -> None:
    place.put(draw.choice(("x" * 10**5, [0.5] * 10**4, Objects((f"k{i}", 1.0) for i in range(300)))))


def is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DAMAGES: dict[str, Callable[[random.Random, Place], None]] = {
    "type of": retyped,
    "sign of": resigned,
    "size of": resized,
    "without": dropped,
    "twice": doubled,
    "nested": nested,
    "swapped": swapped,
    "not finite:": not_finite,
    "too large:": too_large,
    "ill text in": ill_text,
    "ill name for": ill_key,
    "huge": huge,
}

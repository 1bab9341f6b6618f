"""Public configs, and small configs with random damage.

public_configs.json contains the keys of published config.json files that RoPE depends on. Its LongRoPE
factors are shortened, because no check uses them. Two more configs are of extended models.
"""

import json
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oldest import BROKEN
from tiny_models import tiny_config

Config = dict[str, Any]

PUBLISHED = json.loads((Path(__file__).parent / "public_configs.json").read_text(encoding="utf-8"))
METHODS = ("yarn", "linear", "ntk", "llama3", "dynamic", "p-rope", "none")
ALL_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "glm4", "olmo3"),
    *("deepseek_v3", "gpt_oss", "qwen3_5_text", "falcon", "mixtral", "cohere2", "stablelm", "smollm3"),
)
FAMILIES = tuple(family for family in ALL_FAMILIES if family not in BROKEN)
COMPOSITE = ("gemma3", "fuyu", "emu3", "got_ocr2", "llama4", "mllama", "qwen3_5")
# Configs of models with several parts; transformers has defaults for the missing keys.
IN_PARTS: tuple[Config, ...] = (
    *(entry["config"] for entry in PUBLISHED if "text_config" in entry["config"]),
    {"model_type": "fuyu", "hidden_size": 4096, "max_position_embeddings": 16384, "rope_theta": 25000.0},
    *({"model_type": family, "tie_word_embeddings": False, "dtype": "bfloat16"} for family in COMPOSITE),
    *({"model_type": family, "text_config": {"num_hidden_layers": 4}} for family in COMPOSITE),
)
WINDOW = 64
SCALED: tuple[Config, ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)


@dataclass(frozen=True)
class Mutant:
    """A damaged config.json, and the plan that is requested for it.

    Args:
        seed: The seed that reproduces it.
        family: The model type of the undamaged config.
        damage: The kinds of damage and their keys.
        text: The content of the file.
        method: The scaling to plan.
        to: The target length.
    """

    seed: int
    family: str
    damage: tuple[str, ...]
    text: str
    method: str
    to: int | str

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.family}, {self.method}: {'; '.join(self.damage)}"


def original(draw: random.Random) -> tuple[str, Config]:
    """The config of a small model, with or without RoPE scaling, in the current or the older keys.

    Or a published config with several parts, whose text_config may be missing.
    """
    if draw.random() < 0.2:
        config = deepcopy(draw.choice(IN_PARTS))
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
    damage, text = damaged(draw, config, draw.choice((1, 1, 1, 2, 3)))
    to = "4x" if family in COMPOSITE else draw.choice((256, 100, 512))
    return Mutant(seed, family, damage, text, draw.choice(METHODS), to)


# Without num_labels, for which transformers generates a name each.
RARE = """
    auto_map base_model_tp_plan id2label is_encoder_decoder layer_types original_max_position_embeddings
    partial_rotary_factor per_layer_config quantization_config rotary_emb_base rope_scaling rope_theta
    sliding_window text_config torch_dtype use_sliding_window
"""


def with_rare_key(draw: random.Random, config: Config) -> Config:
    """A config that mostly has a rare key, with a value of any type."""
    values = (*OTHER_TYPES, *SCALED, {"full_attention": SCALED[2]}, ["full_attention", "?"], 64, 1e30)
    return config | {draw.choice(RARE.split()): draw.choice(values)} if draw.random() < 0.7 else config


# Pieces of valid or invalid JSON, and the other kinds of damage.
NOT_FINITE = (
    *("NaN", "Infinity", "-Infinity", '"nan"', '"Infinity"'),
    *('{"__float__": "NaN"}', '{"__float__": 3}'),
)
TOO_LARGE = (
    *("1e999", "-1e999", "1e308", "-1e308", "5e-324", "1e30", "9" * 400, "9" * 5000, str(2**63), "1e-400"),
)
ILL_TEXTS = (*(r"\u001b[31mred", r"a\u0000b", r"two\nlines", r"\u202eback", r"\ud83d\ude00"),)
OTHER_TYPES: tuple[Any, ...] = (
    *(None, True, False, "yarn", "16", "", [], [[]], {}, [1, "x", None] * 2, 0, 0.5),
)
HUGE = ("x" * 10**5, [0.5] * 10**4, {f"k{i}": 1.0 for i in range(300)})
PIECES: dict[str, tuple[str, ...]] = {
    "not finite:": NOT_FINITE,
    "too large:": TOO_LARGE,
    "ill text in": tuple(f'"{text}"' for text in ILL_TEXTS),
    "huge": tuple(map(json.dumps, HUGE)),
}
DAMAGES = ("type of", "sign of", "size of", "without", "twice", "nested", "swapped", "ill name for", *PIECES)


def walk(tree: Config, above: str = "") -> Iterator[tuple[str, Config, str]]:
    """Yield every key of an object and of nested objects: the path, the object, the key."""
    for key, value in tree.items():
        name = f"{above}{key[:40]}"
        yield name, tree, key
        if isinstance(value, dict):
            yield from walk(value, f"{name}.")


def damaged(draw: random.Random, content: Config, times: int) -> tuple[tuple[str, ...], str]:
    """Damage keys of an object, mostly those of RoPE; return the kinds of damage and the text."""
    tree, damage, pieces = deepcopy(content), [], []

    def piece(text: str) -> str:
        """Return a placeholder for a piece of the text."""
        pieces.append(text)
        return f"<piece {len(pieces) - 1}>"

    for _ in range(times):
        if not (places := [*walk(tree)]):
            break
        of_rope = [one for one in places if re.search(r"rope|rotary|position|head_dim|model_type", one[0])]
        name, holder, key = draw.choice(of_rope if of_rope and draw.random() < 0.6 else places)
        kind, value = draw.choice(DAMAGES), holder[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        match kind:
            case "type of":
                holder[key] = draw.choice([*OTHER_TYPES, json.dumps(value), [value]])
            case "sign of":
                holder[key] = -value if is_number else -1
            case "size of" if is_number and abs(value) < 1e100:
                # Not thousands of layers or experts: they are valid and take minutes to build.
                holder[key] = draw.choice((0, 1, 3, value + 1, value - 1, value / 3, value * 10**12))
            case "size of":
                holder[key] = value * draw.choice((0, 2, 50)) if isinstance(value, list) else 10**12
            case "without":
                del holder[key]
            case "twice":
                holder[piece(json.dumps(key))] = draw.choice([*OTHER_TYPES, value])
            case "nested" if draw.random() < 0.25:
                holder[key] = piece('{"x":' * 3000 + "1" + "}" * 3000)
            case "nested":
                holder[key] = {draw.choice((key, "full_attention", "text_config", "0")): value}
            case "swapped":
                other = draw.choice([*holder])
                holder[key], holder[other] = holder[other], value
            case "ill name for":
                holder[piece(f'"{draw.choice(ILL_TEXTS)}"')] = holder.pop(key)
            case _:
                holder[key] = piece(draw.choice(PIECES[kind]))
        damage.append(f"{kind} {name}")
    text = json.dumps(tree)
    for number, one in enumerate(pieces):
        text = text.replace(json.dumps(f"<piece {number}>"), one)
    return tuple(damage), text

"""Damaged configurations: public ones with a planted fault each, and small ones damaged by chance.

Of the config.json files on the Hub the keys that a rope depends on are in public_configs.json, as published;
of LongRoPE's lists no check reads the factors, which are shortened to their course. Two more are extended.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oldest import BROKEN
from tiny_models import tiny_config

from ropepatch.model.architectures import STATE_THETA
from ropepatch.model.config import legacy_keys

Config = dict[str, Any]
Choose = Callable[[Sequence[Any]], Any]  # one of several


@dataclass(frozen=True)
class Files:
    """The three files that say how long the context is."""

    config: Config
    tokenizer: Config | None = None
    generation: Config | None = None

    def contents(self) -> dict[str, Config]:
        named = {
            "config.json": self.config,
            "tokenizer_config.json": self.tokenizer,
            "generation_config.json": self.generation,
        }
        return {name: content for name, content in named.items() if content is not None}


PUBLISHED = json.loads((Path(__file__).parent / "public_configs.json").read_text(encoding="utf-8"))


def files_of(entry: dict[str, Any]) -> Files:
    return Files(entry["config"], entry.get("tokenizer"), entry.get("generation"))


# As published, or as the publisher says to change it: the doctor finds nothing in these.
SOUND: dict[str, Files] = {entry["name"]: files_of(entry) for entry in PUBLISHED if "code" not in entry}
QWEN_YARN = SOUND["Qwen2.5-7B-Instruct, YaRN as documented"].config["rope_scaling"]
# As published too, but what they publish has a known weakness: its code.
INHERENT: dict[str, tuple[Files, str]] = {
    entry["name"]: (files_of(entry), entry["code"]) for entry in PUBLISHED if "code" in entry
}


# --- faults ---------------------------------------------------------------------------------------------

Plant = Callable[[Choose, Files], None]
FAULTS: dict[str, tuple[str, Plant]] = {}  # the code of the finding, and what plants the fault


def fault(code: str) -> Callable[[Plant], Plant]:
    """Adds a function to FAULTS under its name."""

    def add(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = code, plant
        return plant

    return add


class NotHereError(Exception):
    """This fault cannot be planted into this original."""


def need(condition: object) -> None:
    if not condition:
        raise NotHereError


def blocks(config: Config) -> list[Config]:
    """The JSON objects that describe a scaled rope, to be changed in place; all alike."""
    text = config.get("text_config", config)
    ropes = [text.get(key) for key in ("rope_parameters", "rope_scaling")]
    return [block for block in ropes if block and kind(block) not in (None, "default", "mrope")]


def kind(block: Config) -> str | None:
    return block.get("rope_type", block.get("type"))


def of_kind(files: Files, *kinds: str) -> list[Config]:
    ropes = blocks(files.config)
    need(ropes and kind(ropes[0]) in kinds)
    return ropes


def change(ropes: list[Config], **values: Any) -> None:
    for block in ropes:
        block.update(values)


def drop(ropes: list[Config], *keys: str) -> None:
    for block in ropes:
        for key in keys:
            block.pop(key, None)


def both_generations(config: Config) -> Config:
    """The same rope in both generations of keys; returns the newer ones."""
    need("text_config" not in config and "rope_local_base_freq" not in config and "layer_types" not in config)
    if "rope_parameters" not in config:
        theta = config.get("rope_theta", config.get("rotary_emb_base", 10000.0))
        scaling = {key: value for key, value in (config.get("rope_scaling") or {}).items() if key != "type"}
        named = {"rope_type": kind(config.get("rope_scaling") or {}) or "default", "rope_theta": theta}
        need(named["rope_type"] != "mrope")
        config["rope_parameters"] = scaling | named
        if "original_max_position_embeddings" in config:
            top = config["original_max_position_embeddings"]
            config["rope_parameters"]["original_max_position_embeddings"] = top
        config.update(legacy_keys(config, config["rope_parameters"]))
    return config["rope_parameters"]


@fault("theta-lost")
def theta_dropped(choose: Choose, files: Files) -> None:
    """No check can know a base that stood in one file only, unless the architecture tells."""
    need("rope_parameters" not in files.config)
    need(files.config.get("rope_theta") not in (None, 10000, 10000.0))
    of_llama_3 = files.config.get("vocab_size") == 128256
    need(of_llama_3 or files.config["model_type"] in STATE_THETA)
    need(files.config["model_type"] not in ("gemma3_text", "mixtral", "olmo3"))  # their default
    del files.config["rope_theta"]


@fault("theta-lost")
def theta_null(choose: Choose, files: Files) -> None:
    need("rope_theta" in files.config)
    files.config["rope_theta"] = None


@fault("theta-lost")
def theta_not_in_rope_parameters(choose: Choose, files: Files) -> None:
    parameters = both_generations(files.config)
    need(parameters["rope_theta"] != 10000)
    del parameters["rope_theta"]
    if choose([False, True]):
        files.config.pop("rope_theta", None)


@fault("theta-lost")
def theta_not_at_the_top(choose: Choose, files: Files) -> None:
    parameters = both_generations(files.config)
    need(files.config.get("rope_scaling") and parameters["rope_theta"] != 10000)
    files.config.pop("rope_theta")


@fault("theta-lost")
def theta_of_llama_2(choose: Choose, files: Files) -> None:
    need(files.config.get("vocab_size") == 128256)
    files.config["rope_theta"] = 10000.0


@fault("keys-contradict")
def older_keys_contradict(choose: Choose, files: Files) -> None:
    both_generations(files.config)
    if files.config.get("rope_scaling") and choose([False, True]):
        need("factor" in files.config["rope_scaling"])
        files.config["rope_scaling"]["factor"] *= choose([0.5, 2.0, 4.0])
    else:
        need(files.config["model_type"] != "gpt_neox")
        files.config["rope_theta"] *= choose([0.5, 2, 10, 50])


@fault("keys-contradict")
def original_contradicts(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "yarn", "longrope", "llama3")
    need("layer_types" not in files.config and "text_config" not in files.config)
    original = ropes[0].get("original_max_position_embeddings")
    need(original)
    files.config["original_max_position_embeddings"] = original * choose([2, 4])


@fault("keys-contradict")
def types_contradict(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "yarn", "longrope", "llama3", "linear")
    others = {"linear", "dynamic", "llama3", "longrope"} - {kind(ropes[0])}
    change(ropes, rope_type=kind(ropes[0]), type=choose(sorted(others)))


@fault("only-new-keys")
def only_new_keys(choose: Choose, files: Files) -> None:
    parameters = both_generations(files.config)
    need(parameters["rope_type"] != "default" or parameters["rope_theta"] != 10000)
    for key in ("rope_scaling", "rope_theta", "rotary_emb_base", "original_max_position_embeddings"):
        files.config.pop(key, None)


@fault("original-missing")
def original_dropped(choose: Choose, files: Files) -> None:
    drop(of_kind(files, "yarn", "longrope", "llama3"), "original_max_position_embeddings")
    files.config.pop("original_max_position_embeddings", None)


def lengths_of(files: Files, *kinds: str) -> tuple[list[Config], int, int]:
    ropes = of_kind(files, *kinds)
    top = files.config.get("original_max_position_embeddings")
    window = files.config["max_position_embeddings"]
    return ropes, top or ropes[0]["original_max_position_embeddings"], window


@fault("factor-contradicts-lengths")
def factor_contradicts(choose: Choose, files: Files) -> None:
    ropes, original, window = lengths_of(files, "yarn")
    need(window > 1.25 * original)
    # Above the ratio nobody can tell: models are trained with larger factors than they need.
    change(ropes, factor=window / original * choose([0.25, 0.5, 0.75, 0.9]))


@fault("factor-contradicts-lengths")
def window_below_original(choose: Choose, files: Files) -> None:
    _, original, _ = lengths_of(files, "yarn")
    files.config["max_position_embeddings"] = original // choose([2, 4])


@fault("factor-rounded")
def factor_rounded(choose: Choose, files: Files) -> None:
    ropes, original, _ = lengths_of(files, "yarn")
    ratio = choose([1.7, 2.44, 3.3, 6.1])
    files.config["max_position_embeddings"] = round(original * ratio)
    change(ropes, factor=float(math.ceil(ratio)))


@fault("window-not-integer")
def window_a_float(choose: Choose, files: Files) -> None:
    need("max_position_embeddings" in files.config)
    ropes = blocks(files.config)
    nested = [block for block in ropes if "original_max_position_embeddings" in block]
    if nested and choose([False, True]):
        for block in (*nested, files.config):
            if "original_max_position_embeddings" in block:
                block["original_max_position_embeddings"] = float(block["original_max_position_embeddings"])
    else:
        files.config["max_position_embeddings"] = float(files.config["max_position_embeddings"])


@fault("head-dim-null")
def head_dim_null(choose: Choose, files: Files) -> None:
    of_kind(files, "yarn", "longrope", "dynamic")
    need(files.config["model_type"] in ("qwen2", "qwen3"))  # LLaMA and Mistral fill it in
    files.config["head_dim"] = None


@fault("head-dim-null")
def head_dim_left_open(choose: Choose, files: Files) -> None:
    need(files.config["model_type"] == "mixtral")
    files.config["rope_scaling"] = dict(QWEN_YARN)


@fault("type-unknown")
def type_unknown(choose: Choose, files: Files) -> None:
    ropes = blocks(files.config)
    need(ropes)
    drop(ropes, "type", "rope_type")
    change(ropes, rope_type=choose(["ntk", "YaRN", "yarm", "llama-3", "dynamic_ntk", 3, ["x"]]))


@fault("type-unknown")
def type_su(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "longrope")
    drop(ropes, "type", "rope_type")
    change(ropes, **{choose(["type", "rope_type"]): "su"})


@fault("type-missing")
def type_dropped(choose: Choose, files: Files) -> None:
    ropes = blocks(files.config)
    need(ropes and {"factor", "short_factor"} & ropes[0].keys())
    drop(ropes, "type", "rope_type")


@fault("scaling-ignored")
def type_default(choose: Choose, files: Files) -> None:
    ropes = blocks(files.config)
    type_dropped(choose, files)
    change(ropes, rope_type="default")


@fault("key-missing")
def key_dropped(choose: Choose, files: Files) -> None:
    keys = {
        "linear": ["factor"],
        "yarn": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
        "longrope": ["short_factor", "long_factor"],
    }
    ropes = of_kind(files, *keys)
    drop(ropes, choose(keys[kind(ropes[0])]))


@fault("not-a-number")
def number_quoted(choose: Choose, files: Files) -> None:
    ropes = blocks(files.config)
    places = [(ropes, key) for key in ("factor", "beta_fast", "low_freq_factor") if ropes and key in ropes[0]]
    places += [([files.config], "rope_theta")] if isinstance(files.config.get("rope_theta"), float) else []
    need(places)
    where, key = choose(places)
    text = json.dumps(where[0][key])
    change(where, **{key: choose([text, [where[0][key]], True, "16x"])})


@fault("impossible-value")
def value_impossible(choose: Choose, files: Files) -> None:
    ropes = blocks(files.config)
    if ropes and "factor" in ropes[0] and choose([False, True]):
        change(ropes, factor=choose([0, 0.0, -4.0]))
    else:
        need(files.config.get("rope_theta") and "rope_parameters" not in files.config)
        files.config["rope_theta"] = choose([0, 1, 1.0, -10000.0])


@fault("impossible-value")
def switch_impossible(choose: Choose, files: Files) -> None:
    change(of_kind(files, "yarn"), truncate=choose([10_000, "yes"]))


@fault("mscale-alone")
def mscale_alone(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "yarn")
    need("attention_factor" not in ropes[0])
    drop(ropes, "mscale", "mscale_all_dim")
    # Of mscale 1 alone all readers make the same.
    change(ropes, **choose([{"mscale": 0.707}, {"mscale_all_dim": 0.707}, {"mscale_all_dim": 1.0}]))


@fault("attention-factor-inverted")
def attention_inverted(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "yarn")
    drop(ropes, "mscale", "mscale_all_dim")
    exact = 0.1 * math.log(ropes[0]["factor"]) + 1
    change(ropes, attention_factor=1 / choose([exact, 1.1, 2.0]))


@fault("switches-against-cache")
def lists_differ(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "longrope")
    need(ropes[0]["short_factor"] == ropes[0]["long_factor"])
    change(ropes, short_factor=[1.0] * len(ropes[0]["long_factor"]))


@fault("switches-against-cache")
def dynamic(choose: Choose, files: Files) -> None:
    need(not blocks(files.config) and "rope_scaling" in files.config and "text_config" not in files.config)
    need(files.config["model_type"] in ("llama", "qwen3"))
    files.config["rope_scaling"] = {"type": "dynamic", "factor": choose([2.0, 4.0])}


@fault("attention-factor-unread")
def mscales_dropped(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "longrope")
    need("short_mscale" in ropes[0])
    drop(ropes, "short_mscale", "long_mscale")
    change(ropes, attention_factor=choose([1.0, 1.3]))


@fault("key-misspelled")
def key_misspelled(choose: Choose, files: Files) -> None:
    ropes = blocks(files.config)
    spellings = {
        "beta_fast": "beta_fest",
        "attention_factor": "attention_facter",
        "original_max_position_embeddings": "original_max_position_embedding",
        "low_freq_factor": "low_frequ_factor",
    }
    there = [key for key in spellings if ropes and key in ropes[0]]
    need(there)
    key = choose(there)
    for block in ropes:
        block[spellings[key]] = block.pop(key)


@fault("tokenizer-behind")
def tokenizer_behind(choose: Choose, files: Files) -> None:
    need(files.tokenizer is not None and "max_position_embeddings" in files.config)
    files.tokenizer["model_max_length"] = files.config["max_position_embeddings"] // choose([2, 8])


@fault("generation-behind")
def generation_behind(choose: Choose, files: Files) -> None:
    need(files.generation is not None)
    _, original, _ = lengths_of(files, "yarn", "longrope")
    files.generation["max_length"] = original


@fault("factor-below-one")
def factor_inverted(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "yarn", "linear", "llama3")
    change(ropes, factor=1 / ropes[0]["factor"])


@fault("factor-is-integer")
def factor_whole(choose: Choose, files: Files) -> None:
    ropes = of_kind(files, "linear")
    change(ropes, factor=int(ropes[0]["factor"]))


def changes(name: str, code: str, kind: str, *options: Config) -> None:
    """Adds a fault that is one of several changes of the ropes of a type."""

    def plant(choose: Choose, files: Files) -> None:
        change(of_kind(files, kind), **choose(options))

    FAULTS[name] = code, plant


BETAS = ((1, 32), (1.0, 32.0), (2.0, 16.0))
changes("betas_swapped", "betas-swapped", "yarn", *({"beta_fast": a, "beta_slow": b} for a, b in BETAS))
changes("bands_swapped", "bands-swapped", "llama3", {"low_freq_factor": 4.0, "high_freq_factor": 1.0})
changes("ramp_open", "truncate-ignored", "yarn", {"truncate": False})
changes("attention_zero", "attention-factor-zero", "yarn", {"attention_factor": 0}, {"attention_factor": 0.0})
CUT = ({name: [8.0] * length} for name in ("short_factor", "long_factor") for length in (1, 16, 65))
changes("list_cut", "list-length", "longrope", *CUT)


@dataclass(frozen=True)
class Damaged:
    """One original with one fault."""

    fault: str
    code: str
    original: str
    files: Files


ORIGINALS: dict[str, Files] = SOUND | {"Phi-3-mini-128k": INHERENT["Phi-3-mini-128k"][0]}


def planted(each: int) -> Iterator[Damaged]:
    """Damaged configurations, `each` of every kind of fault; the same in every run."""
    for fault, (code, plant) in FAULTS.items():
        draw, left = random.Random(fault), each
        while left:
            name = draw.choice([*ORIGINALS])
            files = deepcopy(ORIGINALS[name])
            with suppress(NotHereError):
                plant(draw.choice, files)
                left -= 1
                yield Damaged(fault, code, name, files)


# --- by chance ------------------------------------------------------------------------------------------

METHODS = ("yarn", "linear", "ntk", "llama3", "dynamic", "p-rope", "none")
ALL_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "glm4", "olmo3"),
    *("deepseek_v3", "gpt_oss", "qwen3_5_text", "falcon", "mixtral", "cohere2", "stablelm", "smollm3"),
)
FAMILIES = tuple(family for family in ALL_FAMILIES if family not in BROKEN)
COMPOSITE = ("gemma3", "fuyu", "emu3", "got_ocr2", "llama4", "mllama", "qwen3_5")
# Of models with several parts; what they leave out transformers knows.
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


def original(draw: random.Random) -> tuple[str, Config]:
    """The configuration of a small model, its rope scaled or not, in today's keys or in the older ones.

    Or one that is published, with its part for text in the file, or left to transformers.
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


# Not num_labels: transformers makes a name for each.
RARE = """
    auto_map base_model_tp_plan id2label is_encoder_decoder layer_types original_max_position_embeddings
    partial_rotary_factor per_layer_config quantization_config rotary_emb_base rope_scaling rope_theta
    sliding_window text_config torch_dtype use_sliding_window
"""


def with_rare_key(draw: random.Random, config: Config) -> Config:
    """A configuration that mostly says something, of a type or not, under a key which few have."""
    values = (*OTHER_TYPES, *SCALED, {"full_attention": SCALED[2]}, ["full_attention", "?"], 64, 1e30)
    return config | {draw.choice(RARE.split()): draw.choice(values)} if draw.random() < 0.7 else config


# Pieces of JSON, or of what is none, and what else is done to a key.
NOT_FINITE = (
    *("NaN", "Infinity", "-Infinity", '"nan"', '"Infinity"'),
    *('{"__float__": "NaN"}', '{"__float__": 3}'),
)
TOO_LARGE = (
    *("1e999", "-1e999", "1e308", "-1e308", "5e-324", "1e30", "9" * 400, "9" * 5000, str(2**63), "1e-400"),
)
ILL_TEXTS = (
    *(r"\ud800", r"x\udfffy", r"\u001b[31mred", r"a\u0000b", r"two\nlines", r"\u202eback", r"\ud83d\ude00"),
)
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
    """Every key of an object and of those within it: the keys that lead there, the object, the key."""
    for key, value in tree.items():
        name = f"{above}{key[:40]}"
        yield name, tree, key
        if isinstance(value, dict):
            yield from walk(value, f"{name}.")


def damaged(draw: random.Random, content: Config, times: int) -> tuple[tuple[str, ...], str]:
    """What was done to which keys of an object, mostly those of the rope; and its text."""
    tree, damage, pieces = deepcopy(content), [], []

    def piece(text: str) -> str:
        """What stands for a piece of the text until all is done."""
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
                # Not thousands of layers or experts, which are no error and take minutes to build.
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

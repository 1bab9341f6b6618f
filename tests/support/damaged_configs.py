"""What public checkpoints say of their rope, and faults to plant into it, one at a time.

Of the config.json files on the Hub the keys that a rope depends on are in public_configs.json, as published;
of LongRoPE's lists no check reads the factors, which are shortened to their course. Two more are extended.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

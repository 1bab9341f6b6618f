"""What public checkpoints say of their rope, and faults to plant into it, one at a time.

Of the config.json files on the Hub the keys that a rope depends on are in public_configs.json, as published;
those of LongRoPE are here, their lists of factors shortened to their course, which no check reads.
"""

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from ropepatch.model.legacy import legacy_keys

Config = dict[str, Any]
Choose = Callable[[Sequence[Any]], Any]  # one of several; by hypothesis, or the first


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


def rising(pairs: int, last: float) -> list[float]:
    return [round(1 + (last - 1) * i / (pairs - 1), 4) for i in range(pairs)]


def said_of(entry: dict[str, Any]) -> Files:
    return Files(entry["config"], entry.get("tokenizer"), entry.get("generation"))


# As published, or as the publisher says to change it: the doctor finds nothing in these.
SOUND: dict[str, Files] = {entry["name"]: said_of(entry) for entry in PUBLISHED if "code" not in entry}
QWEN_YARN = SOUND["Qwen2.5-7B-Instruct, YaRN as documented"].config["rope_scaling"]
PHI_3 = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "rope_theta": 10000.0,
    "rope_scaling": {"long_factor": rising(48, 64.0), "short_factor": rising(48, 2.8), "type": "longrope"},
    "sliding_window": 262144,
    "transformers_version": "4.40.2",
    "vocab_size": 32064,
}
PHI_4 = PHI_3 | {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "pad_token_id": 199999,
    "vocab_size": 200064,
    "rope_scaling": PHI_3["rope_scaling"] | {"short_factor": [1.0] * 48},
}
# As published too, but what they publish has a known weakness: its code.
INHERENT: dict[str, tuple[Files, str]] = {
    "Phi-3-mini-128k": (Files(PHI_3, {"model_max_length": 131072}), "switches-against-cache"),
    "Phi-4-mini": (Files(PHI_4), "switches-against-cache"),
} | {entry["name"]: (said_of(entry), entry["code"]) for entry in PUBLISHED if "code" in entry}
EXTENDED = (
    {  # what `ropepatch extend` writes, in both generations of keys
        key: value for key, value in SOUND["Llama-2-7b"].config.items() if key[:4] not in ("rope", "tran")
    }
    | {"max_position_embeddings": 32768, "original_max_position_embeddings": 4096, "rope_theta": 20000.0}
)
STATIC_LONGROPE = {
    "rope_type": "longrope",
    "factor": 8.0,
    "short_factor": rising(64, 8.0),
    "long_factor": rising(64, 8.0),
    "attention_factor": 1.138629436,
    "short_mscale": 1.138629436,
    "long_mscale": 1.138629436,
    "original_max_position_embeddings": 4096,
}
LONG_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2079441541679836,
}
for name, scaling in {"yarn": LONG_YARN, "longrope": STATIC_LONGROPE}.items():
    SOUND[f"extended with {name}"] = Files(
        EXTENDED
        | {"rope_parameters": scaling | {"rope_theta": 20000.0}}
        | {"rope_scaling": scaling | {"type": name}},
        {"model_max_length": 32768},
        {"max_length": 32768},
    )


# --- faults ---------------------------------------------------------------------------------------------


class NotHereError(Exception):
    """This fault cannot be planted into this original."""


def need(condition: object) -> None:
    if not condition:
        raise NotHereError


def blocks(config: Config) -> list[Config]:
    """The JSON objects that describe a scaled rope, to be changed in place; all alike."""
    said = config.get("text_config", config)
    found = [said.get(key) for key in ("rope_parameters", "rope_scaling")]
    return [block for block in found if block and kind(block) not in (None, "default", "mrope")]


def kind(block: Config) -> str | None:
    return block.get("rope_type", block.get("type"))


def of_kind(files: Files, *kinds: str) -> list[Config]:
    found = blocks(files.config)
    need(found and kind(found[0]) in kinds)
    return found


def change(found: list[Config], **values: Any) -> None:
    for block in found:
        block.update(values)


def drop(found: list[Config], *keys: str) -> None:
    for block in found:
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


def theta_dropped(choose: Choose, files: Files) -> None:
    """No check can know a base that stood in one file only, unless the architecture tells."""
    need("rope_parameters" not in files.config)
    need(files.config.get("rope_theta") not in (None, 10000, 10000.0))
    need(
        files.config["model_type"] not in ("gemma3_text", "mixtral", "olmo3", "qwen2_vl", "kimi_k9")
    )  # their default
    del files.config["rope_theta"]


def theta_null(choose: Choose, files: Files) -> None:
    need("rope_theta" in files.config)
    files.config["rope_theta"] = None


def theta_not_in_rope_parameters(choose: Choose, files: Files) -> None:
    parameters = both_generations(files.config)
    need(parameters["rope_theta"] != 10000)
    del parameters["rope_theta"]
    if choose([False, True]):
        files.config.pop("rope_theta", None)


def theta_not_at_the_top(choose: Choose, files: Files) -> None:
    parameters = both_generations(files.config)
    need(files.config.get("rope_scaling") and parameters["rope_theta"] != 10000)
    files.config.pop("rope_theta")


def theta_of_llama_2(choose: Choose, files: Files) -> None:
    need(files.config.get("vocab_size") == 128256)
    files.config["rope_theta"] = 10000.0


def older_keys_contradict(choose: Choose, files: Files) -> None:
    both_generations(files.config)
    if files.config.get("rope_scaling") and choose([False, True]):
        need("factor" in files.config["rope_scaling"])
        files.config["rope_scaling"]["factor"] *= choose([0.5, 2.0, 4.0])
    else:
        need(files.config["model_type"] != "gpt_neox")
        files.config["rope_theta"] *= choose([0.5, 2, 10, 50])


def original_contradicts(choose: Choose, files: Files) -> None:
    found = of_kind(files, "yarn", "longrope", "llama3")
    need("layer_types" not in files.config and "text_config" not in files.config)
    original = found[0].get("original_max_position_embeddings")
    need(original)
    files.config["original_max_position_embeddings"] = original * choose([2, 4])


def types_contradict(choose: Choose, files: Files) -> None:
    found = of_kind(files, "yarn", "longrope", "llama3", "linear")
    others = {"linear", "dynamic", "llama3", "longrope"} - {kind(found[0])}
    change(found, rope_type=kind(found[0]), type=choose(sorted(others)))


def only_new_keys(choose: Choose, files: Files) -> None:
    parameters = both_generations(files.config)
    need(parameters["rope_type"] != "default" or parameters["rope_theta"] != 10000)
    for key in ("rope_scaling", "rope_theta", "rotary_emb_base", "original_max_position_embeddings"):
        files.config.pop(key, None)


def original_dropped(choose: Choose, files: Files) -> None:
    drop(of_kind(files, "yarn", "longrope", "llama3"), "original_max_position_embeddings")
    files.config.pop("original_max_position_embeddings", None)


def lengths_of(files: Files, *kinds: str) -> tuple[list[Config], int, int]:
    found = of_kind(files, *kinds)
    top = files.config.get("original_max_position_embeddings")
    window = files.config["max_position_embeddings"]
    return found, top or found[0]["original_max_position_embeddings"], window


def factor_contradicts(choose: Choose, files: Files) -> None:
    found, original, window = lengths_of(files, "yarn")
    need(window > 1.25 * original)
    # Above the ratio nobody can tell: models are trained with larger factors than they need.
    change(found, factor=window / original * choose([0.25, 0.5, 0.75, 0.9]))


def window_below_original(choose: Choose, files: Files) -> None:
    _, original, _ = lengths_of(files, "yarn")
    files.config["max_position_embeddings"] = original // choose([2, 4])


def factor_rounded(choose: Choose, files: Files) -> None:
    found, original, _ = lengths_of(files, "yarn")
    ratio = choose([1.7, 2.44, 3.3, 6.1])
    files.config["max_position_embeddings"] = round(original * ratio)
    change(found, factor=float(math.ceil(ratio)))


def factor_inverted(choose: Choose, files: Files) -> None:
    found = of_kind(files, "yarn", "linear", "llama3")
    change(found, factor=1 / found[0]["factor"])


def factor_whole(choose: Choose, files: Files) -> None:
    found = of_kind(files, "linear")
    change(found, factor=int(found[0]["factor"]))


def window_a_float(choose: Choose, files: Files) -> None:
    need("max_position_embeddings" in files.config)
    found = blocks(files.config)
    nested = [block for block in found if "original_max_position_embeddings" in block]
    if nested and choose([False, True]):
        for block in (*nested, files.config):
            if "original_max_position_embeddings" in block:
                block["original_max_position_embeddings"] = float(block["original_max_position_embeddings"])
    else:
        files.config["max_position_embeddings"] = float(files.config["max_position_embeddings"])


def betas_swapped(choose: Choose, files: Files) -> None:
    found = of_kind(files, "yarn")
    slow, fast = choose([(1, 32), (1.0, 32.0), (2.0, 16.0)])
    change(found, beta_fast=slow, beta_slow=fast)


def bands_swapped(choose: Choose, files: Files) -> None:
    change(of_kind(files, "llama3"), low_freq_factor=4.0, high_freq_factor=1.0)


def ramp_open(choose: Choose, files: Files) -> None:
    change(of_kind(files, "yarn"), truncate=False)


def head_dim_null(choose: Choose, files: Files) -> None:
    of_kind(files, "yarn", "longrope", "dynamic")
    need(files.config["model_type"] in ("qwen2", "qwen3"))  # LLaMA and Mistral fill it in
    files.config["head_dim"] = None


def head_dim_left_open(choose: Choose, files: Files) -> None:
    need(files.config["model_type"] == "mixtral")
    files.config["rope_scaling"] = dict(QWEN_YARN)


def type_unknown(choose: Choose, files: Files) -> None:
    found = blocks(files.config)
    need(found)
    drop(found, "type", "rope_type")
    change(found, rope_type=choose(["ntk", "YaRN", "yarm", "llama-3", "dynamic_ntk", 3, ["x"]]))


def type_su(choose: Choose, files: Files) -> None:
    found = of_kind(files, "longrope")
    drop(found, "type", "rope_type")
    change(found, **{choose(["type", "rope_type"]): "su"})


def type_dropped(choose: Choose, files: Files) -> None:
    found = blocks(files.config)
    need(found and {"factor", "short_factor"} & found[0].keys())
    drop(found, "type", "rope_type")


def type_default(choose: Choose, files: Files) -> None:
    found = blocks(files.config)
    need(found and {"factor", "short_factor"} & found[0].keys())
    drop(found, "type", "rope_type")
    change(found, rope_type="default")


def key_dropped(choose: Choose, files: Files) -> None:
    keys = {
        "linear": ["factor"],
        "yarn": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
        "longrope": ["short_factor", "long_factor"],
    }
    found = of_kind(files, *keys)
    drop(found, choose(keys[kind(found[0])]))


def number_quoted(choose: Choose, files: Files) -> None:
    found = blocks(files.config)
    places = [(found, key) for key in ("factor", "beta_fast", "low_freq_factor") if found and key in found[0]]
    places += [([files.config], "rope_theta")] if isinstance(files.config.get("rope_theta"), float) else []
    need(places)
    where, key = choose(places)
    text = json.dumps(where[0][key])
    change(where, **{key: choose([text, [where[0][key]], True, "16x"])})


def value_impossible(choose: Choose, files: Files) -> None:
    found = blocks(files.config)
    if found and "factor" in found[0] and choose([False, True]):
        change(found, factor=choose([0, 0.0, -4.0]))
    else:
        need(files.config.get("rope_theta") and "rope_parameters" not in files.config)
        files.config["rope_theta"] = choose([0, 1, 1.0, -10000.0])


def mscale_alone(choose: Choose, files: Files) -> None:
    found = of_kind(files, "yarn")
    need("attention_factor" not in found[0])
    drop(found, "mscale", "mscale_all_dim")
    # Of mscale 1 alone all readers make the same.
    change(found, **choose([{"mscale": 0.707}, {"mscale_all_dim": 0.707}, {"mscale_all_dim": 1.0}]))


def attention_zero(choose: Choose, files: Files) -> None:
    change(of_kind(files, "yarn"), attention_factor=choose([0, 0.0]))


def attention_inverted(choose: Choose, files: Files) -> None:
    found = of_kind(files, "yarn")
    drop(found, "mscale", "mscale_all_dim")
    exact = 0.1 * math.log(found[0]["factor"]) + 1
    change(found, attention_factor=1 / choose([exact, 1.1, 2.0]))


def list_cut(choose: Choose, files: Files) -> None:
    found = of_kind(files, "longrope")
    key, length = choose(["short_factor", "long_factor"]), choose([1, 16, 65])
    change(found, **{key: rising(65, 8.0)[:length]})


def lists_differ(choose: Choose, files: Files) -> None:
    found = of_kind(files, "longrope")
    need(found[0]["short_factor"] == found[0]["long_factor"])
    change(found, short_factor=[1.0] * len(found[0]["long_factor"]))


def dynamic(choose: Choose, files: Files) -> None:
    need(not blocks(files.config) and "rope_scaling" in files.config and "text_config" not in files.config)
    need(files.config["model_type"] in ("llama", "qwen3"))
    files.config["rope_scaling"] = {"type": "dynamic", "factor": choose([2.0, 4.0])}


def mscales_dropped(choose: Choose, files: Files) -> None:
    found = of_kind(files, "longrope")
    need("short_mscale" in found[0])
    drop(found, "short_mscale", "long_mscale")
    change(found, attention_factor=choose([1.0, 1.3]))


def key_misspelled(choose: Choose, files: Files) -> None:
    found = blocks(files.config)
    spellings = {
        "beta_fast": "beta_fest",
        "attention_factor": "attention_facter",
        "original_max_position_embeddings": "original_max_position_embedding",
        "low_freq_factor": "low_frequ_factor",
    }
    there = [key for key in spellings if found and key in found[0]]
    need(there)
    key = choose(there)
    for block in found:
        block[spellings[key]] = block.pop(key)


def tokenizer_behind(choose: Choose, files: Files) -> None:
    need(files.tokenizer is not None and "max_position_embeddings" in files.config)
    files.tokenizer["model_max_length"] = files.config["max_position_embeddings"] // choose([2, 8])


def generation_behind(choose: Choose, files: Files) -> None:
    need(files.generation is not None)
    _, original, _ = lengths_of(files, "yarn", "longrope")
    files.generation["max_length"] = original


Fault = Callable[[Choose, Files], None]
FAULTS: dict[Fault, str] = {
    theta_dropped: "theta-lost",
    theta_null: "theta-lost",
    theta_not_in_rope_parameters: "theta-lost",
    theta_not_at_the_top: "theta-lost",
    theta_of_llama_2: "theta-lost",
    older_keys_contradict: "keys-contradict",
    original_contradicts: "keys-contradict",
    types_contradict: "keys-contradict",
    only_new_keys: "only-new-keys",
    original_dropped: "original-missing",
    factor_contradicts: "factor-contradicts-lengths",
    window_below_original: "factor-contradicts-lengths",
    factor_rounded: "factor-rounded",
    factor_inverted: "factor-below-one",
    factor_whole: "factor-is-integer",
    window_a_float: "window-not-integer",
    betas_swapped: "betas-swapped",
    bands_swapped: "bands-swapped",
    ramp_open: "truncate-ignored",
    head_dim_null: "head-dim-null",
    head_dim_left_open: "head-dim-null",
    type_unknown: "type-unknown",
    type_su: "type-unknown",
    type_dropped: "type-missing",
    type_default: "scaling-ignored",
    key_dropped: "key-missing",
    number_quoted: "not-a-number",
    value_impossible: "impossible-value",
    mscale_alone: "mscale-alone",
    attention_zero: "attention-factor-zero",
    attention_inverted: "attention-factor-inverted",
    list_cut: "list-length",
    lists_differ: "switches-against-cache",
    dynamic: "switches-against-cache",
    mscales_dropped: "attention-factor-unread",
    key_misspelled: "key-misspelled",
    tokenizer_behind: "tokenizer-behind",
    generation_behind: "generation-behind",
}


@dataclass(frozen=True)
class Damaged:
    """One original with one fault."""

    fault: str
    code: str
    original: str
    files: Files


def copied(files: Files) -> Files:
    return Files(*map(deepcopy, (files.config, files.tokenizer, files.generation)))


ORIGINALS: dict[str, Files] = SOUND | {"Phi-3-mini-128k": INHERENT["Phi-3-mini-128k"][0]}


@cache
def homes(fault: Fault) -> tuple[str, ...]:
    """The originals into which a fault can be planted."""

    def applies(files: Files) -> bool:
        try:
            fault(lambda options: options[0], copied(files))
        except NotHereError:
            return False
        return True

    return tuple(name for name, files in ORIGINALS.items() if applies(files))


def planted(each: int) -> list[Damaged]:
    """Damaged configurations, up to `each` of every kind of fault; the same in every run."""
    return [damaged for fault, code in FAULTS.items() for damaged in _planted(fault, code, each)]


def _planted(fault: Fault, code: str, each: int) -> list[Damaged]:
    made: list[Damaged] = []

    @settings(
        max_examples=each,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def plant(data):
        def choose(options: Sequence[Any]) -> Any:
            return data.draw(st.sampled_from(options))

        name = choose(homes(fault))
        files = copied(ORIGINALS[name])
        try:
            fault(choose, files)
        except NotHereError:
            reject()
        made.append(Damaged(fault.__name__, code, name, files))

    plant()
    return made

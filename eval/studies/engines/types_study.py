r"""Which engines support RoPE scaling for which architecture: on small random models and in their sources.

    pip install --no-deps --target MLX mlx-lm==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4
    pip install --no-deps --target TF4 transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2
    pip download --no-deps --dest WHEELS mlx-lm==0.32.2 vllm==0.33.0 sglang==0.5.23 transformers==4.57.6
    python eval/studies/engines/types_study.py --work DIR --mlx MLX --transformers-4 TF4 --wheels WHEELS

A random model of each type is extended once for each saved RoPE type. For engines that run here, their logits
are judged like those of a server by `probe`. For vLLM and SGLang, the source code shows whether the module of
the model passes a scaling to its RoPE. Engines that run here also get a row with all their types.
"""

from __future__ import annotations

import ast
import json
import os
import re
import select
import subprocess
import sys
import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import ropepatch
from ropepatch.extension.planning import plan_method
from ropepatch.model.config import part_of
from ropepatch.probing.asking import find
from ropepatch.probing.judging import judge
from ropepatch.probing.making import TOP, make_reading
from ropepatch.probing.reading import RIGHT, UNSCALED

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))

from families import refusal
from study import Row, Study
from tiny_models import ROTARY_TYPES, tiny_config

SAVED = {
    "default": "ntk",
    "linear": "linear",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
}
RISING = [1 + 0.2 * pair for pair in range(128)]
FAR = 4096  # a sliding window beyond the target length, so that only RoPE matters
LARGE = {  # the standard deviation by a part of a weight's name, so that RoPE changes the logits
    "embed": 0.3,
    **dict.fromkeys(
        ("q_proj", "k_proj", "qkv", "query", "q_a", "q_b", "kv_a", "kv_b"), 0.6
    ),
    **dict.fromkeys(
        ("v_proj", "o_proj", "dense", "out_proj", "lm_head", "attn", "attention"), 0.6
    ),
    "": 0.02,
}
ENDLESS = ("bailing_hybrid",)  # takes minutes in transformers on a CPU
OWN_SIZES: dict[str, dict[str, Any]] = {  # which mlx-lm requires
    "gpt_neox": {"intermediate_size": 256},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 0},
}
STATED: dict[
    str, dict[str, Any]
] = {  # in published files, but not written by transformers 5
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "cohere2": {"sliding_window_pattern": 2},
    "deepseek_v2": {"rope_scaling": None},
    "deepseek_v32": {"first_k_dense_replace": 1},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "gemma3_text": {"sliding_window_pattern": 2},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"first_k_dense_replace": 1, "moe_layer_freq": 1}
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"block_dim": 64},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"}
    | dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True),
    "minicpm3": {"rope_scaling": None},
    "minimax_m2": {"shared_intermediate_size": 0, "rotary_dim": 16},
    "qwen3_vl_moe": {"norm_topk_prob": True},
    **{key: {"full_attention_interval": 2} for key in ("qwen3_5", "qwen3_5_moe")},
    **{
        key: {"global_head_dim": 32}
        for key in ("gemma4", "gemma4_text", "gemma4_unified")
    },
    "llama4": {"num_experts_per_tok": 1},
    "qwen3_next": {"full_attention_interval": 2},
    "solar_open": {
        "intermediate_size": 128,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 1.0,
    },
}


def small_model(model_type: str, folder: Path) -> None:
    """Write a random checkpoint of a type, with a config.json like published ones."""
    whole: Any = tiny_config(model_type, **OWN_SIZES.get(model_type, {}))
    config, part = whole.get_text_config(), part_of(whole)
    for rope in filter(
        lambda value: isinstance(value, dict), config.rope_parameters.values()
    ):
        rope["rope_theta"] = 1e4  # Gemma 3's 1e6 has no effect within 256 tokens
    for key in ("sliding_window", "attention_window_size", "attention_chunk_size"):
        if getattr(config, key, None):
            setattr(config, key, FAR)
    if hasattr(config, "logit_scale"):
        config.logit_scale = 1.0
    torch.manual_seed(0)
    multimodal = model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    kind = AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM
    model = kind.from_config(whole, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.fill_(2.0)
            elif weight.dim() > 1:
                weight.normal_(
                    0, next(size for part, size in LARGE.items() if part in name)
                )
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    others = {
        key: value for key, value in as_published(config).items() if value is not None
    }
    # Where other engines expect it
    tied = {"tie_word_embeddings": whole.tie_word_embeddings} if part else {}
    stated = (
        others
        | (written[part] if part else written)
        | tied
        | STATED.get(model_type, {})
    )
    (folder / "config.json").write_text(
        json.dumps(written | {part: stated} if part else stated, default=str)
    )


def as_published(config: PreTrainedConfig) -> dict[str, Any]:
    """The values of a configuration, under all their names."""
    values = config.to_dict()
    for alias, name in type(config).attribute_map.items():
        if (alias in values or name in values) and "max_position_embeddings" not in (
            alias,
            name,
        ):
            both = values.get(name, values.get(alias))
            values |= {name: both, alias: both}
    if isinstance(getattr(type(config), "head_dim", None), property):
        return values
    return {"head_dim": config.hidden_size // config.num_attention_heads} | values


def extended(model_type: str, work: Path) -> Iterator[tuple[str, Path]]:
    """The checkpoints of a type by saved RoPE type."""
    source = work / model_type
    if not source.exists():
        small_model(model_type, source)
    for saved, method in SAVED.items():
        folder = work / f"{model_type} {saved}"
        if not folder.exists():
            checkpoint = find(source)
            how = (
                {"long_factor": RISING[: checkpoint.config.rope.num_pairs]}
                if method == "longrope"
                else {}
            )
            plan = plan_method(checkpoint, method, how, "4x")
            if plan.rope_parameters["rope_type"] != saved:
                continue
            ropepatch.extend(plan, folder, reading=False, say=lambda line: None)
        yield saved, folder


class Runner:
    """An engine that runs here, in a process that imports its packages first.

    Args:
        engine: Its name.
        packages: The folder of its packages.
    """

    def __init__(self, engine: str, packages: Path) -> None:
        words = [
            sys.executable,
            str(Path(__file__).with_name("next_tokens.py")),
            engine,
        ]
        environment = os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        self._process: Any = subprocess.Popen(
            words, env=environment, text=True, **pipes
        )

    def logits(
        self, folder: Path, ids: list[int], positions: list[int]
    ) -> torch.Tensor | str:
        """The logits [P, V] after these numbers of tokens, or the error."""
        try:
            print(
                json.dumps([str(folder), ids, positions]),
                file=self._process.stdin,
                flush=True,
            )
            if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
                self._process.kill()
                return f"no answer in {PATIENCE} s"
            answer = json.loads(self._process.stdout.readline() or '{"why": "it ends"}')
        except BrokenPipeError:
            return "it ended"
        return (
            torch.tensor(np.load(answer["file"]))
            if "file" in answer
            else str(answer["why"])
        )


@cache
def runner(engine: str, packages: Path) -> Runner:
    """The process of an engine."""
    return Runner(engine, packages)


def run(engine: str, model_type: str, given: Namespace) -> Row:
    """The verdict on an engine for each RoPE type: right, unscaled, refused, or another."""
    packages = given.mlx if engine == "mlx-lm" else given.transformers_4
    reads, why = {}, ""
    for saved, folder in extended(model_type, given.work):
        reading = make_reading(find(folder))
        if UNSCALED not in reading.tops:
            reads[saved], why = "not shown", "the rope does not show in the logits"
            continue
        logits = runner(engine, packages).logits(folder, reading.ids, reading.positions)
        if isinstance(logits, str):
            reads[saved], why = "refused", logits
            if logits.startswith(("no answer", "it end")):
                runner.cache_clear()
                break
            continue
        top, tokens = logits.float().log_softmax(-1).topk(TOP)
        pairs = zip(tokens.tolist(), top.tolist(), strict=True)
        judged = judge(reading, [dict(zip(*pair, strict=True)) for pair in pairs])
        reads[saved], why = judged.verdict, why if judged.is_right else str(judged)
    return {"how": "run", "reads": reads, "why": why}


# Source code


class Wheel:
    """The Python sources of an engine.

    Args:
        file: The wheel.
        folder: The folder of the model modules within it.
    """

    def __init__(self, file: Path, folder: str) -> None:
        self._zip, self._folder = zipfile.ZipFile(file), folder
        self.version = file.name.split("-")[1]

    def text(self, module: str) -> str | None:
        """The source of a module of that folder, or None."""
        try:
            return self._zip.read(f"{self._folder}/{module}.py").decode()
        except KeyError:
            return None

    def modules(self) -> list[str]:
        """The names of these modules."""
        within = (
            name.removeprefix(f"{self._folder}/") for name in self._zip.namelist()
        )
        return [
            name.removesuffix(".py")
            for name in within
            if name.endswith(".py") and "/" not in name
        ]


def wheel(given: Namespace, name: str) -> Wheel:
    """The sources of an engine by the name of its package."""
    [file] = given.wheels.glob(f"{name}-*.whl")
    return _wheel(file, name)


@cache
def _wheel(file: Path, name: str) -> Wheel:
    return Wheel(file, FOLDERS[name])


FOLDERS = {
    "mlx_lm": "mlx_lm/models",
    "vllm": "vllm/model_executor/models",
    "sglang": "sglang/srt/models",
    "transformers": "transformers/models/auto",
}
CALLS = {  # functions that make RoPE, with the names and the place of the argument for its scaling, if any
    "get_rope": ("rope_parameters", "rope_scaling", 4),
    "get_rope_wrapper": ("rope_parameters", "rope_scaling", 4),
    "initialize_rope": ("scaling_config", "scaling_config", 3),
    "RoPE": ("scale", "scale", None),
}
PATIENCE = 90  # seconds for one answer
CARRIERS = (
    "Attention",
    "DecoderLayer",
    "Model",
    "ForCausalLM",
)  # imported with the RoPE of their module
# VLLM's package that runs stock modules, rotary ones included
BY_TRANSFORMERS = "transformers"


def found_in(source: Wheel, module: str) -> str:
    """Whether a module passes a scaling to its RoPE: reads, ignores, or unclear."""
    if module == BY_TRANSFORMERS:
        return "reads"
    if (text := source.text(module)) is None:
        return "unclear"
    tree = ast.parse(text)
    verdicts = {
        _verdict(node) for node in ast.walk(tree) if isinstance(node, ast.Call)
    } - {None}
    if verdicts:
        return verdicts.pop() if len(verdicts) == 1 else "unclear"
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    for carrier in CARRIERS:
        for node in imports:
            other = str(node.module).rpartition(".")[2]
            of_models = node.level or ".models." in str(node.module)
            if (
                of_models
                and any(carrier in one.name for one in node.names)
                and source.text(other)
            ):
                return found_in(source, other)
    return "unclear"


def _verdict(call: ast.Call) -> str | None:
    """Whether one call passes a scaling; None for a call that makes no RoPE."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name not in CALLS:
        return None
    *names, place = CALLS[name]
    value = next((one.value for one in call.keywords if one.arg in names), None)
    if value is None and place is not None and len(call.args) > place:
        value = call.args[place]
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return "ignores"
    if place is None:  # a number that divides positions
        return "unclear"
    if isinstance(value, ast.Dict) and None not in value.keys:
        constants = [one.value for one in value.values if isinstance(one, ast.Constant)]
        return "ignores" if "default" in constants else "unclear"
    return "reads"


@cache
def builders(source: Wheel, engine: str) -> dict[str, str]:
    """The module that builds each class of transformers."""
    if engine == "vLLM":
        pairs = re.findall(
            r'"(\w+)":\s*\(\s*"(\w+)",\s*"\w+"', source.text("registry") or ""
        )
        return dict(pairs)
    found = {}
    for module in source.modules():
        text = source.text(module) or ""
        if listed := re.search(
            r"^EntryClass\s*=(.+?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL
        ):
            found |= dict.fromkeys(re.findall(r"\w+", listed[1]), module)
    return found


def class_of(model_type: str) -> str:
    """The class that published checkpoints of a type name."""
    classes = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    )[model_type]
    stock = classes if isinstance(classes, str) else classes[0]
    config = CONFIG_MAPPING[model_type]
    if getattr(transformers, stock).config_class is config:
        return stock
    # EXAONE 3 and Sarvam, which transformers loads by the classes of other types
    return config.__name__.replace("Config", "ForCausalLM")


def read(engine: str, model_type: str, given: Namespace) -> Row:
    """The row of a type from the sources of an engine."""
    source = wheel(given, WHEELS[engine])
    if engine == "transformers 4.x":
        has = f'("{model_type}", "' in (source.text("configuration_auto") or "")
        return {"how": "read", "reads": "has" if has else "absent"}
    if engine == "mlx-lm":
        module = mlx_module(source, model_type)
        return {
            "how": "read",
            "reads": found_in(source, module) if source.text(module) else "absent",
        }
    own = builders(source, engine)
    module = own.get(class_of(model_type))
    # With another RoPE for images
    multimodal = model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    reads = (
        "absent"
        if module is None
        else "unclear"
        if multimodal
        else found_in(source, module)
    )
    return {"how": "read", "reads": reads, "builder": module}


def types_of(engine: str, given: Namespace) -> Row:
    """The types that an engine has, and for mlx-lm those that parse only `rope_parameters`."""
    source = wheel(given, WHEELS[engine])
    if engine == "transformers 4.x":
        text = source.text("configuration_auto") or ""
        return {
            "how": "read",
            "types": sorted({*re.findall(r'\("([\w.-]+)", "\w+Config"\)', text)}),
        }
    texts = {name: source.text(name) or "" for name in source.modules()}
    texts |= {name: texts[module] for name, module in mlx_renamed(source).items()}
    types = sorted(name for name, text in texts.items() if "class ModelArgs" in text)
    newer = [name for name in types if "rope_parameters" in texts[name]]
    kept = re.compile(r"rope_scaling(?! = self\.rope_parameters)")
    only = [
        name
        for name in newer
        if "rope_scaling = self.rope_p" in texts[name] or not kept.search(texts[name])
    ]
    return {"how": "read", "types": types, "new_keys": only}


def mlx_module(source: Wheel, model_type: str) -> str:
    """The module of mlx-lm that builds a type."""
    return mlx_renamed(source).get(model_type, model_type)


def mlx_renamed(source: Wheel) -> dict[str, str]:
    """The modules of mlx-lm for types with another name."""
    utils = source._zip.read("mlx_lm/utils.py").decode()
    [renamed] = re.findall(
        r"^MODEL_REMAPPING = (\{.*?^\})", utils, re.MULTILINE | re.DOTALL
    )
    return dict(ast.literal_eval(renamed))


WHEELS = {
    "mlx-lm": "mlx_lm",
    "transformers 4.x": "transformers",
    "vLLM": "vllm",
    "SGLang": "sglang",
}


def cases(given: Namespace) -> Iterator[Row]:
    """Every engine and every type that can be planned."""
    for engine, name in WHEELS.items():
        version = wheel(given, name).version
        if engine in ("transformers 4.x", "mlx-lm"):
            yield {"engine": engine, "version": version, "asked": "types"}
        for model_type in filter(lambda name: not refusal(name), ROTARY_TYPES):
            yield {"engine": engine, "version": version, "model_type": model_type}


def measure(case: Row, given: Namespace) -> Row:
    """The row of an engine and a type: from a run if possible, else from the sources."""
    engine = case["engine"]
    if "asked" in case:
        return types_of(engine, given)
    model_type = case["model_type"]
    source = read(engine, model_type, given)
    packages = {"mlx-lm": given.mlx, "transformers 4.x": given.transformers_4}.get(
        engine
    )
    if source["reads"] == "absent" or packages is None or model_type in ENDLESS:
        return source
    ran = run(engine, model_type, given)
    if {RIGHT, UNSCALED} & {*ran["reads"].values()}:
        return ran
    return source | {"why": f"not run: {ran['why']}"}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--mlx", type=Path, help="the packages of mlx-lm")
    parser.add_argument(
        "--transformers-4", type=Path, help="the packages of transformers 4"
    )
    parser.add_argument(
        "--wheels", type=Path, required=True, help="the wheels of the engines"
    )


STUDY = Study(
    name="engine-types",
    about=__doc__,
    cases=cases,
    measure=measure,
    options=add_options,
    work=True,
)


if __name__ == "__main__":
    STUDY.main()

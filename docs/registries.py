"""Tables of what the package contains: its registries, recipes, engines and presets."""

import inspect
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from measured import result
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

import ropepatch
from ropepatch import ENCODINGS, METHODS, REMAPPINGS
from ropepatch.cli.listing import first_sentence
from ropepatch.data.positions import PoSE, TrueLength
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.tasks import Task
from ropepatch.extension.engines import VERSIONS
from ropepatch.extension.planning import Plan
from ropepatch.files import read_json
from ropepatch.model.architectures import (
    GGUF_FACTORS,
    GGUF_FREQS,
    GGUF_GLOBAL,
    GGUF_PLAIN,
    GGUF_SHARED_FACTOR,
    engine_facts,
    published,
)
from ropepatch.model.checkpoint import TINY
from ropepatch.model.config import (
    blueprint,
    head_dim_of,
    key_value_heads_of,
    load_config,
    text_config,
)
from ropepatch.model.cost import Cost, cache_bytes
from ropepatch.model.gguf import FREQS
from ropepatch.model.precision import BFLOAT16
from ropepatch.report.printers import markdown_rows
from ropepatch.settings import (
    RECIPES,
    SUITES,
    Settings,
    find_shipped,
    relative_length,
    shipped_names,
)
from ropepatch.training import recipe as sections
from ropepatch.training.adapter import Weights
from ropepatch.training.forecast import training_cost
from ropepatch.training.recipe import Lora, Recipe, read_recipe

PRESETS = json.loads(
    (resources.files("ropepatch.gallery") / "presets.json").read_text(encoding="utf-8")
)


def encodings() -> str:
    """Every encoding that may replace RoPE."""
    rows = [
        (f"[`{kind.name}`](#{kind.name})", kind.family, kind.formula)
        for kind in ENCODINGS.values()
    ]
    return markdown_rows(("encoding", "family", "scores"), rows)


def methods() -> str:
    """Every scaling."""
    return _formulas(METHODS.values(), "frequencies")


def remappings() -> str:
    """Every position remapping."""
    return _formulas(REMAPPINGS.values(), "distance Δ becomes")


def _formulas(kinds: Iterable[Any], head: str) -> str:
    rows = [
        (f"[`{kind.name}`](#{kind.name})", kind.formula, kind.saved_as)
        for kind in kinds
    ]
    return markdown_rows(("method", head, "saved as"), rows)


# Other engines


def gguf_architectures() -> str:
    """How llama.cpp gets RoPE scaling from a GGUF file, by architecture."""
    plain = "linear, ntk, abf, yarn with its usual betas; after YaRN only a larger yarn"
    rows = [
        ("every static method", f"as `{FREQS}`", _named(GGUF_FREQS)),
        (
            "every static method",
            "as `rope_factors_long` and `_short`",
            _named(GGUF_FACTORS),
        ),
        (plain, "as keys", _named(GGUF_PLAIN | GGUF_GLOBAL - GGUF_SHARED_FACTOR)),
        (f"{plain}; no other attention factor", "as keys", _named(GGUF_SHARED_FACTOR)),
    ]
    return markdown_rows(
        ("methods", "stored", "architectures, as GGUF names them"), rows
    )


def _named(architectures: Iterable[str]) -> str:
    return ", ".join(sorted(architectures))


def engine_versions() -> str:
    """The version of every engine, and whether it ran or its source was read."""
    asked = {row["engine"]: row["version"] for row in result("engines")["rows"]}
    rows = []
    for name, version in VERSIONS.items():
        ways = {how for how, *_ in engine_facts(name)["rows"]}
        known = ["run"] if name == "transformers 5.x" or "run" in ways else ["read"]
        known += [f"server of {asked[name]} probed"] if name in asked else []
        rows.append((name, version, "; ".join(known)))
    return markdown_rows(("engine", "version", "how known"), rows)


KV_CACHES = (
    *("qwen3-8b", "qwen2.5-7b", "llama-3.1-8b", "llama-3.3-70b"),
    *("mistral-7b-v0.3", "gemma-3-4b"),
)
KV_LENGTHS = {"32k": 2**15, "64k": 2**16, "128k": 2**17, "256k": 2**18, "1M": 2**20}


def suites() -> str:
    """Every suite, with the first sentence of its file."""
    files = {
        name: find_shipped(name, SUITES, "suite") for name in shipped_names(SUITES)
    }
    rows = [(f"`{name}`", first_sentence(file)) for name, file in files.items()]
    return markdown_rows(("suite", "measures"), rows)


def kv_caches() -> str:
    """Tabulate the KV cache of one sequence of some published models."""
    rows = []
    for name in KV_CACHES:
        [preset] = [preset for preset in PRESETS if preset["name"] == name]
        config = text_config(load_config(preset["config"]))
        sizes = (
            config.num_hidden_layers,
            key_value_heads_of(config),
            head_dim_of(config),
        )
        held = [cache_bytes(config, tokens) for tokens in KV_LENGTHS.values()]
        rows.append(
            (
                preset["model"],
                *map(str, sizes),
                *(f"{one / 2**30:.3g} GiB" for one in held if one),
            )
        )
    heads = "model", "layers", "KV heads", "head dimension", *KV_LENGTHS
    return markdown_rows(heads, rows)


def models() -> str:
    """The plan by YaRN of every preset."""
    heads = "model", "original length", "target", "saved as", "layers scaled"
    return markdown_rows(
        heads, [(f"`{one['model']}`", *_planned(one)) for one in PRESETS]
    )


def plan_of(preset: Mapping[str, Any]) -> Plan:
    """The plan by YaRN of a preset."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps(preset["config"]), encoding="utf-8"
        )
        return ropepatch.plan(
            folder, to=preset["to"], method="yarn", original=preset.get("original")
        )


def _planned(preset: Mapping[str, Any]) -> list[str]:
    try:
        plan = plan_of(preset)
    except RopepatchError as error:
        return ["", f"refused: {error}", "", ""]
    window, kind = (
        plan.config.rope.original_max_position_embeddings,
        plan.rope_parameters["rope_type"],
    )
    layers = f"{_scaled_layers(plan)} of {plan.source.config.text.num_hidden_layers}"
    return [f"{window:,}", f"{plan.target:,}", f"`{kind}`", layers]


def _scaled_layers(plan: Plan) -> int:
    """The layers that rotate and see the whole context."""
    config: Any = plan.source.config.text
    if hasattr(config, "no_rope_layers"):
        return sum(config.no_rope_layers)
    types = (
        getattr(config, "layer_types", None)
        or ["full_attention"] * config.num_hidden_layers
    )
    return types.count("full_attention")


# Recipes


def meanings(kind: type) -> dict[str, str]:
    """The Args section of a docstring."""
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {key: " ".join(text.split()) for key, text in entries}


class DescribedSchema(GenerateJsonSchema):
    """JSON Schemas with the texts of the docstrings."""

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        """Add the meaning of the class and of every key."""
        written, kind = super().model_schema(schema), schema["cls"]
        if not issubclass(kind, Settings):
            return written
        written["description"] = " ".join(
            (inspect.getdoc(kind) or "").split("\n\n")[0].split()
        )
        if issubclass(kind, Task):
            written["properties"] = {"task": {"const": kind.name}} | written[
                "properties"
            ]
            written["required"] = ["task", *written.get("required", [])]
        texts = meanings(kind)
        for key, value in written.get("properties", {}).items():
            value.pop("title", None)
            if key in texts:
                value["description"] = texts[key]
        return written


SECTIONS: tuple[tuple[str, Any], ...] = (
    ("", Recipe),
    ("data.", sections.Data),
    ("data.sources[].", sections.Texts),
    ("data.sources[].", sections.Generated),
    ("distil.", sections.Distil),
    ("lora.", sections.Lora),
    ("watch.", sections.Watch),
)
SHOWN = {"method": "`yarn`", "watch": "see below"}  # defaults


def keys() -> str:
    """Key, default and meaning of every key of a recipe."""
    rows: dict[str, tuple[str, str]] = {}
    for prefix, kind in SECTIONS:
        texts = meanings(kind)
        for name, field in kind.model_fields.items():
            default = (
                "required"
                if field.is_required()
                else SHOWN.get(name) or _yaml(field.default)
            )
            rows.setdefault(
                f"{prefix}{name}", (default, texts[name].replace("None", "`null`"))
            )
    return markdown_rows(
        ("key", "default", "meaning"), [(f"`{key}`", *row) for key, row in rows.items()]
    )


def _yaml(value: Any) -> str:
    listed = list(value) if isinstance(value, tuple) else value
    words = (
        yaml.safe_dump(listed, default_flow_style=True).removesuffix("...\n").strip()
    )
    return f"`{words}`"


def positions() -> str:
    """Every sampling of positions."""
    rows = []
    for name, kind in {"true-length": TrueLength, "pose": PoSE}.items():
        parameters = ", ".join(
            f"`{field}`" for field in kind.model_fields if field != "name"
        )
        meaning = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        rows.append((f"`{name}`", parameters, meaning, kind.paper))
    return markdown_rows(("positions", "parameters", "meaning", "source"), rows)


GPUS = {
    24: "RTX 4090, L4",
    48: "A6000, L40S",
    80: "A100, H100",
    141: "H200",
}  # gigabytes
# The share that a training may take by the estimate, which knows no fragments
ROOM = 0.85


@cache
def published_config(model: str) -> dict[str, Any] | None:
    """The config.json of a model that bundled recipes are for; None for others."""
    if model == "tiny":
        return read_json(TINY / "config.json")
    return published().get(model)


@cache
def weights_of(model: str, lora: Lora | None) -> Weights:
    """Count the weights of a published model and of an adapter."""
    return Weights.of(blueprint(load_config(published_config(model))), lora)


def published_cost(recipe: Recipe) -> Cost | None:
    """Estimate a recipe on an H100 and the model it is written for; None if its config is unknown."""
    raw = published_config(recipe.model)
    if raw is None:
        return None
    config = load_config({"dtype": BFLOAT16} | raw)  # published weights have 16 bits
    window = text_config(config).max_position_embeddings
    return training_cost(
        recipe,
        config,
        weights_of(recipe.model, recipe.lora),
        dtype=recipe.precision or BFLOAT16,
        window=window,
        target=relative_length(recipe.to, window),
    )


@cache
def cost_of(name: str, quantization: Literal["4bit"] | None = None) -> Cost | None:
    """The cost of a recipe, in 4 bits if it can be; None if it cannot, or its model is not known."""
    recipe = read_recipe(name)
    if quantization and recipe.lora is None:
        return None
    return published_cost(recipe.model_copy(update={"quantization": quantization}))


def costs_of(name: str) -> list[Cost]:
    """The costs of a recipe, its weights in their precision and in 4 bits, as far as they are known."""
    return [
        cost for cost in (cost_of(name), cost_of(name, quantization="4bit")) if cost
    ]


PEAKS = {
    "H100": 989,
    "A100": 312,
    "RTX 4090": 165,
    "L4": 121,
}  # dense bfloat16, in 1e12 operations a second
SMALL = 24  # gigabytes of the last two


def gpu_hours(cost: Cost, gpu: str = "H100") -> str:
    """Hours on a GPU, rounded; those of an H100 by the ratio of the peaks."""
    hours = cost.hours * PEAKS["H100"] / PEAKS[gpu]
    return f"{hours:.0f}" if hours > 0.5 else "under 1"


def hardware() -> str:
    """The smallest GPU that holds each training, its weights in their precision and in 4 bits."""
    rows = []
    for name in shipped_names(RECIPES):
        recipe = read_recipe(name)
        costs = costs_of(name)
        if recipe.model not in ("tiny", "MODEL") and costs:
            cells = [
                f"{cost.memory:.1f} GiB: {smallest_gpu(cost.memory)}" for cost in costs
            ]
            cells += ["–"] * (2 - len(cells))
            fits = min(cost.memory for cost in costs) <= ROOM * SMALL
            gpus = list(PEAKS) if fits else list(PEAKS)[:2]
            hours = [gpu_hours(costs[0], gpu) for gpu in gpus]
            hours += ["–"] * (len(PEAKS) - len(hours))
            rows.append((costs[0].memory, [f"`{name}`", *cells, *hours]))
    head = ["recipe", "GPU memory", "with `quantization: 4bit`"]
    head += [f"{gpu} hours" for gpu in PEAKS]
    return markdown_rows(head, [row for _, row in sorted(rows)])


def smallest_gpu(gib: float) -> str:
    """The smallest GPU that holds a training."""
    return next(
        (f"{size} GB ({names})" for size, names in GPUS.items() if gib <= ROOM * size),
        "several",
    )


def recipe_file(name: str) -> str:
    """A recipe, the numbers of its header computed."""
    recipe = read_recipe(name)
    cost = cost_of(name)
    assert cost is not None
    lines = (
        find_shipped(name, RECIPES, "recipe").read_text(encoding="utf-8").splitlines()
    )
    number = (
        next(i for i, line in enumerate(lines) if "training/forecast.py" in line) + 1
    )
    lines[number] = (
        f"#   {cost.tokens:,} tokens" if recipe.model == "tiny" else f"#   {cost}"
    )
    return "\n".join(lines) + "\n"

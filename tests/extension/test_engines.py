"""The engine support in `ropepatch plan`, compared with the engines' rules for the planned config.json."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import second_mlx
import second_transformers
import torch
from checkpoint_folders import edit_json, write_checkpoint
from engine_rules import RULES, SWITCHES, Reading, plain, transformers_4
from installed import Answers, read_by
from methods import GEOMETRIES, applied, example
from readme import README
from second_transformers import ACROSS, STEPS, TARGET, WINDOW, read, tokens
from tiny_models import tiny_config, tiny_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ropepatch
from ropepatch.extension.engines import (
    PROBED,
    Engine,
    WrittenRope,
    engine_support,
    support,
)
from ropepatch.extension.planning import Plan, plan_by
from ropepatch.model.checkpoint import Checkpoint, InMemory
from ropepatch.model.config import Config
from ropepatch.probing.reading import RIGHT
from ropepatch.scaling import METHODS, make_scaling
from ropepatch.scaling.rope import Rope

ROPES = {name: GEOMETRIES[name] for name in ("llama-2", "babyllama")}
LLAMA_2 = ROPES["llama-2"]
RISING = tuple(1 + i / 16 for i in range(64))
# Parameters that change how an engine supports a method.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("yarn", {"attention_factor": 1.0}),
    ("yarn", {"attention_factor": 1.1387}),  # the usual one is 1.13863
    ("yarn", {"truncate": False, "attention_factor": 0.8}),
    ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 2.0}),
    ("yarn", {"factor": 1.0, "attention_factor": 1.2}),
    ("linear", {"factor": 1.0}),
    ("longrope", {"long_factor": RISING, "attention_factor": 1.0}),
    (
        "longrope",
        {"long_factor": RISING, "attention_factor": 1.0802},
    ),  # the derived one is 1.08012
    ("longrope", {"long_factor": RISING, "factor": 2.0}),
    ("custom", {"divisors": RISING, "attention_factor": 1.2}),
    ("dynamic", {"form": "transformers"}),
    ("dynamic", {"form": "transformers", "factor": 2.0}),
    (
        "longrope-switch",
        {"short_factor": (1.0,) * 64, "long_factor": RISING, "attention_factor": 1.1},
    ),
]
# Architectures that transformers 4 handles like LLaMA, one that ignores a scaling, and those that reject it.
FAMILIES = (
    "gpt_neox",
    "gpt_oss",
    "stablelm",
    "nemotron",
    "llama4_text",
    "olmo",
    "olmo2",
    "phi3",
)
SHARES = ("gpt_neox", "stablelm")  # those of them in which a part of each head rotates
# The RoPE parameters of already scaled models, and methods that compose with them.
SCALED = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"attention_factor": 1.13},
    "linear": {},
}


def llama(rope: Rope, **rope_parameters: Any) -> dict[str, Any]:
    """The config.json of a LLaMA with these RoPE parameters."""
    parameters = {
        "rope_type": "default",
        "rope_theta": rope.rope_theta,
    } | rope_parameters
    d = rope.rotary_dim
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": d,
        "intermediate_size": d,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "max_position_embeddings": rope.original_max_position_embeddings,
        "rope_parameters": parameters,
    }


@functools.cache
def surveyed(name: str) -> InMemory:
    return InMemory("a llama", None, Config(llama(ROPES[name])))


def planned(
    model: Checkpoint, method: str, times: float = 4.0, **parameters: Any
) -> Plan:
    """A plan for this multiple of the original context length; parameters may set another factor."""
    window = model.config.window
    if parameters:
        scaling = make_scaling(method, **({"factor": times} | parameters))
    else:
        scaling = example(method, model.config.rope.num_pairs, times)
    return plan_by(model, scaling, int(times * window))


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal to 1e-6; a pair below 1e-20 radians per token counts as not rotating."""
    ours, theirs = (np.where(row < 1e-20, 0, row) for row in (ours, theirs))
    return np.allclose(theirs, ours, rtol=1e-6, atol=0)


def transformers_5(
    config: dict[str, Any], length: int, served: int | None = None
) -> Reading:
    """Compute with stock transformers."""
    module = LlamaRotaryEmbedding(LlamaConfig(**config))
    module(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]))
    return Reading(module.inv_freq.double().numpy(), module.attention_scaling)


class Judged:
    """The support of a plan by an engine, from its rule: `reads`, and words of the note."""

    def __init__(self, engine: str, plan: Plan) -> None:
        rule = ({"transformers 5.x": transformers_5} | RULES)[engine]
        config, target = applied(plan, plan.config.raw), plan.target
        window = plan.config.rope.original_max_position_embeddings
        default = rule(config, target)
        assert default is not None, f"{engine} refuses it"
        reading, switch = default, ""
        if default.reach not in (None, target) and engine in SWITCHES:
            told = rule(config, target, target)
            if told.reach == target:
                reading, switch = told, f"{SWITCHES[engine]} {target}"
        served = target if switch else None
        within = rule(config, window, served)
        ours, ours_within = (
            plan.method.frequencies(plan.config.rope, length).inv_freq.double().numpy()
            for length in (target, window)
        )
        a = plan.method.frequencies(plan.config.rope, target).attention_factor
        ignored = not same(ours, reading.inv_freq) and same(
            reading.inv_freq,
            plain(plan.config.rope.rope_theta, plan.config.rope.rotary_dim),
        )
        short = reading.reach is not None and reading.reach < target
        moves = not same(reading.inv_freq, within.inv_freq)
        other = not (
            same(ours, reading.inv_freq) and same(ours_within, within.inv_freq)
        )
        other_factor = not np.isclose(reading.attention_factor, a, rtol=1e-6, atol=0)
        self.reads = "yes"
        if ignored:
            self.reads = "no"
        elif short or moves or other or other_factor or reading.misplaced:
            self.reads = "partly"
        # (words, whether the note must contain them; otherwise it must not)
        self.words = [
            (switch or SWITCHES.get(engine, "--max"), bool(switch)),
            (f"{reading.reach} tokens", short),
            ("stale", moves),
            *((f"position {p} as position 0", True) for p in reading.misplaced),
        ]
        if self.reads == "partly":
            says = f"uses {reading.attention_factor:.4f} as attention factor"
            self.words.append((says, other_factor))
        self.needs_note = self.reads != "yes"

    def contradicts(self, stated: Engine) -> str:
        """The errors of a statement; empty if it is correct."""
        if stated.reads != self.reads:
            return f"reads: {self.reads}, stated {stated.reads}"
        if self.needs_note and not stated.note:
            return "no word of what is off"
        for words, needed in self.words:
            if (words in stated.note) != needed:
                return f"{words!r} {'missing in' if needed else 'wrongly in'} {stated.note!r}"
        return ""


def check(plan: Plan) -> None:
    stated = plan.engines
    assert [line.engine for line in stated] == ["transformers 5.x", *RULES]
    for line in stated:
        assert Judged(line.engine, plan).contradicts(line) == "", line


@pytest.mark.parametrize(
    ("method", "parameters"), [(name, {}) for name in METHODS] + SETTINGS, ids=str
)
def test_the_plan_lists_every_engines_support_of_a_method(method, parameters):
    check(planned(surveyed("llama-2"), method, **parameters))
    if not parameters:
        check(planned(surveyed("babyllama"), method, 8.0))


@pytest.mark.parametrize("method", ["linear", "ntk", "p-rope", "custom", "cope"])
@pytest.mark.parametrize("kind", SCALED)
def test_the_plan_lists_every_engines_support_of_a_scaled_model(kind, method):
    already = {
        "rope_type": kind,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    } | SCALED[kind]
    check(planned(InMemory("a llama", None, Config(llama(LLAMA_2, **already))), method))


# Results of the engines that are installed here, from the same checkpoints.


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, Plan]:
    """A plan of every method for one small random LLaMA."""
    source = write_checkpoint(tmp_path_factory.mktemp("engines") / "source")
    model = Checkpoint(source, str(source))
    assert model.config.window == WINDOW
    return {
        name: plan_by(model, example(name, model.config.rope.num_pairs), TARGET)
        for name in METHODS
    }


@pytest.fixture(scope="module")
def folders(plans, tmp_path_factory) -> list[Path]:
    """The checkpoints of these plans."""
    root = tmp_path_factory.mktemp("extended")
    return [
        ropepatch.extend(plan, root / name, reading=False).folder
        for name, plan in plans.items()
    ]


@pytest.fixture(scope="module")
def measured(plans) -> Answers:
    """The logits of the patched model, with the frequencies of the measured length."""
    (source,) = {plan.source.name for plan in plans.values()}
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    return {
        name: {str(n): patched(model, plan, n) for n in (WINDOW, ACROSS, TARGET)}
        for name, plan in plans.items()
    }


@torch.inference_mode()
def patched(model: Any, plan: Plan, length: int) -> Tensor:
    with ropepatch.patch(
        model,
        plan.method.at(plan.config.rope, length)
        if plan.method.length_dependent
        else plan,
    ):
        return model(
            tokens(model.config.vocab_size)[:, :length], use_cache=False
        ).logits[0]


@pytest.fixture(scope="module")
def by_transformers_5(folders) -> Answers:
    return {folder.name: read(folder) for folder in folders}


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Plan]:
    """Plans of other architectures, by the folders of their extended checkpoints."""
    root, plans = tmp_path_factory.mktemp("families"), {}
    for model_type in FAMILIES:
        tiny_model(model_type).save_pretrained(root / "sources" / model_type)
        if model_type in SHARES:
            half = tiny_config(model_type).rope_parameters | {
                "partial_rotary_factor": 0.5
            }
            edit_json(
                root / "sources" / model_type / "config.json", rope_parameters=half
            )
        # transformers 4 computes llama4 differently even without scaling
        for method in ("linear",) if model_type == "llama4_text" else ("linear", "ntk"):
            plan = ropepatch.plan(
                root / "sources" / model_type, to=TARGET, method=method
            )
            out = root / f"{model_type}-{method}"
            plans[str(ropepatch.extend(plan, out, reading=False))] = plan
    return plans


def agrees(answers: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether an engine gives the measured logits, at once and token by token."""
    pairs = [
        (answers["window"], right[str(WINDOW)]),
        (answers["target"], right[str(TARGET)]),
        (answers["decoded"], right[str(ACROSS)][-STEPS:]),
    ]
    return all(
        (one - other).abs().max() < 1e-5 * other.abs().max() for one, other in pairs
    )


def check_run(
    engine: str, answers: Answers, plans: dict[str, Plan], measured: Answers
) -> None:
    """An engine gives the measured logits exactly where the plan states "yes"."""
    stated = {
        name: next(line.reads for line in plan.engines if line.engine == engine)
        for name, plan in plans.items()
    }
    assert {name: agrees(answers[name], measured[name]) for name in plans} == {
        name: reads == "yes" for name, reads in stated.items()
    }


@pytest.mark.sweep  # the contract holds for every method
def test_transformers_5_computes_what_the_plan_states(
    by_transformers_5, plans, measured
):
    check_run("transformers 5.x", by_transformers_5, plans, measured)


@pytest.mark.sweep
def test_transformers_4_is_bit_identical_and_computes_what_the_plan_states(
    by_transformers_5, plans, folders, families, measured, tmp_path
):
    script = Path(second_transformers.__file__)
    everything = [*folders, *map(Path, families)]
    answers = read_by(script, second_transformers.PACKAGES, everything, tmp_path)
    for folder, plan in families.items():
        computed = answers.pop(Path(folder).name)
        alike = bool(computed) and torch.equal(
            computed["target"], read(Path(folder))["target"]
        )
        parameters, rope, kind = (
            plan.rope_parameters,
            plan.config.rope,
            plan.source.config.model_type,
        )
        stated = {
            line.engine: line.reads
            for line in engine_support(parameters, rope, TARGET, kind)
        }
        assert stated["transformers 4.x"] == ("yes" if alike else "no"), folder
    for name, computed in answers.items():
        for what, value in computed.items():
            assert torch.equal(value, by_transformers_5[name][what]), (name, what)
        rule = transformers_4(applied(plans[name], plans[name].config.raw), TARGET)
        assert same(computed["inv_freq"].double().numpy(), rule.inv_freq), name
        assert computed["attention_factor"] == pytest.approx(
            rule.attention_factor, rel=1e-6
        )
    check_run("transformers 4.x", answers, plans, measured)


@pytest.mark.sweep
def test_mlx_lm_computes_what_the_plan_states(plans, folders, measured, tmp_path):
    answers = read_by(Path(second_mlx.__file__), second_mlx.PACKAGES, folders, tmp_path)
    check_run("mlx-lm", answers, plans, measured)


def rows(study: str) -> list[dict[str, Any]]:
    """The results of a study."""
    found = json.loads(
        (README.parent / "eval" / "results" / f"{study}.json").read_text()
    )["rows"]
    return [row for row in found if "asked" not in row]


WRITTEN = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "longrope": {
        "short_factor": RISING,
        "long_factor": RISING,
        "original_max_position_embeddings": 16384,
    },
}


def test_the_plan_states_support_exactly_where_the_study_confirmed_it():
    for row in rows("engine-types"):
        part = (
            CONFIG_MAPPING[row["model_type"]]().get_text_config(decoder=True).model_type
        )
        if part != row["model_type"] and row["reads"] in ("unclear", "has"):
            continue  # the plan states what is known of its language model
        verdicts = (
            row["reads"]
            if row["how"] == "run"
            else dict.fromkeys(WRITTEN, row["reads"])
        )
        for kind, verdict in verdicts.items():
            parameters = {"rope_type": kind, "rope_theta": 10000.0} | WRITTEN[kind]
            stated = engine_support(parameters, LLAMA_2, 16384, part, row["model_type"])
            said = {line.engine: line.reads for line in stated}[row["engine"]]
            assert (said in ("yes", "partly")) == (verdict in (RIGHT, "reads")), (
                row,
                kind,
                said,
            )


def test_the_plan_agrees_with_probed_servers():
    probed = {
        row["case"]: row["verdict"]
        for row in rows("engines")
        if (row["engine"], row["served"]) == ("vLLM", RIGHT)
    }
    assert PROBED == {"vLLM": "llama"}
    assert probed.keys() & METHODS.keys()
    for name in probed.keys() & METHODS.keys():
        reads = {
            line.engine: line.reads
            for line in planned(surveyed("llama-2"), name).engines
        }
        assert (probed[name] == RIGHT) == (reads["vLLM"] == "yes"), name


@pytest.mark.parametrize(
    ("beta", "expected"), [(0.1, "partly"), (0, "yes"), (None, "yes")]
)
def test_only_a_query_temperature_that_acts_lowers_the_support_of_vllm(beta, expected):
    parameters = {"rope_type": "default", "llama_4_scaling_beta": beta}
    rope = WrittenRope(parameters, Rope(16, 10000.0, 64), 64, "llama")
    assert support("vLLM", rope, "read").reads == expected


def test_a_product_just_below_a_whole_length_reaches_it():
    window, target = 1_010_000, 1_010_688
    rope = Rope(16, 10000.0, window)
    factor = target / window
    assert int(factor * window) < target
    parameters = make_scaling("yarn", factor=factor).native(rope)
    written = WrittenRope(parameters, rope, target, "llama")
    assert support("vLLM", written, "read").reads == "yes"

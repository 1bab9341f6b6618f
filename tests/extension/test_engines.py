"""The engine support in `ropepatch plan`, compared with the engines' rules for the planned config.json."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import second_mlx
import second_transformers
import torch
from checkpoint_folders import write_checkpoint
from engine_rules import RULES, SWITCHES, Reading, plain, transformers_4
from installed import read_by
from methods import GEOMETRIES, applied, example
from readme import README
from second_transformers import ACROSS, STEPS, TARGET, WINDOW, read, tokens
from swaps import apart
from tiny_models import tiny_config
from torch import Tensor
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ropepatch
from ropepatch.extension.engines import (
    PROBED,
    WrittenRope,
    engine_support,
    support,
)
from ropepatch.extension.planning import Plan, plan_by
from ropepatch.model.checkpoint import Checkpoint, InMemory
from ropepatch.probing.reading import RIGHT
from ropepatch.scaling import METHODS, make_scaling
from ropepatch.scaling.rope import Rope

LLAMA_2 = GEOMETRIES["llama-2"]
RISING = tuple(1 + i / 16 for i in range(64))
# Parameters that change how an engine supports a method.
SETTINGS = [
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
# The RoPE parameters of already scaled models, and methods that compose with them.
SCALED = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"attention_factor": 1.13},
    "linear": {},
}


def llama(rope, **rope_parameters):
    """A LLaMA with these RoPE parameters."""
    parameters = {"rope_type": "default", "rope_theta": rope.rope_theta}
    config = tiny_config(
        "llama",
        hidden_size=rope.rotary_dim,
        head_dim=rope.rotary_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=rope.original_max_position_embeddings,
        rope_parameters=parameters | rope_parameters,
    )
    return InMemory.of(config)


def planned(model, method, times=4.0, **parameters):
    """A plan for this multiple of the original context length; parameters may set another factor."""
    config = model.config
    scaling = example(method, config.rope.num_pairs, times)
    if parameters:
        scaling = make_scaling(method, **{"factor": times} | parameters)
    return plan_by(model, scaling, int(times * config.window))


def same(ours, theirs):
    """Equal to 1e-6; a pair below 1e-20 radians per token counts as not rotating."""
    ours, theirs = (np.where(row < 1e-20, 0, row) for row in (ours, theirs))
    return np.allclose(theirs, ours, rtol=1e-6, atol=0)


def transformers_5(config, length, served=None):
    """Compute with stock transformers."""
    module = LlamaRotaryEmbedding(LlamaConfig(**config))
    module(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]))
    return Reading(module.inv_freq.double().numpy(), module.attention_scaling)


def check_support(stated, plan):
    """The statement about an engine is what its rule gives."""
    engine = stated.engine
    rule = ({"transformers 5.x": transformers_5} | RULES)[engine]
    config, rope, target = applied(plan, plan.config.raw), plan.config.rope, plan.target
    window = rope.original_max_position_embeddings
    reading, switch = rule(config, target), ""
    assert reading is not None, f"{engine} refuses it"
    if reading.reach not in (None, target) and engine in SWITCHES:
        told = rule(config, target, target)
        if told.reach == target:
            reading, switch = told, f"{SWITCHES[engine]} {target}"
    within = rule(config, window, target if switch else None)
    ours, ours_within = (plan.method.frequencies(rope, n) for n in (target, window))
    computed = ours.inv_freq.double().numpy()
    is_right = same(computed, reading.inv_freq)
    short = reading.reach is not None and reading.reach < target
    moves = not same(reading.inv_freq, within.inv_freq)
    within_is_right = same(ours_within.inv_freq.double().numpy(), within.inv_freq)
    a = reading.attention_factor
    other_factor = not np.isclose(a, ours.attention_factor, rtol=1e-6, atol=0)
    # words, and whether the note must contain them; otherwise it must not
    words = [
        (switch or SWITCHES.get(engine, "--max"), bool(switch)),
        (f"{reading.reach} tokens", short),
        ("stale", moves),
        *((f"position {p} as position 0", True) for p in reading.misplaced),
    ]
    wrong = [short, moves, not is_right, not within_is_right, other_factor]
    unscaled = same(reading.inv_freq, plain(rope.rope_theta, rope.rotary_dim))
    reads = "yes"
    if unscaled and not is_right:
        reads = "no"
    elif any(wrong) or reading.misplaced:
        reads = "partly"
        words.append((f"uses {a:.4f} as attention factor", other_factor))
    assert stated.reads == reads
    assert reads == "yes" or stated.note
    for text, needed in words:
        assert (text in stated.note) == needed, (text, stated.note)


def check(plan):
    assert [line.engine for line in plan.engines] == ["transformers 5.x", *RULES]
    for line in plan.engines:
        check_support(line, plan)


@pytest.mark.parametrize(
    ("method", "parameters"), [(name, {}) for name in METHODS] + SETTINGS, ids=str
)
def test_the_plan_lists_every_engines_support_of_a_method(method, parameters):
    check(planned(llama(LLAMA_2), method, **parameters))
    if not parameters:
        check(planned(llama(GEOMETRIES["babyllama"]), method, 8.0))


@pytest.mark.parametrize("method", ["linear", "ntk", "p-rope", "custom", "cope"])
@pytest.mark.parametrize("kind", SCALED)
def test_the_plan_lists_every_engines_support_of_a_scaled_model(kind, method):
    already = {
        "rope_type": kind,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    } | SCALED[kind]
    check(planned(llama(LLAMA_2, **already), method))


# Results of the engines that are installed here, from the same checkpoints.


class Run(NamedTuple):
    """A checkpoint with a method, and the logits of the patched model by length."""

    plan: Plan
    folder: Path
    logits: dict[int, Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One of every method for one small random LLaMA."""
    root = tmp_path_factory.mktemp("engines")
    source = Checkpoint(write_checkpoint(root / "source"))
    model, made = source.load(), []
    for name in METHODS:
        plan = planned(source, name, TARGET / WINDOW)
        folder = ropepatch.extend(plan, root / name, reading=False).folder
        lengths = WINDOW, ACROSS, TARGET
        made.append(Run(plan, folder, {n: patched(model, plan, n) for n in lengths}))
    return made


@torch.inference_mode()
def patched(model, plan, length):
    """The logits with the frequencies of this length."""
    ids = tokens(model.config.vocab_size)[:, :length]
    static = plan.method.at(plan.config.rope, length)
    with ropepatch.patch(model, static if plan.method.length_dependent else plan):
        return model(ids, use_cache=False).logits[0]


def agrees(answers, right):
    """Whether an engine gives the measured logits, at once and token by token."""
    pairs = [
        (answers["window"], right[WINDOW]),
        (answers["target"], right[TARGET]),
        (answers["decoded"], right[ACROSS][-STEPS:]),
    ]
    return all(apart(one, other) < 1e-5 * other.abs().max() for one, other in pairs)


def check_run(engine, script, runs, place):
    """An engine gives the measured logits exactly where the plan states "yes"."""
    folders = [run.folder for run in runs]
    answers = read_by(Path(str(script.__file__)), script.PACKAGES, folders, place)
    for plan, folder, right in runs:
        is_right = agrees(answers[folder.name], right)
        assert is_right == (reads_of(engine, plan) == "yes"), folder.name
    return answers


def reads_of(engine, plan):
    """The support of a plan that it states for an engine."""
    return next(line.reads for line in plan.engines if line.engine == engine)


@pytest.mark.sweep
def test_transformers_4_computes_what_the_plan_states_and_5_computes(runs, tmp_path):
    answers = check_run("transformers 4.x", second_transformers, runs, tmp_path)
    for plan, folder, _ in runs:
        computed = answers[folder.name]
        for what, value in read(folder).items():
            assert torch.equal(computed[what], value), (folder.name, what)
        rule = transformers_4(applied(plan, plan.config.raw), TARGET)
        assert same(computed["inv_freq"].double().numpy(), rule.inv_freq), folder.name
        a = pytest.approx(rule.attention_factor, rel=1e-6)
        assert computed["attention_factor"] == a


@pytest.mark.sweep
def test_mlx_lm_computes_what_the_plan_states(runs, tmp_path):
    check_run("mlx-lm", second_mlx, runs, tmp_path)


def rows(study):
    """The results of a study."""
    file = README.parent / "eval" / "results" / f"{study}.json"
    return [row for row in json.loads(file.read_text())["rows"] if "asked" not in row]


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


@functools.cache
def stated_for(kind, part, whole):
    parameters = {"rope_type": kind, "rope_theta": 10000.0} | WRITTEN[kind]
    lines = engine_support(parameters, LLAMA_2, 16384, part, whole)
    return {line.engine: line.reads for line in lines}


@functools.cache
def part_of(whole):
    """The type of a model's language model."""
    return CONFIG_MAPPING[whole]().get_text_config(decoder=True).model_type


def test_the_plan_states_support_exactly_where_the_study_confirmed_it():
    for row in rows("engine-types"):
        whole, reads = row["model_type"], row["reads"]
        part = part_of(whole)
        if part != whole and reads in ("unclear", "has"):
            continue  # the plan states what is known of its language model
        verdicts = reads if row["how"] == "run" else dict.fromkeys(WRITTEN, reads)
        for kind, verdict in verdicts.items():
            said = stated_for(kind, part, whole)[row["engine"]]
            is_confirmed = verdict in (RIGHT, "reads")
            assert (said in ("yes", "partly")) == is_confirmed, (row, kind, said)


def test_the_plan_agrees_with_probed_servers():
    assert PROBED == {"vLLM": "llama"}
    probed = {
        row["case"]: row["verdict"]
        for row in rows("engines")
        if (row["engine"], row["served"]) == ("vLLM", RIGHT) and row["case"] in METHODS
    }
    assert probed
    for name, verdict in probed.items():
        reads = reads_of("vLLM", planned(llama(LLAMA_2), name))
        assert (verdict == RIGHT) == (reads == "yes"), name


@pytest.mark.parametrize(
    ("beta", "expected"), [(0.1, "partly"), (0, "yes"), (None, "yes")]
)
def test_vllm_partly_supports_a_query_temperature(beta, expected):
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

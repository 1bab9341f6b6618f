"""Scaling files, accepted wherever a method name is."""

import json

import pytest
import torch
import yaml
from checkpoint_folders import PAIRS, WINDOW, write_checkpoint
from methods import example as example_of
from scaling_files import write_scaling
from transformers import LlamaConfig

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import measure, read_suite
from ropepatch.evaluation.results import read_result
from ropepatch.scaling import METHODS, CustomDivisors
from ropepatch.scaling.file import read_scaling
from ropepatch.scaling.rope import Rope

TARGET = 4 * WINDOW
DIVISORS = (1.01, 0.94, 1.2700001, 1.93, 10 / 3, 0.77, 2.88, 23.7)  # not monotone
ATTENTION = 1.0718281828
ROPE = Rope(2 * PAIRS, 10000.0, WINDOW)
CONTENT = {  # of a file
    "ropepatch_scaling": 1,
    "method": "custom",
    "parameters": {"divisors": list(DIVISORS), "attention_factor": ATTENTION},
    "factor": 4.0,
    "target": TARGET,
    "rotary_dim": 16,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}


def written(file, scaling, *, rope=ROPE, target=TARGET):
    return write_scaling(file, scaling, rope, target)


def saved(file, plan):
    return write_scaling(file, plan.method, plan.config.rope, plan.target)


def small_config(**changes):
    """The checkpoint's configuration with changes."""
    small = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": WINDOW,
    }
    return LlamaConfig(**small | {"rope_theta": 10000.0} | changes)


def custom(**changes):
    return CustomDivisors(
        **{"factor": 4.0, "divisors": DIVISORS, "attention_factor": ATTENTION} | changes
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model with a text for its tokenizer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "small")
    (folder.parent / "text.txt").write_text(
        " ".join(f"word{i * i % 43}" for i in range(600))
    )
    return folder


@pytest.fixture
def mine(tmp_path, checkpoint):
    """A custom scaling file."""
    parameters = {"divisors": DIVISORS, "attention_factor": ATTENTION}
    plan = ropepatch.plan(checkpoint, to=TARGET, method="custom", **parameters)
    return saved(tmp_path / "mine.json", plan)


# Reading


@pytest.mark.parametrize("name", METHODS)
def test_every_method_round_trips_bit_identically(tmp_path, name):
    scaling = example_of(name, PAIRS, factor=10 / 3)
    file = written(tmp_path / "x.json", scaling)
    read = read_scaling(file)
    assert (read.scaling, read.rope, read.target) == (scaling, ROPE, TARGET)


def test_scaled_rope_is_read_from_a_file_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    carried = tuple((ROPE.inv_freq() / 3).tolist())
    rope = Rope(2 * PAIRS, 10000.0, WINDOW, carried, 1.1)
    written(tmp_path / "x.json", custom(), rope=rope)
    file = read_scaling("~/x.json")
    assert (file.rope, file.scaling) == (rope, custom())


# What is no scaling


def changed(**changes):
    """A file's content with other values, or without them where they are None."""
    return json.dumps(
        {key: value for key, value in (CONTENT | changes).items() if value is not None}
    )


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"target": 2**63},
            {"factor": 0.5},
            {"ropepatch_scaling": 2},
            {"method": "costum"},
        ),
        *(
            {"parameters": {"divisors": [1.0, 0]}},
            {"parameters": {"divisors": [1.0], "factor": 2.0}},
        ),
        *(
            {"factr": 4.0},
            {"rope_theta": None},
            {"rotary_dim": 15},
            {"carried": [1.0, 0]},
        ),
    ],
    ids=str,
)
def test_the_error_of_an_invalid_scaling_names_the_file(tmp_path, changes):
    file = tmp_path / "x.json"
    file.write_text(changed(**changes))
    with pytest.raises(RopepatchError) as caught:
        read_scaling(file)
    assert str(caught.value).startswith(f"{file}")
    assert caught.value.hint


# Plans


def test_a_plan_from_a_file_equals_that_from_its_parameters(checkpoint, mine):
    one = ropepatch.plan(checkpoint, to=TARGET, method=str(mine))
    other = ropepatch.plan(
        checkpoint,
        to=TARGET,
        method="custom",
        divisors=DIVISORS,
        attention_factor=ATTENTION,
    )

    assert one.to_dict() == other.to_dict()
    with pytest.raises(RopepatchError, match="`to` is missing"):
        ropepatch.plan(checkpoint)
    assert torch.equal(one.frequencies().inv_freq, other.frequencies().inv_freq)
    assert one.frequencies().attention_factor == ATTENTION


def test_a_file_for_another_plan_is_rejected(tmp_path, checkpoint, mine):
    short = written(tmp_path / "x.json", custom(divisors=DIVISORS[:3]))
    for given, words in (
        ({"to": TARGET // 2}, f"for a target of {TARGET} tokens"),
        ({"to": 2 * TARGET}, f"for a target of {TARGET} tokens"),
        ({"to": TARGET, "attention_factor": 1.0}, "attention_factor cannot be set"),
        ({"to": TARGET, "factor": 4.0}, "factor cannot be set"),
        ({"method": short}, "got 3 divisors"),
    ):
        with pytest.raises(RopepatchError, match=words):
            ropepatch.plan(checkpoint, **{"method": str(mine)} | given)
    for changes in (
        {"head_dim": 8},
        {"rope_theta": 500000.0},
        {"max_position_embeddings": 1024},
    ):
        with pytest.raises(RopepatchError, match="is for a model with"):
            ropepatch.plan(small_config(**changes), method=str(mine))


def test_a_file_for_a_scaled_model_applies_to_it(tmp_path):
    scaled = small_config(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    )
    plan = ropepatch.plan(
        scaled, to=TARGET, method="custom", divisors=DIVISORS, factor=8.0
    )
    assert plan.config.rope.is_scaled
    file = saved(tmp_path / "x.json", plan)
    assert ropepatch.plan(scaled, method=file).to_dict() == plan.to_dict()
    with pytest.raises(
        RopepatchError, match=r"frequencies of an earlier scaling \(0\.5, .* has None"
    ):
        ropepatch.plan(small_config(), method=file)
    content = json.loads(file.read_text())
    content["carried"][3] *= 1 + 1e-7  # another machine's rounding
    file.write_text(json.dumps(content))
    assert ropepatch.plan(scaled, method=file).method == plan.method
    content["carried"][3] *= 1 + 1e-3
    file.write_text(json.dumps(content))
    with pytest.raises(RopepatchError, match="frequencies of an earlier scaling"):
        ropepatch.plan(scaled, method=file)


# Suites


def test_a_suite_accepts_a_scaling_file_and_records_its_parameters(
    tmp_path, checkpoint, mine
):
    text = {
        "task": "perplexity",
        "text": str(checkpoint.parent / "text.txt"),
        "windows": 2,
    }
    suite = {
        "models": [str(checkpoint)],
        "methods": [str(mine), "ntk"],
        "to": [TARGET],
        "tasks": [text],
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    out = tmp_path / "results"
    results = measure(read_suite(str(tmp_path / "suite.yaml")), out=out)
    losses = [result.row("loss", length=TARGET).value for result in results]
    scaling = read_result(out / "small-256-perplexity-mine.json").scaling
    assert scaling["method"] == "custom"
    assert scaling["parameters"] == CONTENT["parameters"]
    assert len({*losses}) == 3

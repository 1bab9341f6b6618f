"""The commands of `ropepatch plan --for ENGINE`, interpreted by the engines' rules."""

import json
import shlex
import shutil
from itertools import pairwise

import hub_server
import numpy as np
import pytest
from checkpoint_folders import edit_json
from engine_rules import RULES, by_yarn, plain, yarn
from gguf_files import BASE, DIM, WINDOW, write_gguf
from hub_server import Hub, speak_to
from methods import applied
from tiny_models import tiny_config

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension.serving import ENGINES, GGUF_ENGINES, serving
from ropepatch.files import json_text

ROW = {"vllm": "vLLM", "sglang": "SGLang"}
OVERRIDES = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length"}
SAYABLE = {
    "yarn": {},
    "yarn, betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, factor": {"attention_factor": 1.5},
    "linear": {},
    "ntk": {},
    "abf": {"rope_theta": 90_000.0},
}
UNSAYABLE = {
    "llama3": {},
    "ntk-fixed": {},
    "yarn, ramp": {"truncate": False},
}
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA_3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def planned(case, **parameters):
    return ropepatch.plan("tiny", to="4x", method=case.partition(",")[0], **parameters)


def options(command):
    """The options of a command line and the overridden keys, by name."""
    pairs = list(pairwise(shlex.split(command)))
    keys = dict(value.split("=", 1) for word, value in pairs if word == "--override-kv")
    return keys | {word: value for word, value in pairs if word.startswith("-")}


@pytest.mark.parametrize(("case", "parameters"), (SAYABLE | UNSAYABLE).items())
@pytest.mark.parametrize("engine", ROW)
def test_overridden_keys_equal_the_written_config(engine, case, parameters):
    plan = planned(case, **parameters)
    given = options("\n".join(serving(plan, engine).commands))
    raw, target = plan.config.raw, plan.target
    older = ("rope_theta", "rope_scaling")
    config = {key: value for key, value in raw.items() if key not in older}
    keys = json.loads(given[OVERRIDES[engine]])
    # vLLM limits requests by the tokenizer's length, which RULES does not read
    assert keys.get("model_max_length") == (target if engine == "vllm" else None)
    config |= keys
    overridden = RULES[ROW[engine]](config, target, int(given[LENGTH[engine]]))
    written = RULES[ROW[engine]](applied(plan, raw), target, target)
    assert np.array_equal(overridden.inv_freq, written.inv_freq)
    assert (overridden.attention_factor, overridden.reach) == (
        written.attention_factor,
        target,
    )


@pytest.mark.parametrize(("case", "parameters"), SAYABLE.items())
def test_the_options_of_llama_cpp_give_frequencies_and_attention_factor(
    case, parameters, tmp_path
):
    file = write_gguf(tmp_path / "llama.gguf")
    plan = ropepatch.plan(file, to="4x", method=case.partition(",")[0], **parameters)
    check_switches(serving(plan, "llama.cpp").commands[-1], plan)


def check_switches(command, plan):
    given = options(command)
    theta, scale = float(given["--rope-freq-base"]), float(given.get("--rope-scale", 1))
    d = plan.source.config.rope.rotary_dim
    expected, a = plain(theta, d) / scale, 1.0
    if given["--rope-scaling"] == "yarn":
        said = {
            "factor": scale,
            "original_max_position_embeddings": int(given["--yarn-orig-ctx"]),
            "beta_fast": float(given.get("--yarn-beta-fast", 32)),
            "beta_slow": float(given.get("--yarn-beta-slow", 1)),
        }
        expected, a = yarn(theta, d, said, truncate=True), by_yarn(scale)
    factor = given.get("llama.rope.scaling.attn_factor", "float:1")
    ours = plan.frequencies()
    assert np.allclose(ours.inv_freq.double().numpy(), expected, rtol=1e-6, atol=0)
    a *= float(factor.removeprefix("float:"))
    assert ours.attention_factor == pytest.approx(a, rel=1e-6)
    assert int(given["-c"]) == plan.target
    assert given["llama.context_length"] == f"int:{plan.target}"


# Printed `ropepatch` commands, which are run

TARGET = 1024
FACTORS = tuple(1 + i / 8 for i in range(DIM // 2))
QWEN3 = {"to": TARGET, "method": "ntk", "original": WINDOW}
ASKED = [
    {"method": "yarn", "truncate": False, "beta_fast": 16.0},
    {"method": "yarn", "attention_factor": 1.5, "factor": 3.0},
    {"method": "resonance", "over": "linear"},
    {"method": "custom", "divisors": FACTORS},
]


def check_command(folder, config, run_here, **asked):
    config.save_pretrained(folder)
    plan = ropepatch.plan(folder, **{"to": TARGET} | asked)
    assert made_by(serving(plan, "mlx-lm"), folder, run_here) == data(plan)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_printed_command_gives_the_plan_that_is_shown(asked, tmp_path, run_here):
    check_command(tmp_path, tiny_config("llama"), run_here, **asked)


def test_a_command_has_the_original_length_and_an_earlier_scaling(tmp_path, run_here):
    longer = tiny_config("qwen3", max_position_embeddings=160)
    check_command(tmp_path / "a", longer, run_here, **QWEN3)
    scaled = tiny_config("llama", rope_parameters=LLAMA_3 | {"rope_theta": BASE})
    check_command(tmp_path / "b", scaled, run_here, method="linear")


@pytest.mark.parametrize("engine", GGUF_ENGINES)
def test_a_checkpoint_is_served_by_its_gguf_file(engine, tmp_path, run_here):
    config = tiny_config("qwen3", max_position_embeddings=160)
    (command,) = serving(ropepatch.plan(config, **QWEN3), engine).commands
    file = write_gguf(tmp_path / "FILE.gguf", "qwen3", context_length=160)
    assert command.endswith(f" --for {engine}")
    run_here(*shlex.split(command)[1:], cwd=tmp_path)
    plan = ropepatch.plan(file, **QWEN3)
    if engine == "ollama":
        made = made_by(serving(plan, engine), tmp_path, run_here)
        assert made["inv_freq"] == data(plan)["inv_freq"]


def data(plan):
    return json.loads(json_text(plan.to_dict()))


def made_by(served, place, run_here):
    """The plan that the first printed command makes."""
    program, verb, *words, out, _ = shlex.split(served.commands[0])
    assert (program, verb, out) == ("ropepatch", "extend", "--out")
    return json.loads(run_here("plan", *words, "--json", cwd=place).stdout)


def test_the_command_for_a_hub_model_names_its_commit(
    shards, tmp_path, run_here, monkeypatch
):
    with hub_server.serving(Hub("a/model", shards)) as hub:
        speak_to(hub, monkeypatch)
        cache = str(tmp_path / "hub")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache)
        plan = ropepatch.plan("a/model", to=256, revision="main")
        served = serving(plan, "mlx-lm")
        assert f"--revision {plan.source.revision}" in served.commands[0]
        assert made_by(served, tmp_path, run_here) == data(plan)


def test_a_partly_supported_checkpoint_has_the_note_of_the_engine():
    served = serving(planned("yarn", attention_factor=1.5, truncate=False), "mlx-lm")
    assert "truncates the ramp" in served.note


@pytest.mark.parametrize(("method", "is_kept"), [("yarn", False), ("none", True)])
def test_a_scaling_replaces_dual_chunk_attention(method, is_kept, template, tmp_path):
    """vLLM and SGLang build it before they look at a scaling."""
    chunks = {"original_max_position_embeddings": 32}
    source = shutil.copytree(template, tmp_path / "model")
    edit_json(source / "config.json", dual_chunk_attention_config=chunks)
    plan = ropepatch.plan(source, to=256, method=method)
    assert plan.source.config.window == 32
    for engine in ("vllm", "sglang"):
        (command, *_) = serving(plan, engine).commands
        assert command.startswith("ropepatch extend") != is_kept
    out = ropepatch.extend(plan, tmp_path / "out", reading=False).folder
    written = json.loads((out / "config.json").read_text())
    assert ("dual_chunk_attention_config" in written) == is_kept


def test_options_of_llama_cpp_do_not_reach_sliding_window_layers(tmp_path):
    sliding = {"attention.sliding_window": 32}
    file = write_gguf(tmp_path / "a.gguf", "gpt-oss", **sliding)
    served = serving(ropepatch.plan(file, to="4x"), "llama.cpp")
    assert "sliding-window layers" in served.why_not
    assert served.commands[0].startswith("ropepatch extend ")


@pytest.mark.parametrize(
    ("method", "engine"),
    [("rerope", engine) for engine in ENGINES] + [("dynamic", "vllm")],
)
def test_an_unsupported_plan_has_no_command(method, engine):
    served = serving(ropepatch.plan("tiny", to="4x", method=method), engine)
    assert (served.commands, bool(served.why_not)) == ((), True)


def test_the_error_of_an_unknown_engine_suggests_the_nearest_name():
    with pytest.raises(RopepatchError) as error:
        serving(planned("yarn"), "vlm")
    assert "vllm" in error.value.hint

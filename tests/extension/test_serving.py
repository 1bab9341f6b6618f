"""The commands of `ropepatch plan --for ENGINE`, interpreted by the engines' rules."""

import json
import shlex
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_rules import RULES, by_yarn, plain, yarn
from gguf_files import write_gguf
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
)

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension.serving import ENGINES, cache_bytes, serving
from ropepatch.model.checkpoint import Checkpoint

ROW = {"vllm": "vLLM", "sglang": "SGLang"}
OVERRIDES = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "-c"}
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


def planned(case: str, **parameters) -> ropepatch.extension.planning.Plan:
    return ropepatch.plan("tiny", to="4x", method=case.partition(",")[0], **parameters)


def options(command: str) -> dict[str, str]:
    """The options of a command line and the overridden keys, by name."""
    pairs = list(pairwise(shlex.split(command)))
    keys = dict(value.split("=", 1) for word, value in pairs if word == "--override-kv")
    return keys | {word: value for word, value in pairs if word.startswith("-")}


@pytest.mark.parametrize(("case", "parameters"), (SAYABLE | UNSAYABLE).items())
@pytest.mark.parametrize("engine", ROW)
def test_overridden_keys_equal_the_written_config(engine, case, parameters):
    plan = planned(case, **parameters)
    given = options("\n".join(serving(plan, engine).commands))
    raw, target = plan.source.raw, plan.target
    config = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling")}
    config |= json.loads(given[OVERRIDES[engine]])
    overridden = RULES[ROW[engine]](config, target, int(given[LENGTH[engine]]))
    written = RULES[ROW[engine]](plan.apply(raw), target, target)
    assert np.array_equal(overridden.inv_freq, written.inv_freq)
    assert (overridden.attention_factor, overridden.reach) == (written.attention_factor, target)


@pytest.mark.parametrize(("case", "parameters"), SAYABLE.items())
def test_the_options_of_llama_cpp_give_frequencies_and_attention_factor(case, parameters):
    plan = planned(case, **parameters)
    check_switches(serving(plan, "llama.cpp").commands[-1], plan)


def check_switches(command, plan):
    given = options(command)
    theta, scale = float(given["--rope-freq-base"]), float(given.get("--rope-scale", 1))
    kind, d = given["--rope-scaling"], plan.rope.rotary_dim
    expected, a = plain(theta, d) / scale, 1.0
    if kind == "yarn":
        said = {"factor": scale, "original_max_position_embeddings": int(given["--yarn-orig-ctx"])}
        usual = {"beta_fast": 32, "beta_slow": 1}
        betas = {key: float(given.get(f"--yarn-{key.replace('_', '-')}", usual[key])) for key in usual}
        expected, a = yarn(theta, d, said | betas, truncate=True), by_yarn(scale)
    a *= float(given.get("llama.rope.scaling.attn_factor", "float:1").removeprefix("float:"))
    ours = plan.frequencies()
    assert np.allclose(ours.inv_freq.double().numpy(), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(a, rel=1e-6)
    assert int(given["-c"]) == plan.target
    assert given["llama.context_length"] == f"int:{plan.target}"


@pytest.mark.parametrize("parameters", [{}, {"attention_factor": 1.5}], ids=str)
def test_a_gguf_file_is_served_with_the_same_options(parameters, tmp_path):
    file = write_gguf(tmp_path / "llama.gguf")
    plan = ropepatch.plan(file, to="4x", **parameters)
    check_switches(serving(plan, "llama.cpp").commands[-1], plan)
    by_table = serving(ropepatch.plan(file, to="4x", method="llama3"), "llama.cpp")
    assert by_table.commands[0].startswith(f"ropepatch extend {file} ")


@pytest.mark.parametrize(("case", "parameters"), UNSAYABLE.items())
def test_scalings_without_options_need_a_written_checkpoint(case, parameters):
    served = serving(planned(case, **parameters), "llama.cpp")
    assert served.why_not
    command = options(served.commands[0])
    assert command["--method"] == case.partition(",")[0]
    for key, value in parameters.items():
        assert f"--set={key}={str(value).lower()}" in shlex.split(served.commands[0])


def test_an_already_scaled_file_is_not_scaled_by_options():
    raw = ropepatch.plan("tiny", to="4x", method="llama3")
    scaled = Checkpoint(None, "scaled", stated_raw=raw.apply(raw.source.raw))
    plan = ropepatch.extension.planning.plan_method(scaled, "linear", {}, "2x")
    assert "on top" in serving(plan, "llama.cpp").why_not


@pytest.mark.parametrize(
    ("method", "engine"), [("rerope", engine) for engine in ENGINES] + [("dynamic", "vllm")]
)
def test_an_unsupported_plan_has_no_command(method, engine):
    served = serving(ropepatch.plan("tiny", to="4x", method=method), engine)
    assert (served.commands, bool(served.why_not)) == ((), True)


def test_the_error_of_an_unknown_engine_suggests_the_nearest_name():
    with pytest.raises(RopepatchError) as error:
        serving(planned("yarn"), "vlm")
    assert "vllm" in error.value.hint


SMALL = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_hidden_layers=3),
        MistralConfig(**SMALL, num_hidden_layers=2, sliding_window=24),
        Gemma3TextConfig(**SMALL, num_hidden_layers=7, head_dim=16, sliding_window=8),
    ],
    ids=lambda config: config.model_type,
)
def test_the_kv_cache_size_equals_that_of_transformers(config):
    model, tokens = AutoModelForCausalLM.from_config(config).eval(), 40
    with torch.no_grad():
        cache: Cache = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:
        window = layer.sliding_window if layer.is_sliding else tokens  # transformers holds one token less
        held += 2 * layer.keys[..., :1, :].numel() * min(tokens, window)
        assert layer.keys.shape[-2] in (tokens, window - 1)
    assert cache_bytes(config, tokens) == 2 * held


def test_latent_attention_caches_only_its_latents():
    config = DeepseekV3Config(kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=61)
    assert cache_bytes(config, 1000) == 2 * 61 * 1000 * (512 + 64)

"""Checkpoints with a position remapping: their results without ropepatch, and loading them."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import edit_json, write_checkpoint
from families import refusal
from oldest import NOT_YET
from remapping_oracle import SMALL
from swaps import IDS, apart, logits
from tiny_models import ROTARY_TYPES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention import REMAPPINGS, Remapping, make_remapping
from ropepatch.attention import modeling_position_remapping as modeling
from ropepatch.attention.remapped import mapped, remap_positions
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.evaluation.measuring import Machine, Subject
from ropepatch.extension import changes, writing
from ropepatch.extension import record as records
from ropepatch.extension.remapping_code import (
    remapped_layers,
    remapping_code,
    remapping_keys,
)
from ropepatch.files import read_json
from ropepatch.model.checkpoint import CODE, Checkpoint
from ropepatch.model.config import Config
from ropepatch.publishing.folding import fold_attention

WEIGHTS = "model.safetensors"
SCRIPT = Path(__file__).parents[1] / "support" / "without_ropepatch.py"
# Layers without rotation, RoPE by layer type, converted names, interleaved pairs of a part, experts.
ODD = ["smollm3", "gemma3_text", "gpt_neox", "glm", "qwen3_moe", "qwen3"]
OFTEN = ["self-extend", "modified", "smollm3", "gemma3_text"]


def write_remapped(
    folder: Path, model: PreTrainedModel, name: str, **parameters: Any
) -> torch.Tensor:
    """Write a remapped model as `extend` does, unverified; return the logits of the patched model."""
    surveyed = Config.of(model)
    target = 4 * surveyed.window
    distances = make_remapping(name, **parameters)
    handle = remap_positions(model, distances, to=surveyed.window + 1)
    expected, layers, fitted = (
        logits(model, IDS),
        remapped_layers(model),
        handle.distances,
    )
    handle.remove()
    model.save_pretrained(folder)
    keys = remapping_keys(surveyed, fitted, target)
    keys["position_remapping"]["layers"] = None if layers is None else list(layers)
    edit_json(folder / "config.json", **keys, max_position_embeddings=target)
    (folder / CODE).write_text(remapping_code(surveyed.model_type, surveyed.site.path))
    return expected


def results_elsewhere(
    scratch: Path, folders: list[Path], *asked: str
) -> dict[str, Any]:
    """The results of all or the named folders in a process without ropepatch."""
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }
    environment |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "-P",
        "-s",
        SCRIPT,
        scratch / "answers.pt",
        ",".join(asked),
        *folders,
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = torch.load(scratch / "answers.pt")
    return answers


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("remapped")


@pytest.fixture(scope="module")
def expected(here) -> dict[str, torch.Tensor]:
    """Results in memory; also writes the folders."""
    found = {
        name: write_remapped(here / name, tiny_model("llama"), name, **SMALL[name])
        for name in REMAPPINGS
    }
    late = {"log_n": True, "attention_factor": 1.2}
    found["modified"] = write_remapped(
        here / "modified", tiny_model("llama"), "rerope", window=8, **late
    )
    for family in ODD:
        found[family] = write_remapped(
            here / family, tiny_model(family), "self-extend", window=7
        )
    return found


@pytest.fixture(scope="module")
def answers(here, expected) -> Callable[[str], Any]:
    """The results of each without ropepatch: a few, or all others in the slow tests; a process per group."""

    @cache
    def read(often: bool) -> dict[str, Any]:
        names = OFTEN if often else [*(expected.keys() - {*OFTEN})]
        return results_elsewhere(here, [here / name for name in names])

    return lambda name: read(name in (*OFTEN, "more"))[name]


@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
        for name in [*REMAPPINGS, "modified", *ODD]
    ],
)
def test_a_saved_remapping_equals_the_patched_model_with_and_without_kv_cache(
    answers, expected, name
):
    assert apart(answers(name)["logits"], expected[name]) < 5e-5
    for way in ("cached", "one by one", "static"):
        assert apart(answers(name)[way], answers(name)["logits"]) < 5e-5


def test_packed_documents_are_independent(answers):
    model = tiny_model("llama")
    ropepatch.patch(model, "self-extend", to=65, **SMALL["self-extend"])
    parts = [
        logits(model, IDS[:, :18], use_cache=False),
        logits(model, IDS[:, 18:], use_cache=False),
    ]
    assert apart(answers("self-extend")["packed"], torch.cat(parts, 1)) < 5e-5


def test_a_saved_remapping_generates_trains_saves_and_pickles(answers, expected):
    more, read = answers("more"), answers("self-extend")["logits"]
    assert apart(more["generated"], more["alone"]) < 5e-5
    assert torch.equal(more["alone"].argmax(-1), more["sequences"][:, -9:])
    assert torch.equal(more["again"], read)
    assert torch.equal(more["pickled"], read)
    assert more["backend"] is False  # no other attention runs it without rotation
    assert "'sdpa' would ignore this model's positions" in more["sdpa"]
    model = tiny_model("llama").train()
    ropepatch.patch(model, "self-extend", to=65, **SMALL["self-extend"])
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert apart(more["gradients"], own) < 1e-4 * float(own.abs().max())


@pytest.mark.parametrize(
    "load", [AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained]
)
def test_loading_without_trust_remote_code_fails(here, expected, load):
    with pytest.raises(ValueError, match="contains custom code"):
        load(here / "self-extend", trust_remote_code=False)


@pytest.mark.sweep
def test_every_supported_architecture_is_saved_with_a_remapping(tmp_path):
    expected = {}
    for model_type in ROTARY_TYPES:
        if model_type in NOT_YET or refusal(model_type):
            continue
        model = tiny_model(model_type)
        surveyed = Config.of(model)
        if surveyed.section is None and surveyed.model_type == model_type:
            remapped_by = tmp_path / model_type
            with contextlib.suppress(RopepatchError):  # which has its own test
                expected[model_type] = write_remapped(
                    remapped_by, model, "self-extend", window=7
                )
    answers = results_elsewhere(
        tmp_path, [tmp_path / name for name in expected], "logits", "cached"
    )
    assert len(expected) > 40
    assert not {
        name: apart(answers[name]["logits"], expected[name])
        for name in expected
        if apart(answers[name]["logits"], expected[name]) > 1e-4
        or apart(answers[name]["cached"], answers[name]["logits"]) > 1e-4
    }


# Written by extend


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny-llama")


@pytest.fixture(scope="module")
def extended(source, tmp_path_factory) -> Path:
    made = ropepatch.plan(source, to="4x", method="self-extend")
    return (
        writing.check(made, tmp_path_factory.mktemp("extended") / "mapped").write().path
    )


@pytest.fixture
def copied(extended, tmp_path) -> Path:
    return Path(shutil.copytree(extended, tmp_path / "mapped"))


def test_extend_writes_and_verifies_the_remapping_its_code_and_hash(source, extended):
    config, record = read_json(extended / "config.json"), records.read(extended)
    assert config["model_type"] == "llama-position-remapping"
    assert config["architectures"] == ["RemappedLlamaForCausalLM"]
    # vLLM and SGLang load a model by `AutoModel`; without it they reject the checkpoint
    assert config["auto_map"].keys() == {"AutoConfig", "AutoModelForCausalLM"}
    assert config["max_position_embeddings"] == 256
    assert config["position_remapping"] == {
        "name": "self-extend",
        "parameters": {
            "window": 16,
            "group": 11,
            "log_n": False,
            "attention_factor": 1.0,
        },
        "window": 64,
        "target": 256,
        "layers": None,
        "layer_type": None,
    }
    assert record.code == {
        CODE: hashlib.sha256((extended / CODE).read_bytes()).hexdigest()
    }
    assert (record.method, record.factor, record.target) == ("self-extend", 4.0, 256)
    assert record.verified is not None
    assert record.verified.compared
    assert (extended / CODE).read_text() == remapping_code("llama", "model.rotary_emb")


def test_code_that_computes_something_else_is_not_kept(source, tmp_path, monkeypatch):
    wrong = remapping_code("llama", "model.rotary_emb").replace(
        "m // group + shift", "m // group"
    )
    monkeypatch.setattr(changes, "remapping_code", lambda *_: wrong)
    made = ropepatch.plan(source, to="4x", method="self-extend")
    with pytest.raises(
        RopepatchError, match="computes other logits from the written checkpoint"
    ):
        writing.check(made, tmp_path / "out").write()
    monkeypatch.setattr(
        changes, "remapping_code", lambda *_: "raise SystemError('broken')"
    )
    made = ropepatch.plan(source, to="4x", method="self-extend")
    with pytest.raises(
        RopepatchError,
        match=r"transformers cannot run the written checkpoint: .*broken",
    ):
        writing.check(made, tmp_path / "out").write()
    assert not (tmp_path / "out").exists()


def test_unverifiable_remappings_and_other_code_are_rejected_before_writing(
    source, tmp_path, monkeypatch
):
    def refused(folder: Path, words: str, **options: Any) -> None:
        made = ropepatch.plan(folder, to="4x", method="rerope")
        with pytest.raises(RopepatchError, match=words):
            writing.check(made, tmp_path / "out", **options)

    with monkeypatch.context() as patched:
        patched.setattr(
            "ropepatch.extension.verification.available_bytes", lambda: 1000
        )
        refused(source, "needs .* GB of memory")
    quantised, foreign = (
        shutil.copytree(source, tmp_path / name) for name in ("quantised", "foreign")
    )
    edit_json(
        quantised / "config.json",
        quantization_config={"quant_method": "gptq", "bits": 4},
    )
    refused(quantised, "its weights are q")
    (foreign / "custom_generate").mkdir()
    ran = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef generate(model, **given): ..."
    (foreign / "custom_generate" / "generate.py").write_text(ran)
    refused(foreign, r"generate\.py contains other code", include=["custom_generate/*"])
    edit_json(
        foreign / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil/repo--t.T", None]},
    )
    refused(foreign, r"tokenizer_config\.json contains other code")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "quantised"]


# Loaded by ropepatch

WINDOWED = {"window": 16, "log_n": False, "attention_factor": 1.0}
SAID: dict[str, Any] = {
    "name": "rerope",
    "parameters": WINDOWED,
    "window": 64,
    "target": 256,
}
SAID |= {"layers": None, "layer_type": None}


def test_ropepatch_loads_the_remapping_without_running_the_code(source, copied):
    (copied / CODE).write_text("raise SystemError('never run')")
    model = load_checkpoint(Checkpoint(source))
    ropepatch.patch(model, "self-extend", to="4x")
    read, tokenizer = ropepatch.load(copied, device="cpu")
    ids = torch.randint(3, 40, (1, 200), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(read, ids), logits(model, ids))
    assert mapped(read).distances == mapped(model).distances
    assert tokenizer.model_max_length == read.config.max_position_embeddings == 256
    subject = Subject("copied", Checkpoint(copied), Machine())
    assert subject.trained == 256
    assert subject.record["position_remapping"]["name"] == "self-extend"
    assert subject.record["extended_from"] == 64


@pytest.mark.parametrize(
    "put_on_top",
    [
        lambda folder, out: ropepatch.plan(folder, to=1024),
        lambda folder, out: ropepatch.extend(folder, out, to=1024, method="rerope"),
        lambda folder, out: fold_attention(folder, out),
        lambda folder, out: Checkpoint(folder).load(),
    ],
)
def test_a_remapped_checkpoint_cannot_be_extended_again(extended, tmp_path, put_on_top):
    with pytest.raises(
        RopepatchError,
        match=r"has a position remapping already .self-extend to 256 tokens",
    ):
        put_on_top(extended, tmp_path / "out")
    assert not list(tmp_path.iterdir())


class LoadedWithTrust(LlamaConfig):
    """Reported as an error of the file itself."""

    model_type = "llama-position-remapping"
    position_remapping: dict[str, Any] | None = None


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_a_remapped_model_loaded_by_transformers_cannot_be_patched(method):
    model = tiny_model("llama")
    model.config = LoadedWithTrust(
        **model.config.to_dict() | {"position_remapping": SAID}
    )
    model.__class__ = type(
        "RemappedLlamaForCausalLM", (type(model),), {}
    )  # from no module of transformers
    with pytest.raises(RopepatchError, match="has a position remapping already"):
        ropepatch.patch(model, method, to=1024)


@pytest.mark.parametrize(
    "said",
    [
        None,
        {"name": "rerope"},
        SAID | {"name": "x"},
        SAID | {"window": 0},
        SAID | {"target": 5},
    ],
    ids=str,
)
def test_an_invalid_remapping_in_config_json_is_rejected(copied, said):
    edit_json(copied / "config.json", position_remapping=SAID)
    assert mapped(load_checkpoint(Checkpoint(copied))).distances.name == "rerope"
    edit_json(copied / "config.json", position_remapping=said)
    with pytest.raises(RopepatchError):
        load_checkpoint(Checkpoint(copied))


class Mine(Remapping):
    """A remapping of the user's own."""

    name = "mine"
    formula = "min(D, W)"
    paper = "none"

    def derived(self, window, target):
        return {}

    def fits(self, window):
        return True


def test_an_own_remapping_works_in_memory_but_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(modeling.REMAPPINGS, "mine", lambda: modeling.rerope(24))
    ropepatch.patch(tiny_model("llama"), Mine(), to=256).remove()
    plan = ropepatch.plan(
        str(write_checkpoint(tmp_path / "src")), method=Mine(), to=256
    )
    with pytest.raises(RopepatchError, match="cannot run the written checkpoint"):
        ropepatch.extend(plan, tmp_path / "out", say=lambda line: None)
    assert not (tmp_path / "out").exists()

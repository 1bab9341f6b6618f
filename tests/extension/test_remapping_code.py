"""Checkpoints with a position remapping: their results without ropepatch, and loading them."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
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
from transformers import LlamaConfig

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention import REMAPPINGS, make_remapping
from ropepatch.attention.remapped import mapped, remap_positions
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.evaluation.measuring import Machine, Subject
from ropepatch.extension import changes, verification, writing
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

SCRIPT = Path(__file__).parents[1] / "support" / "without_ropepatch.py"
LATE = {"window": 8, "log_n": True, "attention_factor": 1.2}
# One of every kind: also layers without rotation, and RoPE by layer type; the others run in the sweep
MADE = {
    "self-extend": ("llama", "self-extend", SMALL["self-extend"]),
    "modified": ("llama", "rerope", LATE),
    "smollm3": ("smollm3", "self-extend", {"window": 7}),
    "gemma3_text": ("gemma3_text", "self-extend", {"window": 7}),
}


def write_remapped(folder, model, name, **parameters):
    """Write a remapped model as `extend` does, unverified; return the logits of the patched model."""
    config = Config.of(model)
    target = 4 * config.window
    distances = make_remapping(name, **parameters)
    with remap_positions(model, distances, to=config.window + 1) as handle:
        expected, layers = logits(model, IDS), remapped_layers(model)
        keys = remapping_keys(config, handle.distances, target)
    model.save_pretrained(folder)
    keys["position_remapping"]["layers"] = layers
    edit_json(folder / "config.json", **keys, max_position_embeddings=target)
    (folder / CODE).write_text(remapping_code(config.model_type, config.site.path))
    return expected


def results_elsewhere(scratch, folders, *asked):
    """The results of all or the named folders in a process without ropepatch."""
    answers = scratch / "answers.pt"
    command = [sys.executable, "-P", "-s", SCRIPT, answers, ",".join(asked), *folders]
    environment = os.environ | {"HF_MODULES_CACHE": str(scratch / "modules")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(answers)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return tmp_path_factory.mktemp("remapped")


@pytest.fixture(scope="module")
def expected(here):
    """Results in memory; also writes the folders."""
    return {
        folder: write_remapped(here / folder, tiny_model(family), name, **parameters)
        for folder, (family, name, parameters) in MADE.items()
    }


@pytest.fixture(scope="module")
def answers(here, expected):
    """The results of each without ropepatch."""
    return results_elsewhere(here, [here / name for name in expected])


@pytest.mark.parametrize("name", MADE)
def test_a_saved_remapping_equals_the_patched_model(answers, expected, name):
    assert apart(answers[name]["logits"], expected[name]) < 5e-5
    for way in ("cached", "one by one", "static"):
        assert apart(answers[name][way], answers[name]["logits"]) < 5e-5


def test_a_saved_remapping_generates_saves_and_pickles(answers):
    more, read = answers["more"], answers["self-extend"]["logits"]
    assert apart(more["generated"], more["alone"]) < 5e-5
    assert torch.equal(more["alone"].argmax(-1), more["sequences"][:, -9:])
    assert torch.equal(more["again"], read)
    assert torch.equal(more["pickled"], read)
    assert more["backend"] is False  # no other attention runs it without rotation
    assert "'sdpa' would ignore this model's positions" in more["sdpa"]


@pytest.mark.sweep
def test_every_remapping_and_architecture_is_saved(tmp_path):
    made = {name: ("llama", name, SMALL[name]) for name in REMAPPINGS}
    for model_type in {*ROTARY_TYPES} - {*NOT_YET}:
        config = None if refusal(model_type) else Config.of(tiny_model(model_type))
        if config and config.section is None and config.model_type == model_type:
            made[model_type] = model_type, "self-extend", {"window": 7}
    expected = {}
    for folder, (model_type, name, parameters) in made.items():
        model, place = tiny_model(model_type), tmp_path / folder
        with contextlib.suppress(RopepatchError):  # which has its own test
            expected[folder] = write_remapped(place, model, name, **parameters)
    assert expected.keys() >= REMAPPINGS.keys()
    assert len(expected) > 50
    folders = [tmp_path / name for name in expected]
    answers = results_elsewhere(tmp_path, folders, "logits", "cached")
    for name, logits_here in expected.items():
        assert apart(answers[name]["logits"], logits_here) < 1e-4, name
        assert apart(answers[name]["cached"], answers[name]["logits"]) < 1e-4, name


# Written by extend


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny-llama")


@pytest.fixture(scope="module")
def extended(source, tmp_path_factory):
    made = ropepatch.plan(source, to="4x", method="self-extend")
    return (
        writing.check(made, tmp_path_factory.mktemp("extended") / "mapped").write().path
    )


@pytest.fixture
def copied(extended, tmp_path):
    return Path(shutil.copytree(extended, tmp_path / "mapped"))


def test_extend_writes_and_verifies_the_remapping_its_code_and_hash(extended):
    config, record = read_json(extended / "config.json"), records.read(extended)
    assert config["model_type"] == "llama-position-remapping"
    assert config["architectures"] == ["RemappedLlamaForCausalLM"]
    # vLLM and SGLang load a model by `AutoModel`; without it they reject the checkpoint
    assert config["auto_map"].keys() == {"AutoConfig", "AutoModelForCausalLM"}
    assert config["max_position_embeddings"] == 256
    fitted = {"window": 16, "group": 11, "log_n": False, "attention_factor": 1.0}
    described = {"name": "self-extend", "parameters": fitted}
    assert config["position_remapping"] == SAID | described
    code = (extended / CODE).read_bytes()
    assert code.decode() == remapping_code("llama", "model.rotary_emb")
    assert record.code == {CODE: hashlib.sha256(code).hexdigest()}
    assert (record.method, record.factor, record.target) == ("self-extend", 4.0, 256)
    assert record.verified is not None
    assert record.verified.compared


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "computes other logits from the written checkpoint"),
        ("raise SystemError('broken')", "cannot run the written checkpoint: .*broken"),
    ],
)
def test_code_that_computes_something_else_is_not_kept(
    source, tmp_path, monkeypatch, code, words
):
    right = remapping_code("llama", "model.rotary_emb")
    wrong = code or right.replace("m // group + shift", "m // group")
    monkeypatch.setattr(changes, "remapping_code", lambda *_: wrong)
    made = ropepatch.plan(source, to="4x", method="self-extend")
    with pytest.raises(RopepatchError, match=words):
        writing.check(made, tmp_path / "out").write()
    assert not (tmp_path / "out").exists()


def test_unverifiable_remappings_and_other_code_are_rejected_before_writing(
    source, tmp_path, monkeypatch
):
    def refused(folder, words, **options):
        made = ropepatch.plan(folder, to="4x", method="rerope")
        with pytest.raises(RopepatchError, match=words):
            writing.check(made, tmp_path / "out", **options).write()

    with monkeypatch.context() as patched:
        patched.setattr(verification, "available_bytes", lambda: 1000)
        refused(source, "needs .* GB of memory")
    quantised, foreign = (
        shutil.copytree(source, tmp_path / name) for name in ("quantised", "foreign")
    )
    quantisation = {"quant_method": "gptq", "bits": 4}
    edit_json(quantised / "config.json", quantization_config=quantisation)
    refused(quantised, "its weights are q")
    (foreign / "custom_generate").mkdir()
    (foreign / "custom_generate" / "generate.py").write_text("raise SystemExit")
    refused(foreign, r"generate\.py contains other code", include=["custom_generate/*"])
    tokenizer = {"AutoTokenizer": ["evil/repo--t.T", None]}
    edit_json(foreign / "tokenizer_config.json", auto_map=tokenizer)
    refused(foreign, r"tokenizer_config\.json contains other code")
    assert {path.name for path in tmp_path.iterdir()} == {"foreign", "quantised"}


# Loaded by ropepatch

SAID = {
    "name": "rerope",
    "parameters": {"window": 16, "log_n": False, "attention_factor": 1.0},
    "window": 64,
    "target": 256,
    "layers": None,
    "layer_type": None,
}


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
    assert subject.source.stock.window == 256
    assert subject.record["position_remapping"]["name"] == "self-extend"
    assert subject.record["extended_from"] == 64


@pytest.mark.parametrize(
    "put_on_top",
    [
        lambda folder, out: ropepatch.extend(folder, out, to=1024, method="rerope"),
        fold_attention,
        lambda folder, out: Checkpoint(folder).load(),
    ],
)
def test_a_remapped_checkpoint_cannot_be_extended_again(extended, tmp_path, put_on_top):
    with pytest.raises(RopepatchError, match=r"already .self-extend to 256 tokens"):
        put_on_top(extended, tmp_path / "out")
    assert not list(tmp_path.iterdir())


class LoadedWithTrust(LlamaConfig):
    """Reported as an error of the file itself."""

    model_type = "llama-position-remapping"
    position_remapping: dict[str, Any] | None = None


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_a_remapped_model_loaded_by_transformers_cannot_be_patched(method):
    model = tiny_model("llama")
    remapped = model.config.to_dict() | {"position_remapping": SAID}
    model.config = LoadedWithTrust(**remapped)
    # from no module of transformers
    model.__class__ = type("RemappedLlamaForCausalLM", (type(model),), {})
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

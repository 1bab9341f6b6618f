"""The doctor on weights and adapters."""

import json
import math
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from checkpoint_folders import edit_json
from tiny_models import tiny_model

import ropepatch
from ropepatch.doctor import diagnose, repair
from ropepatch.model.weights import fingerprint, read_headers

# As for a user, warnings of transformers are not errors.
pytestmark = pytest.mark.filterwarnings("ignore")

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(template, tmp_path):
    return Path(shutil.copytree(template, tmp_path / "model"))


@pytest.fixture
def sharded(shards, tmp_path):
    return Path(shutil.copytree(shards, tmp_path / "model"))


def codes(folder, *, measure=False):
    return [
        one.code
        for one in diagnose(folder, measure=measure).findings
        if one.severity != "remark"
    ]


# --- weights --------------------------------------------------------------------------------------------


def index(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def placed(folder, change):
    edit_json(folder / INDEX, weight_map=change(index(folder)))


def other_index(content):
    return lambda folder: (folder / INDEX).write_text(content)


@pytest.mark.parametrize(
    ("damage", "code", "problem"),
    [
        (
            lambda folder: placed(folder, lambda places: dict([*places.items()][1:])),
            "weights-misfit",
            "1 missing keys",
        ),
        (
            lambda folder: placed(
                folder, lambda places: places | {"model.ghost": min(places.values())}
            ),
            "weights-unreadable",
            "model.ghost",
        ),
        (other_index("{"), "weights-unreadable", "cannot read"),
        (other_index("{}"), "weights-unreadable", "weight_map of"),
        (
            other_index('{"weight_map": {"lm_head.weight": 3}}'),
            "weights-unreadable",
            "weight_map of",
        ),
        (
            lambda folder: (folder / INDEX).unlink(),
            "weights-unreadable",
            "no weights in",
        ),
        (
            lambda folder: sorted(folder.glob("model-*"))[1].unlink(),
            "weights-unreadable",
            "model-00002-of-",
        ),
        (
            lambda folder: edit_json(folder / "config.json", vocab_size=47),
            "weights-misfit",
            "Size([47",
        ),
        (
            lambda folder: edit_json(folder / "config.json", num_hidden_layers=1),
            "weights-misfit",
            "9 unexpec",
        ),
        (
            lambda folder: edit_json(folder / "config.json", num_hidden_layers=10**6),
            "transformers-refuses",
            "an integer from 1 to 1000",
        ),
        (
            lambda folder: edit_json(folder / "config.json", quantization_config={}),
            "transformers-refuses",
            "no `quant_method`",
        ),
    ],
    ids=[
        "a tensor missing from the index",
        "a tensor in no file",
        "invalid JSON",
        "needs weight_map",
        "a name that is a number",
        "no index",
        "a missing shard",
        "another vocabulary size",
        "fewer layers",
        "a million layers",
        "quantisation without a method",
    ],
)
def test_incomplete_or_mismatched_weights_are_one_unfixable_error(
    sharded, damage, code, problem
):
    damage(sharded)
    (finding,) = diagnose(sharded, measure=False).findings
    assert (finding.code, finding.severity, finding.fixable) == (code, "error", False)
    assert problem in finding.problem


def test_a_second_set_of_weights_is_a_warning(sharded, template):
    """Errors of the ignored set are not reported."""
    shutil.copy(template / "model.safetensors", sharded)
    placed(sharded, lambda places: places | {"model.ghost": min(places.values())})
    (finding,) = diagnose(sharded).findings
    assert (finding.code, finding.severity, finding.file) == (
        "weights-twice",
        "warning",
        INDEX,
    )
    assert "transformers loads model.safetensors" in finding.problem
    assert f"remove {INDEX} and its files" in finding.remedy
    assert "model.safetensors" in str(diagnose(sharded)).splitlines()[1].split(", ")
    (sharded / INDEX).unlink()
    assert codes(sharded) == []


@pytest.mark.parametrize(
    "kind",
    ["Qwen3ForSequenceClassification", "Qwen3ForTokenClassification", "Qwen3Model"],
)
def test_classifiers_rerankers_and_embedding_models_are_sound(kind, tmp_path):
    config = tiny_model("qwen3").config
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "model")
    assert codes(tmp_path / "model") == []
    edit_json(tmp_path / "model/config.json", vocab_size=47)
    assert "weights-misfit" in codes(tmp_path / "model")


def test_a_wrong_number_of_experts_is_an_error(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", num_local_experts=8)
    assert codes(tmp_path) == ["weights-misfit"]


def test_extend_warns_of_weights_that_the_model_does_not_use(folder, tmp_path, caplog):
    """Such as the value head of a critic."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["v_head.weight"] = tensors["model.norm.weight"].clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert codes(folder) == []
    ropepatch.extend(folder, tmp_path / "out", to=256, reading=False)
    assert "does not use 1 of the weights, for instance v_head.weight" in caplog.text


def test_a_too_long_shard_name_is_one_short_finding(sharded):
    name = f"{'x' * 5000}.safetensors"
    placed(sharded, lambda places: places | {name: name})
    diagnosis = diagnose(sharded, measure=False)
    assert [one.code for one in diagnosis.findings] == ["weights-unreadable"]
    assert len(str(diagnosis)) < 3000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("where", [0, 500, -1])
def test_a_nan_anywhere_in_the_weights_is_an_error(dtype, where, folder, monkeypatch):
    """Tensors are read in blocks, and only with `measure`."""
    monkeypatch.setattr("ropepatch.doctor.weights.COPY_BLOCK", 64)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = sorted(tensors)[1]
    value = tensors[name].flatten().float()
    value[where] = math.nan
    tensors[name] = value.reshape(tensors[name].shape).to(dtype)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (finding,) = [
        one for one in diagnose(folder).findings if one.code == "weights-not-finite"
    ]
    assert name in finding.problem
    assert "weights-not-finite" not in codes(folder)


def test_reading_all_weights_reports_its_progress(folder):
    done = []
    diagnose(folder, progress=lambda read, total: done.append((read, total)))
    assert done[-1][0] == done[-1][1] > 0


@pytest.mark.parametrize("keep", [0, 4, 2000])
def test_a_truncated_weights_file_is_reported(folder, keep):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:keep])
    assert codes(folder, measure=True) == ["weights-unreadable"]


def test_linked_weights_are_checked_and_a_repair_copies_them(folder, tmp_path):
    """`extend` follows such links too."""
    weights = Path(
        shutil.move(folder / "model.safetensors", tmp_path / "elsewhere.safetensors")
    )
    (folder / "model.safetensors").symlink_to(weights)
    assert codes(folder) == []
    edit_json(folder / "tokenizer_config.json", model_max_length=16)
    out = repair(diagnose(folder, measure=False), tmp_path / "out")
    assert not (out / "model.safetensors").is_symlink()
    assert (out / "model.safetensors").read_bytes() == weights.read_bytes()


def test_pickled_weights_are_reported_and_missing_weights_are_no_finding(folder):
    pickled = (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert codes(folder, measure=True) == ["weights-unreadable"]
    pickled.unlink()
    diagnosis = diagnose(folder)
    assert diagnosis.findings == ()
    assert "no readable weights" in str(diagnosis)


# --- adapters -------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(folder, tmp_path):
    """An adapter as `fine_tune` saves it after training with YaRN at 256 tokens."""
    plan = ropepatch.plan(folder, to=256)
    record = plan.to_dict() | {"base_weights": fingerprint(read_headers(folder))}
    place = tmp_path / "adapter"
    place.mkdir()
    (place / "ropepatch.json").write_text(json.dumps(record))
    (place / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(folder)})
    )
    return place


def test_an_adapter_whose_base_lacks_its_scaling_is_a_warning(adapter):
    (finding,) = diagnose(adapter).findings
    assert (finding.code, finding.severity, finding.fixable) == (
        "adapter-base-lacks-rope",
        "warning",
        False,
    )
    assert "yarn at 256 tokens" in finding.problem
    assert "load_adapter" in finding.remedy


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, []), ({"attention_factor": 1.0}, ["adapter-base-lacks-rope"])],
)
def test_the_base_of_an_adapter_must_have_its_rope(
    adapter, folder, tmp_path, options, expected
):
    made = ropepatch.plan(folder, to=256, **options)
    out = ropepatch.extend(made, tmp_path / "extended", reading=False).folder
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(out))
    assert [one.code for one in diagnose(adapter).findings] == expected


@pytest.mark.parametrize("name", ["gone/away/now", None, "", 3, "x" * 5000])
def test_a_missing_base_model_of_an_adapter_is_reported(adapter, name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=name)
    assert codes(adapter) == ["adapter-base-missing"]


def test_an_adapter_without_a_record_is_a_remark(adapter):
    (adapter / "ropepatch.json").unlink()
    (remark,) = diagnose(adapter).findings
    assert (remark.code, remark.severity) == ("adapter-without-record", "remark")


@pytest.mark.parametrize("inv_freq", ["x", None, [1.0], {"a": 1}])
def test_invalid_frequencies_in_an_adapter_record_count_as_another_rope(
    adapter, inv_freq
):
    edit_json(adapter / "ropepatch.json", inv_freq=inv_freq)
    assert codes(adapter) == ["adapter-base-lacks-rope"]

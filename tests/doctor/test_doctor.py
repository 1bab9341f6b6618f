"""The doctor of a folder: its small files, code, records, repaired copies and the command."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_folders import contents, edit_json
from damage import PUBLISHED
from methods import example

import ropepatch
from ropepatch import RopepatchError
from ropepatch.doctor import diagnose, repair
from ropepatch.scaling import METHODS

# As for a user, warnings of transformers are not errors.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = ("linear", "yarn", "longrope", "dynamic", "longrope-switch")
CONFIGS = {entry["name"]: entry for entry in PUBLISHED}
LLAMA_3_1, QWEN_3 = "Llama-3.1-8B", "Qwen3-8B, YaRN as documented"


def write(folder, name, *, model_max_length=None, **config):
    """A folder with a published config.json and its tokenizer_config.json, both changed."""
    folder.mkdir(parents=True)
    entry = CONFIGS[name]
    tokenizer = dict(entry["tokenizer"])
    if model_max_length:
        tokenizer["model_max_length"] = model_max_length
    (folder / "config.json").write_text(json.dumps(entry["config"] | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            pytest.param(name, {}, marks=() if name in SAMPLE else pytest.mark.slow)
            for name in METHODS
        ),
        *(("yarn", {"attention_factor": one}) for one in (0.8278, 0.05)),
    ],
)
def test_extended_checkpoints_have_no_findings_except_for_length_dependent_methods(
    name, options, template, tmp_path
):
    plan = ropepatch.plan(
        template, to=256, method=name, **example(name, 8).parameters() | options
    )
    findings = diagnose(
        ropepatch.extend(plan, tmp_path / "out", reading=False), measure=False
    )
    expected = {"attention-factor-inverted"} if options else set()
    if name in ("dynamic", "longrope-switch"):
        expected.add("switches-against-cache")
    assert {
        one.code for one in findings.findings if one.severity != "remark"
    } == expected


def test_bundled_and_real_checkpoints_have_no_findings(shared, template):
    real = (config.parent for config in (shared / "checkpoints").glob("*/config.json"))
    for place in ("tiny", template, *real):
        assert diagnose(place, measure=False).findings == (), place


def test_changed_or_missing_remapping_code_is_an_error(template, tmp_path):
    how = {"to": 256, "method": "self-extend", "reading": False}
    out = ropepatch.extend(template, tmp_path / "out", **how).folder
    assert [one.code for one in diagnose(out).findings] == ["not-in-transformers"]
    code = next(out.glob("*.py"))
    code.write_text(code.read_text() + "\nimport os\n")
    assert [one.code for one in diagnose(out).findings] == [
        "remapping-code-changed",
        "not-in-transformers",
    ]
    code.unlink()
    assert diagnose(out, measure=False).has_errors


@pytest.mark.parametrize(
    ("file", "content"),
    [("generation_config.json", "{"), ("tokenizer_config.json", "[]")],
)
def test_an_unreadable_or_invalid_json_file_is_an_error(
    file, content, template, tmp_path
):
    folder = Path(shutil.copytree(template, tmp_path / "model"))
    (folder / file).write_text(content)
    (finding,) = diagnose(folder, measure=False).findings
    assert (finding.code, finding.file) == ("file-unreadable", file)


@pytest.mark.parametrize(
    ("file", "values", "verified"),
    [
        ("tokenizer_config.json", {"model_max_length": 16}, True),
        ("config.json", {"rope_theta": None}, False),
    ],
)
def test_only_a_repair_of_config_json_removes_the_verification(
    file, values, verified, template, tmp_path
):
    source = ropepatch.extend(
        ropepatch.plan(template, to=256), tmp_path / "model"
    ).folder
    edit_json(source / file, **values)
    record = json.loads((source / "ropepatch.json").read_text())
    out = repair(diagnose(source, measure=False), tmp_path / "out")
    after = json.loads((out / "ropepatch.json").read_text())
    assert "verified" in record
    assert after == {
        key: value for key, value in record.items() if verified or key != "verified"
    }
    assert (out / "reading.json").exists() == verified


# --- repaired copies and the output of the command ------------------------------------------------------


@pytest.fixture
def repairable(tmp_path):
    """A checkpoint folder whose tokenizer stops early, with other files."""
    source = write(tmp_path / "model", QWEN_3, model_max_length=4096)
    for name in ("modeling_x.py", "pytorch_model.bin", ".gitattributes"):
        (source / name).write_text('{"a": 1}')
    (source / "original").mkdir()
    return source


def test_a_repair_copies_everything_except_folders_hidden_files_and_pickles(
    repairable, tmp_path
):
    before = contents(repairable)
    out = repair(diagnose(repairable, measure=False), tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "modeling_x.py",
        "tokenizer_config.json",
    ]
    assert (out / "modeling_x.py").read_text() == '{"a": 1}'
    assert contents(repairable) == before
    assert not any(one.fixable for one in diagnose(out, measure=False).findings)


def test_a_repair_rejects_existing_or_inner_folders_and_outward_links(
    repairable, tmp_path
):
    (tmp_path / "secret").write_text("secret")
    (repairable / "notes.txt").symlink_to(tmp_path / "secret")
    for out, message in {
        "model": "already exists",
        "model/out": "lies inside",
        "out": "leads out",
    }.items():
        with pytest.raises(RopepatchError, match=message):
            repair(diagnose(repairable, measure=False), tmp_path / out)
    assert not (tmp_path / "out").exists()


def test_doctor_exits_with_1_for_errors_only(tmp_path, run_here):
    behind = write(tmp_path / "warning", LLAMA_3_1, model_max_length=4096)
    assert run_here("doctor", behind, "--no-measure").returncode == 0
    contradicting = write(
        tmp_path / "error", LLAMA_3_1, original_max_position_embeddings=4096
    )
    result = run_here("doctor", contradicting)
    assert result.returncode == 1
    lines = result.stdout.split("\n\n")[1].splitlines()
    assert lines[:2] == [
        "error: keys-contradict",
        "  where   config.json original_max_position_embeddings = 4096",
    ]


def test_doctor_fix_repairs_and_prints_the_remaining_findings(tmp_path, run_here):
    original = {
        "factor": 0.25,
        "original_max_position_embeddings": 131072,
        "rope_type": "yarn",
    }
    source = write(
        tmp_path / "model", QWEN_3, model_max_length=4096, rope_scaling=original
    )
    result = run_here("doctor", source, "--no-measure", "--fix", tmp_path / "out")
    assert result.returncode == 1  # the lengths remain
    assert "tokenizer-behind" in result.stderr.splitlines()[0]
    assert "left for you to decide: factor-contradicts-lengths" in result.stderr
    tokenizer = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == 40960


def test_doctor_without_findings_makes_no_copy(tmp_path, run_here):
    result = run_here("doctor", "tiny", "--no-measure", "--fix", tmp_path / "out")
    assert (result.returncode, result.stdout.splitlines()[0]) == (
        0,
        "tiny: no problems found",
    )
    assert "model.safetensors" in result.stdout
    assert not (tmp_path / "out").exists()

"""The doctor names what is wrong with a rope, finds nothing in sound ones, and repairs without guessing."""

import copy
import json
import math
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_folders import contents, edit_json, write_checkpoint
from damaged_configs import (
    FAULTS,
    INHERENT,
    ORIGINALS,
    SOUND,
    Damaged,
    Files,
    blocks,
    change,
    drop,
    mutant,
    planted,
    with_rare_key,
)
from methods import example
from oldest import needs
from transformers import AutoConfig

import ropepatch
from ropepatch import RopepatchError
from ropepatch.doctor import diagnose, repair
from ropepatch.doctor.diagnosis import by_severity
from ropepatch.files import parse_json
from ropepatch.model.checks import RULES, check, repaired
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.rules import KNOWN_TYPES, same_rope
from ropepatch.model.config import is_known
from ropepatch.scaling import METHODS

# As for a user: a warning of transformers is no error.
pytestmark = pytest.mark.filterwarnings("ignore")

# Once these are repaired transformers reads the rope of the original again.
RESTORED = ("only-new-keys", "factor-is-integer", "window-not-integer", "head-dim-null")


def case_of(files: Files) -> Case:
    return Case("model", Path("model"), files.contents(), {})


def codes(files: Files) -> list[str]:
    """What is found, without remarks."""
    findings = by_severity(check(case_of(files)))
    return [finding.code for finding in findings if finding.severity != "remark"]


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.contents().items():
        (folder / name).write_text(json.dumps(content))
    return folder


def changed(name: str, rope: dict | None = None, tokenizer: dict | None = None, **top: object) -> Files:
    """An original with other values in its scaled ropes, its tokenizer and at the top of config.json."""
    files = copy.deepcopy(SOUND[name] if name in SOUND else INHERENT[name][0])
    change(blocks(files.config), **(rope or {}))
    files.config.update(top)
    return files if tokenizer is None else replace(files, tokenizer=tokenizer)


def write_repairable(folder: Path) -> Path:
    """A checkpoint folder whose window is no integer."""
    return write(folder, changed("extended with yarn", max_position_embeddings=32768.0))


@pytest.fixture(scope="module")
def damaged() -> list[Damaged]:
    return list(planted(4))


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("template") / "tiny-llama")


# --- what is found --------------------------------------------------------------------------------------


def test_of_a_hundred_damaged_configurations_the_planted_fault_is_named_mostly_first(damaged):
    missed = [one for one in damaged if one.code not in codes(one.files)]
    listed = [f"missed {one.code} by {one.fault} in {one.original}: {codes(one.files)}" for one in missed]
    first = [one for one in damaged if codes(one.files)[:1] == [one.code]]
    assert len(damaged) >= 100
    assert {one.fault for one in damaged} == FAULTS.keys()
    assert not missed, "\n".join(listed)
    assert len(first) >= 0.95 * len(damaged)


@pytest.mark.parametrize("value", ["4.0", [4.0], True, "16x", {"a": 1}, float("inf"), float("nan"), 10**400])
def test_what_is_no_number_is_named(value):
    assert codes(changed("vicuna-7b-v1.5-16k", {"factor": value}))[:1] == ["not-a-number"]


YARN, LONGROPE, LLAMA_3 = "extended with yarn", "extended with longrope", "Meta-Llama-3-8B"
SHORT, LEFT_BEHIND = {"model_max_length": 4096}, {"max_position_embeddings": 4096}
NO_FACTOR = {"attention_factor": None, "short_mscale": None, "long_mscale": None}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (LONGROPE, LEFT_BEHIND, []),  # the scaling says how far it reads
        (LONGROPE, LEFT_BEHIND | {"tokenizer": SHORT}, ["tokenizer-behind"]),
        # Beside an attention factor nothing is computed from longrope's factor; without one transformers
        # takes it from the factor, vLLM from the windows.
        (LONGROPE, {"rope": {"factor": 5.0}}, []),
        (LONGROPE, {"rope": NO_FACTOR | {"factor": 16.0}}, ["factor-contradicts-lengths"]),
        (LONGROPE, {"rope": {"attention_factor": 0.5, "short_mscale": 1.0}}, ["attention-factor-inverted"]),
        ("internlm2-7b", {"rope": {"alpha": 1000.0}}, []),  # HunYuan's dynamic: one base for all lengths
        (LLAMA_3, {"rope_theta": 10000.0}, ["theta-lost"]),
        (LLAMA_3, {"rope_theta": None}, ["theta-lost"]),
        (LLAMA_3, {"rope_theta": 10000.0, "hidden_size": 512}, []),  # no Llama 3 is so small
        (YARN, {"rope": {"mscale": -4.8, "mscale_all_dim": 0.0}}, []),  # 0.1 k ln 8 + 1 is 0 at k = -4.809
        (YARN, {"rope": {"mscale": -4.82, "mscale_all_dim": 0.0}}, ["impossible-value"]),
        ("AFM-4.5B", {"rope": {"mscale": 1}}, []),  # alone it is what every reader takes anyway
        ("AFM-4.5B", {"rope": {"mscale": 0.707}}, ["mscale-alone"]),
        ("AFM-4.5B", {"rope": {"mscale": None, "mscale_all_dim": 1.0}}, ["mscale-alone"]),
        ("Llama-4-Scout", {}, []),  # its bands meet
        ("Llama-4-Scout", {"rope": {"high_freq_factor": 0.9}}, ["bands-swapped"]),
    ],
)
def test_what_differs_from_a_sound_original_is_called_by_its_name(name, changes, expected):
    assert codes(changed(name, **changes)) == expected


def test_an_original_window_at_the_top_is_taken():
    files = copy.deepcopy(SOUND["Yarn-Llama-2-7b-64k"])
    name = "original_max_position_embeddings"
    files.config[name] = files.config["rope_scaling"].pop(name)
    assert codes(files) == []
    files.config[name] = 2048
    assert codes(files) == ["factor-contradicts-lengths"]


def test_a_base_that_older_readers_assume_anyway_is_not_lost():
    files = changed(YARN)
    del files.config["rope_theta"]
    assert codes(files) == ["theta-lost"]
    files.config["rope_parameters"]["rope_theta"] = 10000.0
    assert codes(files) == []


def test_older_keys_are_not_added_where_transformers_would_then_read_another_rope():
    """One `rope_scaling` would take the place of the ropes of all layer types."""
    long_yarn = SOUND["extended with yarn"].config["rope_parameters"]
    near, far = {"rope_type": "default", "rope_theta": 10000.0}, long_yarn | {"rope_theta": 500000.0}
    layers = ["sliding_attention", "full_attention"]
    ropes = {"sliding_attention": near, "full_attention": far}
    files = Files(
        {"model_type": "laguna", "layer_types": layers, "num_hidden_layers": 2, "rope_parameters": ropes}
        | {"max_position_embeddings": 32768, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
        | {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 2}
    )
    findings = [one for one in check(case_of(files)) if one.code == "only-new-keys"]
    assert [one.fixable for one in findings] == [False]


def test_a_share_of_each_head_that_only_transformers_5_finds_is_named(tmp_path):
    rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}
    files = changed("Llama-2-7b", model_type="stablelm", rope_parameters=rope)
    assert codes(files) == ["only-new-keys"]
    out = repair(diagnose(write(tmp_path / "model", files), measure=False), tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["partial_rotary_factor"] == 0.25
    assert codes(Files(files.config | {"partial_rotary_factor": 0.25})) == []


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_original(name):
    needs(SOUND[name].config["model_type"])
    assert codes(SOUND[name]) == []


@pytest.mark.parametrize("name", INHERENT)
def test_a_weakness_that_was_published_is_named_and_nothing_else(name):
    files, code = INHERENT[name]
    findings = check(case_of(files))
    assert {finding.code for finding in findings} - {"not-in-transformers"} == {code}
    assert all(finding.severity != "error" for finding in findings)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_found_in_what_ropepatch_extends(name, template, tmp_path):
    plan = ropepatch.plan(template, to=256, method=name, **example(name, 8).parameters())
    findings = diagnose(ropepatch.extend(plan, tmp_path / "out"), measure=False)
    expected = {"switches-against-cache"} if name in ("dynamic", "longrope-switch") else set()
    assert {one.code for one in findings.findings if one.severity != "remark"} == expected


def test_nothing_is_found_in_the_checkpoints_at_hand(shared, template):
    real = (config.parent for config in (shared / "checkpoints").glob("*/config.json"))
    for place in ("tiny", template, *real):
        assert diagnose(place, measure=False).findings == (), place


@pytest.mark.slow
def test_every_check_has_a_fault_that_it_alone_names(damaged, monkeypatch):
    """Each check is left out in turn: some planted fault is then not named."""
    # remarks, and a file that these originals do not have
    silent = {"linear_in_vllm", "record_differs"}
    named = [one for one in damaged if one.code in codes(one.files)]
    for left_out in RULES:
        others = [one for one in RULES if one is not left_out]
        monkeypatch.setattr("ropepatch.model.checks.RULES", others)
        missed = any(one.code not in codes(one.files) for one in named)
        assert missed == (left_out.__name__ not in silent), left_out.__name__


def test_the_rope_types_are_those_of_transformers():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert ROPE_INIT_FUNCTIONS.keys() <= KNOWN_TYPES


def test_a_fault_in_both_generations_of_keys_is_one_finding():
    (finding,) = check(case_of(changed("extended with yarn", {"beta_fast": 1.0, "beta_slow": 32.0})))
    assert {edit.path[0] for edit in finding.meant} == {"rope_parameters", "rope_scaling"}


def test_what_was_changed_or_lost_after_ropepatch_wrote_it_is_named_and_taken_from_its_record(
    template, tmp_path
):
    out = ropepatch.extend(ropepatch.plan(template, to=256), tmp_path / "out").folder
    edit_json(out / "config.json", max_position_embeddings=255)
    assert [one.code for one in diagnose(out, measure=False).findings] == ["differs-from-record"]
    parameters = json.loads((out / "config.json").read_text())["rope_parameters"]
    del parameters["rope_theta"]
    edit_json(
        out / "config.json", drop=("rope_theta",), rope_parameters=parameters, max_position_embeddings=256
    )
    copy_of_it = repair(diagnose(out, measure=False), tmp_path / "repaired")
    assert json.loads((copy_of_it / "config.json").read_text())["rope_parameters"]["rope_theta"] == 10000.0


def test_a_configuration_that_transformers_refuses_for_another_reason_is_named(template, tmp_path):
    folder = Path(shutil.copytree(template, tmp_path / "model"))
    edit_json(folder / "config.json", hidden_act=7)
    (finding,) = diagnose(folder, measure=False).findings
    assert (finding.code, finding.severity) == ("transformers-refuses", "error")
    assert "hidden_act" in finding.problem


def test_a_part_for_text_that_the_architecture_does_not_have_is_refused_in_words():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    raw = {"model_type": "llama", "text_config": {"hidden_size": 64, "rope_parameters": rope}}
    (finding,) = [one for one in check(case_of(Files(raw))) if one.severity == "error"]
    assert finding.code == "transformers-refuses"
    assert finding.problem == "config.json has a part for text that llama does not have"


def test_files_beside_the_configuration_that_cannot_be_read_are_named(template, tmp_path):
    folder = Path(shutil.copytree(template, tmp_path / "model"))
    (folder / "generation_config.json").write_text("{")
    (folder / "tokenizer_config.json").write_text("[]")
    findings = diagnose(folder, measure=False).findings
    assert {(one.code, one.file) for one in findings} == {
        ("file-unreadable", "generation_config.json"),
        ("file-unreadable", "tokenizer_config.json"),
    }


@pytest.mark.parametrize("content", ["", "[]", "{", '{"rope_theta": NaN}', "9" * 5000])
def test_a_configuration_that_is_no_json_object_is_a_user_error(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RopepatchError, match=r"config\.json"):
        diagnose(tmp_path, measure=False)


def test_no_json_makes_the_doctor_stumble_and_nothing_repairable_is_left():
    """Of configurations damaged by chance, beside records of others."""
    draw, raws = random.Random(0), []
    for seed in range(250):
        with suppress(ValueError, RecursionError):  # the damage may be to JSON itself
            raws.append(with_rare_key(draw, parse_json(mutant(seed).text)))
    assert len(raws) > 160
    for raw, other in zip(raws, [{}, *raws], strict=False):
        record = {"config_changes": other} if draw.random() < 0.5 else {}
        files = {"config.json": raw, "tokenizer_config.json": raw}
        case = Case("model", Path("model"), files, {}, record)
        for finding in check(case):
            assert str(finding)
            json.dumps(finding.to_dict(), allow_nan=False)
        assert not [finding for finding in check(repaired(case)) if finding.fixable], raw


# --- how it is shown ------------------------------------------------------------------------------------


def test_an_error_exits_1_and_a_warning_0(tmp_path, run_here):
    warning = changed("extended with yarn", tokenizer=SHORT)
    assert run_here("doctor", write_repairable(tmp_path / "error"), "--no-measure").returncode == 1
    assert run_here("doctor", write(tmp_path / "warning", warning), "--no-measure").returncode == 0


def test_a_finding_is_a_block_that_says_what_where_why_and_what_to_do(tmp_path, run_here):
    files = changed("Qwen2.5-7B-Instruct, YaRN as documented", {"beta_fast": 1, "beta_slow": 32})
    lines = run_here("doctor", write(tmp_path / "model", files)).stdout.split("\n\n")[1].splitlines()
    assert lines[0] == "error: betas-swapped"
    assert lines[1] == "  where   config.json rope_scaling.beta_fast = 1"
    assert lines[2] == "  what    beta_fast (1) is not above beta_slow (32)"
    assert [line.split()[0] for line in lines[3:]] == ["why", "effect", "remedy", "--fix"]
    assert lines[4] == "  effect  not measured: no weights here that can be loaded"
    assert lines[6] == "  --fix   leaves it to you"


def test_both_readings_of_a_linear_window_are_a_remark(tmp_path):
    linear = {"type": "linear", "factor": 4.0}
    for n, (stated, remarks) in enumerate([(None, 1), (16_384, 0), (4096, 1)]):
        vicuna = changed("Llama-2-7b", rope_scaling=linear, max_sequence_length=stated)
        findings = diagnose(write(tmp_path / str(n), vicuna), measure=False).findings
        assert [one.code for one in findings] == ["linear-multiplied"] * remarks
        assert all(("max_sequence_length says 4096" in one.problem) == (stated == 4096) for one in findings)


def test_the_json_is_a_list_of_objects(tmp_path, run_here):
    source = write(tmp_path / "model", SOUND["Llama-3.1-8B"])
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace('"factor": 8.0', '"factor": 1e45'))
    result = run_here("doctor", source, "--no-measure", "--json")
    (finding,) = json.loads(result.stdout)
    assert finding["code"] == "not-a-number"
    assert finding["key"] == "rope_scaling.factor"
    assert finding["fixable"] is False
    assert set(finding) == {
        *("code", "severity", "file", "key", "value", "problem", "why", "effect", "remedy", "fixable")
    }


def test_the_command_repairs_and_says_what_is_left(tmp_path, run_here):
    source = write(
        tmp_path / "model", changed("Qwen3-8B, YaRN as documented", {"factor": 0.25}, head_dim=None)
    )
    result = run_here("doctor", source, "--no-measure", "--fix", tmp_path / "out")
    assert result.returncode == 1  # the factor is left
    assert "fixed in" in result.stderr
    assert "head-dim-null" in result.stderr.splitlines()[0]
    assert "left for you to decide: factor-below-one" in result.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["head_dim"] == 128


def test_where_nothing_is_found_the_command_says_what_was_looked_at_and_makes_no_copy(tmp_path, run_here):
    result = run_here("doctor", "tiny", "--no-measure", "--fix", tmp_path / "out")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "tiny: nothing found")
    assert "model.safetensors" in result.stdout
    assert "nothing to fix" in result.stderr
    assert not (tmp_path / "out").exists()


# --- what is repaired -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_what_can_be_repaired_is_and_nothing_repairable_is_left(fault, damaged, tmp_path):
    for number, one in enumerate(one for one in damaged if one.fault == fault):
        source, out = write(tmp_path / f"{number}/model", one.files), tmp_path / f"{number}/out"
        before, diagnosis = contents(source), diagnose(source, measure=False)
        fixed = {finding.code for finding in diagnosis.findings if finding.fixable}
        if not fixed:
            with pytest.raises(RopepatchError, match="can be fixed without"):
                repair(diagnosis, out)
            assert not out.exists()
            continue
        after = diagnose(repair(diagnosis, out), measure=False)
        assert contents(source) == before
        assert [path.name for path in out.parent.iterdir() if path != source] == ["out"]
        assert not [finding for finding in after.findings if finding.fixable]
        assert not fixed & {finding.code for finding in after.findings} or one.code == "theta-lost"
        if one.code in fixed & {*RESTORED} and fault != "head_dim_left_open":
            raw = json.loads((out / "config.json").read_text())
            assert codes(Files(raw)) == []
            assert same_rope(raw, ORIGINALS[one.original].config) or not is_known(raw["model_type"])


def test_which_faults_can_be_repaired_without_a_guess(damaged):
    fixable = {
        one.code
        for one in damaged
        if any(f.code == one.code and f.fixable for f in check(case_of(one.files)))
    }
    assert fixable == {
        *("theta-lost", "only-new-keys", "factor-is-integer", "window-not-integer", "head-dim-null"),
        *("type-unknown", "key-missing", "not-a-number", "attention-factor-zero", "attention-factor-unread"),
        *("tokenizer-behind", "generation-behind"),
    }


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("extended with yarn", {"factor": "8.0"}, {"factor": 8}),
        ("vicuna-7b-v1.5-16k", {"factor": 4}, {"factor": 4.0}),
        ("Qwen2.5-7B-Instruct, YaRN as documented", {"original_max_position_embeddings": 32768.0}, {}),
    ],
)
def test_repairing_puts_back_what_was_there(name, damage, expected, tmp_path):
    out = repair(diagnose(write(tmp_path / "model", changed(name, damage)), measure=False), tmp_path / "out")
    after, original = json.loads((out / "config.json").read_text()), SOUND[name].config
    for key in {"rope_parameters", "rope_scaling"} & original.keys():
        assert after[key] == pytest.approx(original[key] | expected)
        types = {name: type(value) for name, value in (original[key] | expected).items()}
        assert {name: type(value) for name, value in after[key].items()} == types


@pytest.mark.parametrize(
    ("name", "damage", "code", "severity"),
    [
        (YARN, {"beta_fast": 1.0, "beta_slow": 32.0}, "betas-swapped", "error"),
        # 1 / (0.1 ln 8 + 1), the inverse of the paper's
        (YARN, {"attention_factor": 1 / 1.2079441541679836}, "attention-factor-inverted", "error"),
        (YARN, {"attention_factor": 0.9}, "attention-factor-inverted", "warning"),
        ("Llama-3.1-8B", {"low_freq_factor": 4.0, "high_freq_factor": 1.0}, "bands-swapped", "error"),
    ],
)
def test_what_a_model_can_have_been_trained_with_is_repaired_only_to_what_was_recorded(
    name, damage, code, severity, tmp_path
):
    original = SOUND[name].config
    source = write(tmp_path / "model", changed(name, damage))
    (finding,) = diagnose(source, measure=False).findings
    assert (finding.code, finding.severity, finding.fixable) == (code, severity, False)
    record = {key: original[key] for key in {"rope_parameters", "rope_scaling"} & original.keys()}
    (source / "ropepatch.json").write_text(json.dumps({"config_changes": record}))
    out = repair(diagnose(source, measure=False), tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == original
    assert diagnose(out, measure=False).findings == ()


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-4-Scout"])  # Scout's rope is in its text_config
def test_a_record_repairs_what_is_gone_with_its_values_and_nothing_that_it_leaves_broken(name):
    sound, damage = SOUND[name], {"low_freq_factor": 4.0, "high_freq_factor": 1.0}
    rope = sound.config.get("text_config", sound.config)["rope_scaling"]
    case = case_of(changed(name, damage))
    for recorded, settles in ((rope, True), (rope | damage, False), (rope | {"factor": "8"}, False)):
        record = {"config_changes": {"rope_scaling": recorded}}
        (finding,) = [one for one in check(replace(case, record=record)) if one.code == "bands-swapped"]
        assert finding.fixable == settles
        if settles:
            assert repaired(replace(case, record=record)).raw == sound.config


def test_a_contradiction_is_repaired_by_the_record_and_a_consistent_change_stays(template, tmp_path):
    out = ropepatch.extend(ropepatch.plan(template, to=256), tmp_path / "out").folder
    written = json.loads((out / "config.json").read_text())
    edit_json(out / "config.json", rope_theta=20000.0)
    diagnosis = diagnose(out, measure=False)
    assert {one.code: one.fixable for one in diagnosis.findings} == {
        "keys-contradict": True,
        "differs-from-record": False,
    }
    assert json.loads((repair(diagnosis, tmp_path / "fixed") / "config.json").read_text()) == written
    rope = written["rope_parameters"] | {"rope_theta": 20000.0}
    edit_json(out / "config.json", rope_parameters=rope)
    with pytest.raises(RopepatchError, match="can be fixed without"):
        repair(diagnose(out, measure=False), tmp_path / "second")
    (out / "ropepatch.json").unlink()
    edit_json(out / "config.json", rope_theta=10000.0)
    assert [one.fixable for one in diagnose(out, measure=False).findings] == [False]


def test_ropes_by_layer_type_of_a_model_without_rope_are_no_traceback():
    rope = {"rope_type": "default", "rope_theta": 1e6}
    raw = {"model_type": "clip", "rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    (finding,) = check(case_of(Files(raw)))
    assert (finding.code, finding.fixable) == ("only-new-keys", False)


def test_a_scaling_of_the_sliding_layers_alone_is_no_older_key_and_not_repaired():
    full, sliding = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "linear", "factor": 2.0}
    ropes = {"full_attention": full, "sliding_attention": sliding | {"rope_theta": 10000.0}}
    files = changed("gemma-3-4b-it, text only", rope_parameters=ropes)
    drop([files.config], "rope_theta", "rope_local_base_freq", "rope_scaling")
    (finding,) = [one for one in check(case_of(files)) if one.severity != "remark"]
    assert (finding.code, finding.fixable) == ("only-new-keys", False)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_cannot_be_read_is_an_error(template, tmp_path, file, monkeypatch):
    """As after chmod 0, which does not bind the user of a container."""
    folder, read = Path(shutil.copytree(template, tmp_path / "model")), Path.read_text
    (folder / file).write_text("{}")

    def read_text(path: Path, **options: str) -> str:
        if path.name == file:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    (finding,) = diagnose(folder, measure=False).findings
    assert (finding.code, finding.severity, finding.file) == ("file-unreadable", "error", file)
    assert finding.problem == f"cannot read {file}: Permission denied"


@pytest.mark.parametrize("factor", [0.8278, 1 / (0.1 * math.log(4) + 1), 0.05, 1.9])
def test_an_attention_factor_that_ropepatch_was_asked_for_is_no_fault(factor, template, tmp_path):
    plan = ropepatch.plan(template, to=256, attention_factor=factor)
    assert diagnose(ropepatch.extend(plan, tmp_path / "out"), measure=False).findings == ()


@pytest.mark.parametrize(
    ("file", "values", "verified"),
    [
        ("tokenizer_config.json", {"model_max_length": 16}, True),
        ("config.json", {"max_position_embeddings": 256.0}, False),
    ],
)
def test_a_repaired_configuration_is_no_longer_called_verified(file, values, verified, template, tmp_path):
    source = ropepatch.extend(ropepatch.plan(template, to=256), tmp_path / "model").folder
    edit_json(source / file, **values)
    record = json.loads((source / "ropepatch.json").read_text())
    out = repair(diagnose(source, measure=False), tmp_path / "out")
    after = json.loads((out / "ropepatch.json").read_text())
    assert "verified" in record
    assert after == {key: value for key, value in record.items() if verified or key != "verified"}


@pytest.mark.parametrize("factor", [3.0, 3.95, 4.0, 4.05, 16.0])
def test_a_factor_larger_than_the_window_needs_is_a_remark_and_a_smaller_one_an_error(factor):
    findings = check(case_of(changed("Yarn-Mistral-7b-128k", {"factor": factor})))
    error, remark = ("factor-contradicts-lengths", "error"), ("factor-exceeds-window", "remark")
    expected = {3.0: [error], 3.95: [error], 4.0: []}.get(factor, [remark])
    assert [(one.code, one.severity) for one in findings] == expected


def test_windows_whose_ratio_is_too_small_for_a_float_are_no_traceback():
    files = changed(YARN, original_max_position_embeddings=1e40, max_position_embeddings=1e-300)
    assert "factor-contradicts-lengths" in codes(files)


def test_an_extended_window_is_the_reach_however_large_the_factor():
    case = case_of(changed("AFM-4.5B", tokenizer={"model_max_length": 65535}))
    (finding,) = [one for one in check(case) if one.code == "tokenizer-behind"]
    assert "reads 65536 tokens" in finding.problem


def test_a_plain_save_of_transformers_5_gets_the_older_keys_back(template, tmp_path):
    plan = ropepatch.plan(template, to=256)
    out = ropepatch.extend(plan, tmp_path / "out").folder
    AutoConfig.from_pretrained(out).save_pretrained(tmp_path / "saved")
    saved = diagnose(tmp_path / "saved", measure=False)
    assert [finding.code for finding in saved.findings] == ["only-new-keys"]
    config = json.loads((repair(saved, tmp_path / "repaired") / "config.json").read_text())
    expected = json.loads((out / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling", "original_max_position_embeddings", "rope_parameters"):
        assert without_type(config[key]) == without_type(expected[key])


def without_type(value):
    return {key: kept for key, kept in value.items() if key != "type"} if isinstance(value, dict) else value


def test_ropes_by_layer_type_get_the_older_keys_only_where_transformers_then_reads_the_same(tmp_path):
    """Gemma 3 says both ropes in the older keys; others would read one rope for all layers."""
    local = {"rope_type": "default", "rope_theta": 10000.0}
    far = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
    ropes = {"full_attention": far, "sliding_attention": local}
    files = changed("gemma-3-4b-it, text only", rope_parameters=ropes)
    drop([files.config], "rope_theta", "rope_local_base_freq", "rope_scaling")
    out = repair(diagnose(write(tmp_path / "model", files), measure=False), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1000000.0, 10000.0)
    assert config["rope_scaling"]["factor"] == 8.0
    assert AutoConfig.from_pretrained(out).rope_parameters["sliding_attention"] == local


def test_repairing_overwrites_nothing_stays_outside_and_follows_no_link_out(tmp_path):
    source = write_repairable(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    messages = {"model": "already exists", "model/out": "lies inside", "out": "leads out of the checkpoint"}
    for out, message in messages.items():
        with pytest.raises(RopepatchError, match=message):
            repair(diagnose(source, measure=False), tmp_path / out)
    assert not (tmp_path / "out").exists()


def test_repairing_carries_over_everything_but_folders_hidden_files_and_pickles(tmp_path):
    source = write_repairable(tmp_path / "model")
    for name in ("README.md", "modeling_x.py", "pytorch_model.bin", ".gitattributes", "tokenizer.json"):
        (source / name).write_text(name)
    (source / "original").mkdir()
    out = repair(diagnose(source, measure=False), tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "modeling_x.py", "tokenizer.json", "config.json"),
        *("tokenizer_config.json", "generation_config.json"),
    }
    assert (out / "README.md").read_text() == "README.md"


def test_code_of_a_map_that_is_not_the_recorded_one_is_an_error(template, tmp_path):
    out = ropepatch.extend(ropepatch.plan(template, to=256, method="self-extend"), tmp_path / "out").folder
    assert [one.code for one in diagnose(out).findings] == ["attention-map"]
    code = next(out.glob("*.py"))
    code.write_text(code.read_text() + "\nimport os\n")
    assert [one.code for one in diagnose(out).findings] == ["map-code-changed", "attention-map"]
    code.unlink()
    assert diagnose(out, measure=False).has_errors

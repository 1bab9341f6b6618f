"""The doctor reports errors of a config, none in sound ones, and repairs only unambiguous ones."""

import copy
import json
import math
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import contents, edit_json
from damaged_configs import PUBLISHED, mutant, with_rare_key
from methods import example
from oldest import needs

import ropepatch
from ropepatch import RopepatchError
from ropepatch.doctor import diagnose, repair
from ropepatch.doctor.diagnosis import by_severity
from ropepatch.files import parse_json
from ropepatch.gallery.explorer.content import PRESETS
from ropepatch.model.checks import check, repaired
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import CODES
from ropepatch.model.checks.rules import KNOWN_TYPES, same_rope
from ropepatch.model.config import is_known
from ropepatch.scaling import METHODS

# As for a user, warnings of transformers are not errors.
pytestmark = pytest.mark.filterwarnings("ignore")

Files = dict[str, dict[str, Any]]  # the contents of JSON files by name
Values = dict[str, Any]

NAMES = {"config.json": "config"}
NAMES |= {f"{part}_config.json": part for part in ("tokenizer", "generation")}
# As published, or changed as the publisher documents.
ORIGINALS: dict[str, Files] = {
    entry["name"]: {name: entry[part] for name, part in NAMES.items() if entry.get(part) is not None}
    for entry in PUBLISHED
}
# Published configs with a known weakness: its finding code.
INHERENT = {entry["name"]: entry["code"] for entry in PUBLISHED if "code" in entry}
# After the repair of these, transformers computes the RoPE of the original again.
RESTORED = {"only-new-keys", "factor-is-integer", "window-not-integer", "head-dim-null"}

LLAMA_2, CODE, LLAMA_3, LLAMA_3_1 = "Llama-2-7b", "CodeLlama-7b", "Meta-Llama-3-8B", "Llama-3.1-8B"
QWEN, QWEN_3 = "Qwen2.5-7B-Instruct, YaRN as documented", "Qwen3-8B, YaRN as documented"
VICUNA, YARN_LLAMA, AFM, SCOUT = "vicuna-7b-v1.5-16k", "Yarn-Llama-2-7b-64k", "AFM-4.5B", "Llama-4-Scout"
YARN, LONGROPE, PHI, OLMO = "extended with yarn", "extended with longrope", "Phi-3-mini-128k", "Olmo-3-7B"
TOKENIZER, GENERATION = "tokenizer_config.json/model_max_length", "generation_config.json/max_length"
ORIGINAL, WINDOW = "original_max_position_embeddings", "max_position_embeddings"
THETA, NEWER, OLDER = "rope_theta", "rope_parameters", "rope_scaling"
NEWER_THETA, EACH_ORIGINAL = f"{NEWER}/{THETA}", f"*/{ORIGINAL}"
FULL = "full_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1000000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
OLDER_LINEAR = LINEAR | {"type": "linear"}
DROPPED = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}
MSCALES = {"*/short_mscale": 1.3, "*/long_mscale": 1.3}
NTK = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
LFM, QWEN_3_5 = "LFM2.5-VL-1.6B", "Qwen3.6-35B-A3B"
NO_FACTOR = {"*/attention_factor": ..., "*/short_mscale": ..., "*/long_mscale": ...}
ONES = [1.0] * 64

# An original, its damage, the expected findings without remarks, and the changes by a repair. Damage and
# repair are values by JSON pointer within config.json; * means every scaled RoPE, and `...` removes a key.
TABLE: list[tuple[str, Values, str, Values]] = [
    # the base
    (LLAMA_3, {THETA: ...}, "theta-lost", {}),
    (LLAMA_3, {THETA: 1e4}, "theta-lost", {}),
    (LLAMA_3, {THETA: 10000.0, "hidden_size": 512}, "", {}),  # no Llama 3 model is so small
    (CODE, {THETA: None}, "theta-lost", {}),
    (YARN, {THETA: None}, "theta-lost", {THETA: 20000.0}),
    (YARN, {THETA: ...}, "theta-lost", {THETA: 20000.0}),
    (YARN, {THETA: ..., NEWER_THETA: 10000.0}, "", {}),  # the default of older readers
    (YARN, {THETA: ..., NEWER_THETA: ...}, "theta-lost", {}),
    (YARN, {NEWER_THETA: ...}, "theta-lost", {NEWER_THETA: 20000.0}),
    (QWEN, {NEWER: DROPPED, "*/rope_type": "yarn"}, "theta-lost", {NEWER_THETA: 1e6}),
    (QWEN, {NEWER: DROPPED | {THETA: 1e6}, THETA: ...}, "theta-lost", {THETA: 1e6}),
    # two places that contradict each other
    (YARN, {THETA: 1e4}, "keys-contradict", {}),
    (YARN, {f"{OLDER}/factor": 4.0}, "keys-contradict", {}),
    (LLAMA_2, {NEWER: PLAIN, THETA: 5000.0}, "keys-contradict", {}),
    (LLAMA_3_1, {ORIGINAL: 32768}, "keys-contradict", {}),
    (LLAMA_3_1, {"*/type": "dynamic"}, "keys-contradict", {}),
    (SCOUT, {"text_config/rope_scaling/type": "longrope"}, "keys-contradict", {}),
    (YARN, {"*/type": "llama3"}, "keys-contradict keys-contradict", {}),
    # keys that only transformers 5 supports
    ("Mistral-7B-v0.3", {THETA: ..., NEWER: PLAIN}, "only-new-keys", {THETA: 1e6, OLDER: None}),
    (VICUNA, {OLDER: ..., NEWER: LINEAR | {THETA: 1e4}}, "only-new-keys", {THETA: 1e4, OLDER: OLDER_LINEAR}),
    (
        QWEN,
        {THETA: ..., OLDER: ..., NEWER: DROPPED | {THETA: 1e6}},
        "only-new-keys",
        {THETA: 1e6, OLDER: DROPPED | {"type": "yarn"}, ORIGINAL: 32768},
    ),
    # a base that transformers 4 takes anyway, and an architecture that it lacks and mlx-lm was not tried with
    (LFM, {}, "", {}),
    (QWEN_3_5, {}, "", {}),
    # all readers of this type support the newer keys: mlx-lm has the type, transformers 4 does not
    (VICUNA, {"model_type": "ministral3", OLDER: ..., NEWER: LINEAR | {THETA: 1e4}}, "", {}),
    # a part of each head
    (
        LLAMA_2,
        {"model_type": "stablelm", NEWER: PLAIN | {"partial_rotary_factor": 0.25}},
        "only-new-keys",
        {"partial_rotary_factor": 0.25, THETA: 1e6, OLDER: None},
    ),
    # lengths
    (LLAMA_3_1, {EACH_ORIGINAL: ...}, "original-missing", {}),
    (YARN, {ORIGINAL: ..., EACH_ORIGINAL: ...}, "original-missing", {}),
    (PHI, {ORIGINAL: ...}, "original-missing", {}),
    (YARN_LLAMA, {ORIGINAL: 4096, EACH_ORIGINAL: ...}, "", {}),  # the top-level value is used
    (YARN_LLAMA, {ORIGINAL: 2048, EACH_ORIGINAL: ...}, "factor-contradicts-lengths", {}),
    (YARN_LLAMA, {"*/factor": 14.4}, "factor-contradicts-lengths", {}),
    (YARN, {"*/factor": 2.0}, "factor-contradicts-lengths", {}),
    (QWEN, {WINDOW: 16384}, "factor-contradicts-lengths", {}),
    (LONGROPE, {"*/factor": 5.0}, "", {}),  # with an attention factor, nothing is computed from the factor
    (LONGROPE, NO_FACTOR | {"*/factor": 16.0}, "factor-contradicts-lengths", {}),
    (QWEN, {WINDOW: 55706, "*/factor": 2.0}, "factor-rounded", {}),
    (YARN, {WINDOW: 24986, "*/factor": 7.0}, "factor-rounded", {}),
    (LLAMA_2, {WINDOW: 4096.0}, "window-not-integer", {WINDOW: 4096}),
    (LLAMA_3_1, {EACH_ORIGINAL: 8192.0}, "window-not-integer", {EACH_ORIGINAL: 8192}),
    (
        YARN,
        {ORIGINAL: 4096.0, EACH_ORIGINAL: 4096.0},
        "window-not-integer window-not-integer",
        {ORIGINAL: 4096, EACH_ORIGINAL: 4096},
    ),
    (LLAMA_2, {TOKENIZER: 2048}, "tokenizer-behind", {TOKENIZER: 4096}),
    (AFM, {TOKENIZER: 65535}, "tokenizer-behind", {TOKENIZER: 65536}),  # regardless of the factor
    (LONGROPE, {WINDOW: 4096}, "", {}),  # the scaling contains the target length
    (LONGROPE, {WINDOW: 4096, TOKENIZER: 4096}, "tokenizer-behind", {TOKENIZER: 32768}),
    (YARN, {GENERATION: 4096}, "generation-behind", {GENERATION: 32768}),
    # types and keys
    (QWEN, {"head_dim": None}, "head-dim-null", {"head_dim": 128}),
    ("Mixtral-8x7B-v0.1", {OLDER: DROPPED | {"type": "yarn"}}, "head-dim-null", {"head_dim": 128}),
    (LLAMA_3_1, {"*/rope_type": "yarm"}, "type-unknown", {}),
    (SCOUT, {"text_config/rope_scaling/rope_type": ["x"]}, "type-unknown", {}),
    (YARN, {"*/rope_type": "ntk", "*/type": ...}, "type-unknown", {}),
    (LONGROPE, {"*/rope_type": ..., "*/type": "su"}, "type-unknown", {"*/type": "longrope"}),
    (PHI, {"*/type": "su"}, "type-unknown", {"*/type": "longrope"}),
    (LLAMA_3_1, {"*/rope_type": ...}, "type-missing", {}),
    (LONGROPE, {"*/rope_type": ..., "*/type": ...}, "type-missing", {}),
    (LLAMA_3_1, {"*/rope_type": "default"}, "scaling-ignored", {}),
    (LLAMA_3_1, {"*/high_freq_factor": ...}, "key-missing", {}),
    (YARN, {"*/factor": ...}, "key-missing", {"*/factor": 8.0}),
    (VICUNA, {"*/factor": ...}, "key-missing", {}),
    (LONGROPE, {"*/long_factor": ...}, "key-missing", {}),
    (YARN, {"*/beta_fast": ..., "*/beta_fest": 32.0}, "key-misspelled", {}),
    (OLMO, {"*/attention_factor": ..., "*/attention_facter": 1.2}, "key-misspelled", {}),
    # values
    (YARN, {"*/factor": "8.0"}, "not-a-number", {"*/factor": 8}),
    (LLAMA_3, {THETA: "500000.0"}, "not-a-number", {THETA: 500000}),
    (SCOUT, {"text_config/rope_scaling/low_freq_factor": True}, "not-a-number", {}),
    *[(VICUNA, {"*/factor": value}, "not-a-number", {}) for value in ([4.0], {"a": 1}, "16x", math.inf)],
    *[(VICUNA, {"*/factor": value}, "not-a-number", {}) for value in (math.nan, 10**400)],
    (CODE, {THETA: 1}, "impossible-value", {}),
    (LLAMA_3_1, {"*/factor": -4.0}, "impossible-value", {}),
    (YARN, {"*/truncate": "yes"}, "impossible-value", {}),
    (YARN, {"*/mscale": -4.8, "*/mscale_all_dim": 0.0}, "", {}),  # 0.1 k ln 8 + 1 is 0 at k = -4.809
    (YARN, {"*/mscale": -4.82, "*/mscale_all_dim": 0.0}, "impossible-value", {}),
    (LONGROPE, {"*/short_factor": [0.0] * 64}, "impossible-value switches-against-cache", {}),
    (PHI, {"*/long_factor": [8.0]}, "list-length", {}),
    # scalings
    (LLAMA_3_1, {"*/factor": 0.125}, "factor-below-one", {}),
    (VICUNA, {"*/factor": 4}, "factor-is-integer", {"*/factor": 4.0}),
    (YARN, {"*/beta_fast": 1, "*/beta_slow": 32}, "betas-swapped", {}),
    (LLAMA_3_1, {"*/low_freq_factor": 4.0, "*/high_freq_factor": 1.0}, "bands-swapped", {}),
    (SCOUT, {"*/high_freq_factor": 0.9}, "bands-swapped", {}),  # its bands meet
    (YARN, {"*/attention_factor": 0}, "attention-factor-zero", {"*/attention_factor": ...}),
    (QWEN, {"*/attention_factor": 0.5}, "attention-factor-inverted", {}),
    (LONGROPE, {"*/attention_factor": 0.5, "*/short_mscale": 1.0}, "attention-factor-inverted", {}),
    (LONGROPE, NO_FACTOR | {"*/attention_factor": 1.3}, "attention-factor-unread", MSCALES),
    (AFM, {"*/mscale": 1}, "", {}),  # equals the default of every reader
    (AFM, {"*/mscale": 0.707}, "mscale-alone", {}),
    (AFM, {"*/mscale": None, "*/mscale_all_dim": 1.0}, "mscale-alone", {}),
    (YARN, {"*/truncate": False}, "truncate-ignored", {}),
    (LONGROPE, {"*/short_factor": ONES}, "switches-against-cache", {}),
    (LLAMA_2, NTK, "switches-against-cache", {}),
    ("internlm2-7b", {"*/alpha": 1000.0}, "", {}),  # HunYuan's dynamic: one base for all lengths
]


def scaled_ropes(config: dict[str, Any]) -> list[dict[str, Any]]:
    text = config.get("text_config", config)
    ropes = [text.get(key) for key in ("rope_parameters", "rope_scaling")]
    plain = (None, "default", "mrope")
    return [rope for rope in ropes if rope and rope.get("rope_type", rope.get("type")) not in plain]


def changed(files: Files, values: Values) -> Files:
    """A copy of the files with the values of JSON pointers changed, as in the table."""
    files = copy.deepcopy(files)
    ropes = scaled_ropes(files["config.json"])
    for pointer, value in values.items():
        file, *path = pointer.split("/")
        if not file.endswith(".json"):
            file, path = "config.json", [file, *path]
        *path, key = path
        holder: Any = files[file]
        for step in path if path != ["*"] else ():
            holder = holder[step]
        for one in ropes if path == ["*"] else [holder]:
            if value is ...:
                one.pop(key, None)
            else:
                one[key] = copy.deepcopy(value)
    return files


def case_of(files: Files) -> Case:
    return Case("model", Path("model"), files, {})


def codes(files: Files) -> list[str]:
    """The finding codes without remarks."""
    findings = by_severity(check(case_of(files)))
    return [finding.code for finding in findings if finding.severity != "remark"]


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


# --- findings and repairs -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "damage", "found", "fix"), TABLE)
def test_doctor_reports_each_damage_and_repairs_only_unambiguous_ones(name, damage, found, fix):
    original = ORIGINALS[name]
    files = changed(original, damage)
    needs(files["config.json"].get("model_type"))
    assert codes(files) == found.split()
    after = repaired(case_of(files)).files
    assert json.dumps(after, sort_keys=True) == json.dumps(changed(files, fix), sort_keys=True)
    assert not [finding for finding in check(case_of(after)) if finding.fixable]
    if {*found.split()} <= RESTORED and fix and not {"model_type", "rope_scaling"} & damage.keys():
        config = original["config.json"]
        assert same_rope(after["config.json"], config) or not is_known(config["model_type"])


@pytest.mark.parametrize(
    ("stated", "code"),
    [
        ({"rope_theta": 1e4}, "theta-not-as-published"),
        ({"rope_theta": 1e4, "vocab_size": 151_936}, "theta-not-as-published"),  # of the smaller models
        ({"rope_theta": 1e4, "max_position_embeddings": 4096}, None),  # Qwen2.5-Math
        ({"rope_theta": 1e4, "vocab_size": 32_000}, None),
        ({"rope_theta": 1e7}, None),  # the base of Qwen2.5-1M
        ({"max_position_embeddings": 131_072}, "window-with-room"),
    ],
)
def test_a_base_or_length_unlike_published_models_of_the_type_is_a_remark(stated, code, tmp_path):
    raw = (
        next(one["config"] for one in json.loads(PRESETS.read_text()) if one["name"] == "qwen2.5-7b") | stated
    )
    found = {one.code for one in check(case_of({"config.json": raw})) if one.severity == "remark"}
    assert {code} - {None} == found & {"theta-not-as-published", "window-with-room"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    made = [line for line in ropepatch.plan(tmp_path, to="4x").warnings if "of the same type and voc" in line]
    assert bool(made) == (code == "theta-not-as-published")


def test_the_table_covers_every_finding_code_of_a_config():
    elsewhere = {  # tested below and in the tests of weights
        *("transformers-refuses", "file-unreadable", "differs-from-record", "remapping-code-changed"),
        *("tokenizer-missing", "scaled-twice"),
        *(
            code
            for code in CODES
            if code.startswith(("adapter-", "weights-", "index-", "shard-", "reading-", "rope-"))
        ),
        *(code for code, (severity, _) in CODES.items() if severity == "remark"),
    }
    assert {code for _, _, found, _ in TABLE for code in found.split()} == CODES.keys() - elsewhere


@pytest.mark.parametrize("name", ORIGINALS)
def test_published_configs_have_only_their_known_weaknesses(name):
    needs(ORIGINALS[name]["config.json"]["model_type"])
    findings = check(case_of(ORIGINALS[name]))
    assert all(finding.severity != "error" for finding in findings)
    if name in INHERENT:
        assert {finding.code for finding in findings} - {"not-in-transformers"} == {INHERENT[name]}
    else:
        assert codes(ORIGINALS[name]) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in METHODS), *(("yarn", {"attention_factor": one}) for one in (0.8278, 0.05))],
)
def test_extended_checkpoints_have_no_findings_except_for_length_dependent_methods(
    name, options, template, tmp_path
):
    plan = ropepatch.plan(template, to=256, method=name, **example(name, 8).parameters() | options)
    findings = diagnose(ropepatch.extend(plan, tmp_path / "out", reading=False), measure=False)
    expected = {"switches-against-cache"} if name in ("dynamic", "longrope-switch") else set()
    assert {one.code for one in findings.findings if one.severity != "remark"} == expected


@pytest.mark.parametrize(
    ("methods", "found"),
    [
        (("yarn", "yarn"), ["scaled-twice"]),
        (("linear", "yarn"), ["scaled-twice"]),
        (("linear", "linear"), []),  # two factors of 2 equal one factor of 4
        (("none", "yarn"), []),
    ],
)
def test_a_repeated_extension_is_a_warning_unless_equivalent(methods, found, template, tmp_path):
    folder = template
    for name, target in zip(methods, (128, 256), strict=True):
        plan = ropepatch.plan(folder, to=target, method=name)
        folder = ropepatch.extend(plan, tmp_path / f"{target}", reading=False).folder
    findings = diagnose(folder, measure=False).findings
    assert [one.code for one in findings if one.code == "scaled-twice"] == found
    if found:
        assert findings[0].severity == "warning"
        assert f"extend {template.name} to 256 tokens" in findings[0].remedy


@pytest.mark.parametrize(
    ("name", "end", "template_text", "found"),
    [
        ("tiny-llama", "</s>", None, False),  # a base model
        ("My-8B-Instruct", "</s>", None, True),
        ("llama-chat-hf", "</s>", None, True),
        ("chatter-8b", "</s>", None, False),
        ("tiny-llama", "<|im_end|>", None, True),
        ("My-8B-Instruct", "<|im_end|>", "{{ messages }}", False),
    ],
)
def test_a_chat_model_without_a_chat_template_is_a_remark(
    name, end, template_text, found, template, tmp_path
):
    folder = tmp_path / name
    shutil.copytree(template, folder)
    edit_json(folder / "tokenizer_config.json", eos_token=end)
    if template_text:
        (folder / "chat_template.jinja").write_text(template_text)
    findings = diagnose(folder, measure=False).findings
    assert [(one.code, one.severity) for one in findings] == [("chat-template-missing", "remark")] * found


def test_bundled_and_real_checkpoints_have_no_findings(shared, template):
    real = (config.parent for config in (shared / "checkpoints").glob("*/config.json"))
    for place in ("tiny", template, *real):
        assert diagnose(place, measure=False).findings == (), place


def test_changed_or_missing_remapping_code_is_an_error(template, tmp_path):
    out = ropepatch.extend(ropepatch.plan(template, to=256, method="self-extend"), tmp_path / "out").folder
    assert [one.code for one in diagnose(out).findings] == ["position-remapping"]
    code = next(out.glob("*.py"))
    code.write_text(code.read_text() + "\nimport os\n")
    assert [one.code for one in diagnose(out).findings] == ["remapping-code-changed", "position-remapping"]
    code.unlink()
    assert diagnose(out, measure=False).has_errors


LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
FAR = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
LAGUNA: dict[str, Any] = {
    "model_type": "laguna",
    "layer_types": ["sliding_attention", FULL],
    "num_hidden_layers": 2,
    WINDOW: 32768,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "mlp_layer_types": ["dense", "sparse"],
    "num_key_value_heads": 2,
}
GEMMA_3 = ORIGINALS["gemma-3-4b-it, text only"]["config.json"]
GEMMA_3 = {key: value for key, value in GEMMA_3.items() if not key.startswith("rope_")}


@pytest.mark.parametrize(
    ("config", "ropes", "older"),
    [
        # Gemma 3 has both RoPEs in the older keys
        (
            GEMMA_3,
            {FULL: FAR, "sliding_attention": LOCAL},
            {
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0, "type": "linear"},
            },
        ),
        # no older key can contain a scaling of the sliding layers
        (GEMMA_3, {FULL: PLAIN, "sliding_attention": LOCAL | {"rope_type": "linear", "factor": 2.0}}, {}),
        # one `rope_scaling` would replace the RoPE of every layer type
        (LAGUNA | {"model_type": "gpt_oss"}, {FULL: FAR, "sliding_attention": LOCAL}, {}),
        ({"model_type": "clip"}, {FULL: PLAIN, "sliding_attention": PLAIN}, {}),  # a model without RoPE
    ],
)
def test_older_keys_are_added_for_rope_by_layer_type_if_transformers_computes_the_same(config, ropes, older):
    config = config | {"rope_parameters": ropes}
    assert codes({"config.json": config}) == ["only-new-keys"]
    after = repaired(case_of({"config.json": config})).raw
    assert after == config | older
    assert not older or same_rope(config, after)


@pytest.mark.parametrize("factor", [3.0, 3.95, 4.0, 4.05, 16.0])
def test_a_factor_above_the_length_ratio_is_a_remark_and_one_below_an_error(factor):
    findings = check(case_of(changed(ORIGINALS["Yarn-Mistral-7b-128k"], {"*/factor": factor})))
    error, remark = ("factor-contradicts-lengths", "error"), ("factor-exceeds-window", "remark")
    expected = {3.0: [error], 3.95: [error], 4.0: []}.get(factor, [remark])
    assert [(one.code, one.severity) for one in findings] == expected


def test_an_ambiguous_length_of_a_linear_config_is_a_remark():
    for stated, remarks in [(None, 1), (16_384, 0), (4096, 1)]:
        vicuna = {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": stated}
        findings = check(case_of(changed(ORIGINALS[LLAMA_2], vicuna)))
        assert [one.code for one in findings] == ["linear-multiplied"] * remarks
        assert all(("max_sequence_length is 4096" in one.problem) == (stated == 4096) for one in findings)


def test_lengths_of_a_million_are_printed_in_full():
    damage = {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 32768}}
    window, tokenizer = check(case_of(changed(ORIGINALS["Qwen3-8B"], damage)))
    assert window.remedy.startswith("write 1048576,")
    assert tokenizer.remedy == "write 1048576"


def test_every_rope_type_of_transformers_is_known():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert ROPE_INIT_FUNCTIONS.keys() <= KNOWN_TYPES


def test_doctor_handles_randomly_damaged_configs_and_repairs_everything_fixable():
    """Randomly damaged configs, some together with records of other models."""
    draw, raws = random.Random(0), []
    for seed in range(120):
        with suppress(ValueError, RecursionError):  # the damage may break the JSON itself
            raws.append(with_rare_key(draw, parse_json(mutant(seed).text)))
    assert len(raws) > 75
    for raw, other in zip(raws, [{}, *raws], strict=False):
        record = {"config_changes": other} if draw.random() < 0.5 else {}
        files = {"config.json": raw, "tokenizer_config.json": raw}
        case = Case("model", Path("model"), files, {}, record)
        for finding in check(case):
            assert str(finding)
            json.dumps(finding.to_dict(), allow_nan=False)
        assert not [finding for finding in check(repaired(case)) if finding.fixable], raw


# --- rejected files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"hidden_act": 7}, "hidden_act"),
        ({"text_config": {"hidden_size": 64, "rope_parameters": FAR}}, "config.json has a part for text"),
    ],
)
def test_a_config_rejected_by_transformers_is_reported_with_the_reason(raw, problem):
    files = {"config.json": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4} | raw}
    (finding,) = [one for one in check(case_of(files)) if one.severity == "error"]
    assert finding.code == "transformers-refuses"
    assert problem in finding.problem


@pytest.mark.parametrize(
    ("file", "content"),
    [("generation_config.json", "{"), ("tokenizer_config.json", "[]"), ("tokenizer.json", None)],
)
def test_an_unreadable_or_invalid_json_file_is_an_error(file, content, template, tmp_path, monkeypatch):
    folder, read = Path(shutil.copytree(template, tmp_path / "model")), Path.read_text
    (folder / file).write_text(content or "{}")

    def read_text(path: Path, **options: str) -> str:
        if path.name == file and content is None:  # as after chmod 0, which does not restrict root
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    (finding,) = diagnose(folder, measure=False).findings
    assert (finding.code, finding.severity, finding.file) == ("file-unreadable", "error", file)


# --- the record of ropepatch ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage", "code", "severity"),
    [
        (YARN, {"*/beta_fast": 1.0, "*/beta_slow": 32.0}, "betas-swapped", "error"),
        # 1 / (0.1 ln 8 + 1), the inverse of the factor in the paper
        (YARN, {"*/attention_factor": 1 / 1.2079441541679836}, "attention-factor-inverted", "error"),
        (YARN, {"*/attention_factor": 0.9}, "attention-factor-inverted", "warning"),
        (LLAMA_3_1, {"*/low_freq_factor": 4.0, "*/high_freq_factor": 1.0}, "bands-swapped", "error"),
        (SCOUT, {"*/low_freq_factor": 4.0, "*/high_freq_factor": 1.0}, "bands-swapped", "error"),
    ],
)
def test_values_possibly_used_in_training_are_repaired_only_from_a_sound_record(name, damage, code, severity):
    """A record that is itself broken repairs nothing."""
    original, case = ORIGINALS[name], case_of(changed(ORIGINALS[name], damage))
    (finding,) = check(case)
    assert (finding.code, finding.severity, finding.fixable) == (code, severity, False)
    text = original["config.json"].get("text_config", original["config.json"])
    record = {key: text[key] for key in {"rope_parameters", "rope_scaling"} & text.keys()}
    assert repaired(replace(case, record={"config_changes": record})).files == original
    for broken in (damage, {"*/factor": "8"}):
        bad = changed(original, broken)["config.json"]
        bad = bad.get("text_config", bad)
        recorded = {"config_changes": {key: bad[key] for key in record}}
        assert not any(one.fixable for one in check(replace(case, record=recorded)) if one.code == code)


def test_repair_takes_lost_or_contradictory_values_from_the_record_and_keeps_consistent_changes(
    template, tmp_path
):
    out = ropepatch.extend(ropepatch.plan(template, to=256), tmp_path / "out", reading=False).folder
    written = json.loads((out / "config.json").read_text())

    def found() -> dict[str, bool]:
        return {one.code: one.fixable for one in diagnose(out, measure=False).findings}

    rope = {key: value for key, value in written["rope_parameters"].items() if key != "rope_theta"}
    both = {"rope_theta": 2e4, "rope_parameters": rope | {"rope_theta": 2e4}}
    for drop, changes, codes in (
        ((), {"rope_theta": 20000.0}, {"keys-contradict": True, "differs-from-record": False}),
        (("rope_theta",), {"rope_parameters": rope}, {"theta-lost": True, "differs-from-record": False}),
        ((), {"max_position_embeddings": 64}, {"window-left-behind": True, "differs-from-record": False}),
        ((), {"max_position_embeddings": 255}, {"differs-from-record": False}),
        ((), both, {"differs-from-record": False}),
    ):
        edit_json(out / "config.json", **written)
        edit_json(out / "config.json", drop=drop, **changes)
        assert found() == codes
        if any(codes.values()):
            after = repair(diagnose(out, measure=False), tmp_path / "-".join(["fixed", *changes]))
            assert json.loads((after / "config.json").read_text()) == written
    (out / "ropepatch.json").unlink()
    edit_json(out / "config.json", rope_theta=10000.0)
    assert found() == {"keys-contradict": False}


@pytest.mark.parametrize(
    ("file", "values", "verified"),
    [
        ("tokenizer_config.json", {"model_max_length": 16}, True),
        ("config.json", {"max_position_embeddings": 256.0}, False),
    ],
)
def test_only_a_repair_of_config_json_removes_the_verification(file, values, verified, template, tmp_path):
    source = ropepatch.extend(ropepatch.plan(template, to=256), tmp_path / "model").folder
    edit_json(source / file, **values)
    record = json.loads((source / "ropepatch.json").read_text())
    out = repair(diagnose(source, measure=False), tmp_path / "out")
    after = json.loads((out / "ropepatch.json").read_text())
    assert "verified" in record
    assert after == {key: value for key, value in record.items() if verified or key != "verified"}
    assert (out / "reading.json").exists() == verified


# --- repaired copies and the output of the command ------------------------------------------------------


@pytest.fixture
def repairable(tmp_path) -> Path:
    """A checkpoint folder whose context length is not an integer, with other files."""
    source = write(tmp_path / "model", changed(ORIGINALS[YARN], {WINDOW: 32768.0}))
    for name in ("README.md", "modeling_x.py", "pytorch_model.bin", ".gitattributes", "tokenizer.json"):
        (source / name).write_text('{"a": 1}')
    (source / "original").mkdir()
    return source


def test_a_repair_copies_everything_except_folders_hidden_files_and_pickles(repairable, tmp_path):
    before = contents(repairable)
    out = repair(diagnose(repairable, measure=False), tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "modeling_x.py", "tokenizer.json", *NAMES),
    }
    assert (out / "README.md").read_text() == '{"a": 1}'
    assert contents(repairable) == before
    assert [path.name for path in tmp_path.iterdir() if path != repairable] == ["out"]
    assert not any(one.fixable for one in diagnose(out, measure=False).findings)


def test_a_repair_rejects_existing_or_inner_folders_and_outward_links(repairable, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (repairable / "notes.txt").symlink_to(tmp_path / "secret")
    for out, message in {"model": "already exists", "model/out": "lies inside", "out": "leads out"}.items():
        with pytest.raises(RopepatchError, match=message):
            repair(diagnose(repairable, measure=False), tmp_path / out)
    assert not (tmp_path / "out").exists()


def test_the_doctor_command_exits_with_1_for_errors_and_0_for_warnings(tmp_path, run_here):
    behind = write(tmp_path / "warning", changed(ORIGINALS[YARN], {TOKENIZER: 4096}))
    assert run_here("doctor", behind, "--no-measure").returncode == 0
    swapped = write(tmp_path / "error", changed(ORIGINALS[QWEN], {"*/beta_fast": 1, "*/beta_slow": 32}))
    result = run_here("doctor", swapped)
    assert result.returncode == 1
    lines = result.stdout.split("\n\n")[1].splitlines()
    assert lines[:2] == ["error: betas-swapped", "  where   config.json rope_scaling.beta_fast = 1"]
    assert [line.split()[0] for line in lines[2:]] == ["what", "why", "remedy", "--fix"]


def test_the_json_output_of_doctor_is_a_list_of_findings(tmp_path, run_here):
    source = write(tmp_path / "model", ORIGINALS[LLAMA_3_1])
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace('"factor": 8.0', '"factor": 1e45'))
    (finding,) = json.loads(run_here("doctor", source, "--no-measure", "--json").stdout)
    assert finding.pop("key") == "rope_scaling.factor"
    assert finding.pop("fixable") is False
    assert finding.keys() == {"code", "severity", "file", "value", "problem", "why", "remedy"}


def test_doctor_fix_repairs_and_prints_the_remaining_findings(tmp_path, run_here):
    source = write(tmp_path / "model", changed(ORIGINALS[QWEN_3], {"*/factor": 0.25, "head_dim": None}))
    result = run_here("doctor", source, "--no-measure", "--fix", tmp_path / "out")
    assert result.returncode == 1  # the factor remains
    assert "head-dim-null" in result.stderr.splitlines()[0]
    assert "left for you to decide: factor-below-one" in result.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["head_dim"] == 128


def test_doctor_without_findings_prints_the_checked_files_and_makes_no_copy(tmp_path, run_here):
    result = run_here("doctor", "tiny", "--no-measure", "--fix", tmp_path / "out")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "tiny: no problems found")
    assert "model.safetensors" in result.stdout
    assert not (tmp_path / "out").exists()

"""Every rule fires on one configuration and not on a near one; real configurations give their own codes."""

import copy
import json

import pytest
from damage import PUBLISHED, damages
from oldest import needs

import ropepatch
from ropepatch.doctor.rules import RULES, Facts, check, has_same_rope, repaired
from ropepatch.files import read_json
from ropepatch.gallery.explorer.content import PRESETS
from ropepatch.model.config import Config

# As for a user, warnings of transformers are not errors.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS = {
    entry["name"]: Facts(Config(entry["config"]), entry.get("tokenizer") or {})
    for entry in PUBLISHED
}
CODE, LLAMA_2, LLAMA_3, LLAMA_3_1 = (
    "CodeLlama-7b",
    "Llama-2-7b",
    "Meta-Llama-3-8B",
    "Llama-3.1-8B",
)
QWEN_2, QWEN_3, MISTRAL = (
    "Qwen2.5-7B-Instruct",
    "Qwen3-8B, YaRN as documented",
    "Mistral-7B-v0.3",
)
YARN, LONGROPE, YARN_LLAMA = (
    "extended with yarn",
    "extended with longrope",
    "Yarn-Llama-2-7b-64k",
)
VICUNA, AFM, PHI = "vicuna-7b-v1.5-16k", "AFM-4.5B", "Phi-3-mini-128k"
LFM = "LFM2.5-VL-1.6B"
DUAL, LIMIT = "dual_chunk_attention_config", "model_max_length"
ORIGINAL, WINDOW, THETA = (
    "original_max_position_embeddings",
    "max_position_embeddings",
    "rope_theta",
)
NEWER, OLDER, ARCHITECTURES = "rope_parameters", "rope_scaling", "architectures"
PLAIN = {"rope_type": "default", THETA: 1000000.0}
TEN_THOUSAND = PLAIN | {THETA: 10000.0}
FOURFOLD = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}
LINEAR = {"rope_type": "linear", "factor": 2.0}
TWICE = {NEWER: FOURFOLD | {THETA: 1e6}, OLDER: FOURFOLD}
SHAPE = {"hidden_size": 4096, "num_hidden_layers": 36, LIMIT: ...}  # of Qwen3-8B
ONES = [1.0] * 64
NO_FACTOR = {"*/attention_factor": ..., "*/short_mscale": ..., "*/long_mscale": ...}

# A code and its severity, a configuration, what fires the rule, a near change that does not, and the repair.
# Changes are by JSON pointer within config.json (model_max_length: of the tokenizer); * means every scaling,
# and `...` removes a key.
TABLE = [
    ("theta-lost error", CODE, {THETA: None}),
    ("theta-lost error", LLAMA_3_1, {THETA: ...}),
    ("theta-lost error", YARN, {THETA: None}, {}, {THETA: 20000.0}),
    (
        "theta-lost warning",
        YARN,
        {f"{NEWER}/{THETA}": ...},
        {},
        {f"{NEWER}/{THETA}": 20000.0},
    ),
    ("theta-lost warning", MISTRAL, {THETA: ...}, {THETA: ..., "model_type": "phi"}),
    # as NeMo RL writes it
    (
        "theta-lost warning",
        QWEN_3,
        {THETA: ..., f"{OLDER}/{THETA}": 1000000},
        {f"{OLDER}/{THETA}": 1000000},
        {THETA: 1000000.0},
    ),
    ("theta-lost error", QWEN_2, TWICE | {THETA: ...}, TWICE, {THETA: 1000000.0}),
    (
        "keys-contradict error",
        YARN,
        {THETA: 1e4},
        {THETA: 1e4, f"{NEWER}/{THETA}": 1e4},
    ),
    ("keys-contradict error", YARN, {f"{OLDER}/beta_fast": 16.0}),
    ("keys-contradict error", LLAMA_3_1, {ORIGINAL: 32768}, {ORIGINAL: 8192}),
    ("keys-contradict error", LLAMA_3_1, {"*/type": "dynamic"}, {"*/type": "llama3"}),
    # the default of older programs
    (
        "only-new-keys warning",
        MISTRAL,
        {THETA: ..., NEWER: PLAIN},
        {THETA: ..., NEWER: TEN_THOUSAND},
        {THETA: 1e6, OLDER: None},
    ),
    # mlx-lm reads the newer keys of this type, and transformers 4 does not have it
    (
        "only-new-keys warning",
        VICUNA,
        {OLDER: ..., NEWER: LINEAR | {THETA: 1e4}},
        {OLDER: ..., NEWER: LINEAR | {THETA: 1e4}, "model_type": "ministral3"},
        {THETA: 1e4, OLDER: LINEAR | {"type": "linear"}},
    ),
    (
        "only-new-keys warning",
        LLAMA_2,
        {
            "model_type": "stablelm",
            NEWER: TEN_THOUSAND | {"partial_rotary_factor": 0.25},
        },
        {"model_type": "stablelm", NEWER: TEN_THOUSAND, "partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 0.25, THETA: 10000.0, OLDER: None},
    ),
    # transformers 4 takes the published base of this type anyway
    (
        "only-new-keys warning",
        LFM,
        {f"text_config/{NEWER}/{THETA}": 5e5},
        {},
        {f"text_config/{THETA}": 5e5, f"text_config/{OLDER}": None},
    ),
    ("type-unknown error", LLAMA_3_1, {"*/rope_type": "yarm"}),
    (
        "type-unknown error",
        YARN_LLAMA,
        {"*/type": "deepseek_yarn"},
        {},
        {"*/type": "yarn"},
    ),
    ("type-unknown error", PHI, {"*/type": "su"}, {}, {"*/type": "longrope"}),
    ("scaling-ignored error", LLAMA_3_1, {"*/rope_type": ...}),
    ("scaling-ignored error", LLAMA_3_1, {"*/rope_type": "default"}),
    (
        "key-unread warning",
        QWEN_3,
        {"*/attn_factor": 0.8782488562869419},
        {"*/attn_factor": 1.0},
    ),
    ("key-unread warning", AFM, {"*/mscale": 0.707}, {"*/mscale": 1}),
    (
        "key-unread warning",
        AFM,
        {"*/mscale": None, "*/mscale_all_dim": 1.0},
        {"*/mscale_all_dim": 1.0},
    ),
    ("attention-factor-inverted warning", QWEN_3, {"*/attention_factor": 0.8782}),
    (
        "attention-factor-inverted warning",
        YARN,
        {"*/attention_factor": 0},
        {"*/attention_factor": 1},
    ),
    (
        "switches-against-cache warning",
        LLAMA_2,
        {OLDER: {"type": "dynamic", "factor": 4.0}},
        {OLDER: {"type": "linear", "factor": 4.0}},
    ),
    ("switches-against-cache warning", LONGROPE, {"*/short_factor": ONES}),
    ("original-missing error", LLAMA_3_1, {f"*/{ORIGINAL}": ...}),
    ("original-missing error", PHI, {ORIGINAL: ...}),
    # AFM and Yarn-Mistral have a larger one
    (
        "factor-contradicts-lengths error",
        YARN_LLAMA,
        {"*/factor": 14.4},
        {"*/factor": 20.0},
    ),
    ("factor-contradicts-lengths error", QWEN_3, {WINDOW: 16384}),
    # with an attention factor, nothing is computed from the factor
    (
        "factor-contradicts-lengths error",
        LONGROPE,
        NO_FACTOR | {"*/factor": 5.0},
        {"*/factor": 5.0},
    ),
    ("linear-multiplied remark", VICUNA, {}, {"max_sequence_length": 16384}),
    (
        "linear-multiplied remark",
        VICUNA,
        {"max_sequence_length": 4096},
        {"max_sequence_length": 8192},
    ),
    (
        "window-raised warning",
        "Qwen3-8B",
        SHAPE | {WINDOW: 262144},
        SHAPE | {WINDOW: 32768},
    ),
    # as those who trained longer ones did
    (
        "window-raised warning",
        LLAMA_3,
        {"num_hidden_layers": 32, WINDOW: 65536},
        {
            "num_hidden_layers": 32,
            WINDOW: 65536,
            THETA: 4e6,
        },
    ),
    # unsloth#7028
    (
        "llama3-lost warning",
        LLAMA_3_1,
        {OLDER: LINEAR, WINDOW: 262144, LIMIT: ...},
        {OLDER: LINEAR, WINDOW: 16384},
    ),
    ("llama3-lost warning", LLAMA_3_1, {OLDER: None}, {OLDER: None, THETA: 3.58e9}),
    ("tokenizer-behind warning", LLAMA_3_1, {LIMIT: 131071}, {}, {LIMIT: 131072}),
    (
        "tokenizer-behind warning",
        YARN_LLAMA,
        {LIMIT: 4096},
        {LIMIT: 65536},
        {LIMIT: 65536},
    ),
    ("tokenizer-behind warning", QWEN_3, {LIMIT: 40960}, {}, {LIMIT: 131072}),
    (
        "not-in-transformers remark",
        QWEN_2,
        {ARCHITECTURES: ["DFlashDraftModel"]},
        {ARCHITECTURES: ["Qwen2ForCausalLM"]},
    ),
    (
        "not-in-transformers remark",
        "unknown to transformers",
        {},
        {"model_type": "llama"},
    ),
    ("not-in-transformers remark", LLAMA_2, {"model_type": "needs_ropepatch"}),
    ("transformers-refuses error", LLAMA_2, {"hidden_act": 7}, {"hidden_act": "gelu"}),
    ("transformers-refuses error", LLAMA_2, {WINDOW: 4096.0}),
    ("transformers-refuses error", VICUNA, {"*/factor": ...}),
    ("transformers-refuses error", PHI, {"*/long_factor": [8.0]}),
    ("transformers-refuses error", "Mixtral-8x7B-v0.1", {"num_local_experts": 2**62}),
]


def scaled(config):
    text = config.get("text_config", config)
    ropes = [text.get(key) for key in (NEWER, OLDER)]
    plain = (None, "default", "mrope")
    return [
        rope
        for rope in ropes
        if rope and rope.get("rope_type", rope.get("type")) not in plain
    ]


def changed(facts, values):
    """A copy of the files with the values of JSON pointers changed, as in the table."""
    config, tokenizer = copy.deepcopy(facts.raw), dict(facts.tokenizer)
    ropes = scaled(config)
    for pointer, value in values.items():
        *path, key = pointer.split("/")
        holders = [tokenizer if key == LIMIT else config]
        for step in path:
            holders = ropes if step == "*" else [holder[step] for holder in holders]
        for holder in holders:
            if value is ...:
                holder.pop(key, None)
            else:
                holder[key] = copy.deepcopy(value)
    return Facts(Config(config), tokenizer)


def found(facts):
    return {(one.code, one.severity) for one in check(facts)}


@pytest.mark.parametrize("row", TABLE)
def test_a_rule_fires_on_its_config_and_not_near_it(row):
    finding, name, fires, near, fix = (*row, {}, {})[:5]
    code, severity = finding.split()
    original = CONFIGS[name]
    damaged, sound = changed(original, fires), changed(original, near)
    needs(damaged.raw["model_type"])
    needs(sound.raw["model_type"])
    assert (code, severity) in found(damaged)
    assert code not in {one for one, _ in found(sound)}
    others = {one for one, how in found(damaged) if how == "error"} - {code}
    assert not others
    after, expected = repaired(damaged), changed(damaged, fix)
    assert (after.raw, after.tokenizer) == (expected.raw, expected.tokenizer)
    assert not any(one.fixable for one in check(after))
    if code == "only-new-keys":
        assert has_same_rope(after.raw, damaged.raw)


def test_the_table_has_every_rule():
    assert {row[0].split()[0] for row in TABLE} == {
        rule.code for rule in RULES.values()
    }


# --- real configurations --------------------------------------------------------------------------------

REMOTE = [
    "aic-deepseek-ref",
    "sophgo-chatglm3-32k",
    "sophgo-glm4-9b-chat",
    "sophgo-internvl2-2b",
    "sophgo-qwen-7b-chat",
    "aic-nemotron-super",
    "sophgo-minicpm4",
    "sophgo-minicpmv4",
]
EXPECTED = {  # every other one has no findings
    "gemma-3-4b": "linear-multiplied:remark",
    "phi-4-mini": "switches-against-cache:remark",
    "rtp-glm45": "tokenizer-behind:warning",
    "sophgo-gemma3": "linear-multiplied:remark",
    "sophgo-glm4v": "transformers-refuses:error",  # flattened: the text part is missing
    "sophgo-qwen3-asr": "transformers-refuses:error",
    **dict.fromkeys(REMOTE, "not-in-transformers:remark"),
}


def test_bundled_configurations_have_only_their_known_findings():
    for entry in json.loads(PRESETS.read_text()):
        codes = " ".join(
            f"{one.code}:{one.severity}"
            for one in check(Facts(Config(entry["config"])))
        )
        assert codes == EXPECTED.get(entry["name"], ""), entry["name"]


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.sweep)])
def test_real_configurations_have_only_their_known_findings(shared, step):
    needs("qwen3_5_moe")
    folders = [
        file.parent for file in sorted((shared / "configs").glob("*/config.json"))
    ]
    assert len(folders) == 51
    for folder in folders[::step]:
        tokenizer = folder / "tokenizer_config.json"
        facts = Facts(
            Config(read_json(folder / "config.json")),
            read_json(tokenizer) if tokenizer.exists() else {},
        )
        codes = " ".join(f"{one.code}:{one.severity}" for one in check(facts))
        assert codes == EXPECTED.get(folder.name, ""), folder.name


def test_published_configs_of_earlier_years_have_no_errors_or_warnings():
    for name, facts in CONFIGS.items():
        needs(facts.raw["model_type"])
        assert {severity for _, severity in found(facts)} <= {"remark"}, name


FULL = "full_attention"
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
FAR = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
LAGUNA = {
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
GEMMA_3 = CONFIGS["gemma-3-4b-it, text only"].raw
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
                "rope_scaling": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "type": "linear",
                },
            },
        ),
        # no older key can contain a scaling of the sliding layers
        (
            GEMMA_3,
            {
                FULL: PLAIN,
                "sliding_attention": LOCAL | {"rope_type": "linear", "factor": 2.0},
            },
            {},
        ),
        # one `rope_scaling` would replace the RoPE of every layer type
        (
            LAGUNA | {"model_type": "gpt_oss"},
            {FULL: FAR, "sliding_attention": LOCAL},
            {},
        ),
    ],
)
def test_older_keys_are_added_only_if_transformers_computes_the_same(
    config, ropes, older
):
    """RoPE by layer type."""
    config = config | {"rope_parameters": ropes}
    assert ("only-new-keys", "warning") in found(Facts(Config(config)))
    after = repaired(Facts(Config(config))).raw
    assert after == config | older
    assert not older or has_same_rope(config, after)


# --- the same rules in plans ----------------------------------------------------------------------------


def warnings_of(folder, facts, **given):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts.raw))
    return "\n".join(ropepatch.plan(folder, **given).warnings)


def test_a_plan_of_a_raised_length_asks_for_the_original(tmp_path):
    raised = changed(CONFIGS["Qwen3-8B"], SHAPE | {WINDOW: 262144})
    text = warnings_of(tmp_path / "raised", raised, to="2x")
    assert (
        "have 40960 tokens (trained on 32768); 262144 without a scaling: raised by hand?"
        in text
    )
    assert "this plan computes from 262144 tokens" in text
    assert "`original=32768`" in text
    assert "raised" not in warnings_of(
        tmp_path / "given", raised, to=131072, original=32768
    )


def test_a_plan_of_dual_chunks_starts_at_the_trained_length(tmp_path):
    facts = changed(
        CONFIGS[QWEN_2],
        {WINDOW: 1010000, DUAL: {ORIGINAL: 262144, "chunk_size": 262144}},
    )
    text = warnings_of(tmp_path / "model", facts, to="4x")
    assert (
        "262144 tokens are the original_max_position_embeddings of dual_chunk_attention_config"
        in text
    )
    plan = ropepatch.plan(tmp_path / "model", to="4x")
    assert (plan.source.config.window, plan.target, plan.factor) == (
        262144,
        1048576,
        4.0,
    )


def test_a_plan_drops_keys_that_transformers_does_not_read(tmp_path):
    facts = changed(CONFIGS[QWEN_3], {"*/attn_factor": 0.8782488562869419})
    assert "transformers does not read attn_factor" in warnings_of(
        tmp_path / "model", facts, to=262144
    )
    written = ropepatch.plan(tmp_path / "model", to=262144).changes
    assert "attn_factor" not in json.dumps(written)


# --- damage ---------------------------------------------------------------------------------------------


def test_rules_accept_randomly_damaged_configs_and_repair_everything_fixable():
    keys = {
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "quantization_config",
        "layer_types",
    }
    for entry in PUBLISHED:
        for raw in damages(entry["config"], keys, 2, entry["name"]):
            if not isinstance(raw, dict):
                continue
            for finding in check(Facts(Config(raw), raw)):
                assert str(finding)
                json.dumps(finding.to_dict(), allow_nan=False)
            assert not [
                finding
                for finding in check(repaired(Facts(Config(raw), raw)))
                if finding.fixable
            ], raw

"""Changes to a config.json that make no sense, drawn by hypothesis."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXPENSIVE = range(65, 10**6)  # layers and widths that are no error but take minutes to build
NUMBERS = st.one_of(
    st.integers(-3, 64),
    st.sampled_from([-(2**63), 10**6, 10**9, 2**31, 2**63, 10**30]),
    st.floats(width=32).filter(lambda number: not (number.is_integer() and int(number) in EXPENSIVE)),
    st.sampled_from([0.0, -1.0, 0.5, 2.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4), st.sampled_from(["16", "yarn"]))
JUNK = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=4), SCALARS, max_size=2)
)
ROPE_TYPES = [
    *("default", "linear", "dynamic", "yarn", "longrope"),
    *("llama3", "proportional", "su", "mrope", "?"),
]
OTHER_ROPE_KEYS = """
    attention_factor beta_fast beta_slow partial_rotary_factor mscale mscale_all_dim truncate
"""
ROPE = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(ROPE_TYPES) | JUNK,
        "type": st.sampled_from(ROPE_TYPES) | JUNK,
        "rope_theta": st.sampled_from([10000.0, 500000, 1e6]) | JUNK,
        "factor": st.sampled_from([1.0, 2.0, 4, 8.0]) | JUNK,
        "original_max_position_embeddings": st.sampled_from([16, 32, 64]) | JUNK,
        "low_freq_factor": st.just(1.0) | JUNK,
        "high_freq_factor": st.just(4.0) | JUNK,
        "short_factor": st.lists(NUMBERS, min_size=8, max_size=8) | JUNK,
        "long_factor": st.lists(NUMBERS, min_size=8, max_size=8) | JUNK,
        **dict.fromkeys(OTHER_ROPE_KEYS.split(), JUNK),
    },
)
NESTED = st.dictionaries(st.sampled_from(["full_attention", "sliding_attention", "x"]), ROPE, max_size=2)
VALUES = {
    "rope_parameters": ROPE | NESTED | JUNK,
    "rope_scaling": ROPE | NESTED | JUNK,
    "rope_theta": st.sampled_from([10000.0, 10000, 500000.0]) | JUNK,
    "max_position_embeddings": st.sampled_from([16, 64, 128]) | JUNK,
    "original_max_position_embeddings": st.sampled_from([16, 64]) | JUNK,
    "head_dim": st.sampled_from([None, 8, 15, 16, 32]) | JUNK,
    "model_type": st.sampled_from(["llama", "mistral", "qwen3", "gpt2", "bert", "phi3", "gemma3"]) | JUNK,
    "layer_types": st.lists(st.sampled_from(["full_attention", "sliding_attention", "?"]), max_size=3) | JUNK,
    "text_config": st.fixed_dictionaries({}, optional={"model_type": st.just("llama")}) | JUNK,
}
# Not num_labels: transformers makes a name for each.
OTHERS = """
    architectures attention_bias attention_dropout auto_map base_model_tp_plan bos_token_id dtype
    eos_token_id hidden_act hidden_size id2label initializer_range intermediate_size is_encoder_decoder
    mlp_bias name_or_path num_attention_heads num_hidden_layers num_key_value_heads pad_token_id
    partial_rotary_factor per_layer_config pretraining_tp quantization_config rms_norm_eps rotary_emb_base
    sliding_window tie_word_embeddings torch_dtype transformers_version use_cache use_sliding_window
    vocab_size
"""

DROPPED = object()


def change(key: str) -> st.SearchStrategy:
    return st.tuples(st.just(key), st.just(DROPPED) | VALUES.get(key, JUNK))


CHANGES = st.lists(
    st.sampled_from([*VALUES, *VALUES, *OTHERS.split()]).flatmap(change), min_size=1, max_size=3
)


def fuzz(examples: int):
    """The same examples in every run, so that a failure is found again."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )

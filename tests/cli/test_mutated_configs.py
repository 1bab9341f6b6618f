"""Configurations damaged by chance: refused in words, or answered with what can be printed."""

import pytest
from config_clinic import ENTRIES, Clinic
from damaged_configs import DAMAGES, Mutant, mutant

# As for a user: a warning of transformers is no error.
pytestmark = pytest.mark.filterwarnings("ignore")

SOUND = '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, %s}'


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(20), id="20"), pytest.param(range(20, 500), marks=pytest.mark.sweep, id="500")],
)
def test_a_damaged_configuration_is_refused_in_words_or_answered_with_what_can_be_printed(seeds, tmp_path):
    clinic = Clinic(tmp_path / "clinic")
    asked = {str(case): clinic.ask(case) for case in map(mutant, seeds)}
    faults = {name: came.faults for name, came in asked.items() if came.faults}
    assert faults == {}
    answers = sum(came.answered for came in asked.values()) / len(asked) / len(ENTRIES)
    assert 0.2 < answers < 0.8  # else they are damaged too little or too much to tell anything


def test_every_damage_is_done_and_a_seed_makes_the_same_again():
    cases = [mutant(seed) for seed in range(300)]
    kinds = {kind for case in cases for kind in DAMAGES for damage in case.damage if damage.startswith(kind)}
    assert kinds == {*DAMAGES}
    assert [mutant(case.seed) for case in cases[:20]] == cases[:20]


@pytest.mark.parametrize(
    ("method", "rope"),
    [
        # its name moves the cursor
        ("linear", r'"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "\u001b[31m": 1}'),
        # which transformers reads as NaN, in a rope that is not scaled
        (
            "linear",
            '"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "x": [{"__float__": "NaN"}]}',
        ),
        # frequencies that are zeros with a sign
        (
            "yarn",
            '"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": -1e308, '
            '"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16}',
        ),
        ("linear", '"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "x": ["a", 1, 2, 3, 4]}'),
        # a ratio of windows that is infinite
        (
            "yarn",
            '"rope_theta": 1e4, "max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4, '
            '"original_max_position_embeddings": 5e-324}',
        ),
    ],
    ids=["control characters", "NaN", "negative zeros", "a long list", "a tiny window"],
)
def test_what_the_mutants_found(method, rope, tmp_path):
    text = SOUND % rope
    assert Clinic(tmp_path / "clinic").ask(Mutant(0, "llama", (), text, method, 4096 * 4)).faults == ()


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": "gemma3"}',
        '{"model_type": "fuyu", "text_config": null}',
        '{"model_type": "mllama", "text_config": {"model_type": {"a": 1}}}',
        '{"model_type": "llama4", "text_config": {"model_type": {"a": 1}}}',
    ],
)
@pytest.mark.parametrize("method", ["yarn", "self-extend"])
def test_what_the_mutants_found_in_parts_for_text(text, method, tmp_path):
    assert Clinic(tmp_path / "clinic").ask(Mutant(0, "gemma3", (), text, method, "4x")).faults == ()

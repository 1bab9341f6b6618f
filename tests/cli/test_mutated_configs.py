"""Configurations damaged by chance: refused in words, or answered with what can be printed."""

import pytest
from config_clinic import ENTRIES, Clinic
from damaged_configs import Mutant, mutant

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
    assert {name: faults for name, (faults, _) in asked.items() if faults} == {}
    answers = sum(answered for _, answered in asked.values()) / len(asked) / len(ENTRIES)
    assert 0.2 < answers < 0.8  # else they are damaged too little or too much to tell anything


ROPE = '"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, %s}'
BANDS = '"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16'
FOUND = [
    ROPE % r'"\u001b[31m": 1',  # a name that moves the cursor
    ROPE % '"x": [{"__float__": "NaN"}]',  # which transformers reads as NaN, in a rope that is not scaled
    # frequencies that are zeros with a sign
    f'"rope_parameters": {{"rope_type": "llama3", "rope_theta": 1e4, "factor": -1e308, {BANDS}}}',
    # a ratio of windows that is infinite
    '"rope_theta": 1e4, "max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4, '
    '"original_max_position_embeddings": 5e-324}',
]
IN_PARTS = [
    '{"model_type": "gemma3"}',
    '{"model_type": "fuyu", "text_config": null}',
    '{"model_type": "mllama", "text_config": {"model_type": {"a": 1}}}',
]


@pytest.mark.parametrize("text", [*(SOUND % rope for rope in FOUND), *IN_PARTS])
@pytest.mark.parametrize("method", ["yarn", "self-extend"])
def test_what_the_mutants_found(text, method, tmp_path):
    assert Clinic(tmp_path / "clinic").ask(Mutant(0, "llama", (), text, method, 4096 * 4))[0] == []

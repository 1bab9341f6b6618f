"""Damaged configurations: an extension is refused in words, or stock transformers loads what it wrote."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from checkpoint_folders import write_checkpoint
from fuzzed_configs import CHANGES, DROPPED, JUNK, ROPE, SCALARS, fuzz
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError

# As for a user: a warning of transformers is no error.
pytestmark = pytest.mark.filterwarnings("ignore")

TARGET = 256
METHODS = ("yarn", "linear", "ntk", "llama3", "dynamic", "p-rope", "giraffe-power", "none")


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("template") / "tiny-llama")


def check(template: Path, name: str, content: bytes, method: str = "yarn") -> bool:
    """Extend a checkpoint with one file replaced; whether it worked. All but a refusal in words raises."""
    with TemporaryDirectory() as scratch:
        here = Path(scratch)
        source = Path(shutil.copytree(template, here / "src"))
        (source / name).write_bytes(content)
        refusal = None
        try:
            plan = ropepatch.plan(source, to=TARGET, method=method)
            assert str(plan)
            json.loads(plan.to_json())
            ropepatch.extend(plan, here / "new/out")
        except RopepatchError as error:
            refusal = error
        if refusal is None:
            assert [path.name for path in (here / "new").iterdir()] == ["out"]
            if b"quantization_config" not in content:  # nothing here can load these, before or after
                AutoModelForCausalLM.from_pretrained(here / "new/out")
            return True
        assert str(refusal)
        assert refusal.hint
        assert "\n" not in f"{refusal}{refusal.hint}"
        assert [path.name for path in here.iterdir()] == ["src"]
        return False


@pytest.mark.sweep
@fuzz(100)
@given(changes=CHANGES, method=st.sampled_from(METHODS))
def test_a_damaged_config_is_refused_in_words_or_extends_into_what_stock_loads(template, changes, method):
    config = json.loads((template / "config.json").read_text())
    for key, value in changes:
        config.pop(key, None) if value is DROPPED else config.update({key: value})
    check(template, "config.json", json.dumps(config).encode(), method)


@pytest.mark.sweep
@fuzz(60)
@given(older=st.none() | ROPE, newer=st.none() | ROPE, method=st.sampled_from(METHODS))
def test_any_pair_of_older_and_newer_rope_keys_is_refused_in_words_or_extends(template, older, newer, method):
    config = json.loads((template / "config.json").read_text())
    config |= {"rope_parameters": newer, "rope_scaling": older}
    check(template, "config.json", json.dumps(config).encode(), method)


FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json")
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*FILES, "ropepatch.json", "model.safetensors"])
@fuzz(20)
@given(content=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_any_file_are_refused_in_words_or_extend(template, name, content):
    check(template, name, content)


@pytest.mark.sweep
@fuzz(20)
@given(
    changes=st.dictionaries(st.sampled_from(["max_length", "temperature", "num_beams", "eos_token_id"]), JUNK)
)
def test_a_damaged_generation_config_is_refused_in_words_or_extends(template, changes):
    generation = json.loads((template / "generation_config.json").read_text()) | changes
    check(template, "generation_config.json", json.dumps(generation).encode())


def test_the_fuzzed_checkpoint_itself_extends(template):
    assert all(check(template, "config.json", (template / "config.json").read_bytes(), m) for m in METHODS)

"""Damaged configs: `extend` raises a one-line error, or stock transformers loads its output."""

import json
import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from damaged_configs import METHODS, SCALED, damaged, with_rare_key
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError

# As for a user, warnings of transformers are not errors.
pytestmark = pytest.mark.filterwarnings("ignore")

TARGET = 256
ALSO = (*METHODS, "giraffe-power")


def check(template: Path, name: str, content: bytes, method: str = "yarn") -> bool:
    """Extend a checkpoint with one file replaced; return whether it succeeded without a RopepatchError."""
    with TemporaryDirectory() as scratch:
        here = Path(scratch)
        source = Path(shutil.copytree(template, here / "src"))
        (source / name).write_bytes(content)
        failure = None
        try:
            plan = ropepatch.plan(source, to=TARGET, method=method)
            assert str(plan)
            json.loads(plan.to_json())
            ropepatch.extend(plan, here / "new/out")
        except RopepatchError as error:
            failure = error
        if failure is None:
            assert [path.name for path in (here / "new").iterdir()] == ["out"]
            if b"quantization_config" not in content:  # not loadable here, with or without the extension
                AutoModelForCausalLM.from_pretrained(here / "new/out")
            return True
        assert str(failure)
        assert failure.hint
        assert "\n" not in f"{failure}{failure.hint}"
        assert [path.name for path in here.iterdir()] == ["src"]
        return False


@pytest.mark.sweep
def test_a_damaged_config_raises_a_one_line_error_or_extends_for_stock_transformers(template):
    """Some configs contain RoPE parameters in both the older and the newer keys."""
    config = json.loads((template / "config.json").read_text())
    for seed in range(160):
        draw = random.Random(seed)
        newer, older = ({"rope_theta": 1e4, **draw.choice(SCALED)} for _ in range(2))
        ropes = {"rope_parameters": newer, "rope_scaling": older} if seed % 8 > 4 else {}
        _, text = damaged(draw, with_rare_key(draw, config | ropes), draw.choice((0, 1, 1, 2)))
        check(template, "config.json", text.encode(), draw.choice(ALSO))


FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)

ANY_BYTES = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*FILES, "ropepatch.json", "model.safetensors"])
@ANY_BYTES
@given(content=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_random_bytes_in_a_file_raise_a_one_line_error_or_extend(template, name, content):
    check(template, name, content)


@pytest.mark.sweep
def test_a_damaged_generation_config_raises_a_one_line_error_or_extends(template):
    generation = json.loads((template / "generation_config.json").read_text())
    generation |= {"max_length": 64, "temperature": 0.5, "num_beams": 2, "eos_token_id": 3}
    for seed in range(20):
        check(template, "generation_config.json", damaged(random.Random(seed), generation, 2)[1].encode())


def test_the_undamaged_checkpoint_extends_with_every_fuzzed_method(template):
    assert all(check(template, "config.json", (template / "config.json").read_bytes(), m) for m in ALSO)

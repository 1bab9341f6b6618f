"""Randomly damaged configs raise printable errors or give printable output."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from damaged_configs import Mutant, mutant

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.config import blueprint

# As for a user, warnings of transformers are not errors.
pytestmark = pytest.mark.filterwarnings("ignore")

SECONDS = 20  # limit of CPU time for each answer


@pytest.fixture(autouse=True)
def one_skeleton(monkeypatch) -> None:
    """Build the model of each config.json only once, since this is the largest cost of a plan."""
    built: dict[str, Any] = {}

    def once(config: Any) -> Any:
        text = config.to_json_string(use_diff=False)
        return built[text] if text in built else built.setdefault(text, blueprint(config))

    monkeypatch.setattr("ropepatch.model.checkpoint.blueprint", once)


@contextmanager
def cpu_limit() -> Iterator[None]:
    """Raise an error in the block after SECONDS of CPU time of this process."""

    def over(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} s of CPU time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def plan(source: Path, case: Mutant) -> tuple[str, str]:
    made = ropepatch.plan(source, to=case.to, method=case.method)
    dry = ropepatch.extend(source, source.parent / "out", to=case.to, method=case.method, dry_run=True)
    return f"{made}{dry.outcome()}", f"[{made.to_json()}, {dry.to_json()}]"


def diagnosis(source: Path, case: Mutant) -> tuple[str, str]:
    found = ropepatch.diagnose(source)
    return str(found), found.to_json()


def answers(source: Path, case: Mutant) -> int:
    """The number of entry points without an error; check messages, output and that nothing is written."""
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(case.text, encoding="utf-8")
    answered = 0
    for entry in (plan, diagnosis):
        try:
            with cpu_limit():
                text, as_json = entry(source, case)
        except RopepatchError as error:
            for line in (str(error), error.hint):
                assert line, (entry, case)
                assert (line.isprintable(), len(line) <= 2000) == (True, True), (entry, case, line[:300])
        else:
            answered += 1
            assert text.encode(), (entry, case)
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text), (entry, case)
            json.loads(
                as_json, parse_constant=lambda constant: pytest.fail(f"{constant} in the JSON: {case}")
            )
        written = [path.name for path in source.parent.rglob("*")]
        assert sorted(written) == ["config.json", source.name], (entry, case)
        assert (source / "config.json").read_text(encoding="utf-8") == case.text
    return answered


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(20), id="20"), pytest.param(range(20, 500), marks=pytest.mark.sweep, id="500")],
)
def test_a_damaged_config_raises_a_printable_error_or_gives_printable_output(seeds, tmp_path):
    share = sum(answers(tmp_path / "source", mutant(seed)) for seed in seeds) / len(seeds) / 2
    assert 0.2 < share < 0.8  # otherwise the damage is too small or too large to test anything


SOUND = '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, %s}'
ROPE = '"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, %s}'
BANDS = '"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16'
FOUND = [
    ROPE % r'"\u001b[31m": 1',  # a name with a terminal control sequence
    ROPE % '"x": [{"__float__": "NaN"}]',  # NaN to transformers, in an unscaled RoPE
    # frequencies of negative zero
    f'"rope_parameters": {{"rope_type": "llama3", "rope_theta": 1e4, "factor": -1e308, {BANDS}}}',
    # an infinite ratio of lengths
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
def test_configs_found_by_mutation_raise_printable_errors_or_give_printable_output(text, method, tmp_path):
    answers(tmp_path / "source", Mutant(0, "llama", (), text, method, 4096 * 4))

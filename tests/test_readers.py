"""Readers of JSON and YAML: round trips are exact, and damaged files give an object or a one-line error."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint_folders import RECORDS
from damage import PUBLISHED, damages
from made_results import reading
from pydantic import BaseModel
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Suite
from ropepatch.evaluation.results import comparisons, read_result
from ropepatch.extension.record import Record, stated_by_card
from ropepatch.extension.record import read as read_record
from ropepatch.files import json_text
from ropepatch.probing import reading as readings
from ropepatch.probing.judging import judge
from ropepatch.publishing.card.model import Extended
from ropepatch.publishing.card.writing import card_text
from ropepatch.report.plots.lines import figures
from ropepatch.report.tables import tables_of
from ropepatch.training.recipe import Recipe

# As for a user, warnings of transformers are not errors.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = 40  # damaged files per reader


@dataclass(frozen=True)
class Reader:
    """One reader.

    Args:
        file: The name of the file that it reads.
        sound: A valid content.
        read: Reads the file at a path.
        again: The content of the object that was read.
        schema: The pydantic model of the file; None if there is none.
        examples: The number of damaged files; the sweep has twenty times as many.
    """

    file: str
    sound: dict[str, Any]
    read: Callable[[Path], Any]
    again: Callable[[Any], Any] | None = None
    schema: type[BaseModel] | None = None
    examples: int = EXAMPLES

    def written(self, folder, content):
        file = folder / self.file
        as_text = yaml.safe_dump if file.suffix == ".yaml" else json.dumps
        text = as_text(content)
        file.write_text(
            f"---\n{text}\n---\n" if file.suffix == ".md" else text, encoding="utf-8"
        )
        return file


def yaml_of(file):
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


def card_of(file):
    return card_text(Extended("me/x", read_record(file.parent)))


def tables_in(file):
    for group in comparisons([read_result(file)]):
        tables_of(group)


def drawn(file):
    for figure in figures([read_result(file)]).values():
        figure.draw_without_rendering()


def judged(file):
    """Judge the fingerprint against itself."""
    read = readings.read(file.parent)
    judge(read, read.tops[readings.RIGHT])


def planned(file):
    """Plan and diagnose; what is printed has no control character, and nothing is written."""
    diagnosis = ropepatch.diagnose(file.parent, measure=False)
    shown, as_json = [str(diagnosis)], [diagnosis.to_json()]
    try:
        plan = ropepatch.plan(file.parent, to="4x")
        shown.append(str(plan))
        as_json.append(json_text(plan.to_dict()))
    finally:
        assert not re.search(
            r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "".join(shown)
        )
        for text in as_json:
            json.loads(text, parse_constant=pytest.fail)
        assert [path.name for path in file.parent.iterdir()] == [file.name]


TOPS = [{"1": -0.5, "2": -1.0}, {"3": -0.25, "4": -2.0}]
READING = {
    "version": 1,
    "weights": "abc",
    "window": 64,
    "target": 80,
    "vocabulary": 48,
    "ids": [5] * 80,
    "positions": [1, 70],
    "tops": {readings.RIGHT: TOPS, "x": TOPS},
    "alike": [],
    "rounded": [0.0, 0.001],
}
RESULT = json.loads(json.dumps(asdict(reading("yarn", [1.0, 2.0, 3.0]))))
TINY = json.loads(tiny_config("llama").to_json_string())
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
}
OLDER = {key: value for key, value in TINY.items() if key != "rope_parameters"}
OLDER |= {"rope_theta": 10000.0, "rope_scaling": YARN}
CONFIGS = {
    "config": TINY,
    "config with older keys": OLDER,
    "config by layer type": json.loads(tiny_config("gemma3_text").to_json_string()),
    "config of several parts": next(
        one["config"] for one in PUBLISHED if one["name"] == "gemma-3-4b-it"
    ),
}
LICENCES = (
    b"!!bool x",
    b"!!timestamp x",
    b"!!float ''",
    b'"\\ud800"',
    b"&a [*a]",
)  # PyYAML fails on
READERS = {
    **{
        f"recipe {name}": Reader(
            "x.yaml",
            yaml_of(f"recipes/{name}.yaml"),
            Recipe.from_yaml,
            None,
            Recipe,
        )
        for name in ("tiny", "distil")
    },
    "suite": Reader(
        "x.yaml", yaml_of("eval/suites/demo.yaml"), Suite.from_yaml, None, Suite
    ),
    "result": Reader(
        "x.json", RESULT, read_result, lambda result: json.loads(result.to_json())
    ),
    "result in tables": Reader("x.json", RESULT, tables_in),
    "result in figures": Reader("x.json", RESULT, drawn, examples=10),
    **{
        f"record {name}": Reader(
            "ropepatch.json",
            RECORDS[name],
            lambda file: read_record(file.parent),
            lambda record: record.to_dict(),
            Record,
        )
        for name in ("trained-folded", "adapter", "extended")
    },
    "card of a record": Reader(
        "ropepatch.json", RECORDS["trained-folded"], card_of, None, Record, examples=10
    ),
    "reading as judged": Reader(
        "reading.json", READING, judged, None, readings.Reading
    ),
    "reading": Reader(
        "reading.json",
        READING,
        lambda file: readings.read(file.parent),
        lambda read: read.to_dict(),
        readings.Reading,
    ),
    "card": Reader(
        "README.md",
        {"license": "mit", "language": ["en"], "tags": ["x"]},
        lambda file: stated_by_card(file.parent),
    ),
    **{
        name: Reader("config.json", sound, planned, examples=3)
        for name, sound in CONFIGS.items()
    },
    "documents": Reader(
        "x.jsonl", {"text": "a"}, lambda file: list(stream_documents(file))
    ),
    "token ids": Reader(
        "x.jsonl", {"input_ids": [1, 2]}, lambda file: list(stream_documents(file))
    ),
}


def check_error(error, content):
    message = f"{error}{error.hint}"
    assert (message.isprintable(), len(message) < 2500) == (True, True), content


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", READERS)
def test_a_file_is_read_as_written_or_refused(name, times, tmp_path):
    """Keys of the schema and of a valid file, at all depths."""
    reader = READERS[name]
    keys = (
        reader.schema.model_json_schema().get("properties", {})
        if reader.schema
        else {"text": {}}
    )
    once = reader.read(reader.written(tmp_path, reader.sound))
    assert (
        not reader.again
        or reader.read(reader.written(tmp_path, reader.again(once))) == once
    )
    for content in damages(
        reader.sound, {*keys}, times * reader.examples, f"{name} {times}"
    ):
        file = reader.written(tmp_path, content)
        try:
            read = reader.read(file)
        except RopepatchError as error:
            check_error(error, content)
        else:
            if reader.again:
                assert (
                    reader.read(reader.written(tmp_path, reader.again(read))) == read
                ), content


ROPE = '"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, %s}'
BANDS = '"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16'
LLAMA = '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, %s}'
FOUND = [
    LLAMA % (ROPE % r'"\u001b[31m": 1'),  # a name with a terminal control sequence
    LLAMA
    % (
        ROPE % '"x": [{"__float__": "NaN"}]'
    ),  # NaN to transformers, in an unscaled RoPE
    # frequencies of negative zero
    LLAMA
    % f'"rope_parameters": {{"rope_type": "llama3", "rope_theta": 1e4, "factor": -1e308, {BANDS}}}',
    # an infinite ratio of lengths
    LLAMA
    % '"rope_theta": 1e4, "max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4, '
    '"original_max_position_embeddings": 5e-324}',
    # no token in the original length
    LLAMA
    % '"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0.5}',
    LLAMA % '"architectures": 5',
    LLAMA % '"rope_scaling": {"long_factor": {}}',
    '{"model_type": "gemma3"}',
    '{"model_type": "fuyu", "text_config": null}',
    '{"model_type": "mllama", "text_config": {"model_type": {"a": 1}}}',
    '{"model_type": "llama", "a": ' + '{"x":' * 3000 + "1" + "}" * 3001,
    '{"model_type": "llama", "model_type": []}',
]


@pytest.mark.parametrize("text", FOUND)
def test_odd_configs_raise_one_line_errors_or_give_printable_output(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    try:
        planned(tmp_path / "config.json")
    except RopepatchError as error:
        check_error(error, text)


FILES = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*FILES, "ropepatch.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused_or_extended(template, tmp_path, name):
    is_json = (template / name).exists() and name.endswith(".json")
    sound = json.loads((template / name).read_text()) if is_json else {}
    for content in damages(sound, {"rope_scaling", "weight_map"}, 40, name):
        source = Path(shutil.copytree(template, tmp_path / "source"))
        (source / name).write_text(json.dumps(content))
        try:
            out = ropepatch.extend(
                source, tmp_path / "out", to=256, method="yarn", reading=False
            ).folder
        except RopepatchError as error:
            check_error(error, content)
        else:
            AutoModelForCausalLM.from_pretrained(out)
            shutil.rmtree(out)
        assert [path.name for path in tmp_path.iterdir()] == ["source"], content
        shutil.rmtree(source)


@pytest.mark.parametrize(
    "reader",
    {reader.file: reader for reader in READERS.values()}.values(),
    ids=lambda reader: reader.file,
)
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"caf\xe9", b"[" * 100_000, b'{"a": NaN}', b"9" * 5000),
        *(b"---\nlicense: %b\n---\n" % licence for licence in LICENCES),
    ],
)
def test_arbitrary_bytes_are_accepted_or_raise_a_one_line_error(
    reader, content, tmp_path
):
    (tmp_path / reader.file).write_bytes(content)
    try:
        reader.read(tmp_path / reader.file)
    except RopepatchError as error:
        assert str(error).isprintable()  # noqa: PT017

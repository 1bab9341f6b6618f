"""Readers of JSON and YAML: round trips are exact, and damaged files give an object or a one-line error."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint_folders import RECORDS
from made_results import reading
from pydantic import BaseModel

from ropepatch.data.sources import stream_documents
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import read_result
from ropepatch.evaluation.suites import Suite
from ropepatch.extension.record import Record, sound_keys
from ropepatch.extension.record import read as read_record
from ropepatch.model import reading_file
from ropepatch.model.source import stated_by_card
from ropepatch.probing.judging import judge
from ropepatch.probing.text import source_ids
from ropepatch.publishing.card.model import Extended
from ropepatch.publishing.card.writing import card_text
from ropepatch.report import results_tables
from ropepatch.report.plots import figures
from ropepatch.scaling.file import ScalingFile, read_scaling
from ropepatch.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = 80  # damaged files per reader
# Values that fit no key, numbers beyond every float, and nearly valid values.
VALUES = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**62, -(10**400), 10**400, 0.5, 1e308, -1e-300),
    *("", "x", "0", "1x", "-1k", "1e-5", "true", "yarn", "32k", "equal", "a\nb", "\x1b[2J"),
    *("x" * 5000, "\ud800", "NaN"),
    *([], [[]], {}, [None], [1, "x"], ["yarn"], {"name": "yarn"}, {"task": "perplexity"}, {"a": {"b": [1]}}),
]


@dataclass(frozen=True)
class Reader:
    """One reader.

    Args:
        file: The name of the file that it reads.
        sound: A valid content.
        read: Reads the file at a path.
        again: The content of the object that was read.
        schema: The pydantic model of the file; None if there is none.
    """

    file: str
    sound: dict[str, Any]
    read: Callable[[Path], Any]
    again: Callable[[Any], Any] | None = None
    schema: type[BaseModel] | None = None

    def written(self, folder: Path, content: Any) -> Path:
        file = folder / self.file
        as_text = yaml.safe_dump if file.suffix == ".yaml" else json.dumps
        text = as_text(content)
        file.write_text(f"---\n{text}\n---\n" if file.suffix == ".md" else text, encoding="utf-8")
        return file


def yaml_of(file: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    return content


def card_of(file: Path) -> str:
    return card_text(Extended("me/x", read_record(file.parent), files=frozenset({"tokenizer.json"})))


def drawn(file: Path) -> None:
    for figure in figures([read_result(file)]).values():
        figure.draw_without_rendering()


def text_of_reading(file: Path) -> None:
    """Regenerate the text as the probe does, and judge the fingerprint against itself."""
    read = reading_file.read(file.parent)
    with suppress(RopepatchError):  # the text does not fit the hash
        source_ids(read.source, None, read.vocabulary, "x")
    judge(read, [read.tops[reading_file.RIGHT].at(row) for row in range(len(read.positions))], None)


TOPS = {"ids": [[1, 2], [3, 4]], "log_probs": [[-0.5, -1.0], [-0.25, -2.0]]}
READING = {
    "version": 1,
    "weights": "abc",
    "window": 64,
    "target": 80,
    "vocabulary": 48,
    "dtype": "float32",
    "source": {"kind": "tokens", "seed": 0, "length": 80, "sha256": "abc"},
    "positions": [1, 70],
    "tops": {reading_file.RIGHT: TOPS, "x": TOPS},
    "rounded": [0.0, 0.001],
    "versions": {"torch": "2.13"},
}
SCALING = {
    "ropepatch_scaling": 1,
    "method": "custom",
    "factor": 4.0,
    "target": 256,
    "rotary_dim": 4,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "parameters": {"divisors": [1.5, 2.0], "attention_factor": 1.1},
}
RESULT = asdict(reading("yarn", [1.0, 2.0, 3.0]))
LICENCES = (b"!!bool x", b"!!timestamp x", b"!!float ''", b'"\\ud800"', b"&a [*a]")  # PyYAML fails on
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
    "suite": Reader("x.yaml", yaml_of("eval/suites/demo.yaml"), Suite.from_yaml, None, Suite),
    "result": Reader("x.json", RESULT, read_result, lambda result: json.loads(result.to_json())),
    "result in tables": Reader("x.json", RESULT, lambda file: results_tables([read_result(file)])),
    "result in figures": Reader("x.json", RESULT, drawn),
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
    "card of a record": Reader("ropepatch.json", RECORDS["trained-folded"], card_of, None, Record),
    "reading of a text": Reader("reading.json", READING, text_of_reading, None, reading_file.Reading),
    "reading": Reader(
        "reading.json",
        READING,
        lambda file: reading_file.read(file.parent),
        lambda read: read.to_dict(),
        reading_file.Reading,
    ),
    "scaling": Reader("x.json", SCALING, read_scaling, None, ScalingFile),
    "card": Reader(
        "README.md",
        {"license": "mit", "language": ["en"], "tags": ["x"]},
        lambda file: stated_by_card(file.parent),
    ),
    "documents": Reader("x.jsonl", {"text": "a"}, lambda file: list(stream_documents(file))),
    "token ids": Reader("x.jsonl", {"input_ids": [1, 2]}, lambda file: list(stream_documents(file))),
}


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The JSON pointers of all values in a content."""
    yield path
    inner = content.items() if isinstance(content, dict) else ()
    inner = enumerate(content[:2]) if isinstance(content, list | tuple) else inner
    for key, value in inner:
        yield from places(value, (*path, key))


def damaged(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    content = deepcopy(content)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return content


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.again])
def test_writing_and_reading_again_gives_an_equal_object(name, tmp_path):
    reader = READERS[name]
    once = reader.read(reader.written(tmp_path, reader.sound))
    assert reader.read(reader.written(tmp_path, reader.again(once))) == once


@pytest.mark.parametrize("name", READERS)
def test_any_value_at_any_key_is_accepted_or_raises_a_one_line_error(name, tmp_path):
    """Keys of the schema and of a valid file, at all depths."""
    reader, draw = READERS[name], random.Random(name)
    keys = reader.schema.model_json_schema().get("properties", {}) if reader.schema else {"text": {}}
    pointers = [*places(reader.sound), *((key,) for key in keys if key not in reader.sound)]
    reader.read(reader.written(tmp_path, reader.sound))
    for _ in range(EXAMPLES):
        path, value = draw.choice(pointers), draw.choice(VALUES)
        content = damaged(reader.sound, path, value)
        file = reader.written(tmp_path, content)
        try:
            read = reader.read(file)
        except RopepatchError as error:
            message = f"{error}{error.hint}"
            assert (message.isprintable(), len(message) < 2000) == (True, True), (path, value)
        else:
            if reader.again:
                assert reader.read(reader.written(tmp_path, reader.again(read))) == read, (path, value)


@pytest.mark.parametrize("name", [name for name in READERS if name.startswith("record")])
def test_a_damaged_record_keeps_its_valid_keys(name):
    sound, draw = READERS[name].sound, random.Random(name)
    for _ in range(EXAMPLES):
        key, value = draw.choice([*Record.model_fields]), draw.choice(VALUES)
        left = sound_keys(sound | {key: value})
        assert sound.keys() - {key} <= left.keys()
        if key not in left:
            with pytest.raises(RopepatchError):
                Record.parse(sound | {key: value})


@pytest.mark.parametrize(
    "reader", {reader.file: reader for reader in READERS.values()}.values(), ids=lambda reader: reader.file
)
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"caf\xe9", b"[" * 100_000, b'{"a": NaN}', b"9" * 5000),
        *(b"---\nlicense: %b\n---\n" % licence for licence in LICENCES),
    ],
)
def test_arbitrary_bytes_are_accepted_or_raise_a_one_line_error(reader, content, tmp_path):
    (tmp_path / reader.file).write_bytes(content)
    try:
        reader.read(tmp_path / reader.file)
    except RopepatchError as error:
        assert str(error).isprintable()  # noqa: PT017

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.passkey import Passkey, PasskeyGrid
from ropepatch.evaluation.results import (
    SCHEMA,
    Result,
    by_document,
    by_length,
    by_position,
    environment,
    loss_row,
    mean_nats,
    passkey_by_length,
    passkey_cells,
    read_result,
)


def make_result(**changes: object) -> Result:
    result = Result(
        task="perplexity",
        label="yarn é",
        model={"name": "tiny", "revision": None, "weights": "0f", "trained": 256},
        scaling={"method": "yarn", "factor": 4.0},
        target=1024,
        parameters={"lengths": [256, 1024], "seed": 0},
        tables={"by_length": [{"length": 256, "nats": 0.1 + 0.2, "interval": [None, 1e-300]}], "gain": []},
        env={"torch": "2.13"},
        seconds=1.5,
    )
    return replace(result, **changes)


def write_content(file: Path, **changes: object) -> Path:
    file.write_text(json.dumps(json.loads(make_result().to_json()) | changes))
    return file


# files


def test_a_result_is_read_back_as_it_was_written_indented_and_with_its_letters_as_they_are(tmp_path):
    make_result().write(tmp_path / "a.json")
    read = read_result(tmp_path / "a.json")
    assert asdict(read) == asdict(make_result())
    assert read.seconds == 1.5
    text = (tmp_path / "a.json").read_text()
    assert text.endswith("\n}\n")
    assert '\n  "label": "yarn é",\n' in text


json_numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.none() | st.booleans()


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_what_is_not_a_number_is_never_written(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        make_result(tables={"by_length": [{"nats": number}]}).write(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_a_file_takes_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    make_result(label="old").write(file)
    seen: list[str] = []
    write_text = Path.write_text

    def interrupted(path: Path, text: str, **options: str) -> int:
        write_text(path, text[: len(text) // 2], **options)
        seen.append(read_result(file).label)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_result(label="new").write(file)
    monkeypatch.undo()
    assert seen == ["old"]
    assert read_result(file).label == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'"text"', b"[]", b"caf\xe9", b"[" * 100_000, b'{"a": NaN}', b"9" * 5000, b"{}"]
)
def test_a_damaged_or_foreign_file_is_one_error_that_names_it(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RopepatchError, match=r"a\.json( is not a result|: )"):
        read_result(tmp_path / "a.json")


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, "1", None, 1.5, [1]])
def test_another_format_is_named_before_its_keys_are_looked_at(tmp_path, schema):
    file = write_content(tmp_path / "a.json", schema=schema, something="new")
    with pytest.raises(RopepatchError, match=r"a\.json: a result of format .*, expected 1") as caught:
        read_result(file)
    assert caught.value.hint == "measure again with this version"


def test_a_result_of_another_format_cannot_be_made():
    with pytest.raises(RopepatchError, match="a result of format 2, expected 1"):
        make_result(schema=2)


def test_unknown_and_missing_keys_are_named(tmp_path):
    with pytest.raises(RopepatchError, match="unknown result key 'table'") as caught:
        read_result(write_content(tmp_path / "a.json", table={}))
    assert caught.value.hint == "did you mean tables?"
    content = json.loads(make_result().to_json())
    del content["parameters"]
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(RopepatchError, match="must have the key parameters"):
        read_result(tmp_path / "a.json")


def test_seconds_and_schema_may_be_missing(tmp_path):
    content = json.loads(make_result().to_json())
    del content["seconds"], content["schema"]
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert read_result(tmp_path / "a.json") == make_result()


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("label", None, "a text"),
        ("scaling", "yarn", "a mapping"),
        ("target", "1024", "a whole number"),
        ("seconds", "1", "a number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(tmp_path, key, value, wanted):
    with pytest.raises(RopepatchError, match=rf"a\.json: {key} must be {wanted}, got "):
        read_result(write_content(tmp_path / "a.json", **{key: value}))


@pytest.mark.parametrize(
    ("table", "place"),
    [({}, "by_length must be a list"), ([{"length": 1}, None], r"by_length\[1\] must be a mapping")],
)
def test_a_table_that_is_no_list_of_rows_is_named(tmp_path, table, place):
    with pytest.raises(RopepatchError, match=rf"a\.json: tables\.{place}, got "):
        read_result(write_content(tmp_path / "a.json", tables={"gain": [], "by_length": table}))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(list(asdict(make_result()))),
        st.recursive(
            json_numbers | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
            ),
            max_leaves=4,
        ),
        max_size=3,
    )
)
def test_arbitrary_values_give_a_result_that_can_be_written_or_one_error(tmp_path, changes):
    try:
        read = read_result(write_content(tmp_path / "a.json", **changes))
    except RopepatchError:
        return
    assert json.loads(read.to_json()) == json.loads((tmp_path / "a.json").read_text())


# rows of losses


def curve(*documents: list[float]) -> LossCurve:
    return LossCurve(tuple(torch.tensor(nll) for nll in documents))


CURVE = curve([1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [0.5])


def test_a_row_of_losses_has_mean_interval_perplexity_and_counts():
    read = CURVE.at(4)  # 1, 2, 3 and 4, 5, 6
    counts = {"tokens": 6, "documents": 2}
    expected = {"nats": 3.5, "interval": [*read.interval], "perplexity": pytest.approx(math.exp(3.5))}
    assert loss_row(read) == expected | counts
    assert 2 <= read.interval[0] <= 3.5 <= read.interval[1] <= 5


def test_what_no_float_holds_is_null():
    unknown = loss_row(CURVE.at(5))  # of one document
    assert (unknown["documents"], unknown["interval"]) == (1, [None, None])
    infinite = loss_row(curve([1000.0], [1000.0]).at(2))
    assert (infinite["nats"], infinite["perplexity"]) == (1000, None)


def test_rows_by_length_are_those_of_the_first_tokens():
    short, long = by_length(CURVE, [2, 4])
    assert short == {"length": 2, **loss_row(CURVE.at(2))}
    assert (long["length"], long["nats"], long["tokens"]) == (4, 3.5, 6)


def test_rows_by_position_are_those_between_neighbouring_edges():
    read = by_position(CURVE, [0, 2, 4, 5])
    assert [(row["begin"], row["end"]) for row in read] == [(0, 2), (2, 4), (4, 5)]
    assert [row["nats"] for row in read] == [5.5 / 3, 4.0, 7.0]
    assert [row["tokens"] for row in read] == [3, 4, 1]
    assert [row["documents"] for row in read] == [3, 2, 1]
    assert by_position(CURVE, [3]) == []


def test_rows_by_document_have_all_its_tokens_in_the_order_of_the_documents():
    assert by_document(CURVE) == [
        {"nats": 6.0, "tokens": 3},
        {"nats": 22.0, "tokens": 4},
        {"nats": 0.5, "tokens": 1},
    ]


def test_the_mean_over_rows_weighs_every_token_alike():
    halves = by_position(CURVE, [0, 2, 5])
    assert mean_nats(halves) == pytest.approx(28.5 / 8, rel=1e-15)
    assert mean_nats(halves) != pytest.approx(sum(row["nats"] for row in halves) / 2)


# rows of passkeys


GRID = PasskeyGrid(
    {
        (256, 0.0): Passkey(8, 10),
        (256, 0.5): Passkey(0, 10),
        (512, 0.0): Passkey(10, 10),
        (512, 0.5): Passkey(3, 20),
    }
)


def test_rows_of_passkeys_have_counts_and_intervals_by_cell_and_of_all_depths_of_a_length():
    assert passkey_cells(GRID) == [
        {"length": length, "depth": depth, "correct": cell.correct, "n": cell.n, "interval": [*cell.interval]}
        for (length, depth), cell in GRID.cells.items()
    ]
    assert passkey_by_length(GRID) == [
        {"length": 256, "correct": 8, "n": 20, "interval": [*Passkey(8, 20).interval]},
        {"length": 512, "correct": 13, "n": 30, "interval": [*Passkey(13, 30).interval]},
    ]


# environment


def test_the_environment_names_versions_device_and_dtype():
    class Stub(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.bfloat16

    assert environment(Stub()) == {  # type: ignore[arg-type]
        "ropepatch": ropepatch.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": "cpu",
        "dtype": "torch.bfloat16",
    }

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ropepatch.errors import RopepatchError
from ropepatch.settings import check_keys, is_count, read_yaml, refuse_unknown


@dataclass
class Recipe:
    name: str
    windows: list[int]
    seed: int = 0
    notes: list[str] = field(default_factory=list)


def read(folder: Path, content: str | bytes) -> object:
    file = folder / "recipe.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_yaml(file, "recipe")


# read_yaml


def test_plain_yaml_is_read(tmp_path):
    content = "# note\nname: é\nwindows: [1, 2]\nnone:\nyes: {a: 1.5, b: [true]}\n"
    assert read(tmp_path, content) == {
        "name": "é",
        "windows": [1, 2],
        "none": None,
        True: {"a": 1.5, "b": [True]},
    }


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text("ab:'- #\n", max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("ab:", max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_written_as_yaml_is_read_back(tmp_path, value):
    assert read(tmp_path, yaml.safe_dump(value)) == value


def test_an_empty_file_holds_nothing(tmp_path):
    assert read(tmp_path, "") is None


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(RopepatchError, match=r"nowhere\.yaml is not a suite: .*No such file"):
        read_yaml(tmp_path / "nowhere.yaml", "suite")
    with pytest.raises(RopepatchError, match=r"is not a suite: .*directory"):
        read_yaml(tmp_path, "suite")


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch [{target}]",
        "!!python/object/new:pathlib.Path [{target}]",
        "!!python/name:pathlib.Path",
        "!!python/module:os",
        "!!python/tuple [1]",
        "!own value",
    ],
)
def test_a_tag_that_is_not_of_plain_yaml_is_refused_and_nothing_is_run(tmp_path, tag):
    target = tmp_path / "made"
    with pytest.raises(RopepatchError, match=r"is not a recipe: could not determine a constructor"):
        read(tmp_path, "name: " + tag.format(target=target))
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        "a: b: c",
        "[1, 2",
        "--- a\n--- b",
        "- a\x00",
        b"caf\xe9",
        "2001-13-45",  # no such month
        "0b_",
        "9" * 5000,
        "!!bool maybe",
        "!!timestamp soon",
        "!!int ''",
        "!!float x",
        "{[1]: 2}",
        "<<: 3",
        "=",
        "[" * 3000,
    ],
)
def test_what_is_no_yaml_is_one_error_on_one_line(tmp_path, content):
    with pytest.raises(RopepatchError, match=r"recipe\.yaml is not a recipe: .") as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 400


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40) | st.text("ab:[]{}!&*<>|-? \n\"'#%@0.e_=~", max_size=30))
@example("&a [*a]")
def test_arbitrary_bytes_are_yaml_or_one_error(tmp_path, content):
    try:
        read(tmp_path, content)
    except RopepatchError as refused:
        message = str(refused)
        assert "\n" not in message


@pytest.mark.parametrize(
    "content", ["a: 1\nb: 2\na: 3", "x: {a: 1, a: 1}", "- {1: a, 1: b}", '"a": 1\na: 2', "? a\n? a\n"]
)
def test_a_key_that_is_given_twice_is_refused_with_its_line(tmp_path, content):
    with pytest.raises(RopepatchError, match=r"[a1] is given twice .*line \d"):
        read(tmp_path, content)


def test_a_merged_key_may_be_given_again_and_counts_once(tmp_path):
    content = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\nd: {<<: [*a, *b]}\n"
    assert read(tmp_path, content) == {
        "a": {"x": 1, "y": 1},
        "b": {"x": 2, "y": 1},
        "c": {"x": 2, "y": 3},
        "d": {"x": 1, "y": 1},
    }


def test_equal_keys_of_different_mappings_or_kinds_are_no_repetition(tmp_path):
    assert read(tmp_path, "a: {b: 1}\nb: {b: 2}\n1: x\n'1': y\n") == {
        "a": {"b": 1},
        "b": {"b": 2},
        1: "x",
        "1": "y",
    }


# check_keys


def test_the_keys_of_the_dataclass_are_accepted_with_or_without_those_that_have_a_default():
    check_keys(Recipe, {"name": "a", "windows": []})
    check_keys(Recipe, {"notes": [], "seed": 1, "windows": [], "name": "a"})


@pytest.mark.parametrize("missing", ["name", "windows"])
def test_a_missing_key_without_a_default_is_named_with_all_there_are(missing):
    given = {"name": "a", "windows": []}
    del given[missing]
    with pytest.raises(RopepatchError, match=f"a recipe must have the key {missing}$") as caught:
        check_keys(Recipe, given)
    assert caught.value.hint == "its keys are name, windows, seed, notes"


def test_an_unknown_key_gives_the_nearest_known_one():
    with pytest.raises(RopepatchError, match="unknown recipe key 'window'") as caught:
        check_keys(Recipe, {"name": "a", "window": []})
    assert caught.value.hint == "did you mean windows?"


@pytest.mark.parametrize("key", [1, None, True, 2.5, ("a",)])
def test_a_key_that_is_no_text_is_unknown(key):
    with pytest.raises(RopepatchError, match="unknown recipe key") as caught:
        check_keys(Recipe, {"name": "a", "windows": [], key: 1})
    assert caught.value.hint == "known: name, windows, seed, notes"


@pytest.mark.parametrize("content", [None, "name", 3, ["name"], [["name", "a"], ["windows", []]]])
def test_what_is_no_mapping_is_refused_and_shown(content):
    with pytest.raises(RopepatchError, match="a recipe must be a mapping, got ") as caught:
        check_keys(Recipe, content)
    assert caught.value.hint == "its keys are name, windows, seed, notes"


BOMB = "- &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)


def test_a_value_that_aliases_made_huge_is_refused_in_a_short_message(tmp_path):
    content = read(tmp_path, BOMB)
    assert isinstance(content, list)
    with pytest.raises(RopepatchError, match="must be a mapping, got") as caught:
        check_keys(Recipe, content)
    assert len(str(caught.value)) < 500
    with pytest.raises(RopepatchError, match="unknown method") as caught:
        refuse_unknown(content[-1:], ["linear"], "method")
    assert len(str(caught.value)) < 500


# refuse_unknown


def test_known_names_pass():
    refuse_unknown([], [], "method")
    refuse_unknown(["yarn", "linear", "yarn"], iter(["linear", "yarn"]), "method")


def test_the_first_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(RopepatchError, match=r"unknown method 'yarm'$") as caught:
        refuse_unknown(["linear", "yarm", "zzz"], ["linear", "yarn"], "method")
    assert caught.value.hint == "did you mean yarn?"


@pytest.mark.parametrize("name", ["zzz", 3, None, ["yarn"], {"yarn": 1}])
def test_a_name_that_is_near_to_none_gives_all_that_are_known(name):
    with pytest.raises(RopepatchError, match="unknown method") as caught:
        refuse_unknown([name], ["linear", "yarn"], "method")
    assert caught.value.hint == "known: linear, yarn"


# is_count


@pytest.mark.parametrize("value", [1, 2, 10**30])
def test_whole_numbers_above_zero_are_counts(value):
    assert is_count(value)


@pytest.mark.parametrize("value", [0, -1, True, False, 1.0, 2.5, "1", None, [1], float("inf")])
def test_everything_else_is_none(value):
    assert not is_count(value)

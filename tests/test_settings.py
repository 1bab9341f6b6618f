"""Validation of user input: valid values, and one-line errors that name the key."""

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
import yaml
from pydantic import Discriminator, Tag

from ropepatch.errors import RopepatchError
from ropepatch.settings import (
    Amount,
    Count,
    Length,
    PartShare,
    Settings,
    Several,
    Share,
    Text,
    Weight,
    Whole,
    parse_length,
    read_yaml,
    refuse_unknown,
    short_length,
    shown,
    yaml_text,
)


class Book(Settings):
    """A source of text."""

    text: Text
    weight: Amount = 1.0


class Song(Settings):
    """Another source."""

    tune: Literal["waltz", "march"]


Source = Annotated[
    Annotated[Book, Tag("Book")] | Annotated[Song, Tag("Song")],
    Discriminator(
        lambda content: (
            "Song" if isinstance(content, dict) and "tune" in content else "Book"
        )
    ),
]


class DemoRecipe(Settings):
    """Every kind of value; one key is named as a method of mappings is."""

    sources: Several[Source]
    count: Count = 1
    whole: Whole = 0
    rate: Amount = 1.0
    floor: Weight = 0.0
    share: Share = 0.5
    part: PartShare = 0.5
    lengths: tuple[Length, ...] | None = None
    keys: tuple[str, ...] = ()
    shares: dict[str, Amount] | None = None
    flag: bool = False
    save: Literal["merged", "adapter"] = "merged"
    even: Several[Count] | Literal["none"] = "none"
    free: Any = None

    def check(self):
        if self.flag and self.count == 13:
            raise RopepatchError("13 flags bring bad luck", hint="count: 12")


class Shelf(Settings):
    """Recipes within another."""

    recipes: tuple[DemoRecipe, ...]


ONE = {"text": "books"}
ONE_RECIPE = {"sources": [ONE]}
UNLUCKY = ONE_RECIPE | {"flag": True, "count": 13}


def demo(**changes):
    return DemoRecipe.model_validate({"sources": [ONE]} | changes)


def rejected(kind, content):
    with pytest.raises(RopepatchError) as caught:
        kind.model_validate(content)
    message = str(caught.value)
    assert "\n" not in message + (caught.value.hint or "")
    assert len(message) < 400
    return message, caught.value.hint


def read(folder, content):
    file = folder / "recipe.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_yaml(file, "recipe")


# Settings


def test_values_are_not_converted_except_lists_to_tuples():
    lists = {"lengths": ["4x", 512, "32k"], "keys": ["b"], "even": [2, 4]}
    recipe = demo(rate=2, floor=0, shares={"a": 1}, **lists)
    assert recipe.sources == (Book(text="books"),)
    assert recipe.rate == 2.0
    assert recipe.lengths == ("4x", 512, "32k")
    assert recipe.model_dump()["shares"] == {"a": 1}
    assert recipe.even == (2, 4)


def test_a_copy_with_other_values_is_validated():
    recipe = demo(keys=["a"])
    assert recipe.model_copy(update={"count": 3}) == demo(keys=["a"], count=3)
    with pytest.raises(RopepatchError, match="count must be greater than 0, got 0"):
        recipe.model_copy(update={"count": 0})
    with pytest.raises(RopepatchError, match="unknown demo recipe key 'cuont'"):
        recipe.model_copy(update={"cuont": 3})


@pytest.mark.parametrize(
    ("key", "wrong", "wanted"),
    [
        ("count", (0, -1), "be greater than 0"),
        ("count", (True, 1.0, "1", None, math.inf), "be a valid integer"),
        ("whole", (-1,), "be greater than or equal to 0"),
        ("rate", (0, -0.1), "be greater than 0"),
        ("rate", (True, "3", None, 10**400), "be a valid number"),
        ("rate", (math.inf, math.nan), "be a finite number"),
        ("floor", (-0.1,), "be greater than or equal to 0"),
        ("share", (1.1,), "be less than or equal to 1"),
        ("part", (1,), "be less than 1"),
        ("lengths", ("4k",), "be a valid list"),
        ("shares", ((1,),), "be a valid mapping"),
        ("flag", (1,), "be a valid boolean"),
        ("save", ("mergd",), "be 'merged' or 'adapter'"),
        ("even", (3,), "be a valid list or be 'none'"),
        ("sources", ((),), "have at least 1 item after validation, not 0"),
    ],
)
def test_the_error_of_an_invalid_value_states_both(key, wrong, wanted):
    for value in wrong:
        message, _ = rejected(DemoRecipe, {"sources": [ONE], key: value})
        assert message == f"{key} must {wanted}, got {shown(value)}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lengths": [64, "-1k"]},
            "lengths[1] must be a length in tokens (4096, 32k or 4x), got '-1k'",
        ),
        ({"keys": ["a", 2]}, "keys[1] must be a valid string, got 2"),
        ({"shares": {"a": 1, "b": 0}}, "shares.b must be greater than 0, got 0"),
        ({"shares": {"a b": 0}}, "shares['a b'] must be greater than 0, got 0"),
        ({"sources": [ONE, 3]}, "sources[1] must be a valid mapping, got 3"),
        (
            {"sources": [ONE, {"text": ""}]},
            "sources[1].text must have at least 1 character, got ''",
        ),
        (
            {"sources": [ONE, ONE | {"weight": 0}]},
            "sources[1].weight must be greater than 0, got 0",
        ),
        (
            {"sources": [{"tune": "valse"}]},
            "sources[0].tune must be 'waltz' or 'march', got 'valse'",
        ),
        ({"sources": [ONE, {"weight": 2}]}, "demo recipe needs sources[1].text"),
        (
            {"sources": [ONE, ONE | {"wieght": 2}]},
            "unknown demo recipe key 'sources[1].wieght'",
        ),
    ],
)
def test_the_error_of_a_nested_value_names_its_key(changes, message):
    assert rejected(DemoRecipe, {"sources": [ONE]} | changes)[0].startswith(message)


@pytest.mark.parametrize(
    ("kind", "content", "message", "hint"),
    [
        (Book, {"txt": "a"}, "unknown book key 'txt'", "did you mean text?"),
        (
            Book,
            {"text": "a", "colour": 1},
            "unknown book key 'colour'",
            "keys: text, weight",
        ),
        (Book, {"text": "a", 1: 2}, "unknown book key '[1]'", "keys: "),
        (Book, {}, "book needs text", "keys: text, weight"),
        (Book, None, "book must be a valid mapping, got None", None),
        (
            Shelf,
            {"recipes": [ONE_RECIPE, UNLUCKY]},
            "13 flags bring bad luck",
            "count: 12",
        ),
        (
            Shelf,
            {"recipes": [ONE_RECIPE | {"cuont": 1}]},
            "unknown shelf key 'recipes[0].cuont'",
            "did you mean count?",
        ),
    ],
)
def test_hints_suggest_similar_names(kind, content, message, hint):
    said, hinted = rejected(kind, content)
    assert said == message
    assert (hinted or "").startswith(hint or "")


@pytest.mark.parametrize(
    "content",
    [
        "- &a0 [x, x]\n- &a1 [*a0, *a0]\n- [*a1, *a1]",
        "- &a0 {k: 1}\n- {<<: *a0}",
        "{text: a, weight: &a [*a]}",
    ],
)
def test_yaml_aliases_are_refused_before_they_multiply(tmp_path, content):
    with pytest.raises(RopepatchError, match=r"aliases are not read .* line \d"):
        read(tmp_path, content)


def test_numbers_and_truth_values_are_those_of_yaml_1_2(tmp_path):
    written = (
        "[017, 2e-5, 1., .inf, true, NULL, 1:30, 1_000, 0b1, yes, 2020-01-01, '=']"
    )
    read_back = read(tmp_path, written)
    assert read_back[:6] == [17, 2e-5, 1.0, math.inf, True, None]
    assert read_back[6:] == ["1:30", "1_000", "0b1", "yes", "2020-01-01", "="]
    assert read(tmp_path, yaml_text(read_back)) == read_back
    assert yaml.safe_load(yaml_text(read_back)) == read_back


@pytest.mark.parametrize("number", [Fraction(5, 2), np.float16(2.5), torch.tensor(2.5)])
def test_a_number_of_another_library_becomes_a_float(number):
    assert type(demo(rate=number).rate) is float
    assert demo(rate=number).rate == 2.5


@pytest.mark.parametrize(
    "number",
    [10**400, 10**5000, torch.tensor(2.0, device="meta")],
    ids=["400 digits", "5000 digits", "meta"],
)
@pytest.mark.parametrize("key", ["count", "rate"])
def test_a_number_without_a_value_for_its_key_is_refused(key, number):
    with pytest.raises(RopepatchError, match=f"{key} must be "):
        demo(**{key: number})


def test_every_error_of_a_yaml_file_names_it(tmp_path):
    file = tmp_path / "demo.yaml"
    file.write_text("sources: [{text: a}]\ncount: 3\n")
    assert DemoRecipe.from_yaml(file) == demo(sources=[{"text": "a"}], count=3)
    file.write_text("sources: [{text: a, weight: no}]\n")
    message = r"demo\.yaml: sources\[0\]\.weight must be a valid number, got"
    with pytest.raises(RopepatchError, match=message):
        DemoRecipe.from_yaml(file)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "4.5k", "k", "32kb", "1e3", "٣", "9" * 30]
)
def test_invalid_lengths_are_rejected(text):
    with pytest.raises(RopepatchError, match="not a length"):
        parse_length(text)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(1, "1"), (1000, "1000"), (1536, "1536"), (32768, "32k"), (3 << 20, "3m")],
)
def test_a_short_length_has_the_largest_dividing_unit(tokens, text):
    assert short_length(tokens) == text
    assert parse_length(text) == tokens


# read_yaml


def test_errors_of_a_missing_file_and_folder_name_them(tmp_path):
    places = {tmp_path / "nowhere.yaml": "No such file", tmp_path: "directory"}
    for file, why in places.items():
        message = rf"{file.name} is not a suite: .*{why}"
        with pytest.raises(RopepatchError, match=message):
            read_yaml(file, "suite")


NO_YAML = ["- a\x00", b"caf\xe9", "9" * 5000, "!!bool maybe", "{[1]: 2}", "[" * 1200]
RUNS = ["!!python/object/apply:pathlib.Path.touch [made]", "!own value"]
TWICE = ["a: 1\nb: 2\na: 3", "x: {a: 1, a: 1}", "- {1: a, 1: b}", "? a\n? a\n"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((content, "") for content in NO_YAML),
        *((f"name: {tag}", "could not determine a constructor") for tag in RUNS),
        *((content, r".*[a1] is given twice .* line \d") for content in TWICE),
    ],
)
def test_invalid_yaml_raises_a_one_line_error_and_runs_nothing(
    tmp_path, monkeypatch, content, why
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RopepatchError, match=rf"recipe\.yaml is not a recipe: .*{why}"
    ) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 400
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


# refuse_unknown


@pytest.mark.parametrize(
    ("names", "first", "hint"),
    [
        (["linear", "yarm", "zzz"], "'yarm'", "did you mean yarn?"),
        *(([name], "", "known: linear, yarn") for name in ("zzz", 3, ["yarn"])),
    ],
)
def test_the_error_of_an_unknown_name_suggests_the_nearest(names, first, hint):
    refuse_unknown(["yarn", "linear", "yarn"], iter(["linear", "yarn"]), "method")
    with pytest.raises(RopepatchError, match=f"unknown method {first}") as caught:
        refuse_unknown(names, ["linear", "yarn"], "method")
    assert caught.value.hint == hint

import random
from textwrap import dedent

import pytest

from ropepatch.data.prompts import PasskeyTemplate
from ropepatch.data.templates import NAMED, bundled, read_template
from ropepatch.errors import RopepatchError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"needle": "The pass key is {code}."}, r"needle must be a text with \{key\}, got 'The pass key is"),
        ({"filler": ("So it goes.", " ")}, r"filler\[1\] must be a text that is not blank, got ' '"),
        ({"question": "The pass key:\n"}, "question must be a text that ends in a word"),
        ({"question": "And {name} has"}, r"must both hold \{name\}, or neither"),
        ({"needle": "{name} has {key}."}, r"must both hold \{name\}, or neither"),
        ({"separator": "\n\n"}, "separator must be a space or a line break, got"),
        ({"keys": (5, 1)}, r"keys must be the least and the greatest key, got \(5, 1\)"),
        ({"keys": (-1, 5)}, "keys must be the least and the greatest key"),
        ({"names": ("Ann", "Bob", "Ann")}, "the names must differ, got 'Ann' twice"),
        ({"answer_tokens": 5}, "parse and answer_tokens belong together, got None and 5"),
        ({"parse": "(", "answer_tokens": 5}, r"parse is no regular expression: '\('"),
    ],
)
def test_a_template_that_asks_for_nothing_is_refused(words, message):
    with pytest.raises(RopepatchError, match=message) as refusal:
        PasskeyTemplate(**words)
    assert "\n" not in str(refusal.value)


# Keys


def test_keys_are_all_texts_of_so_many_digits_or_all_whole_numbers_of_a_range():
    draw = random.Random(1)
    for words, keys in (
        (PasskeyTemplate(digits=2), {f"{key:02}" for key in range(100)}),
        (PasskeyTemplate(keys=(8, 12), digits=5), {"8", "9", "10", "11", "12"}),
    ):
        assert {words.draw_key(draw) for _ in range(2000)} == keys
        assert words.num_keys == len(keys)


# The digest


def test_the_digest_of_the_bundled_template_is_the_same_in_every_process():
    assert PasskeyTemplate().digest == "cf631617c79772a4"


def test_distractors_bring_the_bundled_template_with_names_of_which_none_is_part_of_another():
    assert bundled(distractors=0) == PasskeyTemplate()
    assert bundled(distractors=3) == NAMED
    assert "{name}" in NAMED.needle
    assert len(NAMED.names) == 64
    assert not [(a, b) for a in NAMED.names for b in NAMED.names if a != b and a in b]


# Files


def test_the_example_of_the_documentation_is_read_and_what_a_file_leaves_out_is_bundled(tmp_path):
    file = tmp_path / "letter.yaml"
    example = dedent(read_template.__doc__.partition("Example::\n")[2].partition("Raises:")[0])
    file.write_text(example)
    assert read_template(file) == PasskeyTemplate(
        intro="A number is hidden in this letter. You will be asked for it.",
        filler=("It rained all day.", "We stayed at home."),
        needle="The number is {key}.",
        question="Which number was it? It was",
        separator="\n",
        keys=(1, 50000),
        parse=r"\d+",
        answer_tokens=8,
    )
    file.write_text("digits: 3")
    assert read_template(file) == PasskeyTemplate(digits=3)


def test_a_file_with_digits_and_keys_is_refused_with_its_name(tmp_path):
    file = tmp_path / "words.yaml"
    file.write_text("digits: 4\nkeys: [1, 9]")
    with pytest.raises(RopepatchError, match=f"^{file}: a template has digits or keys, got both"):
        read_template(file)

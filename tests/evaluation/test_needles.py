import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passkey_cases import ACCENTED, DETERMINISTIC, TOKENIZERS, Known, read, reading, spaceless
from transformers import PreTrainedTokenizerFast

from ropepatch.data.prompts import Needle, Prompt, needle_prompt, passkey_prompt
from ropepatch.data.templates import NAMED, PasskeyTemplate
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.passkey import Passkey, draw_needles, passkey
from ropepatch.evaluation.results import passkey_by_length
from ropepatch.settings import seed_of

FRENCH = ACCENTED.model_copy(
    update={
        "needle": "La clé de {name} est {key} ; retenez-la — {key}.",
        "question": "Quelle est la clé de {name} ? La voilà",
        "names": ("Zoé", "Noël", "l'ânier", "la bête"),
    }
)
LINES = NAMED.model_copy(update={"separator": "\n"})


def ask(tokenizer: PreTrainedTokenizerFast, words: PasskeyTemplate, **asked: object) -> Prompt:
    return needle_prompt(tokenizer, template=words, **asked)


# Drawing


@DETERMINISTIC
@given(seed=st.integers(0, 2**64 - 1), distractors=st.integers(0, 40), depth=st.floats(0, 1))
def test_no_two_needles_have_the_same_key_or_name_and_the_first_is_at_the_depth(seed, distractors, depth):
    needles = draw_needles(NAMED.model_copy(update={"keys": (1, 41)}), depth, distractors, seed)
    assert len(needles) == distractors + 1
    assert len({needle.key for needle in needles}) == len({needle.name for needle in needles}) == len(needles)
    assert needles[0].depth == depth
    assert all(0 <= needle.depth <= 1 for needle in needles)


def test_distractors_are_anywhere():
    places = [needle.depth for seed in range(300) for needle in draw_needles(NAMED, 0.5, 3, seed)[1:]]
    tenths = Counter(int(10 * place) for place in places)
    assert set(tenths) == set(range(10))
    assert max(tenths.values()) < 2 * min(tenths.values())


def test_the_key_asked_for_is_the_same_with_distractors_and_without():
    for seed in range(20):
        assert (
            draw_needles(NAMED, 0.5, 4, seed)[0].key == draw_needles(PasskeyTemplate(), 0.5, 0, seed)[0].key
        )


# Prompts


@pytest.mark.parametrize("words", [NAMED, LINES, FRENCH], ids=["named", "lines", "french"])
@pytest.mark.parametrize("name", ["bundled", "llama3", "gpt2", "single_bytes", "metaspace", "llama2"])
def test_a_prompt_with_distractors_has_its_length_every_needle_once_and_the_answers_in_order(name, words):
    tokenizer, draw = TOKENIZERS[name](), random.Random(7)
    for _ in range(6):
        needles = draw_needles(words, draw.random(), 3, draw.getrandbits(64))
        queries = draw.randint(1, 4)
        length = draw.randint(900, 1800)
        prompt = ask(tokenizer, words, length=length, needles=needles, queries=queries)
        assert len(prompt.ids) == length
        text = read(tokenizer, prompt.ids)
        said = [needle_text(words, needle) for needle in needles]
        assert [text.count(sentence) for sentence in said] == [1] * 4
        for (begin, end), sentence in zip(prompt.needles, said, strict=True):
            # A token may join the line break to the full stop before it.
            assert read(tokenizer, prompt.ids[begin:end]).lstrip(".…\n") == sentence
        assert [read(tokenizer, prompt.ids[slice(*span)]) for span in prompt.answers] == list(prompt.keys)
        assert list(prompt.keys) == [needle.key for needle in needles[:queries]]
        assert prompt.answers[-1][1] == length
        questions = text[text.rindex(said[-1]) :] if queries == 1 else text
        asked = [spaceless(words.question.replace("{name}", n.name)) + n.key for n in needles[:queries]]
        assert questions.endswith(spaceless(words.separator).join(asked))


def needle_text(words: PasskeyTemplate, needle: Needle) -> str:
    return spaceless(words.needle.replace("{name}", needle.name).replace("{key}", needle.key))


@pytest.mark.parametrize("name", ["bundled", "spanning"])
def test_what_is_left_out_is_never_part_of_a_needle(name):
    tokenizer = TOKENIZERS[name]()
    depths = (0.5, 0.0, 0.01, 0.02, 0.0)
    needles = [Needle(f"4821{at}", depth, "mill"[:at]) for at, depth in enumerate(depths)]
    for length in range(400, 700, 7):
        prompt = ask(tokenizer, NAMED, length=length, needles=needles)
        text = read(tokenizer, prompt.ids)
        assert len(prompt.ids) == length
        assert [text.count(needle_text(NAMED, needle)) for needle in needles] == [1] * 5


def test_each_needle_has_its_share_of_the_filler_before_it(tokenizer):
    for seed in range(20):
        needles = draw_needles(NAMED, 0.25, 3, seed)
        prompt = ask(tokenizer, NAMED, length=900, needles=needles)
        sentences = prompt.sentences[:-1]
        for needle, (begin, _) in zip(needles, prompt.needles, strict=True):
            before = sum(start < begin for start in sentences)
            assert abs(before - needle.depth * len(sentences)) <= 0.5


def test_a_template_with_names_needs_needles_with_names(tokenizer):
    with pytest.raises(RopepatchError, match="the question needs a name") as refusal:
        passkey_prompt(tokenizer, length=400, depth=0.5, key="48213", template=NAMED)
    assert "needle_prompt" in refusal.value.hint


# Models whose score is known


def attentive(ids: list[int]) -> list[int]:
    """After every token: what followed the longest stretch before that ends as the text does now."""
    tokens = np.array(ids)
    alike = np.zeros(len(ids), dtype=int)  # how long a stretch ends alike here and at every token
    said = []
    for end in range(len(ids)):
        alike = np.where(tokens == tokens[end], np.append(0, alike[:-1]) + 1, 0)
        said.append(ids[alike[:end].argmax() + 1] if end else 0)
    return said


GRID = {"lengths": (480, 700), "depths": (0.0, 0.4, 1.0), "trials": 4, "distractors": 3}


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_a_model_that_reads_the_names_gets_every_key(tokenizer, queries):
    grid = passkey(Known(attentive), tokenizer, queries=queries, **GRID)
    assert set(grid.cells.values()) == {Passkey(4 * queries, 4 * queries)}


def says_key(tokenizer: PreTrainedTokenizerFast, number: int) -> Callable[[list[int]], list[int]]:
    """Answers with the key of the needle that stands so many from the beginning, whoever is asked for."""
    (digit_zero,) = tokenizer.convert_tokens_to_ids(["0"])
    digits = {digit_zero + value for value in range(10)}

    def says(ids: list[int]) -> list[int]:
        runs = "".join("d" if token in digits else " " for token in ids)
        begins = [at for at in range(1, len(ids)) if runs[at - 1 : at + 5] == " ddddd"]
        begin = begins[2 * number]  # each needle says its key twice
        said = [0] * len(ids)
        for at in begins:
            said[at - 2 : at + 4] = ids[begin - 1 : begin + 5]
        return said

    return says


@pytest.mark.parametrize("number", range(4))
def test_a_model_that_says_the_key_of_one_needle_is_right_only_where_that_is_asked_for(tokenizer, number):
    with reading(model := Known(says_key(tokenizer, number))) as rows:
        grid = passkey(model, tokenizer, **GRID)
    expected = defaultdict(list)  # of every trial, in their order
    for cell, trial in product(grid.cells, range(4)):
        needles = draw_needles(NAMED, cell[1], 3, seed_of("passkey", 0, *cell, trial))
        order = sorted(needles, key=lambda needle: needle.depth)
        expected[cell].append(int(order[number] is needles[0]))
    assert {cell: [*read.found] for cell, read in grid.cells.items()} == expected
    assert {cell: read.correct for cell, read in grid.cells.items()} == {
        cell: sum(trials) for cell, trials in expected.items()
    }
    kept = {row["length"]: row["found"] for row in passkey_by_length(grid)}
    assert kept == {
        length: [said for depth in GRID["depths"] for said in expected[length, depth]]
        for length in GRID["lengths"]
    }
    assert len(rows) == 24
    assert 0 < sum(map(sum, expected.values())) < 24


@pytest.mark.parametrize("right", range(4))
def test_each_answer_counts_by_itself_after_the_true_ones_before_it(tokenizer, right):
    queries = 4
    spans = {}
    for length, depth, trial in product(GRID["lengths"], GRID["depths"], range(4)):
        needles = draw_needles(NAMED, depth, 3, seed_of("passkey", 0, length, depth, trial))
        prompt = ask(tokenizer, NAMED, length=length, needles=needles, queries=queries)
        spans[tuple(prompt.ids.tolist())] = prompt.answers

    def says(ids: list[int]) -> list[int]:
        begin, end = spans[tuple(ids)][right]
        said = [0] * len(ids)
        said[begin - 1 : end - 1] = ids[begin:end]
        return said

    grid = passkey(Known(says), tokenizer, queries=queries, **GRID)
    assert set(grid.cells.values()) == {Passkey(4, 16)}
    assert {(*row["found"], row["wanted"]) for row in passkey_by_length(grid)} == {(*[1] * 12, 4)}


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_answers_of_different_numbers_of_tokens_count_in_one_batch(name):
    tokenizer = TOKENIZERS[name]()
    model = Known(attentive, len(tokenizer))
    grid = passkey(model, tokenizer, tokens_per_batch=10**6, queries=3, **(GRID | {"lengths": [1500]}))
    assert grid.at(1500) == Passkey(36, 36)

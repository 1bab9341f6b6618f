"""Every stated token probability of a synthetic story equals a brute-force oracle; passkey prompts."""

import math
from collections import Counter

import pytest
import torch
from tale_oracle import Stories
from transformers import PreTrainedTokenizerFast

from ropepatch.data.tiny.grammar import BOS, KINDS, Sentence
from ropepatch.data.tiny.passkey import PASSKEY, passkey_prompt
from ropepatch.data.tiny.tales import Narrator
from ropepatch.errors import RopepatchError

EXACT = 1e-9
CODES = ("00", "01", "10", "11")


def fact(text, share, subject, values=()):
    return Sentence(text, share, subject, tuple(values))


HOUSE = "{value} came home, and all the house of {value} greets"
SENT = "since there is but one {value} called"
FEW = [
    fact(f"Anna {HOUSE} Anna.", 0.3, "Anna", ["Birk", "Dell"]),
    fact(f"They sent for Anna {{value}}, {SENT} Anna.", 0.1, "Anna", ["Birk", "Dell"]),
    fact(
        "Chest red {value} is shut, and only {value} opens chest red.",
        0.25,
        "red",
        CODES,
    ),
    fact(
        "To open chest red {value} is dialled, so keep {value} for chest red.",
        0.1,
        "red",
        CODES,
    ),
    fact(
        "The fox {value} sleeps by the fire, for {value} is an old fox.",
        0.15,
        "fox",
        ["Argo", "Bruno"],
    ),
    fact("Rain falls on the roofs.", 0.1, None),
]


@pytest.fixture(scope="module")
def narrator(tokenizer):
    return Narrator(tokenizer)


def off(document, oracle):
    """The largest difference between the stated log-probabilities of a document and those of an oracle."""
    found = torch.tensor(oracle.log_probs(document.ids.tolist()), dtype=torch.float64)
    return (document.log_probs() - found).abs().max().item()


def test_story_probabilities_equal_those_of_all_sentences_with_all_values(
    narrator, tokenizer
):
    sentences = [
        (form.replace("{subject}", subject), share, subject, kind.values)
        for kind in KINDS
        for share in [kind.share / len(kind.subjects) / len(kind.forms)]
        for subject in kind.subjects
        for form in kind.forms
    ]
    oracle = Stories(tokenizer, sentences)
    assert all(off(narrator.tale(300, seed), oracle) < EXACT for seed in range(2))


def test_probabilities_of_small_stories_equal_those_of_all_sentences(tokenizer):
    few = Narrator(tokenizer, FEW)
    oracle = Stories(tokenizer, [(s.text, s.share, s.subject, s.values) for s in FEW])
    assert all(off(few.tale(70, seed), oracle) < EXACT for seed in range(3))


def test_each_recorded_distance_points_back_to_the_repeated_token(narrator):
    tale = narrator.tale(2000, seed=5)
    ids, distance = tale.ids.tolist(), tale.distance.tolist()
    repeats = [at for at, back in enumerate(distance) if back]
    assert len(repeats) > 20
    assert all(ids[at] == ids[at - distance[at]] for at in repeats)


def test_story_probabilities_sum_to_one_and_match_sampled_frequencies(tokenizer):
    few = Narrator(tokenizer, FEW)
    stated, drawn = {}, Counter()
    for document in (few.tale(14, seed) for seed in range(4000)):
        key = tuple(document.ids.tolist())
        stated[key] = document.log_probs().sum().exp().item()
        drawn[key] += 1
    assert sum(stated.values()) == pytest.approx(1, abs=1e-9)
    square = sum((drawn[key] - 4000 * p) ** 2 / (4000 * p) for key, p in stated.items())
    freedom = len(stated) - 1
    assert freedom > 10
    assert abs(square - freedom) < 5 * math.sqrt(
        2 * freedom
    )  # five standard deviations of chi squared


@pytest.mark.parametrize("length", [1, 2, 3, 11, 12, 100, 1025])
def test_a_story_is_a_prefix_of_longer_ones(narrator, length):
    document, longer = narrator.tale(length, 3), narrator.tale(2 * length + 1, 3)
    assert torch.equal(document.ids, longer.ids[:length])
    assert torch.equal(document.log_probs(), longer.log_probs()[:length])
    assert document.ids[0] == BOS


def test_generated_token_ids_equal_those_of_their_decoded_text(narrator, tokenizer):
    for ids in (narrator.tale(500, 0).ids, passkey_prompt(tokenizer, 199, seed=1)):
        text = tokenizer.decode(ids[1:])
        assert tokenizer(text).input_ids == ids.tolist()


@pytest.mark.parametrize("length", [67, 68, 111, 230])
def test_a_passkey_prompt_has_its_length_and_parts_in_order(tokenizer, length):
    text = tokenizer.decode(passkey_prompt(tokenizer, length, seed=length)[1:])
    assert len(passkey_prompt(tokenizer, length, seed=length)) == length
    key = text[-PASSKEY.digits :]
    assert key.isdigit()
    needle = f" {PASSKEY.needle.replace('{key}', key)}"
    assert text.startswith(PASSKEY.intro)
    assert text.count(needle) == 1
    question = " ".join(["", *PASSKEY.question, key])
    assert text.endswith(question)
    rest = text.replace(needle, "").removeprefix(PASSKEY.intro).removesuffix(question)
    assert (" " + " ".join(PASSKEY.filler * 20)).endswith(rest)
    with pytest.raises(
        RopepatchError, match="a passkey prompt of 66 tokens has no room"
    ) as caught:
        passkey_prompt(tokenizer, 66, seed=0)
    assert "the shortest takes 67 tokens" in caught.value.hint


# What the probabilities need of the grammar and of the tokenizer


def test_tokenizers_that_join_words_or_lack_bos_are_refused(tokenizer):
    joined = fact("Anna said {value}re, {value}re is Anna.", 1.0, "Anna", ["the"])
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    for arguments in ((tokenizer, [joined]), (without,)):
        with pytest.raises(RopepatchError, match="does not split ' Anna"):
            Narrator(*arguments)

"""Haystacks: their text, the depths of their needles, and their questions."""

import re
from collections import Counter
from itertools import chain, pairwise

import pytest
import torch
from tokenizer_makes import TOKENIZERS, whole_words

from ropepatch.data.haystack import (
    DEFAULT,
    FACTS,
    GIVEN,
    INTRO,
    PASSKEY,
    PEOPLE,
    QUOTED,
    Haystacks,
    sentences,
)
from ropepatch.data.texts import digest
from ropepatch.errors import RopepatchError

LENGTHS = [600, 900, 1900]
FITTING = ["bundled", "llama3", "gpt2", "neox", "metaspace", "llama2", "whole_words"]
NOVEL = (
    "It was late. The old man's boat (a skiff) lay still; nobody came! Où est-il ? "
    * 40
)


SETTINGS = {"lengths": LENGTHS, "count": 3, "keys": 3}


@pytest.fixture(scope="module")
def novel(shared):
    file = shared / "texts" / "novels" / "Chesterton_Thursday_1908.txt"
    return file.read_text(encoding="utf-8")


def haystacks_of(**changes):
    return Haystacks(**SETTINGS | {"kinds": DEFAULT} | changes)


def made(name="bundled", **changes):
    return list(haystacks_of(**changes).make(TOKENIZERS[name]()))


def plain(*texts):
    """Texts without spaces, which some tokenizers do not restore."""
    return re.sub(r"\s", "", "".join(texts)).lower()


def written(name, ids):
    return plain(TOKENIZERS[name]().decode(ids))


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        *((name, None) for name in FITTING),
        *((name, [NOVEL]) for name in ("bundled", "llama2", "single_bytes")),
    ],
)
def test_the_longest_prompt_is_exact_and_needles_end_as_recorded(name, texts):
    lengths = [5 * length for length in LENGTHS] if name == "single_bytes" else LENGTHS
    for haystack in made(name, lengths=lengths, texts=texts, count=1):
        longest = max(map(len, chain(*haystack.asked.values())))
        assert len(haystack.ids) == max(haystack.stops.values())
        for length in lengths:
            stop, questions = haystack.stops[length], haystack.asked[length]
            assert stop + longest == length
            assert Counter(question.kind for question in questions) == dict.fromkeys(
                DEFAULT, 3
            )
            for question in questions:
                assert question.end <= stop
                answer = written(name, question.answer)
                before = written(name, haystack.ids[: question.end])
                assert answer in before
                assert answer not in written(name, haystack.ids[question.end :])
                stem = (
                    written(name, question.ids)
                    .rpartition("?")[2]
                    .rpartition("again.")[2]
                )
                direct = question.kind in ("number", "sentence")
                assert before.endswith(f"{stem}{answer}." if direct else ".")


@pytest.mark.parametrize("name", FITTING)
def test_single_key_prompts_are_passkey_prompts_of_exactly_the_length(name):
    lengths = [150, 151, 290]
    haystacks = made(name, lengths=lengths, keys=1, kinds=("passkey",), count=2)
    assert [list(haystack.stops) for haystack in haystacks] == [
        [n] for n in lengths for _ in range(2)
    ]
    for haystack in haystacks:
        ((length, (question,)),) = haystack.asked.items()
        prompt = torch.cat([haystack.ids, question.ids, question.answer])
        assert len(prompt) == length
        text, key = written(name, prompt), written(name, question.answer)
        assert len(key) == 5
        assert text.endswith(plain(*PASSKEY.question, key))
        before, after = text.split(plain(PASSKEY.needle.replace("{key}", key)))
        body = (before.partition(plain(PASSKEY.intro))[2] + after).partition("whatis")
        assert plain(*PASSKEY.filler * 9).endswith(body[0])
        assert TOKENIZERS[name]().bos_token_id in (None, *prompt[:1].tolist())


@pytest.mark.parametrize("lengths", [[1900], [600, 900, 1900], [600, 640, 700, 1900]])
def test_needles_cover_every_fifth_of_the_prompt_at_every_length(lengths):
    haystacks = made(lengths=lengths, keys=5, kinds=("number",), count=8)
    for length in lengths:
        needles = [
            (question.end, h.stops[length])
            for h in haystacks
            for question in h.asked[length]
        ]
        fifths = Counter(min(4, 5 * end // stop) for end, stop in needles)
        assert len(fifths) == 5, fifths
        assert min(fifths.values()) >= 3, fifths  # of 40 answers; 8 are expected


def test_single_needles_are_spread_over_all_depths_at_every_length():
    haystacks = made(lengths=[400, 800], keys=1, kinds=("passkey",), count=10)
    for group in (haystacks[:10], haystacks[10:]):
        depths = [
            question.end / len(h.ids) for h in group for (question,) in h.asked.values()
        ]
        assert depths == sorted(depths)
        assert max(b - a for a, b in zip([0, *depths], [*depths, 1], strict=True)) < 0.3


def test_haystacks_are_distinct_and_do_not_depend_on_their_number():
    haystacks = [*made(), *made(seed=1)]
    assert len({digest([haystack.ids]) for haystack in haystacks}) == 6
    assert digest(h.ids for h in made(count=2)) == digest(h.ids for h in made()[:2])


def test_haystacks_of_a_seed_keep_their_recorded_digests():
    one = made(lengths=[128, 256], keys=1, kinds=("passkey",))
    recorded = made(kinds=("number", "sentence"))  # those of eval/results
    for haystacks, expected in (
        (made(), "dfa7e9118a9d8fa9"),
        (recorded, "243647a71043530e"),
        (one, "3884c2f393fce5f0"),
    ):
        ids = [haystack.ids for haystack in haystacks]
        for haystack in haystacks:
            ids += [one.ids for one in chain(*haystack.asked.values())]
        assert digest(ids)[:16] == expected


def test_no_fact_shares_a_word_with_a_question():
    common = {"who", "has", "the", "from", "and", "was", "for", "with", "all"}

    def stems(text):
        words = re.findall(r"[a-z]{3,}", text.replace("{name}", "").lower())
        return {word[:4] for word in words} - common

    facts, questions = (
        set().union(*map(stems, part)) for part in zip(*FACTS, strict=True)
    )
    assert not facts & questions
    assert all(stems(question) for _, question in FACTS)
    assert stems("{name} sells honey.") & questions  # a shared word would be found
    assert len({question for _, question in FACTS}) == len(FACTS) == len({*PEOPLE})


def test_default_kinds_that_do_not_fit_are_named():
    kept, left_out = Haystacks.by_default(whole_words(digits=""), 600, **SETTINGS)
    assert (kept.kinds, list(left_out)) == (("fact",), ["number", "sentence", "chain"])
    assert "cannot write a question of the kind chain" in left_out["chain"]
    kept, left_out = Haystacks.by_default(TOKENIZERS["bundled"](), 300, **SETTINGS)
    assert (kept.kinds, kept.lengths) == (("number", "sentence", "fact"), LENGTHS)
    assert "300 tokens has no room" in left_out["chain"]
    kept, left_out = Haystacks.by_default(
        TOKENIZERS["bundled"](), 9000, **SETTINGS | {"keys": 33}
    )
    assert (
        left_out["sentence"]
        == "33 keys of the kind sentence take 61 at these lengths, there are 52"
    )
    with pytest.raises(RopepatchError, match="kind number"):
        Haystacks.by_default(whole_words(digits=""), 30, **SETTINGS)


def test_each_haystack_uses_one_of_the_user_texts_as_filler():
    texts = ["One fish swam off. " * 300, "Two birds sang on. " * 300]
    for index, haystack in enumerate(made(texts=texts, kinds=("number",))):
        words = Counter(TOKENIZERS["bundled"]().decode(haystack.ids).split())
        found = [words["fish"] > 50, words["birds"] > 50]
        assert found == [index % 2 == 0, index % 2 == 1]
        assert not words["fish"] or not words["birds"]
    long = "Eins zwei drei vier. " * 3 + "x" * 1500
    sizes = [*map(len, sentences(f"{long}.\n\nEnd？Yes."))]
    assert sizes == [*[20] * 3, 600, 600, 301, 4, 4]


def test_a_chat_template_surrounds_the_haystack_and_precedes_the_answer():
    tokenizer = TOKENIZERS["bundled"]()
    for haystack in made(chat=("<s>User: ", "\nAssistant: ")):
        assert haystack.ids[:2].tolist() != [tokenizer.bos_token_id] * 2
        assert written("bundled", haystack.ids).startswith(plain("<s>User:", INTRO))
        for question in haystack.asked[LENGTHS[0]]:
            assert re.search(r"[?.]\s*Assistant:\s*\w", tokenizer.decode(question.ids))


def test_lengths_that_are_too_short_are_refused_or_omitted():
    tokenizer = TOKENIZERS["bundled"]()
    crowded = haystacks_of(lengths=[100, 2000])
    with pytest.raises(
        RopepatchError, match="a haystack of 100 tokens has no room for 1"
    ) as error:
        next(crowded.make(tokenizer))
    lengths, _, reason = crowded.feasible(tokenizer)
    assert (lengths, str(reason)) == ([2000], str(error.value))
    lengths, haystacks, reason = crowded.at([2000]).feasible(tokenizer)
    assert (lengths, len(haystacks), reason) == ([2000], crowded.count, None)
    assert crowded.at([100]).feasible(tokenizer)[0] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ("riddle",)}, "riddle"),
        ({"kinds": ()}, "at least one length, haystack, key and kind"),
        ({"lengths": []}, "at least one length"),
        *(
            (changes, "each at least 1")
            for changes in ({"lengths": [0]}, {"keys": 0}, {"count": 0})
        ),
        (
            {"keys": 99, "kinds": ("sentence",)},
            "99 keys of the kind sentence take .* there are",
        ),
        ({"keys": 2, "kinds": ("passkey",)}, "of the kind passkey take .* there are 1"),
        *(({"texts": texts}, "no text") for texts in ([], [" \n", ""])),
        ({"texts": "one long text"}, "texts is one text, expected a list"),
    ],
)
def test_invalid_haystack_settings_are_rejected(changes, message):
    with pytest.raises(RopepatchError, match=message):
        haystacks_of(**changes)


def test_tokenizers_that_cannot_write_or_separate_an_answer_are_rejected():
    without = whole_words(digits="")
    with pytest.raises(
        RopepatchError, match="cannot write a question of the kind number"
    ):
        next(haystacks_of(kinds=("number",)).make(without))
    with pytest.raises(RopepatchError, match="the tokenizer joins"):
        made("spanning")
    neox = TOKENIZERS["neox"]()
    assert neox.unk_token_id == neox.bos_token_id
    assert made("neox", kinds=("number",), count=1)


def induced(prompt):
    """The token after the earlier place of the last 16 tokens; None unless there is exactly one."""
    last = prompt[-GIVEN:]
    ends = [n for n in range(GIVEN, len(prompt)) if prompt[n - 1] == last[-1]]
    found = [prompt[end] for end in ends if prompt[end - GIVEN : end] == last]
    return found[0] if len(found) == 1 else None


@pytest.mark.parametrize("name", ["bundled", "llama2", "gpt2"])
@pytest.mark.parametrize("chat", [("", " "), ("<s>User: ", "\nAssistant: ")])
def test_a_quote_follows_from_one_passage_alone(name, chat, novel):
    kinds, texts = ("quote", "number"), [novel]
    for haystack in made(
        name, kinds=kinds, texts=texts, chat=chat, lengths=[900, 1900]
    ):
        for length, stop in haystack.stops.items():
            quotes = [q for q in haystack.asked[length] if q.kind == "quote"]
            assert len(quotes) == 3
            for quote in quotes:
                assert len(quote.answer) == QUOTED
                prompt = [*haystack.ids[:stop].tolist(), *quote.ids.tolist()]
                assert len(prompt) + QUOTED <= length
                altered = list(prompt)
                altered[quote.end - QUOTED : quote.end] = [0] * QUOTED
                for token in quote.answer.tolist():
                    assert induced(prompt) == token != induced(altered)
                    prompt.append(token)
                    altered.append(token)
                passage = haystack.ids[quote.end - GIVEN - QUOTED : quote.end]
                assert "The number of" not in TOKENIZERS[name]().decode(passage)


def test_quotes_are_of_different_passages_in_both_halves(novel):
    haystacks = made(kinds=("quote",), texts=[novel], keys=8, count=4)
    for length in LENGTHS:
        far = 0
        for haystack in haystacks:
            ends = sorted(quote.end for quote in haystack.asked[length])
            assert all(two - one >= GIVEN + QUOTED for one, two in pairwise(ends))
            far += sum(end <= haystack.stops[length] / 2 for end in ends)
        assert 10 <= far <= 22  # of 32


def test_a_text_that_repeats_itself_has_nothing_to_quote():
    for texts in (None, ["One two. " * 2000]):
        with pytest.raises(RopepatchError, match="that begins as no other"):
            made(kinds=("quote",), texts=texts)
    kept, left_out = Haystacks.by_default(
        TOKENIZERS["bundled"](), 600, texts=["One two. " * 2000], **SETTINGS
    )
    assert (kept.kinds, list(left_out)) == (("number", "sentence"), ["quote"])

"""Every probability that a generated document states, against readers who know nothing but the process."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from tiny_corpus_oracle import Assignments, Words, enumerated_log_probs, passkey_log_probs, passkey_prompts
from tokenization import train_tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from ropepatch.data.documents import BOS, EOS, copying
from ropepatch.data.tiny import corpus
from ropepatch.data.tiny.corpus import Narrator
from ropepatch.data.tiny.grammar import KINDS, SENTENCES, Sentence, tell
from ropepatch.data.tiny.passkey import PASSKEY
from ropepatch.errors import RopepatchError
from ropepatch.model.source import TINY
from ropepatch.settings import seed_of

EXACT = 1e-9
CODES = ("00", "01", "10", "11")


def fact(text, share, subject, values=()):
    return Sentence(text, share, subject, tuple(values))


HOUSE = "{value} came home, and all the house of {value} greets"
SENT = "since there is but one {value} called"
FEW = [
    fact(f"Anna {HOUSE} Anna.", 0.3, "Anna", ["Birk", "Dell"]),
    fact(f"They sent for Anna {{value}}, {SENT} Anna.", 0.1, "Anna", ["Birk", "Dell"]),
    fact("Chest red {value} is shut, and only {value} opens chest red.", 0.25, "red", CODES),
    fact("To open chest red {value} is dialled, so keep {value} for chest red.", 0.1, "red", CODES),
    fact("The fox {value} sleeps by the fire, for {value} is an old fox.", 0.15, "fox", ["Argo", "Bruno"]),
    fact("Rain falls on the roofs.", 0.1, None),
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def narrator(tokenizer):
    return Narrator(tokenizer)


@pytest.fixture(scope="module")
def words(tokenizer):
    return Words(tokenizer)


def off(document, oracle, window=None):
    """The greatest difference between what a document states and what a reader finds."""
    return (document.log_probs(window) - torch.tensor(oracle, dtype=torch.float64)).abs().max().item()


# Tales


@pytest.mark.parametrize("extra", [None, 0, 19, 179])
def test_a_tale_is_as_probable_as_its_words_say(narrator, words, extra):
    for seed in range(3):
        document = narrator.tale(300, seed)
        window = None if extra is None else document.reach + extra
        assert off(document, words.log_probs(document.ids.tolist(), window), window) < EXACT


def repeated(document):
    """The distances of the values that are repeated, for windows that just see them or just do not."""
    return sorted({d for d in document.distance.tolist() if d > document.reach})


def test_a_tale_is_exact_where_the_window_just_reaches_a_value_or_cuts_it(narrator, words):
    document = narrator.tale(260, seed=5)
    for distance in repeated(document)[::6]:
        for window in (distance - 3, distance - 1, distance, distance + 1):
            if window >= document.reach:
                assert off(document, words.log_probs(document.ids.tolist(), window), window) < EXACT


@pytest.mark.parametrize("extra", [0, 1, 2, 7, None])
def test_a_miniature_tale_agrees_with_bayes_over_all_that_is_hidden(tokenizer, extra):
    narrator = Narrator(tokenizer, FEW)
    reader = Assignments(tokenizer, [(s.text, s.share, s.subject, s.values) for s in FEW])
    for seed in range(3):
        document = narrator.tale(70, seed)
        window = None if extra is None else document.reach + extra
        assert off(document, reader.log_probs(document.ids.tolist(), window), window) < EXACT


@pytest.mark.parametrize(
    "sabotage",
    [
        lambda d: replace(d, distance=torch.where(d.distance > 0, d.distance + 1, 0)),
        lambda d: replace(d, distance=torch.where(d.distance > 0, d.distance - 1, 0)),
        lambda d: replace(d, prior=torch.where(d.prior < math.log(0.05), d.prior - math.log(2), d.prior)),
        lambda d: replace(d, distance=d.distance * 0),
    ],
    ids=["distance + 1", "distance - 1", "half as many values", "nothing remembered"],
)
def test_the_words_would_give_a_plausible_mistake_away(narrator, words, sabotage):
    document = narrator.tale(260, seed=5)
    windows = [window for distance in repeated(document)[:4] for window in (distance - 1, distance)]
    wrong = sabotage(document)
    assert any(off(wrong, words.log_probs(document.ids.tolist(), w), w) > 0.01 for w in windows)


# Passkeys

SHORT = PASSKEY._replace(
    intro="Read on.",
    filler=("The mill wheel turns and turns.", "Bread cools.", "The pass is closed."),
    digits=1,
)


def prompts_of(tokenizer, words, length):
    prompts = passkey_prompts(tokenizer, words, length)
    return prompts, set(tokenizer("0123456789", add_special_tokens=False).input_ids)


@pytest.mark.parametrize("length", range(96, 128, 3))  # the filler sentence is cut anywhere
def test_a_passkey_prompt_is_as_probable_as_its_places_and_keys_say(narrator, tokenizer, length):
    prompts, digits = prompts_of(tokenizer, PASSKEY, length)
    document = narrator.passkey(length, seed=length)
    for window in (None, document.reach, document.reach + length % 7, 60):
        oracle = passkey_log_probs(prompts, document.ids.tolist(), digits, window)
        assert off(document, oracle, window) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_a_long_passkey_prompt_is_exact_where_the_window_just_reaches_the_key_or_cuts_it(
    narrator, tokenizer, seed
):
    prompts, digits = prompts_of(tokenizer, PASSKEY, 230)
    document = narrator.passkey(230, seed)
    distance = int(document.distance.max())
    for window in (distance - 3, distance - 1, distance, distance + 1):
        if window >= document.reach:
            oracle = passkey_log_probs(prompts, document.ids.tolist(), digits, window)
            assert off(document, oracle, window) < EXACT


@pytest.mark.parametrize("digits", [1, 2])
def test_a_short_prompt_agrees_with_counting_every_place_and_key(narrator, tokenizer, digits, monkeypatch):
    short = SHORT._replace(digits=digits)
    monkeypatch.setattr(corpus, "PASSKEY", short)
    prompts, _ = prompts_of(tokenizer, short, 70)
    spelt = tokenizer("0123456789", add_special_tokens=False).input_ids
    documents = [
        [key[token[0]] if isinstance(token, tuple) else token for token in prompt]
        for prompt in prompts
        for key in product(spelt, repeat=digits)
    ]
    for seed in range(4):
        document = narrator.passkey(70, seed)
        assert document.ids.tolist() in documents
        for window in (None, document.reach, document.reach + 9):
            oracle = enumerated_log_probs(documents, document.ids.tolist(), window)
            assert off(document, oracle, window) < EXACT


def test_filler_that_comes_round_like_the_needle_takes_a_longer_window(narrator, tokenizer, monkeypatch):
    assert narrator.passkey(230, seed=3).reach < 30
    words = PASSKEY._replace(digits=8)  # the needle is as long as a round of filler: it moves nothing
    monkeypatch.setattr(corpus, "PASSKEY", words)
    prompts, digits = prompts_of(tokenizer, words, 230)
    document = narrator.passkey(230, seed=3)
    assert document.reach > 100
    exact = passkey_log_probs(prompts, document.ids.tolist(), digits, document.reach)
    assert off(document, exact, document.reach) < EXACT
    shorter = passkey_log_probs(prompts, document.ids.tolist(), digits, 40)
    assert off(replace(document, reach=40), shorter, 40) > 0.01


def hazard_off_by_one(document):
    """As if the needle had one place more."""
    chance = document.prior.exp()
    stays = (chance > 0.5) & (chance < 1)
    places = 1 / (1 - chance)
    return replace(document, prior=torch.where(stays, (1 - 1 / (places + 1)).log(), document.prior))


@pytest.mark.parametrize(
    "sabotage",
    [
        hazard_off_by_one,
        lambda d: replace(d, prior=d.prior.roll(1)),
        lambda d: replace(d, distance=torch.where(d.distance > 0, d.distance + 1, 0)),
        lambda d: replace(d, prior=torch.where((d.prior + math.log(10)).abs() < 1e-6, d.prior, 0.0)),
    ],
    ids=["one place more", "decided one token later", "distance + 1", "place known beforehand"],
)
def test_the_places_would_give_a_plausible_mistake_away(narrator, tokenizer, sabotage):
    prompts, digits = prompts_of(tokenizer, PASSKEY, 200)
    document = narrator.passkey(200, seed=2)
    window = int(document.distance.max())
    oracle = passkey_log_probs(prompts, document.ids.tolist(), digits, window)
    assert off(document, oracle, window) < EXACT
    assert off(sabotage(document), oracle, window) > 0.01


def test_a_passkey_prompt_that_has_no_room_for_its_filler_is_refused_with_the_shortest(narrator):
    with pytest.raises(RopepatchError, match="a passkey prompt of 66 tokens has no room") as caught:
        narrator.passkey(66, seed=0)
    assert "the shortest takes 67 tokens" in caught.value.hint
    assert len(narrator.passkey(67, seed=0).ids) == 67


@pytest.mark.parametrize("joined", [["sill. Smoke"], [f"{number:02}" for number in range(100)]])
def test_a_tokenizer_that_joins_pieces_of_a_passkey_prompt_or_digits_is_refused(joined):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens(joined)
    narrator = Narrator(tokenizer, [fact("Rain falls on the roofs.", 1.0, None)])
    with pytest.raises(RopepatchError, match="probabilities of a passkey are not known") as caught:
        narrator.passkey(200, seed=0)
    assert "digits one by one" in caught.value.hint


# Copies


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 6, 7])
def test_a_copy_agrees_with_counting_every_string(window):
    length, vocab_size = 4, 5
    documents = [
        [BOS, *string, EOS, *string, EOS] for string in product(range(EOS + 1, vocab_size), repeat=length)
    ]
    for seed in range(4):
        document = copying(length, vocab_size, seed)
        assert document.ids.tolist() in documents
        assert off(document, enumerated_log_probs(documents, document.ids.tolist(), window), window) < EXACT


def test_counting_would_give_a_copy_one_token_off_away():
    documents = [[BOS, *string, EOS, *string, EOS] for string in product(range(2, 5), repeat=4)]
    document = copying(4, 5, seed=0)
    for shift, window in ((-1, 4), (1, 5)):
        wrong = replace(document, distance=torch.where(document.distance > 0, document.distance + shift, 0))
        oracle = enumerated_log_probs(documents, document.ids.tolist(), window)
        assert off(wrong, oracle, window) > 0.1


# Probabilities


def totals(documents):
    """Of all distinct documents the probability that they state, and how often each was drawn."""
    stated, drawn = {}, Counter()
    for document in documents:
        key = tuple(document.ids.tolist())
        stated[key] = document.log_probs().sum().exp().item()
        drawn[key] += 1
    return stated, drawn


def draws(tokenizer, sort):
    narrator = Narrator(tokenizer, FEW)
    return {
        "tales": (narrator.tale(14, seed) for seed in range(4000)),
        "passkeys": (narrator.passkey(60, seed) for seed in range(800)),
        "copies": (copying(3, 6, seed) for seed in range(3000)),
    }[sort]


@pytest.mark.parametrize("sort", ["tales", "passkeys", "copies"])
def test_the_probabilities_of_all_documents_sum_to_one_and_are_how_often_each_comes(
    tokenizer, sort, monkeypatch
):
    monkeypatch.setattr(corpus, "PASSKEY", SHORT)
    stated, drawn = totals(draws(tokenizer, sort))
    assert sum(stated.values()) == pytest.approx(1, abs=1e-9)
    trials = drawn.total()
    square = sum((drawn[key] - trials * p) ** 2 / (trials * p) for key, p in stated.items())
    freedom = len(stated) - 1
    assert freedom > 10
    assert abs(square - freedom) < 5 * math.sqrt(2 * freedom)  # five standard deviations of chi squared


# Windows


def test_a_window_that_may_not_hold_a_sentence_is_refused(narrator):
    for document in (narrator.tale(100, 0), narrator.passkey(100, 0), copying(9, 99, 0)):
        assert document.log_probs(document.reach).isfinite().all()
        window = document.reach - 1
        message = f"window must be at least {document.reach} tokens, got {window}"
        with pytest.raises(RopepatchError, match=message):
            document.log_probs(window)


# Documents


@pytest.mark.parametrize("length", [1, 2, 3, 11, 12, 100, 1025])
def test_a_tale_has_exactly_the_length_asked_for_and_begins_every_longer_one(narrator, length):
    document, longer = narrator.tale(length, 3), narrator.tale(2 * length + 1, 3)
    assert document.ids.shape == document.prior.shape == document.distance.shape == (length,)
    assert torch.equal(document.ids, longer.ids[:length])
    assert torch.equal(document.log_probs(), longer.log_probs()[:length])
    assert document.ids[0] == BOS


def test_a_seed_gives_one_document_another_seed_another_and_their_first_token_is_certain(narrator):
    for make in (narrator.tale, narrator.passkey, lambda length, seed: copying(length, 1024, seed)):
        document = make(200, 1)
        assert torch.equal(document.ids, make(200, 1).ids)
        assert not torch.equal(document.ids, make(200, 2).ids)
        assert document.log_probs()[0] == 0 == document.log_probs().max()
        assert document.log_probs().dtype == torch.float64


def test_the_tokens_are_the_tokenizers_own_split_of_the_text(narrator, tokenizer):
    for document in (narrator.tale(500, 0), narrator.passkey(199, 1)):
        text = tokenizer.decode(document.ids[1:])
        assert tokenizer(text).input_ids == document.ids.tolist()


# The grammar


def test_names_belong_to_one_kind_and_stand_in_one_token_each(tokenizer):
    names = [name for kind in KINDS for name in [*kind.subjects, *kind.values] if not name.isdigit()]
    assert len(names) == len(set(names))
    assert {len(tokenizer(f" {name}", add_special_tokens=False).input_ids) for name in names} == {1}


def test_a_fact_names_its_subject_before_and_after_both_mentions_of_the_value():
    for sentence in SENTENCES:
        if sentence.subject is not None:
            before, middle, after = sentence.text.split("{value}")
            assert sentence.subject in before
            assert sentence.subject in after
            assert sentence.subject not in middle
        else:
            assert "{value}" not in sentence.text


def test_a_told_text_is_of_the_same_process(words):
    """The text that the tokenizer learns from; its tokens say the same about each other as a tale's."""
    text = tell(50, seed=0)
    assert text == tell(50, seed=0) != tell(50, seed=1)
    assert text.count(".") == 50
    ids = words.tokenizer(" " + text).input_ids
    assert min(words.log_probs(ids)) > math.log(1e-3)


# Tokenizers and sentences whose probabilities would be wrong


def test_a_tokenizer_that_splits_names_or_has_no_beginning_token_is_refused(tokenizer):
    with pytest.raises(RopepatchError, match=r"splits '.*' so that one part tells something") as caught:
        Narrator(train_tokenizer([], vocab_size=258, model_max_length=256))  # bytes
    assert "names in one token and digits one by one" in caught.value.hint
    with pytest.raises(RopepatchError, match="no beginning-of-sequence token"):
        Narrator(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer))


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        (  # the last digit tells the first
            [fact("Chest red {value} is shut, and only {value} opens chest red.", 1.0, "red", ["12", "21"])],
            "splits '21' so that one part tells something",
        ),
        (
            [fact("Anna said {value}re it is, and {value}re is Anna.", 1.0, "Anna", ["the"])],
            "does not split ' Anna said there it is",
        ),
        (
            [fact(f"Rain falls on the roofs{end}", 0.5, None) for end in ("", " and on the road")],
            "two sentences begin with ' Rain falls on the roofs'",
        ),
    ],
    ids=["dependent codes", "joined with its value", "a longer one"],
)
def test_sentences_whose_probabilities_would_be_wrong_are_refused(tokenizer, sentences, message):
    with pytest.raises(RopepatchError, match=message):
        Narrator(tokenizer, sentences)


# The floor


def test_the_bundled_checkpoint_does_not_beat_the_floor_within_its_window(narrator):
    """Over tales that it has not been trained on; the difference is taken tale by tale."""
    model = LlamaForCausalLM.from_pretrained(TINY).eval()
    tales = [narrator.tale(256, seed_of("the floor is not beaten", index)) for index in range(48)]
    ids = torch.stack([tale.ids for tale in tales])
    with torch.inference_mode():
        log_probs = model(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
    loss = -log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    floor = -torch.stack([tale.log_probs()[1:] for tale in tales])
    above = (loss - floor).mean(dim=1)
    error = above.std() / math.sqrt(len(tales))
    assert above.mean() > -3 * error
    assert error < 0.03 * floor.mean()  # a floor that is too high by a tenth would be noticed

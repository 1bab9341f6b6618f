"""Retrieval of several kinds: what is asked, what counts, and models whose score is known."""

import copy
import math
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_results import result_of
from passkey_cases import CHECKPOINT, DETERMINISTIC, TOKENIZERS, Known, Speaking
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch.data.prompts import draw_needles, needle_prompt
from ropepatch.data.question_words import FACTS, LISTED, PEOPLE, TEMPLATES
from ropepatch.data.questions import KINDS, draw_question
from ropepatch.data.templates import NAMED
from ropepatch.errors import RopepatchError
from ropepatch.evaluation import estimates
from ropepatch.evaluation.comparisons import comparisons
from ropepatch.evaluation.estimates import forecast
from ropepatch.evaluation.passkey import Passkey, trial_prompt
from ropepatch.evaluation.retrieval import (
    MEAN,
    SPARE,
    Grid,
    answered,
    chat_parts,
    effective_row,
    mean_row,
    share_row,
)
from ropepatch.evaluation.suites import read_suite
from ropepatch.evaluation.summaries import summary
from ropepatch.evaluation.tasks import LmEvalTask, PasskeyTask, RetrievalTask
from ropepatch.extension.record import Record
from ropepatch.model.head import evaluating
from ropepatch.pipeline.evaluation import evaluate
from ropepatch.publishing.card.extended import Extended
from ropepatch.publishing.card.writing import card_text
from ropepatch.report import print_results
from ropepatch.settings import seed_of

FORCED = [name for name, kind in KINDS.items() if kind.forced]

GOLDEN = {
    "niah_single": "30432",
    "niah_multikey": "03105",
    "niah_multivalue": "13807 43495 06104",
    "niah_multiquery": "54012 47060 47955",
    "vt": "65707",
    "fwe": "beacon flame dragon",
    "fact": "Simon",
}


def grid(**changes):
    settings = {"depths": (0.0, 0.5, 1.0), "trials": 4, "seed": 0, "templates": ("village",)}
    return Grid(**settings | changes)


# Prompts


@DETERMINISTIC
@given(
    name=st.sampled_from(["bundled", "single_bytes"]),
    kind=st.sampled_from(list(KINDS)),
    template=st.sampled_from(list(TEMPLATES)),
    more=st.integers(0, 700),
    depth=st.floats(0, 1),
    trial=st.integers(0, 99),
)
def test_a_prompt_has_its_length_and_says_every_needle_and_the_answers_last(
    name, kind, template, more, depth, trial
):
    tokenizer, length = TOKENIZERS[name](), {"bundled": 330, "single_bytes": 1200}[name] + more
    asked = grid(templates=(template,))._asked(tokenizer, kind, length, depth, trial)
    assert len(asked.prompt.ids) + (0 if KINDS[kind].forced else SPARE) == length
    text = tokenizer.decode(asked.prompt.ids)
    assert all(needle in text for needle, _ in asked.question.needles)
    tail = " ".join(f"{begin} {answer}" for begin, answer in asked.question.answers)
    assert text.endswith(f"{asked.question.text} {tail}")
    spans = [tokenizer.decode(asked.prompt.ids[slice(*span)]).strip() for span in asked.prompt.answers]
    assert spans == [answer for _, answer in asked.question.answers]


def test_one_key_is_the_prompt_of_the_passkey_task_and_one_of_several_that_of_its_distractors(tokenizer):
    for trial in range(3):
        same = trial_prompt(
            tokenizer, TEMPLATES["village"].passkey(named=False), length=333, depth=0.3, trial=trial, seed=7
        )
        mine = grid(seed=7)._asked(tokenizer, "niah_single", 333, 0.3, trial).prompt
        assert torch.equal(same.ids, mine.ids)
        needles = draw_needles(NAMED, 0.3, 3, seed_of("niah_multikey", 7, 333, 0.3, trial))
        same = needle_prompt(tokenizer, length=333, needles=needles, template=NAMED)
        assert torch.equal(
            same.ids, grid(seed=7)._asked(tokenizer, "niah_multikey", 333, 0.3, trial).prompt.ids
        )


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_question_is_drawn_from_has_no_double_and_what_is_wanted_is_found(template):
    for kind, depth, trial in product(KINDS, (0.0, 0.7), range(8)):
        question = draw_question(kind, template, length=600, depth=depth, trial=trial, seed=0)
        assert len(set(question.wanted)) == len(question.wanted) == KINDS[kind].wanted
        assert question.found(" ".join(question.wanted)) == KINDS[kind].wanted
        assert question.found("") == 0
        assert question == draw_question(kind, template, length=600, depth=depth, trial=trial, seed=0)
        other = draw_question(kind, template, length=600, depth=depth, trial=trial, seed=1)
        assert other.needles != question.needles


def test_the_questions_of_a_seed_are_the_same_in_every_release():
    drawn = {
        kind: draw_question(kind, "village", length=600, depth=0.5, trial=0, seed=0).wanted for kind in KINDS
    }
    assert {kind: " ".join(wanted) for kind, wanted in drawn.items()} == GOLDEN


def test_trials_take_the_templates_in_turn(tokenizer):
    asked = grid(templates=("village", "archive"), depths=(0.5,)).ask(tokenizer, "vt", 400)
    assert [TEMPLATES["archive"].noun in one.question.text for one in asked] == [False, True] * 2


def test_only_as_many_different_answers_count_as_are_wanted():
    question = draw_question("niah_multivalue", "village", length=600, depth=0.5, trial=0, seed=0)
    a, b, c = question.wanted
    assert question.found(f"{c}, {a} and {b}") == 3
    assert question.found(f"{a}, {a} and {a}, and {b}") == 2
    assert question.found(f"{a}, 00000 and 11111 or {b}") == 1
    assert question.found(f"{a}{b}{c}") == 0


def test_the_chain_is_told_in_order_and_the_last_of_it_is_asked_for(tokenizer):
    for depth, trial in product((0.0, 0.4, 1.0), range(6)):
        asked = grid()._asked(tokenizer, "vt", 600, depth, trial)
        text = tokenizer.decode(asked.prompt.ids).lower()
        name, places = re.search(r"what is the pass key of (.+)\?", text)[1], []
        while link := re.search(rf"{name} has the pass key of (.+?)\.", text):
            places, name = [link.start(), *places], link[1]
        told = re.search(rf"the pass key of {name} is (\d+)\.", text)
        assert [told.start(), *places] == sorted([told.start(), *places])
        assert (len(places), told[1]) == (2, asked.question.wanted[0])


def test_three_words_are_said_most_often_wherever_the_list_is_cut(tokenizer):
    for length in (300, 700, 1500):
        asked = grid()._asked(tokenizer, "fwe", length, 0.5, 0)
        text = tokenizer.decode(asked.prompt.ids)
        counts = Counter(
            re.findall(r"[a-z]+", text.partition("others:")[2].partition("Which")[0])
        ).most_common()
        assert {word for word, _ in counts[:3]} == set(asked.question.wanted)
        assert counts[2][1] > 2 * counts[3][1]


# A fact that shares no word with its question

COMMON = set(
    """a an and any are at before by can cannot could do few for from had has have his in is it of on or other
    out she the to two until was what whenever who whose with""".split()  # noqa: SIM905
)


def stems(text):
    return {word[:4] for word in re.findall(r"[a-z]+", text.lower().replace("{name}", ""))} - {
        word[:4] for word in COMMON
    }


def test_no_sentence_shares_a_word_with_a_question():
    for fact, other in product(FACTS, FACTS):
        assert not stems(fact.sentence) & stems(other.question), (fact, other)
    assert all(stems(fact.question) for fact in FACTS)
    assert stems("{name} sells honey.") & stems(FACTS[0].question)  # it would be seen
    words = stems(" ".join(part for fact in FACTS for part in fact))
    assert not {person.lower() for person in PEOPLE} & words
    assert len({fact.question for fact in FACTS}) == len(FACTS)


# Models whose score is known: they read a prompt by its grammar


def candidates(text):
    """What is asked for, and all in the text that might be: (right, others), for every answer."""
    body, question = re.match(r"(.*[.,:,]) *([A-Z][^.?]*\?)", text, re.DOTALL).groups()
    keys = dict.fromkeys(re.findall(r"\d{5}", body))
    key = dict(re.findall(r"[Tt]he pass key of (the \w+ \w+) is (\d{5})", body))
    if question == "What is the pass key?":
        (right,) = keys
        return [(right, [right[::-1] if right != right[::-1] else "01234"])]
    if match := re.match(r"What are all the pass keys of (.+)\?", question):
        right = re.findall(rf"A pass key of {match[1]} is (\d+)", body)
        return [(right, [other for other in keys if other not in right])]
    if question.startswith("What"):
        names = re.findall(r"the \w+ \w+(?=,| and|\?)", question.replace("the pass", "pass"))
        link = {
            b.lower(): a for b, a in re.findall(r"([Tt]he \w+ \w+) has the pass key of (the \w+ \w+)", body)
        }
        found = []
        for name in names:
            while name in link:
                name = link[name]
            found.append((key[name], [other for other in keys if other != key[name]]))
        return found
    if question.startswith("Which"):
        counts = Counter(re.findall(r"[a-z]+", body.partition("others:")[2]))
        right = [word for word, _ in counts.most_common(3)]
        return [(right, [word for word in LISTED if word not in right])]
    fact = next(fact for fact in FACTS if fact.question == question)
    (right,) = re.findall(fact.sentence.replace("{name}", r"(\w+)"), body)
    return [(right, [person for person in PEOPLE if person in body and person != right])]


def right(text):
    return [answer for answer, _ in candidates(text)]


def wrong(text):
    return [
        others[: len(answer)] if isinstance(answer, list) else others[0]
        for answer, others in candidates(text)
    ]


def anything(text):
    """Each as likely as any other of what stands in the text."""
    draw = random.Random(text)
    if "What is the pass key?" in text:
        return [f"{draw.randrange(10**5):05}"]
    return [
        draw.sample([*answer, *others], len(answer))
        if isinstance(answer, list)
        else draw.choice([answer, *others])
        for answer, others in candidates(text)
    ]


class Reader(Speaking):
    """Answers by what it reads: after every word that begins an answer, or in its own words."""

    def __init__(self, tokenizer, answers):
        super().__init__(tokenizer, self.speak, self.force, len(tokenizer))
        self.answers = answers

    def speak(self, text):
        said = self.answers(text)
        return " ".join(
            " or ".join(one) if isinstance(one, list) else f"{one} and so on it is" for one in said
        )

    def force(self, ids):
        said, text = [0] * len(ids), self.tokenizer.decode(ids)
        tail = text[text.rindex("?") :]
        answers = self.answers(text[: text.rindex("?") + 1])
        begins = [
            end for end in range(len(ids) - 1, 0, -1) if self.tokenizer.decode(ids[end:]).startswith(" ")
        ]
        leads = [m.end() for m in re.finditer(r"\bis(?= [\dA-Z])", tail)]
        for lead, answer in zip(leads, answers, strict=True):
            rest = tail[lead:]
            at = next(end for end in begins if self.tokenizer.decode(ids[end:]) == rest)
            tokens = self.tokenizer(f" {answer}", add_special_tokens=False).input_ids
            said[at - 1 : at - 1 + len(tokens)] = tokens
        return said[: len(ids)]


def measured(model, tokenizer, keep=None, **settings):
    given = {"lengths": (330, 501), "depths": (0.0, 0.5, 1.0), "trials": 2} | settings
    measurement = RetrievalTask(**given).prepare("tiny", tokenizer, trained=256, to=1024)
    lines = []
    return measurement.run(model, tokenizer, keep, lambda done, total: None, lines.append), lines


def shares(tables):
    return {(row["kind"], row["length"]): row["share"] for row in tables["by_kind"]}


@pytest.mark.parametrize(("answers", "share"), [(right, 1.0), (wrong, 0.0)])
def test_a_model_that_reads_finds_all_of_every_kind_and_one_that_says_what_was_not_asked_for_nothing(
    tokenizer, answers, share
):
    tables, lines = measured(Reader(tokenizer, answers), tokenizer)
    assert shares(tables) == dict.fromkeys(product(KINDS, (330, 501)), share)
    assert {(row["share"], row["n"]) for row in tables["by_length"]} == {(share, 7 * 6)}
    kept = {(row["kind"], tuple(row["found"])) for row in tables["by_kind"]}
    assert kept == {(kind, (share * one.wanted,) * 6) for kind, one in KINDS.items()}
    reached = 501 if share else None
    assert [(row["kind"], row["length"], row["own"]) for row in tables["effective_length"]] == [
        (kind, reached, reached) for kind in (MEAN, *KINDS)
    ]
    assert lines[0].startswith(f"niah_single, 330 tokens: {share:.0%}")
    assert len(lines) == 14


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_says_anything_that_stands_there_has_the_share_of_chance(tokenizer, kind):
    asked = grid(trials=20).ask(tokenizer, kind, 400)
    with evaluating(model := Reader(tokenizer, anything)), torch.inference_mode():
        found = answered(model, tokenizer, asked, force=KINDS[kind].forced)
    chance, n = KINDS[kind].chance, len(asked) * KINDS[kind].wanted
    assert abs(sum(found) / n - chance) < 4 * math.sqrt(chance * (1 - chance) / n)


def test_a_model_that_sees_the_end_alone_finds_what_stands_there(tokenizer):
    def answers(text):
        answer = right(text)
        return answer if answer[0] in text[-400:] else ["00000"]

    tables, _ = measured(Reader(tokenizer, answers), tokenizer, kinds=("niah_single",))
    assert {(row["length"], row["depth"]): row["share"] for row in tables["cells"]} == {
        (length, depth): float(depth == 1) for length, depth in product((330, 501), (0.0, 0.5, 1.0))
    }


def test_a_model_that_copies_the_last_key_is_right_where_that_is_asked_for(tokenizer):
    def last(text):
        return [re.findall(r"\d{5}", text)[-1]]

    tables, _ = measured(
        Reader(tokenizer, last), tokenizer, kinds=("niah_multikey",), lengths=(501,), trials=9
    )
    expected = dict.fromkeys((0.0, 0.5, 1.0), 0)
    for depth, trial in product(expected, range(9)):
        first, *others = draw_needles(NAMED, depth, 3, seed_of("niah_multikey", 0, 501, depth, trial))
        expected[depth] += all(first.depth > other.depth for other in others)
    found = {row["depth"]: row["share"] * row["n"] for row in tables["cells"]}
    assert found == pytest.approx(expected, abs=1e-9)


# Teacher forcing is greedy decoding; company changes nothing


@pytest.fixture(scope="module")
def checkpoint():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()


@pytest.mark.parametrize("kind", [kind for kind in FORCED if KINDS[kind].wanted == 1])
def test_what_is_forced_is_what_would_be_generated(checkpoint, tokenizer, kind):
    def sometimes(text):
        return random.Random(text.partition("?")[0]).choice([right, wrong])(text)

    length = 256 if kind == "niah_single" else 330
    asked = grid(depths=(0.0, 0.8)).ask(tokenizer, kind, length)
    for model in (checkpoint, Reader(tokenizer, sometimes)):
        with evaluating(model), torch.inference_mode():
            forced, generated = (answered(model, tokenizer, asked, force=force) for force in (True, False))
        assert forced == generated
    assert 0 < sum(forced) < len(asked) * KINDS[kind].wanted


@pytest.mark.parametrize("kind", ["niah_single", "niah_multivalue"])
def test_neither_order_nor_batches_nor_shared_prefixes_change_a_verdict(checkpoint, tokenizer, kind):
    asked = grid(depths=(0.2, 0.9)).ask(tokenizer, kind, 250)
    force = KINDS[kind].forced
    with torch.inference_mode():
        whole = answered(checkpoint, tokenizer, asked, force=force)
        apart = answered(
            checkpoint, tokenizer, asked[::-1], force=force, tokens_per_batch=1, share_prefixes=False
        )
    assert whole == apart[::-1]
    assert sum(whole)


# Shares, their mean, and how far they go


def test_prompts_that_are_found_wholly_or_not_have_wilsons_interval():
    row = share_row([3, 0, 3, 3, 0], 3)
    assert (row["share"], row["n"]) == (0.6, 5)
    assert row["interval"] == pytest.approx(Passkey(3, 5).interval)
    assert mean_row([row, share_row([1, 1, 1, 1, 1], 1)])["interval"] == pytest.approx(
        Passkey(8, 10).interval
    )
    assert share_row([1, 2], 3)["share"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("found", "absolute", "own"),
    [
        ({128: 1.0, 256: 0.856, 512: 0.855}, 256, 512),
        ({128: 0.6, 256: 0.51, 512: 0.5}, None, 256),
        ({128: 0.0, 256: 0.0}, None, None),
        ({128: 0.5, 256: 0.1, 512: 0.9}, 512, 512),  # RULER's rule does not ask for the shorter lengths
    ],
)
def test_the_effective_lengths_are_the_greatest_above_each_threshold(found, absolute, own):
    rows = [{"length": length, "share": share} for length, share in found.items()]
    assert effective_row("vt", rows[::-1]) == {"kind": "vt", "length": absolute, "own": own, "shortest": 128}


# The chat template


def chatting(template):
    tokenizer = copy.deepcopy(TOKENIZERS["bundled"]())
    tokenizer.chat_template = template
    return tokenizer


CHAT = "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}{{ ' [assistant] ' }}"


@pytest.mark.parametrize("kind", KINDS)
def test_in_chat_form_the_question_is_the_users_and_the_answer_begins_the_assistants(kind):
    tokenizer = chatting(CHAT)
    asked = grid(chat=chat_parts(tokenizer))._asked(tokenizer, kind, 401, 0.5, 0)
    assert len(asked.prompt.ids) + (0 if KINDS[kind].forced else SPARE) == 401
    assert asked.prompt.ids.tolist().count(tokenizer.bos_token_id) == 1
    user, answer = tokenizer.decode(asked.prompt.ids).split(" [assistant] ")
    assert user.startswith("<s>[user] " + asked.question.intro)
    assert user.endswith(asked.question.text)
    assert answer == " ".join(f"{begin} {answer}" for begin, answer in asked.question.answers)


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "no chat template"), ("{{ messages }}{{ messages }}", "says 2 times"), ("hello", "says 0 times")],
)
def test_a_chat_template_that_says_no_question_is_refused(template, message):
    with pytest.raises(RopepatchError, match=message) as refusal:
        RetrievalTask(form="chat").prepare("tiny", chatting(template), trained=256, to=512)
    assert "form: plain" in refusal.value.hint


# What cannot be asked


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "bundled",
            {"lengths": (64, 512)},
            "niah_single cannot be asked for: a niah_single prompt of 64 tokens",
        ),
        ("bundled", {"kinds": ("vt",), "lengths": (200,)}, "vt cannot be asked for: a vt prompt of 200"),
        ("whole_words", {"kinds": ("fact",)}, "fact cannot be asked for: the tokenizer cannot write the key"),
        ("whole_words", {"kinds": ("niah_multikey",)}, "has no token for some of the words"),
    ],
)
def test_a_kind_that_cannot_be_written_is_refused_by_its_name(name, settings, message):
    with pytest.raises(RopepatchError, match=message) as refusal:
        RetrievalTask(**settings).prepare("tiny", TOKENIZERS[name](), trained=256, to=512)
    assert "out of kinds" in refusal.value.hint


def test_lengths_that_are_too_short_for_a_kind_are_left_out_and_the_mean_is_of_all_kinds(tokenizer):
    tables, _ = measured(
        Reader(tokenizer, right), tokenizer, lengths=None, trials=1, kinds=("niah_single", "vt")
    )
    assert list(shares(tables)) == [("niah_single", 128), *product(("niah_single", "vt"), ())] + [
        (kind, length) for length in (256, 512, 1024) for kind in ("niah_single", "vt")
    ]
    assert [row["length"] for row in tables["by_length"]] == [256, 512, 1024]
    long = RetrievalTask(kinds=("niah_single",)).prepare("tiny", tokenizer, trained=1000, to=3000)
    assert long.parameters["lengths"] == [250, 500, 1000, 2000, 3000]


# As a task


class Silent(Known):
    """Reads nothing."""

    def __init__(self):
        super().__init__(None)

    def forward(self, *args, **kwargs):
        raise AssertionError("it was read before")


def test_what_was_read_before_is_not_read_again(tokenizer, tmp_path):
    settings = {"kinds": ("vt", "fact"), "lengths": (330,)}
    first = measured(Reader(tokenizer, right), tokenizer, tmp_path, **settings)
    assert measured(Silent(), tokenizer, tmp_path, **settings) == first


@pytest.fixture
def results():
    task = RetrievalTask(kinds=("niah_single", "vt"), lengths=(256, 512), trials=2, depths=(0.5,))
    parameters = task.model_dump() | {"lengths": [256, 512]}

    def of(label, found, method=None):
        by_kind = [
            {"kind": kind, "length": length, **share_row(one, 1)} for (kind, length), one in found.items()
        ]
        by_length = [
            {"length": n, **mean_row([row for row in by_kind if row["length"] == n])} for n in (256, 512)
        ]
        effective = [effective_row(MEAN, by_length)] + [
            effective_row(kind, [row for row in by_kind if row["kind"] == kind]) for kind in task.kinds
        ]
        tables = {"by_kind": by_kind, "by_length": by_length, "effective_length": effective}
        return result_of("retrieval", label, tables, parameters, method=method, target=512)

    places = list(product(("niah_single", "vt"), (256, 512)))
    return [
        of("as it is", dict(zip(places, ([1, 1], [0, 0], [1, 0], [0, 0]), strict=True))),
        of("yarn", dict(zip(places, ([1, 1], [1, 1], [1, 0], [1, 0]), strict=True)), "yarn"),
    ]


def test_a_table_has_the_mean_and_every_kind_with_both_effective_lengths(results, capsys):
    print_results(results)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "tiny, trained on 256 tokens: retrieval of 2 kinds, 2 questions per length",
        "as it is yarn",
        "Share found",
        "mean 256 tokens 75% (30% to 95%) 75% (30% to 95%)",
        "mean 512 tokens 0% (0% to 49%) 75% (30% to 95%)",
        "mean effective length at 85.6% none none",
        "mean effective length at 85% of its own at 256 256 512",
        "niah_single 256 tokens 100% (34% to 100%) 100% (34% to 100%)",
        "niah_single 512 tokens 0% (0% to 66%) 100% (34% to 100%)",
        "niah_single effective length at 85.6% 256 512",
        "niah_single effective length at 85% of its own at 256 256 512",
        "vt 256 tokens 50% (9% to 91%) 50% (9% to 91%)",
        "vt 512 tokens 0% (0% to 66%) 50% (9% to 91%)",
        "vt effective length at 85.6% none none",
        "vt effective length at 85% of its own at 256 256 512",
    ]


def test_a_summary_an_outcome_a_sentence_and_a_metric_tell_of_the_mean(results):
    (comparison,) = comparisons(results)
    (task,) = summary(results)["tasks"]
    assert task["results"]["yarn"]["512"]["share"] == 0.75
    outcome = RetrievalTask.outcome(comparison)
    assert {caption: column["yarn"].text for caption, column in outcome.items()} == {
        "Retrieval": "75%",
        "Effective length at 85.6%": "none",
        "Effective length at 85% of its own": "512",
    }
    assert RetrievalTask.sentence(comparison, 512, comparison.at(512), best=True) == (
        "Of what is asked for at 512 tokens, the mean of 2 kinds, as it is finds 0% (95 % interval 0% to "
        "49%) and yarn finds 75% (95 % interval 30% to 95%)."
    )
    (metric,) = RetrievalTask.metrics(comparison, "yarn")
    assert (metric.kind, metric.value, metric.settings["length"]) == ("accuracy", 0.75, 512)
    assert "vt: the key at the end of a chain of names (chance 0.33)" in RetrievalTask.method(
        comparison.parameters
    )


def test_a_card_has_the_table_and_the_sentence(results):
    record = Record.of(ropepatch.plan("tiny", to=512, method="yarn"))
    card = card_text(Extended("x", record, results, weights="sha256:0123"))
    assert "the mean of 2 kinds, this checkpoint finds 75% (95 % interval 30% to 95%)" in card
    section = card.partition("### Retrieval\n")[2].partition("###")[0]
    assert "| vt | 512 tokens | 0% (0% to 66%) | 50% (9% to 91%) |" in section
    assert "| mean | effective length at 85% of its own at 256 | 256 | 512 |" in section
    assert (
        "- Found, mean of all kinds at 256 tokens: 75% (30% to 95%) before, 75% (30% to 95%) after." in card
    )


# What it will take, and a first number


def test_a_forecast_scales_a_short_row_by_what_every_row_costs(tokenizer, monkeypatch):
    monkeypatch.setattr(estimates, "_seconds", lambda model, tokens: 60.0)
    asked = PasskeyTask(lengths=(100, 400), depths=(0.5,), trials=3).prepare(
        "tiny", tokenizer, trained=256, to=400
    )
    model, cost = Known(None), {length: length * (6 * 1 + length / 2) for length in (100, 400)}
    minutes = 3 * sum(cost.values()) / cost[100]
    line = f"about {minutes:.1f} min"
    assert forecast(model, [asked]) == f"1 measurement: {line} (a row of 100 tokens took 60 s)"
    unknown = replace(asked, task=LmEvalTask(tasks=("x",)))
    without = "without lm-eval, whose time is not known"
    assert forecast(model, [asked, unknown]) == (
        f"2 measurements: {line}, {without} (a row of 100 tokens took 60 s)"
    )
    assert forecast(model, [unknown]) == f"1 measurement, {without}"


@pytest.mark.parametrize(("patience", "expected"), [(0.0, [4, 8]), (1e9, [])])
def test_where_a_kind_takes_long_what_is_found_so_far_is_said(monkeypatch, tokenizer, patience, expected):
    monkeypatch.setattr("ropepatch.evaluation.tasks.retrieval.PATIENCE", patience)
    reader = Reader(tokenizer, right)
    _, lines = measured(reader, tokenizer, kinds=("niah_single",), lengths=(501,), trials=3)
    assert [re.sub(r" \(.*?\)", "", line) for line in lines] == [
        *(f"niah_single, 501 tokens: 100% so far, {count} of 9 questions" for count in expected),
        "niah_single, 501 tokens: 100%",
    ]


@pytest.mark.parametrize(("name", "tasks"), [("retrieval", 1), ("real", 3)])
def test_a_suite_says_what_it_will_take_and_a_number_of_the_shortest_length_first(name, tasks, tmp_path):
    suite = read_suite(name)
    few = [
        task.model_copy(update={"depths": (0.5,)}) if task.name == "retrieval" else task
        for task in suite.tasks
    ]
    suite = suite.model_copy(update={"methods": suite.methods[-1:], "tasks": tuple(few)})
    lines, page = [], tmp_path / "page.html"
    options = {"suite": suite, "limit": 1, "out": tmp_path / "out", "say": lines.append}
    results = evaluate("tiny", report=page, **options)
    said = iter(lines)
    assert any(line.startswith(f"{2 * tasks} measurements: about") for line in said)
    assert next(said).startswith("as it is: niah_single, 128 tokens: ")
    measured = [(result.task, result.label) for result in results if result.label != "floor"]
    assert len(measured) == 2 * tasks
    assert any(line.startswith("retrieval, as it is, 512 tokens: found, mean of all kinds ") for line in said)
    assert {row["kind"] for row in results[0].tables["by_kind"]} == set(KINDS)
    assert [row["length"] for row in results[0].tables["by_length"]][-1] == 512
    text = page.read_text(encoding="utf-8")
    assert "Share found" in text
    assert "effective length at 85% of its own" in text
    lines.clear()
    assert evaluate("tiny", **options) == results
    assert not any("about" in line for line in lines)

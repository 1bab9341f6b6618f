"""The study of long prompts: what it measures, and its tables on prompts whose truth is known."""

import pages_study
import pages_tables
import pytest
from pages_study import KINDS
from tiny_models import tiny_model

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.retrieval import ask

TARGET = 512


@pytest.fixture(scope="module")
def texts(tiny, tmp_path_factory):
    """Three stories, each longer than the target."""
    folder = tmp_path_factory.mktemp("texts")
    for number, tale in enumerate(held_out_tales(tiny[1], length=2 * TARGET, count=3)):
        text = tiny[1].decode(tale.ids.tolist(), skip_special_tokens=True)
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    words = ["tiny", "--to", "2x", "--texts", str(folder), "--json", str(folder / "rows.json")]
    return pages_study.STUDY.command().parse_args(words).texts


@pytest.mark.parametrize("family", ["tiny", "granite", "gpt_neox"])  # one scales its logits
def test_a_reading_gives_the_losses_and_answers_that_the_package_measures(texts, tiny, family):
    model, tokenizer = tiny
    if family != "tiny":
        model = tiny_model(family, vocab_size=len(tokenizer), max_position_embeddings=256)
    pages = pages_study.Pages(256, TARGET, (256, TARGET), 3, 2, texts)
    _, haystack = pages.page(1, tokenizer)
    with ropepatch.patch(model, "yarn", to=TARGET):
        row = pages_study.measured(model, pages_study.Reader(model, 2**14), haystack, 64)
        curve = ropepatch.perplexity(model, None, [haystack.ids.tolist()])
        answers = ask(model, [haystack]).answers
    blocks = [curve.between(begin + 1, begin + 65) for begin in range(0, 448, 64)]
    assert row["losses"][:7] == pytest.approx([block.value * block.weight for block in blocks], rel=1e-4)
    kinds = [f"{kind} {length}" for length in (256, TARGET) for kind in KINDS]
    assert [nats for kind in kinds for nats in row[kind]["log_prob"]] == pytest.approx(
        [answer.log_prob for answer in answers], abs=1e-3
    )


# Tables

NATS = {"baseline": -5.0, "yarn": -2.0, "better": -1.0, "alike": -1.0}


def made(kinds=KINDS, within=1.0, found="01") -> pages_tables.Outcome:
    """Of eight pages each is as much easier or harder for every method; `alike` has read five.

    Answers to the second kind are better in opposite order; within the window `yarn` costs 0.5 nats.
    """
    rows = [
        {
            "target": 16384,
            "method": method,
            "page": page,
            "losses": [512.0 * (3 - nats / 10 * (block >= 16) + page / 100) for block in range(31)],
            **{
                f"{kind} {length}": {
                    "found": found * 8,
                    "log_prob": [
                        (
                            nats
                            if kind == kinds[0]
                            else -6 - nats
                            if length > 8192
                            else -1 - 0.5 * (method == "yarn")
                        )
                        + page / 10
                        + noise
                    ]
                    * 16,
                }
                for kind in kinds
                for length in pages_study.doubled(8192, 16384)
            },
        }
        for method, nats in NATS.items()
        for page in range(5 if method == "alike" else 8)
        for noise in [0.01 * ((page * 7 + len(method)) % 5 - 2)]
    ]
    return pages_tables.Outcome(rows, 8192, 16384)


def test_a_method_is_compared_by_kind_on_the_pages_that_both_have_read():
    outcome = made()
    for name, gain in (("better", 1), ("alike", 1), ("baseline", -3)):
        for kind, sign in zip(KINDS, (1, -1), strict=True):
            low, high = outcome.contrasts[kind, name, "target nats"].interval()
            assert (
                low < sign * gain < high < low + 0.1
            )  # unpaired, `alike` would be 0.15 lower: its pages are harder
            assert (kind, name, "target nats") in outcome.apart
    assert outcome.contrasts["sentence", "yarn", "within nats"].value == pytest.approx(-0.5, abs=0.02)
    assert outcome.by_log_prob("number")[-1] == outcome.by_log_prob("sentence")[0] == "baseline"
    loss = pages_tables.over(
        outcome.methods["alike"],
        outcome.methods["baseline"],
        lambda row: pages_tables.loss(row, 8192, 15872, 512),
    )
    assert loss.value == pytest.approx(-0.4)


def test_a_kind_that_the_baseline_only_guesses_on_pages_is_shown_and_never_starred():
    outcome = made(found="00", kinds=("fact", "chain"))
    assert outcome.not_counted.keys() == {"fact", "chain"}
    assert (
        "*not counted*: within 8,192 tokens the unscaled model answers 0 of 384"
        in pages_tables.answers_tables(outcome)
    )
    assert "]*" not in pages_tables.contrasts_table(outcome)
    assert outcome.contrasts["fact", "better", "target nats"].value == pytest.approx(1, abs=0.02)

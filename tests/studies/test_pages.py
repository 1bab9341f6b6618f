"""The study of long pages from end to end on tiny, and its tables on pages whose truth is known."""

import json

import pages_study
import pages_tables
import pytest
from pages_study import KINDS
from tiny_models import tiny_model

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.retrieval import ask
from ropepatch.scaling import YaRN
from ropepatch.scaling.file import write_scaling

# End to end

TARGET = 512
GIVEN = "yarn:beta_fast=16:beta_slow=2"


@pytest.fixture(scope="module")
def command(tiny, tmp_path_factory):
    """The words of the command on tiny, two keys of each kind on each of three pages, and its file."""
    place = tmp_path_factory.mktemp("pages")
    (place / "texts").mkdir()
    for number, tale in enumerate(held_out_tales(tiny[1], length=2 * TARGET, count=3)):
        text = tiny[1].decode(tale.ids.tolist(), skip_special_tokens=True)
        (place / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    extended = ropepatch.extend("tiny", place / "extended", to=TARGET, say=lambda line: None).folder
    words = ["tiny", "--to", "2x", "--lengths", f"256,{TARGET}", "--pages", "3", "--keys", "2"]
    rope = ropepatch.plan("tiny", TARGET).rope
    file = write_scaling(place / "tuned.json", YaRN(factor=2.0, beta_fast=16, beta_slow=2), rope, TARGET)
    words += ["--texts", place / "texts", "--methods", f"baseline,yarn,{extended},{GIVEN},{file}"]
    file = place / "rows.json"
    return [*map(str, words), "--json", str(file)], file


def texts_of(words):
    return pages_study.STUDY.command().parse_args(words).texts


def dry_run(words, capsys):
    pages_study.main([*words, "--dry-run"])
    cells = capsys.readouterr().out.splitlines()[-1].replace(",", "").strip("| ").split(" | ")
    return dict(zip(("readings", "questions", "prompts", "tokens"), map(int, cells[2:6]), strict=True))


def test_the_command_resumes_and_reads_what_its_dry_run_says(command, tiny, capsys, monkeypatch):
    words, file = command
    ahead = dry_run(words, capsys)
    assert ahead["readings"] == 15
    assert ahead["questions"] == 15 * 2 * 2 * 2
    assert not file.exists()
    read, tokens, usual = [], 0, pages_study.measured

    def seen(module, inputs):
        nonlocal tokens
        tokens += inputs[0].numel()

    def measured(model, *how):
        if len(read) == 4 and not file.with_suffix(".stopped").exists():
            file.with_suffix(".stopped").touch()
            raise KeyboardInterrupt
        read.append(model)
        with model.get_input_embeddings().register_forward_pre_hook(seen):
            return usual(model, *how)

    monkeypatch.setattr(pages_study, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        pages_study.main(words)
    left = dry_run(words, capsys)
    assert left["readings"] == 11
    assert left["prompts"] == 8
    pages_study.main(words)
    assert len(read) == 15
    again = 256 + TARGET  # the first answers of a method, checked by both runs
    assert 0.85 * ahead["tokens"] < tokens - again <= ahead["tokens"]
    printed = capsys.readouterr().out
    pages_study.main([*words, "--table"])
    assert capsys.readouterr().out == printed
    assert dry_run(words, capsys)["tokens"] == 0
    rows = json.loads(file.read_text())["rows"]
    assert len({(row["method"], row["page"], row["novel"]) for row in rows}) == 15
    outcome = pages_tables.Outcome(rows, 256, TARGET)
    own = {"seconds", "method", "recorded"}
    for other, method in (("extended", "yarn"), ("tuned", GIVEN)):  # a checkpoint, and a scaling file
        for page, row in outcome.methods[other].items():
            patched = outcome.methods[method][page]
            assert {k: row[k] for k in row.keys() - own} == {k: patched[k] for k in patched.keys() - own}
    assert outcome.methods[GIVEN][0]["losses"] != outcome.methods["yarn"][0]["losses"]
    assert pages_tables.losses_table(outcome).splitlines()[2].split(" | ")[2].startswith("-")
    for changed in (["--keys", "1"], ["--kinds", "number"]):
        with pytest.raises(SystemExit, match=f"differs in {changed[0][2:]}"):
            pages_study.main([*words, "--methods", "linear", *changed])


@pytest.mark.parametrize("family", ["tiny", "granite", "gpt_neox"])  # one scales its logits
def test_a_reading_gives_the_losses_and_answers_that_the_package_measures(command, tiny, family):
    words, _ = command
    model, tokenizer = tiny
    if family != "tiny":
        model = tiny_model(family, vocab_size=len(tokenizer), max_position_embeddings=256)
    pages = pages_study.Pages(256, TARGET, (256, TARGET), 3, 2, texts_of(words))
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


def test_what_cannot_be_read_is_refused_before_a_model_is_loaded(command, tmp_path, monkeypatch):
    words, _ = command
    monkeypatch.setattr(pages_study, "measured", None)
    with pytest.raises(SystemExit, match=r"the texts of page 3 .* are 512 tokens short"):
        pages_study.main([*words, "--pages", "4", "--json", str(tmp_path / "a.json")])
    with pytest.raises(SystemExit, match="unknown method"):
        pages_study.main([*words, "--methods", "yarrn", "--dry-run"])


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

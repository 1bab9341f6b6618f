"""The study of long pages from end to end on tiny, and its tables on pages whose truth is known."""

import json

import pages_study
import pages_tables
import pytest
from pages_tables import KINDS
from tiny_models import tiny_model

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.retrieval import ask

# End to end

TARGET = 512


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
    words += ["--texts", place / "texts", "--methods", f"baseline,yarn,{extended}"]
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
    assert ahead["readings"] == 9
    assert ahead["questions"] == 9 * 2 * 2 * 2
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
    assert left["readings"] == 5
    assert left["prompts"] == 4
    pages_study.main(words)
    assert len(read) == 9
    again = 256 + TARGET  # the first answers of a method, checked by both runs
    assert 0.85 * ahead["tokens"] < tokens - again <= ahead["tokens"]
    printed = capsys.readouterr().out
    pages_study.main([*words, "--table"])
    assert capsys.readouterr().out == printed
    assert dry_run(words, capsys)["tokens"] == 0
    rows = json.loads(file.read_text())["rows"]
    assert len({(row["method"], row["page"], row["novel"]) for row in rows}) == 9
    by_method = pages_tables.by_method(rows, TARGET)
    own = {"seconds", "method", "recorded"}
    for page, row in by_method["extended"].items():  # a checkpoint, beside the patched model
        patched = by_method["yarn"][page]
        assert {k: row[k] for k in row.keys() - own} == {k: patched[k] for k in patched.keys() - own}
    loss = pages_tables.differences_table(rows, 256, TARGET).splitlines()[2].split(" | ")[3]
    assert loss.startswith("-")
    assert loss.endswith("*")
    with pytest.raises(SystemExit, match="differs in keys"):
        pages_study.main([*words, "--methods", "linear", "--keys", "1"])


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

NATS = {"baseline": -5.0, "good": -1.0, "alike": -1.0}


def test_a_method_is_compared_on_the_pages_that_both_have_read():
    """Of eight each is as much easier or harder for every method; `alike` has read five."""
    rows = [
        {
            "target": 16384,
            "method": method,
            "page": page,
            "losses": [512.0 * (3 - nats / 10 * (block >= 16) + page / 100) for block in range(31)],
            **{
                f"{kind} {length}": {"found": "01" * 8, "log_prob": [nats + page / 10 + noise] * 16}
                for kind in KINDS
                for length in pages_study.doubled(8192, 16384)
            },
        }
        for method, nats in NATS.items()
        for page in range(5 if method == "alike" else 8)
        for noise in [0.01 * ((page * 7 + len(method)) % 5 - 2)]
    ]
    methods = pages_tables.by_method(rows, 16384)
    for name in ("good", "alike"):
        pair = methods[name], methods["baseline"]
        low, high = pages_tables.over(*pair, lambda row: pages_tables.log_prob(row, 16384)).interval()
        assert low < 4 < high < low + 0.1  # unpaired, `alike` would be 0.15 lower: its pages are harder
        loss = pages_tables.over(*pair, lambda row: pages_tables.loss(row, 8192, 15872, 512))
        assert loss.value == pytest.approx(-0.4)

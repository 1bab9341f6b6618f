"""`fit` and `auto` as the method of `extend`: searched once, reused and recorded."""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import made_results
import pytest
import yaml
from fake_fits import DIVISORS, fake_fits
from run_recipes import record_of, small_recipe

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import RULE, Ranked, Ranking
from ropepatch.evaluation.results import as_read
from ropepatch.fitting.examples import read_splits
from ropepatch.fitting.fitting import Fitted
from ropepatch.model.source import TINY
from ropepatch.pipeline.choice import Choice
from ropepatch.pipeline.results import Results
from ropepatch.scaling.file import write_scaling
from ropepatch.training import adaptation
from ropepatch.training.recipe import Data
from ropepatch.training.supply import RecipeReader


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer(tiny):
    """Load the tokenizer only once for all runs."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("ropepatch.model.checkpoint.load_tokenizer", lambda *_: tiny[1])
        yield


def texts(folder, **settings):
    """A recipe that trains on two texts and holds out parts of the first."""
    sources = []
    for name in ("mice", "cats"):
        file = folder / f"{name}.txt"
        file.write_text(
            "<|endoftext|>".join(f"Once there were {n} {name}. They ate. " * 5 for n in range(400))
        )
        sources.append(Texts(text=str(file), weight=1.0 if name == "mice" else 2.0))
    return small_recipe(data=Data(sources=tuple(sources), windows=(64,), tokens_per_batch=128), **settings)


def test_a_fit_uses_training_data_and_no_held_out_data(tmp_path, tiny):
    shape = {"trained": 256, "target": 512, "vocabulary": 1024, "cache": tmp_path / "cache", "folder": TINY}
    reader = RecipeReader(recipe=texts(tmp_path), tokenizer=tiny[1], **shape)
    reader.write_windows(tmp_path / "windows.jsonl")
    rows = [tuple(ids) for ids in stream_documents(tmp_path / "windows.jsonl", field="input_ids")]
    assert {len(row) for row in rows} == {512}
    assert len(set(rows)) == len(rows) > 80
    first = [int(ids) for piece in reader.supply(per_step=1).pieces for ids in piece]
    assert tuple(first) not in rows
    decoded = [tiny[1].decode(row) for row in rows]
    assert [sum(name in text for text in decoded[:30]) for name in ("mice", "cats")] == [10, 20]
    joined = " ".join(decoded)
    assert "Once there were 39 mice" in joined
    assert "Once there were 39 cats" in joined
    assert "Once there were 0 mice" not in joined  # held out
    assert "Once there were 0 cats" in joined
    reader = RecipeReader(recipe=texts(tmp_path), tokenizer=tiny[1], **shape | {"target": 8192})
    with pytest.raises(RopepatchError, match=r"make \d windows of 8192 tokens, and a fit needs"):
        reader.write_windows(tmp_path / "few.jsonl")
    assert not (tmp_path / "few.jsonl").exists()


def test_a_fit_knows_the_document_of_each_sequence_of_a_recipe(tmp_path, tiny):
    """Its confidence interval is over documents: three novels count as three."""
    novels = ("mouse", "cat", "dog")
    (tmp_path / "novels.txt").write_text(
        "<|endoftext|>".join(f"Once there was a {name}. " * 900 for name in novels)
    )
    data = Data(sources=(Texts(text=str(tmp_path / "novels.txt")),), windows=(64,), tokens_per_batch=128)
    shape = {"trained": 256, "target": 512, "vocabulary": 1024, "cache": tmp_path / "cache", "folder": TINY}
    reader = RecipeReader(recipe=small_recipe(data=data), tokenizer=tiny[1], **shape)
    reader.write_windows(tmp_path / "windows.jsonl")
    splits = read_splits(
        tiny[1], tmp_path / "windows.jsonl", field="input_ids", split="train", length=512, spare=0
    )
    first = [tiny[1].decode(window[:40]) for window in splits.test]
    names = [{name for name in novels if name in text} for text in first]
    assert len(splits.test) > len(set(splits.sources)) > 1
    assert all(
        names[i] & names[j]
        for i, a in enumerate(splits.sources)
        for j, b in enumerate(splits.sources)
        if a == b
    )


@pytest.fixture
def fits(monkeypatch):
    """The arguments of every fit; the fits are faked."""
    monkeypatch.setattr(Fitted, "__str__", lambda self: "fitted")
    return fake_fits(monkeypatch)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_fitted_checkpoint_records_the_fit_and_its_settings(place, fits):
    ropepatch.extend("tiny", "out", to=512, method="fit", steps=7, init="ntk", say=print)
    assert fits[0]["say"] is print
    record = record_of(place / "out")
    assert (record["method"], record["parameters"]["attention_factor"]) == ("custom", 1.1)
    assert record["fit"] == {"start": "yarn", "text": "None"}
    assert (record["start"]["asked"]["steps"], record["start"]["asked"]["init"]) == (7, "ntk")
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.slow
def test_the_fit_of_a_recipe_is_not_repeated_after_a_failure_or_second_call(place, fits, monkeypatch):
    recipe = texts(place, trainer={"max_steps": 4})
    content = as_read(recipe.to_dict()) | {"method": {"name": "fit", "steps": 3}, "seed": 5}
    (place / "mine.yaml").write_text(yaml.safe_dump(content))
    extend = partial(ropepatch.extend, "tiny", "out", recipe="mine.yaml")

    def failed(*arguments, **options):
        raise RopepatchError("gone")

    with monkeypatch.context() as patching:
        patching.setattr(adaptation, "_train", failed)
        with pytest.raises(RopepatchError, match="gone"):
            extend()
    assert (place / "out.fit" / "start.json").is_file()
    assert "input_ids" in fits[0]["text"].read_text()
    with pytest.raises(RopepatchError, match=r"out\.fit belongs to another search: it differs in steps"):
        extend(steps=4)
    for _ in range(2):  # resumes, and then is finished
        extend()
        record = record_of(place / "out")
        assert record["fit"]["text"] == "mice.txt, cats.txt"
        assert record["start"]["parameters"]["divisors"] == [*DIVISORS]
        assert record["parameters"]["divisors"] == [*DIVISORS]
        assert not list(place.glob("out.*"))
    with pytest.raises(RopepatchError, match="already exists"):
        extend(steps=4)
    assert len(fits) == 1


def test_a_fit_folder_with_other_files_is_rejected_and_unchanged(place, fits):
    (place / "out.fit").mkdir()
    (place / "out.fit" / "mine.txt").write_text("mine")
    with pytest.raises(RopepatchError, match="contains other files"):
        ropepatch.extend("tiny", "out", to=512, method="fit")
    assert not fits
    assert (place / "out.fit" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stesp": 3}, "unknown parameter of fit 'stesp'"),
        ({"steps": "many"}, "steps must be a whole number above 0, got 'many'"),
        ({"evaluate": "demo", "text": "a.txt"}, "`evaluate` measures on `text`"),
        ({"to": 256}, "already covers 256 tokens"),
    ],
)
def test_invalid_arguments_of_a_fit_raise_errors_before_fitting_or_writing(place, fits, options, message):
    (place / "a.txt").write_text("Once there were mice. " * 1000)
    with pytest.raises(RopepatchError, match=message):
        ropepatch.extend("tiny", "out", **{"to": 512, "method": "fit"} | options)
    assert not fits
    assert [path.name for path in place.iterdir()] == ["a.txt"]


RECOMMENDED = "ntk-by-parts"
LOSS, GAIN = Mean(((15.0, 10.0),) * 3), Mean(((2.5, 10.0),) * 2)  # the gain on too few texts
RANKED = Ranked(
    label="ntk-by-parts",
    loss=LOSS,
    loss_gain=GAIN,
    short_context_loss=LOSS,
    short_context_cost=GAIN,
    answers={},
    helps=True,
)


@pytest.fixture
def chosen(monkeypatch):
    """Fake every choice with the same result."""

    def choose(options):
        Path(options.out).mkdir(parents=True)
        return Choice(
            ranking=Ranking((RANKED,), RECOMMENDED, ("Take it.",)),
            method="ntk-by-parts",
            parameters={"beta": 16.0},
            results=Results((made_results.reading(RECOMMENDED, (1.0, 2.0, 3.0)),)),
            fitted=SimpleNamespace(record={"text": "read", "seconds": 0.0}),
            left_out={},
        )

    monkeypatch.setattr("ropepatch.pipeline.choice.choose", choose)


def test_the_method_chosen_by_auto_is_recorded_with_ranking_and_fit(place, chosen, monkeypatch):
    ropepatch.extend("tiny", "out", to=512, method="auto")
    record = record_of(place / "out")
    assert (record["method"], record["parameters"]["beta"]) == ("ntk-by-parts", 16.0)
    assert record["start"]["asked"]["method"] == "auto"
    assert record["ranking"]["fit"] == {"text": "read", "seconds": 0.0}  # ranked but not chosen
    assert "fit" not in record
    assert record["ranking"]["rule"] == RULE
    assert record["ranking"]["advice"] == ["Take it."]
    (row,) = record["ranking"]["rows"]
    assert (row["label"], row["nats_per_token"]) == ("ntk-by-parts", 1.5)
    cost = [row[f"short_context_cost{end}"] for end in ("", "_low", "_high")]
    assert cost == [0.25, None, None]  # JSON has no infinity
    assert [path.name for path in place.iterdir()] == ["out"]
    monkeypatch.setitem(globals(), "RECOMMENDED", "fit")  # recorded like a requested fit
    ropepatch.extend("tiny", "fitted", to=512, method="auto")
    record = record_of(place / "fitted")
    assert record["fit"] == {"text": "read", "seconds": 0.0}
    assert "fit" not in record["ranking"]


@pytest.mark.slow
def test_measurements_of_auto_are_kept_after_a_failure(place, chosen, monkeypatch):
    extend = partial(ropepatch.extend, "tiny", "out", to=512, method="auto")

    def cut_off(options):
        Path(options.out).mkdir(parents=True)
        Path(options.out, "a result").touch()
        raise RopepatchError("cut off")

    with monkeypatch.context() as patching:
        patching.setattr("ropepatch.pipeline.choice.choose", cut_off)
        with pytest.raises(RopepatchError, match="cut off"):
            extend()
    assert (place / "out.fit" / "measured" / "a result").exists()
    (place / "a.txt").write_text("text")
    with pytest.raises(RopepatchError, match=r"out\.fit belongs to another search: it differs in text"):
        extend(text="a.txt")
    shutil.rmtree(place / "out.fit" / "measured")  # the fake choice creates it
    extend()
    assert not (place / "out.fit").exists()


def test_a_scaling_file_determines_the_target_length_and_folder_name(place):
    plan = ropepatch.plan("tiny", to=512, method="custom", divisors=[2.0] * 16)
    write_scaling(place / "learned.json", plan.scaling, plan.rope, plan.target)
    ropepatch.extend("tiny", method="learned.json")
    assert record_of(place / "tiny-learned-512")["target"] == 512

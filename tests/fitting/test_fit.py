"""`ropepatch.fit` and `ropepatch fit`: from a checkpoint to frequencies for stock transformers."""

import itertools
import json
import math
import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import edit_json
from rank_processes import on_processes
from run_recipes import read_little
from safetensors.torch import save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch.data.questions import ANSWERS
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.files import read_json
from ropepatch.fitting import descent, examples, fitting
from ropepatch.fitting.loss import FitLoss
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.source import TINY

TO = 320


@pytest.fixture(autouse=True)
def few(monkeypatch):
    read_little(monkeypatch, TO)


@pytest.fixture(scope="module")
def fitted():
    with pytest.MonkeyPatch.context() as monkeypatch:
        read_little(monkeypatch, TO)
        return ropepatch.fit("tiny", to=TO, steps=6)


@pytest.fixture
def splits(few, tiny):
    """The windows of the fit."""
    return examples.read_splits(tiny[1], None, field="text", split="", length=TO, spare=0)


def test_the_record_says_how_much_better_the_held_out_windows_are_read(fitted, tiny, splits):
    def loss(scaling, part):
        with ropepatch.patch(tiny[0], scaling):
            return ropepatch.perplexity(tiny[0], None, list(getattr(splits, part))).at(TO).value

    held = fitted.record["held_out"]
    assert (held["windows"], held["documents"]) == (2, 2)
    assert held["after"] == pytest.approx(loss(fitted.plan, "test"), abs=1e-5)
    start = ropepatch.make_scaling(fitted.record["start"], factor=TO / 256)
    assert held["before"] == pytest.approx(loss(start, "test"), abs=1e-5)
    assert held["gain"] == pytest.approx(held["before"] - held["after"], abs=1e-6)
    assert f"{abs(held['gain']):.3f} nats/token" in str(fitted)
    more = replace(fitted, record=fitted.record | {"held_out": held | {"gain_interval": [0.1, 0.25]}})
    assert "95 % 0.100 to 0.250" in str(more)


def test_yarn_is_no_nearer_to_the_teacher_and_finds_no_more_on_the_windows_that_decide(fitted, tiny, splits):
    ids = torch.stack([*splits.validation])

    def log_probs(*scaling, **options):
        with torch.no_grad(), ropepatch.patch(tiny[0], *scaling, **options):
            return tiny[0](ids).logits[:, :-1].double().log_softmax(-1)

    teacher = log_probs("rerope", to=TO, window=192)

    def divergence(scaling):
        return torch.nn.functional.kl_div(log_probs(scaling), teacher, reduction="none", log_target=True).sum(
            -1
        )

    decided = fitted.record["decided_by"]
    assert (fitted.record["teacher"]["name"], fitted.record["teacher"]["window"]) == ("rerope", 192)
    assert decided["after"] == pytest.approx(divergence(fitted.plan).mean().item(), abs=1e-6)
    yarn = ropepatch.make_scaling("yarn", factor=TO / 256)
    assert fitted.record["start"] == "yarn"
    assert decided["before"] == pytest.approx(divergence(yarn).mean().item(), abs=1e-6)
    assert divergence(fitted.plan)[:, :255].mean() <= divergence(yarn)[:, :255].mean()
    asked = fitting._exam(tiny[1], fitted.record["kinds"], TO, "validation", 0)
    for end, scaling in {"before": yarn, "after": fitted.plan}.items():
        with ropepatch.patch(tiny[0], scaling):
            log_prob = asked.of_model(tiny[0]).log_prob(TO).value
        assert decided[f"log_prob_{end}"] == pytest.approx(log_prob, abs=1e-4)
    assert decided["log_prob_after"] >= decided["log_prob_before"]
    assert fitted.record["kinds"] == ["passkey"]


def test_without_a_text_a_model_learns_from_what_it_writes_and_stock_reads_the_outcome(
    tmp_path, monkeypatch, tiny
):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(examples, "WRITTEN", 8)
    monkeypatch.setattr("ropepatch.training.self_written.SHARD", 2048)
    stranger = tmp_path / "stranger"
    shutil.copytree(TINY, stranger)
    found = ropepatch.fit(stranger, to=TO, steps=2, init="yarn")
    assert (found.record["text"], found.record["teacher"]["name"]) == ("self-generated text", "rerope")
    assert found.record["held_out"]["windows"] == 2
    ids = held_out_tales(tiny[1], length=TO, count=1)[0].ids[None]
    stock = AutoModelForCausalLM.from_pretrained(ropepatch.extend(found.plan, tmp_path / "out").folder)
    with torch.no_grad(), ropepatch.patch(tiny[0], found.scaling):
        assert torch.equal(stock(ids).logits, tiny[0](ids).logits)


@pytest.mark.parametrize("text", [None, "text.txt"])
def test_where_rows_of_the_target_take_too_long_they_are_within_the_window_at_skipped_positions(
    tmp_path, monkeypatch, text
):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(examples, "WRITTEN", 8)
    monkeypatch.setattr("ropepatch.training.self_written.SHARD", 2048)
    stranger, losses = tmp_path / "stranger", []
    shutil.copytree(TINY, stranger)
    made = FitLoss.__init__

    def make(self, *told, **options):
        made(self, *told, **options)
        losses.append(self)

    monkeypatch.setattr(FitLoss, "__init__", make)
    monkeypatch.setattr(examples, "HOUR", {"cpu": 1e10})
    if text:
        text = tmp_path / text
        text.write_text("A quiet day. " * 4 * TO)
    found = ropepatch.fit(stranger, to=TO, text=text, steps=2, init="yarn")
    assert found.record["row"] == 128
    train, validation, test = losses
    assert (train.ids.shape[1], validation.ids.shape[1], test.ids.shape[1]) == (128, TO, TO)
    assert train.skips
    assert not validation.skips
    assert train._positions.max() > 256
    assert train._answers.sum(dim=1).max() == pytest.approx(examples.SKIPPING * ANSWERS * 128)


def test_a_window_that_is_stated_is_the_teachers_too():
    found = ropepatch.fit("tiny", to=240, original=160, steps=2, init="yarn")  # config.json says 256
    assert (found.record["teacher"]["name"], found.record["teacher"]["window"]) == ("rerope", 120)


def test_a_model_that_can_have_no_map_has_no_teacher_and_says_so():
    said = []
    model = tiny_model("deepseek_v3")
    assert fitting._teacher(model, "auto", 1024, 4096, said.append) == (None, "none")
    assert said[0].startswith("training on the text's cross-entropy, without a teacher: ")
    with pytest.raises(RopepatchError, match="cannot have a position remapping") as refused:
        fitting._teacher(model, "rerope", 1024, 4096, said.append)
    assert refused.value.hint == "`teacher=none`, and a text"


def test_weight_files_with_other_names_leave_the_queries_alone_before_anything_is_learned(tmp_path):
    model, source = tiny_model("llama"), tmp_path / "source"
    model.save_pretrained(source)
    (source / "model.safetensors").unlink()
    weights = {name.removeprefix("model."): weight for name, weight in model.state_dict().items()}
    save_file(weights, source / "model.safetensors")
    said = []
    found = Checkpoint.find(source, weights=True)
    assert fitting._query_layers(model, found, said.append) is None
    assert said == [
        f"learning frequencies only, no query factors: the weights of {source} contain no "
        "model.layers.0.self_attn.q_proj.weight"
    ]


@pytest.mark.slow
def test_the_same_seed_finds_the_same_and_another_does_not(fitted):
    assert ropepatch.fit("tiny", to=TO, steps=6, init="yarn", seed=1).scaling != fitted.scaling


def test_a_budget_of_time_ends_starts_and_descent_with_the_best_until_then(monkeypatch):
    told = []

    @contextmanager
    def heard(name):
        yield lambda done, total: told.append((name, done, total))

    ticks = itertools.count()  # a second between two looks at the clock
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    for module in (fitting, descent):
        monkeypatch.setattr(module, "time", clock)
    found = ropepatch.fit("tiny", to=TO, steps=1000, minutes=0.5, progress=heard)
    starts = [(done, total) for name, done, total in told if name == "starts"]
    steps = [(done, total) for name, done, total in told if name == "fit"]
    assert starts == sorted(starts)
    assert 0 < starts[0][0] < starts[-1][0] < starts[-1][1]  # a part of what it would have read
    assert 0 < steps[-1][0] < descent.CANDIDATES * 30 < steps[-1][1]
    record = found.record
    assert (record["minutes"], record["stopped"]) == (0.5, True)
    assert record["decided_by"]["after"] <= record["decided_by"]["before"]
    last = {row["start"]: row["step"] for row in record["history"]}
    assert sum(last.values()) == steps[-1][0]  # where they stopped they were judged
    assert "stopped after 0.5 min" in str(found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_fit_on_a_gpu_has_the_losses_of_one_on_the_cpu():
    by_cpu, by_gpu = (
        ropepatch.fit("tiny", to=TO, steps=2, init="yarn", device=device).record for device in ("cpu", "cuda")
    )
    for one, other in zip(by_cpu["history"], by_gpu["history"], strict=True):
        assert other["train"] == pytest.approx(one["train"], rel=0.1)
        assert other["held_out"] == pytest.approx(one["held_out"], abs=0.02)
    assert by_gpu["held_out"]["own_window"] == pytest.approx(by_cpu["held_out"]["own_window"], abs=0.02)


class StoppedError(Exception):
    pass


@contextmanager
def stopping(name, at=5):
    def advance(done, total):
        if name == "fit" and done == at:
            raise StoppedError

    yield advance


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_to_the_same_end_and_its_folder_is_refused_to_another(fitted, tmp_path):
    work = tmp_path / "work"
    with pytest.raises(StoppedError):
        ropepatch.fit("tiny", to=TO, steps=6, work=work, progress=stopping)
    assert 0 < torch.load(work / "fit.pt", weights_only=True)["fit"]["steps"] < 5
    with pytest.raises(RopepatchError, match="belongs to another fit"):
        ropepatch.fit("tiny", to=TO, steps=7, work=work)
    again = ropepatch.fit("tiny", to=TO, steps=6, work=work)
    assert again.scaling == fitted.scaling
    assert again.record["forward_tokens"] == fitted.record["forward_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "steps"), [(math.inf, 0), (0, 2)])
def test_a_fit_between_validations_resumes_from_its_start_or_from_a_minute_ago(
    tmp_path, monkeypatch, seconds, steps
):
    monkeypatch.setattr(descent, "CHECKS", 1)
    monkeypatch.setattr(fitting, "SAVING", seconds)
    work, how = tmp_path / "work", {"to": TO, "steps": 4, "init": "yarn"}
    whole = ropepatch.fit("tiny", **how)
    with pytest.raises(StoppedError):
        ropepatch.fit("tiny", **how, work=work, progress=partial(stopping, at=3))
    assert torch.load(work / "fit.pt", weights_only=True)["fit"]["steps"] == steps
    again = ropepatch.fit("tiny", **how, work=work)
    assert again.scaling == whole.scaling
    assert again.record["forward_tokens"] == whole.record["forward_tokens"]


def ids_in(file, ids):
    file.write_text(json.dumps({"input_ids": ids}))
    return file


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"to": 256}, "256"),
        ({"to": "1x"}, "256"),
        ({"init": "nonsense"}, "nonsense"),
        ({"init": "dynamic"}, "dynamic"),
        ({"init": "rerope"}, "rerope"),
        ({"minutes": 0}, "minutes"),
        ({"spare": 2, "text": lambda to: ids_in(to, list(range(5, 1000)) * 3)}, "9 windows"),
        ({"text": lambda to: ids_in(to, [*range(5, 900)] * 10 + [5000] * 10)}, "5000"),
        ({"model": "babyllama-361", "teacher": "none"}, "text"),
        ({"work": lambda to: to.write_bytes(b"PK torn") and to.parent}, "fit.pt"),
    ],
)
def test_what_no_fit_can_be_made_of_is_refused(arguments, named, tmp_path, shared):
    file = tmp_path / ("fit.pt" if "work" in arguments else "ids.jsonl")
    given = {name: value(file) if callable(value) else value for name, value in arguments.items()}
    model = given.pop("model", "tiny")
    with pytest.raises(RopepatchError, match=named):
        fitting.fit(model if model == "tiny" else shared / "checkpoints" / model, **{"to": TO} | given)


@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_quantised_weights_are_an_error_before_any_text_or_weight_is_read(kind, tmp_path, run_here):
    source = shutil.copytree(TINY, tmp_path / "source")
    edit_json(source / "config.json", quantization_config={"quant_method": kind})
    (source / "model.safetensors").write_bytes(b"")
    done = run_here("fit", source, "--to", TO, "--text", tmp_path / "none", "--out", tmp_path / "fit.json")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            f"error: the weights of {source} are quantised: fit needs gradients through them",
            "hint: fit the unquantised checkpoint without query factors, and use the result here",
        ],
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_whose_state_cannot_be_read_is_not_removed(tmp_path):
    (tmp_path / "fit.pt").write_bytes(b"PK\x03\x04 torn")
    fitting.remove_finished(tmp_path)
    assert (tmp_path / "fit.pt").exists()


# the command


@pytest.mark.slow
def test_the_command_writes_a_small_file_that_stands_for_a_method_or_a_checkpoint_with_the_record(
    tmp_path, run_here
):
    file, out = tmp_path / "fitted.json", tmp_path / "out"
    fit = ("fit", "tiny", "--to", "1.25x", "--steps", 2, "--init", "yarn")
    assert run_here(*fit, "--out", file).returncode == 0
    planned = run_here("plan", "tiny", "--method", file, "--json")
    assert json.loads(planned.stdout)["parameters"]["divisors"] == read_json(file)["parameters"]["divisors"]
    assert read_json(file)["fit"]["steps"] == 2
    done = run_here(*fit, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    record = read_json(out / "ropepatch.json")
    assert record["fit"]["held_out"] == json.loads(done.stdout)["held_out"]
    assert record["method"] == "custom"
    assert record["verified"]["logits"] == "equal"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fitted.json", "out"]


def test_the_command_asks_for_a_free_place_and_for_room_before_it_works(tmp_path, monkeypatch, run_here):
    (tmp_path / "here.json").write_text("{}")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def work(*args, **kwargs):
        raise RopepatchError("it worked")

    monkeypatch.setattr("ropepatch.fitting.fit", work)
    for words, message in (
        (["--out", tmp_path / "here.json"], "already exists"),
        (["--out", tmp_path / "new" / "out"], "the copy needs"),
        (["--out", tmp_path / "out.json"], "it worked"),
        (["--out", tmp_path / "out", "--link-weights"], "it worked"),
    ):
        done = run_here("fit", "tiny", "--to", TO, *words)
        assert message in done.stderr


def fit_on_one_of_several(rank, out):
    with pytest.MonkeyPatch.context() as monkeypatch:
        read_little(monkeypatch, TO)
        scored = []
        score = FitLoss.score
        monkeypatch.setattr(FitLoss, "score", lambda *told: scored.append(1) or score(*told))
        found = ropepatch.fit("tiny", to=TO, steps=6, work=out / "work", minutes=60)
    torch.save((found.record, len(scored)), out / f"{rank}.pt")


@pytest.mark.slow
def test_processes_share_a_fit_and_find_what_one_does_to_the_bit(fitted, tmp_path):
    on_processes(2, fit_on_one_of_several, tmp_path)
    (first, some), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert abs(some - others) <= 2
    assert others > 10
    differing = ("seconds", "env", "minutes", "stopped")
    alone, first, second = (
        {key: value for key, value in record.items() if key not in differing}
        for record in (fitted.record, first, second)
    )
    assert first == second == alone

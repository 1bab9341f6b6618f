"""The parts of a fit: vectors, the learnable RoPE, the loss, starts and single steps."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

import ropepatch
from ropepatch.attention import remap_positions
from ropepatch.data.texts import cut_windows
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean
from ropepatch.extension.queries import QueryLayers
from ropepatch.fitting import descent, fitting
from ropepatch.fitting.descent import (
    Descent,
    FitSettings,
    FitState,
    begin,
    draw_windows,
    proceed,
    screened,
    starts_of,
    step,
)
from ropepatch.fitting.examples import read_splits
from ropepatch.fitting.loss import BACKWARD, FitLoss, LearnableRope, Outcome, learnable
from ropepatch.fitting.vectors import LARGEST, Vector, mixtures, published
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.processes import ALONE
from ropepatch.scaling.file import read_scaling, write_scaling
from ropepatch.scaling.rope import Frequencies, Rope

ROPE = Rope(rotary_dim=16, rope_theta=10000.0, original_max_position_embeddings=64)
WITH_QUERIES = ("llama", "qwen3", "gemma3_text", "cohere")
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "cohere", "gpt_oss", "gpt_neox", "phi"]


def surveyed(model_type="llama"):
    model = tiny_model(model_type).eval()
    return model, Checkpoint.of(model)


def some_vector(pairs, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return Vector(torch.rand(pairs, generator=draw), torch.tensor(0.1))


def with_queries(vector, layers, seed=0):
    """The vector with random query factors, rounded as in a scaling."""
    draw = torch.Generator().manual_seed(seed)
    amplitudes, phases = (
        0.5 + torch.rand(layers.shape, generator=draw),
        torch.randn(layers.shape, generator=draw) / 4,
    )
    factors = torch.stack((amplitudes.mul(100).round().div(100).log(), phases.mul(100).round().div(100)), 1)
    return replace(vector, log_queries=factors.flatten())


def some_windows(rows=3, length=24, seed=0):
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(seed))


def fit_loss(model, module, rope, windows=None):
    """The loss, with an original context length of 8 tokens."""
    short = Rope(rope.rotary_dim, rope.rope_theta, 8, rope.carried, rope.carried_attention_factor)
    return FitLoss(model, module, short, some_windows() if windows is None else windows)


@torch.no_grad()
def logits_under(model, ids, *scaling, **options):
    with ropepatch.patch(model, *scaling, **options):
        return model(input_ids=ids, use_cache=False).logits


# vectors


@pytest.mark.parametrize("name", ["yarn", "llama3"])
def test_a_vector_says_the_frequencies_of_a_method(name):
    expected = ropepatch.make_scaling(name, factor=4.0).frequencies(ROPE)
    got = Vector.of(expected, ROPE).scaling(4.0).frequencies(ROPE)
    torch.testing.assert_close(got.inv_freq, expected.inv_freq, rtol=1e-6, atol=0)
    assert got.attention_factor == pytest.approx(expected.attention_factor, rel=1e-6)


def test_a_pair_that_stands_still_gets_the_largest_divisor_and_one_that_already_stood_none():
    stopped = Frequencies(ROPE.inv_freq() * torch.tensor([1.0] * 7 + [0.0]))
    assert Vector.of(stopped, ROPE).log_divisors[-1] == LARGEST
    rope = Rope(16, 10000.0, 64, (*ROPE.inv_freq().tolist()[:7], 0.0))
    vector = Vector.of(Frequencies(rope.inv_freq() / 2), rope)
    assert vector.log_divisors.tolist() == pytest.approx([math.log(2)] * 7 + [0.0])


def test_the_smallest_amplitude_is_one_that_a_scaling_file_can_hold(tmp_path):
    vector = replace(Vector.unscaled(ROPE), log_queries=torch.full((2 * ROPE.num_pairs,), -20.0))
    file = write_scaling(tmp_path / "f.json", vector.scaling(4.0), ROPE, 256)
    assert read_scaling(file).scaling == vector.scaling(4.0)


# the learnable RoPE


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_learnable_rope_computes_what_a_patch_of_the_same_frequencies_and_queries_does(model_type):
    model, found = surveyed(model_type)
    ids, plain = torch.randint(3, 100, (1, 20)), some_vector(found.rope.num_pairs)
    layers = QueryLayers(model, found) if model_type in WITH_QUERIES else None
    vectors = [plain] if layers is None else [plain, with_queries(plain, layers)]
    learned, patched = [], []
    with learnable(model, found, layers) as module, torch.no_grad():
        for vector in vectors:
            module.vector = vector
            learned.append(model(input_ids=ids, use_cache=False).logits)
    for vector in vectors:
        patched.append(logits_under(model, ids, vector.scaling(4.0, layers.shape[1] if layers else 1)))
    largest = patched[0].abs().max().item()
    torch.testing.assert_close(learned, patched, rtol=1e-3, atol=1e-3 * largest)
    torch.testing.assert_close(learned[0], patched[0], rtol=1e-4, atol=1e-4 * largest)
    assert layers is None or (learned[0] - learned[1]).abs().max() > 0.01 * largest


def test_afterwards_the_same_stock_module_stands_there_and_the_weights_are_trainable_again():
    model, found = surveyed()
    stock = model.get_submodule(found.site.path)
    frozen = next(model.parameters()).requires_grad_(False)

    def interrupted():
        with learnable(model, found):
            assert isinstance(model.get_submodule(found.site.path), LearnableRope)
            assert not any(parameter.requires_grad for parameter in model.parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert model.get_submodule(found.site.path) is stock
    assert [parameter for parameter in model.parameters() if not parameter.requires_grad] == [frozen]


# the loss of a model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_score_and_gradient_are_those_of_all_logits_at_once(model_type, monkeypatch):
    monkeypatch.setattr("ropepatch.fitting.loss.SHORT", 0.0)
    monkeypatch.setattr("ropepatch.fitting.loss.CHUNK", 10)
    monkeypatch.setattr("ropepatch.fitting.loss.AT_ONCE", 48)
    model, found = surveyed(model_type)
    windows, vector = some_windows(), some_vector(found.rope.num_pairs)
    with learnable(model, found) as module:
        loss = fit_loss(model, module, found.rope, windows)
        score, (value, gradient) = loss.score(vector, [2, 0]), loss.gradient(vector, [2, 0])
        spent, (whole, short, _) = loss.spent, loss.validate(vector)
        flat = vector.flat().requires_grad_()
        module.vector = Vector.from_flat(flat, found.rope.num_pairs)
        log_probs = model(input_ids=windows, use_cache=False).logits.float().log_softmax(dim=-1)
        losses = -log_probs[:, :-1].gather(2, windows[:, 1:, None])[..., 0]
        expected = losses[[2, 0]].mean()
        expected.backward()
    assert score == pytest.approx(expected.item(), rel=1e-5)
    assert value == pytest.approx(expected.item(), rel=1e-5)
    assert (whole, short) == pytest.approx((losses.mean().item(), losses[:, :7].mean().item()), rel=1e-5)
    assert spent == loss.cost(2) * (1 + 1 + BACKWARD) == 2 * 24 * (2 + BACKWARD)
    assert gradient.abs().max() > 0
    torch.testing.assert_close(gradient, flat.grad, rtol=1e-3, atol=1e-5)


def divergences(p, q):
    """KL(p || q) [N, T - 1] of logits [N, T, V], in float64."""
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p[:, :-1], q[:, :-1]))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("model_type", ["llama", "cohere"])
def test_with_a_teacher_a_token_loses_its_divergence_from_the_base_under_the_map(model_type, monkeypatch):
    """Neither the reverse, nor from a base without a remapping, nor from one whose queries are multiplied."""
    monkeypatch.setattr("ropepatch.fitting.loss.SHORT", 0.0)
    monkeypatch.setattr("ropepatch.fitting.loss.CHUNK", 20)
    model, found = surveyed(model_type)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # what a model expects depends on the rope
    windows = some_windows(length=2 * found.rope.original_max_position_embeddings)
    layers = QueryLayers(model, found)
    vector = with_queries(some_vector(found.rope.num_pairs), layers)

    to = windows.shape[1]
    student, teacher, plain = (
        logits_under(model, windows, *scaling, **options).double().numpy()
        for *scaling, options in (
            (vector.scaling(2.0, layers.shape[1]), {}),
            ("rerope", {"to": to}),
            ("none", {"to": to}),
        )
    )
    expected = divergences(teacher, student)
    with remap_positions(model, "rerope", to=to) as mapped:
        pass
    with learnable(model, found, layers) as module:
        loss = FitLoss(model, module, found.rope, windows, teacher=mapped)
        module.vector = vector  # as a step before has left it
        first, again = (loss.token_losses(vector).double().numpy() for _ in range(2))
        value, gradient = loss.gradient(vector, [0, 1, 2])
        flat = vector.flat().requires_grad_()
        module.vector = Vector.from_flat(flat, found.rope.num_pairs)
        log_q = model(input_ids=windows, use_cache=False).logits.log_softmax(-1)[:, :-1]
        p = torch.tensor(teacher)[:, :-1].softmax(-1).float()
        (p * (p.log() - log_q)).sum(-1).mean().backward()
    tolerance = 1e-3 * expected.max()
    np.testing.assert_allclose(first, expected, atol=tolerance)
    assert np.array_equal(first, again)
    assert value == pytest.approx(expected.mean(), rel=1e-3)
    torch.testing.assert_close(gradient, flat.grad, rtol=1e-2, atol=1e-3 * flat.grad.abs().max().item())
    for mistake in (divergences(student, teacher), divergences(plain, student)):
        assert np.abs(mistake - expected).max() > 10 * tolerance


@pytest.mark.parametrize("taught", [True, False])
def test_an_answer_loses_its_cross_entropy_times_its_weight(taught, monkeypatch):
    """Also with a teacher, which does not know it; the other tokens of the row lose what they do without.

    Those within the trained context weigh a given part of the row at least.
    """
    monkeypatch.setattr("ropepatch.fitting.loss.SHORT", 0.6)
    monkeypatch.setattr("ropepatch.fitting.loss.CHUNK", 20)
    model, found = surveyed()
    windows, vector = (
        some_windows(length=2 * found.rope.original_max_position_embeddings),
        some_vector(found.rope.num_pairs),
    )
    weights = torch.zeros(windows.shape)
    weights[0, 20:23], weights[1, 30:] = 5.0, 0.5
    with remap_positions(model, "rerope", to=windows.shape[1]) as mapped:
        pass
    with learnable(model, found) as module:
        given = [model, module, found.rope, windows]
        teacher = mapped if taught else None
        plain, entropy, asked = (
            FitLoss(*given, *how, answers=answers).token_losses(vector).double().numpy()
            for how, answers in (((teacher,), None), ((), None), ((teacher,), weights))
        )
        loss = FitLoss(*given, teacher, answers=weights)
        value, gradient = loss.gradient(vector, [0, 1])
        along = 0.002 * gradient / gradient.norm()
        ends = [Vector.from_flat(vector.flat() + way * along, found.rope.num_pairs) for way in (1, -1)]
        rise = loss.score(ends[0], [0, 1]) - loss.score(ends[1], [0, 1])
    answers = weights.double().numpy()[:, 1:]
    expected = np.where(answers > 0, answers * entropy, plain)
    np.testing.assert_allclose(asked, expected, rtol=1e-4, atol=1e-6)
    within = found.rope.original_max_position_embeddings - 1
    value_of = 0.6 * expected[:2, :within].mean() + 0.4 * expected[:2, within:].mean()
    assert value == pytest.approx(value_of, rel=1e-4)
    assert rise == pytest.approx(2 * (gradient @ along).item(), rel=0.05)
    assert taught == (np.abs(plain - entropy).max() > 0.1)


def test_at_skipped_positions_a_row_is_one_text_and_its_teacher_reads_it_within_the_trained_context(
    monkeypatch,
):
    """A jump is no new document; and the attention factor, of too few keys to learn it from, stays."""
    monkeypatch.setattr("ropepatch.fitting.loss.CHUNK", 20)
    model, found = surveyed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    L = found.rope.original_max_position_embeddings
    T = L // 2
    windows, vector = some_windows(length=T), some_vector(found.rope.num_pairs)
    windows[1] = windows[0]  # the same text with another jump
    true, second = torch.arange(T), torch.arange(T) >= T // 2
    places, taught_at = (
        true + torch.tensor(jumps)[:, None] * second for jumps in ([3 * L, 9, 0], [L - T, 9, 0])
    )
    causal = torch.full((T, T), torch.finfo(torch.float32).min).triu(1).expand(3, 1, T, T)

    def logits_at(positions):
        given = {"input_ids": windows, "position_ids": positions, "attention_mask": causal}
        return model(**given, use_cache=False).logits.double().numpy()

    with torch.no_grad():
        teacher, beyond, at_true = map(logits_at, (taught_at, places, true.expand(3, T)))
        with ropepatch.patch(model, vector.scaling(4.0)):
            student = logits_at(places)
    with remap_positions(model, "rerope", to=4 * L) as mapped:
        pass
    with learnable(model, found) as module:
        loss = FitLoss(model, module, found.rope, windows, mapped, positions=places, target=4 * L)
        assert loss.factor == 4.0
        expected = divergences(teacher, student)
        tolerance = 1e-3 * expected.max()
        np.testing.assert_allclose(loss.token_losses(vector), expected, atol=tolerance)
        after = step(loss, Descent.at(vector), batch=2, settings=FitSettings(init="yarn")).vector
    moved = (after - vector.flat()).abs() > 1e-3
    assert moved.tolist() == [True] * found.rope.num_pairs + [False]
    for mistake in (divergences(beyond, student), divergences(at_true, student)):
        assert np.abs(mistake - expected).max() > 10 * tolerance


def held_bytes(problem, vector):
    """What a gradient is, and what its forward pass leaves for the backward pass, in bytes."""
    found = {}

    def keep(tensor):
        found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _, gradient = problem.gradient(vector, [0, 1])
    return gradient, sum(found.values())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_activations_that_do_not_fit_are_computed_again_and_the_gradient_is_the_same(monkeypatch, family):
    model, found = surveyed(family)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5  # which must stay off
    vector = some_vector(found.rope.num_pairs)
    with learnable(model, found) as module:
        problem = fit_loss(model, module, found.rope)
        whole, held = held_bytes(problem, vector)
        monkeypatch.setattr("ropepatch.fitting.loss.ACTIVATIONS", 0)
        assert (again := held_bytes(problem, vector))[1] < held / 2
        assert torch.equal(again[0], whole)
    assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize("rows", [1, 8])
def test_no_token_of_a_backward_pass_weighs_what_float16_rounds_away(rows, monkeypatch):
    model, found = surveyed()
    weighed, losses = [], FitLoss._losses

    def read(*told):
        weighed.extend(told[-1].tolist())
        return losses(*told)

    monkeypatch.setattr(FitLoss, "_losses", read)
    with learnable(model, found) as module:
        fit_loss(model, module, found.rope, some_windows(rows)).gradient(some_vector(8), range(rows))
    assert all(0.25 < weight < 4 for weight in weighed)


def test_text_that_no_method_reads_with_a_finite_loss_is_refused():
    with pytest.raises(RopepatchError, match="no method has a finite loss on this text"):
        run(FitSettings(init="yarn"), train=Bowl(offset=math.nan))


def test_a_gradient_that_is_not_finite_moves_nothing():
    broken, start = Bowl(offset=math.inf), some_vector(8)
    state = step(broken, Descent.at(start), batch=2, settings=FitSettings(init="yarn"))
    torch.testing.assert_close(state.vector, start.flat())
    assert state.loss is None


# descent, on a bowl


class Bowl:
    """A quadratic around a point, with noise that depends on the window; stands for a FitLoss."""

    rope, factor, processes = ROPE, 4.0, ALONE

    def __init__(self, length=2048, offset=0.0, factors=0, skips=False):
        self.skips = skips
        self.point = torch.linspace(0.0, 1.0, 9 + factors)
        self.ids = torch.zeros(40, length, dtype=torch.long)
        self.spent, self.offset = 0, offset

    def cost(self, windows):
        return windows

    def score(self, vector, windows):
        self.spent += len(windows)
        return self.offset + (vector.flat() - self.point).square().sum().item()

    def gradient(self, vector, windows):
        noise = sum(0.01 * math.sin(window) for window in windows)
        return self.score(vector, windows), 2 * (vector.flat() - self.point) + noise

    def validate(self, vector):
        return Outcome(self.score(vector, range(4)), 0.0, 0.0)


class Worse(Bowl):
    """Validation windows with the lowest loss at the start."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def validate(self, vector):
        self.calls += 1
        return Outcome(float(self.calls), 0.0, 0.0)


class Less(Bowl):
    """Windows with a higher short-context loss or a lower answer log-prob for all vectors not near YaRN's."""

    def __init__(self, what, near=0.0):
        super().__init__()
        self.what, self.near = what, near

    def validate(self, vector):
        away = float((vector.flat() - published(ROPE, 4.0)["yarn"].flat()).abs().max())
        away = max(0.0, away - self.near)
        loss = super().validate(vector).loss
        return Outcome(loss, away, 0.0) if self.what == "short" else Outcome(loss, 0.0, -10 * away)


class Seventh(Worse):
    """Windows whose loss and short-context loss are lower only at the seventh validation."""

    def validate(self, vector):
        loss = super().validate(vector).loss
        return Outcome(0.5 if self.calls == 7 else loss, float(self.calls < 7), 0.0)


def run(settings, train=None, validation=None, state=None):
    train, validation = train or Bowl(), validation or Bowl()
    state = state or begin(train, validation, settings)
    return [state, *proceed(train, validation, settings, state)]


def test_descent_finds_the_bottom_and_a_single_step_is_no_race():
    assert run(FitSettings(steps=1, init="yarn,none"))[-1].steps == 1
    best = run(FitSettings(steps=200, init="yarn"))[-1].best
    assert best.loss < 0.01
    assert best.vector.tolist() == pytest.approx(Bowl().point.tolist(), abs=0.1)


def test_a_fit_from_one_method_plans_no_race():
    assert FitSettings(steps=100, init="yarn").planned_steps() == 100
    assert FitSettings(steps=100).planned_steps() == 100 + 3 * 20


def test_a_descent_that_gets_worse_on_the_held_out_windows_stops_and_returns_the_start():
    last = run(FitSettings(steps=300, init="yarn"), validation=Worse())[-1]
    assert last.finished
    assert last.steps < 300
    assert last.best is last.reference
    assert last.best.start == "yarn"


@pytest.mark.parametrize("what", ["short", "answers"])
def test_no_vector_is_the_best_that_reads_the_trained_context_worse_than_yarn_or_finds_less(what):
    settings = FitSettings(steps=40, init="yarn,none,linear")
    last = run(settings, validation=Less(what))[-1]
    assert (last.best.start, last.best.step) == ("yarn", 0)
    assert min(row["held_out"] for row in last.history) < last.best.loss
    assert run(FitSettings(steps=40, init="linear"), validation=Less(what))[-1].best.step > 0


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_where_the_last_vector_is_worse_than_yarn_one_nearer_to_it_may_be_better_on_both(monkeypatch, share):
    monkeypatch.setattr(descent, "CHECKS", 1)
    settings, yarn = FitSettings(steps=40, init="yarn"), published(ROPE, 4.0)["yarn"].flat()
    way = run(settings)[-1].best.vector - yarn
    validation = Less("short", near=1.2 * share * float(way.abs().max()))
    *_, descended, last = states = run(settings, validation=validation)
    torch.testing.assert_close(last.best.vector, yarn + share * way)
    assert [row["share"] for row in last.history] == [1.0, 0.5, 0.25][: 2 if share == 0.5 else 3]
    assert len(states) == 40 + len(last.history)  # one may stop, or resume, after each
    assert len(run(settings, validation=validation, state=descended)) == 2


def test_a_better_vector_nearer_to_yarn_does_not_continue_a_descent_that_has_lost_its_patience():
    settings, validation = FitSettings(steps=300, init="yarn"), Seventh()
    shares = [(row["step"], row["share"]) for row in run(settings, validation=validation)[-1].history]
    every = 300 // descent.CHECKS
    steps = [every * check for check in range(1, descent.PATIENCE + 2)]
    assert shares == [*((step, 1.0) for step in steps), (steps[-1], 0.5)]


@pytest.mark.parametrize(
    ("sound", "winner"), [({"yarn"}, "yarn"), (set(), "linear"), ({"yarn", "linear"}, "linear")]
)
def test_a_start_that_reads_worse_or_finds_less_loses_the_race_to_one_that_does_not(sound, winner):
    state = begin(Bowl(), Bowl(), FitSettings(steps=40, init="yarn,linear"))
    losses = {"yarn": 2.0, "linear": 1.0}
    history = tuple(
        {"start": name, "step": 8, "held_out": loss, "not_worse": name in sound}
        for name, loss in losses.items()
    )
    assert [*replace(state, history=history).decided().candidates] == [winner]


def test_starts_that_lose_the_race_do_not_stop_the_one_that_wins():
    states = run(FitSettings(steps=60, init="yarn,none,linear"), validation=Worse())
    assert states[-1].steps > 3 * 12 + 20


def test_the_best_of_a_race_goes_on_alone():
    states = run(FitSettings(steps=60, init="none,linear,yarn"))
    assert len(states[0].candidates) == 3
    ((name, racer),) = states[-1].candidates.items()
    assert racer.step == 60
    last = {row["start"]: row["held_out"] for row in states[-1].history if row["step"] <= 12}
    assert name == min(last, key=last.get)
    assert states[-1].steps == 60 + 2 * 12


def test_a_descent_that_is_interrupted_anywhere_resumes_to_the_bit(tmp_path):
    settings = FitSettings(steps=40, init="none,yarn", seed=3)

    def to_the_bit(state):
        torch.save(state.state_dict(), tmp_path / "state.pt")
        return repr(numbers(torch.load(tmp_path / "state.pt", weights_only=True)))

    def numbers(value):
        if isinstance(value, dict):
            return {name: numbers(part) for name, part in value.items()}
        return value.tolist() if isinstance(value, torch.Tensor) else value

    whole = run(settings)
    for stopped in (0, 5, 13, 30):
        before = to_the_bit(whole[stopped])
        kept = FitState.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert to_the_bit(kept) == before
        assert to_the_bit(run(settings, state=kept)[-1]) == to_the_bit(whole[-1])
        assert before != to_the_bit(whole[-1])


def test_all_windows_are_read_before_one_comes_again():
    seen = [window for number in range(8) for window in draw_windows(20, 5, number, seed=1)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]
    assert draw_windows(20, 5, 2, seed=1) != draw_windows(20, 5, 2, seed=2)


@pytest.mark.parametrize(("skips", "attention", "queries"), [(False, 0.3, 0.4), (True, 0.0, 0.1)])
def test_a_step_is_adams(skips, attention, queries):
    settings, problem = FitSettings(steps=100, init="yarn"), Bowl(factors=4, skips=skips)
    state = Descent.at(some_vector(8), factors=4)
    values = state.vector.double().numpy()
    first = second = np.zeros(13)
    turns = [64 * 10000.0 ** (-2 * pair / 16) / (2 * math.pi) for pair in range(8)]
    scale = np.array([1 / math.sqrt(max(turn, 1.0)) for turn in turns] + [attention] + 4 * [queries])
    for count in range(1, 4):
        _, gradient = Bowl(factors=4).gradient(
            Vector.from_flat(torch.tensor(values), 8), draw_windows(40, 2, count - 1, 0)
        )
        slope = gradient.double().numpy() * scale
        first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
        rate = 0.08 * min(1.0, count / 5) * 0.5 * (1 + math.cos(math.pi * (count - 1) / 100))
        moved = rate * (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.99**count)) + 1e-8)
        values = values - scale * moved
        state = step(problem, state, batch=2, settings=settings)
    assert state.vector.tolist() == pytest.approx(values.tolist(), rel=1e-4, abs=1e-5)


def test_screening_puts_the_best_start_first_and_mixtures_follow_from_their_seed():
    problem, settings = Bowl(), FitSettings(init="linear,none,yarn")
    starts = starts_of(problem, settings)
    order = screened(problem, starts, settings)
    assert order == sorted(starts, key=lambda name: problem.score(starts[name], [0]))
    drawn = (mixtures(published(ROPE, 4.0), count=5, seed=seed) for seed in (1, 1, 2))
    first, again, other = ([vector.flat().tolist() for vector in each.values()] for each in drawn)
    assert first == again != other


# the text


def test_windows_to_learn_from_to_decide_by_and_to_spare_have_nothing_in_common(tmp_path, tiny):
    _, tokenizer = tiny
    file = tmp_path / "ids.jsonl"
    documents = [list(range(i, i + 7)) for i in range(0, 700, 7)]
    file.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in documents))
    spared = [tuple(ids) for _, ids in cut_windows(tokenizer, documents, length=10, count=6)]
    splits = read_splits(tokenizer, file, field="input_ids", split="train", length=10, spare=6)
    together = [tuple(window.tolist()) for window in splits.windows] + spared
    assert sorted(together) == [tuple(range(i, i + 10)) for i in range(0, 700, 10)]


def test_the_gain_of_a_fit_is_over_documents_not_over_their_windows(tmp_path, tiny, monkeypatch):
    """Three documents of forty windows: the gains of one document form one cluster."""
    _, tokenizer = tiny
    file = tmp_path / "ids.jsonl"
    lengths = (100, 200, 100)
    file.write_text("\n".join(json.dumps({"input_ids": [number] * n}) for number, n in enumerate(lengths)))
    splits = read_splits(tokenizer, file, field="input_ids", split="train", length=10, spare=0)
    assert [int(window[0]) for window in splits.test] == list(splits.sources)
    assert sorted({*splits.sources}) == [0, 1, 2]
    gains = {0: 0.1, 1: 0.2, 2: 0.6}
    losses = {1: torch.tensor([[1 + gains[source]] * 9 for source in splits.sources])}
    losses[0] = torch.ones_like(losses[1])
    test = SimpleNamespace(
        rope=ROPE,
        model=None,
        exam=None,
        module=SimpleNamespace(),
        ids=torch.stack([*splits.test]),
        token_losses=lambda vector: losses[int(vector.log_attention)],
    )
    monkeypatch.setattr(fitting, "perplexity", lambda *_, **__: LossCurve(tuple(losses[0])))
    before, after = (SimpleNamespace(vector=torch.full((9,), float(end))) for end in (1, 0))
    found = fitting._outcome(test, splits.sources, SimpleNamespace(reference=before, best=after))
    counts = [list(splits.sources).count(source) * 9 for source in gains]
    clusters = [(gain * count, count) for gain, count in zip(gains.values(), counts, strict=True)]
    assert found["documents"] == 3 < found["windows"]
    assert found["gain_interval"] == pytest.approx(Mean.of(clusters).interval(), abs=1e-5)

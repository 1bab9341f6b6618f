"""The parts of a fit: vectors, a rope that learns, objectives, shapes, starts and single steps."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

import ropepatch
from ropepatch.data.texts import windows
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.fitting.bench import FitBench
from ropepatch.fitting.course import Course, Descent, begin, draw_windows, proceed, screened, starts_of, step
from ropepatch.fitting.examples import Examples, needle_examples, read_material, text_examples, with_keys
from ropepatch.fitting.learnable import LearnableRope
from ropepatch.fitting.objective import Objective
from ropepatch.fitting.problem import BACKWARD, Problem, reading
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.vectors import (
    LARGEST,
    SHAPES,
    SMOOTH_WAVES,
    Vector,
    mixtures,
    project,
    published,
)
from ropepatch.model.survey import survey
from ropepatch.scaling.rope import Frequencies, Rope

ROPE = Rope(rotary_dim=16, rope_theta=10000.0, original_max_position_embeddings=64)
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "cohere", "gpt_oss", "gpt_neox", "phi"]
numbers = st.lists(st.floats(-5, 5), min_size=1, max_size=12)


def surveyed(model_type="llama"):
    model = tiny_model(model_type).eval()
    return model, survey(model.config.to_dict(), model)


def some_vector(pairs, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return Vector(torch.rand(pairs, generator=draw), torch.tensor(0.1))


def some_examples(rows=3, length=24, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (rows, length), generator=draw)
    return Examples(ids, 0.5 + torch.rand(rows, length - 1, generator=draw))


def plain_losses(model, ids):
    """[N, T - 1], from all logits at once."""
    log_probs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=-1)
    return -log_probs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


# vectors


@pytest.mark.parametrize("name", ["yarn", "ntk", "linear", "llama3"])
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


# a rope that learns


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_learnable_rope_computes_what_a_patch_of_the_same_frequencies_does(model_type):
    model, found = surveyed(model_type)
    vector, ids = some_vector(found.rope.num_pairs), torch.randint(3, 100, (1, 20))
    with torch.no_grad(), reading(model, found) as module:
        module.vector = vector
        learnable = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad(), ropepatch.patch(model, vector.scaling(4.0)):
        patched = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(learnable, patched, rtol=1e-4, atol=1e-4 * patched.abs().max().item())


def test_afterwards_the_same_stock_module_stands_there_and_the_weights_are_trainable_again():
    model, found = surveyed()
    stock = model.get_submodule(found.site.path)
    frozen = next(model.parameters()).requires_grad_(False)

    def interrupted():
        with reading(model, found):
            assert isinstance(model.get_submodule(found.site.path), LearnableRope)
            assert not any(parameter.requires_grad for parameter in model.parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert model.get_submodule(found.site.path) is stock
    assert [parameter for parameter in model.parameters() if not parameter.requires_grad] == [frozen]


# the objective of a model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_score_and_gradient_are_those_of_all_logits_at_once(model_type, monkeypatch):
    monkeypatch.setattr("ropepatch.fitting.problem.CHUNK", 10)
    monkeypatch.setattr("ropepatch.fitting.problem.AT_ONCE", 48)
    model, found = surveyed(model_type)
    examples, vector = some_examples(), some_vector(found.rope.num_pairs)
    with reading(model, found) as module:
        problem = Problem(model, module, found.rope, 4.0, examples)
        score, (value, gradient) = problem.score(vector, [2, 0, 1]), problem.gradient(vector, [2, 0, 1])
        flat = vector.flat().requires_grad_()
        module.vector = Vector.from_flat(flat)
        expected = (plain_losses(model, examples.ids) * examples.weights).sum() / examples.weights.sum()
        expected.backward()
    assert score == pytest.approx(expected.item(), rel=1e-5)
    assert value == pytest.approx(expected.item(), rel=1e-5)
    assert gradient.abs().max() > 0
    torch.testing.assert_close(gradient, flat.grad, rtol=1e-3, atol=1e-5)


def test_the_gradient_of_slow_pairs_is_the_difference_quotient(tiny):
    model, tokenizer = tiny
    found = survey(model.config.to_dict(), model)
    tale = held_out_tales(tokenizer, length=300, count=1)[0]
    vector = Vector.of(ropepatch.make_scaling("yarn", factor=2.0).frequencies(found.rope), found.rope)
    with reading(model, found) as module:
        problem = Problem(model, module, found.rope, 2.0, text_examples([tale.ids], Objective(), 256))
        _, gradient = problem.gradient(vector, [0])
        for place in (8, 10, -1):
            moved = torch.zeros(len(gradient))
            moved[place] = 0.01
            high, low = (
                problem.score(Vector.from_flat(vector.flat() + sign * moved), [0]) for sign in (1, -1)
            )
            assert gradient[place].item() == pytest.approx((high - low) / 0.02, rel=0.02, abs=2e-5)


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
    examples, vector = some_examples(), some_vector(found.rope.num_pairs)
    with reading(model, found) as module:
        problem = Problem(model, module, found.rope, 4.0, examples)
        whole, held = held_bytes(problem, vector)
        monkeypatch.setattr("ropepatch.fitting.problem.ACTIVATIONS", 0)
        assert (again := held_bytes(problem, vector))[1] < held / 2
        assert torch.equal(again[0], whole)
    assert not any("forward" in vars(part) for part in model.modules())


def test_needles_and_text_have_their_shares_and_the_objective_is_the_mean_of_that_of_the_windows():
    model, found = surveyed()
    text, needles, vector = some_examples(), some_examples(seed=5), some_vector(8)
    with reading(model, found) as module:

        def problem(**shares):
            return Problem(model, module, found.rope, 4.0, text, Objective(**shares), needles)

        shares = ({"needles": 2.0}, {}, {"needles": 1.0, "text": 0.0})
        both, words, keys = (problem(**share).score(vector, [0, 1, 2]) for share in shares)
        every = problem(needles=2.0).by_window(vector)
    assert both == pytest.approx(words + 2 * keys, rel=1e-6)
    assert words != pytest.approx(keys)
    assert every.mean().item() == pytest.approx(both, rel=1e-6)
    assert len(set(every.tolist())) == 3


def test_forward_tokens_are_counted_and_a_backward_pass_is_two_of_them():
    model, found = surveyed()
    with reading(model, found) as module:
        objective = Objective(needles=1.0)
        problem = Problem(model, module, found.rope, 4.0, some_examples(), objective, some_examples())
        problem.score(some_vector(8), [0, 1])
        assert problem.spent == problem.cost(2) == 2 * 2 * 24
        problem.gradient(some_vector(8), [0])
        assert problem.spent == 96 + (1 + BACKWARD) * 48


def test_the_gradient_of_a_float16_model_is_that_of_the_same_in_float32(tiny):
    ids = [tale.ids for tale in held_out_tales(tiny[1], length=300, count=2)]
    gradients = []
    for dtype in (torch.float32, torch.float16):
        model = copy.deepcopy(tiny[0]).to(dtype)
        found = survey(model.config.to_dict(), model)
        start = Vector.of(ropepatch.make_scaling("linear", factor=2.0).frequencies(found.rope), found.rope)
        with reading(model, found) as module:
            problem = Problem(model, module, found.rope, 2.0, text_examples(ids, Objective(), 256))
            gradients.append(
                problem.gradient(start, [0, 1])[1][4:]
            )  # of slow pairs: rounding moves the others
    torch.testing.assert_close(*gradients, rtol=0.1, atol=0.02 * gradients[0].abs().max().item())


def test_no_token_of_a_backward_pass_weighs_what_float16_rounds_away(monkeypatch):
    model, found = surveyed()
    weighed, read = [], Problem._read

    def reads(problem, vector, batch, weights=None):
        weighed.append(weights)
        return read(problem, vector, batch, weights)

    monkeypatch.setattr(Problem, "_read", reads)
    with reading(model, found) as module:
        Problem(model, module, found.rope, 4.0, some_examples(rows=8)).gradient(some_vector(8), range(8))
    assert all(0.25 < weights.mean() < 4 for weights in weighed)


def test_text_that_no_method_reads_with_a_finite_loss_is_refused():
    with pytest.raises(RopepatchError, match="no method reads this text with a finite loss"):
        run(FitSettings(init="yarn"), problem=Bowl(offset=math.nan))


def test_a_gradient_that_is_not_finite_moves_nothing():
    broken, start = Bowl(offset=math.inf), some_vector(8)
    state = step(broken, Descent.at(start), batch=2, settings=FitSettings(init="yarn"))
    assert state.vector == pytest.approx(tuple(start.flat().tolist()))
    assert state.loss is None


# weights of tokens


def test_short_weighs_the_tokens_within_the_trained_context():
    weights = Objective(short=3.0).weights(length=11, trained=5)
    assert torch.allclose(weights[:4] / weights[4:8], torch.tensor(3.0))
    assert weights.mean().item() == pytest.approx(1.0)


@pytest.mark.parametrize("ends", [(8, 16, 32), (8, 12, 24)])
def test_with_all_lengths_the_means_up_to_each_count_alike(ends):
    nll = torch.rand(ends[-1] - 1, generator=torch.Generator().manual_seed(0))
    weights = Objective(lengths="all").weights(length=ends[-1], trained=8)
    expected = np.mean([nll[: end - 1].numpy().mean() for end in ends])
    assert (weights * nll).mean().item() == pytest.approx(expected, rel=1e-5)


def test_key_tokens_are_those_that_the_long_context_makes_likely():
    examples = Examples(torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 4))
    near = torch.tensor([[5.0, 5.0, 1.0, 9.0]])
    far = torch.tensor([[1.0, 4.0, 0.5, 6.5]])  # gains 4, 1, 0.5, 2.5; the last is still unlikely
    assert with_keys(examples, far, near, 2.0).weights.tolist() == [[3.0, 1.0, 1.0, 1.0]]


def test_of_a_passkey_prompt_only_the_answer_counts(tiny):
    _, tokenizer = tiny
    examples = needle_examples(tokenizer, length=200, count=3, seed=0)
    assert examples.ids.shape == (3, 200)
    for ids, weights in zip(examples.ids, examples.weights, strict=True):
        answer = ids[1:][weights > 0]
        assert weights.tolist()[-len(answer) :] == [1.0] * len(answer)
        prompt = tokenizer.decode(ids[: 200 - len(answer)])
        assert prompt.count(tokenizer.decode(answer).strip()) == 2  # the needle says it twice


# shapes


@given(numbers)
def test_monotone_is_the_isotonic_regression(values):
    got = SHAPES["monotone"](torch.tensor(values, dtype=torch.float64)).tolist()
    ends = range(len(values))
    expected = [
        max(min(np.mean(values[a : b + 1]) for b in ends[i:]) for a in ends[: i + 1]) for i in ends
    ]  # the max-min formula
    assert got == pytest.approx(expected, abs=1e-9)


@given(numbers)
def test_smooth_keeps_slow_cosines_and_drops_the_others(values):
    pairs = len(values)
    got = SHAPES["smooth"](torch.tensor(values, dtype=torch.float64)).numpy()
    for wave in range(pairs):
        cosine = np.cos(np.pi * wave * (np.arange(pairs) + 0.5) / pairs)
        kept = np.dot(cosine, values) if wave < SMOOTH_WAVES else 0.0
        assert np.dot(cosine, got) == pytest.approx(kept, abs=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_kept_pairs_keep_their_frequencies(shape):
    vector = project(some_vector(8), shape, 3)
    assert vector.log_divisors[:3].tolist() == [0.0, 0.0, 0.0]
    assert vector.log_divisors[3:].abs().min() > 0
    again = project(vector, shape, 3)
    torch.testing.assert_close(again.log_divisors, vector.log_divisors)


# starts


def test_mixtures_follow_from_their_seed():
    starts = published(ROPE, 4.0)
    first, again, other = (mixtures(starts, count=5, seed=seed) for seed in (1, 1, 2))
    assert [v.flat().tolist() for v in first.values()] == [v.flat().tolist() for v in again.values()]
    assert [v.flat().tolist() for v in first.values()] != [v.flat().tolist() for v in other.values()]


# descent, on a bowl


class Bowl:
    """A quadratic around a point, with noise that depends on the window; stands for a Problem."""

    rope, factor = ROPE, 4.0

    def __init__(self, length=2048, offset=0.0):
        self.point = torch.linspace(0.0, 1.0, 9)
        self.examples = Examples(torch.zeros(40, length, dtype=torch.long), torch.zeros(40, length - 1))
        self.num_windows, self.spent, self.offset, self.asked = 40, 0, offset, []

    def cost(self, windows):
        return windows

    def score(self, vector, windows):
        self.spent += len(windows)
        return self.offset + (vector.flat() - self.point).square().sum().item()

    def gradient(self, vector, windows):
        self.asked.append(tuple(windows))
        noise = sum(0.01 * math.sin(window) for window in windows)
        return self.score(vector, windows), 2 * (vector.flat() - self.point) + noise

    def by_window(self, vector):
        return torch.full((4,), self.score(vector, range(4)), dtype=torch.float64)


class Worse(Bowl):
    """Held-out windows that like the start best and everything else less."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def by_window(self, vector):
        self.calls += 1
        return torch.full((4,), float(self.calls), dtype=torch.float64)


def run(settings, problem=None, held_out=None, course=None):
    problem, held_out = problem or Bowl(), held_out or Bowl()
    course = course or begin(problem, held_out, settings)
    return [course, *proceed(problem, held_out, settings, course)]


def test_descent_finds_the_bottom():
    best = run(FitSettings(steps=200, init="yarn"))[-1].best
    assert best.loss < 0.01
    assert best.vector == pytest.approx(Bowl().point.tolist(), abs=0.1)


def test_a_descent_that_gets_worse_on_the_held_out_windows_stops_and_returns_the_start():
    last = run(FitSettings(steps=300, init="yarn"), held_out=Worse())[-1]
    assert last.finished
    assert last.taken < 300
    assert last.best == last.first
    assert last.best.start == "yarn"


def test_starts_that_lose_the_race_do_not_stop_the_one_that_wins():
    courses = run(FitSettings(steps=60, init="yarn,none,linear"), held_out=Worse())
    assert courses[-1].taken > 3 * 12 + 20


def test_a_single_step_is_no_race():
    courses = run(FitSettings(steps=1, init="yarn,none"))
    assert courses[-1].finished
    assert courses[-1].taken == 1


def test_the_best_of_a_race_goes_on_alone():
    courses = run(FitSettings(steps=60, init="none,linear,yarn"))
    assert len(courses[0].racers) == 3
    ((name, racer),) = courses[-1].racers.items()
    assert racer.step == 60
    last = {row["start"]: row["held_out"] for row in courses[-1].history if row["step"] <= 12}
    assert name == min(last, key=last.get)
    assert courses[-1].taken == 60 + 2 * 12


def test_a_descent_that_is_interrupted_anywhere_goes_on_as_if_it_had_not_been():
    settings = FitSettings(steps=40, init="none,yarn", seed=3)
    whole = run(settings)
    for stopped in (0, 5, 13, 30):
        kept = Course.from_dict(json.loads(json.dumps(whole[stopped].to_dict())))
        assert kept == whole[stopped]
        assert run(settings, course=kept)[-1].best == whole[-1].best
        assert run(settings, course=kept)[-1].racers == whole[-1].racers


def test_all_windows_are_read_before_one_comes_again():
    seen = [window for number in range(8) for window in draw_windows(20, 5, number, seed=1)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]
    assert draw_windows(20, 5, 2, seed=1) != draw_windows(20, 5, 2, seed=2)


def test_a_step_is_adams():
    settings, problem = FitSettings(steps=100, init="yarn"), Bowl()
    state = Descent.at(some_vector(8))
    values = np.array(state.vector, dtype=np.float64)
    first = second = np.zeros(9)
    turns = [64 * 10000.0 ** (-2 * pair / 16) / (2 * math.pi) for pair in range(8)]
    scale = np.array([1 / math.sqrt(max(turn, 1.0)) for turn in turns] + [0.3])
    for count in range(1, 4):
        _, gradient = Bowl().gradient(
            Vector.from_flat(torch.tensor(values)), draw_windows(40, 2, count - 1, 0)
        )
        slope = gradient.double().numpy() * scale
        first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
        rate = 0.08 * min(1.0, count / 5) * 0.5 * (1 + math.cos(math.pi * (count - 1) / 100))
        moved = rate * (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.99**count)) + 1e-8)
        values = values - scale * moved
        state = step(problem, state, batch=2, settings=settings)
    assert state.vector == pytest.approx(values.tolist(), rel=1e-4, abs=1e-5)


def test_screening_puts_the_best_start_first():
    problem, settings = Bowl(), FitSettings(init="linear,none,yarn")
    starts = starts_of(problem, settings)
    order = list(screened(problem, starts, settings))
    assert order == sorted(starts, key=lambda name: problem.score(starts[name], [0]))


# the text


def test_windows_to_learn_from_to_decide_by_and_to_spare_have_nothing_in_common(tmp_path, tiny):
    _, tokenizer = tiny
    file = tmp_path / "ids.jsonl"
    documents = [list(range(i, i + 7)) for i in range(0, 700, 7)]
    file.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in documents))
    spared = windows(tokenizer, documents, length=10, count=6)
    material = read_material(tokenizer, file, field="input_ids", split="train", length=10, spare=6)
    together = [tuple(window.tolist()) for window in material.windows] + [*map(tuple, spared)]
    assert sorted(together) == [tuple(range(i, i + 10)) for i in range(0, 700, 10)]


def test_the_gain_of_a_fit_is_over_documents_not_over_their_windows(tmp_path, tiny, monkeypatch):
    """Three documents of forty windows: what each gains is a cluster, however many windows it has."""
    _, tokenizer = tiny
    file = tmp_path / "ids.jsonl"
    lengths = (100, 200, 100)
    file.write_text("\n".join(json.dumps({"input_ids": [number] * n}) for number, n in enumerate(lengths)))
    material = read_material(tokenizer, file, field="input_ids", split="train", length=10, spare=0)
    assert [int(window[0]) for window in material.unseen] == list(material.sources)
    assert sorted({*material.sources}) == [0, 1, 2]
    bench = SimpleNamespace(window=4, own_window=lambda examples: torch.zeros(len(examples), 9))
    gains = {0: 0.1, 1: 0.2, 2: 0.6}
    before = torch.tensor([[1 + gains[source]] * 9 for source in material.sources])
    bench.held_out = SimpleNamespace(losses=lambda losses, examples: losses)
    ends = (SimpleNamespace(point=losses) for losses in (before, torch.ones_like(before)))
    course = SimpleNamespace(**dict(zip(("first", "best"), ends, strict=True)))
    found = FitBench.outcome(bench, course, material)
    counts = [list(material.sources).count(source) * 9 for source in gains]
    clusters = [(gain * count, count) for gain, count in zip(gains.values(), counts, strict=True)]
    assert found["documents"] == 3 < found["windows"]
    assert found["gain_interval"] == pytest.approx(Mean.of(clusters).interval(), abs=1e-5)


def test_too_little_text_is_refused_with_the_number_of_windows(tmp_path, tiny):
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"input_ids": list(range(95))}))
    with pytest.raises(
        RopepatchError, match=r"makes 9 windows of 10 tokens, 2 of them left out, and a fit needs 10"
    ):
        read_material(tiny[1], file, field="input_ids", split="train", length=10, spare=2)


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (Objective, {"text": 0.0}, "neither text nor needles count"),
        (FitSettings, {"search": "evolution", "shape": "monotone"}, "are of the descent, not of evolution"),
        (FitSettings, {"search": "evolution", "keep": 1}, "are of the descent, not of evolution"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(kind, wrong, message):
    with pytest.raises(RopepatchError, match=message):
        kind(**wrong)

"""The searches without gradients, on problems whose best vector is known."""

import math

import pytest
import torch

from ropepatch.errors import RopepatchError
from ropepatch.fitting.searches import SEARCHES, Sizes, critical_pair, run_search
from ropepatch.fitting.vectors import Vector
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Rope

FACTOR, WINDOW, PAIRS = 4.0, 256, 8
ROPE = Rope(2 * PAIRS, 10000.0, WINDOW)
OWN = 0.5 * math.log(1 + math.log(FACTOR) / math.log(WINDOW))  # ln a of LongRoPE
WINDOWS = (3, 1, 4)
TOKENS = 100
BEST = [1.0, 1.1, 1.4, 2.0, 3.0, 3.6, 4.5, 4.9]
FORMULAS = ("linear", "ntk", "yarn")


class Bowl:
    """A problem whose loss is the squared distance to a best vector, plus what each window adds."""

    def __init__(self, divisors=BEST, attention=1.2, *, rope=ROPE, factor=FACTOR, loss=None):
        self.best = torch.tensor([*divisors, attention], dtype=torch.float64).log()
        self.rope, self.factor, self.loss = rope, factor, loss or self.distance
        self.num_windows, self.spent, self.asked = 10, 0, []

    def cost(self, windows):
        return TOKENS * windows

    def distance(self, vector):
        return (vector.flat().double() - self.best).square().sum().item()

    def score(self, vector, windows):
        self.spent += self.cost(len(windows))
        self.asked.append((vector, tuple(windows)))
        return self.loss(vector) + sum(windows)

    def divisors(self):
        return torch.stack([vector.log_divisors for vector, _ in self.asked]).double().exp()


def formulas(rope=ROPE, factor=FACTOR):
    return [Vector.of(make_scaling(name, factor=factor).frequencies(rope), rope) for name in FORMULAS]


def run(name, problem, *, candidates=1500, seed=0, starts=None):
    """The search to its end, with a budget for so many candidates and a token less than one more."""
    starts = formulas(problem.rope, problem.factor) if starts is None else starts
    budget = problem.spent + (candidates + 1) * problem.cost(len(WINDOWS)) - 1
    return list(run_search(name, problem, starts, budget=budget, seed=seed, windows=WINDOWS))


def course(name, problem, *, seed=0):
    """All that a search asks for, in turn."""
    run(name, problem, candidates=100, seed=seed)
    return [tuple(vector.flat().tolist()) for vector, _ in problem.asked]


def at_own_attention(vector):
    return Vector(vector.log_divisors, torch.tensor(OWN))


each = pytest.mark.parametrize("name", SEARCHES)


def test_evolution_finds_a_monotone_optimum():
    problem = Bowl(attention=math.exp(OWN))
    *_, found = run("evolution", problem)
    start = min(problem.distance(at_own_attention(vector)) for vector in formulas())
    assert problem.distance(found.vector) < 0.003 < 0.1 * start
    assert found.vector.log_divisors.exp().tolist() == pytest.approx(BEST, rel=0.05)


def test_coordinates_find_any_optimum_and_its_attention_factor():
    best = [1.01, 0.94, 1.27, 1.93, 3.3, 0.77, 2.88, 23.7]
    problem = Bowl(best, attention=1.07)
    *_, found = run("coordinates", problem)
    assert found.vector.flat().exp().tolist() == pytest.approx([*best, 1.07], rel=0.005)


def test_longrope2_finds_the_critical_pair_and_factors_above_s():
    """An optimum in its space: the curve to pair 3, then more than s."""
    best = [*(5.0 ** (pair / 3) for pair in range(3)), 5.0, 5.5, 6.5, 7.0, 7.9]
    problem = Bowl(best, attention=math.exp(OWN))
    *_, found = run("longrope2", problem)
    assert found.vector.log_divisors.exp().tolist() == pytest.approx(best, rel=0.1)


@each
@pytest.mark.parametrize("candidates", [1, 7, 150])
def test_the_budget_is_used_and_never_exceeded_and_all_are_scored_on_the_same_windows(name, candidates):
    problem = Bowl()
    problem.spent = 12345
    *_, found = run(name, problem, candidates=candidates)
    assert len(problem.asked) == candidates
    assert found.spent <= problem.spent == 12345 + candidates * TOKENS * len(WINDOWS)
    assert {windows for _, windows in problem.asked} == {WINDOWS}


@each
def test_a_budget_below_one_candidate_is_refused_before_the_search(name):
    problem = Bowl()
    problem.spent = 1
    with pytest.raises(RopepatchError, match="3 windows, 300 forward tokens each, and has 299 left"):
        next(run_search(name, problem, formulas(), budget=300, seed=0, windows=WINDOWS))
    assert not problem.asked


@each
def test_what_is_yielded_is_every_new_best_and_nothing_else(name):
    problem = Bowl()
    found = run(name, problem, candidates=200)
    expected, best = [], math.inf
    for number, (vector, windows) in enumerate(problem.asked, start=1):
        score = problem.distance(vector) + sum(windows)
        if score < best:
            best = score
            expected.append((vector.flat().tolist(), score, number * TOKENS * len(WINDOWS)))
    assert [(vector.flat().tolist(), score, spent) for vector, score, spent in found] == expected


@each
def test_an_equal_score_is_no_improvement(name):
    assert len(run(name, Bowl(loss=lambda vector: 1.0), candidates=50)) == 1


@each
def test_a_seed_gives_one_course_whatever_was_spent_before_and_another_seed_another(name):
    problem = Bowl()
    problem.spent = 10**6
    assert course(name, problem) == course(name, Bowl())
    assert course(name, Bowl(), seed=0) != course(name, Bowl(), seed=1)


@pytest.mark.parametrize("place", range(3))
def test_coordinates_begin_at_the_best_start_and_change_one_value_at_a_time(place):
    problem = Bowl()
    starts = sorted(formulas(), key=problem.distance)
    starts.insert(place, starts.pop(0))
    run("coordinates", problem, candidates=4, starts=starts)
    *_, (first, _) = problem.asked
    assert (first.flat() != starts[place].flat()).sum() == 1


def test_coordinates_go_far_in_growing_steps():
    """From a divisor of 4 towards 50000: 38 steps of 0.25 in logarithms, each in a sweep of at least 9."""
    problem = Bowl([1.0] * (PAIRS - 1) + [50000.0], 1.0)
    *_, found = run("coordinates", problem, candidates=120)
    assert found.vector.log_divisors[-1] > 9


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.37, 8.0])
def test_evolution_asks_for_monotone_divisors_from_1_to_a_quarter_above_s_and_its_own_a(factor):
    """With a start that is neither monotone nor inside the bounds."""
    problem = Bowl(factor=factor)
    wild = Vector(torch.tensor([0.0, -1.0, 3.0, 0.2, 9.0, 0.1, 0.0, 0.5]), torch.tensor(0.3))
    run("evolution", problem, candidates=300, starts=[*formulas(factor=factor), wild])
    divisors = problem.divisors()
    assert (divisors.diff() >= 0).all()
    assert divisors.min() >= 1 - 1e-6
    assert divisors.max() <= 1.25 * factor * (1 + 1e-6)
    assert divisors.max() > factor + 0.2 * (factor - 1) or factor == 1
    a = math.sqrt(1 + math.log(factor) / math.log(WINDOW))
    attention = [vector.log_attention.exp().item() for vector, _ in problem.asked]
    assert attention == pytest.approx([a] * len(attention))


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.37, 8.0])
def test_longrope2_asks_for_an_ntk_curve_up_to_a_critical_pair_and_s_to_2_s_beyond(factor):
    problem = Bowl(factor=factor)
    run("longrope2", problem, candidates=300)
    critical = set()
    for divisors in problem.divisors():
        assert (divisors.diff() >= 0).all()
        # pairs 2 and 4 are the first of at most ten and at most one turn inside 256 tokens at base 10000
        fits = {
            pair
            for pair in (2, 3, 4)
            if torch.allclose(
                divisors[:pair], divisors[pair] ** (torch.arange(pair).double() / pair), rtol=1e-5
            )
            and divisors[pair] >= factor * (1 - 1e-6)
        }
        assert fits
        assert divisors[-1] <= 2 * factor * (1 + 1e-6)
        critical |= fits
    assert critical == {2, 3, 4}
    assert problem.divisors()[:, -1].max() > 1.5 * factor


def test_the_founders_of_longrope2_are_one_constant_from_s_to_2_s_for_every_critical_pair():
    drawn = set()
    for seed in range(20):
        problem = Bowl()
        run("longrope2", problem, candidates=3, seed=seed)
        for pair, divisors in zip((2, 3, 4), problem.divisors(), strict=True):
            assert len(divisors[pair:].unique()) == 1 < len(divisors[pair - 1 :].unique())
            drawn.add(round(divisors[-1].item(), 4))
    assert len(drawn) > 40
    assert 4 <= min(drawn) < 4.4 < 7.6 < max(drawn) <= 8


def test_a_mutation_moves_three_pairs_in_ten():
    """The first population from one start: most are mutations of it, at 0.3 a pair."""
    problem = Bowl()
    start = Vector(torch.linspace(0.1, 1.4, PAIRS), torch.tensor(0.0))
    run("evolution", problem, candidates=64 * 2, starts=[start])
    moved = (problem.divisors()[1:64] / start.log_divisors.double().exp() - 1).abs() > 1e-5
    assert 0.22 < moved.double().mean() < 0.38


def test_a_crossover_takes_every_divisor_from_one_of_two_of_the_32_best():
    """The second half of the first generation; the rest of it are mutations, where an exchange is in vain."""
    problem = Bowl()
    run("evolution", problem, candidates=64 + 16 + 16)
    divisors = problem.divisors()
    losses = torch.tensor([problem.distance(vector) for vector, _ in problem.asked])
    best = divisors[losses[:64].argsort()[:32]]
    alike = (divisors[80:, None] - best).abs() < 1e-6  # [16, 32, P]
    mixed = (alike[:, :, None] | alike[:, None]).all(-1).flatten(1).any(1)
    copied = alike.all(-1).any(1)
    assert mixed.sum() >= 8
    assert not copied.any()


def test_the_sizes_are_the_authors_and_shrink_where_two_generations_cannot_be_paid():
    assert Sizes.within(128) == Sizes.within(5000) == Sizes(64, 32, 16, 16) == Sizes()
    assert Sizes.within(64) == Sizes(32, 16, 8, 8)
    assert Sizes.within(1) == Sizes(2, 2, 1, 1)
    for candidates in range(8, 128):
        sizes = Sizes.within(candidates)
        assert sizes.population + 2 * (sizes.mutations + sizes.crossovers) <= candidates


def test_an_evolution_ends_when_nothing_new_is_left():
    """One pair and s = 1: the divisors 1.00 to 1.25 are all there is."""
    rope = Rope(2, 10000.0, WINDOW)
    problem = Bowl([1.2], 1.0, rope=rope, factor=1.0)
    still = Vector(torch.zeros(1), torch.tensor(0.0))
    *_, found = run("evolution", problem, candidates=500, starts=[still])
    assert len(problem.asked) == 26
    assert found.vector.log_divisors.exp().item() == pytest.approx(1.2)


def test_coordinates_end_when_no_step_above_a_thousandth_helps():
    problem = Bowl()
    run("coordinates", problem, candidates=5000)
    best, here, changes = math.inf, None, []
    for number, (vector, _) in enumerate(problem.asked):
        if number >= len(FORMULAS):
            changes.append((vector.flat() - here).abs().max().item())
        if problem.distance(vector) < best:
            best, here = problem.distance(vector), vector.flat()
    assert 0.0009 < min(changes) < 0.002
    assert len(problem.asked) < 1000


def test_a_divisor_that_wants_to_grow_for_ever_stays_in_range():
    problem = Bowl(loss=lambda vector: -vector.flat().sum().item())
    *_, found = run("coordinates", problem, candidates=3000)
    assert found.vector.flat().tolist() == [12.0] * (PAIRS + 1)


@each
def test_a_vector_that_breaks_the_model_counts_as_the_worst(name):
    """As some of what is asked for does here."""

    def broken(value):
        def loss(vector):
            return value if vector.log_divisors[-1].exp() > 4.5 else problem.distance(vector)

        return loss

    problem = Bowl(loss=broken(math.nan))
    found = run(name, problem, candidates=200)
    assert all(math.isfinite(score) for _, score, _ in found)
    assert (problem.divisors()[:, -1] > 4.5).sum() > 5
    assert course(name, Bowl(loss=broken(math.nan))) == course(name, Bowl(loss=broken(math.inf)))


@pytest.mark.parametrize(
    ("head_dim", "base", "window", "pairs"),
    [(128, 5e5, 8192, 35), (96, 1e4, 2048, 31), (16, 1e4, 256, 4), (8, 1e4, 512, 2), (32, 1e4, 256, 7)],
    ids=["Llama-3", "Phi3-mini", "babyllama-361", "stories-260k", "tiny"],
)
def test_the_critical_pairs_are_those_of_the_paper(head_dim, base, window, pairs):
    """The theoretical one, and the lowest, where the period is a tenth of the window."""
    rope = Rope(head_dim, base, window)
    paper, lowest = (head_dim / 2 * math.log(window / (2 * math.pi * turns), base) for turns in (1, 10))
    assert critical_pair(rope) == math.ceil(paper) == pairs
    assert critical_pair(rope, 10) == math.ceil(lowest)


@pytest.mark.parametrize("window", [8, 100, 10**9])
@pytest.mark.parametrize("head_dim", [2, 4])
def test_a_critical_pair_leaves_one_on_either_side_where_there_are_two(head_dim, window):
    """In windows that no pair, or every pair, turns in."""
    rope = Rope(head_dim, 10000.0, window)
    problem = Bowl([2.0] * rope.num_pairs, rope=rope)
    run("longrope2", problem, candidates=40, starts=[Vector(torch.zeros(rope.num_pairs), torch.tensor(0.0))])
    divisors = problem.divisors()
    assert (divisors[:, -1] >= FACTOR * (1 - 1e-6)).all()
    if head_dim == 4:
        assert (divisors[:, 0] == 1).all()


def test_a_rope_that_is_scaled_already_is_searched_from_its_own_frequencies():
    """Slower by 8, the pairs of 6.3, 19.9 and 62.8 tokens take 50, 159 and 503: two turn inside 256."""
    carried = tuple((ROPE.inv_freq() / 8).tolist())
    rope = Rope(2 * PAIRS, 10000.0, WINDOW, carried=carried, carried_attention_factor=1.1)
    assert (critical_pair(ROPE), critical_pair(rope)) == (4, 2)
    problem = Bowl(rope=rope)
    still = Vector(torch.zeros(PAIRS), torch.tensor(0.0))
    next(run_search("evolution", problem, [still], budget=10**6, seed=0, windows=WINDOWS))
    ((vector, _),) = problem.asked
    assert vector.log_divisors.tolist() == [0.0] * PAIRS
    assert vector.log_attention.item() == pytest.approx(OWN)

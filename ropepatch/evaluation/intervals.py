"""One estimator for losses and answers: means over clusters, their confidence intervals, paired differences.

Tokens of one document are not independent, nor are answers from one haystack. So the sampling unit is the
cluster: a document for losses, a haystack for answers. Notation: cluster i has the sum s_i and the weight
w_i; W is the sum of the weights, r = sum(s) / W the mean, p_i = w_i / W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from ropepatch.errors import RopepatchError

Cluster = tuple[float, float]  # sum, weight
Interval = tuple[float, float]
Name = TypeVar("Name")

LEVEL = 0.95
FEWEST = 3  # clusters for an interval
SAME = 1e-9  # the greatest standard error, as a share of the mean, of clusters that differ only by rounding


@dataclass(frozen=True)
class Mean:
    """A mean over clusters: nats per token over documents, or retrieval accuracy over haystacks.

    Attributes:
        clusters: The sum and the weight of each: nats and tokens, or correct answers and all answers.
        share: Whether it is the share of correct answers, each 0 or 1.
    """

    clusters: tuple[Cluster, ...]
    share: bool = False

    @classmethod
    def of(cls, clusters: Sequence[Sequence[float]], *, share: bool = False) -> Mean:
        """The mean of clusters from JSON."""
        return cls(
            tuple((float(total), float(weight)) for total, weight in clusters), share
        )

    @property
    def weight(self) -> float:
        """W, the number of tokens or answers."""
        return math.fsum(weight for _, weight in self.clusters)

    @property
    def value(self) -> float:
        """r, independent of the order of the clusters; NaN if there are none."""
        return (
            math.fsum(total for total, _ in self.clusters) / self.weight
            if self.clusters
            else math.nan
        )

    @property
    def perplexity(self) -> float:
        """The perplexity exp(r) of a loss in nats; infinite if it overflows."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.value))

    @property
    def missing(self) -> int:
        """The number of further clusters that an interval needs."""
        return max(0, FEWEST - len(self.clusters))

    def interval(self) -> Interval:
        """The 95 % confidence interval of the mean, (low, high); with under 3 clusters unbounded, or (0, 1).

        It is over the population of clusters. Losses: r ± t * se, with the standard error and the degrees of
        freedom of `_spread`. Shares: Wilson's
        interval (J. Am. Stat. Assoc. 22, 1927) with the number of answers divided by the design effect
        (Kish 1965) and t instead of z. If r is not finite, it is that of too few clusters.
        """
        if self.missing or not math.isfinite(self.value):
            return (0.0, 1.0) if self.share else (-math.inf, math.inf)
        if self.share:
            return self._wilson(float(stdtrit(len(self.clusters) - 1, (1 + LEVEL) / 2)))
        error, freedom = self._spread
        reach = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
        return self.value - reach, self.value + reach

    @property
    def figures(self) -> tuple[float | None, float | None, float | None, int]:
        """The value, the ends of its interval, and the weight; None for what is not finite."""
        ends = (math.nan, math.nan) if self.missing else self.interval()
        value, low, high = (
            number if math.isfinite(number) else None for number in (self.value, *ends)
        )
        return value, low, high, round(self.weight)

    @property
    def p_value(self) -> float:
        """The two-sided p-value of a mean difference under the hypothesis that it is 0: Student's t.

        It is 1 with fewer than three clusters, and if all are equal up to rounding: then they are not
        independent texts.
        """
        if self.missing or not math.isfinite(self.value):
            return 1.0
        error, freedom = self._spread
        if error <= SAME * abs(self.value):
            return 1.0
        return float(2 * stdtr(freedom, -abs(self.value) / error))

    @property
    def differs(self) -> bool:
        """Whether a mean difference is significant at 5 %, tested alone."""
        return self.p_value <= 1 - LEVEL

    @cached_property
    def _spread(self) -> tuple[float, float]:
        """The standard error of r and its degrees of freedom.

        Bell and McCaffrey (Survey Methodology 28, 2002): squared residuals e_i = s_i / w_i - r are divided by
        their expectation under means of equal variance, 1 - 2 p_i + sum(p^2). So the variance is unbiased
        for clusters of unequal weight. The degrees of freedom are Satterthwaite's. With equal weights this
        is Student's t.
        """
        sums, weights = np.array(self.clusters, dtype=np.float64).T
        p = weights / weights.sum()
        residuals = sums / weights - self.value
        q = (p**2).sum()
        scale = p**2 / (1 - 2 * p + q)
        # The variance is a quadratic form of the means with the matrix F = M' diag(scale) M, M = I - 1 p',
        # whose trace is q. The degrees of freedom are q^2 / tr(F^2), with tr(F^2) written out:
        all_scales, scaled = scale.sum(), (scale * p).sum()
        squared = (
            2 * (scale * p**2).sum() * all_scales
            + 2 * scaled**2
            + (q * all_scales) ** 2
        )
        squared += (
            scale**2 * (1 + 2 * (q - 2 * p))
        ).sum() - 4 * q * scaled * all_scales
        return math.sqrt(float((scale * residuals**2).sum())), float(q**2 / squared)

    def _wilson(self, t: float) -> Interval:
        n, p = self.weight / self._design_effect, self.value

        def low(p: float) -> float:
            if p == 0:  # else 4e-17 by rounding
                return 0.0
            root = math.sqrt(max(0.0, p * (1 - p) / n + t * t / (4 * n * n)))
            return max(0.0, (p + t * t / (2 * n) - t * root) / (1 + t * t / n))

        return low(p), 1 - low(1 - p)

    @property
    def _design_effect(self) -> float:
        """The factor by which answers from one haystack are worth less than independent ones.

        Haystacks with only correct answers show no spread. So the estimate adds one haystack of six answers,
        three of them correct, as Agresti and Coull (Am. Stat. 52, 1998) add single answers. It lies between
        1 and the effect of equal answers within each haystack.
        """
        sums, weights = np.array([*self.clusters, (3, 6)], dtype=np.float64).T
        total, count = weights.sum(), len(weights)
        share = sums.sum() / total
        residuals = sums - share * weights
        variance = (residuals**2).sum() * count / (count - 1) / total**2
        most = math.fsum(weight**2 for _, weight in self.clusters) / self.weight
        return float(min(max(1.0, variance / (share * (1 - share) / total)), most))


def summed(means: Sequence[Mean]) -> Mean:
    """The pooled mean of several means over the same clusters."""
    clusters = [
        [math.fsum(part) for part in zip(*same, strict=True)]
        for same in zip(*(mean.clusters for mean in means), strict=True)
    ]
    return Mean.of(clusters, share=means[0].share)


@dataclass(frozen=True, kw_only=True)
class ShareDifference(Mean):
    """A share of correct answers minus another one of the same questions, paired by haystack.

    Its clusters have the differences of the numbers of correct answers.

    Attributes:
        first: The one share.
        second: The other, which is subtracted.
    """

    first: Mean
    second: Mean

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the sign-flip test (Fisher 1935), exact for any number of haystacks.

        If no answer depends on the method, each haystack's difference is as probable with the other sign. The
        p-value is the probability of a sum at least as far from 0. It is 1 with fewer than three haystacks.
        """
        if self.missing or not math.isfinite(self.value):
            return 1.0
        return float(self._at_least[abs(round(self.value * self.weight))])

    def interval(self) -> Interval:
        """The 95 % confidence interval of the difference over the population of haystacks.

        Newcombe's interval of paired shares (Stat. Med. 17, 1998, method 10), from the intervals of both
        shares. Where it contains 0 but the test is significant, or the reverse, the end next to 0 is as far
        from the difference as the greatest sum that is not significant. So 0 is inside exactly if the
        p-value is above 5 %. With fewer than three haystacks it is -1 to 1.
        """
        if self.missing or not math.isfinite(self.value):
            return -1.0, 1.0
        first, second, value = self.first.value, self.second.value, self.value
        first_low, first_high = self.first.interval()
        second_low, second_high = self.second.interval()
        low = value - self._distance(first - first_low, second_high - second)
        high = value + self._distance(first_high - first, second - second_low)
        if value > 0 and (low > 0) != self.differs:
            low = value - self._reach
        if value < 0 and (high < 0) != self.differs:
            high = value + self._reach
        return low, high

    def _distance(self, of_first: float, of_second: float) -> float:
        """The distance of an end from the difference, by the distances of the ends of both shares."""
        square = (
            of_first**2 - 2 * self._correlation * of_first * of_second + of_second**2
        )
        return math.sqrt(max(0.0, square))

    @property
    def _correlation(self) -> float:
        """The correlation of both shares over haystacks, shrunk by one part in their number; 0 if unknown."""
        first, weights = np.array(self.first.clusters).T
        second, _ = np.array(self.second.clusters).T
        first = first - self.first.value * weights
        second = second - self.second.value * weights
        scale = math.sqrt(float((first**2).sum() * (second**2).sum()))
        return (
            float((first * second).sum()) / scale * (1 - 1 / len(weights))
            if scale
            else 0.0
        )

    @cached_property
    def _at_least(self) -> NDArray[np.float64]:
        """The probability of a sum at least 0, 1, 2 ... from 0 if each of its terms has either sign."""
        probabilities = np.ones(1)
        for total, _ in self.clusters:
            apart = np.zeros(2 * abs(round(total)))
            probabilities = (
                np.append(probabilities, apart) + np.append(apart, probabilities)
            ) / 2
        most = len(probabilities) // 2
        of_distance = np.bincount(np.abs(np.arange(-most, most + 1)), probabilities)
        return of_distance[::-1].cumsum()[::-1]

    @property
    def _reach(self) -> float:
        """The greatest difference that is not significant."""
        return float(sum(self._at_least > 1 - LEVEL) - 1) / self.weight


def difference(a: Mean, b: Mean) -> Mean:
    """Return the mean of a minus that of b, paired by cluster, so that the difficulty of a text cancels out.

    A wider blend of NTK-by-parts against a cut at one rotation, on six stories:

    ```python
    import ropepatch
    from ropepatch.data.tiny.tales import held_out_tales

    model, tokenizer = ropepatch.load("tiny")
    tales = [tale.ids for tale in held_out_tales(tokenizer, length=1024, count=6)]
    with ropepatch.patch(model, "ntk-by-parts", to=1024, beta=8.0):
        blended = ropepatch.perplexity(model, tokenizer, tales).between(512, 1024)
    with ropepatch.patch(model, "ntk-by-parts", to=1024, beta=1.001):
        cut = ropepatch.perplexity(model, tokenizer, tales).between(512, 1024)
    print(ropepatch.difference(blended, cut).interval())
    ```

    Args:
        a: A mean, such as a loss of `LossCurve` or an accuracy of `Retrieval`.
        b: Another one of the same documents or prompts in the same order.

    Returns:
        A `Mean`, whose `interval()` is that of the difference.

    Raises:
        RopepatchError: If a and b do not count as many tokens or answers of each document or prompt.
    """
    if [weight for _, weight in a.clusters] != [weight for _, weight in b.clusters]:
        raise RopepatchError(
            f"cannot compare {a.weight:,.0f} tokens or answers of {len(a.clusters)} documents or prompts "
            f"with {b.weight:,.0f} of {len(b.clusters)}: not the same in each",
            hint="measure the same documents or prompts in the same order, with one protocol and length",
        )
    pairs = zip(a.clusters, b.clusters, strict=True)
    clusters = tuple((first - second, weight) for (first, weight), (second, _) in pairs)
    if a.share and b.share:
        return ShareDifference(clusters, first=a, second=b)
    return Mean(clusters)


def significant(differences: Mapping[Name, Mean]) -> set[Name]:
    """The names of the significant differences of a family, by Holm's procedure (Scand. J. Stat. 6, 1979).

    The probability of naming any difference that is truly 0 is at most 5 %, for any number of them.
    """
    found: set[Name] = set()
    ordered = sorted(differences, key=lambda name: differences[name].p_value)
    for number, name in enumerate(ordered):
        if differences[name].p_value > (1 - LEVEL) / (len(ordered) - number):
            break
        found.add(name)
    return found

"""What textbooks say of position encodings, measured with the encodings' own modules instead of declared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ropepatch.attention.places import Places
from ropepatch.encodings.encoding import Encoding
from ropepatch.errors import RopepatchError
from ropepatch.gallery.identity_model import SHAPE, IdentityModel, by_distance, contents, text

TOLERANCE = 1e-4  # of what is compared; float32 keeps a hundredth of it
FEW = 4  # contents whose scores are compared
SHIFTS = (1, 5, 16)  # k, in tokens
NEAR = (0, 4, 16, 64)  # the stretches of distances whose mean scores are compared begin and end here
STEADY = 0.1  # of the whole fall, from every stretch to the next
REACH = 16  # times L, the longest text
GRID = (8, 16)  # rows and columns
WORDS = 8  # different contents in a text with repeats

MEANINGS = {
    "unique": "a query tells the keys at any two positions of the window apart",
    "length_free": "a position is the same in a text of another length",
    "linear": "for each k one matrix turns what a token at p carries into what it carries at p + k",
    "norm_kept": "what a token carries has the norm of its content",
    "products": "the product of two positions' vectors, without content, depends on their distance only",
    "relative": "a score depends on content and distance only",
    "decays": "the mean score of a token with itself, over contents and heads, falls with the distance",
    "beyond": f"it is defined in texts of {REACH} windows",
    "grid": "with an axis in each half of the channels, a query tells the places of a grid apart",
    "order": "without a causal mask, identical tokens at different positions get different outputs",
    "parameters": "trained numbers",
    "per_token": "floating-point operations that it adds for every token, in all layers",
    "per_pair": "floating-point operations that it adds for every query and key, in all layers and heads",
}


@dataclass(frozen=True)
class Property:
    """Whether a property holds, and the number that says so.

    Attributes:
        holds: None where it does not apply: nothing is carried by a token, but by pairs of tokens.
        number: The least difference for `unique` and `grid`, the greatest for `order`; for `decays` the
            least fall from a stretch of distances to the next; for `beyond` the windows; for the others the
            greatest deviation. All but the windows are shares of what is compared.
    """

    holds: bool | None = None
    number: float | None = None


@dataclass(frozen=True)
class Properties:
    """The properties of an encoding, as `MEANINGS` defines them; the counts are of a model of `SHAPE`."""

    unique: Property
    length_free: Property
    linear: Property
    norm_kept: Property
    products: Property
    relative: Property
    decays: Property
    beyond: Property
    grid: Property
    order: Property
    parameters: int
    per_token: int
    per_pair: int

    def findings(self) -> dict[str, Property]:
        """Those that hold or not; the counts do neither."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Property)}


@cache
@torch.no_grad()
def properties_of(kind: type[Encoding]) -> Properties:
    """Measure one encoding with its default parameters; the same numbers every time.

    Args:
        kind: One of `ENCODINGS`, or another; `length` is the one parameter that may be without a default.
    """
    model, window = IdentityModel.of(kind), SHAPE.window
    query, key = contents(1)[:FEW], contents(2)[:FEW]
    scores = model.scores(query, key, text(window))
    shorter = IdentityModel.of(kind, window // 2).scores(query, key, text(window // 2))
    carried, plain = model.carried(contents(2))
    moves = not _equal(carried - carried[..., :1, :], carried).holds
    vectors = model.module(text(window).keys) if model.absolute else None
    reach, fall, difference = _reach(kind, query, key), _fall(model), _difference(model, causal=False)
    per_token, per_pair = model.cost()
    return Properties(
        unique=_apart(scores[..., -1, :]),
        length_free=_equal(scores[..., : window // 2, : window // 2] - shorter, scores),
        linear=_linear(carried if vectors is None else vectors[:, None, None]) if moves else Property(),
        norm_kept=_equal(carried.norm(dim=-1) - plain, plain) if moves else Property(),
        products=Property() if vectors is None else _shift_free(vectors @ vectors.mT),
        relative=_shift_free(scores),
        decays=Property(fall > STEADY, fall),
        beyond=Property(reach == REACH, reach),
        grid=_apart(_on_a_grid(kind)),
        order=Property(difference > TOLERANCE, difference),
        parameters=sum(parameter.numel() for parameter in model.module.parameters()),
        per_token=per_token,
        per_pair=per_pair,
    )


@torch.no_grad()
def identical_tokens_agree(kind: type[Encoding], *, causal: bool = False) -> bool:
    """Whether equal tokens at different positions of a text get equal outputs.

    Args:
        kind: The encoding, with its default parameters.
        causal: Whether a token reads only those up to itself; otherwise it reads all.
    """
    return _difference(IdentityModel.of(kind), causal=causal) <= TOLERANCE


def _share(difference: Tensor, compared: Tensor) -> float:
    """The greatest of the differences over the greatest of what is compared."""
    tiny = torch.finfo(compared.dtype).tiny
    return float(difference.abs().max() / compared.abs().max().clamp(min=tiny))


def _equal(difference: Tensor, compared: Tensor) -> Property:
    share = _share(difference, compared)
    return Property(share <= TOLERANCE, share)


def _apart(scores: Tensor) -> Property:
    """Whether no two keys have the same scores [layers, B, H, T]."""
    keys = scores.flatten(0, -2).T.double()
    distances = torch.cdist(keys, keys, compute_mode="donot_use_mm_for_euclid_dist")
    others = ~torch.eye(len(keys), dtype=torch.bool)
    share = _share(distances[others].min(), distances)
    return Property(share > TOLERANCE, share)


def _shift_free(matrix: Tensor) -> Property:
    """Whether [..., T, T] has one value on each diagonal, from the main one down."""
    greatest, least = by_distance(matrix, -torch.inf).amax(-2), by_distance(matrix, torch.inf).amin(-2)
    return _equal(greatest - least, matrix)


def _linear(carried: Tensor) -> Property:
    """Whether one matrix for each layer and head of [layers, B, H, T, E] leads k positions on."""
    rows = carried.transpose(1, 2).double()
    worst = 0.0
    for shift in SHIFTS:
        before, after = rows[..., :-shift, :].flatten(2, 3), rows[..., shift:, :].flatten(2, 3)
        matrix = torch.linalg.lstsq(before, after, driver="gelsd").solution
        worst = max(worst, float((before @ matrix - after).norm() / after.norm()))
    return Property(worst <= TOLERANCE, worst)


def _fall(model: IdentityModel) -> float:
    """The least fall of the mean score from a stretch of distances to the next, over its whole change."""
    means = model.mean_scores(SHAPE.window // 2, SHAPE.window)
    stretches = torch.stack([means[start:end].mean() for start, end in pairwise(NEAR)])
    change = stretches.max() - stretches.min()
    return float(-stretches.diff().max() / change) if _share(change, means) > TOLERANCE else 0.0


def _reach(kind: type[Encoding], query: Tensor, key: Tensor) -> int:
    """How many windows may be read, of 1, 2, 4 ... REACH; 0 for none."""
    for windows in (REACH, 8, 4, 2, 1):
        positions = torch.arange(windows * SHAPE.window)[None]
        try:
            model = IdentityModel.of(kind, positions.numel())
            if model.scores(query, key, Places(positions[:, -1:], positions)).isfinite().all():
                return windows
        except RopepatchError:
            pass  # it is not defined there
    return 0


def _on_a_grid(kind: type[Encoding]) -> Tensor:
    """The scores [layers, B, H, T] of a query amid the last row with itself and the places before it."""
    half = SHAPE.head_dim // 2
    rope = replace(SHAPE.rope, rotary_dim=half)
    shape = replace(SHAPE, head_dim=half, hidden_size=SHAPE.hidden_size // 2, rope=rope)
    places = torch.cartesian_prod(*map(torch.arange, GRID))[: 1 - GRID[1] // 2]
    scores = []
    for axis, extent in enumerate(GRID):
        where = Places(places[None, -1:, axis], places[None, :, axis])
        model = IdentityModel.of(kind, extent, shape, seed=axis)
        query, key = contents(3 + axis, shape)[:FEW], contents(5 + axis, shape)[:FEW]
        scores.append(model.scores(query, key, where)[..., 0, :])
    return scores[0] + scores[1]


def _difference(model: IdentityModel, *, causal: bool) -> float:
    """The greatest difference between outputs of equal tokens in a text with repeats, over the outputs."""
    draw = torch.Generator().manual_seed(7)
    tokens = SHAPE.window // 2
    words = torch.randint(WORDS, (tokens,), generator=draw)
    content = torch.randn(WORDS, SHAPE.heads, SHAPE.head_dim, generator=draw)[words].transpose(0, 1)[None]
    mask = None if causal else torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    outputs = model.outputs(content, mask)[:, 0].flatten(2)  # [layers, T, C]
    same = (words[:, None] == words)[..., None]
    return _share((outputs[:, :, None] - outputs[:, None]) * same, outputs)

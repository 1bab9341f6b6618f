"""A trained model with published measurements: ../shared/checkpoints/README.md and methods.md 9.7."""

import pytest

import ropepatch
from ropepatch.data.texts import cut_windows, stream_texts
from ropepatch.model.checkpoint import Checkpoint

# Perplexity of positions 0 to T/2, T/2 to T, T to 2T, 2T to 4T; T = 256, the first 64 windows of 4T tokens.
PUBLISHED = {
    ("none", ()): (2.22, 2.24, 13.28, 92.67),
    ("linear", ()): (54.95, 63.93, 64.05, 62.14),
    ("ntk", ()): (2.31, 2.40, 2.29, 7.32),
    ("ntk-fixed", ()): (3.04, 3.20, 3.11, 7.70),
    ("ntk-mixed", ()): (5.48, 5.96, 5.94, 9.87),
    ("ntk-by-parts", ()): (4.43, 5.23, 5.08, 5.22),
    ("llama3", ()): (2.70, 3.35, 3.35, 3.44),
    ("p-rope", (("partial", 0.0),)): (72.49, 89.64, 93.17, 91.33),
    ("yarn", ()): (2.42, 2.57, 2.48, 2.55),
    ("yarn", (("truncate", False),)): (2.51, 2.75, 2.65, 2.71),
    ("yarn", (("ramp", "rotations"),)): (4.36, 5.09, 4.90, 5.02),
    ("yarn", (("ramp", "wavelength"),)): (3.60, 4.07, 3.93, 4.01),
    ("yarn", (("attention_factor", 1.0),)): (2.40, 2.58, 2.53, 2.64),
    ("yarn", (("attention_factor", 1 / 1.138629436),)): (2.67, 3.14, 3.39, 3.79),
}


@pytest.fixture(scope="module")
def curve(shared):
    """The losses of babyllama-361 under a method, computed once."""
    source = Checkpoint(shared / "checkpoints" / "babyllama-361")
    stories = stream_texts(shared / "texts" / "tinystories")
    model = source.load()
    cut = cut_windows(source.tokenizer, stories, length=1024, count=None)
    read = [ids for _, ids in cut[:64]]

    def curve(method, parameters):
        plan = ropepatch.plan(model, to=1024, method=method, **dict(parameters))
        with ropepatch.patch(model, plan):
            return ropepatch.perplexity(model, None, read)

    return curve


@pytest.mark.sweep
@pytest.mark.parametrize(("method", "parameters"), PUBLISHED)
def test_perplexity_by_position_matches_published_measurements(
    curve, method, parameters
):
    buckets = (0, 128), (128, 256), (256, 512), (512, 1024)
    measured = [
        curve(method, parameters).between(*bucket).perplexity for bucket in buckets
    ]
    assert measured == pytest.approx(
        PUBLISHED[method, parameters], abs=0.0051, rel=1e-4
    )

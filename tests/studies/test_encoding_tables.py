"""The tables of the study of encodings: known rows give known figures."""

import encoding_tables as TABLES
from encoding_gallery import mean_curves, measured_curves

from ropepatch.encodings import ENCODINGS

LENGTHS = ("128", "256", "512")


def read(*nats, far=2.0, found=3):
    told = {
        span: {length: {"nats": value, "tokens": 5} for length in LENGTHS}
        for span, value in (("near", 1.0), ("far", far))
    }
    told["far"]["128"] = {"nats": None, "tokens": 0}
    return {
        "nats": dict(zip(LENGTHS, nats, strict=True)),
        "told": told,
        "keys": {length: [found, 4] for length in LENGTHS},
    }


FLOOR = read(0.5, 0.25, 0.125, far=0.5)
ROWS = [
    {"study": "scratch", "encoding": "rope", "seed": 1, "seconds": 90, "floor": FLOOR} | read(1.0, 1.0, 3.0),
    {"study": "scratch", "encoding": "alibi", "seed": 0, "seconds": None, "floor": FLOOR}
    | read(0.75, 0.75, 0.75),
    {"study": "scratch", "encoding": "rope", "seed": 0, "seconds": 60, "floor": FLOOR}
    | read(0.5, 2.0, 5.0, far=4.0, found=1),
    {"study": "recalibrated", "encoding": "yarn", "window": 128, "floor": FLOOR} | read(1.0, 1.0, 1.0),
]


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_losses_are_above_the_floor_of_their_length_means_over_seeds_with_the_extremes():
    rope, alibi = sorted(cells(TABLES.loss_table(ROWS)), reverse=True)
    assert rope == [
        "`rope`",
        "2",
        "0.250 (0.000 to 0.500)",
        "1.250 (0.750 to 1.750)",
        "3.875 (2.875 to 4.875)",
    ]
    assert alibi == ["`alibi`", "1", "0.250", "0.500", "0.625"]


def test_what_was_told_is_above_its_own_floor_and_keys_are_summed_over_seeds():
    rope, alibi = sorted(cells(TABLES.recall_table(ROWS)), reverse=True)
    assert rope[:3] == ["`rope`", "0.000 (0.000 to 0.000)", "0.000 (0.000 to 0.000)"]
    assert rope[3] == "2.500 (1.500 to 3.500)"
    assert rope[6:] == ["4/8", "4/8", "4/8", "1.2 (1.0 to 1.5)"]
    assert alibi[-1] == ""


def test_the_curves_are_means_over_seeds_in_nats():
    means, floor = mean_curves(ROWS)
    assert means["rope"] == {128: 0.75, 256: 1.5, 512: 4.0}
    assert floor == {128: 0.5, 256: 0.25, 512: 0.125}


def test_the_study_has_its_encodings_in_the_order_of_the_registry():
    means, _ = measured_curves()
    assert [*means] == [name for name in ENCODINGS if name in means]

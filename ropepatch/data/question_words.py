"""The words of the retrieval tasks, as data: templates, facts, people, and words to be counted."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from ropepatch.data.templates import NAMED, NAMES, PasskeyTemplate


class Template(NamedTuple):
    """What keys are called and whose they are, and the filler around them.

    Args:
        noun: Of a key.
        names: Who has one.
        filler: Sentences that are repeated in this order.
    """

    noun: str
    names: tuple[str, ...]
    filler: tuple[str, ...]

    def passkey(self, *, named: bool) -> PasskeyTemplate:
        """The passkey prompt in these words."""
        bundled = NAMED if named else PasskeyTemplate()
        words = {
            part: getattr(bundled, part).replace("pass key", self.noun)
            for part in ("intro", "needle", "question")
        }
        return PasskeyTemplate(**words, names=self.names, filler=self.filler)


TEMPLATES = {
    "village": Template("pass key", NAMES, PasskeyTemplate().filler),
    "harbour": Template(
        "berth number",
        tuple(
            f"the {colour} {ship}"
            for ship, colour in product(
                ("barge", "cutter", "ferry", "schooner", "trawler", "tug"),
                ("black", "blue", "green", "grey", "red", "white", "yellow"),
            )
        ),
        (
            "Gulls sit along the wall.",
            "The tide comes in and goes out.",
            "Ropes creak against the posts.",
            "A bell rings somewhere in the fog.",
            "Nets hang in the sun to dry.",
        ),
    ),
    "archive": Template(
        "file number",
        tuple(
            f"the {year} {matter}"
            for matter, year in product(
                ("bridge", "canal", "harvest", "market", "railway", "school", "theatre"),
                ("first", "second", "third", "fourth", "fifth", "sixth"),
            )
        ),
        (
            "Dust lies on the upper shelves.",
            "The clerk turns a page and sighs.",
            "Somewhere a drawer is pulled out and pushed back.",
            "The lamp hums above the long table.",
            "Outside it has begun to rain.",
        ),
    ),
}


class Fact(NamedTuple):
    """A sentence on somebody, and a question that it answers without a word in common."""

    sentence: str
    question: str


FACTS = (
    Fact("{name} keeps three hives behind the barn.", "Who could sell honey?"),
    Fact("{name} sleeps by day and guards the gate until dawn.", "Who works at night?"),
    Fact("{name} was born in a house beside the Eiffel Tower.", "Who comes from Paris?"),
    Fact("{name} pulls aching teeth for a few coins.", "Who is the dentist?"),
    Fact("{name} has never eaten meat or fish.", "Who is a vegetarian?"),
    Fact("{name} needs a white cane to cross the street.", "Who cannot see?"),
    Fact("{name} crossed the finish line before all other runners.", "Who won the race?"),
    Fact("{name} spent last summer among the pyramids by the Nile.", "Who has been to Egypt?"),
    Fact("{name} sings the lowest part in the choir.", "Whose voice is a bass?"),
    Fact("{name} buried a husband two winters ago.", "Who is a widow?"),
    Fact("{name} shoes every horse in the valley.", "Who is the blacksmith?"),
    Fact("{name} sneezes whenever a cat is near.", "Who has an allergy to pets?"),
)

PEOPLE = (
    *("Agnes", "Bruno", "Clara", "Doris", "Edgar", "Flora", "Greta", "Hugo", "Ivan", "Jonas"),
    *("Karin", "Laura", "Martin", "Nora", "Oscar", "Paula", "Robert", "Simon", "Tessa", "Walter"),
)

LISTED = tuple(
    """
    acorn anchor apple apron arrow basket beacon bench berry blanket bottle branch brick bridge broom bucket
    button cabin candle canvas carpet castle cellar chain chalk cheese cherry chimney circle clock cloud
    collar copper corner cotton cradle curtain dagger desert dinner dragon drum engine fabric feather fence
    fiddle finger flame forest fountain garden garlic ginger glove hammer harbor helmet hollow honey island
    jacket kettle ladder lantern lemon letter locket magnet marble meadow mirror mitten needle orchard
    oyster paddle pebble pepper pillow pocket powder puddle rabbit ribbon river saddle shadow shovel silver
    spider stable sugar table thunder ticket tunnel turtle velvet wagon walnut willow window
    """.split()  # noqa: SIM905
)

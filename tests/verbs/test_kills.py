"""Commands killed at random points: no partial output has a final name, and the same command resumes."""

import pytest
from killing import Kill, attacks, attempt, kills_of, reference_of

COMMANDS = ("extend", "train", "distil", "eval", "push")
# Events that the seed may miss: a command killed there once left files that nothing removed.
LAST = {
    "train": ("os.remove run.json", "os.rename .ropepatch.json."),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    return attacks(tmp_path_factory.mktemp("sources"))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_repeat_completes_a_killed_command(name, commands, tmp_path):
    attack = commands[name]
    reference = reference_of(attack, tmp_path / "reference")
    last = [Kill(last_of(reference.events, event)) for event in LAST.get(name, ())]
    torn = Kill(torn=reference.largest // 2)
    for number, kill in enumerate([torn, *last, *kills_of(reference, 2, name)]):
        place = tmp_path / f"killed-{number}"
        assert attempt(attack, place, reference, kill) == {}, kill


def last_of(events, event):
    """The number of the last of the events of that kind."""
    return max(number for number, seen in enumerate(events) if seen.startswith(event))

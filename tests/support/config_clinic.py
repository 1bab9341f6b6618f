"""What every entry point must make of a damaged configuration: a refusal in words, or what can be printed."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from damaged_configs import Mutant

import ropepatch
from ropepatch import RopepatchError
from ropepatch.doctor import diagnose
from ropepatch.model import survey as surveys

SECONDS = 20  # of CPU time, which no answer may take


class Clinic:
    """A place in which mutants are asked for; the survey of a mutant is made once.

    Args:
        folder: Where; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.source, self.out = folder / "source", folder / "out"
        self.source.mkdir(parents=True)
        self.folder = folder

    def ask(self, case: Mutant) -> tuple[list[str], int]:
        """What no entry point may do and one did, and how many of them answered."""
        (self.source / "config.json").write_text(case.text, encoding="utf-8")
        before, faults, answered = self.state(), list[str](), 0
        with shared_survey():
            for name, entry in ENTRIES.items():
                try:
                    with cpu_limit(SECONDS):
                        entry(self, case)
                    answered += 1
                except RopepatchError as error:
                    faults += [f"{name}: {wrong}" for wrong in wrong_refusal(error)]
                except Exception as error:  # all others are faults
                    faults.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                if self.state() != before:
                    faults.append(f"{name}: something was written")
                    break
        return faults, answered

    def state(self) -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in self.folder.rglob("*")}


def wrong_refusal(error: RopepatchError) -> Iterator[str]:
    """What is wrong with what a refusal says."""
    for part, said in (("error", str(error)), ("hint", error.hint)):
        if not said:
            yield f"no {part}"
        elif not said.isprintable():
            yield f"control characters in the {part}: {said[:300]!r}"
        elif len(said) > 2000:
            yield f"a line of {len(said)} characters: {said[:100]!r}"


def check_answer(text: str, as_json: str) -> None:
    """Refuse, by raising, what cannot be printed or read again."""
    assert text
    text.encode()
    controls = set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text))
    assert not controls, f"control characters in what is printed: {controls}"
    json.loads(as_json, parse_constant=lambda constant: pytest.fail(f"{constant} in the JSON"))


def ask_plan(clinic: Clinic, case: Mutant) -> None:
    plan = ropepatch.plan(clinic.source, to=case.to, method=case.method)
    check_answer(str(plan), plan.to_json())
    dry = ropepatch.extend(clinic.source, clinic.out, to=case.to, method=case.method, dry_run=True)
    check_answer(dry.outcome(), dry.to_json())


def ask_diagnosis(clinic: Clinic, case: Mutant) -> None:
    diagnosis = diagnose(clinic.source)
    check_answer(str(diagnosis), diagnosis.to_json())


ENTRIES: dict[str, Callable[[Clinic, Mutant], None]] = {"plan": ask_plan, "diagnose": ask_diagnosis}


@contextmanager
def shared_survey() -> Iterator[None]:
    """Each config.json is surveyed once, which is most of what a plan costs."""
    made, survey = {}, surveys.survey

    def remembered(raw: dict[str, Any]) -> surveys.Survey:
        text = json.dumps(raw)
        if text not in made:
            made[text] = survey(raw)
        return made[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surveys, "survey", remembered)
        yield


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise in the block after so much time of this process, whatever else runs."""

    def over(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

"""The commands that inspect without extending anything."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from cyclopts import Group

import ropepatch
from ropepatch.cli.derive import command, written
from ropepatch.cli.screen import print_text
from ropepatch.errors import arguments_written
from ropepatch.files import json_text
from ropepatch.progress import WEIGHTS, bar, no_bar, say_on_stderr, silent

GROUP = Group("Inspect", sort_key=3)


@command(
    GROUP,
    """\
  ropepatch plan ./llama-2-7b --to 32k
  ropepatch plan ./llama-2-7b --to 32k --method ntk-by-parts --set beta=16
  ropepatch plan ./qwen3-8b --to 128k --original 32k
  ropepatch plan ./qwen3-8b --to 128k --original 32k --for vllm
  ropepatch plan ./llama-2-7b.Q4_K_M.gguf --to 16k
  ropepatch plan ./llama-2-7b --to 16k --json""",
    "plan",
)
def plan(
    model: str,
    *,
    to: str | None = None,
    method: str = "yarn",
    settings: list[str] | None = None,
    engine: str | None = None,
    as_json: bool = False,
    **asked: Any,
) -> int:
    """`ropepatch train --dry-run` shows what a recipe would do.

    Args:
        engine: Print the command that serves the plan in this engine, without writing a checkpoint if
            possible: vllm, sglang, llama.cpp, ollama or mlx-lm. Exit 1 if it cannot serve the plan.
    """
    from ropepatch.cli.parameters import parse_settings

    planned = ropepatch.plan(
        model, to=to, method=method, **asked, **parse_settings(method, settings or ())
    )
    if engine is not None:
        from ropepatch.extension.serving import serving

        served = serving(planned, engine)
        print(json_text(asdict(served)) if as_json else served)
        return int(not served.commands)
    print(json_text(planned.to_dict())) if as_json else print_text(str(planned))
    return 0


@command(
    GROUP,
    """\
  ropepatch doctor ./llama-2-7b-32k
  ropepatch doctor ./llama-2-7b-32k --fix ./repaired
  ropepatch doctor Qwen/Qwen2.5-7B --no-measure --json""",
    "diagnose",
)
def doctor(
    model: str,
    *,
    revision: str | None = None,
    fix: str | None = None,
    measure: bool = True,
    as_json: bool = False,
) -> int:
    """Exit 0 if there is no error, else 1; with `fix`, the exit code is that of the repaired copy.

    Args:
        fix: Write a repaired copy into this folder (unambiguous fixes only).
    """
    from ropepatch.doctor import repair

    with bar(WEIGHTS) as read:
        diagnosis = ropepatch.diagnose(model, revision, measure=measure, progress=read)
    print(diagnosis.to_json()) if as_json else print_text(str(diagnosis))
    fixable = [finding.code for finding in diagnosis.findings if finding.fixable]
    if fix is None or not fixable:
        if fix:
            say_on_stderr(f"no unambiguous fix: {fix} was not written")
        return int(diagnosis.has_errors)
    with (
        bar("copying") as copied,
        arguments_written(partial(written, {"out": "--fix", "fix": "--fix"})),
    ):
        folder = repair(diagnosis, fix, progress=copied)
    say_on_stderr(f"fixed in {folder}: {', '.join(dict.fromkeys(fixable))}")
    left = ropepatch.diagnose(folder, measure=False)
    codes = dict.fromkeys(finding.code for finding in left.findings)
    if codes:
        say_on_stderr(f"left for you to decide: {', '.join(codes)}")
    return int(left.has_errors)


@command(
    GROUP,
    """\
  ropepatch probe http://localhost:8000
  ropepatch probe http://localhost:8080 ./llama-2-7b-yarn-32k --json""",
    "probe",
)
def probe(
    server: str, *, quiet: bool = False, as_json: bool = False, **asked: Any
) -> int:
    """Exit 0 if it does, 1 if not, 2 if unknown."""
    from ropepatch.probing.judging import UNDECIDED

    with (no_bar if quiet else bar)("requests") as advance:
        say = silent if quiet else say_on_stderr
        probed = ropepatch.probe(server, **asked, say=say, progress=advance)
    print(probed.to_json()) if as_json else print_text(str(probed))
    return 2 if probed.judgement.verdict == UNDECIDED else int(not probed.is_right)


@command(
    GROUP,
    """\
  ropepatch explore
  ropepatch explore ./llama-2-7b --out llama.html
  ropepatch explore tiny --open""",
    "explore",
)
def explore(
    model: str | None = None,
    *,
    out: str = "explorer.html",
    show: bool = False,
    **asked: Any,
) -> None:
    """The page also contains models of current families.

    Args:
        show: Open the page in the browser.
    """
    file = ropepatch.explore(model, out=out, **asked)
    print_text(out)
    if show:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())

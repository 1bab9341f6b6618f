"""`ropepatch demo`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import AsJson, Device, Quiet, feedback
from ropepatch.cli.listing import print_table
from ropepatch.pipeline.running import Progress, Say, interruptible, say_on_stderr
from ropepatch.pipeline.running import device as best_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ropepatch.data.tiny.tales import Tale
    from ropepatch.evaluation.curves import LossCurve
    from ropepatch.evaluation.retrieval import Retrieval

METHOD, TARGET = "yarn", 2048
LENGTHS = [64, 128, 256, 512, 1024, 2048]
TALES, HAYSTACKS, SEED = 16, 20, 0  # passkeys of each length, and their seed

EXAMPLES = """\b
Examples:
  ropepatch demo
  ropepatch demo --out ./demo"""


def demo(
    out: Annotated[
        Path, typer.Option(help="The folder to make, with the checkpoint and the figures.")
    ] = Path("ropepatch-demo"),
    device: Device = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Extend the bundled checkpoint from 256 to 2048 tokens with YaRN, and measure it before and after.

    It takes about a minute on two cores, without training or network. It measures passkey retrieval, and the
    loss on unseen tales next to the least possible loss.
    """
    from ropepatch.files import absent, json_text, new_folder, write_json

    folder, speech = absent(out), feedback(quiet)
    speech["say"](f"extending tiny to {TARGET} tokens with {METHOD}")  # before torch is imported
    from ropepatch.data.tiny.tales import held_out_tales
    from ropepatch.encodings.loading import load
    from ropepatch.evaluation.curves import LossCurve
    from ropepatch.evaluation.results import environment
    from ropepatch.extension.planning import plan
    from ropepatch.extension.writing import extend
    from ropepatch.model.precision import describe_placement

    nothing = "nothing is kept; the same command starts anew"
    with interruptible(say_on_stderr, lambda: nothing), new_folder(folder) as partial:
        tiny_plan = plan("tiny", to=TARGET, method=METHOD)
        extended = extend(tiny_plan, partial / f"tiny-{METHOD}-2k")
        where = device or best_device()
        base, tokenizer = load("tiny", device=where)
        for line in describe_placement(base):
            speech["say"](line)
        tales = held_out_tales(tokenizer, length=TARGET, count=TALES)
        floor = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
        models = {"before": base, "after": load(extended, device=where)[0]}
        curves, retrievals = _measured(models, tokenizer, tales, **speech)
        trained = tiny_plan.rope.original_max_position_embeddings
        figures = _draw(partial, curves, floor, retrievals, trained)
        task = {"task": "demo", "model": "tiny", "method": METHOD, "trained": trained, "target": TARGET}
        record = task | {
            "tales": TALES,
            "passkey_seed": SEED,
            "floor": _losses(floor),
            "results": {
                name: {"nats": _losses(curves[name]), "passkey": _retrieved(retrievals[name])}
                for name in curves
            },
            "env": environment(base),
        }
        write_json(partial / "demo.json", record)
    if as_json:
        print(json_text(record))
        return
    _print_tables(curves, floor, retrievals)
    print(f"\n{out} holds {extended.name}, demo.json and {', '.join(figures) or 'no figures'}")


def _measured(
    models: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    tales: Sequence[Tale],
    *,
    say: Say,
    progress: Progress,
) -> tuple[dict[str, LossCurve], dict[str, Retrieval]]:
    """The losses and the passkeys of every model."""
    from ropepatch.evaluation.perplexity import perplexity
    from ropepatch.evaluation.retrieval import passkey

    curves, retrievals = {}, {}
    for name, model in models.items():
        say(f"reading {TALES} tales, {name}")
        with progress("tales") as advance:
            curves[name] = perplexity(model, None, [tale.ids for tale in tales], progress=advance)
        say(f"passkey retrieval, {name}")
        with progress("haystacks") as advance:
            retrievals[name] = passkey(
                model, tokenizer, lengths=LENGTHS[1:], haystacks=HAYSTACKS, seed=SEED, progress=advance
            )
    return curves, retrievals


def _losses(curve: LossCurve) -> dict[str, float]:
    """Nats per token over the stretches between the lengths."""
    return {f"{begin} to {end}": curve.between(begin, end).mean for begin, end in pairwise([0, *LENGTHS])}


def _retrieved(retrieval: Retrieval) -> dict[str, dict[str, Any]]:
    return {
        str(length): {
            "correct": sum(answer.found for answer in retrieval.answers if answer.length == length),
            "n": round(retrieval.found(length).weight),
            "log_prob": retrieval.log_prob(length).value,
        }
        for length in retrieval.lengths
    }


def _draw(
    out: Path,
    curves: dict[str, LossCurve],
    floor: LossCurve,
    retrievals: dict[str, Retrieval],
    trained: int,
) -> list[str]:
    """The names of the figures drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        say_on_stderr('no figures: matplotlib is not installed (pip install "ropepatch[plot]")')
        return []
    from ropepatch.report.plots import plot_loss, plot_retrieval, save_figure

    loss, keys = plot_loss(curves, trained=trained, floor=floor), plot_retrieval(retrievals, trained=trained)
    return [file.name for file in (*save_figure(loss, out / "loss"), *save_figure(keys, out / "passkey"))]


def _print_tables(curves: dict[str, LossCurve], floor: LossCurve, retrievals: dict[str, Retrieval]) -> None:
    names = (*curves, "floor")
    columns = [_losses(curve) for curve in (*curves.values(), floor)]
    rows = [[f"  {span}", *(f"{column[span]:.2f}" for column in columns)] for span in columns[0]]
    rows.append(["passkeys found at", *[""] * len(names)])
    found = [_retrieved(retrieval) for retrieval in retrievals.values()]
    for length in found[0]:
        cells = (column[length] for column in found)
        rows.append([f"  {length} tokens", *(f"{cell['correct']}/{cell['n']}" for cell in cells), ""])
    print("floor: the entropy of the data, the least possible loss\n")
    print_table(("nats per token, positions", *names), rows, numbers=len(names))

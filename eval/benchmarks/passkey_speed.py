"""How fast passkeys are asked for, against one `generate` per trial on the same trials.

    python eval/benchmarks/passkey_speed.py [--quick] [--json FILE]

The bundled checkpoint, extended with YaRN so that some keys are found and some are not, on a grid of 8
lengths, 11 depths and 20 trials. The baseline takes one trial after the other: it makes the prompt, generates
greedily as many tokens as the answer has, in a batch of 1 with the key-value cache of `generate`, and
compares. `passkey` makes and reads all prompts of a length. In every round both do each length once, in a
shuffled order; the ratio is the baseline's time over ours within a round.

The floor is the time to read each distinct token of the grid once. A token is distinct by all that stands
before it, so the distinct tokens of a length are the nodes of a trie of its prompts, without their last
token, which predicts nothing. Each is given the time per token of a forward pass over whole prompts of that
length, in the fastest of a few batch sizes, without a cache, logits of the last token alone, measured in the
same rounds. This is a little too low: what comes after a needle attends to more tokens than the average one
of a prompt.

Two longer lengths are measured with fewer trials and stand apart: there, reading a prompt takes far longer
than saying its answer, and the ratio comes down to what is saved of the reading.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from reporting import environment, spread, table, write

import ropepatch
from ropepatch.data.prompts import PasskeyTemplate, Prompt
from ropepatch.evaluation.passkey import PasskeyGrid, passkey, trial_prompt

TARGET_RATIO = 3.0
SEED = 0
LENGTHS, LONG = (128, 160, 192, 224, 256, 320, 384, 512), (1024, 2048)
DEPTHS = tuple(place / 10 for place in range(11))
TRIALS, LONG_TRIALS, QUICK_TRIALS = 20, 4, 4
ROUNDS, QUICK_ROUNDS = 5, 2
METHOD, TARGET = "yarn", 2048
BATCHES = (1024, 2048, 4096)  # tokens at once, of the forward passes of the floor
WORDS = PasskeyTemplate()


def prompts_of(tokenizer: Any, length: int, trials: int) -> list[Prompt]:
    """The prompts that `passkey` makes, one by one."""
    return [prompt_of(tokenizer, length, depth, trial) for depth in DEPTHS for trial in range(trials)]


def prompt_of(tokenizer: Any, length: int, depth: float, trial: int) -> Prompt:
    return trial_prompt(tokenizer, WORDS, length=length, depth=depth, trial=trial, seed=SEED)


def generated(model: Any, tokenizer: Any, length: int, trials: int) -> dict[float, int]:
    """The baseline: keys found by depth."""
    found = dict.fromkeys(DEPTHS, 0)
    for depth in DEPTHS:
        for trial in range(trials):
            prompt = prompt_of(tokenizer, length, depth, trial)
            question, answer = prompt.ids[None].split([length - prompt.answer, prompt.answer], dim=1)
            said = model.generate(
                question,
                attention_mask=torch.ones_like(question),
                do_sample=False,
                max_new_tokens=prompt.answer,
                pad_token_id=tokenizer.eos_token_id,
            )
            found[depth] += torch.equal(said[:, question.shape[1] :], answer)
    return found


def asked(model: Any, tokenizer: Any, length: int, trials: int) -> dict[float, int]:
    """Ours: keys found by depth."""
    grid: PasskeyGrid = passkey(
        model, tokenizer, lengths=[length], depths=DEPTHS, trials=trials, template=WORDS, seed=SEED
    )
    return {depth: grid.cells[length, depth].correct for depth in DEPTHS}


def distinct_tokens(prompts: list[Prompt]) -> int:
    """The nodes of a trie of the prompts, without the last token of each."""
    rows = sorted(prompt.ids[:-1].tolist() for prompt in prompts)
    return len(rows[0]) + sum(len(row) - shared(before, row) for before, row in pairwise(rows))


def shared(first: list[int], second: list[int]) -> int:
    """How many tokens two rows have in common at their beginning."""
    pairs = zip(first, second, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(first))


def forward(model: Any, rows: torch.Tensor) -> None:
    model(input_ids=rows, use_cache=False, logits_to_keep=1)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def measure(model: Any, tokenizer: Any, length: int, trials: int, rounds: int) -> dict[str, Any]:
    """One length: the times of every round, the verdicts that differ, the floor."""
    prompts = prompts_of(tokenizer, length, trials)
    ids = torch.stack([prompt.ids for prompt in prompts])
    batches = {max(1, tokens // length): ids[: max(1, tokens // length)] for tokens in BATCHES}
    runs: dict[str, Callable[[], Any]] = {
        "generate": lambda: generated(model, tokenizer, length, trials),
        "passkey": lambda: asked(model, tokenizer, length, trials),
    }
    floors = {f"forward {len(rows)}": (lambda rows=rows: forward(model, rows)) for rows in batches.values()}
    order, seconds = random.Random(length), {name: [] for name in (*runs, *floors)}
    asked(model, tokenizer, length, 1)  # warm up
    generated(model, tokenizer, length, 1)
    differing = 0
    for _ in range(rounds):
        found = {}
        for name in order.sample(list(runs), len(runs)):
            taken, found[name] = timed(runs[name])
            seconds[name].append(taken)
        for name, run in floors.items():
            seconds[name].append(min(timed(run)[0] for _ in range(5)))
        differing += sum(abs(found["generate"][depth] - found["passkey"][depth]) for depth in DEPTHS)
    per_token = min(
        spread(seconds[f"forward {len(rows)}"])["median"] / rows.numel() for rows in batches.values()
    )
    distinct = distinct_tokens(prompts)
    floor = distinct * per_token
    return {
        "length": length,
        "trials": len(prompts),
        "found": sum(found["passkey"].values()),
        "verdicts_that_differ": differing,
        "seconds": {name: spread(seconds[name]) for name in runs},
        "seconds_by_round": {name: [round(taken, 4) for taken in seconds[name]] for name in runs},
        "ratio": spread(ratios(seconds)),
        "tokens": sum(len(prompt.ids) - 1 for prompt in prompts),
        "distinct_tokens": distinct,
        "microseconds_per_token": round(1e6 * per_token, 2),
        "floor_seconds": round(floor, 4),
        "times_the_floor": spread([taken / floor for taken in seconds["passkey"]]),
    }


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    return [a / b for a, b in zip(seconds["generate"], seconds["passkey"], strict=True)]


def total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole grid, round by round."""
    seconds = {
        name: [sum(taken) for taken in zip(*(row["seconds_by_round"][name] for row in rows), strict=True)]
        for name in ("generate", "passkey")
    }
    floor = sum(row["floor_seconds"] for row in rows)
    return {
        "seconds": {name: spread(taken) for name, taken in seconds.items()},
        "ratio": spread(ratios(seconds)),
        "floor_seconds": round(floor, 4),
        "times_the_floor": spread([taken / floor for taken in seconds["passkey"]]),
    }


@torch.inference_mode()
def benchmark(*, quick: bool) -> dict[str, Any]:
    model, tokenizer = ropepatch.load("tiny")
    ropepatch.patch(model, ropepatch.plan("tiny", to=TARGET, method=METHOD))
    model.eval()
    rounds, trials = (QUICK_ROUNDS, QUICK_TRIALS) if quick else (ROUNDS, TRIALS)
    rows = [measure(model, tokenizer, length, trials, rounds) for length in LENGTHS]
    long = [] if quick else [measure(model, tokenizer, length, LONG_TRIALS, rounds) for length in LONG]
    return {
        "benchmark": "passkey_speed",
        "target": {"ratio": TARGET_RATIO},
        "model": "tiny",
        "scaling": {"method": METHOD, "to": TARGET},
        "grid": {"lengths": LENGTHS, "depths": DEPTHS, "trials": trials},
        "rounds": rounds,
        "seed": SEED,
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "by_length": rows,
        "total": total(rows),
        "longer": long,
        "environment": environment(),
    }


def render(result: dict[str, Any]) -> str:
    grid, whole = result["grid"], result["total"]
    size = f"{len(grid['lengths'])} x {len(grid['depths'])} x {grid['trials']}"
    head = (
        "tokens",
        "trials",
        "found",
        "differ",
        "generate s",
        "ours s",
        "ratio",
        "min-max",
        "floor s",
        "x floor",
    )
    lines = [
        (
            f"{row['length']}",
            f"{row['trials']}",
            f"{row['found']}",
            f"{row['verdicts_that_differ']}",
            *times(row),
        )
        for row in result["by_length"] + result["longer"]
    ]
    lines.insert(len(grid["lengths"]), ("grid", "", "", "", *times(whole)))
    return "\n".join(
        [
            table([head, *lines]),
            f"grid of {size} (lengths, depths, trials): target at least {TARGET_RATIO:g} times faster; "
            f"medians of {result['rounds']} rounds, {result['threads']} threads",
        ]
    )


def times(row: dict[str, Any]) -> tuple[str, ...]:
    ratio, seconds = row["ratio"], row["seconds"]
    return (
        f"{seconds['generate']['median']:.2f}",
        f"{seconds['passkey']['median']:.2f}",
        f"{ratio['median']:.2f}",
        f"{ratio['min']:.2f}-{ratio['max']:.2f}",
        f"{row['floor_seconds']:.2f}",
        f"{row['times_the_floor']['median']:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few trials and rounds, to try it")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    result = benchmark(quick=arguments.quick)
    print(render(result))
    if arguments.json:
        write(arguments.json, result)


if __name__ == "__main__":
    main()

"""What the study of `smollm2_study.py` takes for a model of 8 billion parameters.

python eval/studies/smollm2/smollm2_cost.py
"""

from __future__ import annotations

from smollm2_study import reader, rows_read

PARAMETERS, LAYERS, WIDTH = 8.03e9, 32, 4096  # of Llama-3-8B
SPEED = 4e14  # operations a second: two fifths of what an H100 is said to do in bfloat16
COMMAND = (
    "python eval/studies/smollm2/smollm2_study.py NousResearch/Meta-Llama-3-8B-Instruct "
    "--text emozilla/pg19-test --out llama-3-8b --json llama-3-8b.json --rounds 6 --trials 4 --documents 4"
)


def cost_text() -> str:
    """What the command for an 8B model reads, and about how long that takes."""
    words = COMMAND.split()[2:]
    of = reader().parse_args(words)
    trained, target = 8192, 16384
    read_once = rows_read(of, trained, target)
    times = 1 + len(of.methods.split(","))
    tokens = times * sum(length * count for length, count in read_once.items())
    operations = times * sum(
        count * length * (2 * PARAMETERS + 2 * LAYERS * WIDTH * length) for length, count in read_once.items()
    )
    prompts = times * sum(read_once.values())
    hours = operations / SPEED / 3600
    texts = [
        f"```bash\n{COMMAND}\n```\n\nIt reads {prompts:,.0f} prompts and texts, {tokens / 1e6:.1f} M tokens:",
        f"{operations / 1e18:.2f} x 10^18 operations for 8 billion parameters, about {hours:.1f} h at",
        f"{SPEED / 1e12:.0f} TFLOP/s (an H100 in bfloat16), and the fit {of.fit_minutes:.0f} minutes.",
        "With `--estimate` it times a row of tokens on the machine itself, says how long all takes there,",
        "and stops.",
    ]
    return " ".join(texts)


if __name__ == "__main__":
    print(cost_text())

"""What a step of distillation costs in time and memory, against a step of cross-entropy on the same rows.

    taskset -c 1 python eval/benchmarks/distil_cost.py [--rounds N] [--json FILE]

A step is forward, backward and AdamW of a LoRA (rank 16 on queries, keys, values and outputs) on a random
LLaMA that is patched by YaRN; its head has a fifth of the weights, as that of SmolLM2-135M. `short`: rows
within the old context at skipped positions, which the teacher reads as the base does. `long`: one row of the
target, which it reads under ReRoPE. All step the same model in turn, in rounds of shuffled order; figures are
medians of the ratios within a round. Memory is the peak of a process of its own over two steps, less what it
holds when the model is loaded. `top_k`: the same with the 64 likeliest tokens of the teacher told apart;
by how much its loss and its gradient then differ is measured on tiny, 8x by YaRN, on tales.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from reporting import in_own_process, in_turn, ratio, resident_mib, run_benchmark, spread, table
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch.attention import map_attention
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.extension.patching import patch
from ropepatch.extension.planning import plan
from ropepatch.training.adapter import trainable
from ropepatch.training.fused_loss import DISTILLED, TeacherOutput, linear_distillation
from ropepatch.training.loss import causal_lm_loss, linear_head
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.recipe import Distil, Lora
from ropepatch.training.teacher import Teacher

TARGET = {"time: distillation / cross-entropy": 1.6, "memory: distillation / cross-entropy": 1.3}
SEED, ROUNDS = 0, 9
ROWS = {"short": [1024, 1024], "long": [2048]}
OBJECTIVES = ("cross-entropy", "distillation", "top_k")
TOP_K = 64

SHAPE: dict[str, Any] = {
    "vocab_size": 8_000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
LORA = Lora(train_norms=False)


def make_batch(lengths: list[int]) -> dict[str, Any]:
    """Rows on end; those within the old context skip half the target in their middle."""
    labels = [torch.randint(SHAPE["vocab_size"], (length,)) for length in lengths]
    ids = torch.cat(labels)[None]
    for row in labels:
        row[0] = -100
    jumps = 1024 * (len(lengths) > 1)
    places = [torch.arange(n) + jumps * (torch.arange(n) >= n // 2) for n in lengths]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    segments = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    target = {"labels": torch.cat(labels)[None], "position_ids": torch.cat(places)[None]}
    return {"input_ids": ids} | target | segments | longest


class Step:
    """A step on rows of one kind, towards any of the objectives."""

    def __init__(self, rows: str) -> None:
        torch.manual_seed(SEED)
        model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
        mapped = map_attention(model, "rerope", to="2x")
        mapped.remove()
        patch(model, plan(model, to="2x", method="yarn"))
        self.model, self.batch = trainable(model, LORA).train(), make_batch(ROWS[rows])
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with torch.no_grad():  # as after a few steps
            for parameter in self.trained:
                parameter.add_(torch.randn(parameter.shape) * 0.01)
        window = SHAPE["max_position_embeddings"]
        options = {"distillation": Distil(), "top_k": Distil(top_k=TOP_K)}
        self.teachers = {
            name: Teacher(self.model, window, mapped, distil) for name, distil in options.items()
        }
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5)
        with packed_attention(self.model):
            self.head = linear_head(self.model)

    def __call__(self, objective: str) -> None:
        """A step."""
        self.optimizer.zero_grad()
        with packed_attention(self.model):
            teacher = self.teachers.get(objective)
            distilled = None if teacher is None else teacher.loss(self.batch)
            loss = causal_lm_loss(self.model, self.batch, head=self.head, distilled=distilled)
            loss.backward()
        self.optimizer.step()


def time_all(rows: str, rounds: int) -> dict[str, Any]:
    step = Step(rows)
    seconds, _ = in_turn({name: partial(step, name) for name in OBJECTIVES}, rounds, seed=SEED)
    ratios = {f"{name} / cross-entropy": ratio(seconds, name, "cross-entropy") for name in OBJECTIVES[1:]}
    return {
        "rounds": rounds,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        **ratios,
    }


def top_k_error() -> dict[str, float]:
    """How much of the loss is missing, and the error of the gradient of the logits as a share of its norm."""
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    ids = torch.stack([tale.ids for tale in held_out_tales(tokenizer, length=256, count=4)])
    with torch.no_grad():
        teacher = TeacherOutput(model(ids).logits.flatten(0, 1))
        with ropepatch.patch(model, "yarn", to="8x"):
            logits = model(ids).logits.flatten(0, 1)
    found = {}
    for k in (TOP_K, None):
        student = logits.clone().requires_grad_()
        loss = linear_distillation(student, None, ids.flatten(), teacher=teacher, top_k=k)
        found[k] = loss.item(), torch.autograd.grad(loss, student)[0]
    (part, near), (whole, exact) = found[TOP_K], found[None]
    error = ((near - exact).norm() / exact.norm()).item()
    return {"missing": float(f"{1 - part / whole:.3g}"), "gradient": float(f"{error:.3g}")}


def measure_memory(rows: str, objective: str) -> float:
    """MiB above the loaded model, of one objective in this process, which does nothing else."""
    torch.set_num_threads(1)
    step = Step(rows)
    loaded = resident_mib("VmRSS")
    for _ in range(2):
        step(objective)
    return resident_mib("VmHWM") - loaded


def compare_memory(rows: str) -> dict[str, float]:
    found: dict[str, float] = {name: in_own_process(rows, name) for name in OBJECTIVES}
    net = found["distillation"] / found["cross-entropy"]
    return {f"{name} MiB": round(mib, 1) for name, mib in found.items()} | {
        "distillation / cross-entropy": float(f"{net:.4g}")
    }


def render(result: dict[str, Any]) -> str:
    lines = [("rows", "time", "quartiles", "with top_k", "memory")]
    for rows in ROWS:
        ours, part = (result[rows][f"{name} / cross-entropy"] for name in OBJECTIVES[1:])
        memory = result[rows]["memory"]["distillation / cross-entropy"]
        quartiles = f"{ours['q1']:.2f}-{ours['q3']:.2f}"
        lines.append((rows, f"{ours['median']:.2f}", quartiles, f"{part['median']:.2f}", f"{memory:.2f}"))
    return f"{table(lines)}\nof a step of cross-entropy; targets: time at most 1.6, memory at most 1.3"


def benchmark(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "target": TARGET,
        "seed": SEED,
        "model": SHAPE,
        "lora": LORA.model_dump(),
        "rows": ROWS,
        "chunk": DISTILLED,
        "top_k": TOP_K,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        **{kind: {"memory": compare_memory(kind)} | time_all(kind, rounds) for kind in ROWS},
        "top_k error": top_k_error(),
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, render, measure_memory, rounds=ROUNDS)

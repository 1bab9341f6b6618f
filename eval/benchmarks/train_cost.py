"""Time and memory of a training step, against transformers' own loss.

    taskset -c 1 python eval/benchmarks/train_cost.py [--rounds N] [--json FILE]

A step is forward, backward and AdamW of a LoRA (rank 16 on queries, keys, values and outputs, and all norms)
on a random LLaMA, for one sequence. Stock: the model called with `labels`, as transformers' Trainer and PEFT
do, which computes the logits of all tokens; it keeps no cache here, which favours it. Ours: `causal_lm_loss`
with the head that `linear_head` finds. Both alternate on the same model, in rounds of shuffled order. Figures
are medians of the ratios within a round, and losses and gradients must agree. Memory is the peak of a
separate process over two steps, minus the loaded model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from reporting import (
    in_own_process,
    in_turn,
    ratio,
    resident_mib,
    run_benchmark,
    spread,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ropepatch.model.cost import CHUNK
from ropepatch.training.loss import causal_lm_loss, linear_head

TARGET = {"speed: ours / stock": 0.95, "memory: ours / stock": 0.5}
AGREEMENT = 1e-4  # relative, of the loss and of the norm of the gradients
SEED, ROUNDS, TOKENS = 0, 9, 4096
PROCEDURES = ("stock", "ours")

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "tie_word_embeddings": False,
}
LORA: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"],
}


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=TOKENS))
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA)).train()


def make_batch() -> dict[str, Tensor]:
    ids = torch.randint(SHAPE["vocab_size"], (1, TOKENS))
    labels = ids.clone()
    labels[0, 0] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(TOKENS)[None],
    }


def loss_functions(
    model: nn.Module,
) -> dict[str, Callable[[dict[str, Tensor]], Tensor]]:
    return {
        "stock": lambda batch: (
            model(**batch, use_cache=False, num_items_in_batch=TOKENS - 1).loss
        ),
        "ours": partial(
            causal_lm_loss, model, num_items=TOKENS - 1, head=linear_head(model)
        ),
    }


class Step:
    """One step of a procedure; the procedures share a model and an optimiser."""

    def __init__(self) -> None:
        self.model, self.batch = make_model(), make_batch()
        self.trained = [
            parameter
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5)
        self.losses = loss_functions(self.model)

    def __call__(self, procedure: str, *, update: bool = True) -> tuple[float, float]:
        """The loss, and the norm of the gradients."""
        self.optimizer.zero_grad()
        loss = self.losses[procedure](self.batch)
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in self.trained]).norm()
        if update:
            self.optimizer.step()
        return loss.item(), norm.item()


def time_both(rounds: int) -> dict[str, Any]:
    step = Step()
    (loss, norm), (our_loss, our_norm) = (
        step(procedure, update=False) for procedure in PROCEDURES
    )
    difference = max(abs(our_loss / loss - 1), abs(our_norm / norm - 1))
    if not difference <= AGREEMENT:
        raise SystemExit(
            f"loss or gradients differ by {difference:.2e}: not the same work"
        )
    steps = {procedure: partial(step, procedure) for procedure in PROCEDURES}
    seconds, _ = in_turn(steps, rounds, warm_up=0, seed=SEED)
    return {
        "rounds": rounds,
        "tokens_per_second": {
            name: spread([TOKENS / x for x in values])
            for name, values in seconds.items()
        },
        "ours / stock": ratio(seconds, "stock", "ours"),
        "largest relative difference of loss and gradients": float(f"{difference:.3g}"),
    }


def measure_memory(procedure: str) -> dict[str, float]:
    """The memory of one procedure; in a separate process."""
    torch.set_num_threads(1)
    step = Step()
    loaded = resident_mib("VmRSS")
    step(procedure)
    loss, _ = step(procedure)
    peak = resident_mib("VmHWM")
    return {
        "loaded_mib": loaded,
        "peak_mib": peak,
        "net_mib": peak - loaded,
        "loss": loss,
    }


def compare_memory() -> dict[str, Any]:
    found: dict[str, Any] = {
        procedure: in_own_process(procedure) for procedure in PROCEDURES
    }
    difference = abs(found["ours"]["loss"] / found["stock"]["loss"] - 1)
    if not difference <= AGREEMENT:
        raise SystemExit(
            f"the losses of the second step differ by {difference:.2e}: not the same work"
        )
    net = found["ours"]["net_mib"] / found["stock"]["net_mib"]
    return found | {"ours / stock": float(f"{net:.4g}")}


def benchmark(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "target": TARGET,
        "agreement": AGREEMENT,
        "seed": SEED,
        "model": SHAPE,
        "lora": LORA,
        "tokens": TOKENS,
        "chunk": CHUNK,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "memory": compare_memory(),
        "speed": time_both(rounds),
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, measure_memory, rounds=ROUNDS)

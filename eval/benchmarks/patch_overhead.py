"""Cost of a patch per forward pass, against the model that stock transformers builds from the same plan.

    python eval/benchmarks/patch_overhead.py [--json FILE]

Four models share their weights: one native (YaRN through config.json), a second native one as the control,
whose ratio to the first is the noise, one without scaling, and the patched one. In each round every model
runs once, in shuffled order; the figures are medians of the ratios within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from reporting import in_turn, ratio, run_benchmark, spread
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch

TARGET_RATIO = 1.02
SEED = 0
ROUNDS = {128: 600, 4096: 30}  # tokens: rounds
WARM_UP = 3
PATCHES = 50
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 1024,
}
WINDOW, TARGET = 1024, 4096
PAIRS = {
    "patched / native": ("patched", "native"),
    "patched / unscaled": ("patched", "unscaled"),
    "control / native": ("control", "native"),
}
Run = Callable[[Tensor], object]


def build_models() -> dict[str, LlamaForCausalLM]:
    """The four models, with one set of weights in memory."""
    torch.manual_seed(SEED)
    unscaled = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=WINDOW))
    plan = ropepatch.plan(unscaled, to=TARGET, method="yarn")
    weights = unscaled.state_dict()

    def twin(**config: Any) -> LlamaForCausalLM:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **config))
        model.load_state_dict(weights, assign=True)
        return model

    scaled = {
        "max_position_embeddings": TARGET,
        "rope_parameters": plan.rope_parameters,
    }
    models = {
        "native": twin(**scaled),
        "control": twin(**scaled),
        "unscaled": unscaled,
        "patched": twin(max_position_embeddings=WINDOW),
    }
    ropepatch.patch(models["patched"], plan)
    for model in models.values():
        model.train(False)
    return models


def forward_of(model: Any) -> Run:
    return lambda ids: model(ids, use_cache=False)


def compiled_alone(model: LlamaForCausalLM) -> Any:
    """Compile a model in one graph, without the cache that models of one class share.

    With that cache, a call would try the guards of the other three models first.
    """
    compile_model: Any = torch.compile  # its overloads leave isolate_recompiles out
    return compile_model(model, fullgraph=True, dynamic=False, isolate_recompiles=True)


def forward_row(
    mode: str, runs: dict[str, Run], ids: Tensor, rounds: int
) -> dict[str, Any]:
    bound = {name: partial(run, ids) for name, run in runs.items()}
    seconds, _ = in_turn(bound, rounds, warm_up=WARM_UP, seed=SEED)
    return {
        "mode": mode,
        "tokens": ids.shape[1],
        "n": rounds,
        "milliseconds": {
            name: spread([1e3 * s for s in values]) for name, values in seconds.items()
        },
        "ratios": {name: ratio(seconds, *pair) for name, pair in PAIRS.items()},
    }


def forward_rows(models: dict[str, LlamaForCausalLM]) -> Iterator[dict[str, Any]]:
    for tokens, rounds in ROUNDS.items():
        ids = torch.randint(SHAPE["vocab_size"], (1, tokens))
        if not torch.equal(models["patched"](ids).logits, models["native"](ids).logits):
            raise SystemExit(
                f"patched and native logits differ at {tokens} tokens: not the same work"
            )
        eager = {name: forward_of(model) for name, model in models.items()}
        yield forward_row("eager", eager, ids, rounds)
        torch._dynamo.reset()
        compiled = {
            name: forward_of(compiled_alone(model)) for name, model in models.items()
        }
        yield forward_row("compiled", compiled, ids, rounds)


def patch_milliseconds(model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
    """The milliseconds of `patch` with an existing plan, and of `remove`."""
    plan = ropepatch.plan(model, to=TARGET, method="yarn")
    putting, removing = [], []
    for _ in range(PATCHES):
        begin = time.perf_counter()
        handle = ropepatch.patch(model, plan)
        middle = time.perf_counter()
        handle.remove()
        putting.append(1e3 * (middle - begin))
        removing.append(1e3 * (time.perf_counter() - middle))
    return {"patch": spread(putting), "remove": spread(removing)}


@torch.inference_mode()
def benchmark() -> dict[str, Any]:
    torch.set_num_threads(1)
    models = build_models()
    return {
        "target": {"median ratio": TARGET_RATIO},
        "model": {"model_type": "llama", **SHAPE, "max_position_embeddings": WINDOW},
        "scaling": {"method": "yarn", "to": TARGET},
        "seed": SEED,
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "forward": list(forward_rows(models)),
        "patch_milliseconds": {"n": PATCHES, **patch_milliseconds(models["unscaled"])},
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark)

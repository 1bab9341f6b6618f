"""Engines that run in this process: transformers, llama-cpp-python and mlx-lm.

Each is a function of token ids [T] and positions, to the most probable next tokens at each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.model.stock import no_progress_bars, stock_code
from ropepatch.probing.judging import Top

TOP = 20
Engine = Callable[[Sequence[int], Sequence[int]], list[Top]]


def _transformers(path: str) -> Engine:
    from transformers import AutoModelForCausalLM

    with stock_code(f"load {path}"), no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=False)
        model.eval()

    @torch.inference_mode()
    def read(ids: Sequence[int], positions: Sequence[int]) -> list[Top]:
        kept = torch.tensor(positions) - 1
        logits = model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=kept).logits[0]
        return most_probable(logits)

    return read


def _llama_cpp(path: str) -> Engine:
    from llama_cpp import Llama  # type: ignore[import-not-found]

    llama: Any = Llama(path, n_ctx=0, logits_all=True, verbose=False)

    def read(ids: Sequence[int], positions: Sequence[int]) -> list[Top]:
        kept = [position for position in positions if position <= llama.n_ctx()]
        llama.reset()
        llama.eval(list(ids[: max(kept)]))
        return most_probable(torch.tensor(llama.scores[[position - 1 for position in kept]]))

    return read


def _mlx_lm(path: str) -> Engine:
    import mlx.core as mx  # type: ignore[import-not-found]
    from mlx_lm import load  # type: ignore[import-not-found]

    model: Any = load(path)[0]

    def read(ids: Sequence[int], positions: Sequence[int]) -> list[Top]:
        logits = model(mx.array([list(ids)]))[0, mx.array(positions) - 1].astype(mx.float32)
        return most_probable(torch.tensor(logits.tolist()))

    return read


ENGINES = {"transformers": _transformers, "llama-cpp": _llama_cpp, "mlx-lm": _mlx_lm}


def load_engine(name: str, path: str) -> Engine:
    """Load a model in an engine.

    Raises:
        RopepatchError: The engine is not installed, or does not load the model.
    """
    try:
        return ENGINES[name](path)
    except ImportError as error:
        package = {"llama-cpp": "llama-cpp-python"}.get(name, name)
        raise RopepatchError(f"{name} is not installed here", hint=f"pip install {package}") from error
    except RopepatchError:
        raise
    except Exception as error:  # whatever a stranger's engine raises on these files
        raise RopepatchError(f"{name} does not load {path}: {' '.join(str(error).split())[:300]}") from error


def most_probable(logits: torch.Tensor) -> list[Top]:
    """The log-probabilities of the most probable tokens, of logits [positions, vocabulary]."""
    values, ids = logits.float().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]

"""Real processes of torch.distributed over gloo, forked from one that has imported what they need."""

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

IMPORTED = [
    "ropepatch.attention",
    "ropepatch.evaluation.retrieval",
    "ropepatch.training.loss",
    "transformers.models.llama.modeling_llama",
]


def on_processes(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(rank, *arguments)`, of a module's top level, on so many processes of one thread each."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        start_processes(_join, (count, store, work, arguments), nprocs=count, start_method="forkserver")


def _join(rank: int, count: int, store: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    warnings.simplefilter("error")
    work(rank, *arguments)
    dist.destroy_process_group()

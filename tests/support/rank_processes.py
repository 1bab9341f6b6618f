"""Real processes that may form a gloo group, forked from a process with the necessary imports."""

import multiprocessing
import os
import socket
import warnings

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

IMPORTED = [
    "ropepatch.attention",
    "ropepatch.evaluation.retrieval",
    "ropepatch.training.loss",
    "transformers.models.llama.modeling_llama",
]


def on_processes(count, work, *arguments):
    """Call `work(rank, *arguments)`, a top-level function, in `count` processes of one thread each."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(
        _launched,
        (count, port, work, arguments),
        nprocs=count,
        start_method="forkserver",
    )


def _launched(rank, count, port, work, arguments):
    """Set the environment as torchrun does, without joining a process group, and call the function."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": "1",
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(count),
    }
    warnings.simplefilter("error")
    work(rank, *arguments)
    dist.destroy_process_group()

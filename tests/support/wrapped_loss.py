"""One training step of two processes, sharded and replicated; run by torchrun from test_training_loss.py.

Each process computes its rows of the batch; process 0 writes the loss and the gradients of the whole batch.
"""

import sys

import torch
import torch.distributed as dist
from loss_models import build, tokens
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ropepatch.training.loss import causal_lm_loss, linear_head

ROWS, LENGTH = 4, 12


def batch():
    """Rows with different numbers of labels."""
    ids = torch.stack(tokens(*[LENGTH] * ROWS))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : 2 * row] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, *, fused):
    """The loss of the whole batch, from this process's rows; gradients become the mean over the processes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = {name: values.chunk(size)[rank] for name, values in batch().items()}
    head = linear_head(model) if fused else None
    assert (head is not None) == fused
    items = (batch()["labels"][:, 1:] != -100).sum()
    loss = causal_lm_loss(model, rows, items, head=head) * size
    loss.backward()
    total = loss.detach() / size
    dist.all_reduce(total)
    return total


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    written = {}
    for kind in ("ddp", "fsdp", "fsdp-16-bit-output", "fsdp-all-logits"):
        model = build(tie_word_embeddings=kind == "ddp")
        model.train()
        if kind == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(
                output_dtype=torch.bfloat16 if "16" in kind else None
            )
            for layer in model.model.layers:
                fully_shard(layer)
            wrapped = fully_shard(model, mp_policy=policy)
        loss = step(wrapped, fused="all-logits" not in kind)
        gradients = {
            name: whole(parameter.grad) for name, parameter in model.named_parameters()
        }
        written[kind] = {"loss": loss, "gradients": gradients}
    if dist.get_rank() == 0:
        torch.save(written, sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

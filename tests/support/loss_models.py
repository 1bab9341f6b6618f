"""Random models whose losses differ from token to token, and slow oracles for these losses."""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from tiny_models import tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

VOCABULARY = 48
LENGTHS = (60, 58, 40, 32, 32, 7, 7, 60)  # of documents, some of which share a batch
PROTOCOLS = ({}, {"window": 20, "stride": 6})
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
}
LLAMA |= {"max_position_embeddings": 2048}


def build(model_type="llama", **fields):
    """A tiny random model whose weights are large enough for its losses to differ from token to token."""
    return tiny_model(model_type, **(LLAMA if model_type == "llama" else {}) | fields)


def protocol_name(protocol):
    return "sliding {window} by {stride}".format(**protocol) if protocol else "one pass"


def tokens(*lengths, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(1, vocabulary, (length,), generator=generator)
        for length in lengths
    ]


def expected(model, ids):
    """The losses, computed token by token from the logits of one forward pass."""
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    return torch.stack(
        [F.cross_entropy(logits[t - 1], ids[t]) for t in range(1, len(ids))]
    )


def shift_model(step, probability, vocabulary=20):
    """After token i, gives token i + step the probability stated; the others share the rest evenly."""
    model = build(
        vocab_size=vocabulary,
        hidden_size=vocabulary,
        num_hidden_layers=1,
        head_dim=8,
        rms_norm_eps=1e-12,
    )
    logit = math.log(probability * (vocabulary - 1) / (1 - probability))
    one_hot = torch.eye(vocabulary)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(one_hot)
        model.lm_head.weight.copy_(one_hot.roll(step, dims=0) * logit / vocabulary**0.5)
    return model


@contextmanager
def decoder_passes(model):
    """(rows, length) of every forward pass of the decoder within the block."""
    shapes = []
    hook = model.model.layers[0].register_forward_hook(
        lambda _, __, output: shapes.append(tuple(output.shape[:2]))
    )
    try:
        yield shapes
    finally:
        hook.remove()


class WithoutPositions(LlamaForCausalLM):
    """Returns all logits: it has no argument to select some."""

    def forward(self, input_ids, use_cache=None):
        return super().forward(input_ids, use_cache=use_cache)


class IgnoresPositions(LlamaForCausalLM):
    """Returns all logits, whichever are selected."""

    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        return super().forward(input_ids, use_cache=use_cache)


def trained_gradients(model, loss):
    """The gradients of all trained weights by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, [*trained.values()])
    return dict(zip(trained, found, strict=True))


def assert_near(ours, theirs, share):
    """Assert that gradients differ by less than a share of their norms."""
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= share * theirs[name].norm(), name


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max(
            [
                self.numel,
                *(
                    leaf.numel()
                    for leaf in tree_leaves(result)
                    if isinstance(leaf, Tensor)
                ),
            ]
        )
        return result

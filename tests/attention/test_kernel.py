"""FlexAttention gives the results of the loop over blocks, and its block mask skips invisible blocks.

Its kernels are compiled for a GPU. On a CPU, uncompiled flex_attention replaces them. It evaluates the mask
function and ignores the lists of blocks, so a separate test compares the lists with the function.
"""

import pytest
import torch
from remapping_oracle import SMALL
from swaps import IDS, apart, logits, put, sliding
from tiny_models import into, tiny_model
from torch.nn.attention import flex_attention as library
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from transformers import DynamicCache

from ropepatch.attention import REMAPPINGS, make_remapping
from ropepatch.attention import modeling_position_remapping as modeling

every_remapping = pytest.mark.parametrize("name", REMAPPINGS)
LEFT = torch.ones_like(IDS)
LEFT[0, :9] = 0
PACKED = torch.cat((torch.arange(18), torch.arange(22)))[None].expand(2, -1)


@pytest.fixture
def kernel(monkeypatch):
    """A function that returns the logits of a model by FlexAttention, and asserts that FlexAttention ran."""
    # Nor is it traced: that takes longer than everything else
    monkeypatch.setattr(
        library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False
    )
    runs = []

    def uncompiled(*args, **options):
        runs.append(options)
        return flex_attention(*args, **options)

    monkeypatch.setattr(modeling.flex, "compile_friendly_flex_attention", uncompiled)

    def logits_by_kernel(model, *args, **inputs):
        with pytest.MonkeyPatch.context() as patching, torch.no_grad():
            patching.setattr(modeling, "has_kernel", lambda value: True)
            patching.setattr(modeling, "KERNEL_BLOCK", 16)
            runs.clear()
            found = logits(model, *args, **inputs)
            assert runs
            return found

    return logits_by_kernel


@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, None) for name in REMAPPINGS), ("self-extend", 20), ("lambda", 20)],
)
def test_flex_attention_gives_the_logits_of_the_block_loop(name, window, kernel):
    """For a full row beside a padded one, packed rows, and with a KV cache."""
    one = {"num_hidden_layers": 1}
    model = sliding(window, **one) if window else tiny_model("llama", **one)
    put(model, name)
    for inputs in ({"attention_mask": LEFT}, {"position_ids": PACKED}):
        inputs |= {"use_cache": False}
        seen = inputs.get("attention_mask", torch.ones_like(IDS)).bool()
        assert (
            apart(
                kernel(model, IDS, **inputs)[seen], logits(model, IDS, **inputs)[seen]
            )
            < 5e-5
        )
    with torch.no_grad():
        cache, other = (DynamicCache(config=model.config) for _ in range(2))
        for each in (cache, other):
            model(IDS[:, :12], **into(each))
    expected = logits(model, IDS[:, 12:], **into(other))
    assert apart(kernel(model, IDS[:, 12:], **into(cache)), expected) < 5e-5


@every_remapping
@pytest.mark.parametrize("sliding_window", [modeling.FAR, 30])
def test_the_block_mask_lists_every_visible_block(name, sliding_window):
    """Queries at positions 24 to 99 of 100 keys, across blocks of 16, with documents and padding."""
    documents = torch.tensor([[0] * 5 + [1] * 95, [1] * 40 + [2] * 60, [1] * 100])
    keys = torch.arange(100)[None].expand(3, -1)
    sight = modeling.Sight(keys[:, 24:], keys, documents, 24, sliding_window)
    bands, visited = make_remapping(name, **SMALL[name]).bands(), 0
    for band in bands:
        span = slice(3, 100)
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(modeling, "KERNEL_BLOCK", 16)
            mask = modeling.block_mask(band, sight, span, 3)
        b, i, j = torch.meshgrid(
            torch.arange(3), torch.arange(76), torch.arange(97), indexing="ij"
        )
        pairs = mask.mask_mod(b, b, i, j)
        expected = (
            band.holds(sight.queries, keys[:, span])
            & sight.mask(slice(0, 76), span)[:, 0]
        )
        assert torch.equal(pairs, expected)
        some, every = (
            pad(pad(pairs, (0, 15)), (0, 0, 0, 4), value=beyond).view(3, 5, 16, 7, 16)
            for beyond in (0, 1)
        )
        some, every = some.any(4).any(2), every.all(4).all(2)
        whole = BlockMask.from_kv_blocks(
            mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=16
        )
        listed, full = mask.to_dense()[:, 0].bool(), whole.to_dense()[:, 0].bool()
        assert (some <= listed).all()
        assert (full <= every).all()
        visited += listed.sum()
    assert visited < 0.7 * 3 * 5 * 7 * len(bands)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
# Dynamo of torch 2.11 reads `.grad` of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every_remapping
def test_flex_attention_on_a_gpu_matches_loop_and_gradients(name):
    model = tiny_model("llama", head_dim=modeling.NARROWEST).cuda().bfloat16()
    put(model, name)
    ids = torch.randint(3, 90, (2, 777), device="cuda")

    def step():
        model.zero_grad()
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        return output.logits.detach().float(), torch.cat(
            [p.grad.flatten().float() for p in model.parameters()]
        )

    by_kernel = step()
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(modeling, "has_kernel", lambda value: False)
        by_loop = step()
    for one, other in zip(by_kernel, by_loop, strict=True):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.03 * other.norm()

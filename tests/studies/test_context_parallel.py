"""Rows whose parts are on several processes, which are real ones: each compares its part with one process."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import context_parallel as parallel
import pytest
import torch
import torch.distributed as dist
from context_parallel import context_parallel, shard_row
from rank_processes import on_processes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from ropepatch.attention import map_attention
from ropepatch.errors import RopepatchError
from ropepatch.training.loss import causal_lm_loss

LENGTHS = {2: (38, 1, 25), 4: (9, 7)}  # of the documents, by processes
STEPS = 2


def build(kind: str = "") -> Any:
    """Two layers, whose four heads share two of keys; a sliding one sees 7 tokens."""
    window = {"sliding_window": 7} if kind == "sliding" else {}
    config, model = (MistralConfig, MistralForCausalLM) if window else (LlamaConfig, LlamaForCausalLM)
    torch.manual_seed(0)
    return model(
        config(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, attn_implementation="sdpa", **window,
        )
    ).double().eval()  # fmt: skip


def row_of(lengths: tuple[int, ...], *, jump: bool = False) -> dict[str, Tensor]:
    """A packed row; with a jump, the first document's second half stands 11 positions later, as by PoSE."""
    each = [torch.arange(length) for length in lengths]
    each[0][lengths[0] // 2 :] += 11 * jump
    ids = torch.randint(3, 97, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    labels = ids.clone()
    labels[0, edges[:-1]] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat(each)[None],
        "cu_seq_lens_q": edges,
    }


def own_columns(row: dict[str, Tensor], group: Any) -> Tensor:
    """Which columns this process holds."""
    columns = torch.arange(row["input_ids"].shape[1])[None]
    return shard_row(row | {"input_ids": columns}, group)["input_ids"][0]


def attended(model: Any, hidden: Tensor, positions: Tensor, mask: Tensor | None, **told: Any) -> Tensor:
    """What the first layer's attention makes of hidden states, in float64 throughout."""
    tables = model.model.rotary_emb(hidden, positions)
    layer = model.model.layers[0].self_attn
    return layer(hidden, position_embeddings=tables, attention_mask=mask, position_ids=positions, **told)[0]


def difference(model: Any, row: dict[str, Tensor], group: Any, mistake: str = "") -> float:
    """The greatest difference from one process: of the output, and of all gradients."""
    generator = torch.Generator().manual_seed(2)
    hidden, weights = (torch.randn(1, 64, 32, dtype=torch.float64, generator=generator) for _ in "12")
    layer, tokens = model.model.layers[0].self_attn, row["input_ids"].shape[1]
    lengths = row["cu_seq_lens_q"].diff().tolist()
    whole = hidden[:, :tokens].clone().requires_grad_()
    parts = zip(whole.split(lengths, 1), row["position_ids"].split(lengths, 1), strict=True)
    expected = torch.cat([attended(model, part, positions, None) for part, positions in parts], 1)
    inputs = [whole, *layer.parameters()]
    wanted = torch.autograd.grad((expected * weights[:, :tokens]).sum(), inputs)
    columns = own_columns(row, group)
    with context_parallel(model):
        if mistake == "documents that see each other":
            row = row | {"cu_seq_lens_q": row["cu_seq_lens_q"][[0, -1]]}
        shard = shard_row(row, group)
        if mistake == "positions that follow each other":
            shard["position_ids"] = torch.arange(len(columns))[None] + dist.get_rank(group) * len(columns)
        mine = hidden[:, :tokens][:, columns].clone().requires_grad_()
        told = {"row_shard": shard["row_shard"]}
        got = attended(model, mine, shard["position_ids"], parallel._no_mask(), **told)
        found = torch.autograd.grad((got * weights[:, columns]).sum(), [mine, *layer.parameters()])
    pairs = [(got, expected[:, columns]), (found[0], wanted[0][:, columns])]
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        dist.all_reduce(ours, group=group)
        pairs.append((ours, theirs))
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def training(kind: str, row: dict[str, Tensor], group: Any, split: bool) -> tuple[list[float], list[Tensor]]:
    """The loss of every step, and the weights after the last."""
    model = build(kind).train()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    count, losses = int((row["labels"] != -100).sum()), []
    lengths = row["cu_seq_lens_q"].diff().tolist()
    for _ in range(STEPS):
        with context_parallel(model) if split else nullcontext():
            if split:
                loss = causal_lm_loss(model, shard_row(row, group), count, head=model.lm_head)
            else:
                names = ("input_ids", "labels", "position_ids")
                documents = zip(*(row[name].split(lengths, 1) for name in names), strict=True)
                alone = [dict(zip(names, one, strict=True)) for one in documents]
                loss = sum(causal_lm_loss(model, one, count, head=None) for one in alone)
            loss.backward()
        if split:
            loss = loss.detach()
            for value in (loss, *(weight.grad for weight in model.parameters())):
                dist.all_reduce(value, group=group)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [weight.detach() for weight in model.parameters()]


CASES = {
    "documents": {},
    "a jump of positions": {"jump": True},
    "a map": {"distances": "self-extend"},
    "a map and a jump": {"distances": "rerope", "jump": True},
}
MISTAKES = ("keys as they arrive", "documents that see each other", "positions that follow each other")


def as_they_arrive(gathered: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """The keys of a row of four chunks in the order of two processes: 0, 3, 1, 2."""
    return lambda own, group: torch.cat([gathered(own, group).chunk(4, 2)[i] for i in (0, 3, 1, 2)], 2)


def read(ranks: int, group: Any) -> dict[str, Any]:
    """What a process of a group finds."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        model = build()
        if "distances" in case:
            map_attention(model, case["distances"], to=64)
        found[name] = difference(model, row_of(LENGTHS[ranks], jump="jump" in case), group)
    row = row_of(LENGTHS[ranks])
    for name in MISTAKES if ranks == 2 else ():
        with pytest.MonkeyPatch.context() as patched:
            if name == "keys as they arrive":
                patched.setattr(parallel, "_gathered", as_they_arrive(parallel._gathered))
            found[name] = difference(build(), row, group, name)
    for kind in ("llama", "sliding"):
        (losses, weights), (expected, wanted) = (training(kind, row, group, split) for split in (True, False))
        found[kind] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        pairs = zip(weights, wanted, strict=True)
        found[f"{kind} weights"] = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        found[f"{kind} moved"] = abs(losses[0] - losses[1])
    return found | {"columns": own_columns(row, group)}


def run(rank: int, out: Path) -> None:
    """One process, among four and, if it is one of the first two, among two."""
    pair = dist.new_group([0, 1])
    for ranks, group in ((2, pair), (4, None)):
        if rank < ranks:
            torch.save(read(ranks, group), out / f"{rank}-of-{ranks}.pt")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four processes leave what they find."""
    out = tmp_path_factory.mktemp("ranks")
    on_processes(4, run, out)
    return out


@pytest.fixture(params=LENGTHS)
def ranks(launched: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two or four processes found."""
    return [torch.load(launched / f"{rank}-of-{request.param}.pt") for rank in range(request.param)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_attention_over_processes_is_that_of_one_forward_and_backward(ranks, case):
    assert max(found[case] for found in ranks) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_what_is_mistaken_is_seen(ranks, mistake):
    assert max(found[mistake] for found in ranks) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_steps_over_processes_have_the_losses_and_gradients_of_one(ranks, kind):
    for found in ranks:
        assert found[kind] < 1e-6  # norms are in float32
        assert found[f"{kind} weights"] < 1e-6
        assert found[f"{kind} moved"] > 1e-3


@pytest.mark.slow
def test_every_process_holds_an_early_and_a_late_part_of_the_row(ranks):
    held = torch.stack([found["columns"] for found in ranks])
    assert held.flatten().sort().values.tolist() == list(range(sum(LENGTHS[len(ranks)])))
    assert len(set(held.sum(1).tolist())) == 1  # as much to do


# Without other processes


def test_a_row_on_one_process_is_read_as_a_whole():
    model, row = build(), row_of((9, 7), jump=True)
    expected = [
        model(ids, position_ids=positions).logits
        for ids, positions in zip(
            row["input_ids"].split([9, 7], 1), row["position_ids"].split([9, 7], 1), strict=True
        )
    ]
    shard = shard_row(row)
    labels = shard.pop("shift_labels")
    with context_parallel(model):
        got = model(**shard, use_cache=False).logits
    torch.testing.assert_close(got, torch.cat(expected, 1), rtol=0, atol=1e-6)
    assert labels[0, :8].equal(row["input_ids"][0, 1:9])
    assert labels[0, [8, 15]].tolist() == [-100, -100]


def test_what_would_be_read_wrongly_is_refused():
    model, row = build(), row_of((9, 7))
    shard = {name: value for name, value in shard_row(row).items() if name != "shift_labels"}
    half = {name: shard[name][:, :8] for name in ("input_ids", "position_ids")}
    mask = {"attention_mask": torch.ones(1, 16, dtype=torch.long)}
    with context_parallel(model):
        for changed in ({"row_shard": ()}, mask, half):
            with pytest.raises(RopepatchError, match="without its shard, or with a mask"):
                model(**shard | changed, use_cache=False)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RopepatchError, match="a row of 15 tokens cannot be split over 1 processes"):
        shard_row(row_of((9, 6)))


def test_a_map_is_in_force_again_after_the_rows_of_several_processes():
    model, ids = build(), torch.arange(3, 43)[None]
    map_attention(model, "rerope", to=64)
    before = model(ids).logits
    with context_parallel(model), pytest.raises(RopepatchError, match="without its shard"):
        model(ids, use_cache=False)
    assert torch.equal(model(ids).logits, before)

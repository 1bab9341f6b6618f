import pytest
import torch
import torch.nn.functional as F
import wrapped_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_models import Largest, assert_near, build, tokens, trained_gradients
from peft import LoraConfig, get_peft_model
from run_recipes import run_two_processes
from torch import nn

from ropepatch.training import loss
from ropepatch.training.loss import (
    TeacherOutput,
    causal_lm_loss,
    linear_cross_entropy,
    linear_distillation,
    linear_head,
)

# The loss of hidden states


def inputs(num_tokens, size, vocabulary, *, dtype=torch.float64, scale=1.0):
    """Hidden states, a head and labels of which every third is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale)
        .to(dtype)
        .requires_grad_()
        for shape in ((num_tokens, size), (vocabulary, size))
    )
    labels = torch.randint(vocabulary, (num_tokens,), generator=generator)
    labels[::3] = -100
    return hidden, weight, labels


def gradients(value, *tensors):
    return torch.autograd.grad(value, tensors, retain_graph=True)


def assert_same(found, expected, *tensors):
    """Two losses have the same value and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    ours, theirs = (gradients(x / 7, *tensors) for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def drawn_labels(data, tokens, vocabulary):
    label = st.sampled_from([-100, *range(vocabulary)])
    return torch.tensor(data.draw(st.lists(label, min_size=tokens, max_size=tokens)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_value_and_gradients_are_those_of_all_logits(data):
    N, H, V = (data.draw(st.integers(1, most)) for most in (17, 5, 9))
    # 60: logits in the thousands, which must not overflow
    scale = data.draw(st.sampled_from([1, 60]))
    hidden, weight, _ = inputs(N, H, V, scale=scale)
    labels = drawn_labels(data, N, V)
    chunk = data.draw(st.integers(1, 20))
    found = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    assert_same(found, expected, hidden, weight)


def test_sixteen_bits_are_those_of_the_matrix_products_alone():
    hidden, weight, labels = inputs(600, 16, 40, dtype=torch.bfloat16)
    found = linear_cross_entropy(hidden, weight, labels, chunk=128)
    assert found.dtype == torch.float32
    logits = (hidden @ weight.T).double()
    expected = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert (
        abs(expected.bfloat16().double() / expected - 1) > 1e-5
    )  # the sum itself would have been rounded
    slope = torch.autograd.grad(expected, logits)[0]
    of_hidden, of_weight = gradients(found, hidden, weight)
    assert of_hidden.dtype == of_weight.dtype == torch.bfloat16
    for gradient, exact in (
        (of_hidden, slope @ weight.double()),
        (of_weight, slope.T @ hidden.double()),
    ):
        assert (gradient.double() - exact).norm() < 0.005 * exact.norm()


def test_a_16_bit_gradient_is_scaled_by_an_exact_number():
    hidden, weight, labels = inputs(30, 16, 40, dtype=torch.bfloat16)
    found = linear_cross_entropy(hidden, weight, labels)
    whole, third = gradients(found, hidden)[0], gradients(found * (1 / 3), hidden)[0]
    assert torch.equal(third, (whole.float() * (1 / 3)).bfloat16())
    assert not torch.equal(third, whole * torch.tensor(1 / 3).bfloat16().item())


def test_a_frozen_head_costs_no_gradient_of_its_size():
    hidden, weight, labels = inputs(8, 30, 50)
    for is_trained in (False, True):
        loss = linear_cross_entropy(
            hidden, weight.detach().requires_grad_(is_trained), labels
        )
        saved = loss.grad_fn.saved_tensors
        assert (saved[1] is not None) == is_trained
        assert saved[0].shape == hidden.shape


def test_without_gradients_none_are_made():
    hidden, weight, labels = inputs(64, 40, 10, dtype=torch.float32)
    with torch.no_grad(), Largest() as found:
        assert not linear_cross_entropy(hidden, weight, labels, chunk=4).requires_grad
    assert found.numel == weight.numel() < hidden.numel()


# The loss against a teacher


def taught_by(student, teacher, labels, answers, t, c):
    """The oracle: the sum over the vocabulary as the definition has it, from all logits."""
    p, q = (teacher / t).softmax(-1), (student / t).softmax(-1)
    divergence = t**2 * torch.xlogy(p, p / q).nansum(-1)
    entropy = F.cross_entropy(student, labels, reduction="none")
    losses = torch.where(
        answers > 0, answers * entropy, (1 - c) * divergence + c * entropy
    )
    return losses[labels != -100].sum()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_distillation_is_the_divergence_of_all_logits(data):
    ranges = (1, 17), (1, 5), (2, 9)
    N, H, V = (data.draw(st.integers(least, most)) for least, most in ranges)
    hidden, weight, _ = inputs(N, H, V)
    generator = torch.Generator().manual_seed(1)
    own = [torch.randn(n, 3, generator=generator).double() for n in (N, V)]
    labels = drawn_labels(data, N, V)
    t = data.draw(st.sampled_from([1.0, 0.5, 3.0]))
    c = data.draw(st.sampled_from([0.0, 0.3]))
    weights = st.lists(st.sampled_from([0.0, 0.5, 7.0]), min_size=N, max_size=N)
    answers = torch.tensor(data.draw(weights))
    mixed = {"temperature": t, "cross_entropy": c, "answers": answers}
    mixed["chunk"] = data.draw(st.integers(1, 20))
    teacher = TeacherOutput(*own)
    found = linear_distillation(hidden, weight, labels, teacher=teacher, **mixed)
    student, whole = hidden @ weight.T, own[0] @ own[1].T
    expected = taught_by(student, whole, labels, answers, t, c)
    assert_same(found, expected, hidden, weight)
    logits, teacher = student.detach().requires_grad_(), TeacherOutput(whole)
    found = linear_distillation(logits, None, labels, teacher=teacher, **mixed)
    expected = taught_by(logits, whole, labels, answers, t, c)
    assert_same(found, expected, logits)


# The loss of a model


def rows(*lengths):
    """A batch of which some labels are ignored."""
    ids = torch.stack(tokens(*lengths))
    labels = ids.clone()
    labels[0, :4] = -100
    labels[-1, 5] = -100
    return {"input_ids": ids, "labels": labels}


def expected_sum(model, batch):
    """The oracle: the loss of the label at t + 1 from the logits at t."""
    logits = (
        model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].double()
    )
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def count(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def assert_same_step(model, found, expected, share):
    """Loss and gradients of a step are those of the oracle; the gradients."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    ours, theirs = trained_gradients(model, found), trained_gradients(model, expected)
    assert_near(ours, theirs, share)
    return ours


def peft_model(base, **options):
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, **options)
    model = get_peft_model(base, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:  # a copy that is trained is not its original
            parameter.data.mul_(1.1)
    return model


def with_bias():
    model = build("phi")
    nn.init.normal_(model.lm_head.bias)
    return model


def with_copies(tied, *copied):
    model = build(tie_word_embeddings=tied)
    return peft_model(
        model,
        target_modules=["q_proj"],
        modules_to_save=[*copied],
        ensure_weight_tying=tied,
    )


def fine_tuned_head():  # no change yet
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    return get_peft_model(build(), lora)


MODELS = {  # how it is made; which layer's place the loss takes; how many tensors are trained
    "all weights, tied": (lambda: build(tie_word_embeddings=True), "lm_head", 20),
    "a head with a bias": (with_bias, None, None),
    "an adapter under a frozen head": (
        lambda: peft_model(build(), target_modules=["q_proj", "o_proj"]),
        "base_model.model.lm_head",
        8,
    ),
    "a copy of tied embeddings": (
        lambda: with_copies(True, "embed_tokens"),
        "base_model.model.lm_head.modules_to_save.default",
        5,
    ),
    "copies of embeddings, norm and head": (
        lambda: with_copies(False, "embed_tokens", "lm_head", "norm"),
        "base_model.model.lm_head.modules_to_save.default",
        11,
    ),
    "an adapter on the head": (fine_tuned_head, None, 6),
    "granite, by a scale": (lambda: build("granite", logits_scaling=8.0), None, None),
    "gemma2, capped": (lambda: build("gemma2", head_dim=8), None, None),
}


@pytest.mark.parametrize(("make", "place", "trained"), MODELS.values(), ids=MODELS)
def test_a_model_gets_the_gradients_of_all_logits(make, place, trained, caplog):
    model = make()
    head = linear_head(model)
    assert head is (None if place is None else model.get_submodule(place))
    assert not any("forward" in vars(part) for part in model.modules())
    assert bool(
        [record for record in caplog.records if record.name == loss.__name__]
    ) == (head is None)
    batch = rows(11, 11)
    found = causal_lm_loss(model, batch, head=head)
    assert found.dtype == torch.float32
    expected = expected_sum(model, batch) / count(batch)
    made = assert_same_step(model, found, expected, 1e-4)
    assert trained in (None, len(made))
    assert head is None or all(gradient.any() for gradient in made.values())


@pytest.fixture(params=[True, False], ids=["head", "all logits"])
def model_and_head(request):
    """A model, and the head through which its loss is computed, or none."""
    model = build()
    return model, model.lm_head if request.param else None


@pytest.mark.parametrize("items", [17, torch.tensor(17.0)])
def test_a_loss_is_divided_by_its_number_of_items(model_and_head, items):
    (model, head), batch = model_and_head, rows(9, 9)
    found = causal_lm_loss(model, batch, items, head=head)
    torch.testing.assert_close(
        found.double(), expected_sum(model, batch) / 17, rtol=1e-5, atol=0
    )
    batch["labels"][:] = -100
    for none in (None, 0, torch.tensor(0)):
        found = causal_lm_loss(model, batch, none, head=head)
        assert found == 0
        assert not any(
            gradient.any() for gradient in trained_gradients(model, found).values()
        )


def test_a_step_holds_no_logits_of_all_tokens():
    model = build(vocab_size=4000)
    head = linear_head(model)
    batch = rows(*[256] * 8)
    with Largest() as found:
        causal_lm_loss(model, batch, head=head).backward()
    assert found.numel == loss.CHUNK * 4000
    with Largest() as all_at_once:
        causal_lm_loss(model, batch, head=None).backward()
    assert all_at_once.numel == 2048 * 4000


def test_under_autocast_the_loss_is_that_of_its_logits():
    model, batch = build(), rows(11, 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_head(model) is model.lm_head
        found = causal_lm_loss(model, batch, head=model.lm_head)
        expected = expected_sum(model, batch) / count(batch)
    assert_same_step(model, found, expected, 0.02)


# Wrappers


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    file = tmp_path_factory.mktemp("wrapped") / "step.pt"
    run_two_processes(wrapped_loss.__file__, str(file))
    return torch.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp-16-bit-output"])
def test_a_step_of_two_processes_is_that_of_one(kind, two_processes):
    model, batch = build(tie_word_embeddings=kind == "ddp"), wrapped_loss.batch()
    expected = expected_sum(model, batch) / count(batch)
    torch.testing.assert_close(
        two_processes[kind]["loss"].double(), expected, rtol=1e-5, atol=0
    )
    ours, theirs = two_processes[kind]["gradients"], trained_gradients(model, expected)
    if (
        kind != "ddp"
    ):  # which over gloo sums the gradients up to torch 2.8, and takes their mean since
        theirs = two_processes["fsdp-all-logits"]["gradients"]
    assert_near(ours, theirs, 1e-4)

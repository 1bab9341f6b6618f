"""The teacher within the student: bit-identical to the base model, without effect on the student."""

import copy

import pytest
import torch
from loss_models import assert_near, build, tokens, trained_gradients
from run_recipes import small_recipe

import ropepatch
from ropepatch.attention.interchange import POSITIONS_SLOT
from ropepatch.errors import RopepatchError
from ropepatch.extension.patching import patch
from ropepatch.extension.planning import plan
from ropepatch.training.adapter import recompute_activations, trainable
from ropepatch.training.loss import causal_lm_loss, linear_head
from ropepatch.training.packed_attention import packed_attention, segments
from ropepatch.training.recipe import Distil, Lora
from ropepatch.training.run import check_trainable
from ropepatch.training.teacher import Teacher

L, TARGET = 16, 64
LONG, SHORT = (40, 3, 21), (16, 1, 11)


def base(**fields):
    return build(**{"max_position_embeddings": L, "attention_dropout": 0.1} | fields)


def batch(lengths, jump=0):
    """Packed pieces; the student reads the second half of each farther off."""
    documents = tokens(*lengths)
    labels = [torch.cat([torch.tensor([-100]), ids[1:]]) for ids in documents]
    places = [torch.arange(n) + jump * (torch.arange(n) >= n // 2) for n in lengths]
    return {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat(places)[None],
        "answers": torch.zeros(1, sum(lengths)),
        **segments(lengths),
    }


def moved(model):
    """Copies of all trainable weights."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def school(lora, *, mapped=True, distil=None, **fields):
    """A student that has learned something; its teacher; what it was."""
    model = base(**fields)
    stock = copy.deepcopy(model)
    handle = ropepatch.patch(model, "rerope", to=TARGET) if mapped else None
    if handle:
        handle.remove()
    divisors = (2.0,) * plan(model, to=TARGET).source.config.rope.num_pairs
    patch(model, plan(model, to=TARGET, method="custom", divisors=divisors))
    student = trainable(model, lora)
    teacher = Teacher(student, L, handle, distil or Distil())
    return moved(student).train(), teacher, stock


def read_alone(model, ids, lengths):
    with torch.no_grad():
        return torch.cat([model(one).logits[0] for one in ids.split(list(lengths), 1)])


def state(model):
    """All state of a model that another forward pass could change."""
    parts, config = [], model.base_model.model.config
    for name, part in model.named_modules():
        own = vars(part)
        switches = [own.get(key) for key in ("forward", "_disable_adapters")]
        parts.append((name, id(part), part.training, POSITIONS_SLOT in own, switches))
    trained = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    return [parts, trained, config.to_dict(), config._attn_implementation]


LORAS = {
    "adapter": Lora(r=2, train_norms=False, lora_dropout=0.5),
    "norms": Lora(r=2),
    "embeddings": Lora(r=2, train_embeddings=True),
    "dora": Lora(r=2, use_dora=True, target_modules="all-linear"),
}


@pytest.mark.parametrize(
    ("lengths", "fields"),
    [(SHORT, {"head_dim": 8}), (LONG, {"tie_word_embeddings": True})],
    ids=str,
)
@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_the_teacher_is_the_base_model_whatever_the_student(lora, lengths, fields):
    student, teacher, stock = school(lora, **fields)
    packed = batch(lengths, jump=20)
    if max(lengths) > L:
        ropepatch.patch(stock, "rerope", to=TARGET)
    expected = read_alone(stock, packed["input_ids"], lengths)
    before, random = state(student), torch.get_rng_state()
    with packed_attention(student):
        told = teacher.loss(packed).keywords["teacher"]
        assert torch.equal(torch.get_rng_state(), random)  # nothing is dropped
        packed.pop("answers")
        logits = student(**packed, use_cache=False).logits[0].detach()
    assert told.weight is not None
    torch.testing.assert_close(told.logits(slice(None)), expected, rtol=0, atol=1e-4)
    assert (logits - expected).abs().max() > 0.1  # and the student is another
    assert state(student) == before


def taught(student, packed, teacher):
    head, distilled = linear_head(student), teacher.loss(packed)
    return causal_lm_loss(student, packed, head=head, distilled=distilled)


def naive(student, stock, packed, lengths):
    """The oracle: two models side by side, and all logits of both, at T = 2."""
    p = (read_alone(stock, packed["input_ids"], lengths) / 2).log_softmax(-1)
    q = (student(**packed, use_cache=False).logits[0] / 2).log_softmax(-1)
    labels = packed["labels"][0]
    scored = torch.cat([labels[1:] != -100, torch.tensor([False])])
    return 4 * (p.exp() * (p - q)).sum(-1)[scored].mean()


@pytest.mark.parametrize(
    ("lengths", "checkpointing"), [(SHORT, True), (LONG, False), (LONG, True)], ids=str
)
def test_a_step_is_that_of_two_models_side_by_side(lengths, checkpointing):
    student, teacher, stock = school(LORAS["norms"], attention_dropout=0.0)
    packed = batch(lengths, jump=20)
    if max(lengths) > L:
        ropepatch.patch(stock, "rerope", to=TARGET)
    if checkpointing:
        recompute_activations(student.base_model.model)
    with packed_attention(student):
        ours = taught(student, packed, teacher)
        gradients = trained_gradients(student, ours)
        theirs = naive(student, stock, packed, lengths)
        assert_near(gradients, trained_gradients(student, theirs), 1e-3)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_a_student_that_is_its_teacher_learns_nothing(family):
    fields = (
        {"logits_scaling": 8.0}
        if family == "granite"
        else {"tie_word_embeddings": True}
    )
    student = trainable(build(family, **fields), LORAS["norms"])
    packed = batch(SHORT)
    teacher = Teacher(student, 10**6, None, Distil(temperature=2.0))
    with packed_attention(student):
        assert (linear_head(student) is None) == (family == "granite")
        loss = taught(student, packed, teacher)
        assert loss == 0
        assert not any(g.any() for g in trained_gradients(student, loss).values())
        assert taught(moved(student), packed, teacher) > 1e-4


def test_what_has_no_teacher_is_refused():
    with pytest.raises(RopepatchError, match="distil needs a LoRA adapter"):
        small_recipe(lora=None, distil=Distil())
    with pytest.raises(RopepatchError, match="unknown remapping 'rerpoe'"):
        Distil(remapping="rerpoe")
    far = Distil(remapping={"name": "leaky-rerope", "divisor": 1.5})
    data = small_recipe().data.model_copy(
        update={"windows": (512,), "tokens_per_batch": 512}
    )
    with pytest.raises(
        RopepatchError, match=r"leaky-rerope with .* keeps distances within 256 up to"
    ):
        check_trainable(plan("tiny", to=512), small_recipe(data=data, distil=far))


def test_known_answers_weigh_the_token_before_them():
    student, teacher, _ = school(LORAS["norms"], mapped=False)
    packed = batch(SHORT)
    packed["answers"][0, 5] = 2.0
    with packed_attention(student):
        answers = teacher.loss(packed).keywords["answers"]
    assert answers.nonzero().tolist() == [[4]]

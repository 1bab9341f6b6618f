"""In which precision a device computes follows from its hardware alone."""

import time

import pytest
import torch

import ropepatch
from ropepatch.model import precision
from ropepatch.model.precision import fastest, prefers_float32

UNITS = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")


@pytest.fixture
def hardware(monkeypatch):
    """Sets the units that the CPU has, by torch's names, and the compute capability of a GPU, if any."""

    def set_to(*units, capability=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        for name in UNITS:
            monkeypatch.setattr(torch.cpu, name, lambda name=name: name in units, raising=False)

    return set_to


@pytest.mark.parametrize(
    ("units", "dtype", "said"),
    [
        ([UNITS[0]], "bfloat16", "AMX"),
        ([UNITS[1]], "bfloat16", "AVX512_BF16"),
        (UNITS, "bfloat16", "AMX"),
        ([], "float32", "no units for bfloat16"),
    ],
    ids=["AMX", "AVX512_BF16", "both", "neither"],
)
def test_a_cpu_computes_in_bfloat16_where_it_has_units_for_it(hardware, units, dtype, said):
    hardware(*units)
    chosen = fastest()
    assert (chosen.dtype, chosen.to_dict()) == (dtype, {"dtype": dtype})
    assert said in str(chosen)
    model, _ = ropepatch.load("tiny")
    assert prefers_float32(model.bfloat16(), "cpu") is (dtype == "float32")
    assert not prefers_float32(model.float(), "cpu")  # it is, and it is never rounded


def test_a_torch_that_does_not_tell_of_units_computes_in_float32(hardware, monkeypatch):
    hardware()
    for name in UNITS:
        monkeypatch.delattr(torch.cpu, name)
    assert fastest().dtype == "float32"


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")],
    ids=["Turing", "Ampere", "Hopper"],
)
def test_a_gpu_computes_in_bfloat16_from_ampere_on(hardware, capability, dtype):
    hardware(capability=capability)
    assert {fastest().dtype, fastest("cuda").dtype} == {dtype}
    assert fastest("cpu").dtype == "float32"
    model, _ = ropepatch.load("tiny")
    assert prefers_float32(model.bfloat16(), "cpu")


def test_another_accelerator_computes_in_float32(hardware):
    hardware(*UNITS)
    assert fastest("meta").dtype == "float32"


def test_a_model_for_which_memory_is_short_stays_as_it_is(hardware, monkeypatch):
    hardware()
    monkeypatch.setattr(precision, "_memory", lambda: 1 << 20)
    model, _ = ropepatch.load("tiny")
    assert not prefers_float32(model.bfloat16(), "cpu")


def test_no_clock_and_no_random_state_takes_part(monkeypatch):
    def clock():
        raise AssertionError("a clock was read")

    model, _ = ropepatch.load("tiny")
    before = torch.random.get_rng_state()
    monkeypatch.setattr(time, "perf_counter", clock)
    assert len({fastest() for _ in range(40)} | {fastest(model.device)}) == 1
    prefers_float32(model.bfloat16(), "cpu")
    assert torch.equal(before, torch.random.get_rng_state())

"""In which precision a device computes follows from its hardware alone."""

import pytest
import torch

import ropepatch
from ropepatch.model import precision
from ropepatch.model.precision import fastest, prefers_float32

AMX, AVX512 = UNITS = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")


@pytest.fixture
def hardware(monkeypatch):
    """Sets the units that the CPU has, by torch's names, and the compute capability of a GPU, if any."""

    def set_to(*units, capability=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        for name in UNITS:
            monkeypatch.setattr(torch.cpu, name, lambda name=name: name in units, raising=False)

    return set_to


@pytest.fixture
def model():
    return ropepatch.load("tiny", device="cpu")[0].bfloat16()


@pytest.mark.parametrize(
    ("units", "capability", "device", "dtype", "said"),
    [
        ([AMX], None, None, "bfloat16", "AMX"),
        ([AVX512], None, None, "bfloat16", "AVX512_BF16"),
        (UNITS, None, None, "bfloat16", "AMX"),
        ([], None, None, "float32", "no units for bfloat16"),
        ([], (7, 5), None, "float32", "compute capability 7.5"),  # Turing
        ([], (8, 0), None, "bfloat16", "compute capability 8.0"),  # Ampere
        ([], (9, 0), "cuda", "bfloat16", "compute capability 9.0"),
        ([], (9, 0), "cpu", "float32", "no units for bfloat16"),
        (UNITS, None, "meta", "float32", "no units for bfloat16"),  # another accelerator
    ],
)
def test_a_device_computes_in_bfloat16_where_it_has_units_for_it(
    hardware, model, units, capability, device, dtype, said
):
    hardware(*units, capability=capability)
    chosen = fastest(device)
    assert (chosen.dtype, chosen.to_dict()) == (dtype, {"dtype": dtype})
    assert said in str(chosen)
    assert prefers_float32(model, "cpu") is (not units)  # whatever the GPU can
    assert not prefers_float32(model.float(), "cpu")  # it is, and it is never rounded


def test_a_torch_that_tells_of_no_units_and_a_model_for_which_memory_is_short_stay_as_they_are(
    hardware, model, monkeypatch
):
    hardware()
    for name in UNITS:
        monkeypatch.delattr(torch.cpu, name)
    assert fastest().dtype == "float32"
    assert prefers_float32(model, "cpu")
    monkeypatch.setattr(precision, "memory_of", lambda device: 1 << 20)
    assert not prefers_float32(model, "cpu")

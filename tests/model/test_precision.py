"""The precision of a device depends only on its hardware."""

from types import SimpleNamespace

import pytest
import torch

import ropepatch
from ropepatch.model import precision
from ropepatch.model.precision import fastest, prefers_float32

AMX, AVX512 = UNITS = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")


@pytest.fixture
def hardware(monkeypatch):
    """Set the bfloat16 units of the CPU, by torch's names, and the compute capability of a GPU, if any."""

    def set_to(*units, capability=None):
        device = torch.device("cuda") if capability else None
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda available: device
        )
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None: capability
        )
        for name in UNITS:
            monkeypatch.setattr(
                torch.cpu, name, lambda name=name: name in units, raising=False
            )

    return set_to


@pytest.fixture
def model():
    return ropepatch.load("tiny", device="cpu")[0].bfloat16()


@pytest.mark.parametrize(
    ("units", "capability", "device", "dtype"),
    [
        ([AMX], None, None, "bfloat16"),
        ([AVX512], None, None, "bfloat16"),
        ([], None, None, "float32"),
        ([], (7, 5), None, "float32"),  # Turing
        ([], (8, 0), None, "bfloat16"),  # Ampere
        ([], (9, 0), "cpu", "float32"),
        (UNITS, None, "meta", "float32"),  # another accelerator
    ],
)
def test_a_device_with_bfloat16_units_computes_in_bfloat16(
    hardware, model, units, capability, device, dtype
):
    hardware(*units, capability=capability)
    assert fastest(device) == dtype
    assert prefers_float32(model, "cpu") is (not units)  # whatever the GPU supports
    assert not prefers_float32(model.float(), "cpu")  # it already is float32


def test_float32_needs_memory_and_a_cpu_without_units(hardware, model, monkeypatch):
    hardware()
    for name in UNITS:
        monkeypatch.delattr(torch.cpu, name)
    assert fastest() == "float32"
    assert prefers_float32(model, "cpu")
    monkeypatch.setattr(precision, "memory_of", lambda device: 1 << 20)
    assert not prefers_float32(model, "cpu")


GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "files", "available", "memory"),
    [
        ("0::/job/step", {"job/memory.max": "max"}, 8 * GIB, 16 * GIB),
        (
            "0::/job/step",
            {"job/memory.max": 2 * GIB, "job/memory.current": GIB},
            GIB,
            2 * GIB,
        ),
        ("0::/", {"memory.max": GIB, "memory.current": 3 * GIB}, 0, GIB),
        (
            "0::/",
            {
                "memory.max": 3 * GIB,
                "memory.current": 2 * GIB,
                "memory.stat": f"anon 7\ninactive_file {GIB}",
            },
            2 * GIB,
            3 * GIB,
        ),
        (None, {}, 8 * GIB, 16 * GIB),
    ],
)
def test_available_memory_respects_all_control_groups(
    tmp_path, monkeypatch, groups, files, available, memory
):
    files = {f"groups/{name}": content for name, content in files.items()}
    for name, content in (files | ({"self/cgroup": groups} if groups else {})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr(precision, "PROC", tmp_path)
    monkeypatch.setattr(precision, "CGROUPS", tmp_path / "groups")
    machine = SimpleNamespace(available=8 * GIB, total=16 * GIB)
    monkeypatch.setattr(precision.psutil, "virtual_memory", lambda: machine)
    assert (precision.available_bytes(), precision.memory_of("cpu")) == (
        available,
        memory,
    )

"""device.py: what is picked without a GPU, and the table of peaks."""

import pytest
import torch

import device as D

CPU = torch.device("cpu")


def test_off_cuda():
    assert D.pick_dtype("bfloat16", CPU) == (torch.bfloat16, "as requested")
    with pytest.raises(ValueError, match="float16 needs a CUDA device"):
        D.pick_dtype("float16", CPU)
    with pytest.raises(ValueError, match="tpu9 is unusable"):
        D.pick_device("tpu9")
    assert D.peak_flops(CPU, torch.float32) is None and D.peak_memory(CPU) > 10**7


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A1000", None),
        ("Some other card", None),
    ],
)
def test_peaks_by_the_name_of_the_device(monkeypatch, name, bfloat16):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert D.peak_flops(torch.device("cuda"), torch.bfloat16) == bfloat16


@pytest.mark.parametrize(("rank", "world"), [("", "1"), ("one", "2"), ("3", None), ("2", "2")])
def test_an_environment_that_torchrun_did_not_set_is_not_read(monkeypatch, rank, world):
    """Above all rank 3 of one process, which would train without a word and save nothing."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world or "")
    assert D.Processes.join("cpu") == D.Processes(rank=0, world=1)


@pytest.mark.parametrize(
    ("kernels", "native", "dtype"),
    [
        ("AVX512", {"avx512_bf16": True}, torch.bfloat16),
        ("AVX2", {"avx512_bf16": True}, torch.float32),  # ATEN_CPU_CAPABILITY=avx2
        ("AVX512", {"avx512_bf16": False}, torch.float32),
        ("DEFAULT", {"neon": True, "bf16": True}, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_a_cpu_has_the_instructions(monkeypatch, kernels, native, dtype):
    """Where they are only emulated, a training of minutes would take hours."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: native)
    assert D.pick_dtype("auto", CPU)[0] == dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_bfloat16_only_where_it_is_native(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert D.pick_dtype("auto", torch.device("cuda"))[0] == dtype

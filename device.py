"""The hardware: device, number format and the reasons for them; peak speed; processes."""

import ctypes
import os
import platform
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Peak dense matrix products in TFLOP/s by a part of the device's name, from the makers' data
# sheets: in bfloat16 (float16 on the older ones), and in float32 without TensorFloat32.
PEAK_TFLOPS = {
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),  # before "H100", which is part of its name
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 31.2),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}


def pick_device(name: str) -> tuple[torch.device, str]:
    """The device called `name`, and why. "auto": CUDA if possible. ValueError if it is unusable."""
    why = "as requested"
    if name == "auto":
        there = torch.cuda.is_available()
        name, why = ("cuda", "there is one") if there else ("cpu", "there is no CUDA device")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device, dtype=torch.float64).item()  # angles need float64
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device {name} is unusable ({reason}); try --device=cpu") from error
    return device, why


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The autocast type called `name`, and why. "auto": what the device multiplies fastest without
    loss of range. ValueError if the device cannot use it."""
    if name == "float16" and device.type != "cuda":
        raise ValueError("dtype float16 needs a CUDA device; use --dtype=float32 or bfloat16")
    if name != "auto":
        return getattr(torch, name), "as requested"
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:  # most CPUs only emulate bfloat16, up to ten times slower than float32
        known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        wide = torch.backends.cpu.get_cpu_capability() == "AVX512"  # of the kernels; can be less
        native = wide and known.get("avx512_bf16", False)
    if native:
        return torch.bfloat16, "native here"
    if device.type == "cuda":
        return torch.float16, "no native bfloat16; with a loss scaler"
    return torch.float32, "no native bfloat16"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The most floating-point operations a second that the device can do, or None if unknown."""
    words = f"{device_name(device)} ".replace("-", " ")
    if device.type == "cuda" and "Laptop" not in words:  # slower than the card it is named after
        for part, peaks in PEAK_TFLOPS.items():
            if f"{part} " in words:
                return peaks[dtype == torch.float32] * 1e12
    return None


def peak_memory(device: torch.device) -> int | None:
    """The most bytes held so far, by tensors on CUDA, elsewhere by the process. None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if os.name != "posix":
        return None
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def set_up_cpu() -> None:
    """For training on a CPU: malloc keeps what is freed for the next step, as PyTorch does on CUDA,
    and compiled code sums the gradients of the embeddings in one order. By default glibc gives
    large blocks back to the system, which costs a fifth of the time, and the order of that sum is
    the threads', so no run would equal another."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block is a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


class Processes(NamedTuple):
    """This process among those that torchrun has started; without torchrun, the only one."""

    rank: int = 0  # from 0 to world - 1, over all machines; 0 writes and prints
    world: int = 1

    @classmethod
    def join(cls, device: str) -> "Processes":
        """Meet torchrun's other processes, on CUDA over NCCL, else over gloo."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # RANK alone may come from elsewhere
            return cls()
        cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        if cuda:  # before any use of a GPU, or every process would open the first one too
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
        torch._dynamo.config.optimize_ddp = False  # a fused kernel needs the graph in one piece
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        if dist.is_available() and dist.is_initialized():
            time.sleep(0.1)  # gloo's threads may still need Python's lock, which destroying holds
            dist.destroy_process_group()

    def mean(self, t: Tensor) -> Tensor:
        """The mean of a tensor over all processes. Overwrites t."""
        if self.world > 1:
            dist.all_reduce(t)
        return t / self.world

"""The hardware: which device and number format to take, and why; its peak speed; the processes that share the work."""

import os
import platform
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Peak dense matrix throughput in TFLOP/s by a part of the device's name, from the makers' data sheets: in bfloat16
# (float16 on the older ones), and in float32 without TensorFloat32. "H100 PCIe" must come before "H100".
PEAK_TFLOPS = {
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
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
    """The device called `name` and why it was taken; "auto" is CUDA if there is one. ValueError if it is unusable."""
    why = "as told"
    if name == "auto" and torch.cuda.is_available():
        name, why = "cuda", "there is a CUDA device"
    elif name == "auto":
        name, why = "cpu", "there is no CUDA device"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device, dtype=torch.float64).item()  # angles need float64
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"device {name} cannot be used here ({reason}); try --device=cpu"
        ) from error
    return device, why


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The autocast type called `name` ("auto": by the device) and why. ValueError if the device cannot use it."""
    why = "as told"
    if name == "auto" and device.type != "cuda":
        name, why = "float32", "the fastest safe choice off CUDA"
    elif name == "auto":  # a T4 (7.5) only emulates bfloat16
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        name, why = (
            ("bfloat16", "native here")
            if native
            else ("float16", "no native bfloat16; with a loss scaler")
        )
    if name == "float16" and device.type != "cuda":
        raise ValueError("dtype float16 needs a CUDA device; use --dtype=float32 or bfloat16")
    return getattr(torch, name), why


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second that the device could do at most; None where the table does not know it."""
    name = device_name(device) if device.type == "cuda" else ""
    name = "" if "Laptop" in name else name  # slower than the card it is named after
    found = next(
        (
            peaks
            for part, peaks in PEAK_TFLOPS.items()
            if f"{part} " in f"{name} ".replace("-", " ")
        ),
        None,
    )
    return None if found is None else found[dtype == torch.float32] * 1e12


def peak_memory(device: torch.device) -> int | None:
    """Bytes that this process has held at most, on the device (CUDA: by tensors; else all of it); None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if os.name != "posix":
        return None
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Processes(NamedTuple):
    """This process among those that torchrun has started; without it, the only one."""

    rank: int = 0  # from 0 to world - 1, over all machines; 0 writes and prints
    local: int = 0  # the same on this machine: which of its GPUs to take
    world: int = 1

    @classmethod
    def join(cls, device: str) -> "Processes":
        """Read what torchrun has put into the environment, and meet the others: on CUDA over NCCL, else over gloo."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        told = [
            os.environ.get(name, str(default)) for name, default in zip(names, cls(), strict=True)
        ]
        if not all(map(str.isdecimal, told)) or int(told[0]) >= int(told[2]):
            shown = ", ".join(f"{name}={value}" for name, value in zip(names, told, strict=True))
            raise ValueError(f"the environment has {shown}, which torchrun did not set; unset them")
        found = cls(*map(int, told))
        if found.world > 1:
            cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
            if (
                cuda
            ):  # before anything else touches a GPU, or every process would open the first one too
                torch.cuda.set_device(found.local)
            dist.init_process_group("nccl" if cuda else "gloo")
            torch._dynamo.config.optimize_ddp = (
                False  # it would split the graph, which a fused kernel does not allow
            )
        return found

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    def mean(self, t: Tensor) -> Tensor:
        """The mean of a tensor over all processes; t itself is overwritten."""
        if self.world > 1:
            dist.all_reduce(t)
        return t / self.world

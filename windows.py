"""Token shards as windows: which there are, in which order they are trained on, and the losses on held-out ones."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from device import Processes
from model import GPT
from shards import read_shard, whole_documents

CONTEXTS = (1, 2, 4)  # validation also at these multiples of the training length


class Windows:
    """All windows of some shards: window k of a shard is its tokens kT ... kT + T (T inputs, and targets one later)."""

    def __init__(self, files: list[Path], T: int):
        self.T, self.shards = T, [read_shard(f) for f in files]
        self.first = np.cumsum([0] + [(len(s) - 1) // T for s in self.shards])  # index of each shard's first window

    def __len__(self) -> int:
        return int(self.first[-1])

    def take(self, indices: np.ndarray) -> Tensor:
        """(B,) window indices -> (B, T + 1) int64."""
        out = np.empty((len(indices), self.T + 1), dtype=np.int64)
        for row, index in zip(out, indices, strict=True):
            shard = int(np.searchsorted(self.first, index, side="right")) - 1
            k = int(index - self.first[shard]) * self.T
            row[:] = self.shards[shard][k : k + self.T + 1]
        return torch.from_numpy(out)


class Order:
    """Which windows a step trains on: a pure function of (seed, step), so that a resumed run sees what it would have
    seen, and every encoding sees the same. Each epoch is one permutation of all windows."""

    def __init__(self, windows: int, per_step: int, seed: int):
        self.windows, self.per_step, self.seed = windows, per_step, seed
        self.epoch, self.permutation = -1, None

    def step(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Indices for one rank: with `world` ranks, every world-th window of the step."""
        places = np.arange(step * self.per_step + rank, (step + 1) * self.per_step, world)
        return np.array([self.at(int(p)) for p in places])

    def at(self, place: int) -> int:
        epoch, offset = divmod(place, self.windows)
        if epoch != self.epoch:
            self.epoch, self.permutation = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.windows)
        return int(self.permutation[offset])


def long_windows(val: Windows, eot: int, multiple: int, count: int) -> Tensor | None:
    """(N, multiple * T + 1) windows inside single long documents, N <= count; None if no document is that long."""
    size, found = multiple * val.T + 1, []
    for shard in val.shards:
        for document in whole_documents(shard, eot):
            found += [document[at : at + size] for at in range(0, len(document) - size + 1, size - 1)]
    picks = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int) if found else []
    return torch.from_numpy(np.stack([found[i] for i in picks]).astype(np.int64)) if found else None


def documents(idx: Tensor, eot: int) -> Tensor:
    """(B, T) -> (B, T): the number of each token's document; a document begins with its end-of-text token."""
    return (idx == eot).cumsum(1)


class Validation:
    """Losses on fixed windows: `val` on windows as in training, and `val_1x`, `val_2x`, `val_4x` with the same target
    tokens, the last T/2 of long documents' windows, seen with T, 2T and 4T tokens of context."""

    def __init__(self, val: Windows, eot: int, count: int, batch: int, processes: Processes):
        """`count` windows of the training length, evenly spread, `batch` of them at a time in each process."""
        self.eot, self.batch, self.processes = eot, batch, processes
        picks = np.linspace(0, len(val) - 1, min(count, len(val))).astype(int)
        self.windows, self.T = val.take(picks), val.T
        self.long = long_windows(val, eot, CONTEXTS[-1], max(1, count // CONTEXTS[-1]))
        if self.long is None:
            print(f"validation: no document is longer than {CONTEXTS[-1]} x {val.T} tokens, so no val_2x and val_4x")

    @torch.no_grad()
    def run(self, model: GPT, device: torch.device, autocast) -> dict[str, float]:
        model.eval()
        losses = {"val": self.mean(model, self.windows, self.T, device, autocast)}
        for c in CONTEXTS if self.long is not None else ():
            losses[f"val_{c}x"] = self.mean(model, self.long[:, -c * self.T - 1 :], self.T // 2, device, autocast)
        model.train()
        return losses

    def mean(self, model: GPT, windows: Tensor, targets: int, device: torch.device, autocast) -> float:
        """Mean loss of the last `targets` tokens of every window; every process takes its share of the windows."""
        rows = max(1, self.batch * self.T // (windows.shape[1] - 1))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for w in windows[self.processes.rank :: self.processes.world].split(rows):
            if not len(w):  # fewer windows than processes
                continue
            idx, y = w[:, :-1].to(device), w[:, 1:].clone()
            y[:, :-targets] = -100
            with autocast:
                total += model(idx, y.to(device), documents(idx, self.eot)).double() * len(w)
        return self.processes.mean(total).item() * self.processes.world / len(windows)

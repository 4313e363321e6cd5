"""Token shards as training windows: which windows there are, and in which order they are read."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shards import read_shard


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
        edges = [*np.flatnonzero(shard == eot).tolist(), len(shard)]
        for begin, end in zip(edges, edges[1:], strict=False):
            found += [shard[at : at + size] for at in range(begin, end - size + 1, size - 1)]
    picks = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int) if found else []
    return torch.from_numpy(np.stack([found[i] for i in picks]).astype(np.int64)) if found else None

"""
Names to tiktoken encodings.

"gpt2"   the BPE of GPT-2, 50,257 ids; tiktoken fetches its two files at the first use
"bytes"  one id a byte of UTF-8 and <|endoftext|> = 256: 257 ids, nothing to download, a model small enough for a laptop
"""

from configurator import check_folder

import atexit
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tiktoken

# ---- tokenizer

EOT = "<|endoftext|>"

# Bytes are never merged, so how the text is cut into pieces changes no id: 64 characters was fastest.
BYTES_PATTERN = r"(?s:.{1,64})"

# tiktoken's regex overflows its stack inside runs of about a million spaces (a panic that `except Exception` misses),
# and merging one huge piece is slow. No text written by a person has such a run, so its cut changes no usual document.
LONG_RUN = re.compile(r"\s{4096}|\S{4096}")


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The encoding called `name`: "gpt2" or "bytes"."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            "bytes", pat_str=BYTES_PATTERN, mergeable_ranks=ranks, special_tokens={EOT: 256}
        )
    if name == "gpt2":
        return load_gpt2()
    raise ValueError(f'unknown tokenizer {name!r}: expected "gpt2" or "bytes"')


def load_gpt2() -> tiktoken.Encoding:
    """GPT-2's BPE from tiktoken's cache, or from the network."""
    try:
        return tiktoken.get_encoding("gpt2")
    except (
        OSError,
        ValueError,
    ) as error:  # requests' errors are OSErrors; a damaged download is a ValueError
        raise OSError(
            "the gpt2 tokenizer's files are not cached and could not be fetched: connect to the network once, "
            "or set TIKTOKEN_CACHE_DIR to a folder that holds them"
        ) from error


def encode_document(enc: tiktoken.Encoding, text: str) -> list[int]:
    """<|endoftext|> and the ids of `text`. The marker's characters inside the text are encoded as ordinary text."""
    ids = [enc.eot_token]
    for piece in split_long_runs(replace_surrogates(text)):
        ids += enc.encode_ordinary(piece)
    return ids


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs and put U+FFFD for lone ones, which UTF-8 cannot hold (JSON escapes can produce both)."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def split_long_runs(text: str) -> Iterator[str]:
    """Pieces of `text`, cut inside very long runs of spaces or of non-spaces; joined they are `text`."""
    start = 0
    for run in LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


# ---- shards


def read_text(path: str | Path) -> str:
    """The text of a file of the user. ValueError or OSError, in one sentence, if it is no UTF-8 or holds no text."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; convert it first") from error
    if not text.strip():
        raise ValueError(f"{path} has no text; choose another file")
    return text


MAGIC, VERSION = 20240520, 1
HEADER_INTS, HEADER_BYTES = 256, 1024
GPT2_VOCABULARY = 50_257  # of shards without a meta.json
UNFINISHED = "UNFINISHED"  # a file of this name is in the folder while it is being written
LOCKS: dict[
    Path, BinaryIO
] = {}  # held while they are open: the system closes them, whatever ends this process

# the types of what is read of meta.json and of its shards; a key of meta.json may be absent
META = {"tokenizer": str, "window": int | None, "vocab_size": int, "settings": dict, "shards": dict}
META |= {"files": list, "val_size": int, "expected_tokens": int}
SHARD = {"tokens": int, "documents": int, "sha256": str, "next": list | None}


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A temporary file that becomes `path` when the block ends well and vanishes when it does not."""
    temporary = Path(f"{os.fspath(path)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name without the content
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock_folder(folder: Path) -> None:
    """Make a folder and keep other processes from writing to it until this one ends. ValueError if
    one does already. On a file system without locks, a line says so and there is none."""
    path = folder.resolve() / ".lock"
    if path in LOCKS or (folder.is_dir() and not os.access(folder, os.W_OK)):
        return  # held already; or read-only, which check_folder() tells who wants to write
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab")  # noqa: SIM115
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # POSIX, Windows
            advice = "wait for it, or choose another folder"
            raise ValueError(f"{folder} is being written by another process; {advice}") from error
        print(f"{folder} has no locks ({error.strerror}); let no other process write there")
    if not (path.exists() and os.path.samefile(path, file.fileno())):
        return lock_folder(folder)  # its last holder has just removed it
    LOCKS[path] = file


@atexit.register
def remove_locks() -> None:
    """Free all folders of this process, and remove those that nothing was written to."""
    while LOCKS:
        path, file = LOCKS.popitem()
        with suppress(OSError):
            path.unlink()  # before it is free, or it might be another's by then
            path.parent.rmdir()
        file.close()


def write_json(path: str | os.PathLike, content: dict) -> None:
    """Write a JSON file, whole or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def write_shard(path: str | os.PathLike, tokens: np.ndarray) -> str:
    """Write one shard, whole or not at all; returns the sha256 of the file."""
    if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= 2**16 or len(tokens) >= 2**31:
        raise ValueError(f"{path}: a shard holds 1 to 2**31 - 1 token ids from 0 to 65,535")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    digest = hashlib.sha256()
    with replacing(path) as file:
        for part in (header, np.ascontiguousarray(tokens, dtype="<u2")):
            file.write(part.data)
            digest.update(part.data)
    return digest.hexdigest()


def read_shard(path: str | os.PathLike) -> np.ndarray:
    """The tokens of a shard as a read-only memory map of uint16, its header checked."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if len(header) < HEADER_INTS or header[0] != MAGIC:
        raise ValueError(
            f"{path} is not a token shard: it does not begin with the magic number {MAGIC}"
        )
    if header[1] != VERSION:
        raise ValueError(
            f"{path} is a shard of version {header[1]}: expected version {VERSION} (uint16 tokens)"
        )
    count, held = int(header[2]), (os.path.getsize(path) - HEADER_BYTES) // 2
    if count < 1 or held < count:
        raise ValueError(
            f"{path} is damaged: its header says {count:,} tokens, it holds {held:,}; prepare it again"
        )
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def shard_name(folder: Path, i: int) -> str:
    """Name of the i-th shard of a folder; the first is the validation."""
    return f"{folder.resolve().name}_{'train' if i else 'val'}_{i:06d}.bin"


def whole_documents(tokens: np.ndarray, eot: int) -> Iterator[np.ndarray]:
    """The documents that begin in a shard, each from its end-of-text token on, as views."""
    edges = [*np.flatnonzero(tokens == eot).tolist(), len(tokens)]
    return (tokens[begin:end] for begin, end in pairwise(edges))


def shard_files(folder: Path, kind: str = "") -> list[Path]:
    """The shards of a folder in order; kind: "train_*" or "val_*". Hidden files are none: some systems keep notes of
    their own beside the files, under nearly the same names."""
    return sorted(path for path in folder.glob(f"*{kind}.bin") if not path.name.startswith("."))


def refuse_strangers(folder: Path, names: set[str]) -> None:
    """ValueError if the folder holds other shards than these, since train.py would read them too."""
    if strangers := sorted({path.name for path in shard_files(folder)} - names):
        raise ValueError(
            f"{folder} holds {strangers[0]}, which is not of this run: remove it or change --out_dir"
        )


def check_disk(folder: Path, tokens: int) -> None:
    """ValueError if so many tokens more do not fit."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    needed, free = 2 * max(0, tokens), shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"{folder} needs {needed:,} bytes, but {free:,} are free there: make room or change --out_dir"
        )
    print(f"{needed:,} bytes to write in {folder}, {free:,} are free", flush=True)


def read_notes(path: Path) -> dict:
    """meta.json, or the same of an unfinished folder. ValueError if what is read of it has other types."""
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        shards = notes.get("shards", {}).values()
        wrong = [k for k, kind in META.items() if k in notes and not isinstance(notes[k], kind)]
        wrong += [k for k, kind in SHARD.items() for s in shards if not isinstance(s.get(k), kind)]
        if wrong:
            raise ValueError(f"unexpected value of {wrong[0]}")
    except (
        ValueError,
        AttributeError,
    ) as error:  # an AttributeError: of something that is no JSON object
        raise ValueError(
            f"{path} is damaged ({error}); prepare this data again, in another folder"
        ) from error
    return notes


def read_meta(folder: str | os.PathLike) -> dict | None:
    """meta.json of a data folder; None if there is none. ValueError if it is damaged or preparation was cut short."""
    path = Path(folder) / "meta.json"
    if (Path(folder) / UNFINISHED).exists():
        raise ValueError(
            f"the preparation of {folder} was cut short; start prepare_fineweb.py again with its options"
        )
    if not path.exists():
        return None
    meta = read_notes(path)
    if not {"tokenizer", "window"} <= set(meta):
        raise ValueError(
            f"{path} is damaged (no tokenizer or window); prepare this data again, in another folder"
        )
    return meta


def shard_fault(path: Path, vocab_size: int, sha256: str | None) -> str:
    """What is wrong with a shard; empty if nothing is."""
    try:
        tokens = read_shard(path)
    except (ValueError, OSError) as error:
        return str(error)
    if path.stat().st_size != HEADER_BYTES + 2 * len(tokens):
        return f"{path} is longer than the {len(tokens):,} tokens of its header"
    if (highest := int(tokens.max())) >= vocab_size:
        return f"{path} has the token id {highest}, but the vocabulary has only {vocab_size:,}"
    if sha256 and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        return f"{path} does not have the sha256 of meta.json"
    return ""


def verify(folder: Path) -> None:
    """Check header, token count, ids and, if meta.json has it, sha256 of every shard of a folder. ValueError, in one
    sentence, if any is damaged, missing or of another data set."""
    meta = read_meta(folder)
    known = {} if meta is None else meta.get("shards", {})
    vocab_size = GPT2_VOCABULARY if meta is None else meta.get("vocab_size")
    if vocab_size is None:
        raise ValueError(
            f"{folder / 'meta.json'} has no vocab_size; prepare this data again, in another folder"
        )
    names = sorted(
        {path.name for kind in ("train_*", "val_*") for path in shard_files(folder, kind)}
        | set(known)
    )
    if not names:
        raise ValueError(f"{folder} holds no shards (*train_*.bin, *val_*.bin)")
    faults = []
    for name in names:
        fault = shard_fault(folder / name, vocab_size, known.get(name, {}).get("sha256"))
        if known and name not in known:
            fault = f"{folder / name} is not in meta.json"
        faults += [fault] * bool(fault)
        print(f"{name}: " + ("bad" if fault else f"{len(read_shard(folder / name)):,} tokens, ok"))
    if faults:
        raise ValueError(f"{len(faults)} of {len(names)} shards are bad: {'; '.join(faults)}")
    print(
        f"{folder} is whole"
        + (f"; without meta.json, GPT-2's {vocab_size:,} ids are assumed" if meta is None else "")
    )


# ---- windows


class Windows:
    """All windows of some shards: window k of a shard is its tokens kT ... kT + T (T inputs, and targets one later)."""

    def __init__(self, files: list[Path], T: int):
        self.T, self.shards = T, [read_shard(f) for f in files]
        self.first = np.cumsum(
            [0] + [(len(s) - 1) // T for s in self.shards]
        )  # index of each shard's first window

    def __len__(self) -> int:
        return int(self.first[-1])

    def take(self, indices: np.ndarray) -> np.ndarray:
        """(B,) window indices -> (B, T + 1) int64."""
        out = np.empty((len(indices), self.T + 1), dtype=np.int64)
        for row, index in zip(out, indices, strict=True):
            shard = int(np.searchsorted(self.first, index, side="right")) - 1
            k = int(index - self.first[shard]) * self.T
            row[:] = self.shards[shard][k : k + self.T + 1]
        return out


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
            self.epoch, self.permutation = (
                epoch,
                np.random.default_rng((self.seed, epoch)).permutation(self.windows),
            )
        return int(self.permutation[offset])


def long_windows(val: Windows, eot: int, multiple: int, count: int) -> np.ndarray | None:
    """(N, multiple * T + 1) windows inside single long documents, N <= count; None if no document is that long."""
    size, found = multiple * val.T + 1, []
    for shard in val.shards:
        for document in whole_documents(shard, eot):
            found += [
                document[at : at + size] for at in range(0, len(document) - size + 1, size - 1)
            ]
    picks = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int) if found else []
    return np.stack([found[i] for i in picks]).astype(np.int64) if found else None

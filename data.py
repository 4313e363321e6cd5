"""Token data: tokenizers, shard files, data folders, and the windows of training.

A shard is a file as in llm.c: 256 int32 (a magic number, the version 1, the token count, zeros),
then the tokens as uint16. Every document begins with <|endoftext|>. A data folder holds
*val_*.bin, *train_*.bin and meta.json; without meta.json the tokenizer is taken to be "gpt2".

Tokenizers: "gpt2" is GPT-2's BPE with 50,257 ids, and tiktoken fetches its two files once.
"bytes" has one id a byte of UTF-8 and <|endoftext|> = 256, and nothing to download.
"""

from configurator import check_folder

import atexit
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tiktoken

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# ---- tokenizers

EOT = "<|endoftext|>"
# Bytes are never merged, so how the text is cut changes no id. 64 characters was fastest.
BYTES_PATTERN = r"(?s:.{1,64})"
# In about a million spaces tiktoken's regex overflows its stack, a panic that `except Exception`
# misses, and merging one huge piece is slow. No text that a person wrote has such a run.
LONG_RUN = re.compile(r"\s{4096}|\S{4096}")


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The encoding called "gpt2" or "bytes"."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        parts = {"pat_str": BYTES_PATTERN, "mergeable_ranks": ranks, "special_tokens": {EOT: 256}}
        return tiktoken.Encoding(name, **parts)
    if name != "gpt2":
        raise ValueError(f'unknown tokenizer {name!r}: expected "gpt2" or "bytes"')
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a damaged download
        raise OSError(
            "the gpt2 tokenizer's files are not cached and could not be fetched: connect to the "
            "network once, or set TIKTOKEN_CACHE_DIR to a folder that holds them"
        ) from error


def encode_document(enc: tiktoken.Encoding, text: str) -> list[int]:
    """<|endoftext|> and the ids of `text`, in which the marker's characters are ordinary text.
    Surrogate pairs are joined. Lone surrogates, which JSON allows, become U+FFFD."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    edges = [0, *(run.end() for run in LONG_RUN.finditer(text)), len(text)]
    pieces = (enc.encode_ordinary(text[begin:end]) for begin, end in pairwise(edges))
    return [enc.eot_token, *chain.from_iterable(pieces)]


# ---- files, whole or not at all


def read_text(path: str | Path) -> str:
    """A user's text file. ValueError if it is not UTF-8 or empty."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; convert it first") from error
    if not text.strip():
        raise ValueError(f"{path} has no text; choose another file")
    return text


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A temporary file that becomes `path` if the block succeeds and vanishes if it does not."""
    temporary = Path(f"{os.fspath(path)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name without the content
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, content: dict) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


LOCKS: dict[Path, int] = {}  # folder -> its open file; the system unlocks it if the process dies


def lock_folder(folder: Path) -> None:
    """Make a folder and let no other process write there until this one ends. ValueError if another
    one has the lock. A file system without locks only gets a warning, and Windows has none."""
    place = folder.resolve()
    if place in LOCKS or (folder.is_dir() and not os.access(folder, os.W_OK)):
        return  # held already, or read-only: check_folder() refuses that where something is written
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        return
    LOCKS[place] = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(LOCKS[place], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(LOCKS.pop(place))
        advice = "wait for it and start again, or choose another folder"
        raise ValueError(f"{folder} is being written by another process; {advice}") from error
    except OSError as error:
        print(f"{folder} has no locks ({error.strerror}); let no other process write there")


@atexit.register
def remove_locks() -> None:
    """Unlock this process's folders, and remove those to which nothing was written."""
    while LOCKS:
        folder, file = LOCKS.popitem()
        with suppress(OSError):
            folder.rmdir()
        os.close(file)


# ---- shards

MAGIC, VERSION = 20240520, 1
HEADER_INTS, HEADER_BYTES = 256, 1024


def write_shard(path: str | os.PathLike, tokens: np.ndarray) -> str:
    """Write one shard, whole or not at all, and return the file's sha256."""
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
    """A shard's tokens as a read-only memory map of uint16. ValueError if its header is wrong."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if len(header) < HEADER_INTS or header[:2].tolist() != [MAGIC, VERSION]:
        header = f"{HEADER_INTS} int32 that begin with {MAGIC}, {VERSION}"
        raise ValueError(f"{path} is not a token shard: it has no header of {header}")
    count, held = int(header[2]), (os.path.getsize(path) - HEADER_BYTES) // 2
    if count != held or not count:
        says = f"its header says {count:,} tokens, it holds {held:,}"
        raise ValueError(f"{path} is damaged: {says}; prepare it again")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def shard_files(folder: Path, kind: str = "") -> list[Path]:
    """A folder's shards in order; kind: "train_*" or "val_*". Hidden files are not shards: some
    file managers keep notes under nearly the same names."""
    return sorted(path for path in folder.glob(f"*{kind}.bin") if not path.name.startswith("."))


def whole_documents(tokens: np.ndarray, eot: int) -> Iterator[np.ndarray]:
    """Views of the documents that begin in a shard, each from its end-of-text token on."""
    edges = [*np.flatnonzero(tokens == eot).tolist(), len(tokens)]
    return (tokens[begin:end] for begin, end in pairwise(edges))


# ---- data folders

UNFINISHED = "UNFINISHED"  # stands in for meta.json while a folder is being written
# Types of the values in meta.json, and in what it notes of each shard.
KINDS = {"tokenizer": str, "window": int | None, "settings": dict, "files": list, "shards": dict}
KINDS |= {"tokens": int, "documents": int, "sha256": str, "next": list | None}


def read_notes(path: Path) -> dict:
    """meta.json or UNFINISHED. ValueError if a value has another type than expected."""
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        for part in (notes, *notes.get("shards", {}).values()):
            for key in part.keys() & KINDS.keys():
                if not isinstance(part[key], KINDS[key]):
                    raise ValueError(f"unexpected value of {key}")
    except (ValueError, AttributeError) as error:  # AttributeError: it is not a JSON object
        advice = "prepare this data again, in another folder"
        raise ValueError(f"{path} is damaged ({error}); {advice}") from error
    return notes


def read_meta(folder: str | os.PathLike) -> dict | None:
    """A data folder's meta.json, or None if there is none. ValueError if it is damaged or the
    preparation did not finish."""
    path = Path(folder) / "meta.json"
    if path.with_name(UNFINISHED).exists():
        advice = "start prepare_fineweb.py again with its options"
        raise ValueError(f"the preparation of {folder} was cut short; {advice}")
    if not path.exists():
        return None
    meta = read_notes(path)
    if not {"tokenizer", "window"} <= set(meta):
        raise ValueError(f"{path} is damaged (no tokenizer or window); prepare this data again")
    return meta


def verify(folder: Path) -> None:
    """Check header, length, ids and sha256 of every shard. ValueError if any is bad or missing."""
    meta = read_meta(folder) or {}
    known = meta.get("shards", {})
    vocab_size = 257 if meta.get("tokenizer") == "bytes" else 50_257
    if not meta:
        print(f"without meta.json, GPT-2's {vocab_size:,} ids are assumed")
    paths = shard_files(folder, "train_*") + shard_files(folder, "val_*")
    names, faults = sorted({path.name for path in paths} | set(known)), []
    if not names:
        raise ValueError(f"{folder} holds no shards (*train_*.bin, *val_*.bin)")
    for name in names:
        path = folder / name
        try:
            shard = read_shard(path)
            if (highest := int(shard.max())) >= vocab_size:
                limit = f"but the vocabulary has only {vocab_size:,}"
                raise ValueError(f"{path} has the token id {highest}, {limit}")
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if known and digest != known.get(name, {}).get("sha256"):
                raise ValueError(f"{path} is not in meta.json with its sha256")
            print(f"{name}: {len(shard):,} tokens, ok")
        except (ValueError, OSError) as error:
            faults.append(str(error))
            print(f"{name}: bad")
    if faults:
        raise ValueError(f"{len(faults)} of {len(names)} shards are bad: {'; '.join(faults)}")
    print(f"{folder} is whole")


# ---- windows and their order


class Windows:
    """All windows of some shards. A shard's k-th window is its tokens kT ... kT + T: T inputs, and
    their targets one later."""

    def __init__(self, files: list[Path], T: int):
        self.T, self.shards = T, [read_shard(file) for file in files]
        counts = [(len(shard) - 1) // T for shard in self.shards]
        self.first = np.cumsum([0, *counts])  # index of each shard's first window

    def __len__(self) -> int:
        return int(self.first[-1])

    def take(self, indices: np.ndarray) -> np.ndarray:
        """(B,) window indices -> (B, T + 1) int64."""
        windows = np.empty((len(indices), self.T + 1), dtype=np.int64)
        for row, index in zip(windows, indices, strict=True):
            shard = int(np.searchsorted(self.first, index, side="right")) - 1
            begin = int(index - self.first[shard]) * self.T
            row[:] = self.shards[shard][begin : begin + self.T + 1]
        return windows


class Order:
    """Which windows a step trains on, by (seed, step) alone: a resumed run sees what it would have
    seen, and every encoding sees the same. Each epoch is one permutation of all windows."""

    def __init__(self, windows: int, per_step: int, seed: int):
        self.windows, self.per_step = windows, per_step
        self.permutation = lru_cache(1)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(windows)
        )

    def step(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """One rank's window indices: with `world` ranks, every world-th of the step."""
        places = range(step * self.per_step + rank, (step + 1) * self.per_step, world)
        epochs = (divmod(place, self.windows) for place in places)
        return np.array([self.permutation(epoch)[i] for epoch, i in epochs])


def long_windows(val: Windows, eot: int, multiple: int, count: int) -> np.ndarray | None:
    """(N, multiple * T + 1) windows inside documents, N <= count; None if none is as long."""
    size = multiple * val.T + 1
    windows = [
        document[at : at + size]
        for shard in val.shards
        for document in whole_documents(shard, eot)
        for at in range(0, len(document) - size + 1, size - 1)
    ]
    if not windows:
        return None
    picks = np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int)
    return np.stack([windows[i] for i in picks]).astype(np.int64)

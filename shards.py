"""
Token shards: the format of llm.c, so that FineWeb that others have tokenised works unchanged.

A shard is a header of 256 int32 (magic number, version, token count), then uint16 tokens. A data folder has shards
*train_*.bin and *val_*.bin, and meta.json, which is written last: a folder that has it is complete.
"""

from configurator import check_folder

import atexit
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC, VERSION = 20240520, 1
HEADER_INTS, HEADER_BYTES = 256, 1024
GPT2_VOCABULARY = 50_257  # of shards without a meta.json
UNFINISHED = "UNFINISHED"  # a file of this name is in the folder while it is being written
LOCKS: dict[Path, BinaryIO] = {}  # held while they are open: the system closes them, whatever ends this process

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
        raise ValueError(f"{path} is not a token shard: it does not begin with the magic number {MAGIC}")
    if header[1] != VERSION:
        raise ValueError(f"{path} is a shard of version {header[1]}: expected version {VERSION} (uint16 tokens)")
    count, held = int(header[2]), (os.path.getsize(path) - HEADER_BYTES) // 2
    if count < 1 or held < count:
        raise ValueError(f"{path} is damaged: its header says {count:,} tokens, it holds {held:,}; prepare it again")
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
        raise ValueError(f"{folder} holds {strangers[0]}, which is not of this run: remove it or change --out_dir")


def check_disk(folder: Path, tokens: int) -> None:
    """ValueError if so many tokens more do not fit."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    needed, free = 2 * max(0, tokens), shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(f"{folder} needs {needed:,} bytes, but {free:,} are free there: make room or change --out_dir")
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
    except (ValueError, AttributeError) as error:  # an AttributeError: of something that is no JSON object
        raise ValueError(f"{path} is damaged ({error}); prepare this data again, in another folder") from error
    return notes


def read_meta(folder: str | os.PathLike) -> dict | None:
    """meta.json of a data folder; None if there is none. ValueError if it is damaged or preparation was cut short."""
    path = Path(folder) / "meta.json"
    if (Path(folder) / UNFINISHED).exists():
        raise ValueError(f"the preparation of {folder} was cut short; start prepare_fineweb.py again with its options")
    if not path.exists():
        return None
    meta = read_notes(path)
    if not {"tokenizer", "window"} <= set(meta):
        raise ValueError(f"{path} is damaged (no tokenizer or window); prepare this data again, in another folder")
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
        raise ValueError(f"{folder / 'meta.json'} has no vocab_size; prepare this data again, in another folder")
    names = sorted({path.name for kind in ("train_*", "val_*") for path in shard_files(folder, kind)} | set(known))
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
        f"{folder} is whole" + (f"; without meta.json, GPT-2's {vocab_size:,} ids are assumed" if meta is None else "")
    )

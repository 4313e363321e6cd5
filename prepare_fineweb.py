"""
Text to token shards that train.py reads.

python prepare_fineweb.py                                        # FineWeb sample-10BT from the hub, 21 GB of tokens
python prepare_fineweb.py --source=pydocs --out_dir=data/pydocs_text  # this Python's documentation: no download
python prepare_fineweb.py --source=pydocs --retrieval_fraction=0.85   # with retrieval exercises: the quick start's data
python prepare_fineweb.py --source=files --files=a.txt,b.jsonl --tokenizer=gpt2 --out_dir=data/mine
python prepare_fineweb.py --check data/fineweb10B                # is this folder whole?

The hub's text is streamed and its shards are written one by one: a run that was killed goes on after the last of them.
The other sources are held in memory, to be shuffled. Shards are llm.c's: 256 int32 of header, then uint16 tokens, every
document begun by <|endoftext|>. meta.json is written last: a folder that has it is complete.
"""

import configurator

import ast
import glob
import importlib
import itertools
import json
import multiprocessing
import os
import platform
import signal
import sys
import sysconfig
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

from data import (
    UNFINISHED,
    check_disk,
    encode_document,
    get_tokenizer,
    lock_folder,
    read_meta,
    read_notes,
    read_shard,
    refuse_strangers,
    replacing,
    shard_name,
    verify,
    write_json,
    write_shard,
)

# ---- pydocs

# tests are no documentation; the others are not CPython's own, or are absent from some builds
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "_bundled",
}


def pydocs_documents() -> Iterator[str]:
    """The language reference's topics, then for each file of the standard library its docstrings."""
    try:
        topics = importlib.import_module(
            "pydoc_data.topics"
        ).topics  # a module of data: nothing else runs
    except ImportError as error:
        raise ValueError(
            f"{sys.executable} ships without pydoc_data.topics: use another Python"
        ) from error
    for name in sorted(topics):
        yield topics[name]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and (texts := docstrings(path)):
            yield "\n\n".join(texts)


def docstrings(path: Path) -> list[str]:
    """Docstrings of the file's module, classes and functions, in the order of the lines. Nothing is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes such as "\d" warn when parsed
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a file that is broken on purpose
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


# ---- prepare_fineweb

PAUSES = (
    5,
    20,
    80,
    320,
)  # seconds before a hub's file is opened again; `datasets` itself retries for shorter times
ROWS = (
    1000  # of a parquet file in memory; the default, the size of its first group of rows, may be 0
)
BATCH = 64  # documents that a worker tokenises at once
TOKENS_PER_BYTE = {
    "gpt2": 0.34,
    "bytes": 1.6,
}  # of parquet: sample-10BT has 30.7 GB, 10.4e9 GPT-2 tokens
BAR = "{n_fmt} of {total_fmt} tokens, {rate_fmt}, {elapsed} so far, {remaining} left{postfix}"  # of tqdm

# options that decide the shards' content
SETTINGS = ("source", "tokenizer", "shard_tokens", "val_fraction")
HUB_SETTINGS = (*SETTINGS, "dataset", "subset", "split", "max_tokens")
MEMORY_SETTINGS = (*SETTINGS, "files", "retrieval_fraction", "window", "seed")


@dataclass
class PrepareConfig:
    source: Literal["hub", "pydocs", "files"] = (
        "hub"  # where the text comes from: a data set of the Hugging Face hub,
    )
    # this Python's documentation, or --files
    dataset: str = "HuggingFaceFW/fineweb"  # hub: its name, or a folder; .parquet or .jsonl with a column "text"
    subset: str = "sample-10BT"  # hub: the subset of the data set; empty: its default
    split: str = "train"  # hub: the split of the data set, validation is taken from it too
    max_tokens: int = 0  # hub: stop after so many tokens, validation included; 0: all
    files: tuple[
        str, ...
    ] = ()  # for source=files: .txt (one document each), .jsonl and .parquet (a column "text")
    tokenizer: Literal["auto", "bytes", "gpt2"] = (
        "auto"  # auto: gpt2 for the hub, otherwise bytes (no download)
    )
    out_dir: str = "auto"  # where the shards go; its last part is the data set's name; auto: data/fineweb10B for the
    # hub, otherwise data/SOURCE
    shard_tokens: int = (
        100_000_000  # tokens in a shard, at most; except from the hub, cut at a whole window
    )
    val_fraction: float = (
        0.05  # part of the tokens held out for validation, in whole documents; hub: the first ones,
    )
    # at most a shard
    retrieval_fraction: float = (
        0.0  # part of the training windows that are retrieval exercises; not for the hub
    )
    window: int = 256  # training length: exercises are packed for this block_size
    seed: int = 1  # chooses the validation documents, the exercises and the order of packed windows; not for the hub
    workers: int = 0  # processes that tokenise, without effect on the result; 0: one a CPU for the hub, otherwise 1
    check: str = ""  # a folder to verify, instead of preparing: headers, token counts, ids, sha256

    def __post_init__(self):
        hub = self.source == "hub"
        if self.tokenizer == "auto":
            self.tokenizer = "gpt2" if hub else "bytes"
        if self.out_dir == "auto":
            self.out_dir = "data/fineweb10B" if hub else f"data/{self.source}"
        if self.workers == 0:
            self.workers = (os.cpu_count() or 1) if hub else 1
        clear = all(part not in Path(self.out_dir).resolve().name for part in ("train_", "val_"))
        rules = [
            (
                "out_dir",
                clear,
                'a last part without "train_" and "val_", by which train.py tells shards apart',
            ),
            (
                "files",
                bool(self.files) == (self.source == "files"),
                "file names with --source=files, and only then",
            ),
            ("val_fraction", 0 < self.val_fraction < 1, "above 0, below 1"),
            ("retrieval_fraction", 0 <= self.retrieval_fraction <= 0.99, "0 to 0.99"),
            (
                "retrieval_fraction",
                not (hub and self.retrieval_fraction),
                "0 unless --source is pydocs or files",
            ),
            ("window", self.window > 1, "2 tokens or more"),
            (
                "shard_tokens",
                self.window < self.shard_tokens < 2**31 - 1,
                "more than a window, less than 2**31 - 1",
            ),
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("max_tokens", hub or self.max_tokens == 0, "0 unless --source=hub"),
            ("seed", self.seed >= 0, "0 or more"),
            ("workers", self.workers > 0, "0 or more"),
        ]
        for field, holds, wanted in rules:
            if not holds:
                value = getattr(self, field)
                shown = (",".join(value) or "empty") if isinstance(value, tuple) else repr(value)
                raise ValueError(f"{field} is {shown}: expected {wanted}")


class Place(NamedTuple):
    """A place in a source: file and row of a document, and how many of its tokens come before."""

    file: int
    row: int
    offset: int = 0


# ---- sources: iterators of document texts


def local_files(names: Iterable[str]) -> list[str]:
    """The paths of --files, all checked before the first is read."""
    for path in map(Path, names):
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name the files in it")
        if not path.is_file():
            raise ValueError(f"no file {path}")
        if path.suffix not in (".txt", ".jsonl", ".parquet"):
            raise ValueError(f"{path} has an unknown suffix: expected .txt, .jsonl or .parquet")
    return [str(Path(name).resolve()) for name in names]


def read_texts(file: str, skip: int) -> Iterator[str]:
    """The texts of a file, local or on the hub, from row `skip` on, a few of them in memory at a time."""
    if file.endswith(".txt"):
        yield from [Path(file).read_text(encoding="utf-8-sig")][skip:]
        return
    import datasets  # slow, and most runs need no part of it

    datasets.logging.set_verbosity(
        datasets.logging.CRITICAL
    )  # its errors become a sentence of ours
    lines = file.endswith(
        ".jsonl"
    )  # as text, since Arrow's JSON reader gives up at a lone surrogate
    kind, options = (
        ("text", {}) if lines else ("parquet", {"columns": ["text"], "batch_size": ROWS})
    )
    rows = datasets.load_dataset(
        kind, data_files=glob.escape(file), split="train", streaming=True, **options
    )
    for row in rows.skip(skip):
        # some editors begin a file with U+FEFF, a mark of its encoding
        record = (
            json.loads(row["text"].removeprefix("\ufeff").strip() or '{"text": ""}')
            if lines
            else row
        )
        text = record["text"] if isinstance(record, dict) and "text" in record else 0
        if not isinstance(text, str | None):
            columns = f", only: {', '.join(record)}" if isinstance(record, dict) else ""
            raise ValueError(f'it has no strings in a column "text"{columns}')
        yield text or ""  # a missing value reads as None


def read_documents(files: list[str], start: Place) -> Iterator[tuple[Place, str]]:
    """The documents of all files from `start` on. A file on the hub that fails is opened again, after growing pauses,
    at the row where it failed."""
    (file, row, _), tries = start, 0
    while file < len(files):
        try:
            for text in read_texts(files[file], row):
                yield Place(file, row), text
                row, tries = row + 1, 0
            file, row = file + 1, 0
        except Exception as error:  # datasets, pyarrow and the HTTP libraries have their own kinds
            reason = str(error).partition("\n")[0] or type(error).__name__
            network = "://" in files[file] and (
                isinstance(error, OSError) or not isinstance(error, ValueError)
            )
            if not network or tries == len(PAUSES):
                raise ValueError(
                    f"{files[file]} cannot be read at row {row:,}: {reason}"
                ) from error
            tqdm.write(
                f"{files[file]}: {reason}; trying again in {PAUSES[tries]} s", file=sys.stderr
            )
            time.sleep(PAUSES[tries])
            tries += 1


# ---- documents to tokens


def encode_batch(
    tokenizer: str, documents: list[tuple[Place, str]]
) -> list[tuple[Place, np.ndarray]]:
    """uint16 ids of each document; none of a blank one."""
    enc = get_tokenizer(tokenizer)
    assert enc.n_vocab <= 2**16, (
        f"{tokenizer} has {enc.n_vocab:,} ids, more than uint16 can tell apart"
    )
    ids = (encode_document(enc, text) if text.strip() else [] for _, text in documents)
    return [
        (place, np.array(i, dtype=np.uint16)) for (place, _), i in zip(documents, ids, strict=True)
    ]


def start_worker() -> None:
    """A worker leaves Ctrl-C to the main process, and ends when the main process was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenize(
    documents: Iterable[tuple[Place, str]], config: PrepareConfig
) -> Iterator[tuple[Place, np.ndarray]]:
    """The ids of every document, in the documents' order whatever the number of workers."""
    documents = iter(documents)
    batches = iter(lambda: list(itertools.islice(documents, BATCH)), [])
    if config.workers == 1:
        for batch in batches:
            yield from encode_batch(config.tokenizer, batch)
        return
    pool = ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn"), start_worker)
    waiting: deque = deque()  # two batches a worker, so that memory stays bounded
    try:
        for batch in batches:
            waiting.append(pool.submit(encode_batch, config.tokenizer, batch))
            if len(waiting) > 2 * config.workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process died; if memory was short, use fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def with_progress(
    documents: Iterable[tuple[Place, np.ndarray]], done: int = 0, expected: int | None = None
) -> Iterator[tuple[Place, np.ndarray]]:
    """The same documents, and a line with tokens, tokens a second, gigabytes and time left."""
    with tqdm(
        initial=done, total=expected, unit=" tokens", unit_scale=True, mininterval=1, bar_format=BAR
    ) as bar:
        for place, ids in documents:
            yield place, ids
            bar.set_postfix_str(f"{2 * bar.n / 1e9:.2f} GB", refresh=False)
            bar.update(len(ids))


# ---- the data folder: shards, and a plan that says which are finished


def total(plan: dict, what: str) -> int:
    """Tokens or documents in all shards of a plan."""
    return sum(shard[what] for shard in plan["shards"].values())


def whole_shards(folder: Path, plan: dict) -> list[str]:
    """Names of the plan's shards before the first that is damaged or missing."""
    names: list[str] = []
    with suppress(ValueError, OSError):
        for name in plan["shards"]:
            read_shard(folder / name)
            names.append(name)
    return names


def drop_shards(folder: Path, plan: dict, names: list[str]) -> None:
    """Remove the last shards, the very last one first: at every moment the others are a whole beginning."""
    for name in reversed(names):
        (folder / name).unlink(missing_ok=True)
        del plan["shards"][name]


def settings_of(config: PrepareConfig) -> dict:
    """What decides the shards' content, as it reads back from JSON; a file counts by its name and size."""
    files = [
        f"{Path(name).name}, {Path(name).stat().st_size:,} bytes"
        for name in config.files
        if Path(name).is_file()
    ]
    values = asdict(config) | {"files": files}
    return {
        key: values[key] for key in (HUB_SETTINGS if config.source == "hub" else MEMORY_SETTINGS)
    }


def changes(there: dict, config: PrepareConfig) -> list[str]:
    """How the settings of a data set differ from those of a config."""
    wanted = settings_of(config)
    return [
        f"{key}={there.get(key)} (expected {wanted[key]})"
        for key in wanted
        if there.get(key) != wanted[key]
    ]


def earlier_run(config: PrepareConfig) -> dict:
    """What out_dir holds: meta.json, or the plan of an unfinished run, or {}. Another data set there is an error."""
    folder, notes = Path(config.out_dir), {}
    if (folder / UNFINISHED).exists():
        with suppress(ValueError):
            notes = read_notes(folder / UNFINISHED)
    else:
        notes = read_meta(folder) or {}
    if not notes or not notes.get("shards", True):  # without a shard nothing would be lost
        return {}
    if changed := changes(notes.get("settings", {}), config):
        raise ValueError(
            f"{folder} was prepared with {', '.join(changed)}: choose another --out_dir or delete it"
        )
    return notes


def write_shards(
    config: PrepareConfig, plan: dict, pieces: Iterable[tuple[np.ndarray, Place | None]]
) -> None:
    """Write each piece as a shard, then note it and the place behind it in the plan, which is kept as UNFINISHED."""
    folder, eot = Path(config.out_dir), get_tokenizer(config.tokenizer).eot_token
    for tokens, after in pieces:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / UNFINISHED, plan)
        name = shard_name(folder, len(plan["shards"]))
        digest, documents = write_shard(folder / name, tokens), int((tokens == eot).sum())
        plan["shards"][name] = {
            "tokens": len(tokens),
            "documents": documents,
            "sha256": digest,
            "next": after,
        }
        write_json(folder / UNFINISHED, plan)


def finish(config: PrepareConfig, plan: dict, documents: int) -> dict:
    """Write meta.json: the folder is complete. Returns what is in it."""
    folder, enc = Path(config.out_dir), get_tokenizer(config.tokenizer)
    val, *train = (shard["tokens"] for shard in plan["shards"].values())
    meta = {
        "source": config.source,
        "tokenizer": config.tokenizer,
        "window": config.window if config.retrieval_fraction else None,
        "vocab_size": enc.n_vocab,
        "eot": enc.eot_token,
        "documents": documents,
        "train_tokens": sum(train),
        "val_tokens": val,
        "python": platform.python_version(),  # its documentation differs between versions
    }
    meta |= plan
    write_json(folder / "meta.json", meta)
    (folder / UNFINISHED).unlink()
    return meta


# ---- sources in memory: validation documents drawn from all, exercises


def choose_validation(lengths: list[int], fraction: float, seed: int) -> set[int]:
    """The documents held out: the first of a shuffle, which has long and short ones of every kind."""
    if len(lengths) < 2:
        raise ValueError(f"{len(lengths)} document(s): none can be held out whole, add files")
    wanted, held, chosen = fraction * sum(lengths), 0, set()
    for i in np.random.default_rng([seed, 0]).permutation(len(lengths)).tolist():
        if (
            held < wanted and held + lengths[i] <= 2 * wanted
        ):  # one huge document must not take the training part
            chosen.add(i)
            held += lengths[i]
    return chosen or {int(np.argmin(lengths))}


def split(documents: list[np.ndarray], config: PrepareConfig) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens, each at least one window and its last target."""
    held = choose_validation(
        [len(document) for document in documents], config.val_fraction, config.seed
    )
    train = np.concatenate([document for i, document in enumerate(documents) if i not in held])
    val = np.concatenate([documents[i] for i in sorted(held)])
    for name, part in (("training", train), ("validation", val)):
        if len(part) <= config.window:
            size = (
                f"{len(part):,} tokens, less than a window of {config.window:,} and its last target"
            )
            raise ValueError(
                f"the {name} part has {size}: add text, or change --val_fraction or --window"
            )
    return train, val


def training_shards(
    corpus: np.ndarray, enc: tiktoken.Encoding, config: PrepareConfig
) -> list[np.ndarray]:
    """The training tokens in pieces of shard_tokens, each cut at a whole window. The token behind a piece is in it too:
    (N - 1) // T windows are read of N tokens, since the last input needs a target."""
    if config.retrieval_fraction:
        from needles import pack_windows

        corpus = pack_windows(corpus, enc, config.window, config.retrieval_fraction, config.seed)
    step = config.shard_tokens // config.window * config.window
    return [
        corpus[at : at + step + 1] for at in range(0, max(1, len(corpus) - config.window), step)
    ]


def prepare_in_memory(config: PrepareConfig) -> dict:
    """Read, split, pack and write one data set."""
    folder, enc = Path(config.out_dir), get_tokenizer(config.tokenizer)
    pydocs = list(pydocs_documents()) if config.source == "pydocs" else []
    texts = ((Place(0, i), text) for i, text in enumerate(pydocs))
    if config.source == "files":
        texts = read_documents(local_files(config.files), Place(0, 0))
    documents = [ids for _, ids in with_progress(tokenize(texts, config)) if len(ids)]
    corpus, val = split(documents, config)
    pieces = [val, *training_shards(corpus, enc, config)]
    refuse_strangers(folder, {shard_name(folder, i) for i in range(len(pieces))})
    check_disk(folder, sum(map(len, pieces)))
    write_shards(
        config,
        plan := {"settings": settings_of(config), "shards": {}},
        ((piece, None) for piece in pieces),
    )
    if pydocs:
        with replacing(folder / "pydocs.txt") as file:
            file.write("\n\n".join(pydocs).encode("utf-8", "replace"))
    return finish(config, plan, len(documents))


# ---- the hub: shards cut from a stream


def cut_stream(
    documents: Iterable[tuple[Place, np.ndarray]],
    start: Place,
    val_size: int,
    shard_tokens: int,
    left: int,
) -> Iterator[tuple[np.ndarray, Place]]:
    """`left` tokens of the documents, from `start` on, in pieces of shard_tokens, each with the place behind it.

    val_size is the size of the first piece, the validation, or 0 if there is one already. It ends with a document, so
    that none is in both parts (unless that would cost half of it); training pieces may end inside a document.
    """
    buffer, filled, size = (
        np.empty(max(val_size, shard_tokens), np.uint16),
        0,
        val_size or shard_tokens,
    )
    for place, ids in documents:
        begin = start.offset if place[:2] == start[:2] else 0
        while begin < len(ids) and left:
            room = min(size, left) - filled
            whole = val_size and begin == 0 and len(ids) > room and 2 * filled > size
            count = 0 if whole else min(room, len(ids) - begin)
            buffer[filled : filled + count] = ids[begin : begin + count]
            filled, begin = filled + count, begin + count
            if whole or count == room:
                yield buffer[:filled], place._replace(offset=begin)
                left, filled, val_size, size = left - filled, 0, 0, shard_tokens
        if not left:
            return
    if filled:
        yield buffer[:filled], place._replace(offset=begin)


def validation_size(config: PrepareConfig, tokens: int) -> int:
    """Validation tokens of so many in all."""
    return max(1, min(config.shard_tokens, int(config.val_fraction * tokens)))


def new_plan(config: PrepareConfig) -> dict:
    """What is to be read: the data set's files in order; on the hub their paths name the commit, so that it is the same
    text after a restart, and about how many tokens they hold."""
    from datasets import load_dataset_builder
    from fsspec.core import url_to_fs

    try:
        found = load_dataset_builder(config.dataset, config.subset or None).config.data_files or {}
        files = [str(file) for file in found.get(config.split, ())]
        sizes = [] if config.max_tokens else [fs.size(path) for fs, path in map(url_to_fs, files)]
    except (
        Exception
    ) as error:  # datasets, huggingface_hub and the HTTP libraries have their own kinds
        advice = "check its name, --subset and the network, or use --source=pydocs, which needs no download"
        raise ValueError(f"{config.dataset} cannot be opened: {error}; {advice}") from error
    if not files:
        raise ValueError(
            f"{config.dataset} has no split {config.split}, only: {', '.join(map(str, found))}"
        )
    if strange := [file for file in files if not file.endswith((".jsonl", ".parquet"))]:
        raise ValueError(f"{strange[0]} has an unknown suffix: expected .jsonl or .parquet")
    return {
        "settings": settings_of(config),
        "files": files,
        "expected_tokens": config.max_tokens
        or round(sum(sizes) * TOKENS_PER_BYTE[config.tokenizer]),
        "val_size": validation_size(config, config.max_tokens or sys.maxsize),
        "shards": {},
    }


def stream(config: PrepareConfig, plan: dict) -> None:
    """Write the shards that the plan still lacks."""
    shards, done = plan["shards"], total(plan, "tokens")
    start = Place(*list(shards.values())[-1]["next"]) if shards else Place(0, 0)
    left = (config.max_tokens or sys.maxsize) - done
    documents = with_progress(
        tokenize(read_documents(plan["files"], start), config), done, plan["expected_tokens"]
    )
    pieces = cut_stream(
        documents, start, 0 if shards else plan["val_size"], config.shard_tokens, left
    )
    try:
        write_shards(config, plan, pieces if left else ())
    except (ValueError, OSError) as error:
        safe = f"; {len(shards)} shards, {total(plan, 'tokens'):,} tokens, are safe in {config.out_dir}: start again"
        raise ValueError(f"{error}{safe * bool(shards)}") from error


def prepare_hub(config: PrepareConfig, plan: dict) -> dict:
    """Stream a data set, or go on with the plan of an earlier run."""
    folder = Path(config.out_dir)
    plan = plan if {"files", "val_size", "expected_tokens"} <= set(plan) else new_plan(config)
    whole = whole_shards(folder, plan)
    drop_shards(folder, plan, list(plan["shards"])[len(whole) :])
    begun = {shard_name(folder, len(whole))} if (folder / UNFINISHED).exists() else set()
    refuse_strangers(folder, begun | set(whole))
    check_disk(folder, plan["expected_tokens"] - total(plan, "tokens"))
    stream(config, plan)
    if not plan["shards"]:
        raise ValueError(f"{config.dataset} has no text in its split {config.split}")
    fitting = validation_size(config, total(plan, "tokens"))
    if fitting < plan["val_size"]:  # only now it is known how small the data set is
        print(
            f"{total(plan, 'tokens'):,} tokens in all: once more, with {fitting:,} of them for validation"
        )
        drop_shards(folder, plan, list(plan["shards"]))
        plan["val_size"] = fitting
        stream(config, plan)
    return finish(config, plan, total(plan, "documents"))


def prepare(config: PrepareConfig) -> None:
    """Prepare one data set, unless it is there already."""
    started, folder = time.perf_counter(), Path(config.out_dir)
    notes = earlier_run(config)
    finished = {} if (folder / UNFINISHED).exists() else notes.get("shards", {})
    if finished and len(whole_shards(folder, notes)) == len(finished):
        print(f"{folder} is already prepared with these settings: nothing to do")
        return
    get_tokenizer(config.tokenizer)  # it may be missing, and that is better said at once
    configurator.check_folder(folder)
    meta = prepare_hub(config, notes) if config.source == "hub" else prepare_in_memory(config)
    sizes = f"{meta['train_tokens']:,} training and {meta['val_tokens']:,} validation tokens"
    print(
        f"wrote {sizes} in {len(meta['shards'])} shards to {folder} in {time.perf_counter() - started:.1f} s"
    )


def main() -> None:
    argv = sys.argv[1:]
    if "--check" in argv[:-1]:  # --check FOLDER is --check=FOLDER
        at = argv.index("--check")
        argv[at : at + 2] = [f"--check={argv[at + 1]}"]
    (config,), _ = configurator.parse([PrepareConfig], argv, __doc__)
    with configurator.user_errors():
        if config.check:
            verify(Path(config.check))
        else:
            lock_folder(Path(config.out_dir))
            prepare(config)


if __name__ == "__main__":
    configurator.run(main)

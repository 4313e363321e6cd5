"""Text to token shards that train.py reads.

python prepare_fineweb.py                     # FineWeb sample-10BT from the hub, 21 GB of tokens
python prepare_fineweb.py --source=pydocs     # the documentation inside this Python: no download
python prepare_fineweb.py --source=pydocs --retrieval_fraction=0.85  # the quick start's data
python prepare_fineweb.py --source=files --files=a.txt,b.jsonl --tokenizer=gpt2 --out_dir=data/mine
python prepare_fineweb.py --check data/fineweb10B  # is this folder whole?

The hub's text is streamed and cut into shards: after a kill, the same command continues after the
last whole one. The other sources are held in memory, to be shuffled. Shards are llm.c's: 256 int32
of header, then uint16 tokens; <|endoftext|> begins every document. The first is the validation.
UNFINISHED notes the shards as they are written. meta.json is written last: the folder is complete.
"""

import configurator

import ast
import glob
import itertools
import json
import platform
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

import data
from data import UNFINISHED, get_tokenizer, write_json

PAUSES = 5, 20, 80, 320  # seconds, longer than those of `datasets`, until a file is opened again
ROWS = 1000  # of a parquet file in memory; the default, its first group of rows, may have none
BATCH = 16  # documents that a thread tokenises at once

# tests are no documentation; the others are not CPython's own, or are absent from some builds
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}
SKIPPED_FOLDERS |= {"idlelib", "lib2to3", "turtledemo", "_bundled"}


@dataclass
class PrepareConfig:
    source: Literal["hub", "pydocs", "files"] = "hub"  # pydocs: this Python's documentation
    dataset: str = "HuggingFaceFW/fineweb"  # hub: name, or folder of .parquet or .jsonl with "text"
    subset: str = "sample-10BT"  # hub: the subset of the data set; empty: its default
    split: str = "train"  # hub: the split of the data set, validation is taken from it too
    max_tokens: int = 0  # hub: stop after so many tokens, validation included; 0: all
    val_tokens: int = 10_000_000  # hub: the first documents that have so many are the validation
    files: tuple[str, ...] = ()  # .txt (one document each), .jsonl or .parquet (a column "text")
    tokenizer: Literal["auto", "bytes", "gpt2"] = "auto"  # auto: gpt2 for the hub, otherwise bytes
    out_dir: str = "auto"  # its last part names the data; auto: data/fineweb10B or data/SOURCE
    shard_tokens: int = 100_000_000  # in a training shard, at most
    val_fraction: float = 0.05  # not hub: part of the tokens held out, in whole documents
    retrieval_fraction: float = 0.0  # not hub: part of the training windows that are exercises
    window: int = 256  # not hub: block_size of the training, for which exercises are packed
    seed: int = 1  # not hub: chooses validation documents, exercises and the order of windows
    workers: int = 8  # threads that tokenise
    check: str = ""  # a folder to verify, instead of preparing: headers, token counts, ids, sha256

    def __post_init__(self):
        hub = self.source == "hub"
        if self.tokenizer == "auto":
            self.tokenizer = "gpt2" if hub else "bytes"
        if self.out_dir == "auto":
            self.out_dir = "data/fineweb10B" if hub else f"data/{self.source}"
        name = Path(self.out_dir).resolve().name
        if "train_" in name or "val_" in name:  # shards are told apart by these
            raise ValueError(f'out_dir is {self.out_dir}; its name may not have "train_" or "val_"')
        if bool(self.files) != (self.source == "files"):
            raise ValueError("files and --source=files need each other; give both or neither")
        if self.retrieval_fraction if hub else self.max_tokens:
            raise ValueError("max_tokens is for the hub, retrieval_fraction for the other sources")
        if not (0 < self.val_fraction < 1 and 0 <= self.retrieval_fraction <= 0.99):
            raise ValueError("expected 0 < val_fraction < 1 and 0 <= retrieval_fraction <= 0.99")
        if not 1 < self.window < self.shard_tokens < 2**31 - 1:
            raise ValueError("expected 1 < window < shard_tokens < 2**31 - 1")
        if min(self.max_tokens, self.seed) < 0 or min(self.val_tokens, self.workers) < 1:
            raise ValueError("expected max_tokens, seed >= 0 and val_tokens, workers >= 1")


def settings_of(config: PrepareConfig) -> dict:
    """What decides the shards' content, as JSON has it. A file counts by its name and size."""
    keys = ["source", "tokenizer", "shard_tokens"]
    if config.source == "hub":
        keys += ["dataset", "subset", "split", "max_tokens", "val_tokens"]
    else:
        keys += ["val_fraction", "files", "retrieval_fraction", "window", "seed"]
    paths = [path for path in map(Path, config.files) if path.is_file()]
    files = [f"{path.name}, {path.stat().st_size:,} bytes" for path in paths]
    return {key: files if key == "files" else getattr(config, key) for key in keys}


def changes(there: dict, config: PrepareConfig) -> list[str]:
    """How the settings of a data set differ from those of a config."""
    wanted = settings_of(config).items()
    return [f"{k}={there.get(k)} (expected {v})" for k, v in wanted if there.get(k) != v]


# ---- documents, first as text, then as tokens


class Place(NamedTuple):
    """Where reading may begin: a file, a row in it, and how many of its tokens to leave out."""

    file: int
    row: int
    offset: int = 0


Texts = Iterator[tuple[Place, str]]
Tokens = Iterable[tuple[Place, np.ndarray]]
Shards = Iterable[tuple[np.ndarray, Place | None]]  # each with the place after it


def pydocs_documents() -> Iterator[str]:
    """The language reference's topics, then the docstrings of each file of the standard library."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        problem = f"{sys.executable} ships without pydoc_data.topics: use another Python"
        raise ValueError(problem) from error
    for name in sorted(topics):
        yield topics[name]
    root = Path(sysconfig.get_path("stdlib"))
    for parts in sorted(path.relative_to(root).parts for path in root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(parts) and (texts := docstrings(root.joinpath(*parts))):
            yield "\n\n".join(texts)


def docstrings(path: Path) -> list[str]:
    """Those of the file's module, classes and functions, by line. Nothing is imported."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def hub_files(config: PrepareConfig) -> list[str]:
    """The data set's files. On the hub their paths name the commit: a restart finds the same."""
    from datasets import load_dataset_builder

    try:
        splits = load_dataset_builder(config.dataset, config.subset or None).config.data_files or {}
    except Exception as error:  # datasets and the HTTP libraries have their own kinds
        advice = "check its name, --subset and the network, or use --source=pydocs (no download)"
        raise ValueError(f"{config.dataset} cannot be opened: {error}; {advice}") from error
    if config.split not in splits:
        known = ", ".join(map(str, splits))
        raise ValueError(f"{config.dataset} has no split {config.split}, only: {known}")
    return [str(file) for file in splits[config.split]]


def read_texts(file: str, skip: int) -> Iterator[str]:
    """The texts of a file, local or on the hub, from row `skip` on. Few are in memory at a time."""
    if file.endswith(".txt"):
        yield from [Path(file).read_text(encoding="utf-8-sig")][skip:]
        return
    import datasets  # slow, and not always needed

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors become ours
    lines = file.endswith(".jsonl")  # read as text: Arrow's JSON reader fails at a lone surrogate
    options = {} if lines else {"columns": ["text"], "batch_size": ROWS}
    options |= {"data_files": glob.escape(file), "split": "train", "streaming": True}
    records = datasets.load_dataset("text" if lines else "parquet", **options)
    if records.features == {}:  # Parquet without this column
        raise ValueError('it has no column "text"')
    for record in records.skip(skip):
        if lines:  # some editors begin a file with U+FEFF, a mark of its encoding
            record = json.loads(record["text"].removeprefix("\ufeff").strip() or '{"text": null}')
        if not isinstance(record, dict) or not isinstance(record.get("text", 0), str | None):
            raise ValueError('it has no strings in a column "text"')
        yield record["text"] or ""  # a missing value reads as None


def read_documents(files: list[str], start: Place) -> Texts:
    """The documents from `start` on. A file on the hub that fails is opened again at the row where
    it failed, after growing pauses."""
    if strange := [name for name in files if not name.endswith((".txt", ".jsonl", ".parquet"))]:
        raise ValueError(f"{strange[0]} has an unknown suffix: expected .txt, .jsonl or .parquet")
    place, tries = start, 0
    while place.file < len(files):
        name = files[place.file]
        try:
            for text in read_texts(name, place.row):
                yield place, text
                place, tries = Place(place.file, place.row + 1), 0
            place = Place(place.file + 1, 0)
        except Exception as error:  # datasets, pyarrow and the HTTP libraries have their own kinds
            reason = str(error).partition("\n")[0] or type(error).__name__
            content = isinstance(error, ValueError) and not isinstance(error, OSError)
            if "://" not in name or content or tries == len(PAUSES):
                problem = f"{name} cannot be read at row {place.row:,}: {reason}"
                raise ValueError(problem) from error
            tqdm.write(f"{name}: {reason}; trying again in {PAUSES[tries]} s", file=sys.stderr)
            time.sleep(PAUSES[tries])
            tries += 1


def encode_batch(enc: tiktoken.Encoding, documents: list[tuple[Place, str]]) -> Tokens:
    """uint16 ids of each document from its place's offset on; none of a blank one."""
    encoded = []
    for place, text in documents:
        ids = data.encode_document(enc, text)[place.offset :] if text.strip() else []
        encoded.append((place, np.array(ids, dtype=np.uint16)))
    return encoded


def tokenize(documents: Texts, config: PrepareConfig) -> Tokens:
    """The ids of every document, in the documents' order."""
    enc, waiting = get_tokenizer(config.tokenizer), deque()
    batches = iter(lambda: list(itertools.islice(documents, BATCH)), [])
    with ThreadPoolExecutor(config.workers) as pool:  # tiktoken encodes outside of Python's lock
        for batch in batches:
            waiting.append(pool.submit(encode_batch, enc, batch))
            if len(waiting) > 2 * config.workers:  # so that memory stays bounded
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def count_tokens(documents: Tokens, files: int, done: int = 0, most: int = 0) -> Tokens:
    """The same documents, with a progress bar. They end at `most` tokens (0: never), of which
    `done` came before."""
    with tqdm(initial=done, total=most or None, unit=" tokens", unit_scale=True) as bar:
        for place, ids in documents:
            ids = ids[: most - done] if most else ids
            yield place, ids
            done += len(ids)
            bar.set_postfix_str(f"file {place.file + 1} of {files}", refresh=False)
            bar.update(len(ids))
            if most and done == most:
                return


# ---- the hub: shards cut from a stream


def cut_stream(documents: Tokens, val_tokens: int, shard_tokens: int) -> Shards:
    """Shards in the stream's order. Training shards may end inside a document.

    The first is the validation, unless val_tokens is 0. It has whole documents, to the one that
    reaches val_tokens: none is in both parts, and nothing depends on how much follows.
    """
    parts, missing = [], val_tokens or shard_tokens
    for place, ids in documents:
        begin = 0
        while begin < len(ids):
            end = len(ids) if val_tokens else min(len(ids), begin + missing)
            after = place._replace(offset=place.offset + end)
            parts.append(ids[begin:end])
            begin, missing = end, missing - (end - begin)
            if missing <= 0:
                yield np.concatenate(parts), after
                parts, val_tokens, missing = [], 0, shard_tokens
    if parts:
        yield np.concatenate(parts), after


def prepare_hub(config: PrepareConfig, plan: dict) -> int:
    """Write the shards that the plan lacks. Returns the number of all documents."""
    plan["files"] = files = plan.get("files") or hub_files(config)
    shards, folder = plan["shards"], config.out_dir
    start = Place(*list(shards.values())[-1]["next"]) if shards else Place(0, 0)
    done = sum(shard["tokens"] for shard in shards.values())
    documents = tokenize(read_documents(files, start), config)
    documents = count_tokens(documents, len(files), done, config.max_tokens)
    pieces = cut_stream(documents, 0 if shards else config.val_tokens, config.shard_tokens)
    try:
        write_shards(config, plan, pieces)
    except (ValueError, OSError) as error:
        safe = f"; {len(shards)} shards are safe in {folder}: start again" if shards else ""
        raise ValueError(f"{error}{safe}") from error
    if len(shards) < 2:
        done = sum(shard["tokens"] for shard in shards.values())
        size = f"{config.dataset} has {done:,} tokens in its split {config.split}"
        raise ValueError(f"{size}, none for training: delete {folder} and lower --val_tokens")
    return sum(shard["documents"] for shard in shards.values())


# ---- the other sources: validation documents drawn from all, exercises


def choose_validation(lengths: list[int], fraction: float, seed: int) -> set[int]:
    """The first documents of a shuffle, which has long and short ones of every kind."""
    if len(lengths) < 2:
        raise ValueError(f"{len(lengths)} document(s): none can be held out whole, add files")
    wanted, held, chosen = fraction * sum(lengths), 0, set()
    for i in np.random.default_rng([seed, 0]).permutation(len(lengths)).tolist():
        # one huge document must not take the training part
        if held < wanted and held + lengths[i] <= 2 * wanted:
            chosen.add(i)
            held += lengths[i]
    return chosen or {int(np.argmin(lengths))}


def split(documents: list[np.ndarray], config: PrepareConfig) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens, each at least one window and its last target."""
    held = choose_validation(list(map(len, documents)), config.val_fraction, config.seed)
    train = np.concatenate([ids for i, ids in enumerate(documents) if i not in held])
    val = np.concatenate([documents[i] for i in sorted(held)])
    for name, part in (("training", train), ("validation", val)):
        if len(part) <= config.window:
            size = f"{len(part):,} tokens, less than a window of {config.window:,} and a target"
            advice = "add text, or change --val_fraction or --window"
            raise ValueError(f"the {name} part has {size}: {advice}")
    return train, val


def training_shards(corpus: np.ndarray, config: PrepareConfig) -> list[np.ndarray]:
    """The training tokens in pieces of shard_tokens, cut at whole windows. The token after a piece
    is in it too: of N tokens, (N - 1) // T windows are read, as the last input needs a target."""
    if config.retrieval_fraction:
        from needles import pack_windows

        enc = get_tokenizer(config.tokenizer)
        corpus = pack_windows(corpus, enc, config.window, config.retrieval_fraction, config.seed)
    step = config.shard_tokens // config.window * config.window
    starts = range(0, max(1, len(corpus) - config.window), step)
    return [corpus[at : at + step + 1] for at in starts]


def prepare_in_memory(config: PrepareConfig, plan: dict) -> int:
    """Read, split, pack and write one data set. Returns the number of its documents."""
    if missing := [name for name in config.files if not Path(name).is_file()]:
        raise ValueError(f"there is no file {missing[0]}")
    texts = read_documents([str(Path(name).resolve()) for name in config.files], Place(0, 0))
    if config.source == "pydocs":
        pydocs = list(pydocs_documents())
        texts = ((Place(0, i), text) for i, text in enumerate(pydocs))
    encoded = count_tokens(tokenize(texts, config), len(config.files) or 1)
    documents = [ids for _, ids in encoded if len(ids)]
    train, val = split(documents, config)
    shards = [val, *training_shards(train, config)]
    write_shards(config, plan, ((shard, None) for shard in shards))
    if config.source == "pydocs":
        with data.replacing(Path(config.out_dir, "pydocs.txt")) as file:
            file.write("\n\n".join(pydocs).encode("utf-8", "replace"))
    return len(documents)


# ---- the data folder: its shards, and a plan that notes them


def read_plan(config: PrepareConfig) -> dict | None:
    """The settings, and the hub's files and whole shards of an earlier run. None if nothing is
    missing. ValueError if out_dir holds other data."""
    folder = Path(config.out_dir)
    unfinished = (folder / UNFINISHED).exists()
    notes = data.read_notes(folder / UNFINISHED) if unfinished else data.read_meta(folder) or {}
    there = notes.get("shards", {})
    if there and (changed := changes(notes.get("settings", {}), config)):
        advice = "choose another --out_dir or delete it"
        raise ValueError(f"{folder} was prepared with {', '.join(changed)}: {advice}")
    strangers = sorted({path.name for path in data.shard_files(folder)} - set(there))
    if strangers and not unfinished:  # train.py would read them too
        advice = "remove it or change --out_dir"
        raise ValueError(f"{folder} holds {strangers[0]}, which is not of this run: {advice}")
    whole = {}
    with suppress(ValueError, OSError):  # ends at the first shard that is damaged or missing
        for name in there:
            data.read_shard(folder / name)
            whole[name] = there[name]
    if there and whole == there and not unfinished:
        return None
    plan = {"settings": settings_of(config), "shards": {}}
    if there and "files" in notes:  # the hub's; the other sources are prepared as a whole
        plan |= {"shards": whole, "files": notes["files"]}
    return plan


def write_shards(config: PrepareConfig, plan: dict, shards: Shards) -> None:
    """Write each shard, then note it and the place after it in the plan."""
    folder, eot = Path(config.out_dir), get_tokenizer(config.tokenizer).eot_token
    for tokens, after in shards:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / UNFINISHED, plan)
        i = len(plan["shards"])
        name = f"{folder.resolve().name}_{'train' if i else 'val'}_{i:06d}.bin"
        notes = {"tokens": len(tokens), "documents": int((tokens == eot).sum())}
        notes |= {"sha256": data.write_shard(folder / name, tokens), "next": after}
        plan["shards"][name] = notes
        write_json(folder / UNFINISHED, plan)


def prepare(config: PrepareConfig) -> None:
    """Prepare one data set, unless it is there already."""
    started, folder = time.perf_counter(), Path(config.out_dir)
    if (plan := read_plan(config)) is None:
        print(f"{folder} is already prepared with these settings: nothing to do")
        return
    enc = get_tokenizer(config.tokenizer)  # it may be missing, and that is better said at once
    documents = (prepare_hub if config.source == "hub" else prepare_in_memory)(config, plan)
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
    write_json(folder / "meta.json", meta | plan)
    (folder / UNFINISHED).unlink()
    sizes = f"{sum(train):,} training and {val:,} validation tokens in {len(plan['shards'])} shards"
    print(f"wrote {sizes} to {folder} in {time.perf_counter() - started:.1f} s")


def main() -> None:
    (config,), _ = configurator.parse([PrepareConfig], sys.argv[1:], __doc__)
    with configurator.user_errors():
        if config.check:
            data.verify(Path(config.check))
        else:
            data.lock_folder(Path(config.out_dir))
            prepare(config)


if __name__ == "__main__":
    configurator.run(main)

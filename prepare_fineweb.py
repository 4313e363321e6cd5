"""
Text to token shards that train.py reads.

python prepare_fineweb.py                                        # the documentation inside this Python: no download
python prepare_fineweb.py --retrieval_fraction=0.3 --window=256  # the same with retrieval exercises mixed in
python prepare_fineweb.py --source=files --files=a.txt,b.jsonl --tokenizer=gpt2 --out_dir=data/mine

A source is an iterator of document texts. Shards are llm.c's: 256 int32 of header, then uint16 tokens, every document
begun by <|endoftext|>. meta.json is written last: a folder that has it is complete.
"""

import ast
import hashlib
import importlib
import json
import os
import platform
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import tiktoken

import configurator
from tokenizer import EOT, encode_document, get_tokenizer

MAGIC, VERSION = 20240520, 1  # llm.c's
HEADER_INTS, HEADER_BYTES = 256, 1024
UNFINISHED = "UNFINISHED"  # a file of this name is in the folder while it is being written

# tests are no documentation; the others are not CPython's own, or are absent from some builds
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "_bundled"}


@dataclass
class PrepareConfig:
    source: Literal["pydocs", "files"] = "pydocs"  # where the text comes from: this Python's documentation, or --files
    files: tuple[str, ...] = ()  # for source=files: .txt (one document each), .jsonl and .parquet (a column "text")
    tokenizer: Literal["bytes", "gpt2"] = "bytes"  # bytes needs no download
    out_dir: str = "data/pydocs"  # where the shards go; its last part is the data set's name
    shard_tokens: int = 100_000_000  # tokens in a training shard, at most (cut at a whole window)
    val_fraction: float = 0.05  # part of the tokens held out for validation, in whole documents
    retrieval_fraction: float = 0.0  # part of the training windows that are retrieval exercises
    window: int = 256  # training length: exercises are packed for this block_size
    seed: int = 1  # chooses the validation documents, the exercises and the order of packed windows

    def __post_init__(self):
        clear = all(part not in Path(self.out_dir).resolve().name for part in ("train_", "val_"))
        rules = [
            ("out_dir", clear, 'a last part without "train_" and "val_", by which train.py tells shards apart'),
            ("files", bool(self.files) == (self.source == "files"), "file names with --source=files, and only then"),
            ("val_fraction", 0 < self.val_fraction < 1, "above 0, below 1"),
            ("retrieval_fraction", 0 <= self.retrieval_fraction <= 0.99, "0 to 0.99"),
            ("window", self.window > 1, "2 tokens or more"),
            ("shard_tokens", self.shard_tokens > self.window, "more than a window"),
            ("seed", self.seed >= 0, "0 or more"),
        ]
        for field, holds, wanted in rules:
            if not holds:
                raise ValueError(f"{field} is {getattr(self, field)!r}: expected {wanted}")


# ---- sources: iterators of document texts


def pydocs_documents() -> Iterator[str]:
    """The language reference's topics, then for each file of the standard library its docstrings."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics  # a module of data: nothing else runs
    except ImportError as error:
        raise ValueError(f"{sys.executable} ships without pydoc_data.topics: use another Python") from error
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


def file_documents(files: Iterable[str]) -> Iterator[str]:
    """Documents of local files, all checked before the first is read."""
    paths = [Path(name) for name in files]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"no file {path}")
        if path.suffix not in (".txt", ".jsonl", ".parquet"):
            raise ValueError(f"{path} has an unknown suffix: expected .txt, .jsonl or .parquet")
    for path in paths:
        try:
            yield from [path.read_text(encoding="utf-8-sig")] if path.suffix == ".txt" else read_rows(path)
        except Exception as error:  # datasets and pyarrow have their own kinds
            raise ValueError(f"{path} cannot be read: {error}") from error


def read_rows(path: Path) -> Iterator[str]:
    """The column "text" of a .jsonl or .parquet file, a few rows in memory at a time."""
    from datasets import load_dataset  # slow to import, and most runs need no part of it

    if path.stat().st_size == 0:
        return  # datasets would raise StopIteration
    kind = "json" if path.suffix == ".jsonl" else "parquet"
    for row in load_dataset(kind, data_files=str(path.resolve()), split="train", streaming=True):
        if "text" not in row or not isinstance(row["text"] or "", str):
            raise ValueError(f'it has no strings in a column "text", only: {", ".join(row)}')
        yield row["text"] or ""  # a missing value reads as None


# ---- documents to two streams of tokens


def encode_all(texts: Iterable[str], enc: tiktoken.Encoding) -> list[np.ndarray]:
    """uint16 tokens of every document that is not blank."""
    if enc.n_vocab > 2**16:
        raise ValueError(f"{enc.name} has {enc.n_vocab:,} token ids, but the uint16 of a shard holds only 65,536")
    documents, started = [], time.time()
    shown = started
    for text in texts:
        if text.strip():
            documents.append(np.array(encode_document(enc, text), dtype=np.uint16))
        if time.time() - shown > 2:
            shown = time.time()
            print(f"  {len(documents):,} documents in {shown - started:.0f} s", flush=True)
    tokens = sum(map(len, documents))
    print(f"read {len(documents):,} documents, {tokens:,} tokens: {2 * tokens / 1e6:.1f} MB")
    return documents


def choose_validation(lengths: list[int], fraction: float, seed: int) -> set[int]:
    """The documents held out: the first of a shuffle, which has long and short ones of every kind."""
    if fraction == 0:
        return set()
    if len(lengths) < 2:
        raise ValueError(f"{len(lengths)} document(s): none can be held out whole, add files or use --val_fraction=0")
    wanted, held, chosen = fraction * sum(lengths), 0, set()
    for i in np.random.default_rng([seed, 0]).permutation(len(lengths)).tolist():
        if held < wanted and held + lengths[i] <= 2 * wanted:  # one huge document must not take the training part
            chosen.add(i)
            held += lengths[i]
    return chosen or {int(np.argmin(lengths))}


def split(documents: list[np.ndarray], config: PrepareConfig) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens, each at least one window and its last target."""
    held = choose_validation([len(document) for document in documents], config.val_fraction, config.seed)
    nothing = np.zeros(0, dtype=np.uint16)  # np.concatenate refuses an empty list
    train = np.concatenate([nothing, *(document for i, document in enumerate(documents) if i not in held)])
    val = np.concatenate([nothing, *(documents[i] for i in sorted(held))])
    for name, part in [("training", train)] + [("validation", val)] * bool(held):
        if len(part) <= config.window:
            size = f"{len(part):,} tokens, less than a window of {config.window:,} and its last target"
            raise ValueError(f"the {name} part has {size}: add text, or change --val_fraction or --window")
    return train, val


# ---- retrieval exercises


# Besides the passkey's own wording, so that a model learns to look for what is asked and not for one sentence.
EXERCISE_NEEDLES = (
    "The {name} is {key}. Remember it. {key} is the {name}.",
    "Note that the {name} is {key}.",
    "Do not forget: the {name} is {key}.",
    "From today on the {name} is {key}, and no other.",
    "You will need this later: the {name} is {key}. Write down {key}.",
)
EXERCISE_QUESTIONS = (
    "What is the {name}?",
    "Tell me the {name}.",
    "Now say the {name}.",
    "Do you know the {name}?",
    "I forgot the {name}.",
    "Please find the {name}.",
    "Can you name the {name}?",
    "How does the {name} read?",
)
EXERCISE_ANSWER = " The {name} is"
EXERCISE_PASSKEYS = 0.4  # share of the exercises that have the passkey's own wording
EXERCISE_PAIRS = 0.4  # share of the exercise windows that hold two short ones, if they fit, instead of a long one
HELD_OUT_WORDS = {"secret", "number"}  # in no name: they are eval_passkey.py's other wording


def random_exercise(rng: np.random.Generator, window: int, corpus_text: str, words: list[str]) -> dict:
    """Arguments of passkey_prompt but for the length: some have the passkey's own wording, the others ask for a name of
    two random words of the corpus; half have the passkey's own filler, the others are hidden in corpus text."""
    from eval_passkey import FILLERS, WORDINGS, Wording  # the test's own texts, so that the two cannot drift apart

    name = " ".join(words[rng.integers(len(words))] for _ in range(2))
    needle = EXERCISE_NEEDLES[rng.integers(len(EXERCISE_NEEDLES))]
    question = EXERCISE_QUESTIONS[rng.integers(len(EXERCISE_QUESTIONS))] + EXERCISE_ANSWER
    wording = Wording(needle.replace("{name}", name), question.replace("{name}", name))
    begin = int(rng.integers(max(1, len(corpus_text) - 8 * window)))
    return {
        "depth": rng.random(),
        "key": int(rng.integers(10_000, 100_000)),
        "wording": WORDINGS["passkey"] if rng.random() < EXERCISE_PASSKEYS else wording,
        "filler": FILLERS["passkey"] if rng.random() < 0.5 else corpus_text[begin : begin + 8 * window],
    }


def exercise_windows(
    rng: np.random.Generator, count: int, window: int, enc: tiktoken.Encoding, corpus_text: str
) -> Iterator[list[int]]:
    """`count` lists of `window` ids, each filled exactly by one long retrieval exercise or by two short ones.

    An exercise is a document in the form of the passkey test: filler, needle, filler, question, answer.
    """
    from eval_passkey import passkey_prompt, shortest_prompt

    words = sorted(set(re.findall(r"\b[a-z]{3,8}\b", corpus_text)) - HELD_OUT_WORDS)
    for _ in range(count):
        most = 2 if rng.random() < EXERCISE_PAIRS else 1
        chosen, room = [], window
        while len(chosen) < most:
            one = random_exercise(rng, window, corpus_text, words)
            shortest = shortest_prompt(enc, one["key"], one["wording"])
            if shortest > room:
                break
            chosen.append((shortest, one))
            room -= shortest
        if not chosen:
            raise ValueError(
                f"a window of {window} tokens cannot hold an exercise of {shortest}; set a larger --window"
            )
        shares = rng.multinomial(room, [1 / len(chosen)] * len(chosen)).tolist()  # the room that is left, for filler
        lengths = [shortest + share for (shortest, _), share in zip(chosen, shares, strict=True)]
        prompts = [passkey_prompt(enc, n, **one) for n, (_, one) in zip(lengths, chosen, strict=True)]
        yield [token for prompt in prompts for token in prompt.tokens]


def pack_windows(corpus: np.ndarray, enc: tiktoken.Encoding, config: PrepareConfig) -> np.ndarray:
    """Whole windows in random order: retrieval_fraction of them are exercises, the others cut the corpus in a row."""
    window, fraction = config.window, config.retrieval_fraction
    stretches = -(-len(corpus) // window)  # rounded up, so that the last tokens are in it
    exercises = round(stretches * fraction / (1 - fraction))
    rng = np.random.default_rng([config.seed, 1])
    rows = np.empty((stretches + exercises, window), dtype=np.uint16)
    rows[:stretches] = np.resize(corpus, (stretches, window))  # np.resize begins again at the end
    text = enc.decode(corpus.tolist()).replace(EOT, "\n\n")
    for i, ids in enumerate(exercise_windows(rng, exercises, window, enc, text), start=stretches):
        assert len(ids) == window and ids[0] == enc.eot_token, f"got {len(ids)} ids from {ids[:1]}, expected {window}"
        rows[i] = ids
    print(f"packed {stretches:,} windows of text and {exercises:,} retrieval exercises")
    return np.append(rows[rng.permutation(len(rows))], np.uint16(enc.eot_token))  # the last window's last target


def training_shards(corpus: np.ndarray, enc: tiktoken.Encoding, config: PrepareConfig) -> list[np.ndarray]:
    """The training tokens in pieces of shard_tokens, each cut at a whole window. The token behind a piece is in it too:
    (N - 1) // T windows are read of N tokens, since the last input needs a target."""
    tokens = pack_windows(corpus, enc, config) if config.retrieval_fraction else corpus
    step = config.shard_tokens // config.window * config.window
    return [tokens[at : at + step + 1] for at in range(0, max(1, len(tokens) - config.window), step)]


# ---- files


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A temporary file that becomes `path` when the block ends well and vanishes when it does not."""
    temporary = Path(f"{os.fspath(path)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_shard(path: str | os.PathLike, tokens: np.ndarray) -> None:
    """Write one shard, whole or not at all."""
    if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= 2**16 or len(tokens) >= 2**31:
        raise ValueError(f"{path}: a shard holds 1 to 2**31 - 1 token ids from 0 to 65,535")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with replacing(path) as file:
        file.write(header.tobytes())
        file.write(np.asarray(tokens, dtype="<u2").data)


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


def settings_of(config: PrepareConfig) -> dict:
    """What decides the shards' content, as it reads back from JSON; a file counts by its name and size."""
    files = [f"{Path(name).name}, {Path(name).stat().st_size:,} bytes" for name in config.files if Path(name).is_file()]
    return {key: value for key, value in (asdict(config) | {"files": files}).items() if key != "out_dir"}


def read_meta(folder: str | os.PathLike) -> dict | None:
    """meta.json of a data folder; None if there is none. ValueError if it is damaged or preparation was cut short."""
    path = Path(folder) / "meta.json"
    if (Path(folder) / UNFINISHED).exists():
        raise ValueError(f"the preparation of {folder} was cut short; start prepare_fineweb.py again with its options")
    if not path.exists():
        return None
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        return meta | {"tokenizer": str(meta["tokenizer"]), "window": meta["window"] and int(meta["window"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; prepare this data again, in another folder") from error


def already_prepared(config: PrepareConfig) -> bool:
    """True when out_dir is complete with the same settings; another data set there is an error."""
    folder = Path(config.out_dir)
    meta = None if (folder / UNFINISHED).exists() else read_meta(folder)
    if meta is None:
        return False
    there, wanted = meta.get("settings") or {}, settings_of(config)
    changes = [f"{key}={there.get(key)} (now {wanted[key]})" for key in wanted if there.get(key) != wanted[key]]
    if changes:
        raise ValueError(f"{folder} was prepared with {', '.join(changes)}: choose another --out_dir or delete it")
    tokens = 0
    for name in meta["sha256"]:  # a shard that is lost or cut is made again
        with suppress(ValueError, OSError):
            tokens += len(read_shard(folder / name))
    return tokens == meta["train_tokens"] + meta["val_tokens"]


def write_all(config: PrepareConfig, shards: dict[str, np.ndarray], meta: dict, text: str | None) -> None:
    """Write the shards, the plain text where there is one, and at last meta.json."""
    folder = Path(config.out_dir)
    strangers = sorted({path.name for path in folder.glob("*.bin")} - set(shards))
    if strangers:  # train.py would read it too
        raise ValueError(f"{folder} holds {strangers[0]}, which is not of this run: remove it or change --out_dir")
    configurator.check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()
    for name, tokens in shards.items():
        write_shard(folder / name, tokens)
    if text is not None:
        with replacing(folder / "pydocs.txt") as file:
            file.write(text.encode("utf-8", "replace"))
    meta["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in shards}
    with replacing(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=2).encode() + b"\n")
    (folder / UNFINISHED).unlink()


def prepare(config: PrepareConfig) -> None:
    """Read, split, pack and write one data set, unless it is there already."""
    started, name = time.time(), Path(config.out_dir).resolve().name
    if already_prepared(config):
        print(f"{config.out_dir} is already prepared with these settings: nothing to do")
        return
    enc = get_tokenizer(config.tokenizer)
    texts = list(pydocs_documents()) if config.source == "pydocs" else file_documents(config.files)
    documents = encode_all(texts, enc)
    corpus, val = split(documents, config)
    shards = {f"{name}_val_000000.bin": val}
    shards |= {f"{name}_train_{i:06d}.bin": s for i, s in enumerate(training_shards(corpus, enc, config), start=1)}
    settings = settings_of(config)
    meta = {key: settings[key] for key in ("source", "tokenizer", "seed", "retrieval_fraction")} | {
        "window": config.window if config.retrieval_fraction else None,
        "vocab_size": enc.n_vocab,
        "eot": enc.eot_token,
        "documents": len(documents),
        "train_tokens": sum(map(len, shards.values())) - len(val),
        "val_tokens": len(val),
        "python": platform.python_version(),  # its documentation differs between versions
        "settings": settings,
    }
    write_all(config, shards, meta, "\n\n".join(texts) if config.source == "pydocs" else None)
    sizes = f"{meta['train_tokens']:,} training and {len(val):,} validation tokens"
    print(f"wrote {sizes} in {len(shards)} shards to {config.out_dir} in {time.time() - started:.1f} s")


def main() -> None:
    (config,), _ = configurator.parse([PrepareConfig], sys.argv[1:], __doc__)
    with configurator.user_errors():
        prepare(config)


if __name__ == "__main__":
    configurator.run(main)

import configurator

import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data as D
import needles
import prepare_fineweb as P
from data import EOT, UNFINISHED, get_tokenizer, read_shard, write_shard
from prepare_fineweb import Place, PrepareConfig, prepare

EOT_ID = 256  # of the byte tokenizer
WINDOW = 256
SCRIPT = Path(P.__file__)


def load(folder: Path) -> tuple[dict, np.ndarray, np.ndarray]:
    """meta.json, the training tokens and the validation tokens of a prepared folder."""
    train, val = (
        np.concatenate([read_shard(path) for path in sorted(folder.glob(f"*{part}_*.bin"))])
        for part in ("train", "val")
    )
    return json.loads((folder / "meta.json").read_text(encoding="utf-8")), train, val


def documents(tokens: np.ndarray) -> list[str]:
    """The texts between the end-of-text tokens."""
    parts = np.split(tokens, np.flatnonzero(tokens == EOT_ID))
    assert len(parts[0]) == 0, "the first document does not begin with the end-of-text token"
    return [bytes(part[1:].astype(np.uint8)).decode() for part in parts[1:]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def write_jsonl(path: Path, texts: list) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def run_script(*words, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def small(folder: Path, *files: str, **options) -> PrepareConfig:
    common = {"source": "files", "files": files, "out_dir": str(folder), "val_fraction": 0.2}
    return PrepareConfig(**common | options)


@pytest.fixture(scope="module")
def pydocs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "pydocs"
    prepare(PrepareConfig(source="pydocs", out_dir=str(folder)))
    return folder


@pytest.fixture
def texts() -> list[str]:
    """40 documents of different lengths, no two alike."""
    return [f"document {i}. " + f"line {i}\n" * (5 + 7 * i) for i in range(40)]


@pytest.fixture
def jsonl(tmp_path, texts) -> str:
    return write_jsonl(tmp_path / "texts.jsonl", texts)


# ---- shards


def test_shard_round_trip_and_header_bytes(tmp_path):
    tokens = np.array([50256, 0, 1, 65535, 7])
    write_shard(tmp_path / "a.bin", tokens)
    read = read_shard(tmp_path / "a.bin")
    assert read.dtype == np.uint16 and read.tolist() == tokens.tolist()
    header = b"".join(number.to_bytes(4, "little") for number in (20240520, 1, 5))
    body = bytes([0x50, 0xC4, 0, 0, 1, 0, 255, 255, 7, 0])
    assert contents(tmp_path) == {"a.bin": header + bytes(1024 - 12) + body}


def test_damaged_shards_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(100))
    good = path.read_bytes()
    cases = [(bad, "is not a token shard") for bad in (b"", good[:500], b"\x00" + good[1:])]
    cases += [
        (good[:4] + b"\x02" + good[5:], "begin with 20240520, 1"),
        (good[:-10], "says 100 tokens, it holds 95"),
        (good + b"\0\0", "says 100 tokens, it holds 101"),
    ]
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_shard(path)


@pytest.mark.parametrize("tokens", [[65536], [-1], []])
def test_a_failed_write_keeps_the_old_file(tmp_path, tokens):
    """Of ids that uint16 cannot hold, and on a full disk."""
    write_shard(tmp_path / "a.bin", np.arange(3))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="0 to 65,535"):
        write_shard(tmp_path / "a.bin", np.array(tokens, dtype=np.int64))
    with pytest.raises(OSError), D.replacing(tmp_path / "a.bin") as file:
        file.write(b"half")
        raise OSError("disk full")
    assert contents(tmp_path) == before


# ---- pydocs


def test_pydocs_is_large_and_whole(pydocs):
    meta, train, val = load(pydocs)
    text = (pydocs / "pydocs.txt").read_text(encoding="utf-8")
    assert len(text) > 1_000_000
    assert "The power operator binds more tightly than unary operators" in text
    parts = documents(train) + documents(val)
    assert len(parts) == meta["documents"] > 200 and all(part.strip() for part in parts)
    assert sum(map(len, parts)) + 2 * (len(parts) - 1) == len(text)
    assert abs(len(val) / (len(train) + len(val)) - 0.05) < 0.02
    assert max(map(len, documents(val))) > 4 * WINDOW, "validation at 4x needs long documents"
    assert not set(documents(train)) & set(documents(val))


def test_pydocs_files(pydocs, tmp_path):
    meta, train, val = load(pydocs)
    names = {"pydocs_train_000001.bin", "pydocs_val_000000.bin"}
    assert {path.name for path in pydocs.iterdir()} == {"meta.json", "pydocs.txt", *names}
    expected = {"source": "pydocs", "tokenizer": "bytes", "vocab_size": 257, "eot": 256}
    expected |= {"window": None, "train_tokens": len(train), "val_tokens": len(val)}
    assert meta | expected == meta
    assert meta["settings"] | {"seed": 1, "retrieval_fraction": 0} == meta["settings"]
    digests = {name: hashlib.sha256((pydocs / name).read_bytes()).hexdigest() for name in names}
    assert {name: shard["sha256"] for name, shard in meta["shards"].items()} == digests
    prepare(PrepareConfig(source="pydocs", out_dir=str(tmp_path / "pydocs")))
    assert load(tmp_path / "pydocs")[0] == meta, "it is not the same every time"


def test_a_python_without_topics_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="ships without pydoc_data.topics"):
        prepare(PrepareConfig(source="pydocs", out_dir=str(tmp_path / "x")))
    assert list(tmp_path.iterdir()) == []


# ---- files


def test_txt_jsonl_and_parquet_agree(tmp_path, texts, jsonl):
    from datasets import Dataset

    parquet = str(tmp_path / "texts.parquet")
    Dataset.from_dict({"text": texts, "other": list(range(40))}).to_parquet(parquet)
    txt = [tmp_path / f"{i:02}.txt" for i in range(40)]
    for path, text in zip(txt, texts, strict=True):
        path.write_text(text, encoding="utf-8", newline="")
    for name, files in {"a/x": [jsonl], "b/x": [parquet], "c/x": map(str, txt)}.items():
        prepare(small(tmp_path / name, *files))
        meta, train, val = load(tmp_path / name)
        assert meta["shards"] == load(tmp_path / "a/x")[0]["shards"], "other sha256"
        assert sorted(documents(train) + documents(val)) == sorted(texts)


def test_hard_documents(tmp_path, texts):
    """Blank, the marker as text, a lone surrogate, a pair, a long run of one character, line
    separators, none, no newline at the end, blank lines at the beginning."""
    hard = ["", " \n ", f"one {EOT} two", "lone \ud800.", "\ud83d\ude00", "a" * 50_000]
    hard += ["\u2028 \x85 \x0b z\r\n"]
    path = Path(write_jsonl(tmp_path / "a.jsonl", [*hard, None, *texts]))
    path.write_text("\n\n" + path.read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8")
    prepare(small(tmp_path / "x", str(path)))
    meta, train, val = load(tmp_path / "x")
    kept = [hard[2], "lone \ufffd.", "\U0001f600", *hard[5:], *texts]
    assert sorted(documents(train) + documents(val)) == sorted(kept)
    assert meta["documents"] == len(kept)


def test_parquet_without_rows_and_a_mark_of_the_encoding(tmp_path, texts, jsonl):
    import pyarrow
    import pyarrow.parquet

    empty = pyarrow.table({"text": pyarrow.array([], "string")})
    pyarrow.parquet.write_table(empty, tmp_path / "none.parquet")
    Path(jsonl).write_bytes(b"\xef\xbb\xbf" + Path(jsonl).read_bytes())
    prepare(small(tmp_path / "x", str(tmp_path / "none.parquet"), jsonl))
    assert load(tmp_path / "x")[0]["documents"] == 40


def test_unusable_files_are_told(tmp_path, jsonl):
    from datasets import Dataset

    numbers = "".join(json.dumps({"text": f"{i} 3.14\n" * 100}) + "\n" for i in range(40))
    cases = {
        "a.csv": ("text\n", "unknown suffix"),
        "latin1.txt": ("\xe9\xff", "latin1.txt cannot be read"),
        "column.jsonl": ('{"body": "x"}\n', 'no strings in a column "text"'),
        "numbers.jsonl": ('{"text": 1}\n', 'no strings in a column "text"'),
        "list.jsonl": ("[1]\n", 'no strings in a column "text"'),
        "broken.jsonl": ('{"text": "x\n', "broken.jsonl cannot be read"),
        "broken.parquet": ("PAR1", "broken.parquet cannot be read"),
        "empty.jsonl": ("", "0 document"),
        "short.txt": ("too short", "1 document"),
        "digits.jsonl": (numbers, "the text has no words, of which exercises make names"),
    }
    for name, (content, _) in cases.items():
        (tmp_path / name).write_text(content, encoding="latin-1")
    Dataset.from_dict({"body": ["x"]}).to_parquet(tmp_path / "c.parquet")
    cases = [(name, {}, message) for name, (_, message) in cases.items()]
    cases += [
        ("absent.txt", {}, "no file .*absent.txt"),
        ("c.parquet", {}, 'c.parquet cannot be read at row 0: it has no column "text"'),
        (jsonl, {"window": 100_000}, "training part has .* less than a window of 100,000"),
        (jsonl, {"window": 10_000, "val_fraction": 0.1}, "validation part .* window of 10,000"),
    ]
    for name, options, message in cases:
        with pytest.raises(ValueError, match=message):
            prepare(small(tmp_path / "x", str(tmp_path / name), retrieval_fraction=0.3, **options))
    assert not (tmp_path / "x").exists()


def test_one_huge_document_is_not_held_out():
    for seed in range(20):
        assert 1 not in P.choose_validation([10, 10_000, 10, 10, 500], 0.05, seed)


# ---- training shards


@pytest.mark.parametrize("tokens", [1024, 1025, 1050, 257])
def test_shards_are_cut_at_windows_and_lose_none(tokens):
    config, corpus = PrepareConfig(source="pydocs", shard_tokens=2 * WINDOW + 10), np.arange(tokens)
    shards = P.training_shards(corpus, config)
    assert all(len(shard) == 2 * WINDOW + 1 for shard in shards[:-1]) and len(shards[-1]) > WINDOW
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(shards)), "the last target is in both"
    joined = np.concatenate([shards[0], *(shard[1:] for shard in shards[1:])])
    assert np.array_equal(joined, corpus[: len(joined)])
    assert sum((len(shard) - 1) // WINDOW for shard in shards) == (tokens - 1) // WINDOW


@pytest.mark.parametrize("shard_tokens", [100_000_000, 20_000])
def test_exercises_fill_whole_windows(tmp_path, jsonl, shard_tokens):
    prepare(small(tmp_path / "whole", jsonl))
    prepare(small(tmp_path / "x", jsonl, retrieval_fraction=0.25, shard_tokens=shard_tokens))
    meta, _, val = load(tmp_path / "x")
    _, corpus, whole_val = load(tmp_path / "whole")
    shards = [read_shard(path) for path in sorted((tmp_path / "x").glob("*train_*.bin"))]
    assert all(len(shard) % WINDOW == 1 for shard in shards) and shards[-1][-1] == EOT_ID
    rows = [tuple(row) for shard in shards for row in shard[:-1].reshape(-1, WINDOW).tolist()]
    stretches = -(-len(corpus) // WINDOW)
    expected = {tuple(row) for row in np.resize(corpus, (stretches, WINDOW)).tolist()}
    assert expected <= set(rows), "a training token is missing"
    exercises = [row for row in rows if row not in expected]
    assert len(rows) == stretches + round(stretches / 3) and len(exercises) == round(stretches / 3)
    assert all(row[0] == EOT_ID for row in exercises)
    assert meta["window"] == WINDOW and meta["settings"]["retrieval_fraction"] == 0.25
    assert np.array_equal(val, whole_val), "the validation part stays pure text"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two cats sat, two Cats ran: über 12 big-endian. ", "cats big endian sat ran two"),
        ("Привет, большая книга! Это the книга. ", "прив боль книг это the"),
        ("天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。", "天地 宇宙 日月 辰宿"),
        ("THE SECRET BEACON, A NUMBER OR TWO IMPLEMENTATIONS. ", "the beacon or two implemen"),
        ("हिन्दी भाषा में एक वाक्य। ", "हि भा मे एक वा"),
    ],
)
def test_exercises_in_any_script(text, expected, enc):
    """English words as they are, others by their first 8 bytes, and every window is filled."""
    assert needles.name_words(text) == sorted(expected.split())
    for ids in needles.exercise_windows(np.random.default_rng(0), 50, 200, enc, text * 60):
        assert len(ids) == 200 and ids[0] == enc.eot_token


def test_seed_changes_the_shards(tmp_path, jsonl):
    digests = []
    for name, seed in [("x", 1), ("y/x", 1), ("z/x", 2)]:
        prepare(small(tmp_path / name, jsonl, seed=seed, retrieval_fraction=0.3))
        digests.append(load(tmp_path / name)[0]["shards"])
    a, b, c = digests
    assert a == b and a["x_val_000000.bin"] != c["x_val_000000.bin"]


# ---- running it again


def test_rerun_does_nothing_and_other_settings_are_refused(tmp_path, jsonl, texts, capsys):
    folder = tmp_path / "x"
    prepare(small(folder, jsonl))
    before = times(folder)
    assert set(before) == {"meta.json", "x_train_000001.bin", "x_val_000000.bin"}
    capsys.readouterr()
    prepare(small(folder, jsonl))
    assert "nothing to do" in capsys.readouterr().out
    changed = r"prepared with window=256 \(expected 128\), seed=1 \(expected 2\)"
    with pytest.raises(ValueError, match=changed):
        prepare(small(folder, jsonl, seed=2, window=128))
    write_jsonl(Path(jsonl), [*texts, "one more"])
    with pytest.raises(ValueError, match="was prepared with files"):
        prepare(small(folder, jsonl))
    assert times(folder) == before


def test_unfinished_and_damaged_folders_are_prepared_again(tmp_path, jsonl, capsys):
    folder = tmp_path / "x"
    prepare(small(folder, jsonl))
    shard, whole = folder / "x_train_000001.bin", contents(folder)

    def leave_unfinished():
        (folder / "meta.json").rename(folder / UNFINISHED)
        shard.write_bytes(b"half")

    cut = whole[shard.name][:-100]
    for damage in (shard.unlink, lambda: shard.write_bytes(cut), leave_unfinished):
        damage()
        prepare(small(folder, jsonl))
        assert contents(folder) == whole and "nothing to do" not in capsys.readouterr().out


def test_meta_of_an_unfinished_or_damaged_folder_is_refused(tmp_path, jsonl):
    folder = tmp_path / "x"
    prepare(small(folder, jsonl))
    assert D.read_meta(folder)["tokenizer"] == "bytes" and D.read_meta(tmp_path) is None
    good = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    shard = next(iter(good["shards"].values()))
    wrong = [good | {key: "much"} for key in ("window", "settings", "shards")]
    wrong += [good | {"tokenizer": 5}, good | {"shards": {"a": 5}}]
    wrong += [good | {"shards": {"a": shard | {key: ""}}} for key in ("tokens", "next")]
    without = {key: good[key] for key in good if key != "window"}
    for content in ("{broken", "[]", "[1]", "null", "", *map(json.dumps, [*wrong, without])):
        (folder / "meta.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="damaged"):
            prepare(small(folder, jsonl))
    (folder / UNFINISHED).touch()
    with pytest.raises(ValueError, match="cut short"):
        D.read_meta(folder)
    with pytest.raises(ValueError, match="UNFINISHED is damaged"):
        prepare(small(folder, jsonl))


# ---- the hub: a folder is read by the same code


def hub_words(data_set: Path, folder: Path | str, **options) -> list[str]:
    """Command-line words for a data set in a folder, by default with one worker and byte tokens."""
    common = {"dataset": data_set, "subset": "", "tokenizer": "bytes", "workers": 1}
    common |= {"shard_tokens": 4000, "val_tokens": 3000, "out_dir": folder}
    return [f"--{key}={value}" for key, value in (common | options).items()]


def prepare_hub(data_set: Path, folder: Path, **options) -> dict[str, bytes]:
    """Prepare in this process; returns every file of the folder."""
    (config,), _ = configurator.parse([PrepareConfig], hub_words(data_set, folder, **options), None)
    prepare(config)
    return contents(folder)


def joined(folder: Path) -> list[int]:
    """All tokens in the order of the shards."""
    _, train, val = load(folder)
    return [*val.tolist(), *train.tolist()]


def stream_of(texts: list[str], enc) -> list[int]:
    """The stream as it must be, by tiktoken alone."""
    return [token for text in texts for token in (enc.eot_token, *enc.encode_ordinary(text))]


@pytest.fixture
def data_set(tmp_path, texts) -> Path:
    """40 documents, 45 kB, in two files of a folder."""
    write_jsonl(tmp_path / "set/a.jsonl", texts[:25])
    write_jsonl(tmp_path / "set/b.jsonl", ["", *texts[25:], None])
    return tmp_path / "set"


@pytest.fixture
def fineweb(tmp_path, monkeypatch) -> Path:
    """Real FineWeb, 320 documents, laid out as on the hub: a README names subsets of parquet."""
    if "NANOBAM_TEST_DATA" not in os.environ:
        pytest.skip("NANOBAM_TEST_DATA is not set: no FineWeb samples")
    samples = Path(os.environ["NANOBAM_TEST_DATA"])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(samples / "gpt2_bpe" / "tiktoken_cache"))
    folder = tmp_path / "fineweb"
    for name, source in [
        ("data/0.parquet", "full_schema_20.parquet"),
        ("sample/10BT/000_00000.parquet", "first300_partial.parquet"),
        ("sample/10BT/001_00000.parquet", "full_schema_20.parquet"),
        ("lines/0.jsonl", "first300_partial.jsonl"),
        ("lines/1.jsonl", "full_schema_20.jsonl"),
    ]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(samples / "fineweb" / f"fineweb_{source}", folder / name)
    subsets = {"default": "data/*", "sample-10BT": "sample/10BT/*", "lines": "lines/*"}
    lines = [
        f"- {{config_name: {name}, data_files: [{{split: train, path: {path}}}]}}\n"
        for name, path in subsets.items()
    ]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(lines)}---\n", encoding="utf-8")
    return folder


def test_the_default_is_fineweb():
    expected = {"dataset": "HuggingFaceFW/fineweb", "subset": "sample-10BT", "split": "train"}
    expected |= {"tokenizer": "gpt2", "out_dir": "data/fineweb10B", "shard_tokens": 100_000_000}
    expected |= {"max_tokens": 0, "val_tokens": 10_000_000}
    assert vars(PrepareConfig()) | expected == vars(PrepareConfig())


def test_fineweb_from_parquet_and_jsonl(tmp_path, fineweb):
    common = {"tokenizer": "gpt2", "shard_tokens": 50_000, "val_tokens": 10_000}
    parquet = prepare_hub(fineweb, tmp_path / "a/x", subset="sample-10BT", **common)
    lines = prepare_hub(fineweb, tmp_path / "b/x", subset="lines", **common)
    del parquet["meta.json"], lines["meta.json"]
    assert parquet == lines
    rows = b"".join((fineweb / f"lines/{name}.jsonl").read_bytes() for name in "01").splitlines()
    enc = get_tokenizer("gpt2")
    assert joined(tmp_path / "a/x") == stream_of([json.loads(row)["text"] for row in rows], enc)
    meta, train, val = load(tmp_path / "a/x")
    assert meta | {"documents": 320, "vocab_size": 50257, "eot": 50256} == meta
    assert train[0] == val[0] == enc.eot_token, "a document is in both parts"
    last = int(np.flatnonzero(val == enc.eot_token)[-1])
    assert last < 10_000 <= len(val), "it does not end with the document that fills it"
    sizes = [shard["tokens"] for shard in meta["shards"].values()]
    assert sizes[1:-1] == [50_000] * 4 and 0 < sizes[-1] <= 50_000


@pytest.mark.parametrize("max_tokens", [4000, 10_000, 10**6, 0])
def test_max_tokens(tmp_path, data_set, texts, max_tokens):
    """The same validation, however much follows."""
    prepare_hub(data_set, tmp_path / "x", max_tokens=max_tokens)
    _, train, val = load(tmp_path / "x")
    whole = stream_of(texts, get_tokenizer("bytes"))
    assert joined(tmp_path / "x") == whole[: max_tokens or None]
    assert len(val) == len(stream_of(texts[:11], get_tokenizer("bytes"))) and train[0] == EOT_ID


@pytest.mark.parametrize("options", [{"max_tokens": 3000}, {"val_tokens": 10**6}])
def test_a_stream_that_ends_in_the_validation_is_told(tmp_path, data_set, options):
    with pytest.raises(ValueError, match="tokens in its split train, none for training: delete"):
        prepare_hub(data_set, tmp_path / "x", **options)
    assert (tmp_path / "x" / UNFINISHED).exists()


def test_cut_stream_from_every_place():
    """Every training shard but the last is full, and from the place after any of them the same
    shards follow."""
    rng = np.random.default_rng(0)
    lengths = [0, 3, 40, 7, 0, 7, 120, 5, 10, 4, 0]
    edges = np.cumsum(lengths)
    stream = [
        (Place(0, row), rng.integers(0, 99, n).astype(np.uint16)) for row, n in enumerate(lengths)
    ]
    whole = np.concatenate([ids for _, ids in stream])
    for val_tokens, most in itertools.product((0, 1, 3, 9, 50, 60), (1, 60, 163, 0)):
        documents = list(P.count_tokens(stream, 1, 0, most))
        pieces = list(P.cut_stream(documents, val_tokens, 20))
        tokens = [piece for piece, _ in pieces]
        assert np.array_equal(np.concatenate(tokens), whole[: most or None])
        assert all(len(piece) == 20 for piece in tokens[bool(val_tokens) : -1])
        if val_tokens and len(pieces) > 1:
            assert len(tokens[0]) == edges[edges >= val_tokens][0]
        for i, (_, after) in enumerate(pieces[:-1], start=1):
            row, ids = documents[after.row]
            rest = [(after, ids[after.offset :]), *documents[after.row + 1 :]]
            again = list(P.cut_stream(rest, 0, 20))
            assert [place for _, place in again] == [place for _, place in pieces[i:]]
            assert all(map(np.array_equal, [piece for piece, _ in again], tokens[i:]))


class Killed(BaseException):
    """What ends a process from outside."""


def test_killed_between_any_two_changes_of_the_disk(tmp_path, data_set, texts, monkeypatch):
    """The n-th renaming or removal of a file and all later ones do not happen; then it is started
    again."""
    reference = prepare_hub(data_set, tmp_path / "reference/x")
    files = json.loads(reference["meta.json"])["files"]
    parts = {"a": texts[:25], "b": ["", *texts[25:], ""]}
    monkeypatch.setattr(P, "hub_files", lambda config: files)
    monkeypatch.setattr(P, "read_texts", lambda file, skip: iter(parts[Path(file).stem][skip:]))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def die_later(change):
        def dying(*args, **kwargs):
            if next(left, None) is None:
                raise Killed
            return change(*args, **kwargs)

        return dying

    for moment in itertools.count():
        folder, left = tmp_path / str(moment) / "x", iter(range(moment))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", die_later(os.replace))
            patch.setattr(Path, "unlink", die_later(Path.unlink))
            try:
                prepare_hub(data_set, folder)
                break
            except Killed:
                assert not (folder / "meta.json").exists() or (folder / UNFINISHED).exists()
        assert prepare_hub(data_set, folder) == reference, f"killed at moment {moment}"
    assert moment > 30


def test_damaged_and_lost_shards_are_made_again_and_none_before(tmp_path, data_set, monkeypatch):
    """Also if the repair is killed after its first shard."""
    folder = tmp_path / "x"
    whole = prepare_hub(data_set, folder)
    (folder / "x_train_000004.bin").unlink()
    (folder / "x_train_000006.bin").write_bytes(b"half")
    before, write, count = times(folder), D.write_shard, itertools.count()

    def write_one_shard(path, tokens):
        if next(count) == 1:
            raise Killed
        return write(path, tokens)

    monkeypatch.delattr("datasets.load_dataset_builder")  # the list of files is known
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(D, "write_shard", write_one_shard)
        prepare_hub(data_set, folder)
    assert prepare_hub(data_set, folder) == whole
    kept = ["x_val_000000.bin", *(f"x_train_00000{i}.bin" for i in (1, 2, 3))]
    assert all(times(folder)[name] == before[name] for name in kept)


def test_a_broken_connection_is_opened_again_where_it_broke(monkeypatch):
    pauses, faults = [], [ConnectionError("reset"), TimeoutError(), RuntimeError("503")]

    def read_texts(file, skip):
        for i in range(skip, 10):
            if i % 4 == 3 and faults and file == "hf://b.jsonl":
                raise faults.pop()
            yield f"{file} {i}"

    monkeypatch.setattr(P, "read_texts", read_texts)
    monkeypatch.setattr(time, "sleep", pauses.append)
    read = list(P.read_documents(["hf://a.jsonl", "hf://b.jsonl"], Place(0, 2, 5)))
    expected = [(Place(0, i), f"hf://a.jsonl {i}") for i in range(2, 10)]
    expected[0] = (Place(0, 2, 5), "hf://a.jsonl 2")
    assert read == expected + [(Place(1, i), f"hf://b.jsonl {i}") for i in range(10)]
    assert pauses == [5, 20, 80]


def test_a_connection_that_stays_broken_is_told_with_what_is_safe(
    tmp_path, data_set, monkeypatch, capsys
):
    whole = prepare_hub(data_set, tmp_path / "reference/x", max_tokens=20_000)
    read, find_files, broken = P.read_texts, P.hub_files, [True]

    def read_texts(file, skip):
        for i, text in enumerate(read(file.removeprefix("hf:/"), 0)):
            if broken and i == 20:
                raise ConnectionError("no route\nand more")
            if i >= skip:
                yield text

    monkeypatch.setattr(P, "read_texts", read_texts)
    monkeypatch.setattr(P, "hub_files", lambda c: [f"hf:/{file}" for file in find_files(c)])
    monkeypatch.setattr(P, "BATCH", 1)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    words = hub_words(data_set, tmp_path / "x", max_tokens=20_000)
    monkeypatch.setattr(sys, "argv", ["", *words])
    with pytest.raises(SystemExit) as stopped:
        P.main()
    told = capsys.readouterr().err.splitlines()[-1]
    safe = len(list((tmp_path / "x").glob("*.bin")))
    assert stopped.value.code == 2 and told.startswith("error: hf://") and safe == 2
    assert "cannot be read at row 20: no route; 2 shards are safe in " in told
    assert told.endswith(f"{tmp_path / 'x'}: start again")
    broken.clear()
    D.remove_locks()
    P.main()
    again = contents(tmp_path / "x")
    assert all(again[name] == whole[name] for name in whole if name != "meta.json")


def test_unusable_data_sets_are_told_and_leave_nothing(tmp_path, data_set, monkeypatch):
    write_jsonl(tmp_path / "blank/a.jsonl", ["", " \n"])
    write_jsonl(tmp_path / "body/a.jsonl", [5])
    (tmp_path / "table").mkdir()
    (tmp_path / "table/a.csv").write_text("text\nx\n", encoding="utf-8")
    cases = [
        ("absent", {}, "absent cannot be opened: "),
        ("set", {"subset": "nope"}, "set cannot be opened: .*nope.* not found. Available"),
        ("set", {"split": "test"}, "set has no split test, only: train"),
        ("body", {}, 'body/a.jsonl cannot be read at row 0: it has no strings in a column "text"$'),
        ("blank", {}, "blank has 0 tokens in its split train"),
        ("table", {}, "table/a.csv has an unknown suffix: expected .txt, .jsonl or .parquet"),
    ]
    for name, options, message in cases:
        with pytest.raises(ValueError, match=message):
            prepare_hub(tmp_path / name, tmp_path / "x", **options)

    def refuse(*_):
        raise ConnectionError("no net")

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(ValueError, match="set cannot be opened: no net"):
        prepare_hub(data_set, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_data_of_others_is_refused_before_it_is_mixed(tmp_path, data_set, jsonl):
    """Another run's shards, and a data set with other settings that is not finished."""
    folder = tmp_path / "x"
    folder.mkdir()
    for name in ("x_train_000001.bin", "x_val_000000.bin", "x_train_000007.bin"):
        write_shard(folder / name, np.arange(9))
        with pytest.raises(ValueError, match=f"{name}, which is not of this run"):
            prepare_hub(data_set, folder)
        with pytest.raises(ValueError, match=f"{name}, which is not of this run"):
            prepare(small(folder, jsonl))
        (folder / name).unlink()
    prepare_hub(data_set, folder)
    write_shard(folder / "x_train_000099.bin", np.arange(9))
    with pytest.raises(ValueError, match="x_train_000099.bin, which is not of this run"):
        prepare_hub(data_set, folder)
    (folder / "meta.json").rename(folder / UNFINISHED)
    with pytest.raises(ValueError, match=r"was prepared with max_tokens=0 \(expected 5000\)"):
        prepare_hub(data_set, folder, max_tokens=5000)
    with pytest.raises(ValueError, match="was prepared with source=hub"):
        prepare(small(folder, jsonl))


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, fineweb):
    """kill -9, 20 times."""
    options = {"subset": "sample-10BT", "tokenizer": "gpt2", "shard_tokens": 20_000}
    reference = prepare_hub(fineweb, tmp_path / "reference/x", **options)
    rng, kills, round = random.Random(1), 0, 0
    while kills < 20 or (tmp_path / f"{round}/x").exists():
        folder = tmp_path / f"{round}/x"
        run = subprocess.Popen([sys.executable, SCRIPT, *hub_words(fineweb, folder, **options)])
        if kills < 20:
            wanted = len(list(folder.glob("*.bin"))) + rng.randrange(4)
            while run.poll() is None and len(list(folder.glob("*.bin"))) < wanted:
                time.sleep(0.01)
            time.sleep(rng.random())
            run.kill()
            kills += 1
        if run.wait() == 0:
            assert contents(folder) == reference
            round += 1


# ---- verifying a folder


def test_check_finds_every_kind_of_damage(tmp_path, jsonl, capsys):
    folder = tmp_path / "x"
    prepare(small(folder, jsonl, shard_tokens=10_000))
    good = contents(folder)
    D.verify(folder)
    assert capsys.readouterr().out.splitlines()[-1] == f"{folder} is whole"
    name = "x_train_000002.bin"
    shard = good[name]
    id_257 = "has the token id 257, but the vocabulary has only 257"
    cases = {
        b"": "is not a token shard",
        shard[:-2]: "is damaged: its header says",
        shard[:2000] + b"\x01\x01" + shard[2002:]: id_257,
        shard[:2000] + b"\x01\0" + shard[2002:]: "is not in meta.json with its sha256",
    }
    bad = f"^1 of {len(good) - 1} shards are bad: .*{name}"
    for content, message in cases.items():
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{bad} {message}"):
            D.verify(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        D.verify(folder)
    write_shard(folder / "y_val_000000.bin", np.arange(9))
    with pytest.raises(ValueError, match="y_val_000000.bin is not in meta.json"):
        D.verify(folder)


def test_check_of_shards_without_meta_assumes_gpt2(tmp_path, capsys):
    write_shard(tmp_path / "others_train_000001.bin", np.array([50256, 0]))
    D.verify(tmp_path)
    assert "without meta.json, GPT-2's 50,257 ids are assumed" in capsys.readouterr().out
    write_shard(tmp_path / "others_val_000000.bin", np.array([50257]))
    bad = "1 of 2 shards are bad: .*others_val_000000.bin has the token id 50257"
    with pytest.raises(ValueError, match=bad):
        D.verify(tmp_path)
    with pytest.raises(ValueError, match="absent holds no shards"):
        D.verify(tmp_path / "absent")


# ---- the command line


def test_one_writer_a_folder(tmp_path, jsonl):
    """A second one is told; a first one that was killed is no hindrance; the result is there, where
    --out_dir says, and other options for it are an error."""
    code = "import data, pathlib, sys; data.lock_folder(pathlib.Path(sys.argv[1])); "
    code += "print('held', flush=True); input()"
    command = [sys.executable, "-c", code, tmp_path / "data/x"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen(command, cwd=SCRIPT.parent, **pipes)
    assert holder.stdout.readline().strip() == b"held"
    words = [f"--files={jsonl}", "--source=files", "--out_dir=data/x", "--val_fraction=0.2"]
    done = run_script(*words, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    told = "error: data/x is being written by another process; wait for it and start again"
    assert done.stderr.startswith(told)
    assert list((tmp_path / "data/x").iterdir()) == []
    holder.kill()
    holder.communicate()
    done = run_script(*words, cwd=tmp_path)
    assert done.returncode == 0 and "data/x" in done.stdout.splitlines()[-1], done.stderr
    names = {"meta.json", "x_train_000001.bin", "x_val_000000.bin"}
    assert set(contents(tmp_path / "data/x")) == names
    assert load(tmp_path / "data/x")[0]["documents"] == 40
    done = run_script(*words, "--seed=5", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="Windows has no locks")
def test_a_file_system_without_locks_is_written_without(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    D.lock_folder(tmp_path / "x")
    assert f"{tmp_path / 'x'} has no locks (No locks available)" in capsys.readouterr().out
    D.remove_locks()
    assert list(tmp_path.iterdir()) == []


FULL, FOREIGN = OSError(errno.ENOSPC, "No space left"), PermissionError(1, "Not permitted", "x")


@pytest.mark.parametrize(("at", "error"), [("os.fsync", FULL), ("pathlib.Path.mkdir", FOREIGN)])
def test_a_full_disk_and_a_folder_of_another_user(tmp_path, jsonl, monkeypatch, capsys, at, error):
    def refuse(*_, **__):
        raise error

    words = [f"--files={jsonl}", "--source=files", f"--out_dir={tmp_path / 'x'}"]
    monkeypatch.setattr(sys, "argv", ["", *words])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(at, refuse)
        P.main()
    told = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and told.startswith("error: ")
    assert "o space left" in told or "permitted" in told
    D.remove_locks()
    assert not (tmp_path / "x").exists(), "half of a file is left"


def test_command_line_with_two_workers(tmp_path, fineweb):
    """Stops inside a parquet file, where some versions of Arrow hang at exit; then --check."""
    options = {"subset": "sample-10BT", "tokenizer": "gpt2", "max_tokens": 90_000}
    options |= {"shard_tokens": 40_000}
    for words in (hub_words(fineweb, "data/x", **options, workers=2), ["--check", "data/x"]):
        done = run_script(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "data/x is whole"
    assert contents(tmp_path / "data/x") == prepare_hub(fineweb, tmp_path / "one/x", **options)
    (tmp_path / "data/x/x_val_000000.bin").write_bytes(b"")
    done = run_script("--check=data/x", cwd=tmp_path)
    told = "error: 1 of 4 shards are bad: data/x/x_val_000000.bin is not"
    assert done.returncode == 2 and done.stderr.startswith(told)


BAD = [("pydocs", "val_fraction", 0.0), ("pydocs", "val_fraction", 1.0), ("pydocs", "window", 1)]
BAD += [("pydocs", "retrieval_fraction", -0.1), ("hub", "retrieval_fraction", 0.3)]
BAD += [("pydocs", "max_tokens", 5), ("hub", "max_tokens", -1), ("hub", "val_tokens", 0)]
BAD += [("pydocs", "shard_tokens", n) for n in (256, 2**31)] + [("pydocs", "seed", -1)]
BAD += [("pydocs", "files", ("a.txt",)), ("files", "files", ()), ("pydocs", "workers", 0)]


@pytest.mark.parametrize(("source", "key", "value"), [*BAD, ("hub", "out_dir", "data/interval_x")])
def test_bad_settings_are_refused(source, key, value):
    with pytest.raises(ValueError, match=key):
        PrepareConfig(source=source, **{key: value})

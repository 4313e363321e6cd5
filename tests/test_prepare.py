import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import prepare_fineweb
from prepare_fineweb import Place, PrepareConfig, prepare, read_shard, write_shard
from tokenizer import EOT, get_tokenizer

EOT_ID = 256  # of the byte tokenizer
WINDOW = 256


def load(folder: Path) -> tuple[dict, np.ndarray, np.ndarray]:
    """meta.json, the training tokens and the validation tokens of a prepared folder."""
    parts = [[read_shard(path) for path in sorted(folder.glob(f"*{part}_*.bin"))] for part in ("train", "val")]
    train, val = (np.concatenate(part) if part else np.zeros(0, np.uint16) for part in parts)
    return json.loads((folder / "meta.json").read_text(encoding="utf-8")), train, val


def documents(tokens: np.ndarray) -> list[str]:
    """The texts between the end-of-text tokens."""
    parts = np.split(tokens, np.flatnonzero(tokens == EOT_ID))
    assert len(parts[0]) == 0, "the first document does not begin with the end-of-text token"
    return [bytes(part[1:].astype(np.uint8)).decode() for part in parts[1:]]


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


def write_jsonl(path: Path, texts: list) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def small(folder: Path, *files: str, **options) -> PrepareConfig:
    options = {"source": "files", "files": files, "out_dir": str(folder), "val_fraction": 0.2, "workers": 1} | options
    return PrepareConfig(**options)


# ---- shards


def test_shard_round_trip_and_header_bytes(tmp_path):
    tokens = np.array([50256, 0, 1, 65535, 7])
    write_shard(tmp_path / "a.bin", tokens)
    read = read_shard(tmp_path / "a.bin")
    assert read.dtype == np.uint16 and read.tolist() == tokens.tolist()
    data = (tmp_path / "a.bin").read_bytes()
    header = b"".join(number.to_bytes(4, "little") for number in (20240520, 1, 5))
    assert data[:1024] == header + bytes(1024 - 12)
    assert data[1024:] == bytes([0x50, 0xC4, 0, 0, 1, 0, 255, 255, 7, 0])
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_damaged_shards_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(100))
    good = path.read_bytes()
    cases = [
        (b"\x00" + good[1:], "is not a token shard"),
        (good[:500], "is not a token shard"),
        (b"", "is not a token shard"),
        (good[:4] + b"\x02" + good[5:], "version 2"),
        (good[:-10], "says 100 tokens, it holds 95"),
    ]
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_shard(path)


@pytest.mark.parametrize("tokens", [[65536], [-1], []])
def test_ids_that_uint16_cannot_hold_are_refused(tmp_path, tokens):
    with pytest.raises(ValueError, match="0 to 65,535"):
        write_shard(tmp_path / "a.bin", np.array(tokens, dtype=np.int64))
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_file(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(3))
    with pytest.raises(OSError), prepare_fineweb.replacing(tmp_path / "a.bin") as file:
        file.write(b"half")
        raise OSError("disk full")
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert read_shard(tmp_path / "a.bin").tolist() == [0, 1, 2]


# ---- pydocs


def test_pydocs_is_large_and_whole(pydocs):
    meta, train, val = load(pydocs)
    text = (pydocs / "pydocs.txt").read_text(encoding="utf-8")
    assert len(text) > 1_000_000 and "The power operator binds more tightly than unary operators" in text
    found = documents(train) + documents(val)
    assert len(found) == meta["documents"] > 200
    assert sum(map(len, found)) + 2 * (len(found) - 1) == len(text)
    assert abs(len(val) / (len(train) + len(val)) - 0.05) < 0.02
    assert max(map(len, documents(val))) > 4 * WINDOW, "validation at 4x needs long documents"
    assert all(part.strip() for part in found)


def test_pydocs_validation_is_not_in_training(pydocs):
    _, train, val = load(pydocs)
    assert not set(documents(train)) & set(documents(val))


def test_pydocs_is_the_same_every_time(pydocs, tmp_path):
    prepare(PrepareConfig(source="pydocs", out_dir=str(tmp_path / "pydocs")))
    assert load(tmp_path / "pydocs")[0] == load(pydocs)[0]


def test_pydocs_files(pydocs):
    meta, train, val = load(pydocs)
    assert {path.name for path in pydocs.iterdir()} == {
        "meta.json",
        "pydocs.txt",
        "pydocs_train_000001.bin",
        "pydocs_val_000000.bin",
    }
    expected = {"source": "pydocs", "tokenizer": "bytes", "vocab_size": 257, "eot": 256, "window": None}
    expected |= {"train_tokens": len(train), "val_tokens": len(val)}
    assert meta | expected == meta and meta["settings"]["seed"] == 1 and meta["settings"]["retrieval_fraction"] == 0
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in pydocs.glob("*.bin")}
    assert {name: shard["sha256"] for name, shard in meta["shards"].items()} == digests


def test_a_python_without_topics_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="ships without pydoc_data.topics"):
        prepare(PrepareConfig(source="pydocs", out_dir=str(tmp_path / "x")))
    assert list(tmp_path.iterdir()) == []


# ---- files


def test_txt_jsonl_and_parquet_agree(tmp_path, texts, jsonl):
    from datasets import Dataset

    Dataset.from_dict({"text": texts, "other": list(range(40))}).to_parquet(str(tmp_path / "texts.parquet"))
    txt = [tmp_path / f"{i:02}.txt" for i in range(40)]
    for path, text in zip(txt, texts, strict=True):
        path.write_text(text, encoding="utf-8", newline="")
    runs = {"a": [jsonl], "b": [str(tmp_path / "texts.parquet")], "c": map(str, txt)}
    results = []
    for name, files in runs.items():
        prepare(small(tmp_path / name, *files))
        results.append(load(tmp_path / name))
    for _, train, val in results:
        assert np.array_equal(train, results[0][1]) and np.array_equal(val, results[0][2])
        assert sorted(documents(train) + documents(val)) == sorted(texts)


def test_fineweb_samples_agree(tmp_path):
    if "NANOBAM_TEST_DATA" not in os.environ:
        pytest.skip("NANOBAM_TEST_DATA is not set: no FineWeb samples")
    shards = []
    for suffix in ("jsonl", "parquet"):
        file = Path(os.environ["NANOBAM_TEST_DATA"], "fineweb", f"fineweb_first300_partial.{suffix}")
        prepare(small(tmp_path / suffix, str(file)))
        shards.append(load(tmp_path / suffix))
    assert shards[0][0]["documents"] == 300
    assert np.array_equal(shards[0][1], shards[1][1]) and np.array_equal(shards[0][2], shards[1][2])


def test_hard_documents(tmp_path, texts):
    """Blank, the marker as text, a lone surrogate, a pair, a long run of one character, line separators, no newline."""
    hard = ["", " \n ", f"one {EOT} two", "lone \ud800.", "\ud83d\ude00", "a" * 50_000, "\u2028 \x85 \x0b z\r\n"]
    path = write_jsonl(tmp_path / "a.jsonl", hard + texts)
    Path(path).write_text("\n\n" + Path(path).read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8")
    prepare(small(tmp_path / "x", path))
    meta, train, val = load(tmp_path / "x")
    found = documents(train) + documents(val)
    kept = [hard[2], "lone \ufffd.", "\U0001f600", *hard[5:]]
    assert sorted(found) == sorted(kept + texts) and meta["documents"] == len(found)


def test_missing_values_are_skipped(tmp_path, texts):
    prepare(small(tmp_path / "x", write_jsonl(tmp_path / "a.jsonl", [None, *texts, ""])))
    assert load(tmp_path / "x")[0]["documents"] == 40


def test_unusable_files_are_told(tmp_path):
    cases = {
        "absent.txt": (None, "no file .*absent.txt"),
        "a.csv": (b"text\n", "unknown suffix"),
        "latin1.txt": (b"\xe9\xff", "latin1.txt cannot be read"),
        "column.jsonl": (b'{"body": "x"}\n', 'no strings in a column "text", only: body'),
        "numbers.jsonl": (b'{"text": 1}\n', 'no strings in a column "text"'),
        "broken.jsonl": (b'{"text": "x\n', "broken.jsonl cannot be read"),
        "list.jsonl": (b"[1]\n", 'no strings in a column "text"'),
        "broken.parquet": (b"PAR1", "broken.parquet cannot be read"),
        "empty.jsonl": (b"", "0 document"),
        "short.txt": (b"too short", "1 document"),
    }
    for name, (data, message) in cases.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            prepare(small(tmp_path / "x", str(tmp_path / name)))
    assert not (tmp_path / "x").exists()


def test_less_than_a_window_is_refused(tmp_path, jsonl):
    with pytest.raises(ValueError, match="the training part has .* less than a window of 100,000"):
        prepare(small(tmp_path / "x", jsonl, window=100_000))
    with pytest.raises(ValueError, match="the validation part has .* less than a window of 10,000"):
        prepare(small(tmp_path / "x", jsonl, window=10_000, val_fraction=0.1))
    assert not (tmp_path / "x").exists()


def test_one_huge_document_is_not_held_out():
    lengths = [10, 10_000, 10, 10, 500]
    for seed in range(20):
        assert 1 not in prepare_fineweb.choose_validation(lengths, 0.05, seed)


# ---- training shards


def test_shards_are_cut_at_windows(tmp_path, jsonl):
    prepare(small(tmp_path / "whole", jsonl))
    prepare(small(tmp_path / "cut", jsonl, shard_tokens=10_000))
    shards = [read_shard(path) for path in sorted((tmp_path / "cut").glob("*train_*.bin"))]
    assert len(shards) > 2 and all(len(shard) == 9984 + 1 for shard in shards[:-1])
    assert all(a[-1] == b[0] for a, b in zip(shards, shards[1:], strict=False)), "the last target is in both"
    joined = np.concatenate([shards[0], *(shard[1:] for shard in shards[1:])])
    assert np.array_equal(load(tmp_path / "whole")[1], joined)
    assert len(shards[-1]) > WINDOW


@pytest.mark.parametrize("tokens", [1024, 1025, 1050, 257])
def test_cutting_shards_loses_no_window(tokens):
    config = PrepareConfig(source="pydocs", shard_tokens=2 * WINDOW)
    shards = prepare_fineweb.training_shards(np.arange(tokens), get_tokenizer("bytes"), config)
    windows = [(len(shard) - 1) // WINDOW for shard in shards]
    assert sum(windows) == (tokens - 1) // WINDOW and min(windows) > 0


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


def test_seed_changes_the_shards(tmp_path, jsonl):
    digests = []
    for name, seed in [("x", 1), ("y/x", 1), ("z/x", 2)]:
        prepare(small(tmp_path / name, jsonl, seed=seed, retrieval_fraction=0.3))
        digests.append(load(tmp_path / name)[0]["shards"])
    assert digests[0] == digests[1] and digests[0]["x_val_000000.bin"] != digests[2]["x_val_000000.bin"]


def test_gpt2(tmp_path, jsonl, texts, monkeypatch):
    if "NANOBAM_TEST_DATA" not in os.environ:
        pytest.skip("NANOBAM_TEST_DATA is not set: no GPT-2 files")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(Path(os.environ["NANOBAM_TEST_DATA"], "gpt2_bpe/tiktoken_cache")))
    prepare(small(tmp_path / "x", jsonl, tokenizer="gpt2"))
    meta, train, val = load(tmp_path / "x")
    assert meta["vocab_size"] == 50257 and meta["eot"] == train[0] == val[0] == 50256
    found = get_tokenizer("gpt2").decode([*train, *val]).split(EOT)[1:]
    assert sorted(found) == sorted(texts)


# ---- running it again


def test_rerun_does_nothing_and_other_settings_are_refused(tmp_path, jsonl, capsys):
    folder = tmp_path / "x"
    prepare(small(folder, jsonl))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    capsys.readouterr()
    prepare(small(folder, jsonl))
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"prepared with window=256 \(now 128\), seed=1 \(now 2\)"):
        prepare(small(folder, jsonl, seed=2, window=128))
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert set(before) == {"meta.json", "x_train_000001.bin", "x_val_000000.bin"}


def test_an_unfinished_folder_is_prepared_again(tmp_path, jsonl):
    folder = tmp_path / "x"
    prepare(small(folder, jsonl))
    finished = load(folder)[0]
    (folder / "meta.json").unlink()
    (folder / "x_train_000001.bin").write_bytes(b"half")
    prepare(small(folder, jsonl))
    assert load(folder)[0] == finished


def test_changed_files_and_lost_shards_are_noticed(tmp_path, jsonl, texts, capsys):
    prepare(small(tmp_path / "x", jsonl))
    shard = next((tmp_path / "x").glob("*train_*.bin"))
    whole = shard.read_bytes()
    for damage in (lambda: shard.unlink(), lambda: shard.write_bytes(whole[:-100])):
        damage()
        prepare(small(tmp_path / "x", jsonl))
        assert shard.read_bytes() == whole and "nothing to do" not in capsys.readouterr().out
    write_jsonl(Path(jsonl), [*texts, "one more"])
    with pytest.raises(ValueError, match="was prepared with files"):
        prepare(small(tmp_path / "x", jsonl))


def test_meta_of_an_unfinished_or_damaged_folder_is_refused(tmp_path, jsonl):
    prepare(small(tmp_path / "x", jsonl))
    assert prepare_fineweb.read_meta(tmp_path / "x")["tokenizer"] == "bytes"
    assert prepare_fineweb.read_meta(tmp_path) is None
    (tmp_path / "x" / prepare_fineweb.UNFINISHED).touch()
    with pytest.raises(ValueError, match="cut short"):
        prepare_fineweb.read_meta(tmp_path / "x")
    prepare(small(tmp_path / "x", jsonl))
    for content in ("{broken", "[]", "null", ""):
        (tmp_path / "x" / "meta.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="damaged"):
            prepare_fineweb.read_meta(tmp_path / "x")


def test_shards_of_another_run_are_refused(tmp_path, jsonl):
    (tmp_path / "x").mkdir()
    write_shard(tmp_path / "x/x_train_000007.bin", np.arange(9))
    with pytest.raises(ValueError, match="x_train_000007.bin, which is not of this run"):
        prepare(small(tmp_path / "x", jsonl))


# ---- the command line


def test_command_line(tmp_path, jsonl):
    script = Path(prepare_fineweb.__file__)
    command = [sys.executable, script, "--source=files", f"--files={jsonl}", "--out_dir=data/x", "--val_fraction=0.2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "data/x" in done.stdout.splitlines()[-1], done.stderr
    assert load(tmp_path / "data/x")[0]["documents"] == 40
    done = subprocess.run([*command, "--seed=5"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"val_fraction": 0.0},
        {"val_fraction": 1.0},
        {"retrieval_fraction": -0.1},
        {"window": 1},
        {"shard_tokens": 256},
        {"seed": -1},
        {"source": "files"},
        {"files": ("a.txt",)},
        {"out_dir": "data/interval_x"},
    ],
)
def test_bad_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"^{'files' if 'source' in options else next(iter(options))} is .*: expected"):
        PrepareConfig(**options)

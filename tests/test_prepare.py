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

import data as shards
import needles as exercises
import prepare_fineweb
from data import EOT, get_tokenizer
from prepare_fineweb import Place, PrepareConfig, prepare, read_shard, write_shard

EOT_ID = 256  # of the byte tokenizer
WINDOW = 256


def load(folder: Path) -> tuple[dict, np.ndarray, np.ndarray]:
    """meta.json, the training tokens and the validation tokens of a prepared folder."""
    parts = [
        [read_shard(path) for path in sorted(folder.glob(f"*{part}_*.bin"))]
        for part in ("train", "val")
    ]
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
    options = {
        "source": "files",
        "files": files,
        "out_dir": str(folder),
        "val_fraction": 0.2,
        "workers": 1,
    } | options
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
    assert (
        len(text) > 1_000_000
        and "The power operator binds more tightly than unary operators" in text
    )
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
    expected = {
        "source": "pydocs",
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot": 256,
        "window": None,
    }
    expected |= {"train_tokens": len(train), "val_tokens": len(val)}
    assert (
        meta | expected == meta
        and meta["settings"]["seed"] == 1
        and meta["settings"]["retrieval_fraction"] == 0
    )
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in pydocs.glob("*.bin")
    }
    assert {name: shard["sha256"] for name, shard in meta["shards"].items()} == digests


def test_a_python_without_topics_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="ships without pydoc_data.topics"):
        prepare(PrepareConfig(source="pydocs", out_dir=str(tmp_path / "x")))
    assert list(tmp_path.iterdir()) == []


# ---- files


def test_txt_jsonl_and_parquet_agree(tmp_path, texts, jsonl):
    from datasets import Dataset

    Dataset.from_dict({"text": texts, "other": list(range(40))}).to_parquet(
        str(tmp_path / "texts.parquet")
    )
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
        file = Path(
            os.environ["NANOBAM_TEST_DATA"], "fineweb", f"fineweb_first300_partial.{suffix}"
        )
        prepare(small(tmp_path / suffix, str(file)))
        shards.append(load(tmp_path / suffix))
    assert shards[0][0]["documents"] == 300
    assert np.array_equal(shards[0][1], shards[1][1]) and np.array_equal(shards[0][2], shards[1][2])


def test_hard_documents(tmp_path, texts):
    """Blank, the marker as text, a lone surrogate, a pair, a long run of one character, line separators, no newline."""
    hard = [
        "",
        " \n ",
        f"one {EOT} two",
        "lone \ud800.",
        "\ud83d\ude00",
        "a" * 50_000,
        "\u2028 \x85 \x0b z\r\n",
    ]
    path = write_jsonl(tmp_path / "a.jsonl", hard + texts)
    Path(path).write_text(
        "\n\n" + Path(path).read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8"
    )
    prepare(small(tmp_path / "x", path))
    meta, train, val = load(tmp_path / "x")
    found = documents(train) + documents(val)
    kept = [hard[2], "lone \ufffd.", "\U0001f600", *hard[5:]]
    assert sorted(found) == sorted(kept + texts) and meta["documents"] == len(found)


def test_parquet_without_rows_and_a_mark_of_the_encoding(tmp_path, texts):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "none.parquet"
    )
    Path(lines := write_jsonl(tmp_path / "a.jsonl", texts)).write_bytes(
        b"\xef\xbb\xbf" + Path(lines).read_bytes()
    )
    prepare(small(tmp_path / "x", str(tmp_path / "none.parquet"), lines))
    assert load(tmp_path / "x")[0]["documents"] == 40


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
    assert all(a[-1] == b[0] for a, b in zip(shards, shards[1:], strict=False)), (
        "the last target is in both"
    )
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Two cats sat, two Cats ran: über 12 big-endian words. ",
            "cats words big endian sat ran two",
        ),
        ("Привет, большая книга! Это the книга. ", "прив боль книг это the"),
        ("天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。", "天地 宇宙 日月 辰宿"),
        ("THE SECRET BEACON, A NUMBER OR TWO IMPLEMENTATIONS. ", "the beacon or two implemen"),
        ("हिन्दी भाषा में एक वाक्य। ", "हि भा मे एक वा"),
    ],
)
def test_exercises_in_any_script(text, expected, enc):
    """English words as they are, others by their first 8 bytes, and every window is filled."""
    assert exercises.name_words(text) == sorted(expected.split())
    for ids in exercises.exercise_windows(np.random.default_rng(0), 50, 200, enc, text * 60):
        assert len(ids) == 200 and ids[0] == enc.eot_token


def test_exercises_of_a_text_without_words(tmp_path, jsonl):
    numbers = write_jsonl(tmp_path / "numbers.jsonl", [f"{i} 3.14\n" * 100 for i in range(40)])
    with pytest.raises(ValueError, match="the text has no words, of which exercises make names"):
        prepare(small(tmp_path / "x", numbers, retrieval_fraction=0.3))
    assert not (tmp_path / "x").exists()


def test_seed_changes_the_shards(tmp_path, jsonl):
    digests = []
    for name, seed in [("x", 1), ("y/x", 1), ("z/x", 2)]:
        prepare(small(tmp_path / name, jsonl, seed=seed, retrieval_fraction=0.3))
        digests.append(load(tmp_path / name)[0]["shards"])
    assert (
        digests[0] == digests[1]
        and digests[0]["x_val_000000.bin"] != digests[2]["x_val_000000.bin"]
    )


def test_gpt2(tmp_path, jsonl, texts, monkeypatch):
    if "NANOBAM_TEST_DATA" not in os.environ:
        pytest.skip("NANOBAM_TEST_DATA is not set: no GPT-2 files")
    monkeypatch.setenv(
        "TIKTOKEN_CACHE_DIR", str(Path(os.environ["NANOBAM_TEST_DATA"], "gpt2_bpe/tiktoken_cache"))
    )
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
    with pytest.raises(
        ValueError, match=r"prepared with window=256 \(expected 128\), seed=1 \(expected 2\)"
    ):
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
    good = json.loads((tmp_path / "x" / "meta.json").read_text(encoding="utf-8"))
    shard = next(iter(good["shards"].values()))
    wrong = [good | {key: "much"} for key in ("window", "vocab_size", "settings", "shards")]
    wrong += [
        good | {"tokenizer": 5},
        {k: good[k] for k in good if k != "window"},
        good | {"shards": {"a": 5}},
    ]
    wrong += [
        good | {"shards": {"a": shard | {key: "x" * (key != "sha256")}}}
        for key in ("tokens", "next")
    ]
    for content in ("{broken", "[]", "[1]", "null", "", *map(json.dumps, wrong)):
        (tmp_path / "x" / "meta.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="damaged"):
            prepare_fineweb.read_meta(tmp_path / "x")
        (tmp_path / "x" / prepare_fineweb.UNFINISHED).write_text(content, encoding="utf-8")
        prepare(
            small(tmp_path / "x", jsonl)
        )  # what is damaged of an unfinished folder is made again
    (tmp_path / "x" / "meta.json").write_text(
        '{"tokenizer": "bytes", "window": null}', encoding="utf-8"
    )
    with pytest.raises(ValueError, match="meta.json has no vocab_size"):
        prepare_fineweb.verify(tmp_path / "x")


def test_shards_of_another_run_are_refused(tmp_path, jsonl):
    (tmp_path / "x").mkdir()
    write_shard(tmp_path / "x/x_train_000007.bin", np.arange(9))
    with pytest.raises(ValueError, match="x_train_000007.bin, which is not of this run"):
        prepare(small(tmp_path / "x", jsonl))


# ---- the hub: a folder is read by the same code


def hub_options(data_set: Path, folder: Path, **options) -> list[str]:
    """Command-line words for a data set in a folder, one worker and byte tokens if nothing else is said."""
    options = {
        "dataset": data_set,
        "subset": "",
        "tokenizer": "bytes",
        "workers": 1,
        "shard_tokens": 4000,
    } | options
    return [f"--{key}={value}" for key, value in (options | {"out_dir": folder}).items()]


def prepare_hub(data_set: Path, folder: Path, **options) -> dict[str, bytes]:
    """Prepare in this process; returns every file of the folder."""
    prepare(config_of(data_set, folder, **options))
    return contents(folder)


def config_of(data_set: Path, folder: Path, **options) -> PrepareConfig:
    (config,), _ = configurator.parse(
        [PrepareConfig], hub_options(data_set, folder, **options), None
    )
    return config


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def joined(folder: Path) -> list[int]:
    """All tokens in the order of the shards."""
    _, train, val = load(folder)
    return [*val.tolist(), *train.tolist()]


def stream_of(texts: list[str], enc) -> list[int]:
    """The stream as it must be, by tiktoken alone."""
    return [token for text in texts for token in (enc.eot_token, *enc.encode_ordinary(text))]


@pytest.fixture
def data_set(tmp_path, texts) -> Path:
    """40 documents, 35 kB, in two files of a folder."""
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts[:25])
    write_jsonl(folder / "b.jsonl", ["", *texts[25:], None])
    return folder


@pytest.fixture
def fineweb(tmp_path, monkeypatch) -> Path:
    """Real FineWeb, 320 documents, laid out as on the hub: subsets that a README names, in parquet files."""
    if "NANOBAM_TEST_DATA" not in os.environ:
        pytest.skip("NANOBAM_TEST_DATA is not set: no FineWeb samples")
    data = Path(os.environ["NANOBAM_TEST_DATA"])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(data / "gpt2_bpe" / "tiktoken_cache"))
    folder = tmp_path / "fineweb"
    subsets = [("default", "data/*"), ("sample-10BT", "sample/10BT/*"), ("lines", "lines/*")]
    for name, source in [
        ("data/0.parquet", "full_schema_20.parquet"),
        ("sample/10BT/000_00000.parquet", "first300_partial.parquet"),
        ("sample/10BT/001_00000.parquet", "full_schema_20.parquet"),
        ("lines/0.jsonl", "first300_partial.jsonl"),
        ("lines/1.jsonl", "full_schema_20.jsonl"),
    ]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data / "fineweb" / f"fineweb_{source}", folder / name)
    listed = [
        f"- {{config_name: {n}, data_files: [{{split: train, path: {p}}}]}}\n" for n, p in subsets
    ]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(listed)}---\n", encoding="utf-8")
    return folder


def test_the_default_is_fineweb():
    config = PrepareConfig()
    assert (config.dataset, config.subset, config.split) == (
        "HuggingFaceFW/fineweb",
        "sample-10BT",
        "train",
    )
    assert (config.tokenizer, config.out_dir, config.shard_tokens) == (
        "gpt2",
        "data/fineweb10B",
        100_000_000,
    )
    assert config.workers == os.cpu_count() and config.max_tokens == 0


def test_fineweb_from_parquet_and_jsonl(tmp_path, fineweb):
    common = {"tokenizer": "gpt2", "shard_tokens": 50_000}
    parquet = prepare_hub(fineweb, tmp_path / "a/x", subset="sample-10BT", **common)
    lines = prepare_hub(fineweb, tmp_path / "b/x", subset="lines", **common)
    assert parquet.keys() == lines.keys() and all(
        parquet[n] == lines[n] for n in parquet if n != "meta.json"
    )
    rows = [
        line
        for name in "01"
        for line in (fineweb / f"lines/{name}.jsonl").read_bytes().splitlines()
    ]
    enc = get_tokenizer("gpt2")
    assert joined(tmp_path / "a/x") == stream_of([json.loads(row)["text"] for row in rows], enc)
    meta, train, val = load(tmp_path / "a/x")
    assert meta["documents"] == 320 and train[0] == val[0] == enc.eot_token, (
        "a document is in both parts"
    )
    assert 0.045 < len(val) / (len(train) + len(val)) <= 0.05
    sizes = [shard["tokens"] for shard in meta["shards"].values()]
    assert sizes[1:-1] == [50_000] * 4 and 0 < sizes[-1] <= 50_000


def test_validation_is_the_first_shard_of_many(tmp_path, data_set, texts):
    prepare_hub(data_set, tmp_path / "x", shard_tokens=1000)
    _, train, val = load(tmp_path / "x")
    assert 500 < len(val) <= 1000 and train[0] == EOT_ID
    assert joined(tmp_path / "x") == stream_of(texts, get_tokenizer("bytes"))


@pytest.mark.parametrize("max_tokens", [3000, 4000, 10_000, 10**6])
def test_max_tokens(tmp_path, data_set, texts, max_tokens):
    prepare_hub(data_set, tmp_path / "x", max_tokens=max_tokens)
    whole = stream_of(texts, get_tokenizer("bytes"))
    assert joined(tmp_path / "x") == whole[:max_tokens]
    _, train, val = load(tmp_path / "x")
    assert 0.025 < len(val) / len(whole[:max_tokens]) <= 0.05


def test_cut_stream_from_every_place():
    """Every piece but the last is full, and from the place behind any of them the same pieces follow."""
    rng = np.random.default_rng(0)
    lengths = [0, 3, 40, 7, 0, 7, 120, 5, 10, 4, 0]
    documents = [
        (Place(0, row), rng.integers(0, 99, n).astype(np.uint16)) for row, n in enumerate(lengths)
    ]
    whole = np.concatenate([ids for _, ids in documents])
    for val_size, left in itertools.product((0, 3, 9, 50, 60), (1, 60, 163, 10**9)):
        cut = prepare_fineweb.cut_stream
        pieces = [
            (tokens.copy(), after)
            for tokens, after in cut(documents, Place(0, 0), val_size, 20, left)
        ]
        assert np.array_equal(np.concatenate([tokens for tokens, _ in pieces]), whole[:left])
        assert [len(tokens) for tokens, _ in pieces[bool(val_size) : -1]] == [20] * (
            len(pieces) - 1 - bool(val_size)
        )
        assert not val_size or val_size / 2 <= len(pieces[0][0]) <= val_size or len(pieces) == 1
        done = 0
        for i, (tokens, after) in enumerate(pieces[:-1], start=1):
            done += len(tokens)
            rest = list(cut(documents[after.row :], after, 0, 20, left - done))
            assert [place for _, place in rest] == [place for _, place in pieces[i:]]


class Killed(BaseException):
    """What ends a process from outside."""


def test_killed_between_any_two_changes_of_the_disk(tmp_path, data_set, texts, monkeypatch):
    """The n-th renaming or removal of a file and all later ones do not happen; then it is started again."""
    reference = prepare_hub(data_set, tmp_path / "reference/x", shard_tokens=20_000)
    plan = prepare_fineweb.new_plan(config_of(data_set, tmp_path / "x", shard_tokens=20_000))
    monkeypatch.setattr(prepare_fineweb, "new_plan", lambda config: json.loads(json.dumps(plan)))
    parts = {"a": texts[:25], "b": ["", *texts[25:], ""]}
    monkeypatch.setattr(
        prepare_fineweb, "read_texts", lambda file, skip: iter(parts[Path(file).stem][skip:])
    )
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    real, left = {"replace": os.replace, "unlink": Path.unlink}, [0]

    def dying(name):
        def change(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real[name](*args, **kwargs)

        return change

    for moment in itertools.count():
        folder = tmp_path / str(moment) / "x"
        left[0] = moment
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying("replace"))
            patch.setattr(Path, "unlink", dying("unlink"))
            try:
                prepare_hub(data_set, folder, shard_tokens=20_000)
                break
            except Killed:
                assert (
                    not (folder / "meta.json").exists()
                    or (folder / prepare_fineweb.UNFINISHED).exists()
                )
        assert prepare_hub(data_set, folder, shard_tokens=20_000) == reference, (
            f"killed at moment {moment}"
        )
    assert moment > 30


def test_damaged_and_lost_shards_are_made_again_and_no_other(tmp_path, data_set, monkeypatch):
    whole = prepare_hub(data_set, tmp_path / "x")
    (tmp_path / "x/x_train_000004.bin").unlink()
    (tmp_path / "x/x_train_000006.bin").write_bytes(b"half")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "x").iterdir()}
    monkeypatch.delattr("datasets.load_dataset_builder")  # the list of files is known
    assert prepare_hub(data_set, tmp_path / "x") == whole
    kept = ["x_val_000000.bin", *(f"x_train_00000{i}.bin" for i in (1, 2, 3))]
    assert all((tmp_path / "x" / name).stat().st_mtime_ns == times[name] for name in kept)


def test_a_repair_that_was_killed_is_not_taken_for_finished(tmp_path, data_set, monkeypatch):
    whole = prepare_hub(data_set, tmp_path / "x")
    (tmp_path / "x/x_train_000002.bin").unlink()
    (tmp_path / "x/x_train_000004.bin").unlink()
    write, count = prepare_fineweb.write_shard, itertools.count()

    def write_shard(path, tokens):
        if next(count) == 1:
            raise Killed
        return write(path, tokens)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(prepare_fineweb, "write_shard", write_shard)
        prepare_hub(data_set, tmp_path / "x")
    assert prepare_hub(data_set, tmp_path / "x") == whole


def test_an_unfinished_data_set_is_not_mixed_with_another(tmp_path, data_set, jsonl, monkeypatch):
    monkeypatch.setattr(prepare_fineweb, "finish", lambda *args: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        prepare_hub(data_set, tmp_path / "x")
    with pytest.raises(ValueError, match=r"was prepared with max_tokens=0 \(expected 5000\)"):
        prepare_hub(data_set, tmp_path / "x", max_tokens=5000)
    with pytest.raises(ValueError, match="was prepared with source=hub"):
        prepare(small(tmp_path / "x", jsonl))


def test_a_broken_connection_is_opened_again_where_it_broke(monkeypatch):
    pauses, faults = [], [ConnectionError("reset"), TimeoutError(), RuntimeError("503")]

    def read_texts(file, skip):
        for i in range(skip, 10):
            if i % 4 == 3 and faults and file == "hf://b":
                raise faults.pop()
            yield f"{file} {i}"

    monkeypatch.setattr(prepare_fineweb, "read_texts", read_texts)
    monkeypatch.setattr(time, "sleep", pauses.append)
    found = list(prepare_fineweb.read_documents(["hf://a", "hf://b"], Place(0, 2)))
    assert [text for _, text in found] == [
        *(f"hf://a {i}" for i in range(2, 10)),
        *(f"hf://b {i}" for i in range(10)),
    ]
    assert [place for place, _ in found] == [Place(0, i) for i in range(2, 10)] + [
        Place(1, i) for i in range(10)
    ]
    assert pauses == [5, 20, 80]


def test_a_connection_that_stays_broken_is_told_with_what_is_safe(
    tmp_path, data_set, monkeypatch, capsys
):
    whole = prepare_hub(data_set, tmp_path / "reference/x", max_tokens=20_000)
    read, plan, broken = prepare_fineweb.read_texts, prepare_fineweb.new_plan, [True]

    def read_texts(file, skip):
        for i, text in enumerate(read(file.removeprefix("hf:/"), 0)):
            if broken and i == 20:
                raise ConnectionError("no route\nand more")
            if i >= skip:
                yield text

    def new_plan(config):
        made = plan(config)
        return made | {"files": [f"hf:/{file}" for file in made["files"]]}

    monkeypatch.setattr(prepare_fineweb, "read_texts", read_texts)
    monkeypatch.setattr(prepare_fineweb, "new_plan", new_plan)
    monkeypatch.setattr(prepare_fineweb, "BATCH", 4)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(
        sys, "argv", ["", *hub_options(data_set, tmp_path / "x", max_tokens=20_000)]
    )
    with pytest.raises(SystemExit) as stopped:
        prepare_fineweb.main()
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        stopped.value.code == 2 and told.startswith("error: hf://") and told.count("no route") == 1
    )
    safe = sum(len(read_shard(path)) for path in (tmp_path / "x").glob("*.bin"))
    assert (
        f"cannot be read at row 20: no route; 3 shards, {safe:,} tokens, are safe in {tmp_path / 'x'}"
        in told
    )
    broken.clear()
    prepare_fineweb.main()
    assert all(
        contents(tmp_path / "x")[name] == whole[name] for name in whole if name != "meta.json"
    )


def test_unusable_data_sets_are_told_and_leave_nothing(tmp_path, data_set, monkeypatch):
    (tmp_path / "body").mkdir()
    (tmp_path / "body/a.jsonl").write_text('{"body": "x"}\n', encoding="utf-8")
    (tmp_path / "blank").mkdir()
    write_jsonl(tmp_path / "blank/a.jsonl", ["", " \n"])
    (tmp_path / "table").mkdir()
    (tmp_path / "table/a.csv").write_text("text\nx\n", encoding="utf-8")
    cases = [
        (tmp_path / "absent", {}, "absent cannot be opened: "),
        (data_set, {"subset": "nope"}, "set cannot be opened: .*nope.* not found. Available"),
        (data_set, {"split": "test"}, "set has no split test, only: train"),
        (
            tmp_path / "body",
            {},
            'body/a.jsonl cannot be read at row 0: it has no strings in a column "text", only: body$',
        ),
        (tmp_path / "blank", {}, "blank has no text in its split train"),
        (tmp_path / "table", {}, "table/a.csv has an unknown suffix: expected .jsonl or .parquet"),
    ]
    for folder, options, message in cases:
        with pytest.raises(ValueError, match=message):
            prepare_hub(folder, tmp_path / "x", **options)
    monkeypatch.setattr(
        "datasets.load_dataset_builder",
        lambda *args: (_ for _ in ()).throw(ConnectionError("no net")),
    )
    with pytest.raises(ValueError, match="set cannot be opened: no net"):
        prepare_hub(data_set, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_too_little_disk_is_told_before_anything_is_written(tmp_path, data_set, jsonl, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 39_999, 39_999)
    )
    with pytest.raises(ValueError, match=r"x needs 40,000 bytes, but 39,999 are free there"):
        prepare_hub(data_set, tmp_path / "new/x", max_tokens=20_000)
    with pytest.raises(ValueError, match=r"x needs \d\d,\d\d\d bytes, but 39,999 are free there"):
        prepare(small(tmp_path / "new/x", jsonl))
    assert not (tmp_path / "new").exists()


def test_shards_of_others_are_refused_before_they_are_mixed(tmp_path, data_set):
    (tmp_path / "x").mkdir()
    for name in ("x_train_000001.bin", "x_val_000000.bin"):
        write_shard(tmp_path / "x" / name, np.arange(9))
        with pytest.raises(ValueError, match=f"{name}, which is not of this run"):
            prepare_hub(data_set, tmp_path / "x")
        (tmp_path / "x" / name).unlink()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, fineweb):
    """kill -9 of the main process, with two workers, 20 times; no worker is left behind."""
    script = Path(prepare_fineweb.__file__)
    options = {"subset": "sample-10BT", "tokenizer": "gpt2", "shard_tokens": 20_000, "workers": 2}
    reference = prepare_hub(fineweb, tmp_path / "reference/x", **options | {"workers": 1})
    rng, kills, round = random.Random(1), 0, 0
    while kills < 20 or (tmp_path / f"{round}/x").exists():
        folder = tmp_path / f"{round}/x"
        run = subprocess.Popen(
            [sys.executable, script, *hub_options(fineweb, folder, **options)],
            start_new_session=True,
        )
        if kills < 20:
            wait_for_shards(run, folder, rng.randrange(4))
            time.sleep(rng.random())
        if kills < 20 and run.poll() is None:
            run.kill()
            kills += 1
        finished = run.wait() == 0
        deadline = time.time() + 10
        while process_group_lives(run.pid):
            assert time.time() < deadline, "a worker outlives the main process"
            time.sleep(0.05)
        if finished:
            assert contents(folder) == reference
            round += 1


def wait_for_shards(run: subprocess.Popen, folder: Path, more: int) -> None:
    """Return when there are so many more shards than now, or the process has ended."""
    there = len(list(folder.glob("*.bin")))
    while run.poll() is None and len(list(folder.glob("*.bin"))) < there + more:
        time.sleep(0.01)


def process_group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# ---- verifying a folder


def test_check_finds_every_kind_of_damage(tmp_path, jsonl, capsys):
    folder = tmp_path / "x"
    prepare(small(folder, jsonl, shard_tokens=10_000))
    good = contents(folder)
    prepare_fineweb.verify(folder)
    assert capsys.readouterr().out.splitlines()[-1] == f"{folder} is whole"
    name = "x_train_000002.bin"
    shard = good[name]
    cases = {
        b"": "is not a token shard",
        shard[:-2]: "is damaged: its header says",
        shard + b"\0\0": "is longer than the 9,985 tokens of its header",
        shard[:2000]
        + b"\x01\x01"
        + shard[2002:]: "has the token id 257, but the vocabulary has only 257",
        shard[:2000] + b"\x01\0" + shard[2002:]: "does not have the sha256 of meta.json",
    }
    for data, message in cases.items():
        (folder / name).write_bytes(data)
        with pytest.raises(
            ValueError, match=f"^1 of {len(good) - 1} shards are bad: .*{name} {message}"
        ):
            prepare_fineweb.verify(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name}"):
        prepare_fineweb.verify(folder)
    (folder / name).write_bytes(shard)
    write_shard(folder / "y_val_000000.bin", np.arange(9))
    with pytest.raises(ValueError, match="y_val_000000.bin is not in meta.json"):
        prepare_fineweb.verify(folder)


def test_check_of_shards_without_meta_assumes_gpt2(tmp_path, capsys):
    write_shard(tmp_path / "others_train_000001.bin", np.array([50256, 0]))
    prepare_fineweb.verify(tmp_path)
    assert "without meta.json, GPT-2's 50,257 ids are assumed" in capsys.readouterr().out
    write_shard(tmp_path / "others_val_000000.bin", np.array([50257]))
    with pytest.raises(
        ValueError, match="1 of 2 shards are bad: .*others_val_000000.bin has the token id 50257"
    ):
        prepare_fineweb.verify(tmp_path)
    with pytest.raises(ValueError, match="absent holds no shards"):
        prepare_fineweb.verify(tmp_path / "absent")


# ---- the command line


def test_one_writer_a_folder(tmp_path, jsonl):
    """A second one is told; a first one that was killed is no hindrance."""
    script = Path(prepare_fineweb.__file__)
    code = "import data, sys; data.lock_folder(data.Path(sys.argv[1])); print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "x"],
        cwd=script.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline().strip() == b"held"
    options = [
        "--source=files",
        f"--files={jsonl}",
        f"--out_dir={tmp_path / 'x'}",
        "--val_fraction=0.2",
    ]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        f"error: {tmp_path / 'x'} is being written by another"
    )
    assert done.stderr.count("\n") == 1 and [path.name for path in (tmp_path / "x").iterdir()] == [
        ".lock"
    ]
    holder.kill()
    holder.communicate()
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(contents(tmp_path / "x")) == {"meta.json", "x_train_000001.bin", "x_val_000000.bin"}


@pytest.mark.skipif(os.name != "posix", reason="Windows locks in another way")
def test_a_file_system_without_locks_is_written_without(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    shards.lock_folder(tmp_path / "x")
    assert f"{tmp_path / 'x'} has no locks (No locks available)" in capsys.readouterr().out
    shards.remove_locks()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["os.fsync", "pathlib.Path.mkdir"])
def test_a_full_disk_and_a_folder_of_another_user(tmp_path, jsonl, monkeypatch, capsys, at):
    def refuse(*_, **__):
        raise (
            OSError(errno.ENOSPC, "No space left")
            if at == "os.fsync"
            else PermissionError(1, "Not permitted", "x")
        )

    options = [
        "--source=files",
        f"--files={jsonl}",
        f"--out_dir={tmp_path / 'x'}",
        "--val_fraction=0.2",
    ]
    monkeypatch.setattr(sys, "argv", ["", *options])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(at, refuse)
        prepare_fineweb.main()
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        stopped.value.code == 2
        and told.startswith("error: ")
        and ("o space left" in told or "permitted" in told)
    )
    shards.remove_locks()
    assert not (tmp_path / "x").exists(), "half of a file is left"


def test_command_line(tmp_path, jsonl):
    script = Path(prepare_fineweb.__file__)
    command = [
        sys.executable,
        script,
        "--source=files",
        f"--files={jsonl}",
        "--out_dir=data/x",
        "--val_fraction=0.2",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "data/x" in done.stdout.splitlines()[-1], done.stderr
    assert load(tmp_path / "data/x")[0]["documents"] == 40
    done = subprocess.run([*command, "--seed=5"], cwd=tmp_path, capture_output=True, text=True)
    assert (
        done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    )


def test_command_line_with_two_workers(tmp_path, fineweb):
    """Stops in the middle of a parquet file, where some versions of Arrow hang at exit; then --check."""
    options = {
        "subset": "sample-10BT",
        "tokenizer": "gpt2",
        "max_tokens": 90_000,
        "shard_tokens": 40_000,
    }
    script, done = Path(prepare_fineweb.__file__), None
    for words in (hub_options(fineweb, "data/x", workers=2, **options), ["--check", "data/x"]):
        done = subprocess.run(
            [sys.executable, script, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "data/x is whole"
    assert contents(tmp_path / "data/x") == prepare_hub(fineweb, tmp_path / "one/x", **options)
    (tmp_path / "data/x/x_val_000000.bin").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, script, "--check=data/x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: 1 of 4 shards are bad: data/x/x_val_000000.bin is not"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"val_fraction": 0.0},
        {"val_fraction": 1.0},
        {"retrieval_fraction": -0.1},
        {"window": 1},
        {"shard_tokens": 256},
        {"seed": -1},
        {"workers": -1},
        {"max_tokens": 5},
        {"shard_tokens": 2**31},
        {"source": "files"},
        {"files": ("a.txt",)},
        {"out_dir": "data/interval_x"},
        {"retrieval_fraction": 0.3, "source": "hub"},
        {"max_tokens": -1, "source": "hub"},
    ],
)
def test_bad_settings_are_refused(options):
    field = next(iter(options)).replace("source", "files")
    with pytest.raises(ValueError, match=f"^{field} is .*: expected"):
        PrepareConfig(**{"source": "pydocs"} | options)

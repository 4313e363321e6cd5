"""study.py: which trainings and evaluations, at which rate, what is left of them, and the tables.

The scripts are faked."""

import configurator

from dataclasses import asdict

import pytest
from conftest import make_model

import study as S
from eval_downstream import DownstreamConfig
from eval_passkey import PasskeyConfig
from eval_ruler import RulerConfig
from runs import append_record, finished, read_records, save_checkpoint
from train import TrainConfig

DIVERGING = ("rope_x0.33_s1", "alibi_x1_s1", "alibi_x0.33_s1")
BEST = {"nope": 0.33}  # elsewhere 1
EVALUATIONS = {"passkey": PasskeyConfig, "ruler": RulerConfig, "downstream": DownstreamConfig}
PLAIN = {"--seeds=1,2,3", "--depths=20", "--filler=passkey", "--wording=passkey"}
PLAIN |= {"--digits=5", "--window_attention=0", "--set="}
# the longest text, in training lengths, in which a key is found; elsewhere 8
FOUND = {"nope": 2, "ggd_ssmax": 64, "content": 64}


@pytest.fixture
def scripts(monkeypatch):
    """In place of the scripts: a training leaves a checkpoint and a log, an evaluation records."""
    calls = []

    def call(cfg, script, *words):
        calls.append((script, *map(str, words)))
        if script != "train.py":
            run, kind = words[0], script.removeprefix("eval_").removesuffix(".py")
            (given,), _ = configurator.parse([EVALUATIONS[kind]], list(calls[-1][2:]), None)
            config = {k: v for k, v in asdict(given).items() if k not in ("lengths", "resume")}
            metric = "perplexity" if kind == "downstream" else kind
            file = run / "eval" / f"{metric}.jsonl"
            for length in given.contexts if kind == "downstream" else given.lengths:
                like = {"metric": metric, "config": config, "weights": "weights"}
                if kind == "downstream":
                    like["config"] = {"context": length}
                else:
                    like |= {"length": length}
                if kind == "ruler":
                    like |= {"task": "niah_single_1"}
                known = kind != "passkey" or given.wording != "vault"
                right = known and length <= 256 * FOUND.get(run.name.split("_x")[0], 8)
                if not (given.resume and finished(file, like)):
                    append_record(file, like | {"correct": 60 * right, "n": 60})
            return 0
        model, training = S.parse([word for word in words if word != "--resume"])
        folder = S.Path(training.out_dir)
        if folder.name in DIVERGING:
            return S.DIVERGED
        variant, rate = folder.name.split("_x")[0], float(folder.name.split("_x")[1].split("_s")[0])
        loss = abs(rate - BEST.get(variant, 1.0)) + 1
        vals = {name: 1.0 for name in ("val", "val_1x", "val_2x", "val_4x", "seconds")}
        for record in ({"step": 1, "loss": 9.0}, {"step": training.max_steps, "loss": loss} | vals):
            append_record(folder / "log.jsonl", record)
        state = {"step": training.max_steps, "commit": "c", "model": {}}
        state |= {"train_config": asdict(training), "model_config": asdict(model)}
        save_checkpoint(folder / "last.pt", state)
        return 0

    monkeypatch.setattr(S, "call", call)
    model = make_model("ggd", True, theta_beta=(0.5, -0.5, -1.0, 0.0), block_size=256)
    monkeypatch.setattr(S, "load_model", lambda run: (model, run.name))
    monkeypatch.setattr(S, "fingerprint", lambda model: "weights")
    return calls


def config(tmp_path, **changes):
    path = tmp_path / "config.py"
    path.write_text("n_layer = 3\nn_head = 4\nn_embd = 16\nmax_steps = 5\n")
    folders = {"out_dir": str(tmp_path / "out"), "records": str(tmp_path / "records.jsonl")}
    return S.StudyConfig(config=str(path), **folders, **changes)


def trainings(calls):
    words = [word for script, *words in calls if script == "train.py" for word in words]
    return [S.Path(word.split("=")[1]).name for word in words if word.startswith("--out_dir")]


def test_every_encoding_takes_its_best_rate_to_the_other_seeds(tmp_path, scripts):
    cfg = config(tmp_path, variants=("nope", "rope_ssmax"), seeds=(7, 2))
    S.study(cfg, TrainConfig(max_steps=5))
    first = [f"{v}_x{rate}_s7" for v in ("nope", "rope_ssmax") for rate in ("1", "0.33")]
    assert trainings(scripts) == [*first, "nope_x0.33_s2", "rope_ssmax_x1_s2"]
    found = read_records(S.Path(cfg.records))
    chosen = {
        (r["variant"], r["rate"], r["seed"]): r["chosen"]
        for r in found
        if r["metric"] == "training"
    }
    assert len(chosen) == 6 and sum(chosen.values()) == 4 and chosen["nope", 0.33, 2]
    ruler = [words[0] for script, *words in scripts if script == "eval_ruler.py"]
    assert len(ruler) == 2 and not any("_s2" in run for run in ruler), (
        "RULER with the first seed alone"
    )
    tests = {(r["variant"], r["rate"], r["seed"]) for r in found if r["metric"] == "passkey"}
    assert tests == {job for job, best in chosen.items() if best}


def test_variants_take_the_rate_of_their_encoding_and_their_number_of_seeds(tmp_path, scripts):
    variants = ("mu", "nope", "ggd_ssmax", "nope_virtual", "nope_ssmax")
    cfg = config(tmp_path, variants=variants, seeds=(4, 5, 6, 7))
    S.study(cfg, TrainConfig(max_steps=5))
    done = trainings(scripts)
    assert [name for name in done if name.startswith("mu")] == ["mu_x1_s4"]
    assert [name[-1] for name in done if name.startswith("nope_virtual")] == ["4", "5", "6"]
    assert [name[-1] for name in done if name.startswith("ggd_ssmax_x1")] == ["4", "5", "6", "7"]


def test_a_rate_that_diverges_is_not_chosen_and_an_encoding_that_always_does_is_left_out(
    tmp_path, scripts
):
    cfg = config(tmp_path, variants=("rope", "alibi"), seeds=(1,))
    S.study(cfg, TrainConfig(max_steps=5))
    found = read_records(S.Path(cfg.records))
    assert {(r["variant"], r["rate"]) for r in found} == {("rope", 1.0)}


def asked(scripts, variant, *words):
    """The lengths of the passkey test that were asked with just these options."""
    free = ("--lengths", "--resume", "--seeds", "--depths")
    lengths = []
    for script, run, *options in scripts:
        own = script == "eval_passkey.py" and f"/{variant}_x" in run
        if own and [o for o in options if o not in PLAIN and not o.startswith(free)] == list(words):
            lengths += [int(n) // 256 for n in options[0].split("=")[1].split(",")]
    return sorted(set(lengths))


def test_longer_texts_are_asked_only_where_keys_are_found(tmp_path, scripts):
    cfg = config(tmp_path, variants=("nope", "rope", "ggd_ssmax"), seeds=(2,))
    S.study(cfg, TrainConfig(max_steps=5))
    assert asked(scripts, "nope") == [1, 2, 4]
    assert (
        asked(scripts, "rope")
        == asked(scripts, "rope", "--window_attention=256")
        == [1, 2, 4, 8, 16]
    )
    assert asked(scripts, "ggd_ssmax") == [1, 2, 4, 8, 16, 64, 256, 500, 1000, 4096]
    assert asked(scripts, "nope", "--wording=vault") == [1, 4]
    far = "--set=0.1.theta_beta=0,0.2.theta_beta=0,1.1.theta_beta=0,1.2.theta_beta=0"
    assert asked(scripts, "ggd_ssmax", far) == [16, 64]


def test_the_longest_texts_are_for_the_first_seed_of_an_encoding(tmp_path, scripts):
    cfg = config(tmp_path, variants=("ggd_ssmax", "content"), seeds=(2, 3))
    S.study(cfg, TrainConfig(max_steps=5))
    assert asked(scripts, "content")[-2:] == [256, 500]
    scripts[:] = [c for c in scripts if c[1].endswith("ggd_ssmax_x1_s3")]
    assert asked(scripts, "ggd_ssmax") == [1, 2, 4, 8, 16, 64, 256, 500]


def test_a_stopped_row_is_continued_and_is_not_misled_by_other_tests(tmp_path, scripts):
    """The held-out frame, of which nothing is found, is the last record at 16 times."""
    cfg = config(tmp_path, variants=("ggd_ssmax",), seeds=(2,), rates=(1.0,))
    S.study(cfg, TrainConfig(max_steps=5))
    first, found = [c for c in scripts if c[0] != "train.py"], read_records(S.Path(cfg.records))
    scripts.clear()
    S.Path(cfg.records).unlink()
    S.study(cfg, TrainConfig(max_steps=5))
    assert scripts == first and asked(scripts, "ggd_ssmax")[-1] == 4096
    assert read_records(S.Path(cfg.records)) == found


def test_records_that_the_protocol_does_not_ask_for_are_not_taken(tmp_path, scripts):
    """Other depths, seeds, digits, lengths, tasks, windows, or of another checkpoint; nor do they
    decide about longer texts. They are newer than the protocol's."""
    cfg = config(tmp_path, variants=("ggd_ssmax",), seeds=(2,), rates=(1.0,))
    S.study(cfg, TrainConfig(max_steps=5))
    before = S.Path(cfg.records).read_text()
    calls = list(scripts)
    folder = S.Job("ggd_ssmax", 1.0, 2).folder(cfg) / "eval"
    (first, *_), (ruler, *_) = (read_records(folder / f"{m}.jsonl") for m in ("passkey", "ruler"))
    for r in read_records(folder / "passkey.jsonl"):
        for change in ({"depths": 5}, {"seeds": [4]}, {"digits": 7}, {"window_attention": 64}):
            none = {
                "correct": 0,
                "config": r["config"]
                | change
                | ({"depths": 7} if r["config"]["depths"] == 5 else {}),
            }
            append_record(folder / "passkey.jsonl", r | none)
        if not r["config"]["set"]:
            append_record(folder / "passkey.jsonl", r | {"correct": 0, "weights": "others"})
    append_record(folder / "passkey.jsonl", first | {"length": 300})
    append_record(folder / "ruler.jsonl", ruler | {"task": "niah_multikey_1"})
    append_record(
        folder / "perplexity.jsonl", first | {"metric": "perplexity", "config": {"context": 99}}
    )
    append_record(folder / "priors.jsonl", first | {"metric": "priors"})
    scripts.clear()
    S.Path(cfg.records).unlink()
    S.study(cfg, TrainConfig(max_steps=5))
    assert S.Path(cfg.records).read_text() == before
    assert scripts == [call for call in calls if call[0] != "train.py"]


def test_a_row_in_the_records_is_not_done_again_even_without_its_runs(tmp_path, scripts):
    """On another machine, too: the records say which rate was chosen."""
    variants = ("nope", "ggd_ssmax", "mu")
    cfg = config(tmp_path, variants=variants, seeds=(1,))
    S.study(cfg, TrainConfig(max_steps=5))
    before = S.Path(cfg.records).read_text()
    scripts.clear()
    S.shutil.rmtree(cfg.out_dir)
    S.study(cfg, TrainConfig(max_steps=5))
    assert not scripts and S.Path(cfg.records).read_text() == before
    cfg.seeds = (1, 2)
    S.study(cfg, TrainConfig(max_steps=5))
    assert trainings(scripts) == ["nope_x0.33_s2", "ggd_ssmax_x1_s2"]


def test_missing_data_is_prepared_once_before_the_trainings(tmp_path, scripts, monkeypatch):
    cfg = config(tmp_path, variants=("nope", "rope"), seeds=(1,), rates=(1.0,))
    data, called = str(tmp_path / "data"), []
    monkeypatch.setattr(S, "call", lambda cfg, *words: called.append(words) or S.DIVERGED)
    S.study(cfg, TrainConfig(max_steps=5, data=data, prepare="--source=pydocs --window=256"))
    words = ("--source=pydocs", "--window=256", f"--out_dir={data}")
    assert called[0] == ("prepare_fineweb.py", *words) and len(called) == 3


def test_a_row_whose_evaluation_stopped_is_not_in_the_records(tmp_path, scripts, monkeypatch):
    cfg, whole = config(tmp_path, variants=("nope", "rope"), seeds=(1,)), S.evaluate

    def stop(cfg, job):
        if job.variant == "rope":
            raise SystemExit(2)
        return whole(cfg, job)

    monkeypatch.setattr(S, "evaluate", stop)
    with pytest.raises(SystemExit):
        S.study(cfg, TrainConfig(max_steps=5))
    assert {r["variant"] for r in read_records(S.Path(cfg.records))} == {"nope"}


def test_what_is_left_of_a_training(tmp_path, scripts, capsys):
    """Finished: kept. Stopped: resumed. No checkpoint, or the log's end lost: begun again. Other
    options: refused."""
    cfg, base, job = config(tmp_path), TrainConfig(max_steps=5), S.Job("nope", 1.0, 1)
    folder = job.folder(cfg)
    S.train(cfg, base, job)
    S.train(cfg, base, job)
    assert len(scripts) == 1
    saved = S.load_checkpoint(folder)
    save_checkpoint(folder / "last.pt", saved | {"step": 3})
    S.train(cfg, base, job)
    assert len(scripts) == 2 and scripts[1][-1] == "--resume"
    (folder / "last.pt").rename(folder / "best.pt")
    S.train(cfg, base, job)
    assert len(scripts) == 3 and scripts[2][-1] != "--resume" and not (folder / "best.pt").exists()
    (folder / "log.jsonl").write_text('{"step": 4, "loss": 1.0}\n')
    S.train(cfg, base, job)
    assert len(scripts) == 4 and scripts[3][-1] != "--resume"
    save_checkpoint(
        folder / "last.pt", saved | {"train_config": saved["train_config"] | {"batch_size": 7}}
    )
    with pytest.raises(SystemExit):
        S.train(cfg, base, job)
    assert "holds a run of other options" in capsys.readouterr().err and len(scripts) == 4
    job = S.Job("rope_long", 1.0, 1)  # whose steps are more than the config's
    S.train(cfg, base, job)
    saved = S.load_checkpoint(job.folder(cfg))
    save_checkpoint(job.folder(cfg) / "last.pt", saved | {"step": 6})
    S.train(cfg, base, job)
    S.train(cfg, base, job)
    assert len(scripts) == 6 and scripts[5][-1] == "--resume"


def test_a_script_is_waited_for_and_its_end_is_the_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(S, "ROOT", tmp_path)
    (tmp_path / "script.py").write_text(
        "import sys; print(sys.argv[2]); sys.exit(int(sys.argv[1]))"
    )
    cfg = config(tmp_path)
    S.call(cfg, "script.py", 0, "two words")
    assert "$ python script.py 0 'two words'\ntwo words" in capfd.readouterr().out
    assert S.call(cfg, "script.py", S.DIVERGED, "") == S.DIVERGED
    for status, expected in ((130, 130), (1, 2)):
        with pytest.raises(SystemExit) as stopped:
            S.call(cfg, "script.py", status, "")
        assert stopped.value.code == expected


def test_beside_others_a_script_has_one_thread_and_writes_into_the_log(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(S, "ROOT", tmp_path)
    (tmp_path / "script.py").write_text(
        "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
    )
    cfg = config(tmp_path, workers=2)
    S.Path(cfg.out_dir).mkdir()
    S.call(cfg, "script.py")
    assert "threads" not in capfd.readouterr().out
    assert (S.Path(cfg.out_dir) / "log.txt").read_text() == "threads 1\n"


@pytest.mark.parametrize("variant", S.VARIANTS)
def test_the_options_are_those_of_train(tmp_path, variant):
    """The words make a config, and what belongs to the encoding is what the variant's name says."""
    words = S.options(config(tmp_path), TrainConfig(), S.Job(variant, 3.0, 7))
    model, train = S.parse([str(S.ROOT / "config/ggd_bam_cpu.py"), *words])
    pe, _, more = variant.removesuffix("_long").partition("_")
    expected = ("ggd", True) if variant in S.ABLATIONS else (pe, bool(more))
    assert (model.pe, model.ssmax) == expected and (model.virtual_length > 1) == (more == "virtual")
    assert model.ssmax_init == (0.12 if more == "virtual" else 0.18)
    assert train.max_steps == (6400 if variant.endswith("_long") else 3200)
    assert train.seed == 7 and train.learning_rate == train.prior_lr == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--variants=foo", "foo"),
        ("--variants=mu", "take the rate of ggd_ssmax"),
        ("--seeds=", "at least one"),
        ("--rates=1,1", "none twice"),
        ("--rates=-1", "above 0"),
        ("--workers=0", "above 0"),
        ("--config=missing.py", "missing.py"),
        ("--records=study.py/x.jsonl", "is a file where a folder is needed"),
    ],
)
def test_errors_are_one_sentence(monkeypatch, capsys, option, message):
    monkeypatch.chdir(S.ROOT)
    monkeypatch.setattr("sys.argv", ["study.py", option])
    with pytest.raises(SystemExit) as stopped:
        S.main()
    printed = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and message in printed and "\n" not in printed


# ---- tables and pictures


def training(variant, seed, loss, rate=1.0, chosen=True):
    facts = {"model_config": {"block_size": 256}, "train_config": {"tokens_per_step": 2048}}
    about = {"metric": "training", "variant": variant, "seed": seed, "loss": loss, "step": 800}
    return about | facts | {"rate": rate, "chosen": chosen}


def passkey(variant, seed, length, correct, **config):
    config = S.PASSKEY | config
    about = {"metric": "passkey", "variant": variant, "seed": seed, "length": length}
    return about | {"config": config, "training_length": 256, "correct": correct, "n": 20}


def perplexity(variant, seed, context, value):
    about = {"metric": "perplexity", "variant": variant, "seed": seed, "n": 9}
    return about | {"config": {"context": context}, "perplexity": value}


def ruler(variant, seed, length, n, correct, tokens_right):
    about = {"metric": "ruler", "task": "niah_single_1", "variant": variant, "seed": seed}
    return about | {"length": length, "n": n, "correct": correct, "tokens_right": tokens_right}


RECORDS = [
    training("ggd_ssmax", 1, 1.5),
    training("ggd_ssmax", 1, 1.8, rate=3.0, chosen=False),
    training("ggd_ssmax", 2, 1.6),
    training("rope", 1, 2.0, rate=3.0),
    training("mu", 1, 1.7),
    passkey("ggd_ssmax", 1, 256, 20),
    passkey("ggd_ssmax", 2, 256, 20),
    passkey("ggd_ssmax", 1, 4096, 20),
    passkey("ggd_ssmax", 2, 4096, 17),
    passkey("ggd_ssmax", 1, 16_384, 1),
    passkey("ggd_ssmax", 2, 16_384, 1),
    passkey("ggd_ssmax", 1, 128_000, 12),
    passkey("ggd_ssmax", 1, 4096, 10, filler="unseen"),
    passkey("ggd_ssmax", 2, 4096, 8, filler="unseen"),
    passkey("ggd_ssmax", 2, 4096, 9, set=["2.1.theta_beta=0"]),
    passkey("rope", 1, 256, 19),
    passkey("rope", 1, 1024, 0),
    passkey("rope", 1, 256, 2, window_attention=256),
    passkey("mu", 1, 256, 5),
    perplexity("ggd_ssmax", 1, 256, 4.0),
    perplexity("ggd_ssmax", 2, 256, 5.0),
    perplexity("rope", 1, 256, 4.25),
    ruler("ggd_ssmax", 1, 2048, 20, 10, 0.5),
    ruler("rope", 1, 1024, 0, 0, 0),
]


@pytest.fixture
def table(tmp_path):
    """The lines of a table of these records."""

    def make(name, records):
        (tmp_path / "study.jsonl").unlink(missing_ok=True)
        for record in records:
            append_record(tmp_path / "study.jsonl", record)
        return S.TABLES[name](S.read_study(tmp_path / "study.jsonl")).splitlines()

    return make


def test_passkey_table(table):
    """Where a ladder stopped the rest counts as 0. Where not every seed was asked, it says so."""
    assert table("passkey", RECORDS) == [
        "| encoding | seeds | 256 (1x) | 1,024 (4x) | 2,048 (8x) | 4,096 (16x) | 16,384 (64x)"
        " | 128,000 (500x) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| RoPE | 1 | 95 | 0 | 0 | 0 | 0 |  |",
        "| Local RoPE | 1 | 10 |  |  |  |  |  |",
        "| GGD-BAM, SSMax | 2 | 100 |  |  | 92 [85, 100] | 5 | 60 (1 of 2) |",
    ]


def test_other_tables_of_the_study(table):
    assert table("front", RECORDS) == [
        "| encoding | seeds | 256 (1x) | 1,024 (4x) | 4,096 (16x) | 16,384 (64x)"
        " | 128,000 (500x) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| RoPE | 1 | 95 | 0 | 0 | 0 |  |",
        "| Local RoPE | 1 | 10 |  |  |  |  |",
        "| GGD-BAM, SSMax | 2 | 100 |  | 92 [85, 100] | 5 | 60 (1 of 2) |",
    ]
    assert table("texts", RECORDS) == [
        "| encoding | seeds | unseen filler, 4,096 (16x) | far heads uniform, 4,096 (16x) |",
        "| --- | --- | --- | --- |",
        "| GGD-BAM, SSMax | 2 | 45 [40, 50] | 45 (1 of 2) |",
    ]
    assert [row.split(" |")[0] for row in table("ablations", RECORDS)[2:]] == [
        "| GGD-BAM, SSMax",
        "| GGD-BAM, SSMax, mu learned",
    ]
    assert table("ablations", RECORDS)[3].startswith("| GGD-BAM, SSMax, mu learned | 1 | 25 |  |")
    assert table("perplexity", RECORDS)[2:] == [
        "| RoPE | 1 | 4.25 |",
        "| GGD-BAM, SSMax | 2 | 4.50 [4.00, 5.00] |",
    ]
    assert table("ruler", RECORDS)[2:] == ["| GGD-BAM, SSMax | 1 | 50 / 50 |"]
    assert table("rates", RECORDS) == [
        "| encoding | x1 | x3 | chosen | seeds | loss |",
        "| --- | --- | --- | --- | --- | --- |",
        "| RoPE |  | 2.000 | x3 | 1 | 2.00 |",
        "| GGD-BAM, SSMax | 1.500 | 1.800 | x1 | 2 | 1.55 [1.50, 1.60] |",
        "| GGD-BAM, SSMax, mu learned | 1.700 |  | x1 | 1 | 1.70 |",
    ]


def test_a_pair_is_compared_in_the_seeds_that_both_have_with_as_many_keys(table):
    keys = {"ggd_ssmax": (20, 17, 5), "alibi_ssmax": (1, 17, 6, 2)}
    records = [passkey(k, i, 4096, n) for k, ns in keys.items() for i, n in enumerate(ns)]
    more = [passkey(k, 9, 4096, 5) for k in ("ggd_ssmax", "alibi_ssmax")]
    records += [more[0], more[1] | {"n": 5}]
    assert table("pairs", records)[2:] == ["| GGD-BAM, SSMax : ALiBi, SSMax | 1-1-1 |"]


def test_streaming_table_leaves_out_what_was_not_measured(table):
    records = [
        {"way": "exact", "length": 2048, "seconds": 1.234, "bytes": 5e6},
        {"way": "dense", "length": 2048, "seconds": 10.0, "bytes": 9e6},
        {"way": "exact", "length": 4096, "seconds": 2.5, "bytes": 6e6},
        {"way": "plain", "length": 4096, "error": "MemoryError"},
    ]
    assert table("streaming", [{"metric": "streaming"} | r for r in records]) == [
        "| tokens | seconds: dense | seconds: exact | MB: dense | MB: exact |",
        "| --- | --- | --- | --- | --- |",
        "| 2,048 | 10.00 | 1.23 | 9 | 5 |",
        "| 4,096 |  | 2.50 |  | 6 |",
    ]


def test_who_evaluates_twice_sees_the_newer_number(table):
    """In every table. Another seed, test or length is no second time, nor are a window of
    attention and changed parameters."""
    old = [
        passkey("ggd_ssmax", 2, 4096, 0, depths=5),
        perplexity("rope", 1, 256, 9.0),
        ruler("ggd_ssmax", 1, 2048, 20, 0, 0.0),
        passkey("mu", 1, 256, 0),
        training("rope", 1, 9.0, rate=3.0),
    ]
    for name in set(S.TABLES) - {"streaming"}:
        assert table(name, [*old, *RECORDS]) == table(name, RECORDS), name


def test_the_pictures_show_the_numbers_of_the_tables():
    axis = S.draw(RECORDS, "plain", "keys", "linear").axes[0]
    rope, _, _, full, fewer, seeds, *_ = axis.lines
    assert [rope.get_label(), full.get_label()] == ["RoPE", "GGD-BAM, SSMax"]
    assert full.get_ydata().tolist() == [100, 92.5, 5] and fewer.get_ydata().tolist() == [60]
    assert seeds.get_ydata().tolist() == [100, 100, 100, 85, 5, 5, 60]
    axis = S.draw(RECORDS, "perplexity", "perplexity", "log").axes[0]
    assert axis.lines[3].get_ydata().tolist() == [4.5]


def test_tables_go_between_their_lines_and_nothing_else_changes(tmp_path):
    for record in RECORDS:
        append_record(tmp_path / "a.jsonl", record)
    place, end = "<!-- a.jsonl: ruler -->\n", "<!-- end -->\n"
    made = S.TABLES["ruler"](RECORDS) + "\n"
    page = f"a\n{place}old\n{end}b\n{place}{end}c\n"
    assert S.fill(page, tmp_path) == f"a\n{place}{made}{end}b\n{place}{made}{end}c\n"
    for wrong, message in (
        (page.replace("ruler", "rulers"), "no table rulers"),
        (page.replace(end, "", 1), "<!-- end -->"),
        (page.replace("a.jsonl", "b.jsonl"), "b.jsonl has no records"),
    ):
        with pytest.raises(ValueError, match=message):
            S.fill(wrong, tmp_path)


@pytest.mark.parametrize("name", ["README.md", "results/README.md"])
def test_the_pages_have_what_their_records_say(name):
    """Whoever changes the records or a page calls study.py --tables."""
    text = (S.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- end -->" in text and S.fill(text, S.ROOT / "results") == text


def test_tables_writes_both_pages_and_both_pictures_or_nothing(tmp_path):
    (tmp_path / "results").mkdir()
    pages = [tmp_path / "README.md", tmp_path / "results" / "README.md"]
    for page in pages:
        page.write_text("text\n<!-- study.jsonl: passkey -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="has no records"):
        S.write_tables(tmp_path)
    assert "RoPE" not in pages[0].read_text()
    for record in RECORDS:
        append_record(tmp_path / "results" / "study.jsonl", record)
    S.write_tables(tmp_path)
    assert all("| RoPE | 1 | 95 |" in page.read_text() for page in pages)
    assert len(list((tmp_path / "results").glob("study_*.png"))) == 2

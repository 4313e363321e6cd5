"""study.py: which trainings and evaluations, at which rate, and what is left of them; the scripts are faked."""

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
EVALUATIONS = {
    "eval_passkey.py": PasskeyConfig,
    "eval_ruler.py": RulerConfig,
    "eval_downstream.py": DownstreamConfig,
}
PLAIN = {
    "--seeds=1,2,3",
    "--depths=20",
    "--filler=passkey",
    "--wording=passkey",
    "--window_attention=0",
    "--set=",
}
FOUND = {
    "nope": 2,
    "ggd_ssmax": 64,
}  # the longest text, in training lengths, in which a key is found; elsewhere 8


@pytest.fixture
def scripts(monkeypatch):
    """Stands in for the scripts: a training leaves a checkpoint and a log, an evaluation records."""
    calls = []

    def call(cfg, script, *words):
        calls.append((script, *map(str, words)))
        if script != "train.py":
            run, kind = words[0], EVALUATIONS[script]
            (given,), _ = configurator.parse([kind], list(calls[-1][2:]), None)
            config = {k: v for k, v in asdict(given).items() if k not in ("lengths", "resume")}
            file = run / "eval" / f"{'passkey' if 'passkey' in script else script}.jsonl"
            for length in getattr(given, "lengths", (1,)):
                like = {"metric": script, "length": length, "config": config, "weights": "weights"}
                known = given.wording != "vault" if "passkey" in script else True
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
    model = make_model("ggd", True, theta_beta=(0.5, -0.5, -1.0, 0.0))
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
    S.study(cfg, TrainConfig(max_steps=5), 256)
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
    tests = {
        (r["variant"], r["rate"], r["seed"]) for r in found if r["metric"] == "eval_passkey.py"
    }
    assert tests == {job for job, best in chosen.items() if best}


def test_variants_take_the_rate_of_their_encoding_and_their_number_of_seeds(tmp_path, scripts):
    S.study(config(tmp_path, variants=("mu", "nope", "ggd_ssmax", "nope_virtual", "nope_ssmax"), seeds=(4, 5, 6, 7)),
            TrainConfig(max_steps=5), 256)  # fmt: skip
    done = trainings(scripts)
    assert [name for name in done if name.startswith("mu")] == ["mu_x1_s4"]
    assert [name[-1] for name in done if name.startswith("nope_virtual")] == ["4", "5", "6"]
    assert [name[-1] for name in done if name.startswith("ggd_ssmax_x1")] == ["4", "5", "6", "7"]


def test_a_rate_that_diverges_is_not_chosen_and_an_encoding_that_always_does_is_left_out(
    tmp_path, scripts
):
    cfg = config(tmp_path, variants=("rope", "alibi"), seeds=(1,))
    S.study(cfg, TrainConfig(max_steps=5), 256)
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
    S.study(
        config(tmp_path, variants=("nope", "rope", "ggd_ssmax"), seeds=(2,)),
        TrainConfig(max_steps=5),
        256,
    )
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


def test_a_second_call_asks_the_same_and_is_not_misled_by_other_tests(tmp_path, scripts):
    """The held-out frame, of which nothing is found, is the last record at 16 times."""
    cfg = config(tmp_path, variants=("ggd_ssmax",), seeds=(2,), rates=(1.0,))
    S.study(cfg, TrainConfig(max_steps=5), 256)
    first = [c for c in scripts if c[0] != "train.py"]
    scripts.clear()
    S.study(cfg, TrainConfig(max_steps=5), 256)
    assert scripts == first and asked(scripts, "ggd_ssmax")[-1] == 4096


def test_a_second_call_trains_nothing_and_keeps_one_record_a_cell(tmp_path, scripts):
    cfg = config(tmp_path, variants=("nope",), seeds=(1,))
    S.study(cfg, TrainConfig(max_steps=5), 256)
    before = S.Path(cfg.records).read_text()
    scripts.clear()
    S.study(cfg, TrainConfig(max_steps=5), 256)
    assert not trainings(scripts) and S.Path(cfg.records).read_text() == before


def test_what_is_left_of_a_training(tmp_path, scripts, capsys):
    """Finished: kept. Stopped: resumed. No checkpoint, or one whose last log line is lost: begun again. Other options:
    refused."""
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
    pe, _, more = variant.partition("_")
    expected = (pe, bool(more)) if pe in S.PES else ("ggd", True)
    assert (model.pe, model.ssmax) == expected and (model.virtual_length > 1) == (more == "virtual")
    assert model.ssmax_init == (0.12 if more == "virtual" else 0.18)
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

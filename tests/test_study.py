"""study.py: which trainings and evaluations, at which rate, and what is left of them; the scripts are faked."""

from dataclasses import asdict

import pytest

import study as S
from checkpoint import save_checkpoint
from records import append_record, read_records
from train import TrainConfig

DIVERGING = ("rope_x0.33_s1", "rope_x3_s1", "alibi_x1_s1", "alibi_x1_s2")
BEST = {"nope": 0.33, "rope_ssmax": 3.0}  # elsewhere 1


@pytest.fixture
def scripts(monkeypatch):
    """Stands in for the scripts: a training leaves a checkpoint and a log, an evaluation a record."""
    calls = []

    def call(script, *words):
        calls.append((script, *map(str, words)))
        if script != "train.py":
            for run in (word for word in words if not isinstance(word, str)):
                record = {"metric": script, "length": 9, "config": {"words": calls[-1][-2]}, "model_config": {}}
                append_record(run / "eval" / "all.jsonl", record | {"weights": run.name})
                append_record(run / "eval" / "all.jsonl", record | {"weights": "others", "length": 8})
            return
        model, training = S.parse([word for word in words if word != "--resume"])
        folder = S.Path(training.out_dir)
        if folder.name in DIVERGING:
            return S.DIVERGED
        variant, rate = folder.name.split("_x")[0], float(folder.name.split("_x")[1].split("_s")[0])
        loss = abs(rate - BEST.get(variant, 1.0)) + 1
        vals = {name: 1.0 for name in ("val", "val_1x", "val_2x", "val_4x", "seconds")}
        steps = ({"step": 1, "loss": 9.0}, {"step": training.max_steps, "loss": loss} | vals)
        for record in steps:
            append_record(folder / "log.jsonl", record)
        state = {"step": training.max_steps, "commit": "c", "model": {}}
        state |= {"train_config": asdict(training), "model_config": asdict(model)}
        save_checkpoint(folder / "last.pt", state)

    monkeypatch.setattr(S, "call", call)
    monkeypatch.setattr(S, "load_model", lambda run: (run.name, {}))
    monkeypatch.setattr(S, "fingerprint", lambda model: model)
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
    cfg = config(tmp_path, variants=("rope_ssmax", "nope"), seeds=(1, 2))
    S.study(cfg, TrainConfig(max_steps=5), 256)
    first = [f"{v}_x{rate}_s1" for v in ("nope", "rope_ssmax") for rate in ("0.1", "0.33", "1", "3")]
    assert trainings(scripts) == [*first, "nope_x0.33_s2", "rope_ssmax_x3_s2"]
    found = read_records(S.Path(cfg.records))
    losses = {(r["variant"], r["rate"], r["seed"]): r["chosen"] for r in found if r["metric"] == "training"}
    assert len(losses) == 10 and sum(losses.values()) == 4 and losses["rope_ssmax", 3.0, 2]
    ruler = [words for script, *words in scripts if script == "eval_ruler.py"]
    assert len(ruler) == 1 and not any("_s2" in word for word in ruler[0]), "RULER with the first seed alone"
    passkey = [r for r in found if r["metric"] == "eval_passkey.py"]
    assert {(r["variant"], r["rate"]) for r in passkey} == {("nope", 0.33), ("rope_ssmax", 3.0)}
    assert all("model_config" not in r for r in passkey)


def test_ablations_take_the_rate_of_the_full_method_and_one_seed(tmp_path, scripts):
    S.study(config(tmp_path, variants=("s_1", "ggd_ssmax"), seeds=(4, 5)), TrainConfig(max_steps=5), 256)
    full = [f"ggd_ssmax_x{rate}_s4" for rate in ("0.1", "0.33", "1", "3")]
    assert trainings(scripts) == [*full, "s_1_x1_s4", "ggd_ssmax_x1_s5"]


def test_a_rate_that_diverges_is_not_chosen_and_the_study_goes_on(tmp_path, scripts):
    S.study(
        config(tmp_path, variants=("rope", "alibi"), seeds=(1, 2), rates=(0.33, 1.0, 3.0)),
        TrainConfig(max_steps=5),
        256,
    )
    assert trainings(scripts)[-2:] == ["rope_x1_s2", "alibi_x0.33_s2"]


def test_an_encoding_that_diverges_at_every_rate_is_left_out(tmp_path, scripts, capsys):
    cfg = config(tmp_path, variants=("alibi",), seeds=(1, 2), rates=(1.0,))
    S.study(cfg, TrainConfig(max_steps=5), 256)
    assert "alibi diverged at every rate with seed 2" in capsys.readouterr().out
    assert not any(script.startswith("eval") for script, *_ in scripts) and not read_records(S.Path(cfg.records))


def test_a_second_call_trains_nothing_and_keeps_one_record_a_cell(tmp_path, scripts):
    cfg = config(tmp_path, variants=("nope",), seeds=(1,))
    S.study(cfg, TrainConfig(max_steps=5), 256)
    before = S.Path(cfg.records).read_text()
    scripts.clear()
    S.study(cfg, TrainConfig(max_steps=5), 256)
    assert not trainings(scripts) and S.Path(cfg.records).read_text() == before


def test_what_is_left_of_a_training(tmp_path, scripts, capsys):
    """Finished: kept. Stopped: resumed. No checkpoint, or one whose last log line is lost: begun anew. Other options:
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
    save_checkpoint(folder / "last.pt", saved | {"train_config": saved["train_config"] | {"batch_size": 7}})
    with pytest.raises(SystemExit):
        S.train(cfg, base, job)
    assert "holds a run of other options" in capsys.readouterr().err and len(scripts) == 4


def test_a_script_is_waited_for_and_its_end_is_the_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(S, "ROOT", tmp_path)
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[2]); sys.exit(int(sys.argv[1]))")
    S.call("script.py", 0, "two words")
    assert "$ python script.py 0 'two words'" in capfd.readouterr().out
    assert S.call("script.py", S.DIVERGED, "") == S.DIVERGED
    for status, expected in ((130, 130), (1, 2)):
        with pytest.raises(SystemExit) as stopped:
            S.call("script.py", status, "")
        assert stopped.value.code == expected


@pytest.mark.parametrize("variant", [*S.ENCODINGS, *S.ABLATIONS])
def test_the_options_are_those_of_train(tmp_path, variant):
    """The words make a config, and what belongs to the encoding is what the variant's name says."""
    words = S.options(config(tmp_path), TrainConfig(), S.Job(variant, 3.0, 7))
    model, train = S.parse([str(S.ROOT / "config/cpu_study.py"), *words])
    pe, _, ssmax = variant.partition("_")
    expected = (pe, bool(ssmax)) if pe in S.PES else ("ggd", True)
    assert (model.pe, model.ssmax) == expected
    assert train.seed == 7 and train.learning_rate == pytest.approx(3e-3)
    assert (train.prior_lr == pytest.approx(3e-3)) == (not variant.startswith("prior_lr"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--variants=foo", "foo"),
        ("--variants=s_1", "need ggd_ssmax"),
        ("--seeds=", "at least one"),
        ("--rates=1,1", "none twice"),
        ("--rates=-1", "above 0"),
        ("--config=missing.py", "missing.py"),
        ("--config=config/ggd_bam_120m.py", "theta_alpha has 4 values"),
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

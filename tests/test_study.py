"""study.py: which trainings and evaluations, at which rate, and what is left of them; the scripts are faked."""

import json

import pytest

import configurator
import study as S
from checkpoint import save_checkpoint
from model import ModelConfig
from records import append_record, read_records
from train import TrainConfig

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
                append_record(run / "eval" / "all.jsonl", record)
            return
        out = next(word.split("=")[1] for word in words if word.startswith("--out_dir"))
        folder = S.Path(out)
        folder.mkdir(parents=True)
        variant, rate = folder.name.split("_x")[0], float(folder.name.split("_x")[1].split("_s")[0])
        loss = abs(rate - BEST.get(variant, 1.0)) + 1
        log = {"step": 5, "val": loss, "val_1x": 1.0, "val_2x": 1.0, "val_4x": 1.0, "seconds": 2.0}
        (folder / "log.jsonl").write_text(json.dumps(log) + "\n")
        state = {"step": 5, "commit": "c", "train_config": {"seed": 1}, "model_config": {}, "model": {}}
        save_checkpoint(folder / "last.pt", state)

    monkeypatch.setattr(S, "call", call)
    return calls


def config(tmp_path, **changes):
    return S.StudyConfig(out_dir=str(tmp_path / "out"), records=str(tmp_path / "records.jsonl"), **changes)


def trainings(calls):
    return [S.Path(words[-1].split("=")[1]).name for script, *words in calls if script == "train.py"]


def test_every_encoding_takes_its_best_rate_to_the_other_seeds(tmp_path, scripts):
    cfg = config(tmp_path, variants=("rope_ssmax", "nope"), seeds=(1, 2))
    S.study(cfg, TrainConfig(max_steps=5), 256)
    first = [f"{v}_x{rate}_s1" for v in ("nope", "rope_ssmax") for rate in ("0.33", "1", "3")]
    assert trainings(scripts) == [*first, "nope_x0.33_s2", "rope_ssmax_x3_s2"]
    found = read_records(S.Path(cfg.records))
    losses = {(r["variant"], r["rate"], r["seed"]): r["chosen"] for r in found if r["metric"] == "training"}
    assert len(losses) == 8 and sum(losses.values()) == 4 and losses["rope_ssmax", 3.0, 2]
    passkey = [r for r in found if r["metric"] == "eval_passkey.py"]
    assert {(r["variant"], r["rate"]) for r in passkey} == {("nope", 0.33), ("rope_ssmax", 3.0)}
    assert all("model_config" not in r for r in passkey)


def test_ablations_take_the_rate_of_the_full_method_and_one_seed(tmp_path, scripts):
    S.study(config(tmp_path, variants=("s_1", "ggd_ssmax"), seeds=(4, 5)), TrainConfig(max_steps=5), 256)
    full = [f"ggd_ssmax_x{rate}_s4" for rate in ("0.33", "1", "3")]
    assert trainings(scripts) == [*full, "s_1_x1_s4", "ggd_ssmax_x1_s5"]


def test_a_second_call_trains_nothing_and_keeps_one_record_a_cell(tmp_path, scripts):
    cfg = config(tmp_path, variants=("nope",), seeds=(1,))
    S.study(cfg, TrainConfig(max_steps=5), 256)
    before = S.Path(cfg.records).read_text()
    scripts.clear()
    S.study(cfg, TrainConfig(max_steps=5), 256)
    assert not trainings(scripts) and S.Path(cfg.records).read_text() == before


def test_a_stopped_training_is_resumed(tmp_path, scripts, monkeypatch):
    cfg, job = config(tmp_path), S.Job("nope", 1.0, 1)
    S.train(cfg, TrainConfig(max_steps=5), job)
    monkeypatch.setattr(S, "call", lambda *words: scripts.append(words))
    S.train(cfg, TrainConfig(max_steps=6), job)
    assert "--resume" not in scripts[0] and scripts[1][-1] == "--resume"


@pytest.mark.parametrize("variant", [*S.ENCODINGS, *S.ABLATIONS])
def test_the_options_are_those_of_train(tmp_path, variant):
    """The words make a config, and what belongs to the encoding is what the variant's name says."""
    words = S.training_options(config(tmp_path), TrainConfig(), S.Job(variant, 3.0, 7))
    words = [str(S.ROOT / "config/cpu_study.py"), *words]
    (model, train), _ = configurator.parse([ModelConfig, TrainConfig], words, "", positional="config")
    pe, _, ssmax = variant.partition("_")
    expected = (pe, bool(ssmax)) if variant in S.ENCODINGS else ("ggd", True)
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

"""Records: intervals, labels, and files that survive a kill."""

import copy
from functools import partial

import pytest
import torch
from conftest import make_model

import runs as R


def test_wilson_interval():
    """Values of the closed form by hand: 0 of 20 ends at z^2 / (n + z^2); 10 of 20 is symmetric."""
    z2 = 1.96**2
    assert R.wilson(0, 20) == (0.0, pytest.approx(z2 / (20 + z2)))
    assert R.wilson(20, 20) == (pytest.approx(20 / (20 + z2)), 1.0)
    low, high = R.wilson(10, 20)
    assert low + high == pytest.approx(1.0) and low == pytest.approx(0.2993, abs=1e-4)


def test_labels_tell_runs_and_files_apart(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert R.name_of(str(run)) == R.name_of(str(run / "last.pt")) == "run"
    assert R.name_of(str(run / "best.pt")) == "run/best"
    assert R.folder_of(str(run)) == R.folder_of(str(run / "best.pt")) == run / "eval"


def test_each_run_is_loaded_once(run, monkeypatch):
    monkeypatch.setattr(R, "load_run", lambda path, device, cfg: path)
    paths = [f"{run}", "b", f"{run}/../run", f"{run}/last.pt"]
    assert R.load_runs(paths, R.EvalConfig()) == [f"{run}", "b"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    paths = [tmp_path / folder for folder in ("a/run", "b/run", "b/c.5/run", "other_x0.33")]
    for path in paths:
        path.mkdir(parents=True)
    paths = [
        str(path)
        for path in (*paths, paths[0] / "best.pt", paths[1] / "best.pt", paths[1] / "step.1.pt")
    ]
    labels = ["a/run", "b/run", "c.5/run", "other_x0.33", "a/run/best", "b/run/best", "run/step.1"]
    assert [R.name_of(path, paths) for path in paths] == labels
    assert R.name_of(paths[0], [paths[0], f"{paths[0]}/last.pt"]) == "run"


def test_a_killed_run_spoils_no_record_but_its_last(tmp_path):
    file = tmp_path / "eval" / "metric.jsonl"
    for n in (1, 2):
        R.append_record(file, {"n": n, "config": {"lengths": [1]}})
    file.write_bytes(file.read_bytes() + b'{"n": 3, "con')
    R.append_record(file, {"n": 4, "config": {"lengths": [1]}})
    assert [r["n"] for r in R.read_records(file)] == [1, 2, 4]
    assert R.finished(file, {"n": 2, "config": {"lengths": (1,)}})["n"] == 2
    assert R.finished(file, {"n": 2, "config": {"lengths": (2,)}}) is None
    assert R.read_records(tmp_path / "none.jsonl") == []


def test_fingerprint_is_of_the_weights_alone():
    model = make_model("ggd", True)
    same, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].attn.prior.theta_beta[0] += 1e-6
    assert R.fingerprint(model) == R.fingerprint(same) != R.fingerprint(other)


def test_interventions_change_one_number_and_what_is_recorded(run):
    """LAYER.HEAD.NAME=VALUE for parameters and for fixed values; other weights are another
    fingerprint."""
    cfg = R.EvalConfig(8, ("1.3.theta_beta=0", "0.2.s=-0.5", "0.0.theta_mu=1"))
    plain, changed = R.load_run(str(run)), R.load_run(str(run), "cpu", cfg)
    assert changed.model.window == 8 and plain.model.window is None
    before, after = plain.model.prior_values(), changed.model.prior_values()
    before["theta_beta"][1][3], before["s"][0][2], before["theta_mu"][0][0] = 0.0, -0.5, 1.0
    assert after == before and R.fingerprint(plain.model) != R.fingerprint(changed.model)


WRONG = "2.0.s=0 0.4.s=0 0.-1.s=0 0.0.beta=0 0.0.s 0.s=0 0.0.s=x 0.0.s=nan 0.0.s=1=2"


@pytest.mark.parametrize("change", [*WRONG.split(), ""])
def test_an_intervention_on_what_is_not_there_is_told(run, change):
    with pytest.raises(
        ValueError, match="layers 0 to 1, heads 0 to 3 and theta_alpha, theta_beta, theta_mu, s"
    ) as told:
        R.load_run(str(run), "cpu", R.EvalConfig(set=(change,)))
    assert "\n" not in str(told.value)


def test_a_frame_of_cells_measures_once_and_hands_on_what_it_has(run, capsys):
    """Cells after others see their records; a new number, or other weights, are measured again."""
    measured, reported = [], []

    def cells(*numbers):
        def measure(number, advance, earlier):
            if number < 0:
                raise KeyboardInterrupt
            measured.append(number)
            advance(1.0)
            return {"sum": number + sum(r["sum"] for r in earlier)}

        metrics = ("one", "two")
        return [
            R.Cell({"metric": metrics[n % 2], "config": [n]}, str(n), 1.0, partial(measure, n))
            for n in numbers
        ]

    def evaluate(*numbers, **options):
        cfg = R.EvalConfig(**options)
        plan = [(r, cells(*numbers)) for r in R.load_runs([str(run), f"{run}/last.pt"], cfg)]
        R.evaluate(plan, cfg, reported.append)
        return [r["sum"] for r in reported[-1][str(run)]]

    assert evaluate(1, 2, 3) == [1, 3, 7] and measured == [1, 2, 3]  # one run, given twice
    assert [r["sum"] for r in R.read_records(run / "eval" / "one.jsonl")] == [3]
    assert {"seconds", "weights", "commit", "hardware"} <= set(reported[0][str(run)][0])
    assert evaluate(1, 2, 4, resume=True) == [1, 3, 8] and measured == [1, 2, 3, 4]
    with pytest.raises(SystemExit) as stopped:
        evaluate(5, -1, 6)
    assert stopped.value.code == 130 and "--resume" in capsys.readouterr().out
    assert [r["sum"] for r in reported[-1][str(run)]] == [5] and measured[4:] == [5]
    assert evaluate(1, set=("0.0.s=0",), resume=True) == [1] and measured[5:] == [1]


def test_tables_are_aligned():
    assert R.aligned([["run", "256"], ["a", "100%"]]) == "run   256\n  a  100%"

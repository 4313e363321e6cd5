"""train.py: data order, exact resume, validation, schedule, and what it says when something is wrong."""

import configurator

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch

import train as T
from data import Order, Windows, lock_folder, read_shard, remove_locks, write_shard
from device import Processes
from model import ModelConfig
from prepare_fineweb import PrepareConfig, settings_of
from runs import load_checkpoint

MODEL = {
    "vocab_size": 257,
    "vocab_multiple": 1,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 16,
}


def write_data(folder, train_tokens=2000, val_tokens=600, document=90, **meta):
    """Shards of random bytes in documents of `document` tokens."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, n in (("val_000000", val_tokens), ("train_000001", train_tokens)):
        tokens = rng.integers(97, 123, n)
        tokens[::document] = 256
        write_shard(folder / f"x_{name}.bin", tokens)
    (folder / "meta.json").write_text(
        json.dumps({"tokenizer": "bytes", "window": None, **meta}), encoding="utf-8"
    )


@pytest.fixture
def data(tmp_path):
    write_data(tmp_path / "data")
    return tmp_path / "data"


def trainer(data, out, pe="ggd", ssmax=True, model=None, **changes):
    options = {
        "batch_size": 2, "tokens_per_step": 64, "max_steps": 10, "optimizer": "adamw", "learning_rate": 1e-2,
        "prior_lr": 5e-2, "log_interval": 1, "eval_interval": 5, "eval_windows": 8, "device": "cpu", **changes,
    }  # fmt: skip
    cfg = T.TrainConfig(data=str(data), out_dir=str(out), **options)
    return T.Trainer(
        cfg, ModelConfig(**MODEL | {"pe": pe, "ssmax": ssmax} | (model or {})), Processes()
    )


def same(a, b):
    """Bit for bit equal, through nested lists and dictionaries."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


def state(out):
    saved = load_checkpoint(out)
    return {key: saved[key] for key in ("model", "optimizer", "step", "best", "rng")}


@pytest.mark.parametrize("optimizer", ["adamw", "radam"])
def test_5_steps_and_resume_and_5_steps_are_10_steps(data, tmp_path, optimizer):
    model = {"virtual_length": 50.0, "theta_beta_min": 0.01}
    trainer(data, tmp_path / "straight", optimizer=optimizer, model=model).loop()
    first = trainer(data, tmp_path / "parts", optimizer=optimizer, model=model)
    step = first.train_step

    def interrupted_at_5():
        first.stop = first.step == 4  # as Ctrl-C does: this step is finished, saved, and the last
        return step()

    first.train_step = interrupted_at_5
    first.loop()
    assert load_checkpoint(tmp_path / "parts")["step"] == 5
    trainer(data, tmp_path / "parts", optimizer=optimizer, resume=True, model=model).loop()
    assert same(state(tmp_path / "straight"), state(tmp_path / "parts"))
    assert (
        load_checkpoint(tmp_path / "parts")["model"]["blocks.0.attn.prior.theta_beta"] >= 0.01
    ).all()


def test_virtual_lengths_are_drawn_by_seed_step_and_window(data, tmp_path):
    """ln of them uniform in 0 ... ln(virtual_length); the processes share one draw; without one nothing is drawn."""
    one = trainer(data, tmp_path / "one", model={"virtual_length": 50.0})
    drawn = [
        np.concatenate([log_virtual for _, log_virtual in one.windows(step)]) for step in range(500)
    ]
    assert same(
        torch.from_numpy(drawn[3]), torch.from_numpy(np.concatenate([v for _, v in one.windows(3)]))
    )
    drawn = np.stack(drawn) / np.log(50)
    assert (
        len(np.unique(drawn)) > 0.99 * drawn.size
        and 0 <= drawn.min() < 0.01
        and 0.99 < drawn.max() <= 1
    )
    assert drawn.mean() == pytest.approx(0.5, abs=0.02) and drawn.std() == pytest.approx(
        12**-0.5, abs=0.02
    )
    ranks = []
    for rank in range(2):
        one.processes, one.micro_steps = Processes(rank, rank, 2), 1
        ranks.append(one.windows(3)[0])
    shared = np.stack([v for _, v in ranks], axis=1).flatten() / np.float32(np.log(50))
    np.testing.assert_allclose(shared, drawn[3], rtol=1e-5)
    assert not trainer(data, tmp_path / "two").windows(3)[0][1].any()


def test_a_killed_run_resumes_from_its_last_checkpoint(data, tmp_path):
    trainer(data, tmp_path / "straight").loop()
    killed = trainer(data, tmp_path / "killed")
    step = killed.train_step

    def die_at_8():
        if killed.step == 8:
            raise MemoryError("killed")
        return step()

    killed.train_step = die_at_8
    with pytest.raises(MemoryError):
        killed.loop()
    assert load_checkpoint(tmp_path / "killed")["step"] == 5
    with open(tmp_path / "killed/log.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 9, "lo')  # a line half written
    trainer(data, tmp_path / "killed", resume=True).loop()
    assert same(state(tmp_path / "straight"), state(tmp_path / "killed"))

    def read(name):
        lines = (tmp_path / name / "log.jsonl").read_text(encoding="utf-8").splitlines()
        timed = {"seconds", "tokens_per_second", "peak_memory"}
        return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]

    assert read("killed") == read("straight") and [r["step"] for r in read("killed")] == list(
        range(1, 11)
    )


def test_ctrl_c_saves_and_exits_with_130(data, tmp_path):
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv.pop(1)); import train as T\n"
        "step = T.Trainer.train_step\n"
        "interrupt = lambda self: os.kill(os.getpid(), signal.SIGINT) if self.step == 3 else None\n"
        "T.Trainer.train_step = lambda self: (interrupt(self), step(self))[1]\n"
        "T.main()"
    )
    options = [f"--{k}={v}" for k, v in MODEL.items()] + [
        f"--data={data}",
        f"--out_dir={tmp_path / 'out'}",
    ]
    options += [
        "--batch_size=2",
        "--tokens_per_step=64",
        "--max_steps=10",
        "--eval_windows=8",
        "--device=cpu",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, str(T.ROOT), *options], capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert load_checkpoint(tmp_path / "out")["step"] == 4 and "--resume continues" in done.stdout
    assert (tmp_path / "out/config.json").exists()


def test_a_reader_that_has_gone_stops_with_a_checkpoint(data, tmp_path):
    """As in `python train.py ... | head -5`: once a log line finds the pipe closed, the next step is the last."""
    options = [f"--{k}={v}" for k, v in MODEL.items()] + [
        f"--data={data}",
        f"--out_dir={tmp_path / 'out'}",
    ]
    options += [
        "--batch_size=2",
        "--tokens_per_step=64",
        "--max_steps=99",
        "--log_interval=3",
        "--device=cpu",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(T.ROOT / "train.py"), *options]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # or already the set-up's lines would end it
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (130, "")
    assert load_checkpoint(tmp_path / "out")["step"] == 4


def test_a_clock_that_does_not_move_is_no_division_by_zero(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        T, "time", types.SimpleNamespace(time=lambda: 5.0, perf_counter=lambda: 5.0)
    )
    run = trainer(data, tmp_path / "out")
    run.loop()
    assert run.step == 10 and run.seconds == 0.0


def test_seconds_are_not_of_a_clock_that_can_be_set_back(data, tmp_path, monkeypatch):
    hours = iter(range(999, 0, -1))
    monkeypatch.setattr(T.time, "time", lambda: 3600.0 * next(hours))
    run = trainer(data, tmp_path / "out")
    run.loop()
    assert run.seconds > 0


def test_a_full_disk_keeps_the_old_checkpoint(data, tmp_path, capsys):
    """Stands for a full disk: the largest size of a file, below that of a checkpoint."""
    resource = pytest.importorskip("resource")
    trainer(data, tmp_path / "out", max_steps=5).loop()
    before = (tmp_path / "out/last.pt").read_bytes()
    run = trainer(data, tmp_path / "out", resume=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(SystemExit) as stopped:
            configurator.run(run.loop)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and printed.startswith("error: ") and printed.count("\n") == 1
    assert "last.pt cannot be written: [Errno 27] File too large" in printed or "best.pt" in printed
    assert (tmp_path / "out/last.pt").read_bytes() == before and not list(
        (tmp_path / "out").glob("*.tmp")
    )


def test_a_checkpoint_that_may_not_be_read_is_no_damaged_one(data, tmp_path, monkeypatch, capsys):
    def refused(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    trainer(data, tmp_path / "out", max_steps=1).loop()
    monkeypatch.setattr(torch, "load", refused)
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out", resume=True)
    assert stopped.value.code == 2 and capsys.readouterr().err.endswith(
        "last.pt: permission denied\n"
    )


@pytest.mark.parametrize("name", ["train_config", "tokenizer"])
def test_a_checkpoint_that_lacks_a_part_cannot_be_resumed(data, tmp_path, capsys, name):
    trainer(data, tmp_path / "out", max_steps=1).loop()
    T.save_checkpoint(tmp_path / "out/last.pt", load_checkpoint(tmp_path / "out") | {name: None})
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out", resume=True)
    assert stopped.value.code == 2 and f"its last.pt has no {name}" in capsys.readouterr().err


def test_the_commit_is_this_programs_and_says_what_was_changed(tmp_path, monkeypatch):
    def git(*words):
        about = [
            "-c",
            "user.name=Ada",
            "-c",
            "user.email=ada@example.org",
            "-c",
            "commit.gpgsign=false",
        ]
        return subprocess.check_output(
            ["git", "-C", str(tmp_path), *about, *words], text=True
        ).strip()

    monkeypatch.setattr(T, "ROOT", tmp_path)
    assert T.git_commit() is None
    git("init", "-q")
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    git("tag", "-a", "-m", "first", "v1")
    (tmp_path / "new.txt").write_text("not a part of it")
    assert T.git_commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "train.py").write_text("2")
    assert T.git_commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
    (tmp_path / "nanoBAM").mkdir()  # unpacked inside another repository
    monkeypatch.setattr(T, "ROOT", tmp_path / "nanoBAM")
    assert T.git_commit() is None


def test_checkpoints_and_log(data, tmp_path):
    run = trainer(data, tmp_path / "out", compile="false")
    run.loop()
    saved = torch.load(tmp_path / "out/last.pt", weights_only=True)
    assert (
        saved["step"] == 10
        and saved["tokenizer"] == "bytes"
        and saved["train_config"]["prior_lr"] == 5e-2
    )
    assert not any("module." in k or "_orig_mod" in k for k in saved["model"])
    log = [
        json.loads(line)
        for line in (tmp_path / "out/log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert np.shape(log[-1]["theta_beta"]) == np.shape(log[-1]["s"]) == (2, 2)
    losses = {r["step"]: r["val"] for r in log if "val" in r}
    best = load_checkpoint(tmp_path / "out/best.pt")
    assert (
        set(losses) == {5, 10}
        and best["best"] == min(losses.values())
        and losses[best["step"]] == best["best"]
    )
    assert {"val_1x", "val_2x", "val_4x"} <= set(log[-1])


def test_a_failing_compiler_is_told_and_changes_nothing(data, tmp_path, monkeypatch, capsys):
    trainer(data, tmp_path / "plain").loop()

    def no_compiler(model, **_):
        def fail(*_):
            raise RuntimeError("no C++ compiler\nwas found")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)
    run = trainer(data, tmp_path / "compiled", compile="true")
    assert (
        "compiling failed (RuntimeError: no C++ compiler); going on uncompiled"
        in capsys.readouterr().out
    )
    assert run.model.attention == "reference"
    run.loop()
    assert same(state(tmp_path / "plain"), state(tmp_path / "compiled"))


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_fused_attention_where_it_cannot_be(data, tmp_path, capsys, compiled):
    assert trainer(data, tmp_path / "auto").model.attention == "reference"
    assert "attention reference (no CUDA)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out", attention="fused", compile=compiled)
    assert stopped.value.code == 2 and "CUDA is missing" in capsys.readouterr().err


def test_every_window_once_an_epoch_over_all_ranks():
    order = Order(windows=50, per_step=8, seed=3)
    seen = np.concatenate([order.step(s, rank, 4) for s in range(25) for rank in range(4)])
    assert (np.bincount(seen, minlength=50) == 4).all()  # 25 steps of 8 windows are 4 epochs of 50
    assert sorted(order.step(9)) == sorted(
        np.concatenate([order.step(9, rank, 4) for rank in range(4)])
    )
    assert (order.step(2) == Order(50, 8, 3).step(2)).all() and (
        order.step(2) != Order(50, 8, 4).step(2)
    ).any()


def test_windows_reach_the_last_token_of_every_shard(tmp_path):
    for i, n in enumerate((33, 48, 49)):
        write_shard(tmp_path / f"{i}.bin", np.arange(n) + 100 * i)
    windows = Windows(sorted(tmp_path.glob("*.bin")), 16)
    assert len(windows) == 2 + 2 + 3
    assert windows.take(np.array([1, 2, 6])).tolist() == [
        list(range(a, a + 17)) for a in (16, 100, 232)
    ]


def test_two_encodings_see_the_same_batches_and_validation(data, tmp_path):
    a, b = trainer(data, tmp_path / "a"), trainer(data, tmp_path / "b", pe="rope", ssmax=False)
    assert all((a.order.step(s) == b.order.step(s)).all() for s in range(10))
    assert torch.equal(a.validation.windows, b.validation.windows) and torch.equal(
        a.validation.long, b.validation.long
    )


def test_validation_contexts_score_the_same_targets(data, tmp_path):
    """Documents of 90 tokens hold one window of 4 x 16 + 1; an encoding that sees one key cannot tell them apart."""
    run = trainer(data, tmp_path / "out", pe="nope", ssmax=False)
    assert run.validation.long.shape[1] == 65 and not (run.validation.long[:, 1:] == 256).any()
    run.model.forward = lambda idx, y, doc_ids: (y[y != -100] / 100).mean()
    losses = run.validation.run(run.model, run.device, run.autocast)
    assert losses["val_1x"] == losses["val_2x"] == losses["val_4x"] != losses["val"]


def test_no_long_document_is_said(tmp_path, capsys):
    write_data(tmp_path / "short", document=30)
    assert trainer(tmp_path / "short", tmp_path / "out").validation.long is None
    assert "no val_2x" in capsys.readouterr().out


def test_50_shards_are_read_exactly_once_an_epoch_by_two_ranks(tmp_path):
    """Each of 50 shards of 1,000 tokens has 62 windows of 16; a token's value tells shard and place."""
    for shard in range(50):
        write_shard(tmp_path / f"x_train_{shard:06d}.bin", np.arange(1000) + 1000 * shard)
    windows = Windows(sorted(tmp_path.glob("*.bin")), 16)
    assert len(windows) == 50 * 62
    order = Order(len(windows), per_step=100, seed=5)
    read = [windows.take(order.step(step, rank, 2))[:, 0] for step in range(31) for rank in (0, 1)]
    expected = [1000 * shard + 16 * k for shard in range(50) for k in range(62)]
    assert np.sort(np.concatenate(read)).tolist() == expected


def test_gradient_accumulation_is_the_joined_batch(data, tmp_path, float64):
    found = []
    for batch_size in (4, 1):
        run = trainer(data, tmp_path / str(batch_size), batch_size=batch_size, grad_clip=0.0)
        run.model.double()
        with torch.no_grad():
            for p in run.model.parameter_groups()["theta"]:
                p.uniform_(0.2, 1.0, generator=torch.Generator().manual_seed(0))
        gradients = {}
        run.optimizer.register_step_pre_hook(
            lambda *_, run=run, g=gradients: g.update(
                {n: p.grad.clone() for n, p in run.model.named_parameters()}
            )
        )
        loss, norm = run.train_step()
        found.append((loss, norm, gradients))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5), "added up in float32"
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-11)
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(gradient, found[1][2][name], rtol=1e-9, atol=1e-13)


def test_learning_rates_follow_warm_up_and_cosine(data, tmp_path):
    cfg = T.TrainConfig(warmup_steps=10, max_steps=110, min_lr_fraction=0.1)
    factors = [T.learning_rate_factor(s, cfg) for s in range(111)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1.0
    assert factors[60] == pytest.approx(0.55) and factors[110] == pytest.approx(0.1)
    assert T.learning_rate_factor(0, T.TrainConfig(warmup_steps=0)) == 1.0
    run = trainer(data, tmp_path / "out", ssmax_lr=3e-2)
    run.train_step()
    assert {g["name"]: g["lr"] for g in run.optimizer.param_groups} == {
        "matrix": 1e-2, "norm": 1e-2, "theta": 5e-2, "s": 3e-2,
    }  # fmt: skip


def test_a_fixed_batch_is_learned(data, tmp_path):
    run = trainer(data, tmp_path / "out", max_steps=60)
    run.order.step = lambda step, rank, world: np.array([0, 1, 2, 3])
    losses = [run.train_step()[0] for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]


def test_last_target_of_packed_windows_is_not_trained(tmp_path):
    """Packed windows are shuffled: the token behind a window belongs to another text."""
    write_data(tmp_path / "packed", window=16)
    run, seen = trainer(tmp_path / "packed", tmp_path / "out"), []
    run.run = lambda idx, targets, *rest: (seen.append(targets), run.model(idx, targets, *rest))[1]
    run.train_step()
    assert all((y[:, -1] == -100).all() and (y[:, :-1] >= 0).all() for y in seen)


def main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["train.py", *map(str, arguments)])
    try:
        T.main()
    finally:
        remove_locks()  # as the end of the process does


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--learning_rat=1",), "did you mean 'learning_rate'"),
        (("missing.py",), "missing.py"),
        (("--data=missing",), "no *train_*.bin"),
        (("--block_size=1024", "--tokens_per_step=2048"), "less than 1024 + 1"),
        (("--vocab_size=100",), "set vocab_size to 257"),
        (("--n_head=3",), "divisible"),
        (("--tokens_per_step=48",), "multiple"),
        (("--resume",), "no checkpoint"),
        (("--device=tpu9",), "device tpu9"),
        (("--dtype=float16",), "float16"),
        (("--max_steps=0",), "at least 1"),
        (("--beta1=2",), "beta1"),
        (("--min_lr_fraction=1.005",), "min_lr_fraction is 1.005; it must be from 0 to 1"),
        (("--device=meta",), "device meta"),
        (("--out_dir=",), "must name folders"),
    ],
)
def test_errors_are_one_sentence(data, tmp_path, monkeypatch, capsys, arguments, message):
    options = [f"--{k}={v}" for k, v in MODEL.items()] + [
        "--batch_size=2",
        "--tokens_per_step=64",
        "--device=cpu",
    ]
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, *options, f"--data={data}", f"--out_dir={tmp_path / 'out'}", *arguments)
    printed = capsys.readouterr().err.strip()
    assert (
        stopped.value.code == 2
        and message in printed
        and printed.startswith("error: ")
        and "\n" not in printed
    )
    assert not (tmp_path / "out").exists()


def test_ids_beyond_the_vocabulary_in_the_validation_are_told(data, tmp_path, capsys):
    shard = next(data.glob("*val*.bin"))
    tokens = np.array(read_shard(shard))
    tokens[-1] = 300
    write_shard(shard, tokens)
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out")
    told = capsys.readouterr().err
    assert (
        stopped.value.code == 2 and "the token id 300 in its validation, vocab_size is 257" in told
    )


def test_ids_beyond_the_vocabulary_are_told(data, tmp_path, capsys):
    shard = next(data.glob("*train*.bin"))
    tokens = np.array(read_shard(shard))
    tokens[5::16] = 300
    write_shard(shard, tokens)
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out").loop()
    assert stopped.value.code == 2 and "token id 300, vocab_size is 257" in capsys.readouterr().err


def test_a_step_without_finite_gradient_changes_nothing(data, tmp_path, capsys):
    run = trainer(data, tmp_path / "out")
    run.train_step()
    before, whole = (
        copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()["state"]]),
        run.run,
    )
    run.run = lambda *batch: whole(*batch) * math.inf
    run.train_step()
    assert same(before, [run.model.state_dict(), run.optimizer.state_dict()["state"]])
    assert run.step == 2 and run.skipped == 1 and "step 2: loss inf" in capsys.readouterr().out
    run.run = whole
    run.train_step()
    assert run.skipped == 1 and run.skipped_in_a_row == 0
    assert not same(before[0], run.model.state_dict())


def test_a_stop_saves_before_it_validates_and_says_which_step(data, tmp_path, monkeypatch, capsys):
    run = trainer(data, tmp_path / "out", eval_interval=3, max_steps=30)
    step, order = run.train_step, []

    def train_step():
        run.stop = run.step == 5
        return step()

    run.train_step = train_step
    save, mean = run.save, run.validation.mean
    monkeypatch.setattr(run, "save", lambda name: (order.append(name), save(name)))
    monkeypatch.setattr(
        run.validation, "mean", lambda *a: (order.append("validation"), mean(*a))[1]
    )
    run.loop()
    assert run.stop and run.step == 6 and "last.pt has step 6" in capsys.readouterr().out
    second = order[order.index("last.pt") + 1 :]
    assert second[0] == "last.pt" and "validation" in second


def test_a_signal_behind_the_decision_does_not_part_the_processes(data, tmp_path):
    """What a process is told while the others already go on counts for the next step."""
    run = trainer(data, tmp_path / "out", max_steps=4)
    evaluate = run.evaluate

    def told_meanwhile():
        run.stop = True
        return evaluate()

    run.cfg.eval_interval, run.evaluate = 2, told_meanwhile
    run.loop()
    assert run.step == 3 and load_checkpoint(tmp_path / "out")["step"] == 3


def test_a_folder_of_other_files_is_not_filled_with_shards(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("Dear Ada", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        trainer(tmp_path / "mine", tmp_path / "out", prepare="--source=pydocs --window=16")
    assert stopped.value.code == 2 and "no *train_*.bin" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_an_output_folder_that_cannot_be_made(data, tmp_path, monkeypatch, capsys):
    def refused(path, *_, **__):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(T.Path, "mkdir", refused)
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out")
    assert stopped.value.code == 2 and "operation not permitted" in capsys.readouterr().err


def test_a_model_without_finite_validation_loss_is_not_saved(data, tmp_path, monkeypatch, capsys):
    run = trainer(data, tmp_path / "out")
    monkeypatch.setattr(run.validation, "run", lambda *_: {"val": math.nan})
    run.evaluate()
    assert (
        not (tmp_path / "out/last.pt").exists()
        and "no checkpoint is written" in capsys.readouterr().out
    )


def test_a_scaler_that_tries_its_scale_costs_no_checkpoint(data, tmp_path):
    run = trainer(data, tmp_path / "out")
    run.skipped_in_a_row = 1
    run.save_last()
    assert not (tmp_path / "out/last.pt").exists()
    run.scaler = torch.amp.GradScaler("cpu")
    run.save_last()
    assert (tmp_path / "out/last.pt").exists() and run.kept == 0


def test_a_diverged_run_keeps_its_last_checkpoint(data, tmp_path, capsys):
    """One huge step ruins the weights; later ones are skipped, nothing is saved, and after ten of them the run ends."""
    trainer(data, tmp_path / "out", max_steps=5).loop()
    before = (tmp_path / "out/last.pt").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        trainer(
            data, tmp_path / "out", resume=True, learning_rate=1e30, grad_clip=0.0, max_steps=40
        ).loop()
    printed = capsys.readouterr()
    assert (
        stopped.value.code == 3
        and "10 steps in a row" in printed.err
        and "no checkpoint is written" in printed.out
    )
    assert (tmp_path / "out/last.pt").read_bytes() == before
    log = (tmp_path / "out/log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in log
    ]
    assert records[-1]["skipped"] == 9 and records[-1]["grad_norm"] is None


def test_resume_takes_the_options_of_this_call_and_says_so(data, tmp_path, capsys):
    trainer(data, tmp_path / "out", max_steps=5).loop()
    run = trainer(data, tmp_path / "out", resume=True, weight_decay=0.7, beta1=0.5, prior_lr=0.3)
    assert "weight_decay 0.1 -> 0.7" in capsys.readouterr().out
    groups = {g["name"]: g for g in run.optimizer.param_groups}
    assert groups["matrix"]["weight_decay"] == 0.7 and groups["matrix"]["betas"] == (0.5, 0.95)
    assert groups["theta"]["peak_lr"] == 0.3 and groups["theta"]["weight_decay"] == 0.0
    finished = trainer(data, tmp_path / "out", resume=True, max_steps=5)
    finished.loop()
    assert "nothing to do" in capsys.readouterr().out


def test_another_tokenizer_cannot_go_on_with_a_run(data, tmp_path, capsys):
    trainer(data, tmp_path / "out", max_steps=5).loop()
    saved = load_checkpoint(tmp_path / "out")
    T.save_checkpoint(tmp_path / "out/last.pt", saved | {"tokenizer": "gpt2"})
    with pytest.raises(SystemExit):
        trainer(data, tmp_path / "out", resume=True)
    assert "tokenizer gpt2, not bytes" in capsys.readouterr().err


def test_a_file_in_the_way_is_told_before_anything_is_built(data, tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(SystemExit) as stopped:
            trainer(data, out)
        assert (
            stopped.value.code == 2
            and "is a file where a folder is needed" in capsys.readouterr().err
        )


def test_damaged_meta_is_told(data, tmp_path, capsys):
    (data / "meta.json").write_text("{broken", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out")
    assert stopped.value.code == 2 and "damaged" in capsys.readouterr().err


def test_data_packed_for_another_window_is_refused(tmp_path, capsys):
    write_data(tmp_path / "packed", window=32)
    with pytest.raises(SystemExit):
        trainer(tmp_path / "packed", tmp_path / "out")
    assert "windows of 32 tokens, block_size is 16" in capsys.readouterr().err


def test_a_run_is_never_overwritten(data, tmp_path, capsys):
    trainer(data, tmp_path / "out", max_steps=1).loop()
    before = (tmp_path / "out/last.pt").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        trainer(data, tmp_path / "out")
    assert stopped.value.code == 2 and "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "out/last.pt").read_bytes() == before
    with pytest.raises(SystemExit):
        trainer(data, tmp_path / "out", resume=True, model={"n_layer": 1})
    assert "another model" in capsys.readouterr().err


def test_data_is_prepared_when_it_is_missing(tmp_path, monkeypatch, capfd):
    text = tmp_path / "a.txt"
    text.write_text("Some words, again and again. " * 40, encoding="utf-8")
    (tmp_path / "b.txt").write_text("Other words for the validation. " * 20, encoding="utf-8")
    prepare = f"--source=files --files={text},{tmp_path / 'b.txt'} --window=16 --val_fraction=0.2"
    run = trainer(tmp_path / "made", tmp_path / "out", prepare=prepare)
    assert len(run.train) > 50 and (tmp_path / "made/meta.json").exists()
    with pytest.raises(SystemExit):
        trainer(tmp_path / "other", tmp_path / "out2", prepare="--source=nothing")
    assert "did not succeed" in capfd.readouterr().err


def test_data_that_is_not_what_prepare_asks_for_is_refused(tmp_path, capsys):
    """The quick start's folder, prepared without exercises; taken as it is where prepare is empty."""
    prepare = "--source=pydocs --window=16 --retrieval_fraction=0.85"
    there = settings_of(PrepareConfig(source="pydocs", window=16))
    write_data(tmp_path / "data", settings=there)
    with pytest.raises(SystemExit) as stopped:
        trainer(tmp_path / "data", tmp_path / "out", prepare=prepare)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and told.count("\n") == 1
    assert "was prepared with retrieval_fraction=0.0 (expected 0.85); run " in told
    assert (
        f"prepare_fineweb.py {prepare} --out_dir={tmp_path / 'data'}_new" in told
        and "--prepare=" in told
    )
    trainer(tmp_path / "data", tmp_path / "out", prepare="")
    trainer(tmp_path / "data", tmp_path / "out", prepare="--source=pydocs --window=16 --workers=3")
    write_data(
        tmp_path / "files", settings=there | {"source": "files", "files": ["a.txt, 9 bytes"]}
    )
    trainer(
        tmp_path / "files",
        tmp_path / "out",
        prepare="--source=files --files=gone/a.txt --window=16",
    )
    assert "does not say how" not in capsys.readouterr().out
    write_data(tmp_path / "old")
    trainer(tmp_path / "old", tmp_path / "out", prepare=prepare)
    assert f"{tmp_path / 'old'} does not say how it was prepared" in capsys.readouterr().out


def test_hidden_files_are_no_data(data, tmp_path, capfd):
    """A file manager's notes: neither do they make a folder full, nor are they shards."""
    for name in (".DS_Store", "._x_train_000001.bin", "._x_val_000000.bin"):
        (data / name).write_bytes(b"notes")
    assert len(trainer(data, tmp_path / "out").train.shards) == 1
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/.DS_Store").write_bytes(b"notes")
    with pytest.raises(SystemExit):
        trainer(tmp_path / "empty", tmp_path / "out", prepare="--source=files --files=absent.txt")
    assert "no file absent.txt" in capfd.readouterr().err


def test_one_training_a_folder(data, tmp_path):
    """A second one ends with a sentence, and has changed nothing; so does a preparation that another one is at."""
    lock_folder(tmp_path / "out")
    lock_folder(tmp_path / "shards")
    options = [f"--{k}={v}" for k, v in MODEL.items()] + [
        "--tokens_per_step=64",
        "--batch_size=2",
        "--max_steps=1",
    ]
    prepare = ["--prepare=--source=pydocs --window=16", f"--data={tmp_path / 'shards'}"]
    try:
        for words in (
            [f"--data={data}", f"--out_dir={tmp_path / 'out'}"],
            [*prepare, f"--out_dir={tmp_path / 'new'}"],
        ):
            command = [sys.executable, str(T.ROOT / "train.py"), *options, *words]
            done = subprocess.run(command, capture_output=True, text=True)
            assert (
                done.returncode == 2
                and "is being written by another process; wait for it" in done.stderr
            )
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
        assert not (tmp_path / "new").exists() and not list((tmp_path / "shards").glob("*.bin"))
    finally:
        remove_locks()
    assert not (tmp_path / "out").exists()


def test_config_files_are_valid():
    """Every config in config/ loads and builds on the meta device."""
    for file in sorted((T.ROOT / "config").glob("*.py")):
        (model_cfg, _), _ = configurator.parse(
            [ModelConfig, T.TrainConfig], [str(file)], T.__doc__, positional="config"
        )
        with torch.device("meta"):
            T.GPT(model_cfg)


def test_help_lists_every_key(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, "--help")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    for cls in (ModelConfig, T.TrainConfig):
        for field in dataclasses.fields(cls):
            assert f"--{field.name}=" in printed


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written(data, tmp_path):
    """Checkpoints are written all the time, and the run is killed at 20 random moments: last.pt and best.pt are always
    whole, and the run that goes on from them ends as one that was never stopped."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import train; train.main()"
    options = [f"--{k}={v}" for k, v in (MODEL | {"n_embd": 256}).items()] + [
        f"--data={data}",
        "--device=cpu",
    ]
    options += [
        "--batch_size=2",
        "--tokens_per_step=64",
        "--max_steps=400",
        "--eval_interval=1",
        "--eval_windows=2",
    ]
    command = [sys.executable, "-c", code, str(T.ROOT), *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*command, f"--out_dir={tmp_path / 'straight'}"], check=True, **quiet)
    rng, kills, out = np.random.default_rng(0), 0, tmp_path / "killed"
    while kills < 20:
        resume = ["--resume"] if (out / "last.pt").exists() else []
        process = subprocess.Popen([*command, f"--out_dir={out}", *resume], **quiet)
        before = (out / "last.pt").stat().st_mtime_ns if resume else 0
        while process.poll() is None and not (
            (out / "last.pt").exists() and moved(out / "last.pt", before)
        ):
            time.sleep(0.005)
        time.sleep(rng.random() * 0.2)
        if process.poll() is not None:  # it came to its end: a few more steps for the next kills
            break
        process.kill()
        process.wait()
        kills += 1
        saved = load_checkpoint(out)
        assert load_checkpoint(out / "best.pt")["best"] <= saved["best"] and saved["step"] >= 1
    assert kills >= 20, f"only {kills} kills before the end; give it more steps"
    subprocess.run([*command, f"--out_dir={out}", "--resume"], check=True, **quiet)
    assert same(state(tmp_path / "straight"), state(out))


def moved(file, before):
    try:
        return file.stat().st_mtime_ns > before
    except FileNotFoundError:  # between two names
        return False


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_training_on_cuda(data, tmp_path, dtype):
    """Compiled, fused, in mixed precision, with the loss scaler for float16: it learns, and a resumed run goes on."""
    if dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bfloat16 is not native on this device")
    options = {
        "device": "cuda",
        "dtype": dtype,
        "compile": "true",
        "max_steps": 60,
        "eval_interval": 30,
    }
    shape = {"n_embd": 64, "block_size": 128}
    write_data(tmp_path / "long", train_tokens=20_000, val_tokens=3000, document=700)
    options |= {"tokens_per_step": 512}
    run = trainer(tmp_path / "long", tmp_path / "out", model=shape, **options)
    assert run.model.attention == "fused" and run.scaler.is_enabled() == (dtype == "float16")
    run.loop()
    log = [
        json.loads(line)
        for line in (tmp_path / "out/log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert (
        log[-1]["loss"] < log[0]["loss"] - 1
        and log[-1]["skipped"] < 10
        and log[-1]["peak_memory"] > 0
    )
    resumed = trainer(
        tmp_path / "long", tmp_path / "out", model=shape, resume=True, **options | {"max_steps": 70}
    )
    resumed.loop()
    assert load_checkpoint(tmp_path / "out")["step"] == 70

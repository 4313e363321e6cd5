"""train.py: data order, exact resume, validation, schedule, and what it says about mistakes."""

import configurator

import copy
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import train as T
from data import Order, Windows, lock_folder, read_shard, remove_locks, write_shard
from device import Processes, pick_dtype
from model import ModelConfig
from prepare_fineweb import PrepareConfig, settings_of
from runs import load_checkpoint

MODEL = {"vocab_size": 257, "vocab_multiple": 1, "n_layer": 2, "n_head": 2, "n_embd": 16}
MODEL |= {"block_size": 16}
OPTIONS = {"batch_size": 2, "tokens_per_step": 64, "max_steps": 10, "optimizer": "adamw"}
OPTIONS |= {"learning_rate": 1e-2, "prior_lr": 5e-2, "log_interval": 1, "eval_interval": 5}
OPTIONS |= {"eval_windows": 8, "device": "cpu", "dtype": "float32"}
ALONE = Processes()


def write_data(folder, train_tokens=2000, val_tokens=600, document=90, **meta):
    """Shards of random bytes in documents of `document` tokens."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, n in (("val_000000", val_tokens), ("train_000001", train_tokens)):
        tokens = rng.integers(97, 123, n)
        tokens[::document] = 256
        write_shard(folder / f"x_{name}.bin", tokens)
    meta = {"tokenizer": "bytes", "window": None, **meta}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


@pytest.fixture
def data(tmp_path):
    write_data(tmp_path / "data")
    return tmp_path / "data"


def words(data, out, **options):
    """A command line of train.py."""
    options = MODEL | OPTIONS | {"data": data, "out_dir": out} | options
    return [f"--{key}={value}" for key, value in options.items()]


def main(*arguments):
    """train.py in this process, with nothing left of it afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
            T.main()
    finally:
        remove_locks()  # as the end of the process does
        torch.use_deterministic_algorithms(False)
        for number, handler in before.items():
            signal.signal(number, handler)


def train(data, out, **options):
    """Train a tiny model. Returns last.pt, if one is written."""
    main(*words(data, out, **options))
    return load_checkpoint(out) if (out / "last.pt").exists() else None


def refuse(capsys, data, out, **options):
    """What train.py says when it ends with a mistake's status."""
    with pytest.raises(SystemExit) as stopped:
        train(data, out, **options)
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and "error: " in printed
    return printed


def configs(data, **options):
    kinds = [ModelConfig, T.TrainConfig]
    (model_cfg, cfg), _ = configurator.parse(kinds, words(data, "unused", **options), None)
    return model_cfg, cfg


def reader(data, processes=ALONE, **options):
    """step -> the micro-steps that a process reads."""
    model_cfg, cfg = configs(data, **options)
    windows, _, meta = T.find_data(cfg, model_cfg, processes.world)
    order = Order(len(windows), cfg.tokens_per_step // model_cfg.block_size, cfg.seed)
    rest = windows, order, meta, cfg, model_cfg, processes, torch.device("cpu")
    return lambda step: list(T.read_batches(*rest, step))


def before_step(patch, action):
    """Let a run call action(step) before each step."""
    read = T.read_batches
    patch.setattr(T, "read_batches", lambda *rest: (action(rest[-1]), read(*rest))[1])


def interrupt_at(step, number=signal.SIGINT):
    """For before_step(): get a signal while that step is being done."""
    return lambda now: os.kill(os.getpid(), number) if now == step else None


@pytest.fixture
def parts(monkeypatch):
    """The model and the optimizer of each run."""
    made, make = [], T.make_optimizer

    def make_optimizer(model, cfg):
        made.append((model, make(model, cfg)))
        return made[-1][1]

    monkeypatch.setattr(T, "make_optimizer", make_optimizer)
    return made


def read_log(out):
    return list(map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines()))


def same(a, b):
    """Bit for bit equal, through nested lists and dictionaries."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


def state(out):
    saved = load_checkpoint(out)
    return {key: saved[key] for key in ("model", "optimizer", "step", "best")}


# ---- stop and resume


@pytest.mark.parametrize("optimizer", ["adamw", "radam"])
def test_5_steps_and_resume_and_5_steps_are_10_steps(data, tmp_path, monkeypatch, optimizer):
    options = {"optimizer": optimizer, "virtual_length": 50.0, "theta_beta_min": 0.01}
    train(data, tmp_path / "straight", **options)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        before_step(patch, interrupt_at(4))
        train(data, tmp_path / "parts", **options)
    assert load_checkpoint(tmp_path / "parts")["step"] == 5
    saved = train(data, tmp_path / "parts", resume=True, **options)
    assert same(state(tmp_path / "straight"), state(tmp_path / "parts"))
    assert (saved["model"]["blocks.0.attn.prior.theta_beta"] >= 0.01).all()


def test_compiled_runs_on_two_threads_are_equal(tmp_path):
    """Without a compiler the runs are equal as well."""
    write_data(tmp_path / "data", train_tokens=20_000)
    options = {"compile": "true", "batch_size": 64, "tokens_per_step": 4096, "block_size": 64}
    options |= {"eval_interval": 10, "n_layer": 1}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for run in ("a", "b"):
            train(tmp_path / "data", tmp_path / run, **options)
    finally:
        torch.set_num_threads(threads)
    assert same(state(tmp_path / "a"), state(tmp_path / "b"))


def test_a_killed_run_resumes_from_its_last_checkpoint(data, tmp_path, monkeypatch):
    def die(step):
        if step == 8:
            raise MemoryError("killed")

    train(data, tmp_path / "straight")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        before_step(patch, die)
        train(data, tmp_path / "killed")
    assert load_checkpoint(tmp_path / "killed")["step"] == 5
    with open(tmp_path / "killed/log.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 9, "lo')  # a line half written
    train(data, tmp_path / "killed", resume=True)
    assert same(state(tmp_path / "straight"), state(tmp_path / "killed"))
    timed = {"seconds", "tokens_per_second", "peak_memory"}
    logs = [
        [{k: v for k, v in record.items() if k not in timed} for record in read_log(tmp_path / run)]
        for run in ("killed", "straight")
    ]
    assert logs[0] == logs[1] and [record["step"] for record in logs[0]] == list(range(1, 11))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_with_130(data, tmp_path, monkeypatch, capsys, number):
    before_step(monkeypatch, interrupt_at(3, number))
    with pytest.raises(SystemExit) as stopped:
        train(data, tmp_path / "out")
    assert stopped.value.code == 130 and "--resume continues" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "out")["step"] == 4
    assert (tmp_path / "out/config.json").exists()


def test_a_second_ctrl_c_ends_the_run_at_once(data, tmp_path, monkeypatch):
    before_step(monkeypatch, lambda step: [interrupt_at(6)(step) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out")["step"] == 5


def test_a_reader_that_has_gone_stops_with_a_checkpoint(data, tmp_path):
    """As in `python train.py ... | head -5`: one more step after the first line that is lost."""
    options = words(data, tmp_path / "out", max_steps=99, log_interval=3, eval_interval=99)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(T.ROOT / "train.py"), *options]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # or already the set-up's lines would end it
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (130, "")
    assert load_checkpoint(tmp_path / "out")["step"] == 4


def test_a_stop_saves_before_it_validates_and_says_which_step(data, tmp_path, monkeypatch, capsys):
    order, save, evaluate = [], T.save_checkpoint, T.evaluate
    monkeypatch.setattr(T, "save_checkpoint", lambda p, s: (order.append(p.name), save(p, s)))
    monkeypatch.setattr(T, "evaluate", lambda *a: (order.append("validation"), evaluate(*a))[1])
    before_step(monkeypatch, interrupt_at(5))
    with pytest.raises(SystemExit):
        train(data, tmp_path / "out", eval_interval=3, max_steps=30)
    assert load_checkpoint(tmp_path / "out")["step"] == 6
    assert "stopped at step 6" in capsys.readouterr().out
    second = order[order.index("last.pt") + 1 :]
    assert second[0] == "last.pt" and "validation" in second


def test_a_signal_after_the_decision_does_not_part_the_processes(data, tmp_path, monkeypatch):
    """A signal that comes when the other processes already continue counts for the next step."""
    evaluate = T.evaluate
    monkeypatch.setattr(T, "evaluate", lambda *a: (interrupt_at(0)(0), evaluate(*a))[1])
    with pytest.raises(SystemExit):
        train(data, tmp_path / "out", max_steps=4, eval_interval=2)
    assert load_checkpoint(tmp_path / "out")["step"] == 3


def test_seconds_are_not_of_a_clock_that_can_be_set_back(data, tmp_path, monkeypatch):
    hours = iter(range(999, 0, -1))
    monkeypatch.setattr(T.time, "time", lambda: 3600.0 * next(hours))
    assert train(data, tmp_path / "out")["seconds"] > 0


def test_resume_takes_the_options_of_this_call_and_says_so(data, tmp_path, capsys, parts):
    train(data, tmp_path / "out", max_steps=5)
    train(data, tmp_path / "out", resume=True, weight_decay=0.7, beta1=0.5, prior_lr=0.3)
    assert "weight_decay 0.1 -> 0.7" in capsys.readouterr().out
    groups = {group["name"]: group for group in parts[-1][1].param_groups}
    assert groups["matrix"]["weight_decay"] == 0.7 and groups["matrix"]["betas"] == (0.5, 0.95)
    assert groups["theta"]["peak_lr"] == 0.3 and groups["theta"]["weight_decay"] == 0.0
    train(data, tmp_path / "out", resume=True, max_steps=5)
    assert "at step 10 of 5" in capsys.readouterr().out


# ---- checkpoints


def test_checkpoints_and_log(data, tmp_path):
    train(data, tmp_path / "out", compile="false")
    saved = torch.load(tmp_path / "out/last.pt", weights_only=True)
    assert saved["step"] == 10 and saved["tokenizer"] == "bytes"
    assert saved["train_config"]["prior_lr"] == 5e-2
    assert not any("module." in k or "_orig_mod" in k for k in saved["model"])
    log = read_log(tmp_path / "out")
    assert np.shape(log[-1]["theta_beta"]) == np.shape(log[-1]["s"]) == (2, 2)
    losses = {record["step"]: record["val"] for record in log if "val" in record}
    best = load_checkpoint(tmp_path / "out/best.pt")
    assert set(losses) == {5, 10} and best["best"] == min(losses.values())
    assert losses[best["step"]] == best["best"]
    assert {"val_1x", "val_2x", "val_4x"} <= set(log[-1])


def test_a_full_disk_keeps_the_old_checkpoint(data, tmp_path, capsys):
    """Stands for a full disk: the largest size of a file, below that of a checkpoint."""
    resource = pytest.importorskip("resource")
    train(data, tmp_path / "out", max_steps=5)
    before = (tmp_path / "out/last.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(SystemExit) as stopped:
            configurator.run(lambda: train(data, tmp_path / "out", resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and printed.startswith("error: ") and printed.count("\n") == 1
    assert "last.pt cannot be written: [Errno 27] File too large" in printed or "best.pt" in printed
    assert (tmp_path / "out/last.pt").read_bytes() == before
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_a_checkpoint_that_may_not_be_read_is_no_damaged_one(data, tmp_path, monkeypatch, capsys):
    def load(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    train(data, tmp_path / "out", max_steps=1)
    monkeypatch.setattr(torch, "load", load)
    told = refuse(capsys, data, tmp_path / "out", resume=True)
    assert told.endswith("last.pt: permission denied\n")


def test_a_copy_without_the_optimizer_cannot_be_resumed(data, tmp_path, capsys):
    saved = train(data, tmp_path / "out", max_steps=1)
    del saved["optimizer"]
    T.save_checkpoint(tmp_path / "out/last.pt", saved)
    told = refuse(capsys, data, tmp_path / "out", resume=True)
    assert "a copy without the optimizer's state" in told


def test_another_tokenizer_cannot_continue_a_run(data, tmp_path, capsys):
    saved = train(data, tmp_path / "out", max_steps=5)
    T.save_checkpoint(tmp_path / "out/last.pt", saved | {"tokenizer": "gpt2"})
    assert "model or tokenizer" in refuse(capsys, data, tmp_path / "out", resume=True)


def test_a_run_is_never_overwritten(data, tmp_path, capsys):
    train(data, tmp_path / "out", max_steps=1)
    before = (tmp_path / "out/last.pt").read_bytes()
    assert "already holds a run" in refuse(capsys, data, tmp_path / "out")
    assert (tmp_path / "out/last.pt").read_bytes() == before
    assert "another model" in refuse(capsys, data, tmp_path / "out", resume=True, n_layer=1)


def test_a_model_without_finite_validation_loss_is_not_saved(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(T, "evaluate", lambda *_: {"val": math.nan})
    assert train(data, tmp_path / "out", max_steps=1) is None
    assert "no checkpoint is written" in capsys.readouterr().out


def test_the_commit_is_this_programs_and_says_what_was_changed(tmp_path, monkeypatch):
    def git(*arguments):
        about = ("user.name=Ada", "user.email=ada@example.org", "commit.gpgsign=false")
        options = [word for setting in about for word in ("-c", setting)]
        command = ["git", "-C", str(tmp_path), *options, *arguments]
        return subprocess.check_output(command, text=True).strip()

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


# ---- device


def test_a_failing_compiler_is_told_and_changes_nothing(data, tmp_path, monkeypatch, capsys, parts):
    def compile(model, **_):
        def run(*_):
            raise RuntimeError("no C++ compiler\nwas found")

        return run

    train(data, tmp_path / "plain")
    monkeypatch.setattr(torch, "compile", compile)
    train(data, tmp_path / "compiled", compile="true")
    told = "compiling failed (RuntimeError: no C++ compiler); continuing uncompiled"
    assert told in capsys.readouterr().out and parts[-1][0].attention == "reference"
    assert same(state(tmp_path / "plain"), state(tmp_path / "compiled"))


def test_the_device_and_the_attention_are_said(data, tmp_path, capsys):
    saved = train(data, tmp_path / "out", max_steps=1, dtype="auto")
    dtype, reason = pick_dtype("auto", torch.device("cpu"))
    picked = saved["train_config"]["dtype"]
    assert getattr(torch, picked) == dtype
    said = f"device cpu (as requested), {picked} ({reason}), compile off, attention reference"
    assert said in capsys.readouterr().out


# ---- windows and batches


def test_every_window_once_an_epoch_over_all_ranks():
    order = Order(windows=50, per_step=8, seed=3)
    seen = np.concatenate([order.step(s, rank, 4) for s in range(25) for rank in range(4)])
    assert (np.bincount(seen, minlength=50) == 4).all()  # 25 steps of 8 windows are 4 epochs of 50
    ranks = np.concatenate([order.step(9, rank, 4) for rank in range(4)])
    assert sorted(order.step(9)) == sorted(ranks)
    assert (order.step(2) == Order(50, 8, 3).step(2)).all()
    assert (order.step(2) != Order(50, 8, 4).step(2)).any()


def test_windows_reach_the_last_token_of_every_shard(tmp_path):
    for i, n in enumerate((33, 48, 49)):
        write_shard(tmp_path / f"{i}.bin", np.arange(n) + 100 * i)
    windows = Windows(sorted(tmp_path.glob("*.bin")), 16)
    assert len(windows) == 2 + 2 + 3
    expected = [list(range(a, a + 17)) for a in (16, 100, 232)]
    assert windows.take(np.array([1, 2, 6])).tolist() == expected


def test_50_shards_are_read_exactly_once_an_epoch_by_two_ranks(tmp_path):
    """Each of 50 shards of 1,000 tokens has 62 windows of 16. A token tells shard and place."""
    for shard in range(50):
        write_shard(tmp_path / f"x_train_{shard:06d}.bin", np.arange(1000) + 1000 * shard)
    windows = Windows(sorted(tmp_path.glob("*.bin")), 16)
    assert len(windows) == 50 * 62
    order = Order(len(windows), per_step=100, seed=5)
    read = [windows.take(order.step(step, rank, 2))[:, 0] for step in range(31) for rank in (0, 1)]
    expected = [1000 * shard + 16 * k for shard in range(50) for k in range(62)]
    assert np.sort(np.concatenate(read)).tolist() == expected


def test_virtual_lengths_are_drawn_by_seed_step_and_window(data):
    """Their logarithms are uniform in 0 ... ln(virtual_length). Processes share one draw."""
    read = reader(data, virtual_length=50.0)
    draws = np.stack([torch.cat([batch[3] for batch in read(step)]) for step in range(500)])
    assert same(torch.from_numpy(draws[3]), torch.cat([batch[3] for batch in read(3)]))
    draws /= np.log(50)
    assert len(np.unique(draws)) > 0.99 * draws.size
    assert 0 <= draws.min() < 0.01 and 0.99 < draws.max() <= 1
    assert draws.mean() == pytest.approx(0.5, abs=0.02)
    assert draws.std() == pytest.approx(12**-0.5, abs=0.02)
    ranks = [reader(data, Processes(rank, 2), virtual_length=50.0)(3) for rank in range(2)]
    shared = np.stack([batch[3] for (batch,) in ranks], axis=1).flatten() / np.float32(np.log(50))
    np.testing.assert_allclose(shared, draws[3], rtol=1e-5)
    assert all(batch[3] is None for batch in reader(data)(3))


def test_two_encodings_see_the_same_batches_and_validation(data, tmp_path, monkeypatch):
    seen, forward = [], T.GPT.forward
    monkeypatch.setattr(
        T.GPT, "forward", lambda self, idx, *rest: (seen.append(idx), forward(self, idx, *rest))[1]
    )
    train(data, tmp_path / "a")
    train(data, tmp_path / "b", pe="rope", ssmax="false")
    half = len(seen) // 2
    assert half > 10 * 2 and same(seen[:half], seen[half:])


def test_last_target_of_packed_windows_is_not_trained(tmp_path):
    """Packed windows are shuffled: the token after a window belongs to another text."""
    write_data(tmp_path / "packed", window=16)
    for _, targets, _, _ in reader(tmp_path / "packed")(0):
        assert (targets[:, -1] == -100).all() and (targets[:, :-1] >= 0).all()


# ---- validation


def test_validation_contexts_score_the_same_targets(data):
    """Documents of 90 tokens hold one window of 4 x 16 + 1. The model here sees no context."""
    model_cfg, cfg = configs(data, pe="nope", ssmax="false")
    sets = T.pick_validation(T.find_data(cfg, model_cfg, 1)[1], 256, 8)
    long = sets["val_4x"][0]
    assert long.shape[1] == 65 and not (long[:, 1:] == 256).any()
    model = T.GPT(model_cfg)
    model.forward = lambda idx, y, doc_ids: (y[y != -100] / 100).mean()
    autocast = torch.autocast("cpu", enabled=False)
    losses = T.evaluate(model, sets, 256, 32, ALONE, autocast)
    assert losses["val_1x"] == losses["val_2x"] == losses["val_4x"] != losses["val"]


def test_no_long_document_is_said(tmp_path, capsys):
    write_data(tmp_path / "short", document=30)
    model_cfg, cfg = configs(tmp_path / "short")
    assert set(T.pick_validation(T.find_data(cfg, model_cfg, 1)[1], 256, 8)) == {"val"}
    assert "no val_2x" in capsys.readouterr().out


# ---- optimizer steps


def test_gradient_accumulation_is_the_joined_batch(data, tmp_path, monkeypatch, float64):
    runs, make = [], T.make_optimizer

    def make_optimizer(model, cfg):
        model.double()
        with torch.no_grad():
            for p in model.parameter_groups()["theta"]:
                p.uniform_(0.2, 1.0, generator=torch.Generator().manual_seed(0))
        optimizer = make(model, cfg)
        optimizer.register_step_pre_hook(
            lambda *_: runs.append({n: p.grad.clone() for n, p in model.named_parameters()})
        )
        return optimizer

    monkeypatch.setattr(T, "make_optimizer", make_optimizer)
    records = []
    for batch_size in (4, 1):
        out = tmp_path / str(batch_size)
        train(data, out, batch_size=batch_size, grad_clip=0.0, max_steps=1)
        records += read_log(out)
    assert records[0]["loss"] == pytest.approx(records[1]["loss"], rel=1e-5), "a float32 sum"
    assert records[0]["grad_norm"] == pytest.approx(records[1]["grad_norm"], rel=1e-11)
    for name, gradient in runs[0].items():
        torch.testing.assert_close(gradient, runs[1][name], rtol=1e-9, atol=1e-13)


def test_learning_rates_follow_warm_up_and_cosine(data, tmp_path, parts):
    cfg = T.TrainConfig(warmup_steps=10, max_steps=110, min_lr_fraction=0.1)
    factors = [T.learning_rate_factor(s, cfg) for s in range(111)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1.0
    assert factors[60] == pytest.approx(0.55) and factors[110] == pytest.approx(0.1)
    assert T.learning_rate_factor(0, T.TrainConfig(warmup_steps=0)) == 1.0
    train(data, tmp_path / "out", ssmax_lr=3e-2, max_steps=1)
    rates = {group["name"]: group["lr"] for group in parts[0][1].param_groups}
    assert rates == {"matrix": 1e-2, "norm": 1e-2, "theta": 5e-2, "s": 3e-2}


def test_a_fixed_batch_is_learned(data, tmp_path, monkeypatch):
    monkeypatch.setattr(T.Order, "step", lambda *_: np.array([0, 1, 2, 3]))
    train(data, tmp_path / "out", max_steps=60, eval_interval=60)
    log = read_log(tmp_path / "out")
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]


def test_a_step_without_finite_gradient_changes_nothing(data, tmp_path, monkeypatch, capsys, parts):
    seen = []

    def watch(step):
        model, optimizer = parts[0]
        seen.append(copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]]))
        if step == 1:
            model.forward = lambda *batch: T.GPT.forward(model, *batch) * math.inf
        if step == 2:
            del model.forward

    before_step(monkeypatch, watch)
    saved = train(data, tmp_path / "out", max_steps=4)
    assert same(seen[1], seen[2]) and not same(seen[2][0], seen[3][0])
    assert saved["step"] == 4 and saved["skipped"] == 1
    assert "step 2: loss inf" in capsys.readouterr().out


@pytest.mark.parametrize("scaler", [False, True])
def test_a_scaler_that_tries_its_scale_costs_no_checkpoint(
    data, tmp_path, monkeypatch, parts, scaler
):
    real = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: real("cpu", enabled=scaler)
    )

    def ruin(step):
        model = parts[0][0]
        factor = {True: math.inf, False: 1}
        model.forward = lambda *batch: T.GPT.forward(model, *batch) * factor[model.training]

    before_step(monkeypatch, ruin)
    saved = train(data, tmp_path / "out", max_steps=1)
    assert (saved is not None) == scaler and (saved or {"step": 1})["step"] == 1


def test_a_diverged_run_keeps_its_last_checkpoint(data, tmp_path, capsys):
    """One huge step ruins the weights. Later ones are skipped, nothing is saved, and after ten of
    them the run ends."""
    train(data, tmp_path / "out", max_steps=5)
    before = (tmp_path / "out/last.pt").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        options = {"resume": True, "learning_rate": 1e30, "grad_clip": 0.0, "max_steps": 40}
        train(data, tmp_path / "out", **options)
    printed = capsys.readouterr()
    assert stopped.value.code == 3 and "10 steps in a row" in printed.err
    assert "no checkpoint is written" in printed.out
    assert (tmp_path / "out/last.pt").read_bytes() == before
    log = (tmp_path / "out/log.jsonl").read_text(encoding="utf-8")
    assert "NaN" not in log and "Infinity" not in log, "these are not JSON"
    record = json.loads(log.splitlines()[-1])
    assert record["skipped"] == 9 and record["grad_norm"] is None


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--learning_rat=1",), "did you mean 'learning_rate'"),
        (("missing.py",), "missing.py"),
        (("--data=missing",), "missing has 0 training and 0 validation windows"),
        (("--block_size=1024", "--tokens_per_step=2048"), "0 validation windows of 1024 tokens"),
        (("--vocab_size=100",), "set vocab_size to 257"),
        (("--n_head=3",), "divisible"),
        (("--tokens_per_step=48",), "multiple"),
        (("--resume",), "no checkpoint"),
        (("--device=tpu9",), "device tpu9"),
        (("--dtype=float16",), "float16"),
        (("--max_steps=0",), "at least 1"),
        (("--beta1=2",), "beta"),
        (("--prior_lr=-1",), "prior_lr is -1.0; it must be at least 0"),
        (("--beta1=1",), "beta"),
        (("--device=meta",), "device meta"),
    ],
)
def test_errors_are_one_sentence(data, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(*words(data, tmp_path / "out"), *arguments)
    printed = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and message in printed
    assert printed.startswith("error: ") and "\n" not in printed
    assert not (tmp_path / "out").exists()


def test_ids_beyond_the_vocabulary_are_told(data, tmp_path, capsys):
    shard = next(data.glob("*val*.bin"))
    tokens = np.array(read_shard(shard))
    tokens[-1] = 300
    write_shard(shard, tokens)
    told = refuse(capsys, data, tmp_path / "out")
    assert "the token id 300, vocab_size is 257; set vocab_size to 301" in told


def test_an_output_folder_that_cannot_be_made(data, tmp_path, monkeypatch, capsys):
    def mkdir(path, *_, **__):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(T.Path, "mkdir", mkdir)
    assert "operation not permitted" in refuse(capsys, data, tmp_path / "out")


def test_a_file_in_the_way_is_told_before_anything_is_built(data, tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/run"):
        assert "is a file where a folder is needed" in refuse(capsys, data, out)


def test_damaged_meta_is_told(data, tmp_path, capsys):
    (data / "meta.json").write_text("{broken", encoding="utf-8")
    assert "damaged" in refuse(capsys, data, tmp_path / "out")


def test_data_packed_for_another_window_is_refused(tmp_path, capsys):
    write_data(tmp_path / "packed", window=32)
    told = refuse(capsys, tmp_path / "packed", tmp_path / "out")
    assert "windows of 32 tokens, block_size is 16" in told


def test_one_training_a_folder(data, tmp_path):
    """A second one is refused and changes nothing, and so is a second preparation."""
    lock_folder(tmp_path / "out")
    lock_folder(tmp_path / "shards")
    prepare = {"prepare": "--source=pydocs --window=16"}
    try:
        for options in (
            words(data, tmp_path / "out", max_steps=1),
            words(tmp_path / "shards", tmp_path / "new", max_steps=1, **prepare),
        ):
            command = [sys.executable, str(T.ROOT / "train.py"), *options]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 2
            assert "is being written by another process; wait for it" in done.stderr
        assert list((tmp_path / "out").iterdir()) == []
        assert not (tmp_path / "new").exists() and not list((tmp_path / "shards").glob("*.bin"))
    finally:
        remove_locks()
    assert not (tmp_path / "out").exists()


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as stopped:
        main("--help")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    for cls in (ModelConfig, T.TrainConfig):
        for field in dataclasses.fields(cls):
            assert f"--{field.name}=" in printed


# ---- prepared data


def test_data_is_prepared_when_it_is_missing(tmp_path, capfd):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text("Some words, again and again. " * 40, encoding="utf-8")
    files[1].write_text("Other words for the validation. " * 20, encoding="utf-8")
    prepare = f"--source=files --files={files[0]},{files[1]} --window=16 --val_fraction=0.2"
    model_cfg, cfg = configs(tmp_path / "made", prepare=prepare)
    assert len(T.find_data(cfg, model_cfg, 1)[0]) > 50 and (tmp_path / "made/meta.json").exists()
    told = refuse(capfd, tmp_path / "other", tmp_path / "out", prepare="--source=nothing")
    assert "did not succeed" in told


def test_data_that_is_not_what_prepare_asks_for_is_refused(tmp_path, capsys):
    """The quick start's folder, prepared without exercises. Without prepare it is used as it is."""

    def find(name, prepare):
        model_cfg, cfg = configs(tmp_path / name, prepare=prepare)
        T.find_data(cfg, model_cfg, 1)

    prepare = "--source=pydocs --window=16 --retrieval_fraction=0.85"
    settings = settings_of(PrepareConfig(source="pydocs", window=16))
    write_data(tmp_path / "data", settings=settings)
    told = refuse(capsys, tmp_path / "data", tmp_path / "out", prepare=prepare)
    assert told.count("\n") == 1
    assert "was prepared with retrieval_fraction=0.0 (expected 0.85); choose a new folder" in told
    assert "--data=NAME" in told and "--prepare=" in told
    find("data", "")
    find("data", "--source=pydocs --window=16 --workers=3")
    write_data(tmp_path / "old")
    told = refuse(capsys, tmp_path / "old", tmp_path / "out", prepare=prepare)
    assert "source=None (expected pydocs)" in told


def test_hidden_files_are_no_data(data, tmp_path, capfd):
    """A file manager's notes: neither do they make a folder full, nor are they shards."""
    for name in (".DS_Store", "._x_train_000001.bin", "._x_val_000000.bin"):
        (data / name).write_bytes(b"notes")
    model_cfg, cfg = configs(data)
    assert len(T.find_data(cfg, model_cfg, 1)[0].shards) == 1
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/.DS_Store").write_bytes(b"notes")
    model_cfg, cfg = configs(tmp_path / "empty", prepare="--source=files --files=absent.txt")
    with pytest.raises(SystemExit):
        T.find_data(cfg, model_cfg, 1)
    assert "no file absent.txt" in capfd.readouterr().err


# ---- slow, and on CUDA


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written(data, tmp_path):
    """A run that is always writing checkpoints is killed at 20 random moments. last.pt and best.pt
    are always whole, and the run that continues from them ends as one that was never stopped."""
    rng, kills, out = np.random.default_rng(0), 0, tmp_path / "killed"
    options = {"n_embd": 256, "max_steps": 400, "eval_interval": 1, "eval_windows": 2}
    command = [sys.executable, str(T.ROOT / "train.py")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    straight = words(data, tmp_path / "straight", **options)
    subprocess.run([*command, *straight], check=True, **quiet)
    while kills < 20:
        resume = (out / "last.pt").exists()
        process = subprocess.Popen([*command, *words(data, out, resume=resume, **options)], **quiet)
        before = (out / "last.pt").stat().st_mtime_ns if resume else 0
        while process.poll() is None and not written_since(out / "last.pt", before):
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
    subprocess.run([*command, *words(data, out, resume=True, **options)], check=True, **quiet)
    assert same(state(tmp_path / "straight"), state(out))


def written_since(file, before):
    try:
        return file.stat().st_mtime_ns > before
    except FileNotFoundError:  # not yet, or between two names
        return False


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_training_on_cuda(tmp_path, dtype, parts):
    """Compiled, fused, in mixed precision, with the loss scaler for float16: it learns, and a
    resumed run continues."""
    if dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bfloat16 is not native on this device")
    options = {"device": "cuda", "dtype": dtype, "compile": "true", "eval_interval": 30}
    options |= {"n_embd": 64, "block_size": 128, "tokens_per_step": 512}
    write_data(tmp_path / "long", train_tokens=20_000, val_tokens=3000, document=700)
    saved = train(tmp_path / "long", tmp_path / "out", max_steps=60, **options)
    assert parts[0][0].attention == "fused" and bool(saved["scaler"]) == (dtype == "float16")
    log = read_log(tmp_path / "out")
    assert log[-1]["loss"] < log[0]["loss"] - 1 and log[-1]["skipped"] < 10
    assert log[-1]["peak_memory"] > 0
    resumed = train(tmp_path / "long", tmp_path / "out", max_steps=70, resume=True, **options)
    assert resumed["step"] == 70

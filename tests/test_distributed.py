"""Several processes over gloo, as torchrun starts them, are the same run as one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import MODEL, write_data

import train as T
from data import remove_locks
from runs import load_checkpoint

ROOT = Path(__file__).resolve().parent.parent
GIVEN = MODEL | {"tokens_per_step": 256, "eval_windows": 7, "eval_interval": 3, "log_interval": 1}
# A theta that is not 0, where theta_alpha's gradient would be rounding noise. A rate that does not
# depend on the run's end.
GIVEN |= {"theta_alpha": "0.5,-0.3", "theta_beta": "0.7,-0.4", "learning_rate": 1e-3}
GIVEN |= {"prior_lr": 1e-2, "min_lr_fraction": 1, "virtual_length": 50, "device": "cpu"}
GIVEN |= {"dtype": "float32"}
OPTIONS = [f"--{k}={v}" for k, v in GIVEN.items()]
RUNS = ["--out_dir=two --max_steps=5 --grad_clip=0"]  # a clip would hide a gradient's wrong size
for sharded in ("false", "true"):
    RUNS += [
        f"--out_dir=straight_{sharded} --max_steps=6 --shard_optimizer={sharded}",
        f"--out_dir=parts_{sharded} --max_steps=3 --shard_optimizer={sharded}",
        f"--out_dir=parts_{sharded} --max_steps=6 --shard_optimizer={sharded} --resume",
    ]
RUNS = [run.split() for run in (*RUNS, "--out_dir=refused --batch_size=16")]
# In each process: train.py's main() for every run. Keeps its gradients, its output and its status.
WORKER = """
import contextlib, io, json, os, sys
sys.path[:0] = sys.argv[1:3]
import torch, test_distributed as D, train
for i, (options, port) in enumerate(zip(json.loads(sys.argv[3]), json.loads(sys.argv[4]))):
    os.environ["MASTER_PORT"], printed = port, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            words = [*D.OPTIONS, "--data=data", "--batch_size=2", *options]
            gradients = D.run_main(words, double=i == 0)
        torch.save(gradients, f"gradients_{i}_{os.environ['RANK']}.pt")
    except SystemExit as stopped:
        print("exit status", stopped.code, file=printed)
        torch.distributed.destroy_process_group()
    with open(f"printed_{i}_{os.environ['RANK']}", "w", encoding="utf-8") as f:
        f.write(printed.getvalue())
"""


def run_main(options, double=False):
    """train.py with these options, in float64 if `double`; returns the gradients of every step."""
    kept, make = [], T.make_optimizer

    def make_optimizer(model, cfg):
        optimizer = make(model.double() if double else model, cfg)
        optimizer.register_step_pre_hook(
            lambda *_: kept.append({name: p.grad.clone() for name, p in model.named_parameters()})
        )
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "make_optimizer", make_optimizer)
        patch.setattr(sys, "argv", ["train.py", *options])
        patch.setattr(sys, "stdout", sys.stdout)  # main() silences all processes but the first
        if double:  # as the fixture float64 does
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        try:
            T.main()
        finally:
            remove_locks()  # as the end of the process does
    return kept


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_data(folder / "data")
    words = [sys.executable, "-c", WORKER, str(ROOT), str(ROOT / "tests"), json.dumps(RUNS)]
    words.append(json.dumps(free_ports(len(RUNS))))
    running = []
    for rank in ("0", "1"):
        env = os.environ | {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "test"}
        running.append(subprocess.Popen(words, env=env, cwd=folder, stderr=subprocess.PIPE))
    errors = [process.communicate()[1].decode() for process in running]
    assert all(process.returncode == 0 for process in running), errors
    return folder


def gradients(folder, run, rank):
    return torch.load(folder / f"gradients_{run}_{rank}.pt", weights_only=True)


def printed(folder, run, rank=0):
    return (folder / f"printed_{run}_{rank}").read_text(encoding="utf-8")


def assert_close(a, b):
    """Each tensor to 1e-11 of its norm. In float64 another order of sums changes 1e-14 of it; a
    gradient of other windows, or one that is not the mean over the processes, changes it wholly."""
    for name in b:
        assert (a[name] - b[name]).norm() <= 1e-11 * b[name].norm(), name


def test_two_processes_with_four_micro_steps_are_one_with_the_joined_batch(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = [*OPTIONS, "--data=data", "--out_dir=one", "--batch_size=16", "--max_steps=5"]
    options += ["--grad_clip=0"]
    one = run_main(options, double=True)
    both = [gradients(folder, 0, rank) for rank in (0, 1)]
    assert len(one) == len(both[0]) == 5 and one[0].keys() == both[0][0].keys()
    assert one[0]["embedding.weight"].dtype == torch.float64
    assert_close(both[0][0], one[0])
    for a, b in zip(*both, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a), "every process steps with the same gradient"
    two, one = load_checkpoint("two"), load_checkpoint("one")
    assert_close(two["model"], one["model"])
    assert two["best"] == pytest.approx(one["best"], rel=1e-11), (
        "seven validation windows over two processes"
    )


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_two_processes_resume_bit_for_bit(folder, sharded):
    straight, parts = (
        load_checkpoint(folder / f"{kind}_{sharded}") for kind in ("straight", "parts")
    )
    assert "resumed" in printed(folder, 3 if sharded == "false" else 6)
    assert parts["step"] == straight["step"] == 6
    assert all(torch.equal(parts["model"][n], straight["model"][n]) for n in straight["model"])


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_one_process_continues_a_run_of_two(folder, sharded, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    out = f"--out_dir=parts_{sharded}"
    run_main([*OPTIONS, "--data=data", out, "--batch_size=4", "--max_steps=7", "--resume"])
    assert "processes 2 -> 1" in capsys.readouterr().out
    assert load_checkpoint(f"parts_{sharded}")["step"] == 7


def test_a_sharded_optimizer_changes_nothing(folder):
    plain, sharded = (load_checkpoint(folder / f"straight_{name}") for name in ("false", "true"))
    assert all(torch.equal(plain["model"][n], sharded["model"][n]) for n in plain["model"])


def test_only_the_first_process_speaks_and_errors_have_a_status(folder, monkeypatch, capsys):
    assert "step      5/5" in printed(folder, 0) and "step" not in printed(folder, 0, rank=1)
    refused = printed(folder, len(RUNS) - 1)
    assert "is not a multiple of processes x" in refused and "exit status 2" in refused
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as stopped:
        run_main([*OPTIONS, "--data=data", "--out_dir=new", "--batch_size=2", "--shard_optimizer"])
    assert stopped.value.code == 2 and "shard_optimizer needs several" in capsys.readouterr().err
    assert not Path("new").exists() and not Path("refused").exists()

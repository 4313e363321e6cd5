"""configurator.py: what a user can write, and what each mistake is told."""

from configurator import fail, meanings, parse, run, user_errors

import importlib
import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentError
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(
    p.name for p in ROOT.glob("*.py") if "configurator.run(main)" in p.read_text(encoding="utf-8")
)


@dataclass
class Net:
    n_layer: int = 12  # number of Transformer blocks
    pe: Literal["nope", "rope"] = "rope"  # positional encoding, a meaning
    # that goes on below, and is long enough that the help has to break it into two lines or more

    # a remark that belongs to no field
    bias: bool = False  # add 100% of a bias # and a hash

    def __post_init__(self):
        n_layer: int = self.n_layer  # a local variable, no field
        if n_layer < 1:
            raise ValueError(f"n_layer = {n_layer}:\nexpected at least 1")


@dataclass
class Run:
    learning_rate: float = 6e-4  # peak
    out_dir: str = "out/a b"  # folder
    lengths: tuple[int, ...] = (512, 4096)  # context lengths
    betas: tuple[float, ...] = (0.9, 0.95)  # of Adam
    tasks: tuple[str, ...] = ()  # tasks


def read(*argv, positional="config"):
    (net, run), words = parse(
        [Net, Run], [str(word) for word in argv], "First.\n\nSecond.", positional
    )
    return net, run, words


def refused(capsys, *argv, positional="config") -> str:
    """The one line on stderr of a run that has to end with status 2."""
    with pytest.raises(SystemExit) as stop:
        read(*argv, positional=positional)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture
def file(tmp_path):
    """Writes a config file and returns its path."""

    def write(text: str, name: str = "x.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_defaults_and_the_three_kinds_of_words():
    assert read() == read(positional=None) == (Net(), Run(), [])
    assert read("a", "--n_layer=3", "b", positional="runs") == (Net(n_layer=3), Run(), ["a", "b"])
    assert read(positional="runs")[2] == []


def test_too_many_words(capsys):
    assert "at most one config file" in refused(capsys, "a.py", "b.py")
    assert "a.py: expected only --key=value" in refused(capsys, "a.py", positional=None)


@pytest.mark.parametrize(
    "word, value",
    [
        ("--n_layer=1000", 1000),
        ("--n_layer=1_000", 1000),
        ("--n_layer=1e6", 1000000),
        ("--learning_rate=1", 1.0),
        ("--learning_rate=-3e-4", -3e-4),
        ("--out_dir=a=b", "a=b"),
        ("--out_dir=", ""),
        ("--out_dir=12", "12"),
        ("--pe=nope", "nope"),
        ("--bias", True),
        ("--bias=TRUE", True),
        ("--bias=1", True),
        ("--bias=False", False),
        ("--bias=0", False),
        ("--lengths=512,1e6", (512, 1000000)),
        ("--lengths=7", (7,)),
        ("--lengths=", ()),
        ("--betas=1, 0.5", (1.0, 0.5)),
        ("--tasks=a,b", ("a", "b")),
    ],
)
def test_command_line_value(word, value):
    net, run, _ = read(word)
    key = word[2:].split("=")[0]
    got = {**vars(net), **vars(run)}[key]
    assert got == value and type(got) is type(value)
    if isinstance(value, tuple):
        assert [type(item) for item in got] == [type(item) for item in value]


@pytest.mark.parametrize(
    "word, why",
    [
        ("--n_layer=abc", "expected an int"),
        ("--n_layer=2.0", "expected an int"),
        ("--n_layer=1.5e0", "expected an int"),
        ("--n_layer=inf", "expected an int"),
        ("--n_layer=1e999", "expected an int"),
        ("--n_layer=", "expected an int"),
        ("--learning_rate=fast", "expected a finite number"),
        ("--learning_rate=nan", "expected a finite number"),
        ("--learning_rate=-inf", "expected a finite number"),
        ("--bias=yes", "expected true or false"),
        ("--pe=alibi", "expected one of nope, rope"),
        ("--lengths=512,x", "expected ints separated by commas"),
        ("--betas=0.9,nan", "expected floats separated by commas"),
        ("--tasks=a,,b", "expected strs separated by commas"),
        ("--n_leyer=3", "unknown key 'n_leyer'; did you mean 'n_layer'?"),
        ("--learning-rate=3", "unknown key 'learning-rate'; did you mean 'learning_rate'?"),
        ("--xyz", "unknown key 'xyz'; see --help"),
        ("-x", "unknown key '-x'; see --help"),
    ],
)
def test_command_line_mistake(capsys, word, why):
    assert refused(capsys, word) == f"error: {word}: {why}\n"


def test_a_value_after_a_space_or_none(capsys, file):
    assert read("--n_layer", "3")[0].n_layer == 3
    net, run, words = read(file(""), "--n_layer", "3", "--learning_rate", "-1")
    assert (net.n_layer, run.learning_rate, len(words)) == (3, -1.0, 1)
    assert read("--bias=true", "--bias", "false")[0].bias is False
    net, _, words = read("--bias", "out/a", positional="runs")
    assert net.bias is True and words == ["out/a"]
    for words in (["--n_layer"], ["--n_layer", "--bias"]):
        assert "--n_layer: expected one argument; write --key=value" in refused(capsys, *words)
    assert "--n_layer=x: expected an int" in refused(capsys, "--n_layer", "x")


def test_later_wins(file):
    path = file("n_layer = 2\nlearning_rate = 2.0")
    net, run, taken = read("--n_layer=3", path, "--n_layer=4")
    assert (net.n_layer, run.learning_rate, taken) == (4, 2.0, [str(path)])


def test_config_file_values(file):
    path = file(
        "import math\nimport os.path as p\n_n = 5\nn_layer: int = _n\nlearning_rate = 1\n"
        "lengths = [1, 2]\nbetas = 1\ntasks = 'a'\nbias = True\npe = 'nope'\n"
        "out_dir = __file__ + ' \N{GREEK SMALL LETTER BETA}'"
    )
    net, run, _ = read(path)
    assert net == Net(5, "nope", True)
    assert run == Run(1.0, f"{path} \N{GREEK SMALL LETTER BETA}", (1, 2), (1.0,), ("a",))
    assert type(run.learning_rate) is float and type(run.betas[0]) is float


@pytest.mark.parametrize(
    "line, why",
    [
        ("n_layer = '3'", "expected an int"),
        ("n_layer = True", "expected an int"),
        ("n_layer = 2.0", "expected an int"),
        ("learning_rate = '1'", "expected a finite number"),
        ("learning_rate = False", "expected a finite number"),
        ("out_dir = 3", "expected a string"),
        ("bias = 1", "expected true or false"),
        ("pe = 'alibi'", "expected one of nope, rope"),
        ("pe = ['rope']", "expected one of nope, rope"),
        ("lengths = [1, 'a']", "expected ints separated by commas"),
        ("lengths = '512'", "expected ints separated by commas"),
    ],
)
def test_config_file_wrong_type(capsys, file, line, why):
    path = file(line)
    assert refused(capsys, path) == f"error: {path}: {line}: {why}\n"


def test_config_file_numbers_that_are_not_finite(capsys, file):
    for value in ("float('nan')", "float('inf')", "10**400"):
        assert "expected a finite number" in refused(capsys, file(f"learning_rate = {value}"))


def test_config_file_unknown_key(capsys, file):
    path = file("learning_rat = 1")
    assert (
        refused(capsys, path)
        == f"error: {path}: unknown key 'learning_rat'; did you mean 'learning_rate'?\n"
    )
    assert "unknown key 'sqrt'" in refused(capsys, file("from math import sqrt"))


def test_config_file_that_does_not_run(capsys, file, tmp_path):
    path = file("n_layer = 1\nn_layer = = 2")
    assert refused(capsys, path) == f"error: {path}, line 2: SyntaxError: invalid syntax\n"
    path = file("def _f():\n    return nothing\n\nn_layer = _f()")
    assert f"{path}, line 2: NameError: name 'nothing'" in refused(capsys, path)
    path = file("import json\n\njson.loads('{')")
    assert f"{path}, line 3: JSONDecodeError" in refused(capsys, path)
    path = file("raise RuntimeError('one\\ntwo')")
    assert f"{path}, line 1: RuntimeError: one two" in refused(capsys, path)
    path.write_bytes(b"out_dir = '\xff'")
    assert "utf-8" in refused(capsys, path)


def test_missing_file(capsys, tmp_path):
    path = tmp_path / "none.py"
    assert refused(capsys, path) == f"error: {path}: no such file or directory\n"
    assert f"{tmp_path}: is a directory" in refused(capsys, tmp_path)


def test_base_chain(file):
    file("n_layer = 1\nlearning_rate = 1.0\nbias = True", "a.py")
    file("base = '../a.py'\nn_layer = 2\nlearning_rate = 2.0", "sub/b.py")
    path = file("n_layer = 3\nbase = 'sub/b.py'", "c.py")
    net, run, _ = read(path)
    assert (net.n_layer, run.learning_rate, net.bias) == (3, 2.0, True)


def test_base_mistakes(capsys, file):
    file("base = 'sub/b.py'", "a.py")
    path = file("base = '../a.py'", "sub/b.py")
    assert "base goes in a circle" in refused(capsys, path)
    assert "none.py: no such file" in refused(capsys, file("base = 'none.py'"))
    assert "x.py: base = 3: expected a string" in refused(capsys, file("base = 3"))
    file("n_leyer = 3", "bad.py")
    assert "bad.py: unknown key 'n_leyer'" in refused(capsys, file("base = 'bad.py'"))


def test_post_init_error(capsys, file):
    assert refused(capsys, "--n_layer=0") == "error: n_layer = 0: expected at least 1\n"
    assert "expected at least 1" in refused(capsys, file("n_layer = 0"))


def help_of(capsys, *argv, positional="config") -> str:
    with pytest.raises(SystemExit) as stop:
        read(*argv, positional=positional)
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and err == ""
    return out


def test_help_lists_every_key(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of(capsys, "--help")
    assert max(map(len, text.splitlines())) <= 100
    flat = re.sub(r"\s+", " ", text)
    assert flat.startswith("usage: python ") and " First. Net: " in flat and "Second" not in flat
    net, run = flat.split(" Net: ")[1].split(" Run: ")
    assert net == (
        "--n_layer=12 (an int) number of Transformer blocks "
        "--pe=rope (one of nope, rope) positional encoding, a meaning that goes on below, and is "
        "long enough that the help has to break it into two lines or more "
        "--bias=false (true or false) add 100% of a bias # and a hash"
    )
    assert run.startswith(
        "--learning_rate=0.0006 (a finite number) peak --out_dir='out/a b' (a string) folder "
        "--lengths=512,4096 (ints separated by commas) context lengths "
        "--betas=0.9,0.95 (floats separated by commas) of Adam "
        "--tasks='' (strs separated by commas) tasks "
    )


def test_help_usage_and_defaults_of_a_config_file(capsys, file):
    assert "[CONFIG.py] [--key=value ...]\n" in help_of(capsys, "-h", "--n_leyer=3")
    assert "[runs ...] [--key=value ...]\n" in help_of(capsys, "out/a", "-h", positional="runs")
    usage = help_of(capsys, "-h", positional=None)
    assert re.search(r"^usage: python \S+ \[--key=value ...\]$", usage, re.M)
    path = file(f"n_layer = 7\nout_dir = '{'long/' * 9}'")
    text = help_of(capsys, path, "--help")
    assert "--n_layer=7 " in text and "--learning_rate=0.0006" in text
    assert re.search(rf"--out_dir={'long/' * 9}\n +\(a string\) folder\n", text)


def test_mistakes_of_the_programmer():
    @dataclass
    class Twice:
        n_layer: int = 1  # again

    @dataclass
    class Odd:
        table: dict = None  # no supported type

    with pytest.raises(ArgumentError, match="n_layer"):
        parse([Net, Twice], [], "")
    with pytest.raises(KeyError, match="dict"):
        parse([Odd], [], "")


def test_user_errors_turns_only_what_a_user_causes(capsys, tmp_path):
    for error, line in (
        (ValueError("bad\nvalue"), "error: bad value\n"),
        (OSError("disk on fire"), "error: disk on fire\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.pt"),
            "error: a.pt: no such file or directory\n",
        ),
    ):
        with pytest.raises(SystemExit) as stop, user_errors():
            raise error
        assert stop.value.code == 2 and capsys.readouterr().err == line
    for bug in (TypeError, KeyError, AssertionError):
        with pytest.raises(bug), user_errors():
            raise bug("ours")


def test_fail(capsys):
    with pytest.raises(SystemExit) as stop:
        fail("got this; expected that")
    assert stop.value.code == 2 and capsys.readouterr().err == "error: got this; expected that\n"


def test_a_config_file_that_exits_is_an_error(tmp_path, capsys):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        parse([], [str(tmp_path / "exits.py")], None, positional="config")
    assert stopped.value.code == 2 and "line 2" in capsys.readouterr().err


def test_ctrl_c_ends_without_a_traceback(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        run(main)
    assert stopped.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def call(code, stdout=subprocess.PIPE, **environment):
    """A process that imports configurator and runs `code`. stdout "closed": a pipe nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import configurator as c\n{code}"
    stdout, environment = writer if stdout == "closed" else stdout, os.environ | environment
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, env=environment
    )
    os.close(writer)
    return done


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("main", "status"),
    [
        ("print('table')", 130),
        ("c.parse([], ['--help'], 'First.')", None),
        ("print('table' * 9999)", 130),
        ("with c.user_errors(): print('table', flush=True)", 130),
        ("print('table'); c.fail('no')", None),
    ],
)
def test_a_reader_that_has_gone_ends_a_script_quietly(main, status, unbuffered):
    done = call(f"def main():\n    {main}\nc.run(main)", "closed", PYTHONUNBUFFERED=unbuffered)
    assert done.stderr in (b"", b"error: no\n") and done.returncode in (
        (0, 2, 130) if status is None else (status,)
    )


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_during_the_imports_has_no_traceback(script, tmp_path):
    """A module that every script imports early sends the signal in its place."""
    late = "torch" if "import torch" in (ROOT / script).read_text(encoding="utf-8") else "numpy"
    (tmp_path / f"{late}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)", encoding="utf-8"
    )
    words, env = [sys.executable, str(ROOT / script)], {**os.environ, "PYTHONPATH": str(tmp_path)}
    # these tests may have been started in the background, where Ctrl-C is ignored
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(words, env=env, capture_output=True, preexec_fn=heard)
    assert done.returncode == -signal.SIGINT and not done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_console_that_lacks_a_character_ends_nothing(encoding):
    done = call("c.run(lambda: print('1.5 \u00b1 0.1 \u6771'))", PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.strip() == (b"1.5 ? 0.1 ?" if encoding == "ascii" else b"1.5 \xb1 0.1 ?")


def test_an_error_of_the_system_is_one_sentence(capsys):
    def main():
        raise PermissionError(13, "Permission denied", "out/theirs/last.pt")

    with pytest.raises(SystemExit) as stopped:
        run(main)
    assert (
        stopped.value.code == 2
        and capsys.readouterr().err == "error: out/theirs/last.pt: permission denied\n"
    )


def test_the_home_folder_in_every_string(monkeypatch, file):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("USERPROFILE", "/home/ada")
    _, got, words = read("--out_dir=~/x", "--tasks=~/a,b~/,~", "~/run", "~x", positional="runs")
    assert got.out_dir == "/home/ada/x" and got.tasks == ("/home/ada/a", "b~/", "/home/ada")
    assert words == ["/home/ada/run", "~x"]
    assert read(file("out_dir = '~/x'"))[1].out_dir == "/home/ada/x"


def test_every_key_of_every_script_has_a_meaning():
    """A formatter may move a comment away from its field, and --help would silently lose it."""
    for script in SCRIPTS:
        for name, cls in vars(importlib.import_module(script.removesuffix(".py"))).items():
            if name.endswith("Config"):
                texts = meanings(cls)
                assert not [f.name for f in fields(cls) if len(texts[f.name]) < 3], cls

"""The course's grader: one file to hand in, checked, scored and ranked.

python course/grade.py stubs > mine.py                     # what to fill in
python course/grade.py sheet NAME                          # the numbers to answer, yours alone
python course/grade.py mine.py [--json=results.json]       # points an exercise, under 90 seconds
python course/grade.py run mine.py train.py config/ggd_bam_cpu.py    # a script with your functions
python course/grade.py board a.py b.py                     # exercise 10: train, ask, rank

A submission is a program and runs as one: grade what others wrote in a container without a network.
"""

import overlay

import configurator
from configurator import fail, user_errors

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data import replacing
from runs import aligned, read_records, wilson

COURSE = overlay.ROOT / "course"


@dataclass
class GradeConfig:
    """How to grade and to rank."""

    only: tuple[int, ...] = tuple(overlay.EXERCISES)  # grade these exercises
    json: str = ""  # also write the points here, as Gradescope's results.json
    seeds: tuple[int, ...] = (1, 2, 3)  # board: of the trainings; new ones for the last ranking
    out_dir: str = "out/board"  # board: folder of the runs

    def __post_init__(self):
        if not self.only or set(self.only) - set(overlay.EXERCISES):
            raise ValueError(
                f"only is {self.only}; the exercises are 1 to {len(overlay.EXERCISES)}"
            )


LIMIT = 60  # seconds an exercise
CODE, NUMBERS = 7, 3  # points of an exercise's checks and of its numbers; 10 where it has one kind


def defined(path: str) -> set[str]:
    """The functions of a file, and its classes that have a method."""
    try:
        nodes = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except SyntaxError as error:
        fail(f"{path}, line {error.lineno}: {error.msg}")
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = [n for n in nodes if isinstance(n, kinds)]
    return {n.name for n in nodes if any(isinstance(f, ast.FunctionDef) for f in ast.walk(n))}


# ---- points


def check(path: str, number: int) -> list[tuple[str, str]]:
    """The checks of an exercise in a process of their own: (name, "" or what is wrong). Number 0 is
    all numbers of the sheet, whose truth no function of the student may touch."""
    chosen = f"ex{number}_ and not test_number" if number else "test_number"
    command = [sys.executable, "-um", "pytest", "-v", "-p", "overlay", "-p", "no:cacheprovider"]
    command += [str(COURSE / "checks.py"), "-k", chosen, f"--exercise={number}"]
    paths = os.pathsep.join(map(str, (overlay.ROOT, COURSE)))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command += [f"--mine={Path(path).resolve()}", f"--junitxml={report}", f"--rootdir={folder}"]
        try:
            env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired as stopped:
            begun = re.findall(r"::(test_\S+)", (stopped.stdout or b"").decode())
            return [("all", f"{(begun or ['it'])[-1]} did not end in {LIMIT} seconds")]
        if not report.exists():  # the file itself could not be run
            lines = (done.stderr or done.stdout).strip().splitlines() or ["the process died"]
            return [("all", lines[-1].removeprefix("ERROR: "))]
        results = []
        for case in xml.parse(report).iter("testcase"):
            parts = [part for part in case if part.tag in ("failure", "error")]
            wrong = parts[0].get("message") if parts else ""
            if "RecursionError" in wrong:
                wrong = "it calls itself without end: what model has under this name is yours now"
            if wrong == "collection failure":
                wrong = [line for line in parts[0].text.splitlines() if line[:2] == "E "][-1]
            results.append((case.get("name"), wrong))
        return results or [("all", "no check ran")]


def grade_exercise(path: str, number: int, names: set[str], numbers: list) -> dict:
    """One test in Gradescope's format; numbers: what `check` says of the whole sheet."""
    if missing := [name for name in overlay.EXERCISES[number] if name not in names]:
        # else the repository's own function would be checked
        results = [("checks", f"{path} does not define {', '.join(missing)}")]
    else:
        results = check(path, number) if overlay.EXERCISES[number] else []
    checks = [wrong for _, wrong in results]
    own = [(name, wrong) for name, wrong in numbers if f"ex{number}_" in name or name == "all"]
    numbers = [wrong for _, wrong in own] if number < 10 else []
    results += own if number < 10 else []
    most = (CODE, NUMBERS) if numbers and checks else (10, 10)
    score = sum(
        points * kind.count("") / len(kind)
        for points, kind in zip(most, (checks, numbers), strict=True)
        if kind
    )
    wrong = [f"{name}: {message.splitlines()[0]}" for name, message in results if message]
    about = {"name": f"exercise {number}", "score": round(score, 2), "max_score": 10}
    return about | {"output": "\n".join(wrong) or "all right"}


def grade(path: str, cfg: GradeConfig) -> None:
    names = defined(path)
    with ThreadPoolExecutor(2) as pool:
        numbers = check(path, 0)
        tests = list(pool.map(lambda n: grade_exercise(path, n, names, numbers), cfg.only))
    for test in tests:
        print(f"{test['name']:12} {test['score']:6.2f} of {test['max_score']}")
        if test["output"] != "all right":
            lines = test["output"].splitlines()
            more = [f"and {len(lines) - 3} more"] * (len(lines) > 3)
            print("\n".join(f"    {line}" for line in (*lines[:3], *more)))
    print(f"{'all':12} {sum(t['score'] for t in tests):6.2f} of {10 * len(tests)}")
    if cfg.json:
        with replacing(cfg.json) as file:
            file.write(json.dumps({"tests": tests}, indent=1).encode())


# ---- scripts with a student's functions, and exercise 10


def run_script(path: str, script: str, arguments: list[str]) -> None:
    """A script of the repository with the functions of mine.py; empty stubs replace nothing."""
    module = Path(script).stem
    if not (COURSE.parent / f"{module}.py").exists():
        fail(f"there is no script {script}; give one such as train.py or eval_passkey.py")
    defined(path)  # a clear sentence for a syntax error
    overlay.lay_over(overlay.load(path), set(overlay.EXERCISES) - {4}, overlay.empty_stubs(path))
    sys.argv = [script, *arguments]
    importlib.import_module(module).main()


PLAIN = {"filler": "passkey", "wording": "passkey"}
TRACKS = {  # heading -> training lengths, key seeds, depths, texts
    "A: 16x": (16, "1,2,3", 20, PLAIN),
    "A: 64x": (64, "1,2,3", 20, PLAIN),
    "B: 256x": (256, "1", 5, PLAIN),
    "B: 500x": (500, "1", 5, PLAIN),
    "unseen filler, 16x": (16, "1,2,3", 20, PLAIN | {"filler": "unseen"}),
    "held-out frame, 16x": (16, "1,2,3", 20, PLAIN | {"wording": "vault"}),
}


def compete(path: str, cfg: GradeConfig) -> dict[str, list[dict]]:
    """Train an entry with each seed and ask it, but for what is there: {test: a record a seed}.
    Where it finds no key at 64x, track B counts as 0 unasked: heads that look far cost hours there.
    """
    records: dict[str, list[dict]] = {track: [] for track in TRACKS}

    def call(script: str, *words: str) -> None:
        command = [sys.executable, str(COURSE / "grade.py"), "run", path, script, *words]
        print("$ python " + " ".join(["course/grade.py", *command[2:]]), flush=True)
        if subprocess.run(command).returncode:
            fail(f"{script} did not succeed with {path}; the same command continues")

    for seed in cfg.seeds:
        folder = Path(cfg.out_dir) / f"{Path(path).stem}_s{seed}"
        options = ["--pe=mine", f"--seed={seed}", f"--out_dir={folder}"]
        log = read_records(folder / "log.jsonl")
        if not log or log[-1]["step"] < 3200:
            resume = ["--resume"] * (folder / "last.pt").exists()
            call("train.py", str(COURSE.parent / "config/ggd_bam_cpu.py"), *options, *resume)
        for track, (multiple, seeds, depths, texts) in TRACKS.items():
            if track[0] == "B" and not records["A: 64x"][-1]["correct"]:
                records[track].append({"correct": 0, "n": depths})
                continue
            words = [f"--{key}={value}" for key, value in texts.items()]
            words += [f"--seeds={seeds}", f"--depths={depths}"]
            call("eval_passkey.py", str(folder), f"--lengths={256 * multiple}", "--resume", *words)
            for r in read_records(folder / "eval" / "passkey.jsonl"):
                if r["length"] == 256 * multiple and texts.items() <= r["config"].items():
                    last = r
            records[track].append(last)
    return records


def board(paths: list[str], cfg: GradeConfig) -> None:
    """A row an entry: keys found in per cent over all seeds, with the 95% interval. The tracks rank
    by the sum of their intervals' lower ends."""
    entries = {}
    for path in paths:
        row = compete(path, cfg)
        totals = {
            t: (sum(r["correct"] for r in rs), sum(r["n"] for r in rs)) for t, rs in row.items()
        }
        entries[Path(path).stem] = {t: (c / n, *wilson(c, n)) for t, (c, n) in totals.items()}
    for track in "AB":

        def lowest(entry: str, track=track) -> float:
            return sum(low for t, (_, low, _) in entries[entry].items() if t.startswith(track))

        rows = [["entry", *TRACKS]]
        for entry in sorted(entries, key=lowest, reverse=True):
            cells = [[round(100 * x) for x in cell] for cell in entries[entry].values()]
            rows.append([entry, *(f"{p} [{low}, {high}]" for p, low, high in cells)])
        print(f"\nTrack {track}, seeds {', '.join(map(str, cfg.seeds))}\n{aligned(rows)}")


def main() -> None:
    if sys.argv[1:2] == ["run"]:  # what follows belongs to the script
        if len(sys.argv) < 4:
            fail("run needs a file and a script, as in: grade.py run mine.py train.py CONFIG")
        with user_errors():
            return run_script(sys.argv[2], sys.argv[3], sys.argv[4:])
    (cfg,), files = configurator.parse([GradeConfig], sys.argv[1:], __doc__, positional="files")
    command, words = (files or [""])[0], files[1:]
    if command == "stubs":
        print((COURSE / "stubs.py").read_text(encoding="utf-8"), end="")
    elif command == "sheet" and words:
        import sheet

        print("Whole numbers are exact; of the others three digits are enough.")
        for question in sheet.questions(" ".join(words)):
            print(f"{question.key}  {question.text}")
    elif command == "board" and words:
        board(words, cfg)
    elif command and not words and command not in ("sheet", "board"):
        with user_errors():
            grade(command, cfg)
    else:
        fail("give one file, stubs, sheet NAME, run FILE SCRIPT or board FILES; see --help")


if __name__ == "__main__":
    configurator.run(main)

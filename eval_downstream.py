"""Perplexity, ARC and MMLU: what a model knows, scored as lm-evaluation-harness does.

python eval_downstream.py --source=book.txt              # the model that comes with the program
python eval_downstream.py out/ggd_bam_cpu                # perplexity on its validation documents
python eval_downstream.py out/a out/b --source=book.txt --length=32768
python eval_downstream.py out/a --tasks=arc_easy,arc_challenge,mmlu,mmlu_continuation # from the hub
python eval_downstream.py out/a --tasks=arc_easy --data_dir=data/arc   # or from local files

Perplexity comes twice. By position: one forward over a long document, averaged over some positions
at a time. By context: the same target tokens with less or more text before them. Only the second
tells whether a longer context helps.

Multiple choice: the answer is the choice that the model finds the likeliest continuation of the
question, by the sum of its tokens' log-probabilities (acc) or by that sum per character (acc_norm).
Nothing is generated and nothing is cut.
"""

import configurator
from configurator import user_errors

import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

import runs
from data import encode_document, read_meta, read_shard, read_text, shard_files, whole_documents
from runs import Cell, EvalConfig, Run, cost
from streaming import KVCache, Reader, score


class Task(NamedTuple):
    """A multiple-choice data set, and how its questions are put."""

    hub: str  # its name on the hub
    config: str  # part of it
    examples: str  # split of the solved examples: the first of dev, or drawn from train
    shots: int  # solved examples by default
    letters: bool  # the letters of the choices continue the question, not the choices
    description: str  # first words of a prompt; {} is the subject


ARC, MMLU = "allenai/ai2_arc", "cais/mmlu"
ABOUT = " questions (with answers) about {}.\n\n"
TASKS = {
    "arc_easy": Task(ARC, "ARC-Easy", "train", 0, False, ""),
    "arc_challenge": Task(ARC, "ARC-Challenge", "train", 0, False, ""),
    "mmlu": Task(MMLU, "all", "dev", 5, True, "The following are multiple choice" + ABOUT),
    "mmlu_continuation": Task(MMLU, "all", "dev", 0, False, "The following are" + ABOUT),
}
Advance = Callable[[float], object]  # called with the work just done, in the units of cost()
QUESTION = cost(200)  # work of a question, roughly
LETTERS = "ABCDEFGHIJ"
FEWSHOT_SEED = 1234  # the harness's default


@dataclass
class DownstreamConfig(EvalConfig):
    """What to ask."""

    tasks: tuple[str, ...] = ("perplexity",)  # or arc_easy, arc_challenge, mmlu, mmlu_continuation
    data_dir: str = ""  # folder of the hub's data sets as .jsonl or .parquet, in files such as
    # ARC-Easy_test.jsonl or ARC-Easy/test-00000-of-00001.parquet (MMLU: test.jsonl, dev.jsonl); if
    # empty they come from the hub
    num_fewshot: int = -1  # solved examples before a question: the first of MMLU's dev split, or
    # drawn for each question from ARC's train split; -1: 5 for mmlu, otherwise 0
    limit: int = 0  # only the first questions, this many a task (MMLU: a subject); 0: all
    bos: bool = True  # begin with <|endoftext|>, as in training; the harness's default is false
    source: str = ""  # text for perplexity: a folder of token shards (validation shards are taken),
    # a text file, or wikitext; if empty, what the first run was trained on
    length: int = 0  # by position: tokens of a text; 0: up to 16x the first run's training length
    average: int = 256  # by position: positions averaged for a point of the curve
    documents: int = 4  # by position: documents averaged, at most; a long one is cut into several
    contexts: tuple[int, ...] = ()  # by context: the longest contexts of the targets in tokens; if
    # empty, 1x, 2x, 4x, 8x and 16x the training length of the first run, if the documents have them
    stride: int = 0  # by context: targets at the end of a context; 0: half the shortest context
    targets: int = 4096  # by context: targets in all, at most

    def __post_init__(self):
        super().__post_init__()
        self.tasks, known = tuple(dict.fromkeys(self.tasks)), ("perplexity", *TASKS)
        if not self.tasks or set(self.tasks) - set(known):
            tasks = ",".join(self.tasks) or "empty"
            raise ValueError(f"tasks is {tasks}; it may hold {', '.join(known)}")
        least = {"num_fewshot": -1, "average": 2, "targets": 2, "documents": 1}
        for name in (*least, "limit", "length", "stride"):
            runs.check_range(name, least.get(name, 0), getattr(self, name))
        runs.check_range("contexts", 1, *self.contexts)


# ---- perplexity


def read_documents(run: Run, cfg: DownstreamConfig) -> list[np.ndarray]:
    """The documents of the source as tokens, each with its <|endoftext|> first."""
    folder, known = Path(cfg.source), run.model.cfg.vocab_size
    if cfg.source == "wikitext":  # one document: the rows are its lines
        rows = read_split("Salesforce/wikitext", "wikitext-2-raw-v1", "test", cfg.data_dir)
        return [np.array(encode_document(run.enc, "".join(row["text"] for row in rows)))]
    if not cfg.source or not folder.exists():
        advice = "name a text for the perplexity with --source"
        raise ValueError(f"there is no '{cfg.source}'; {advice}")
    if not folder.is_dir():
        return [np.array(encode_document(run.enc, read_text(folder)))]
    meta, shards = read_meta(folder), [read_shard(f) for f in shard_files(folder, "val_*")]
    if not shards:
        raise ValueError(f"no *val_*.bin shards in {folder}; name another source")
    if meta and meta["tokenizer"] != (needed := run.saved["tokenizer"]):
        raise ValueError(f"{folder} has {meta['tokenizer']} tokens, {run.path} needs {needed}")
    if (highest := max(int(shard.max()) for shard in shards)) >= known:
        raise ValueError(f"{folder} has the token id {highest}, {run.path} knows {known:,}")
    return [document for shard in shards for document in whole_documents(shard, run.enc.eot_token)]


def fill_lengths(cfg: DownstreamConfig, documents: list[np.ndarray], trained: int) -> None:
    """Put default lengths into the config, where they hold for all further runs, and check them."""
    longest = max(map(len, documents), default=1) - 1  # tokens before the last one
    reach = max(1, min(runs.MULTIPLES[-1] * trained, longest) // cfg.average) * cfg.average
    fitting = tuple(m * trained for m in runs.MULTIPLES if m * trained <= longest) or (trained,)
    cfg.length = cfg.length or reach
    cfg.contexts = tuple(sorted(set(cfg.contexts or fitting)))
    cfg.stride = cfg.stride or max(1, cfg.contexts[0] // 2)
    if (needed := max(cfg.length, *cfg.contexts)) > longest:
        lengths = f"its longest document has {longest:,} tokens, {needed:,} are needed"
        advice = "choose another source, or a smaller length and contexts"
        raise ValueError(f"{cfg.source} is too short: {lengths}; {advice}")
    if cfg.length % cfg.average:
        raise ValueError(f"length {cfg.length} is not a multiple of average {cfg.average}")
    if cfg.stride > cfg.contexts[0]:
        raise ValueError(f"stride is {cfg.stride}; the shortest context is {cfg.contexts[0]}")


def cut_windows(documents: list[np.ndarray], length: int, step: int, count: int) -> Tensor:
    """A window of length + 1 tokens slides over each document by `step`: (N, length + 1), with N at
    most `count`, evenly spread over all its places."""
    places = [(text, at) for text in documents for at in range(0, len(text) - length, step)]
    picks = np.linspace(0, len(places) - 1, min(count, len(places))).astype(int)
    rows = [text[at : at + length + 1] for text, at in (places[i] for i in picks)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def measure_nll(run: Run, idx: Tensor, targets: int, advance: Advance) -> Tensor:
    """Negative log-likelihood in nats of the last `targets` tokens of each row of idx (N, T):
    (N, targets), float64."""
    nll, length, device = [], idx.shape[1] - 1, run.model.embedding.weight.device
    for row in idx.to(device).split(1):
        kv = KVCache(run.model, 1, length, dtype=torch.float32)
        nll.append(-score(run.model, row, targets, kv)[0].cpu().double())
        advance(cost(length))
    return torch.cat(nll)


def by_position(run: Run, cfg: DownstreamConfig, idx: Tensor, advance: Advance, *_) -> dict:
    """Mean nll over the rows of idx (N, length + 1), one value for every `average` positions. The
    standard errors take the tokens as independent."""
    nll = measure_nll(run, idx, cfg.length, advance)
    points = nll.unflatten(1, (-1, cfg.average)).transpose(0, 1).flatten(1)  # (points, N * average)
    error = points.std(1) / math.sqrt(points.shape[1])
    return {"n": nll.numel(), "nll": points.mean(1).tolist(), "nll_stderr": error.tolist()}


def by_context(
    run: Run, cfg: DownstreamConfig, idx: Tensor, context: int, advance: Advance, *_
) -> dict:
    """Mean nll of the last `stride` tokens of each row of idx (N, longest context + 1), with at
    most `context` tokens before the last. The interval takes the tokens as independent."""
    nll = measure_nll(run, idx[:, -context - 1 :], cfg.stride, advance)
    targets = idx[:, -cfg.stride :].flatten().tolist()
    size = sum(len(run.enc.decode_single_token_bytes(t)) for t in targets)
    mean, half = nll.mean().item(), 1.96 * nll.std().item() / math.sqrt(nll.numel())
    return {
        "n": nll.numel(),
        "nll": mean,
        "interval_95": [mean - half, mean + half],
        "perplexity": float(np.exp(mean)),
        "bits_per_byte": nll.sum().item() / math.log(2) / size,
    }


# ---- multiple choice: questions


def find_files(config: str, split: str, data_dir: str) -> list[Path]:
    """The files of one split: <config>_<split>.*, <config>/<split>-* as on the hub, or <split>.*"""
    patterns = [f"{config}_{split}.*", f"{config}/{split}-*"] + [f"{split}.*"] * (config == "all")
    paths = sorted(path for pattern in patterns for path in Path(data_dir).rglob(pattern))
    paths = [path for path in paths if path.suffix in (".jsonl", ".parquet")]
    if not paths:
        names = f"{config}_{split}.jsonl, .parquet or {config}/{split}-*.parquet"
        raise ValueError(f"no {names} in {data_dir}")
    if others := [path for path in paths if path.parent != paths[0].parent]:
        both = f"{paths[0]} and {others[0]} are both the {split} split of {config}"
        raise ValueError(f"{both}; give a narrower data_dir")
    return [path for path in paths if path.suffix == paths[0].suffix]


def read_split(hub: str, config: str, split: str, data_dir: str) -> list[dict]:
    """All rows of one split, from the hub or from local files."""
    if not data_dir:
        from datasets import load_dataset  # slow to import

        try:
            return list(load_dataset(hub, config, split=split))
        except Exception as error:  # datasets and the HTTP libraries have their own kinds
            advice = "connect to the network, or give its files with --data_dir"
            raise ValueError(f"{hub} cannot be read; {advice} ({error})") from error
    from pyarrow import parquet  # comes with datasets

    rows = []
    for file in find_files(config, split, data_dir):
        try:
            if file.suffix == ".parquet":
                rows += parquet.read_table(file).to_pylist()
            else:
                lines = file.read_text(encoding="utf-8-sig").split("\n")
                rows += [json.loads(line) for line in lines if line.strip()]
        except ValueError as error:
            raise ValueError(f"{file} cannot be read ({error}); give another file") from error
    if not rows:
        raise ValueError(f"{file} has no rows; give another file, or another --data_dir")
    return rows


class Question(NamedTuple):
    """Which of the continuations, each after one space, is the most likely one?"""

    context: str
    continuations: list[str]
    gold: int  # index of the right one


Subjects = dict[str, list[Question]]  # questions by their subject


def read_question(task: Task, row: dict) -> tuple[str, Question]:
    """The subject of a row, and its question alone: choices continue it, or their letters do."""
    if task.hub == ARC:  # labels are A to E or 1 to 5: the place of the key among them counts
        subject, text, choices = "", row["question"], row["choices"]["text"]
        gold = row["choices"]["label"].index(row["answerKey"])
    else:
        subject, text, choices = row["subject"], row["question"].strip(), row["choices"]
        gold = row["answer"]
    if not (len(choices) > 1 and gold in range(len(choices))):
        raise ValueError
    names = list(LETTERS[: len(choices)])
    lines = [name + ". " + choice + "\n" for name, choice in zip(names, choices, strict=True)]
    if task.letters:
        return subject, Question(text + "\n" + "".join(lines) + "Answer:", names, gold)
    return subject, Question("Question: " + text + "\nAnswer:", choices, gold)


def load_subjects(task: Task, split: str, data_dir: str) -> Subjects:
    """Subject -> its questions, in the order of the rows. ARC has one subject, which is empty."""
    subjects: Subjects = {}
    for number, row in enumerate(read_split(task.hub, task.config, split, data_dir), 1):
        try:
            subject, question = read_question(task, row)
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = f"{task.config} {split} is not of the schema of {task.hub}"
            raise ValueError(f"row {number} of {problem}: {str(row)[:300]}") from None
        subjects.setdefault(subject, []).append(question)
    return subjects


@cache
def load_questions(name: str, num_fewshot: int, limit: int, data_dir: str) -> Subjects:
    """Subject -> its first `limit` questions (0: all), with description and solved examples.

    As in the harness, the examples are the first of the dev split, or one generator draws them from
    the train split for one question after the other. So a limit changes no question before it.
    """
    task, rng = TASKS[name], random.Random(FEWSHOT_SEED)
    examples = load_subjects(task, task.examples, data_dir) if num_fewshot else {}
    subjects = load_subjects(task, "test", data_dir)
    for subject, questions in subjects.items():
        solved = [f"{q.context} {q.continuations[q.gold]}\n\n" for q in examples.get(subject, [])]
        if len(solved) < num_fewshot:
            count = f"{name} {subject} has only {len(solved)} examples"
            raise ValueError(f"{count}, num_fewshot is {num_fewshot}; lower it")
        description = task.description.format(subject.replace("_", " "))
        subjects[subject] = []
        for q in questions[: limit or None]:
            drawn = task.examples == "train"
            shots = rng.sample(solved, num_fewshot) if drawn else solved[:num_fewshot]
            prompt = description + "".join(shots) + q.context
            subjects[subject].append(q._replace(context=prompt))
    return subjects


# ---- multiple choice: scores


class Prompt(NamedTuple):
    """An encoded question: a row of tokens for each choice, of which those from `first` count."""

    rows: list[list[int]]
    first: int


def encode_question(enc: tiktoken.Encoding, question: Question, bos: bool) -> Prompt:
    """Context and continuation are encoded together. Space at the end of the context belongs to the
    continuation."""
    skip = 0 if bos else 1
    first = len(encode_document(enc, question.context.rstrip())[skip:])
    texts = [f"{question.context} {continuation}" for continuation in question.continuations]
    rows = [encode_document(enc, text)[skip:] for text in texts]
    assert all(0 < first < len(row) for row in rows), f"a span to score is empty: {question}"
    return Prompt(rows, first)


def score_prompts(run: Run, prompts: list[Prompt], advance: Advance) -> list[np.ndarray]:
    """For every prompt the log-likelihoods of its choices in nats, (C,)."""
    length = max(len(row) for p in prompts for row in p.rows) - 1
    reader, scores = Reader(run.model, length, dtype=torch.float32), []
    for prompt in prompts:
        log_p = [reader.score(row, len(row) - prompt.first)[0] for row in prompt.rows]
        scores.append(np.array([row.double().sum().item() for row in log_p]))
        advance(QUESTION)
    return scores


def choose(question: Question, log_p: np.ndarray) -> tuple[int, int]:
    """The choice by the sum (acc), and by the sum per character (acc_norm). Ties: the first."""
    with np.errstate(divide="ignore"):  # an empty choice is -inf per character, so never chosen
        per_character = log_p / [len(text) for text in question.continuations]
    return int(log_p.argmax()), int(per_character.argmax())


def measure_choices(run: Run, cfg: DownstreamConfig, questions: list, advance: Advance, *_) -> dict:
    """Counts and accuracies over the questions of one subject."""
    prompts = [encode_question(run.enc, question, cfg.bos) for question in questions]
    scores = score_prompts(run, prompts, advance)
    chosen = np.array([choose(q, log_p) for q, log_p in zip(questions, scores, strict=True)])
    gold = np.array([question.gold for question in questions])
    right, right_norm = (chosen == gold[:, None]).sum(0).tolist()
    letters = len(LETTERS)
    counts = {
        "n": len(questions),
        "right": right,
        "right_norm": right_norm,
        "guessed": sum(1 / len(q.continuations) for q in questions),  # right by blind guesses
        "longer": sum(max(map(len, p.rows)) > run.trained for p in prompts),  # than in training
        "chosen": np.bincount(chosen[:, 0], minlength=letters).tolist(),  # A, B, ... by the sum
        "gold": np.bincount(gold, minlength=letters).tolist(),
    }
    return pool_subjects([counts])


def pool_subjects(groups: list[dict]) -> dict:
    """Counts of several subjects added up, so that each weighs by its size. The standard errors are
    the harness's, from the pooled variance inside the subjects (None for 0 / 0)."""
    keys = ("n", "right", "right_norm", "guessed", "longer", "chosen", "gold")
    total = {key: np.sum([group[key] for group in groups], axis=0).tolist() for key in keys}
    n, free = total["n"], total["n"] - len(groups)
    for name, key in (("acc", "right"), ("acc_norm", "right_norm")):
        squares = sum(g[key] * (1 - g[key] / g["n"]) for g in groups)  # n p (1 - p) of each subject
        total[name] = total[key] / n
        total[f"{name}_stderr"] = math.sqrt(squares / free / n) if free else None
        total[f"{name}_interval_95"] = [round(x, 4) for x in runs.wilson(total[key], n)]
    return total | {"chance": total["guessed"] / n}


# ---- cells


def perplexity_cells(run: Run, cfg: DownstreamConfig) -> Iterator[Cell]:
    """The curve by position, and a cell per context."""
    cfg.source = cfg.source or str(run.saved.get("data", ""))  # the first run's, for all runs
    documents = read_documents(run, cfg)
    fill_lengths(cfg, documents, run.trained)
    config = {"source": cfg.source, "window_attention": cfg.window_attention, "set": cfg.set}
    idx = cut_windows(documents, cfg.length, cfg.length, cfg.documents)
    own = config | {"length": cfg.length, "average": cfg.average, "data": runs.digest(idx.numpy())}
    identity, measure = {"metric": "perplexity", "config": own}, partial(by_position, run, cfg, idx)
    yield Cell(identity, "perplexity by position", len(idx) * cost(cfg.length), measure)
    idx = cut_windows(documents, cfg.contexts[-1], cfg.stride, -(-cfg.targets // cfg.stride))
    config |= {"stride": cfg.stride, "data": runs.digest(idx.numpy())}
    for context in cfg.contexts:
        identity = {"metric": "perplexity", "config": config | {"context": context}}
        measure = partial(by_context, run, cfg, idx, context)
        yield Cell(identity, f"perplexity at {context:,}", len(idx) * cost(context), measure)


def choice_cells(run: Run, cfg: DownstreamConfig, task: str) -> Iterator[Cell]:
    """A cell per subject, and their mean if there are several."""
    num_fewshot = TASKS[task].shots if cfg.num_fewshot < 0 else cfg.num_fewshot
    subjects = load_questions(task, num_fewshot, cfg.limit, cfg.data_dir)
    config = {"num_fewshot": num_fewshot, "limit": cfg.limit, "bos": cfg.bos}
    config |= {"window_attention": cfg.window_attention, "set": cfg.set}
    for subject, questions in subjects.items():
        own = {"subject": subject, "data": runs.digest(json.dumps(questions).encode())}
        identity = {"metric": task, "config": config | own}
        measure = partial(measure_choices, run, cfg, questions)
        yield Cell(identity, f"{task} {subject}", len(questions) * QUESTION, measure)
    if len(subjects) > 1:
        own = {"subject": "mean by size", "data": runs.digest(json.dumps(subjects).encode())}
        identity = {"metric": task, "config": config | own}
        yield Cell(identity, task, 0, lambda _, earlier: pool_subjects(earlier[-len(subjects) :]))


# ---- tables and the picture


def format_accuracy(record: dict, name: str) -> str:
    error = record[f"{name}_stderr"]
    return f"{100 * record[name]:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def format_shares(counts: list[int]) -> str:
    """Per cent of A/B/..., up to the last one that occurs."""
    last = max(np.flatnonzero(counts))
    return "/".join(f"{100 * count / sum(counts):.0f}" for count in counts[: last + 1])


def draw(records: list[tuple[str, dict]], file: Path) -> None:
    """Perplexity by position, and by context for the same targets, with a curve for each run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure((11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    curves, styles = [(run, r) for run, r in records if "length" in r["config"]], runs.STYLES
    for (run, r), (marker, line) in zip(curves, itertools.cycle(styles)):
        middle = (np.arange(len(r["nll"])) + 0.5) * r["config"]["average"]
        style = {"marker": marker, "linestyle": line, "markevery": 0.15, "label": run}
        left.plot(middle, np.exp(r["nll"]), **style)
    left.axvline(r["training_length"], color="grey", linewidth=1, label="training length")
    left.set(yscale="log", ylabel="perplexity per token", xlabel="position (tokens)")
    left.set_title(f"by position: {r['n']:,} tokens, means of {r['config']['average']:,}")
    left.tick_params(axis="x", rotation=30)
    left.yaxis.set_major_formatter(LogFormatter())
    left.yaxis.set_minor_formatter(LogFormatter())
    points: dict[str, list[tuple]] = {run: [] for run, _ in curves}
    for run, r in records:
        if "context" in r["config"]:
            values = np.exp([r["nll"], *r["interval_95"]])
            points[run].append((r["config"]["context"], *values))
    runs.draw_curves(right, points, r["training_length"])
    right.set(title="by context: the same targets, 95% intervals", xlabel="context (tokens)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig(file, dpi=150)


def report(results: dict[str, list[dict]]) -> None:
    """Print the tables, and save the picture in the first run's folder."""
    records = [(runs.name_of(path, results), r) for path, rs in results.items() for r in rs]
    contexts = [["run", "context", "targets", "nats a token", "perplexity", "bits a byte"]]
    heads = "run, task, n, acc %, acc_norm %, chance %, longer, chosen %, right %"
    choices = [heads.split(", ")]
    for run, r in records:
        if "context" in r["config"]:
            nats = f"{r['nll']:.4f} ± {r['interval_95'][1] - r['nll']:.4f}"
            row = [run, f"{r['config']['context']:,}", f"{r['n']:,}", nats]
            contexts.append([*row, f"{r['perplexity']:.3f}", f"{r['bits_per_byte']:.4f}"])
        elif "subject" in r["config"]:
            row = [run, f"{r['metric']} {r['config']['subject']}".strip(), f"{r['n']:,}"]
            row += [format_accuracy(r, "acc"), format_accuracy(r, "acc_norm")]
            row += [f"{100 * r['chance']:.1f}", f"{r['longer']:,}"]
            choices.append([*row, format_shares(r["chosen"]), format_shares(r["gold"])])
    if "perplexity" in {r["metric"] for _, r in records}:
        file = runs.folder_of(next(iter(results))) / "perplexity.png"
        draw(records, file)
        print(
            f"{runs.aligned(contexts)}\n± 95% interval; at every context the targets are the same"
        )
        print(f"saved {file}")
    if choices[1:]:
        print(runs.aligned(choices))
        print("± one standard error; longer: than the training length;", end=" ")
        print("chosen (by the sum) and right: shares of A/B/...")


def main() -> None:
    (cfg,), paths = configurator.parse([DownstreamConfig], sys.argv[1:], __doc__, positional="runs")
    with user_errors():  # all mistakes show before the work begins
        plan: list[tuple[Run, list[Cell]]] = [(run, []) for run in runs.load_runs(paths, cfg)]
        for run, cells in plan:
            for task in cfg.tasks:
                choice = task != "perplexity"
                cells += choice_cells(run, cfg, task) if choice else perplexity_cells(run, cfg)
    runs.evaluate(plan, cfg, report)


if __name__ == "__main__":
    configurator.run(main)

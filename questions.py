"""Multiple choice, ARC and MMLU: the questions, and what a model answers, as lm-evaluation-harness has them.

The answer is the choice that the model finds the likeliest continuation of the question, by the sum of its tokens'
log-probabilities (acc) or by that sum per character (acc_norm). Nothing is generated, nothing cut.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch.nn.utils.rnn import pad_sequence

from model import GPT
from records import Run, wilson
from streaming import KVCache, prefill, score
from tokenizer import encode_document

LETTERS = "ABCDEFGHIJ"
FEWSHOT_SEED = 1234  # the harness's default


class Item(NamedTuple):
    """A row of a data set."""

    subject: str
    question: str
    choices: list[str]
    gold: int  # index of the right choice


class Question(NamedTuple):
    """What a model is asked: which of the continuations, each behind one space, is the most likely one?"""

    context: str
    continuations: list[str]
    gold: int


def read_arc(row: dict) -> Item:
    """Labels are A to E or 1 to 5; what counts is the place of the key among them."""
    return Item("", row["question"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"]))


def read_mmlu(row: dict) -> Item:
    return Item(row["subject"], row["question"].strip(), row["choices"], row["answer"])


def cloze(item: Item) -> tuple[str, list[str]]:
    """The choices themselves continue the text: the form that a small base model can answer."""
    return f"Question: {item.question}\nAnswer:", item.choices


def letters(item: Item) -> tuple[str, list[str]]:
    """The choices stand in the text, and their letters continue it."""
    names = list(LETTERS[: len(item.choices)])
    lines = "".join(f"{name}. {choice}\n" for name, choice in zip(names, item.choices, strict=True))
    return f"{item.question}\n{lines}Answer:", names


class Task(NamedTuple):
    hub: str  # data set on the hub
    config: str  # its configuration
    examples: str  # split of the examples for num_fewshot: of dev the first, of train others for each question
    shots: int  # default of num_fewshot
    read: Callable[[dict], Item]
    form: Callable[[Item], tuple[str, list[str]]]
    description: str  # first words of a prompt; {} is the subject


ABOUT = " questions (with answers) about {}.\n\n"
TASKS = {
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy", "train", 0, read_arc, cloze, ""),
    "arc_challenge": Task("allenai/ai2_arc", "ARC-Challenge", "train", 0, read_arc, cloze, ""),
    "mmlu": Task("cais/mmlu", "all", "dev", 5, read_mmlu, letters, "The following are multiple choice" + ABOUT),
    "mmlu_continuation": Task("cais/mmlu", "all", "dev", 0, read_mmlu, cloze, "The following are" + ABOUT),
}


def find_files(config: str, split: str, data_dir: str) -> list[Path]:
    """The files of one split: named <config>_<split>, or as on the hub <config>/<split>-*; for "all" just <split>."""
    patterns = [f"{config}_{split}.*", f"{config}/{split}-*"] + [f"{split}.*"] * (config == "all")
    found = sorted(
        p for pattern in patterns for p in Path(data_dir).rglob(pattern) if p.suffix in (".jsonl", ".parquet")
    )
    if not found:
        raise ValueError(f"no {config}_{split}.jsonl, .parquet or {config}/{split}-*.parquet in {data_dir}")
    if other := next((p for p in found if p.parent != found[0].parent), None):
        raise ValueError(f"{found[0]} and {other} are both the {split} split of {config}; give a narrower data_dir")
    return [p for p in found if p.suffix == found[0].suffix]


def load_rows(hub: str, config: str, split: str, data_dir: str) -> list[dict]:
    """All rows of one split, from the hub or from local files. Raises ValueError, in one sentence."""
    from datasets import load_dataset  # slow to import, and perplexity needs no part of it

    files = [str(p.resolve()) for p in find_files(config, split, data_dir)] if data_dir else []
    try:
        if not data_dir:
            return list(load_dataset(hub, config, split=split))
        kind = "json" if files[0].endswith(".jsonl") else "parquet"
        rows = list(load_dataset(kind, data_files=files, split="train", streaming=True))
    except Exception as error:  # datasets, pyarrow and the hub have their own kinds
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        advice = "it is no such file" if data_dir else "connect to the network, or give its files with --data_dir"
        no_rows = data_dir and ("StopIteration" in reason or "BatchSize" in reason)
        if not no_rows:
            raise ValueError(f"{files[0] if files else hub} cannot be read; {advice} ({reason})") from error
        rows = []
    if not rows:
        raise ValueError(f"{files[0]} has no rows; give another file, or another --data_dir")
    return rows


def load_items(task: Task, split: str, data_dir: str) -> dict[str, list[Item]]:
    """Subject -> its items, in the order of the rows. Raises ValueError for a row that is not of the schema."""
    found: dict[str, list[Item]] = {}
    for number, row in enumerate(load_rows(task.hub, task.config, split, data_dir), 1):
        try:
            item = task.read(row)
            texts = [item.subject, item.question, *item.choices]
            right = all(isinstance(text, str) for text in texts) and 2 <= len(item.choices) <= len(LETTERS)
            right = right and isinstance(item.gold, int) and 0 <= item.gold < len(item.choices)
        except (KeyError, TypeError, ValueError, AttributeError):
            right = False
        if not right:
            where = f"row {number} of {task.config} {split}"
            raise ValueError(f"{where} is not of the schema of {task.hub}: {str(row)[:300]}")
        found.setdefault(item.subject, []).append(item)
    return found


def shots(task: str, num_fewshot: int) -> int:
    """Solved examples before a question; -1: as many as the task usually has."""
    return TASKS[task].shots if num_fewshot < 0 else num_fewshot


def load_questions(name: str, num_fewshot: int = -1, limit: int = 0, data_dir: str = "") -> dict[str, list[Question]]:
    """Subject -> its first `limit` questions (0: all), with their description and solved examples, from the hub or
    from files in data_dir. Raises ValueError, in one sentence.

    Examples as the harness has them: of the dev split the first in order; of the train split one generator draws for
    one question after the other, so that a limit leaves the questions before it as they are.
    """
    task = TASKS[name]
    count = shots(name, num_fewshot)
    examples = load_items(task, task.examples, data_dir) if count else {}
    found: dict[str, list[Question]] = {}
    rng = random.Random(FEWSHOT_SEED)
    for subject, items in load_items(task, "test", data_dir).items():
        known = examples.get(subject, [])
        if len(known) < count:
            raise ValueError(f"{name} {subject} has only {len(known)} examples, num_fewshot is {count}; lower it")
        found[subject] = []
        for item in items[: limit or None]:
            context = task.description.format(subject.replace("_", " "))
            for shown in rng.sample(known, count) if task.examples == "train" else known[:count]:
                text, continuations = task.form(shown)
                context += f"{text} {continuations[shown.gold]}\n\n"
            text, continuations = task.form(item)
            found[subject].append(Question(context + text, continuations, item.gold))
    return found


class Prompt(NamedTuple):
    """An encoded question: a row of tokens per choice, and the place of its first continuation token in every row."""

    rows: list[list[int]]
    first: int


def encode_question(enc: tiktoken.Encoding, question: Question, bos: bool) -> Prompt:
    """Context and continuation are encoded together; space at the end of the context belongs to the continuation."""
    skip = 0 if bos else 1
    first = len(encode_document(enc, question.context.rstrip())[skip:])
    rows = [encode_document(enc, f"{question.context} {text}")[skip:] for text in question.continuations]
    assert all(0 < first < len(row) for row in rows), f"a span to score is empty: {question}"
    return Prompt(rows, first)


def shared_beginning(prompts: list[Prompt]) -> int:
    """How many first tokens all rows have in common, the last token of a context never counted. All rows agree as far
    as the first and the last of them in lexicographic order do."""
    rows = [row[: p.first - 1] for p in prompts for row in p.rows]
    low, high = min(rows), max(rows)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def batches(prompts: list[Prompt], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts with equally many choices and contexts of about the same length."""
    batch: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i].rows), prompts[i].first)):
        together = [prompts[j] for j in (*batch, i)]
        tokens = sum(len(p.rows) for p in together) * max(len(row) for p in together for row in p.rows)
        if batch and (tokens > batch_tokens or len(prompts[batch[0]].rows) != len(prompts[i].rows)):
            yield batch
            batch = []
        batch.append(i)
    yield batch


def score_batch(model: GPT, prompts: list[Prompt], start: KVCache) -> np.ndarray:
    """Log-likelihoods of the choices of Q questions with C choices each, (Q, C).

    What all questions of the task begin with is in the cache `start`; what the choices of one question share is
    computed once for them. Rows are padded on the right, where a causal model cannot see it.
    """
    Q, C = len(prompts), len(prompts[0].rows)
    rows = [torch.tensor(row) for p in prompts for row in p.rows]
    idx = pad_sequence(rows, batch_first=True).to(model.embedding.weight.device)  # (QC, T)
    shared = min(shared_beginning([p]) for p in prompts)
    cache = start.fork(Q)
    if shared > cache.used:
        prefill(model, idx[::C, cache.used : shared], cache)
    cache = cache.fork(Q * C)
    log_p = score(model, idx[:, cache.used :], idx.shape[1] - shared - 1, cache)[0].cpu().double()
    place = torch.arange(shared + 1, idx.shape[1])
    first = torch.tensor([p.first for p in prompts]).repeat_interleave(C)[:, None]
    counted = (place >= first) & (place < torch.tensor([len(row) for row in rows])[:, None])  # (QC, T - shared - 1)
    return torch.where(counted, log_p, 0.0).sum(1).view(Q, C).numpy()


def score_prompts(
    model: GPT,
    prompts: list[Prompt],
    batch_tokens: int,
    progress: Callable[[int], object] = lambda done: None,
) -> list[np.ndarray]:
    """For every prompt the log-likelihoods of its choices in nats."""
    length = max(len(row) for p in prompts for row in p.rows) - 1
    start = KVCache(model, 1, length, dtype=torch.float32)
    if shared := shared_beginning(prompts):
        beginning = torch.tensor([prompts[0].rows[0][:shared]], device=model.embedding.weight.device)
        prefill(model, beginning, start)
    found: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for batch in batches(prompts, batch_tokens):
        for i, log_p in zip(batch, score_batch(model, [prompts[i] for i in batch], start), strict=True):
            found[i] = log_p
        progress(len(batch))
    return found


def choose(question: Question, log_p: np.ndarray) -> tuple[int, int]:
    """The chosen index by the sum (acc), and by the sum per character of the choice (acc_norm). Ties: the first."""
    with np.errstate(divide="ignore"):  # an empty choice is -inf per character, so never chosen
        per_character = log_p / [len(text) for text in question.continuations]
    return int(log_p.argmax()), int(per_character.argmax())


def measure_choices(run: Run, questions: list[Question], bos: bool, batch_tokens: int, progress: Callable) -> dict:
    """Counts and accuracies over the questions of one subject; bos: begin with <|endoftext|>."""
    prompts = [encode_question(run.enc, q, bos) for q in questions]
    log_p = score_prompts(run.model, prompts, batch_tokens, progress)
    chosen = np.array([choose(q, row) for q, row in zip(questions, log_p, strict=True)])  # (n, 2)
    gold = np.array([q.gold for q in questions])
    right, right_norm = (chosen == gold[:, None]).sum(0).tolist()
    counts = {
        "n": len(questions),
        "right": right,
        "right_norm": right_norm,
        "guessed": sum(1 / len(q.continuations) for q in questions),  # right ones of a blind guess
        "longer": sum(max(map(len, p.rows)) > run.trained for p in prompts),  # than the training length
        "chosen": np.bincount(chosen[:, 0], minlength=len(LETTERS)).tolist(),  # how often A, B, ... by the sum
        "gold": np.bincount(gold, minlength=len(LETTERS)).tolist(),  # how often it was the right one
    }
    return pooled([counts])


def pooled(groups: list[dict]) -> dict:
    """Counts of several subjects added up, so that each weighs by its size; accuracies with their standard errors, from
    the pooled variance inside the subjects as the harness has it (None for 0 / 0), and 95% intervals."""
    keys = ("n", "right", "right_norm", "guessed", "longer", "chosen", "gold")
    total = {key: np.sum([g[key] for g in groups], axis=0).tolist() for key in keys}
    n, free = total["n"], total["n"] - len(groups)
    for name, key in (("acc", "right"), ("acc_norm", "right_norm")):
        spread = sum(g[key] * (1 - g[key] / g["n"]) for g in groups)  # of n right and wrong answers: n p (1 - p)
        total[name] = total[key] / n
        total[f"{name}_stderr"] = math.sqrt(spread / free / n) if free else None
        total[f"{name}_interval_95"] = [round(x, 4) for x in wilson(total[key], n)]
    return total | {"chance": total["guessed"] / n}

"""Perplexity, ARC and MMLU: what a model knows, scored by the rules of the field's harness (lm-evaluation-harness).

python eval_downstream.py --source=book.txt                              # the model that comes with the program
python eval_downstream.py out/ggd_bam_cpu                                # perplexity on the validation documents
python eval_downstream.py out/a out/b --source=book.txt --length=32768   # on any text
python eval_downstream.py out/a --tasks=arc_easy,arc_challenge,mmlu,mmlu_continuation     # data from the hub
python eval_downstream.py out/a --tasks=arc_easy --data_dir=data/arc     # or from files of the same schema

Multiple choice: the answer is the choice that the model finds the likeliest continuation of the question, by the sum of
its tokens' log-probabilities (acc) or by that sum per character (acc_norm). Nothing is generated, nothing cut.

Perplexity, twice. By position: one forward over a long document, averaged over some positions at a time. By context:
the same target tokens, with less or more of the text before them; only this tells whether a longer context helps.
"""

import configurator
from configurator import user_errors

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from data import encode_document, read_meta, read_shard, read_text, shard_files, whole_documents
from device import pick_device
from eval_passkey import MULTIPLES
from model import GPT
from runs import (
    BAR,
    PRETRAINED,
    STYLES,
    Changes,
    Run,
    aligned,
    append_record,
    check_range,
    collect,
    digest,
    distinct,
    finished,
    folder_of,
    load_run,
    name_of,
    origin,
    wilson,
)
from streaming import KVCache, prefill, score

# ---- questions

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
    return Item(
        "", row["question"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"])
    )


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
    "mmlu": Task(
        "cais/mmlu",
        "all",
        "dev",
        5,
        read_mmlu,
        letters,
        "The following are multiple choice" + ABOUT,
    ),
    "mmlu_continuation": Task(
        "cais/mmlu", "all", "dev", 0, read_mmlu, cloze, "The following are" + ABOUT
    ),
}


def find_files(config: str, split: str, data_dir: str) -> list[Path]:
    """The files of one split: named <config>_<split>, or as on the hub <config>/<split>-*; for "all" just <split>."""
    patterns = [f"{config}_{split}.*", f"{config}/{split}-*"] + [f"{split}.*"] * (config == "all")
    found = sorted(
        p
        for pattern in patterns
        for p in Path(data_dir).rglob(pattern)
        if p.suffix in (".jsonl", ".parquet")
    )
    if not found:
        raise ValueError(
            f"no {config}_{split}.jsonl, .parquet or {config}/{split}-*.parquet in {data_dir}"
        )
    if other := next((p for p in found if p.parent != found[0].parent), None):
        raise ValueError(
            f"{found[0]} and {other} are both the {split} split of {config}; give a narrower data_dir"
        )
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
        advice = (
            "it is no such file"
            if data_dir
            else "connect to the network, or give its files with --data_dir"
        )
        no_rows = data_dir and ("StopIteration" in reason or "BatchSize" in reason)
        if not no_rows:
            raise ValueError(
                f"{files[0] if files else hub} cannot be read; {advice} ({reason})"
            ) from error
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
            right = all(isinstance(text, str) for text in texts) and 2 <= len(item.choices) <= len(
                LETTERS
            )
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


def load_questions(
    name: str, num_fewshot: int = -1, limit: int = 0, data_dir: str = ""
) -> dict[str, list[Question]]:
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
            raise ValueError(
                f"{name} {subject} has only {len(known)} examples, num_fewshot is {count}; lower it"
            )
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
    rows = [
        encode_document(enc, f"{question.context} {text}")[skip:] for text in question.continuations
    ]
    assert all(0 < first < len(row) for row in rows), f"a span to score is empty: {question}"
    return Prompt(rows, first)


def shared_beginning(prompts: list[Prompt]) -> int:
    """How many first tokens all rows have in common, the last token of a context never counted. All rows agree as far
    as the first and the last of them in lexicographic order do."""
    rows = [row[: p.first - 1] for p in prompts for row in p.rows]
    low, high = min(rows), max(rows)
    return next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
        min(len(low), len(high)),
    )


def batches(prompts: list[Prompt], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts with equally many choices and contexts of about the same length."""
    batch: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i].rows), prompts[i].first)):
        together = [prompts[j] for j in (*batch, i)]
        tokens = sum(len(p.rows) for p in together) * max(
            len(row) for p in together for row in p.rows
        )
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
    counted = (place >= first) & (
        place < torch.tensor([len(row) for row in rows])[:, None]
    )  # (QC, T - shared - 1)
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
        beginning = torch.tensor(
            [prompts[0].rows[0][:shared]], device=model.embedding.weight.device
        )
        prefill(model, beginning, start)
    found: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for batch in batches(prompts, batch_tokens):
        for i, log_p in zip(
            batch, score_batch(model, [prompts[i] for i in batch], start), strict=True
        ):
            found[i] = log_p
        progress(len(batch))
    return found


def choose(question: Question, log_p: np.ndarray) -> tuple[int, int]:
    """The chosen index by the sum (acc), and by the sum per character of the choice (acc_norm). Ties: the first."""
    with np.errstate(divide="ignore"):  # an empty choice is -inf per character, so never chosen
        per_character = log_p / [len(text) for text in question.continuations]
    return int(log_p.argmax()), int(per_character.argmax())


def measure_choices(
    run: Run, questions: list[Question], bos: bool, batch_tokens: int, progress: Callable
) -> dict:
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
        "longer": sum(
            max(map(len, p.rows)) > run.trained for p in prompts
        ),  # than the training length
        "chosen": np.bincount(
            chosen[:, 0], minlength=len(LETTERS)
        ).tolist(),  # how often A, B, ... by the sum
        "gold": np.bincount(
            gold, minlength=len(LETTERS)
        ).tolist(),  # how often it was the right one
    }
    return pooled([counts])


def pooled(groups: list[dict]) -> dict:
    """Counts of several subjects added up, so that each weighs by its size; accuracies with their standard errors, from
    the pooled variance inside the subjects as the harness has it (None for 0 / 0), and 95% intervals."""
    keys = ("n", "right", "right_norm", "guessed", "longer", "chosen", "gold")
    total = {key: np.sum([g[key] for g in groups], axis=0).tolist() for key in keys}
    n, free = total["n"], total["n"] - len(groups)
    for name, key in (("acc", "right"), ("acc_norm", "right_norm")):
        spread = sum(
            g[key] * (1 - g[key] / g["n"]) for g in groups
        )  # of n right and wrong answers: n p (1 - p)
        total[name] = total[key] / n
        total[f"{name}_stderr"] = math.sqrt(spread / free / n) if free else None
        total[f"{name}_interval_95"] = [round(x, 4) for x in wilson(total[key], n)]
    return total | {"chance": total["guessed"] / n}


# ---- eval_downstream


@dataclass
class DownstreamConfig(Changes):
    """What to ask. Raises ValueError, in one sentence, if it makes no sense."""

    tasks: tuple[str, ...] = (
        "perplexity",
    )  # perplexity, arc_easy, arc_challenge, mmlu, mmlu_continuation
    data_dir: str = ""  # where the hub's data sets lie as .jsonl or .parquet, in files such as ARC-Easy_test.jsonl or
    # ARC-Easy/test-00000-of-00001.parquet (MMLU: test.jsonl, dev.jsonl); none given: they come from the hub
    num_fewshot: int = (
        -1
    )  # solved examples before a question: the first of MMLU's dev split, or drawn for each
    # question from ARC's train split; -1: 5 for mmlu, otherwise 0
    limit: int = 0  # only the first questions, this many a task (MMLU: a subject); 0: all
    bos: bool = True  # prompts begin with <|endoftext|>, as training documents do; the harness's default is false
    source: str = ""  # text for perplexity: a folder of token shards (validation shards are taken), a text file, or
    # wikitext; none given: what the first run was trained on
    length: int = 0  # by position: tokens of a document; 0: 16x the training length of the first run, or less if no
    # document is that long
    average: int = 256  # by position: positions averaged for a point of the curve
    documents: int = 4  # by position: documents averaged, at most; a long one is cut into several
    contexts: tuple[
        int, ...
    ] = ()  # by context: the longest contexts of the targets in tokens; none given: 1x, 2x,
    # 4x, 8x and 16x the training length of the first run, those that the documents have
    stride: int = 0  # by context: targets at the end of a context; 0: half the shortest context
    targets: int = 4096  # by context: targets in all, at most
    batch_tokens: int = 16_384  # texts are scored together up to this many tokens
    resume: bool = False  # keep what the records of these runs already hold, and do the rest
    device: str = "auto"  # auto, cpu, cuda, ...

    def __post_init__(self):
        self.tasks, known = tuple(dict.fromkeys(self.tasks)), ("perplexity", *TASKS)
        if not self.tasks or set(self.tasks) - set(known):
            raise ValueError(
                f"tasks is {','.join(self.tasks) or 'empty'}; it may hold {', '.join(known)}"
            )
        lowest = {
            "average": 2,
            "targets": 2,
            "documents": 1,
            "contexts": 1,
            "batch_tokens": 1,
            "num_fewshot": -1,
        }
        super().__post_init__()
        for name in (*lowest, "limit", "length", "stride"):
            value = getattr(self, name)
            check_range(
                name, lowest.get(name, 0), *(value if isinstance(value, tuple) else (value,))
            )


# ---- perplexity


def read_documents(run: Run, cfg: DownstreamConfig) -> list[np.ndarray]:
    """The documents of a source as tokens, <|endoftext|> first. Raises ValueError or OSError, in one sentence."""
    source = cfg.source
    if (
        source == "wikitext"
    ):  # one document; the hub's rows are the lines of the file, but blank ones are empty
        rows = load_rows("Salesforce/wikitext", "wikitext-2-raw-v1", "test", cfg.data_dir)
        if not all(isinstance(row.get("text"), str) for row in rows):
            raise ValueError(
                "wikitext has rows without text; give files of the schema of Salesforce/wikitext"
            )
        return [np.array(encode_document(run.enc, "".join(row["text"] for row in rows)))]
    if not source or not Path(source).exists():
        raise ValueError(f"there is no '{source}'; name a text for the perplexity with --source")
    if Path(source).is_dir():
        return shard_documents(Path(source), run)
    return [np.array(encode_document(run.enc, read_text(source)))]


def shard_documents(folder: Path, run: Run) -> list[np.ndarray]:
    """The whole documents of a folder's validation shards."""
    files, meta, tokenizer = shard_files(folder, "val_*"), read_meta(folder), run.saved["tokenizer"]
    if not files:
        raise ValueError(f"no *val_*.bin shards in {folder}; name another source")
    if meta is not None and meta["tokenizer"] != tokenizer:
        raise ValueError(
            f"{folder} has {meta['tokenizer']} tokens, {run.path} needs {tokenizer}; name another source"
        )
    shards, known = [read_shard(file) for file in files], run.model.cfg.vocab_size
    if (highest := max(int(shard.max()) for shard in shards)) >= known:
        raise ValueError(
            f"{folder} has the token id {highest}, {run.path} knows {known:,}; name another source"
        )
    return [document for shard in shards for document in whole_documents(shard, run.enc.eot_token)]


def with_lengths(
    cfg: DownstreamConfig, documents: list[np.ndarray], trained: int
) -> DownstreamConfig:
    """The config with its lengths filled in. Raises ValueError, in one sentence, for what these documents cannot do."""
    longest = max(map(len, documents), default=1) - 1  # tokens before the last one
    length = (
        cfg.length or max(1, min(MULTIPLES[-1] * trained, longest) // cfg.average) * cfg.average
    )
    contexts = tuple(sorted(set(cfg.contexts))) or tuple(
        m * trained for m in MULTIPLES if m * trained <= longest
    )
    needed = max(length, *(contexts or (trained,)))
    if needed > longest:
        lengths = f"its longest document has {longest:,} tokens, {needed:,} are needed"
        raise ValueError(
            f"{cfg.source} is too short: {lengths}; choose another source, or a smaller length and contexts"
        )
    stride = cfg.stride or max(1, contexts[0] // 2)
    if length % cfg.average:
        raise ValueError(
            f"length {length} is not a multiple of average {cfg.average}; change one of them"
        )
    if stride > contexts[0]:
        raise ValueError(
            f"stride is {stride}; it must be at most the shortest context, {contexts[0]}"
        )
    return replace(cfg, length=length, contexts=contexts, stride=stride)


def windows(documents: list[np.ndarray], length: int, step: int, count: int) -> Tensor:
    """(N, length + 1): a window slides over the documents by `step`; at most `count` of its places, evenly spread."""
    places = [
        (d, at) for d, doc in enumerate(documents) for at in range(0, len(doc) - length, step)
    ]
    places = [
        places[i] for i in np.linspace(0, len(places) - 1, min(count, len(places))).astype(int)
    ]
    return torch.from_numpy(
        np.stack([documents[d][at : at + length + 1] for d, at in places]).astype(np.int64)
    )


def negative_log_likelihood(run: Run, idx: Tensor, targets: int) -> Tensor:
    """Of the last `targets` tokens of each row of idx (B, T), in nats: (B, targets), float64."""
    cache = KVCache(run.model, len(idx), idx.shape[1] - 1, dtype=torch.float32)
    idx = idx.to(run.model.embedding.weight.device)
    return -score(run.model, idx, targets, cache)[0].cpu().double()


def by_position(run: Run, cfg: DownstreamConfig, idx: Tensor, progress: Callable) -> dict:
    """Mean nll over the rows of idx (N, length + 1): one value for every `average` positions. The standard errors take
    the tokens as independent."""
    found = []
    for row in idx.split(1):
        found.append(negative_log_likelihood(run, row, cfg.length))
        progress(1)
    nll = (
        torch.cat(found).unflatten(1, (-1, cfg.average)).transpose(0, 1).flatten(1)
    )  # (points, N * average)
    error = nll.std(1) / math.sqrt(nll.shape[1])
    return {"n": nll.numel(), "nll": nll.mean(1).tolist(), "nll_stderr": error.tolist()}


def by_context(
    run: Run, cfg: DownstreamConfig, idx: Tensor, context: int, progress: Callable
) -> dict:
    """Mean nll of the last `stride` tokens of each row of idx (N, longest context + 1), when no more than `context`
    tokens stand before the last of them. The interval takes the tokens as independent."""
    found = []
    for rows in idx[:, -context - 1 :].split(max(1, cfg.batch_tokens // (context + 1))):
        found.append(negative_log_likelihood(run, rows, cfg.stride))
        progress(len(rows))
    nll = torch.cat(found)
    size = sum(
        len(run.enc.decode_single_token_bytes(t)) for t in idx[:, -cfg.stride :].flatten().tolist()
    )
    mean, half = nll.mean().item(), 1.96 * nll.std().item() / math.sqrt(nll.numel())
    return {
        "n": nll.numel(),
        "nll": mean,
        "interval_95": [mean - half, mean + half],
        "perplexity": float(np.exp(mean)),
        "bits_per_byte": nll.sum().item() / math.log(2) / size,
    }


# ---- cells and their records


class Cell(NamedTuple):
    """One result: the accuracy on a subject, a curve of perplexity, or the perplexity at one context."""

    task: str
    config: dict  # all that decides the result besides the weights
    work: int  # steps of the progress bar
    measure: (
        Callable[[Callable], dict] | None
    )  # takes the bar's update; None: pool the task's cells before this one


def short_digest(data: object) -> str:
    """Of questions, or of a text in tokens."""
    return digest(data.numpy() if isinstance(data, Tensor) else json.dumps(data).encode())


def choice_cells(
    run: Run, cfg: DownstreamConfig, task: str, subjects: dict[str, list[Question]]
) -> list[Cell]:
    """A cell per subject, and their mean if there are several."""
    config = {"num_fewshot": shots(task, cfg.num_fewshot), "limit": cfg.limit, "bos": cfg.bos}
    config |= {"window_attention": cfg.window_attention, "set": cfg.set}
    cells, how = [], (cfg.bos, cfg.batch_tokens)
    for subject, questions in subjects.items():
        own = config | {"subject": subject, "data": short_digest(questions)}
        cells.append(
            Cell(task, own, len(questions), partial(measure_choices, run, questions, *how))
        )
    if len(cells) > 1:
        cells.append(
            Cell(
                task, config | {"subject": "mean by size", "data": short_digest(subjects)}, 1, None
            )
        )
    return cells


def perplexity_cells(run: Run, cfg: DownstreamConfig) -> list[Cell]:
    """The curve by position, and a cell per context. Raises ValueError or OSError, in one sentence."""
    documents = read_documents(run, cfg)
    cfg = with_lengths(cfg, documents, run.trained)
    config = {"source": cfg.source, "window_attention": cfg.window_attention, "set": cfg.set}
    idx = windows(documents, cfg.length, cfg.length, cfg.documents)
    own = config | {"length": cfg.length, "average": cfg.average, "data": short_digest(idx)}
    cells = [Cell("perplexity", own, len(idx), partial(by_position, run, cfg, idx))]
    idx = windows(documents, cfg.contexts[-1], cfg.stride, -(-cfg.targets // cfg.stride))
    config |= {"stride": cfg.stride, "data": short_digest(idx)}
    for context in cfg.contexts:
        own = config | {"context": context}
        cells.append(Cell("perplexity", own, len(idx), partial(by_context, run, cfg, idx, context)))
    return cells


def make_cells(
    run: Run, cfg: DownstreamConfig, questions: dict[str, dict[str, list[Question]]]
) -> list[Cell]:
    """All that is asked of a run, task by task."""
    cells = []
    for task in cfg.tasks:
        cells += (
            perplexity_cells(run, cfg)
            if task == "perplexity"
            else choice_cells(run, cfg, task, questions[task])
        )
    return cells


def evaluate(
    path: str, cfg: DownstreamConfig, questions: dict, device: torch.device
) -> Iterator[dict]:
    """The records of one run, each appended to the run's eval/<task>.jsonl as soon as it is there."""
    with user_errors():
        run = load_run(path, device, cfg)
        cells = make_cells(run, cfg, questions)
    about, earlier = origin(run), []
    for cell in cells:
        file, like = (
            folder_of(path) / f"{cell.task}.jsonl",
            {"metric": cell.task, "config": cell.config},
        )
        record = finished(file, like | {"weights": about["weights"]}) if cfg.resume else None
        if record is None:
            began = time.perf_counter()
            if cell.measure:
                names = (
                    name_of(path),
                    cell.task,
                    cell.config.get("subject"),
                    cell.config.get("context"),
                )
                title = " ".join(str(name) for name in names if name)
                with tqdm(
                    total=cell.work, desc=title, bar_format=BAR, disable=None, leave=False
                ) as bar:
                    measured = cell.measure(bar.update)
            else:
                measured = pooled([r for r in earlier if r["metric"] == cell.task])
            record = like | measured | {"seconds": round(time.perf_counter() - began, 2)} | about
            append_record(file, record)
        earlier.append(record)
        yield record


# ---- tables and the picture


def percent(record: dict, name: str) -> str:
    error = record[f"{name}_stderr"]
    return f"{100 * record[name]:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def shares(counts: list[int]) -> str:
    """Per cent of A/B/..., as far as there are any."""
    last = max(i for i, c in enumerate(counts) if c)
    return "/".join(f"{100 * c / sum(counts):.0f}" for c in counts[: last + 1])


def choice_table(results: dict[str, list[dict]]) -> str:
    rows = [
        ["run", "task", "n", "acc %", "acc_norm %", "chance %", "longer", "chosen %", "right %"]
    ]
    for run, r in ((run, r) for run, found in results.items() for r in found):
        task = f"{r['metric']} {r['config']['subject']}".strip()
        numbers = [
            f"{r['n']:,}",
            percent(r, "acc"),
            percent(r, "acc_norm"),
            f"{100 * r['chance']:.1f}",
        ]
        rows.append(
            [
                name_of(run, results),
                task,
                *numbers,
                f"{r['longer']:,}",
                shares(r["chosen"]),
                shares(r["gold"]),
            ]
        )
    legend = "± one standard error; longer: than the training length; chosen (by the sum) and right: shares of A/B/..."
    return f"{aligned(rows)}\n{legend}"


def perplexity_table(results: dict[str, list[dict]]) -> str:
    """By context; the curve, a run's first record, is for the picture."""
    rows = [["run", "context", "targets", "nats a token", "perplexity", "bits a byte"]]
    for run, r in ((run, r) for run, found in results.items() for r in found[1:]):
        nats = f"{r['nll']:.4f} ± {r['interval_95'][1] - r['nll']:.4f}"
        context, n, perplexity = (
            f"{r['config']['context']:,}",
            f"{r['n']:,}",
            f"{r['perplexity']:.3f}",
        )
        rows.append(
            [name_of(run, results), context, n, nats, perplexity, f"{r['bits_per_byte']:.4f}"]
        )
    return f"{aligned(rows)}\n± 95% interval; at every context the targets are the same"


def draw(results: dict[str, list[dict]], file: Path) -> None:
    """Perplexity by position, and by context for the same targets; one curve a run."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter

    figure, axes = plt.subplots(
        1, 2, figsize=(11, 4.5), sharex=True, sharey=True, layout="constrained"
    )
    left, right = axes
    for (run, (curve, *points)), (marker, line) in zip(
        results.items(), STYLES * len(results), strict=False
    ):
        style = {"marker": marker, "linestyle": line, "markersize": 5, "linewidth": 1}
        middle = (np.arange(len(curve["nll"])) + 0.5) * curve["config"]["average"]
        left.plot(
            middle, np.exp(curve["nll"]), markevery=0.15, label=name_of(run, results), **style
        )
        if points:
            y, ends = (
                np.array([p["perplexity"] for p in points]),
                np.exp([p["interval_95"] for p in points]).T,
            )
            right.errorbar(
                [p["config"]["context"] for p in points], y, np.abs(ends - y), capsize=3, **style
            )
    curve, *points = next(iter(results.values()))
    trained = curve["training_length"]
    for axis in axes:
        axis.axvline(trained, color="grey", linewidth=1)
        place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "ha": "right", "va": "top"}
        axis.annotate("training length ", (trained, 0.98), color="grey", **place)
        axis.set(xscale="log", yscale="log")
        axis.xaxis.minorticks_off()
        axis.tick_params(axis="x", rotation=30)
    ticks = [
        trained * 2**k
        for k in range(-8, 20)
        if left.get_xlim()[0] <= trained * 2**k <= left.get_xlim()[1]
    ]
    left.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    left.yaxis.set_major_formatter(LogFormatter())
    left.yaxis.set_minor_formatter(LogFormatter())
    left.set(xlabel="position in the document (tokens)", ylabel="perplexity per token")
    left.set_title(f"by position: {curve['n']:,} tokens, means of {curve['config']['average']:,}")
    figure.legend(loc="outside upper center", ncols=min(5, len(results)))
    right.set(xlabel="longest context of a target (tokens)")
    if points:
        right.set_title(f"by context: the same {points[0]['n']:,} targets, 95% intervals")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def report(results: dict[str, list[dict]]) -> None:
    """Prints the tables of all results and saves the picture in the first run's folder."""
    curves = {
        run: [r for r in found if r["metric"] == "perplexity"] for run, found in results.items()
    }
    choices = {
        run: [r for r in found if r["metric"] != "perplexity"] for run, found in results.items()
    }
    curves, choices = (
        {run: found for run, found in kind.items() if found} for kind in (curves, choices)
    )
    if curves:
        file = folder_of(next(iter(results))) / "perplexity.png"
        draw(curves, file)
        print(f"{perplexity_table(curves)}\nsaved {file}")
    if choices:
        print(choice_table(choices))
    print("records in " + ", ".join(f"{folder_of(run)}/" for run in results))


def prepare(
    cfg: DownstreamConfig, runs: list[str]
) -> tuple[DownstreamConfig, dict[str, dict[str, list[Question]]]]:
    """The config with the lengths and the source that all runs share, and the questions of every task; after
    everything was read and checked for every run. Raises ValueError or OSError, in one sentence."""
    first = load_run(runs[0], torch.device("cpu"), cfg)
    if "perplexity" in cfg.tasks:
        cfg = replace(cfg, source=cfg.source or str(first.saved.get("data", "")))
        cfg = with_lengths(cfg, read_documents(first, cfg), first.trained)
    source = cfg.num_fewshot, cfg.limit, cfg.data_dir
    questions = {task: load_questions(task, *source) for task in cfg.tasks if task != "perplexity"}
    for run in runs:
        make_cells(load_run(run, torch.device("cpu"), cfg), cfg, questions)
    return cfg, questions


def main() -> None:
    (cfg,), runs = configurator.parse([DownstreamConfig], sys.argv[1:], __doc__, positional="runs")
    runs = distinct(runs or [str(PRETRAINED)])
    with user_errors():
        device, _ = pick_device(cfg.device)
        cfg, questions = prepare(cfg, runs)
    results, stopped = collect(runs, lambda run: evaluate(run, cfg, questions, device))
    if results:
        report(results)
    if stopped:
        sys.exit(130)


if __name__ == "__main__":
    configurator.run(main)

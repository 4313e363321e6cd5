"""RULER's needle-in-a-haystack tasks: eight ways to hide short facts in a long text and to ask for them at its end.

python eval_ruler.py                                                   # the model that comes with the program
python eval_ruler.py out/ggd_bam_cpu                                   # 1x to 16x the training length
python eval_ruler.py out/a out/b --tasks=niah_single_1 --lengths=4096,131072 --samples=500
python eval_ruler.py --dry_run --tokenizer=gpt2 --lengths=4096         # one prompt a task, to look at

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv 2404.06654). The score
is the share of the expected values that stand in a greedily generated text. Besides it the answer is scored as in the
passkey test: right if each of its tokens is the most likely one, given the true ones before it.
"""

import configurator
from configurator import fail, user_errors

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

from data import encode_document, get_tokenizer
from device import pick_device
from eval_passkey import MULTIPLES, cell, cost
from needles import ADJECTIVES, BUDGET, NOUNS, TASKS, Sample, make_sample, read_essay, shortest
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
from streaming import KVCache, generate, score

STEP = (
    10**5
)  # work of generating a token in the units of cost(), as measured with the laptop model on a CPU


@dataclass
class RulerConfig(Changes):
    """What to ask. Raises ValueError, in one sentence, if it makes no sense."""

    tasks: tuple[str, ...] = tuple(TASKS)  # which of the eight
    lengths: tuple[
        int, ...
    ] = ()  # in tokens, <|endoftext|> and the answer's budget included; none given: 1x, 2x, 4x,
    # 8x and 16x the training length of the first run
    samples: int = 50  # prompts a cell; RULER has 500, for which a laptop needs hours
    seed: int = 42  # draws keys, values and depths
    haystack_file: str = (
        ""  # a text for the tasks that hide needles in an essay; none given: data/pydocs/pydocs.txt
    )
    resume: bool = False  # go on behind the cells that are in the records
    dry_run: bool = False  # print one prompt a task with its token counts, and evaluate nothing
    tokenizer: Literal["auto", "bytes", "gpt2"] = (
        "auto"  # of --dry_run without a run; auto: the run's
    )
    device: str = "auto"  # auto, cpu, cuda, ...

    def __post_init__(self):
        strangers = [task for task in self.tasks if task not in TASKS]
        if strangers or not self.tasks:
            raise ValueError(
                f"tasks has {', '.join(strangers) or 'none'}; choose from {', '.join(TASKS)}"
            )
        super().__post_init__()
        check_range("samples", 1, self.samples)
        check_range("lengths", 1, *self.lengths)


def string_match_all(text: str, values: list[str]) -> float:
    """RULER's score, 0 to 1: the share of the values that occur in the text; upper and lower case are the same."""
    return sum(value.lower() in text.lower() for value in values) / len(values)


class Outcome(NamedTuple):
    score: float  # RULER's, 0 to 1
    right: list[
        bool
    ]  # token by token of the answer: is it the most likely one, given the true ones before it?
    nats: float  # -ln of the whole answer's probability


def ask(run: Run, sample: Sample) -> Outcome:
    """Let a model answer greedily, and score the expected answer token by token."""
    enc, device, prompt = run.enc, run.model.embedding.weight.device, sample.tokens
    whole = encode_document(enc, sample.prompt + sample.prefix + sample.answer)
    assert whole[: len(prompt)] == prompt, "a token spans the border of prompt and answer"
    answer = torch.tensor([whole[len(prompt) :]])
    cache = KVCache(run.model, 1, len(prompt) + max(answer.shape[1], BUDGET[enc.name]))
    log_p, best = score(run.model, torch.tensor([whole], device=device), answer.shape[1], cache)
    cache.rewind(len(prompt) - 1)  # and go on from the prompt's last token, without the answer
    last = torch.tensor([prompt[-1:]], device=device)
    new = generate(run.model, last, BUDGET[enc.name], stop=enc.eot_token, cache=cache)[0].tolist()
    text = enc.decode([token for token in new if token < enc.n_vocab])
    return Outcome(
        string_match_all(text, sample.values),
        (best.cpu() == answer)[0].tolist(),
        -log_p.sum().item(),
    )


def result(outcomes: list[Outcome]) -> dict:
    """The numbers of a cell. A mean of scores between 0 and 1 spreads at most as much as a proportion with that mean,
    so Wilson's interval is wide enough for it."""
    n, right = len(outcomes), [token for o in outcomes for token in o.right]
    correct, exact = sum(o.score for o in outcomes), sum(all(o.right) for o in outcomes)
    return {
        "correct": correct,  # RULER's score is 100 * correct / n
        "n": n,
        "interval_95": [round(x, 4) for x in wilson(correct, n)],
        "exact": exact,  # answers with every token right
        "exact_interval_95": [round(x, 4) for x in wilson(exact, n)],
        "tokens_right": round(sum(right) / len(right), 4),
        "nats_per_token": round(sum(o.nats for o in outcomes) / len(right), 4),
    }


def short_digest(lines: Sequence[str]) -> str:
    return digest("\n".join(lines).encode())


def cells_of(
    enc: tiktoken.Encoding, cfg: RulerConfig, lengths: Sequence[int], essay: list[str]
) -> Iterator[dict]:
    """What identifies the record of each task and length; `needs` is the least length that holds all the prompts."""
    for name in dict.fromkeys(cfg.tasks):
        haystack, keys, needs = *TASKS[name][:2], shortest(name, cfg.seed, cfg.samples, enc, essay)
        haystack += f", sha256 {short_digest(essay)}" if haystack == "essay" else ""
        keys += f", sha256 {short_digest(ADJECTIVES + NOUNS)}" if keys == "words" else ""
        config = {"samples": cfg.samples, "seed": cfg.seed, "answer_tokens": BUDGET[enc.name]}
        config |= {
            "haystack": haystack,
            "keys": keys,
            "window_attention": cfg.window_attention,
            "set": cfg.set,
        }
        for length in lengths:
            yield {
                "metric": "ruler",
                "task": name,
                "length": length,
                "needs": needs,
                "config": config,
            }


def evaluate(
    path: str, cfg: RulerConfig, lengths: Sequence[int], essay: list[str]
) -> Iterator[dict]:
    """One run: a record for each task and length, appended to its eval/ruler.jsonl as soon as it is there."""
    with user_errors():
        run = load_run(path, pick_device(cfg.device)[0], cfg)
    file, about = folder_of(path) / "ruler.jsonl", origin(run)
    cells = list(cells_of(run.enc, cfg, lengths, essay))
    done = [cfg.resume and finished(file, c | {"weights": about["weights"]}) for c in cells]
    work = [
        cost(c["length"]) + BUDGET[run.enc.name] * STEP if c["needs"] <= c["length"] else 0
        for c in cells
    ]
    total = cfg.samples * sum(w for w, record in zip(work, done, strict=True) if not record)
    bar = tqdm(total=total, desc=name_of(path), bar_format=BAR, disable=None)
    for c, w, record in zip(cells, work, done, strict=True):
        if not record:
            began, outcomes = time.perf_counter(), []
            bar.set_postfix_str(f"{c['task']}, {c['length']:,} tokens")
            for index in range(cfg.samples if w else 0):
                sample = make_sample(c["task"], cfg.seed, index, c["length"], run.enc, essay)
                outcomes.append(ask(run, sample))
                bar.update(w)
            numbers = result(outcomes) if outcomes else {"n": 0}
            record = c | numbers | {"seconds": round(time.perf_counter() - began, 2)} | about
            append_record(file, record)
        yield record
    bar.close()


# ---- what is shown


def show_prompts(
    enc: tiktoken.Encoding, cfg: RulerConfig, lengths: Sequence[int], essay: list[str]
) -> None:
    """The first prompt of each task at the first length that can hold it; with no lengths given, at the shortest."""
    for name in dict.fromkeys(cfg.tasks):
        needs, budget = shortest(name, cfg.seed, 1, enc, essay), BUDGET[enc.name]
        length = next((n for n in lengths or [needs] if n >= needs), None)
        if length is None:
            print(f"==== {name}: n/a: needs at least {needs:,} tokens\n")
            continue
        sample = make_sample(name, cfg.seed, 0, length, enc, essay)
        used, depths = (
            len(sample.tokens),
            ", ".join(f"{needle.depth:.2f}" for needle in sample.needles),
        )
        print(
            f"==== {name} at {length:,} tokens: prompt {used:,} + answer {budget} = {used + budget:,}"
        )
        print(
            f"==== needles at depth {depths}, expected:{sample.answer}\n{sample.prompt}{sample.prefix}\n"
        )


def shown(record: dict) -> str:
    """A cell of the table: score with interval / exact answers / right tokens."""
    if not record["n"]:
        return f"n/a: needs at least {record['needs']:,} tokens"
    return f"{cell(record)} / {100 * record['exact'] / record['n']:.0f}% / {100 * record['tokens_right']:.0f}%"


def table(found: list[dict]) -> str:
    """A row a task, a column a length."""
    cells = {(r["task"], r["length"]): shown(r) for r in found}
    names, lengths = dict.fromkeys(r["task"] for r in found), sorted({r["length"] for r in found})
    rows = [[name, *(cells.get((name, n), "") for n in lengths)] for name in names]
    return aligned([["task", *(f"{n:,}" for n in lengths)], *rows])


def draw_curves(results: dict[str, list[dict]], file: Path) -> None:
    """Score by length, a panel a task, a curve a run."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    points = [r | {"run": run} for run, found in results.items() for r in found if r["n"]]
    names, lengths = (
        list(dict.fromkeys(r["task"] for r in points)),
        sorted({r["length"] for r in points}),
    )
    rows = 1 + (len(names) > 4)
    columns = -(-len(names) // rows)
    figure = plt.figure(figsize=(3 + 3 * columns, 1 + 2.8 * rows), layout="constrained")
    for place, name in enumerate(names, start=1):
        axis = figure.add_subplot(rows, columns, place, title=name)
        for run, (marker, line) in zip(results, STYLES * len(results), strict=False):
            curve = [r for r in points if (r["task"], r["run"]) == (name, run)]
            x, y = [r["length"] for r in curve], [100 * r["correct"] / r["n"] for r in curve]
            bars = np.abs(100 * np.reshape([r["interval_95"] for r in curve], (-1, 2)).T - y)
            axis.errorbar(
                x, y, bars, marker=marker, linestyle=line, capsize=3, label=name_of(run, results)
            )
        axis.axvline(points[0]["training_length"], color="grey", linewidth=1)
        axis.set(xscale="log", ylim=(-4, 104))
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
        axis.minorticks_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.supxlabel("length in tokens, answer included (grey: training length)", fontsize="medium")
    figure.supylabel("expected values found (%)", fontsize="medium")
    figure.suptitle(f"RULER, n = {points[0]['n']} a point, bars: 95% intervals")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    (cfg,), runs = configurator.parse([RulerConfig], sys.argv[1:], __doc__, positional="runs")
    with user_errors():
        if cfg.tokenizer != "auto" and (runs or not cfg.dry_run):
            raise ValueError("tokenizer is for --dry_run without a run; a run has its own")
        runs = distinct(runs or [str(PRETRAINED)] * (cfg.tokenizer == "auto"))
        pick_device(cfg.device)
        essay = (
            read_essay(cfg.haystack_file)
            if any(TASKS[name].haystack == "essay" for name in cfg.tasks)
            else []
        )
        loaded = (load_run(run, torch.device("cpu"), cfg) for run in runs)
        checked = [
            (run.trained, run.enc) for run in loaded
        ]  # all of them, before the first is tested
        enc = checked[0][1] if checked else get_tokenizer(cfg.tokenizer)
    lengths = sorted(set(cfg.lengths)) or [
        m * trained for m in MULTIPLES for trained, _ in checked[:1]
    ]
    if cfg.dry_run:
        return show_prompts(enc, cfg, lengths, essay)
    encs = {enc.name: enc for _, enc in checked}.values()
    needs = min(
        shortest(name, cfg.seed, cfg.samples, enc, essay) for enc in encs for name in cfg.tasks
    )
    if max(lengths) < needs:
        fail(
            f"lengths end at {max(lengths):,}, and these tasks need at least {needs:,} tokens; give a longer one"
        )
    results, stopped = collect(runs, lambda run: evaluate(run, cfg, lengths, essay))
    for run, found in results.items():
        name = name_of(run, results)
        print(
            f"{name}, n = {cfg.samples}: values found [95% interval] / answers right / tokens right"
        )
        print(table(found))
        print(f"records in {folder_of(run) / 'ruler.jsonl'}")
    if any(record["n"] for found in results.values() for record in found):
        picture = folder_of(runs[0]) / "ruler.png"
        draw_curves(results, picture)
        print(f"saved {picture}")
    if stopped:
        sys.exit(130)


if __name__ == "__main__":
    configurator.run(main)

"""RULER's needle-in-a-haystack tasks: eight ways to hide short facts in a long text.

python eval_ruler.py                                              # the pretrained model
python eval_ruler.py out/ggd_bam_cpu                              # 1x to 16x the training length
python eval_ruler.py out/a out/b --tasks=niah_single_1 --lengths=4096,131072 --samples=500
python eval_ruler.py --dry_run --tokenizer=gpt2 --lengths=4096    # one prompt a task, to look at

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv
2404.06654). The score is the share of the expected values that stand in a greedily generated text.
The answer is also scored as in the passkey test: right if each of its tokens is the most likely
one, given the true ones before it.
"""

import configurator
from configurator import user_errors

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import tiktoken
import torch

import runs
from data import encode_document, get_tokenizer
from needles import ADJECTIVES, BUDGET, NOUNS, TASKS, Sample, make_sample, read_essay, shortest
from runs import Cell, EvalConfig, Run, cost
from streaming import KVCache, generate, score

STEP = 10**5  # work of generating a token in the units of cost(): the laptop model's on a CPU


@dataclass
class RulerConfig(EvalConfig):
    """What to ask."""

    tasks: tuple[str, ...] = tuple(TASKS)  # which of the eight
    lengths: tuple[int, ...] = ()  # in tokens, <|endoftext|> and the answer's budget included; none
    # given: 1x, 2x, 4x, 8x and 16x the training length of the first run
    samples: int = 50  # prompts a cell; RULER has 500, for which a laptop needs hours
    seed: int = 42  # draws keys, values and depths
    haystack_file: str = ""  # a text for the tasks that hide needles in an essay; none given:
    # data/pydocs/pydocs.txt
    dry_run: bool = False  # print one prompt a task with its token counts, and evaluate nothing
    tokenizer: Literal["auto", "bytes", "gpt2"] = "auto"  # of --dry_run without a run; auto: the
    # run's

    def __post_init__(self):
        super().__post_init__()
        strangers = ", ".join(task for task in self.tasks if task not in TASKS)
        if strangers or not self.tasks:
            raise ValueError(f"tasks has {strangers or 'none'}; choose from {', '.join(TASKS)}")
        runs.check_range("samples", 1, self.samples)
        runs.check_range("lengths", 1, *self.lengths)


# ---- score


def string_match_all(text: str, values: list[str]) -> float:
    """RULER's score: the share of the values that occur in the text, in whatever case."""
    return sum(value.lower() in text.lower() for value in values) / len(values)


class Outcome(NamedTuple):
    score: float  # RULER's, 0 to 1
    right: list[bool]  # by token of the answer: is it the most likely one, given the true ones?
    nats: float  # -ln of the whole answer's probability


def ask(run: Run, sample: Sample) -> Outcome:
    """Let a model answer greedily, and score the expected answer token by token."""
    enc, device, prompt = run.enc, run.model.embedding.weight.device, sample.tokens
    whole = encode_document(enc, sample.prompt + sample.prefix + sample.answer)
    assert whole[: len(prompt)] == prompt, "a token spans the border of prompt and answer"
    answer = torch.tensor([whole[len(prompt) :]])
    cache = KVCache(run.model, 1, len(prompt) + max(answer.shape[1], BUDGET[enc.name]))
    log_p, best = score(run.model, torch.tensor([whole], device=device), answer.shape[1], cache)
    cache.rewind(len(prompt) - 1)  # generate from the prompt's last token, without the answer
    last = torch.tensor([prompt[-1:]], device=device)
    new = generate(run.model, last, BUDGET[enc.name], stop=enc.eot_token, cache=cache)[0].tolist()
    text = enc.decode([token for token in new if token < enc.n_vocab])
    right = (best.cpu() == answer)[0].tolist()
    return Outcome(string_match_all(text, sample.values), right, -log_p.sum().item())


def count_outcomes(outcomes: list[Outcome]) -> dict:
    """The numbers of a cell. A mean of scores between 0 and 1 spreads at most as much as a
    proportion with that mean, so Wilson's interval is wide enough for it."""
    n, right = len(outcomes), [token for o in outcomes for token in o.right]
    correct, exact = sum(o.score for o in outcomes), sum(all(o.right) for o in outcomes)
    return {
        "correct": correct,  # RULER's score is 100 * correct / n
        "n": n,
        "interval_95": [round(x, 4) for x in runs.wilson(correct, n)],
        "exact": exact,  # answers with every token right
        "exact_interval_95": [round(x, 4) for x in runs.wilson(exact, n)],
        "tokens_right": round(sum(right) / len(right), 4),
        "nats_per_token": round(sum(o.nats for o in outcomes) / len(right), 4),
    }


# ---- cells


def measure(
    run: Run, cfg: RulerConfig, essay: list[str], cell: dict, work: int, advance, earlier
) -> dict:
    outcomes = []
    for index in range(cfg.samples if cell["needs"] <= cell["length"] else 0):
        where = cell["task"], cfg.seed, index, cell["length"]
        outcomes.append(ask(run, make_sample(*where, run.enc, essay)))
        advance(work)
    return count_outcomes(outcomes) if outcomes else {"n": 0}


def digest_lines(lines: list[str]) -> str:
    return runs.digest("\n".join(lines).encode())


def make_cells(run: Run, cfg: RulerConfig, lengths: list[int], essay: list[str]) -> list[Cell]:
    """A cell a task and length; `needs` is the least length that holds all the prompts."""
    cells, enc = [], run.enc
    for name in dict.fromkeys(cfg.tasks):
        haystack, keys, needs = *TASKS[name][:2], shortest(name, cfg.seed, cfg.samples, enc, essay)
        haystack += f", sha256 {digest_lines(essay)}" if haystack == "essay" else ""
        keys += f", sha256 {digest_lines(ADJECTIVES + NOUNS)}" if keys == "words" else ""
        config = {"samples": cfg.samples, "seed": cfg.seed, "answer_tokens": BUDGET[enc.name]}
        config |= {"haystack": haystack, "keys": keys}
        config |= {"window_attention": cfg.window_attention, "set": cfg.set}
        for length in lengths:
            cell = {"metric": "ruler", "task": name, "length": length}
            cell |= {"needs": needs, "config": config}
            work = cost(length) + BUDGET[enc.name] * STEP if needs <= length else 0  # of a sample
            label, measuring = f"{name}, {length:,} tokens", partial(measure, run, cfg, essay)
            cells.append(Cell(cell, label, cfg.samples * work, partial(measuring, cell, work)))
    return cells


# ---- report


def show_prompts(
    enc: tiktoken.Encoding, cfg: RulerConfig, lengths: list[int], essay: list[str]
) -> None:
    """Each task's first prompt at the first length that holds it; with none, at the shortest."""
    for name in dict.fromkeys(cfg.tasks):
        needs, budget = shortest(name, cfg.seed, 1, enc, essay), BUDGET[enc.name]
        length = next((n for n in lengths or [needs] if n >= needs), None)
        if length is None:
            print(f"==== {name}: n/a: needs at least {needs:,} tokens\n")
            continue
        sample = make_sample(name, cfg.seed, 0, length, enc, essay)
        used = len(sample.tokens)
        depths = ", ".join(f"{needle.depth:.2f}" for needle in sample.needles)
        print(f"==== {name} at {length:,} tokens: ", end="")
        print(f"prompt {used:,} + answer {budget} = {used + budget:,}")
        print(f"==== needles at depth {depths}, expected:{sample.answer}")
        print(f"{sample.prompt}{sample.prefix}\n")


def format_cell(record: dict) -> str:
    """Score with interval / exact answers / right tokens."""
    if not record["n"]:
        return f"n/a: needs at least {record['needs']:,} tokens"
    exact, tokens = 100 * record["exact"] / record["n"], 100 * record["tokens_right"]
    return f"{runs.format_share(record)} / {exact:.0f}% / {tokens:.0f}%"


def report(results: dict[str, list[dict]]) -> None:
    """A table a run, and ruler.png: score by length, a panel a task, a curve a run."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[dict]]] = {}
    for run, records in results.items():
        rows: dict[str, list[dict]] = {}
        for r in records:
            rows.setdefault(r["task"], []).append(r)
            if r["n"]:
                panels.setdefault(r["task"], {run: [] for run in results})[run].append(r)
        n = records[0]["config"]["samples"]
        print(f"{runs.name_of(run, results)}, n = {n}: values found ", end="")
        print("[95% interval] / answers right / tokens right")
        print(runs.format_by_length("task", rows, format_cell))
    if not panels:
        return
    high = 1 + (len(panels) > 4)
    wide = -(-len(panels) // high)
    figure = Figure(figsize=(3 + 3 * wide, 1 + 2.8 * high), layout="constrained")
    for place, (name, panel) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(high, wide, place, title=name)
        runs.draw_shares(axis, panel)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center")
    figure.supxlabel("length in tokens, answer included (grey: training length)", fontsize="medium")
    figure.supylabel("expected values found (%)", fontsize="medium")
    figure.suptitle(f"RULER, n = {n} a point, bars: 95% intervals")
    picture = runs.folder_of(next(iter(results))) / "ruler.png"
    figure.savefig(picture, dpi=150)
    print(f"saved {picture}")


def main() -> None:
    (cfg,), paths = configurator.parse([RulerConfig], sys.argv[1:], __doc__, positional="runs")
    with user_errors():
        if cfg.tokenizer != "auto" and (paths or not cfg.dry_run):
            raise ValueError("tokenizer is for --dry_run without a run; a run has its own")
        needs_essay = any(TASKS[name].haystack == "essay" for name in cfg.tasks)
        essay = read_essay(cfg.haystack_file) if needs_essay else []
        loaded = runs.load_runs(paths, cfg) if cfg.tokenizer == "auto" else []
        default = [m * run.trained for run in loaded[:1] for m in runs.MULTIPLES]
        lengths = sorted(set(cfg.lengths)) or default
        if cfg.dry_run:
            enc = loaded[0].enc if loaded else get_tokenizer(cfg.tokenizer)
            return show_prompts(enc, cfg, lengths, essay)
        plan = [(run, make_cells(run, cfg, lengths, essay)) for run in loaded]
        needs = min(cell.identity["needs"] for _, cells in plan for cell in cells)
        if needs > lengths[-1]:
            problem = f"lengths end at {lengths[-1]:,}, and these tasks need at least {needs:,}"
            raise ValueError(f"{problem} tokens; give a longer one")
    runs.evaluate(plan, cfg, report)


if __name__ == "__main__":
    configurator.run(main)

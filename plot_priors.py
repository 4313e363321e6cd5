"""Pictures of priors: what they do in theory, what a model's heads have learned, and where heads
look on a prompt, as content x prior = posterior.

python plot_priors.py                     # the theory, into out/theory, and the pretrained model
python plot_priors.py out/ggd_bam_cpu     # a model, into out/ggd_bam_cpu/eval
python plot_priors.py out/ggd_bam_cpu --prompt=my.txt --needle="words of it to look for"

A prior is drawn as it is added to the scores (for GGD with SSMax: s ln n b), and a head's class
says what that prior does: a negative s turns it round. Besides the pictures there is a table of the
heads and a record in eval/priors.jsonl. A function that makes a picture has the name of its file.
"""

import configurator
from configurator import user_errors

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import runs
from data import encode_document, read_text, replacing
from device import pick_device
from model import GPT, CausalSelfAttention, ModelConfig
from needles import WORDINGS, make_prompts
from runs import Run
from streaming import KVCache, prefill

WIDTHS = (512, 8192)  # keys in view, for effective widths and the grid of learned priors
BETAS = (2.0, 1.0, 0.5, 0.0, -0.3, -1.0)  # of the theory
LINES = ("-", "--", "-.", ":", (0, (8, 3)), (0, (5, 2, 1, 2, 1, 2)))
BESIDE = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}  # where a legend is out of the way
PARTS = {  # content is broad, so that it shows under a posterior that equals it
    "prior": {"ls": ":", "color": "#d55e00", "lw": 2},
    "content": {"ls": "-", "color": "#56b4e9", "lw": 4},
    "posterior": {"ls": "-", "color": "black", "lw": 1},
}
BINS = 256  # groups of keys, in pictures of a whole context
LAST_QUERIES = 16  # rows of a heat map
Z_QUERIES = 256  # places along the prompt where ln Z is shown
DEPTHS = 5  # passkey prompts of a length; the one with the needle in the middle is drawn
THEORY = Path("out/theory")
FLOOR = 1e-6  # smallest probability drawn
SCORES_AT_ONCE = 2**22  # float64: 32 MiB
Head = tuple[int, int]  # layer and head, from 0


@dataclass
class PlotConfig:
    """What to draw."""

    lengths: tuple[int, ...] = ()  # tokens of the passkey prompts; the longest is drawn; none
    # given: 8192 and its halves down to the training length
    seed: int = 1  # draws the keys
    prompt: str = ""  # a text file to look at instead; what follows its last token is the answer
    needle: str = ""  # with prompt: the words of it to mark
    heads: tuple[str, ...] = ()  # layer.head from 0.0, such as 2.3; none: the three most retrieving
    device: str = "auto"  # auto, cpu, cuda, ...

    def __post_init__(self):
        if bool(self.prompt) != bool(self.needle):
            raise ValueError("prompt and needle go together: a text file, and words of it to mark")


# Priors in numbers --------------------------------------------------------------------------------


@torch.no_grad()
def acting_prior(attn: CausalSelfAttention, n: int) -> Tensor:
    """What is added to the scores of a query that sees n keys: (H, n) nats by distance, float64."""
    prior = attn.log_prior(n)
    if prior is None:
        return torch.zeros(attn.cfg.n_head, n, dtype=torch.float64)
    _, row_scale = attn.ssmax(torch.tensor(math.log(n), dtype=torch.float64))
    return prior.double().cpu() * row_scale


def effective_width(prior: Tensor) -> int:
    """The distance in tokens within which 90% of the normalised prior lies; prior (n,) nats."""
    return int((prior.softmax(-1).cumsum(-1) < 0.9).sum())


def classify(prior: Tensor, theta_beta: float) -> str:
    """What an acting prior (n,) does, with the paper's border at theta_beta = -0.6. One that falls
    from its centre, the own token or mu, is local. A uniform one counts as retrieval, as
    theta_beta = 0 does in the paper. s < 0, which shows in a positive sum, turns theta_beta < 0
    into local, and theta_beta > 0 into farthest: it rises up to the beginning of the text."""
    if prior.min() == prior.max():
        return "retrieval"
    if (theta_beta > 0) == (prior.sum() < 0).item():
        return "local"
    return "farthest" if theta_beta > 0 else "aggressive" if theta_beta < -0.6 else "retrieval"


def tabulate_heads(model: GPT) -> list[dict]:
    """A row a head: theta and s, the scale alpha in tokens (None for theta_beta = 0 and beyond any
    float), class and effective widths; of these what its prior has."""
    values, rows = model.prior_values(), []
    for layer, block in enumerate(model.blocks):
        priors = {n: acting_prior(block.attn, n) for n in WIDTHS}
        for h in range(model.cfg.n_head):
            row = {"head": f"{layer}.{h}"} | {name: values[name][layer][h] for name in values}
            if {"theta_alpha", "theta_beta"} <= set(row):
                exponent = -row["theta_alpha"] / (row["theta_beta"] or math.nan)
                row["alpha"] = math.exp(exponent) if abs(exponent) < 700 else None
            if model.cfg.pe == "alibi":
                row |= {"alpha": 1 / block.attn.prior.slopes[h].item(), "class": "local"}
            elif block.attn.prior is None:
                row["class"] = "uniform"
            elif "theta_beta" in row:
                row["class"] = classify(priors[WIDTHS[0]][h], row["theta_beta"])
            rows.append(row | {f"width_{n}": effective_width(b[h]) for n, b in priors.items()})
    return rows


def format_heads(rows: list[dict]) -> str:
    """The rows as text, with theta_mu only where it is not 0."""
    names = [name for name in rows[0] if name != "theta_mu" or any(row[name] for row in rows)]
    cells = [[format(row[k], ".4g" * isinstance(row[k], float)) for k in names] for row in rows]
    return runs.aligned([names, *cells]).replace("None", "   -")


# What pictures share ------------------------------------------------------------------------------


def panels(rows: int, columns: int, width: float, height: float, **sharing):
    """A figure and its panels of this size in inches. A bare Figure needs no display."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def save(figure: Figure, folder: Path, name: str) -> None:
    with user_errors():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / name) as file:
            figure.savefig(file, format="png", dpi=150)
    print(f"saved {folder / name}", flush=True)


def head_grid(model: GPT, xlabel: str, ylabel: str) -> tuple[Figure, np.ndarray]:
    """A panel a head, a row a layer."""
    figure, axes = panels(model.cfg.n_layer, model.cfg.n_head, 2, 1.9, sharex=True, sharey=True)
    figure.set_layout_engine(None)  # which takes a minute for 192 panels
    width, height = figure.get_size_inches()
    left, bottom, right, top = 0.9 / width, 0.6 / height, 1 - 0.1 / width, 1 - 0.8 / height
    figure.subplots_adjust(left, bottom, right, top, wspace=0.08, hspace=0.3)
    for (layer, h), axis in np.ndenumerate(axes):
        axis.set_title(f"head {layer}.{h}", fontsize=8, pad=2)
    figure.supxlabel(xlabel, y=0.1 / height)
    figure.supylabel(ylabel, x=0.1 / width)
    return figure, axes


def style(i: int, n: int, dots: int = 0) -> dict:
    """Of curve i of n, told apart in grey too; with a marker at every `dots`-th point."""
    line = {"ls": LINES[i % len(LINES)], "color": colormaps["cividis"](0.85 * i / max(1, n - 1))}
    marker = {"marker": runs.STYLES[i % len(runs.STYLES)][0], "markevery": dots, "ms": 4}
    return line | marker if dots else line  # colors end at 0.85: the brightest fades on paper


def space_distances(n: int) -> np.ndarray:
    """Of 0 ... n - 1 enough for a curve, on a linear as on a logarithmic axis."""
    distances = [0], np.geomspace(1, n - 1, 300), np.linspace(0, n - 1, 300)
    return np.unique(np.concatenate(distances).astype(int))


def scale_distances(axis, n: int, log: bool) -> None:
    if log:  # from 1 token on, with room for 0
        axis.set_xscale("symlog", linthresh=1, linscale=0.3)
    axis.set(xlim=(0, n - 1), xlabel="distance (tokens)")


# Theory -------------------------------------------------------------------------------------------


def layer_of(pe: str, n_head: int, **options) -> CausalSelfAttention:
    """An attention layer as a model has it, with s = 1."""
    return CausalSelfAttention(ModelConfig(pe=pe, n_head=n_head, n_embd=2 * n_head, **options))


def ggd_priors(alpha: float, n: int, ssmax: bool = False) -> Tensor:
    """(BETAS, n): acting priors at the scale alpha, the distance in tokens at which b = -1."""
    thetas = {"theta_alpha": tuple(-b * math.log(alpha) for b in BETAS), "theta_beta": BETAS}
    return acting_prior(layer_of("ggd", len(BETAS), ssmax=ssmax, **thetas), n)


def theory_priors(n: int = 512) -> Figure:
    """Log-prior and prior by distance for every beta at three alphas; ALiBi and NoPE as points."""
    figure, axes = panels(4, 3, 4.6, 3.3)
    x = space_distances(n)
    at = np.searchsorted(x, np.geomspace(1, n - 1, 12).astype(int))
    slopes, uniform = acting_prior(layer_of("alibi", 8), n), acting_prior(layer_of("nope", 1), n)[0]
    for alpha, column in zip((2, 16, 128), axes.T, strict=True):
        laplace = slopes[int(math.log2(alpha)) - 1]  # the head whose slope is 1 / alpha
        points_of = {"ALiBi, slope 1/$\\alpha$": (laplace, "k^"), "NoPE": (uniform, "ko")}
        for row, axis in enumerate(column):
            shape = (lambda b: b.softmax(-1)) if row > 1 else (lambda b: b - b.max())
            for i, (beta, b) in enumerate(zip(BETAS, ggd_priors(alpha, n), strict=True)):
                axis.plot(x, shape(b)[x], label=f"$\\beta$ = {beta:g}", **style(i, len(BETAS)))
            for label, (b, dot) in points_of.items():
                axis.plot(x[at], shape(b)[x[at]], dot, fillstyle="none", label=label)
            scale_distances(axis, n, log=row % 2 == 1)
            axis.set(ylim=(-10, 0.5), ylabel="log-prior below its maximum (nats)")
            if row > 1:
                axis.set(yscale="log", ylim=(1e-5, 1.2), ylabel="prior p(distance)")
            axis.set_title(f"$\\alpha$ = {alpha} tokens", fontsize=10)
    legend = axes[0, 0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside right upper", handlelength=3.5)
    figure.suptitle(f"Generalized Gaussian priors over {n} keys in view, without SSMax")
    return figure


def theory_ssmax(alpha: float = 16) -> Figure:
    """Where the prior's mass lies at three lengths, with SSMax and without."""
    figure, axes = panels(2, 3, 4.6, 3.3)
    lengths = (512, 8192, 524_288)
    for ssmax, name, line in ((False, "plain", "--"), (True, "SSMax, s = 1", "-")):
        for i, n in enumerate(lengths):
            mass = ggd_priors(alpha, n, ssmax).softmax(-1).cumsum(-1)
            x = np.unique(np.geomspace(1, n, 300).astype(int)) - 1
            curve = style(i, 3, dots=25) | {"ls": line, "label": f"n = {n:,}, {name}"}
            for h, axis in enumerate(axes.flat):
                axis.plot(x, mass[h, x], **curve)
    for beta, axis in zip(BETAS, axes.flat, strict=True):
        scale_distances(axis, lengths[-1], log=True)
        axis.set(ylim=(-0.03, 1.03), ylabel="prior mass within the distance")
        axis.set_title(f"$\\beta$ = {beta:g}")
    axes[0, 0].legend(fontsize=7, loc="lower right", handlelength=4)
    figure.suptitle(f"SSMax multiplies the log-prior by s ln n ($\\alpha$ = {alpha:g} tokens)")
    return figure


def theory_fading() -> Figure:
    """The weight of one key g nats above n - 1 equal ones: a softmax of two, so a sigmoid."""
    figure, ((axis,),) = panels(1, 1, 8, 4)
    n = torch.logspace(math.log10(2), 6, 200, dtype=torch.float64).round().unique()
    for name, line, scale in (("plain", "--", 1.0), ("SSMax, s = 1", "-", n.log())):
        for i, g in enumerate((0.5, 1.0, 2.0, 4.0)):
            curve = style(i, 4, dots=25) | {"ls": line, "label": f"g = {g:g}, {name}"}
            axis.plot(n, (scale * g - (n - 1).log()).sigmoid(), **curve)
    labels = {"xlabel": "keys in view, n (tokens)", "ylabel": "weight of the key"}
    axis.set(xscale="log", ylim=(-0.03, 1.03), **labels)
    axis.legend(fontsize=8, handlelength=4, **BESIDE)
    claim = "attention fades with n; with SSMax only where g < 1/s"
    figure.suptitle(f"A key g nats above all others: {claim}", fontsize=10)
    return figure


# What heads have learned --------------------------------------------------------------------------


def learned_priors(model: GPT) -> Figure:
    """Every head's acting prior in nats above the uniform one, at two lengths."""
    figure, axes = head_grid(model, "distance (tokens)", "log-prior above uniform (nats)")
    for layer, block in enumerate(model.blocks):
        for n, line in zip(WIDTHS, ("k--", "k-"), strict=True):
            above, x = acting_prior(block.attn, n).log_softmax(-1) + math.log(n), space_distances(n)
            for axis, curve in zip(axes[layer], above[:, x].clamp(min=-30), strict=True):
                axis.plot(x, curve, line, lw=1, label=f"n = {n:,} keys in view")
    scale_distances(axes[0, 0], WIDTHS[-1], log=True)
    axes[0, 0].set(ylim=(-9.5, 9.5), xlabel="")
    axes[0, 0].set_xticks((0, 10, 1000), ("0", "10", "1,000"))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncols=2)
    return figure


def learned_heads(rows: list[dict], n_layer: int) -> Figure:
    """theta_alpha over theta_beta, a dot a head (the paper's Figure 6), and the classes' counts."""
    figure, ((axis,),) = panels(1, 1, 8, 5)
    for layer in range(n_layer):
        dot = style(layer, n_layer, dots=1) | {"ls": "", "ms": 8}
        axis.plot([], [], label=f"layer {layer}", **dot)
        for row in (row for row in rows if row["head"].startswith(f"{layer}.")):
            fill = "none" if row.get("s", 1) < 0 else "full"
            axis.plot(row["theta_beta"], row["theta_alpha"], fillstyle=fill, **dot)
    left, right = min(axis.get_xlim()[0], -1.2), max(axis.get_xlim()[1], 0.6)
    count = Counter(row["class"] for row in rows)
    for name, where, begin, end, grey in (
        ("local", "above 0", 0, right, "0.95"),
        ("retrieval", "-0.6 to 0", -0.6, 0, "0.76"),
        ("aggressive", "below -0.6", left, -0.6, "0.86"),
    ):
        axis.axvspan(begin, end, color=grey, zorder=0, label=f"{name} ({where}): {count[name]}")
    axis.set(xlim=(left, right), xlabel="theta_beta (no unit)", ylabel="theta_alpha (no unit)")
    title = f"n = {len(rows)} heads, counted by what they do"
    if any(row.get("s", 1) < 0 for row in rows):
        title += f"; hollow: s < 0, turned round; farthest: {count['farthest']}"
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8, **BESIDE)
    return figure


def learned_training(log: list[dict]) -> Figure | None:
    """theta and s over the training steps, if the log has any; theta_mu only where it is not 0."""
    names = [name for name in (log or [{}])[0] if name == "s" or name.startswith("theta_")]
    curves = {name: np.array([record[name] for record in log]) for name in names}  # (records, L, H)
    names = [name for name in names if name != "theta_mu" or curves[name].any()]
    if not names:
        return None
    figure, axes = panels(1, len(names), 4.5, 3.6)
    for axis, name in zip(axes[0], names, strict=True):
        layers = curves[name].swapaxes(0, 1)
        for i, values in enumerate(layers):
            lines = axis.plot([r["step"] for r in log], values, **style(i, len(layers)))
            lines[0].set_label(f"layer {i}")
        axis.set(xlabel="training step", ylabel=f"{name} (no unit), a line a head")
    axes[0, -1].legend(fontsize=8, handlelength=3.5, **BESIDE)
    return figure


# Posteriors on a prompt ---------------------------------------------------------------------------


def find_spans(needle: Tensor) -> np.ndarray:
    """(n, 2): where each run of marked tokens begins and ends."""
    return np.flatnonzero(np.diff(np.pad(needle.numpy().astype(int), 1))).reshape(-1, 2)


class View(NamedTuple):
    """A prompt to look at."""

    idx: Tensor  # (1, T): what the model reads, all but the last token of the answer
    answers: int  # how many of the last positions predict a token of the answer
    needle: Tensor  # (T,) bool: the tokens of the needle


def mark_words(enc, tokens: list[int], words: str) -> Tensor:
    """(T,) bool: the tokens that hold a part of these words, wherever they stand."""
    pieces = [enc.decode_single_token_bytes(token) for token in tokens]
    places = re.finditer(re.escape(words.encode()), b"".join(pieces))
    ends, marks = np.cumsum([len(piece) for piece in pieces]), torch.zeros(len(tokens)).bool()
    for begin, end in (place.span() for place in places):
        marks[np.searchsorted(ends, begin, "right") : np.searchsorted(ends, end) + 1] = True
    if not marks.any():
        raise ValueError(f"needle {words!r} is not in the prompt; give words as they stand there")
    return marks


def make_views(run: Run, cfg: PlotConfig) -> dict[int, list[View]]:
    """The user's own prompt, or passkey tests from short to long, by length."""
    if cfg.prompt:
        text = read_text(cfg.prompt).rstrip("\n")  # an editor's last line break is no part of it
        tokens = encode_document(run.enc, text)
        needle = mark_words(run.enc, tokens, cfg.needle)
        return {len(tokens): [View(torch.tensor([tokens]), 1, needle)]}
    halves = [n for n in (256, 512, 1024, 2048, 4096) if n >= run.trained]
    views: dict[int, list[View]] = {}
    for length in sorted(set(cfg.lengths)) or [*halves, max(8192, run.trained)]:
        views[length] = []
        for prompt in make_prompts(run.enc, length, DEPTHS, (cfg.seed,)):
            tokens, answer = prompt.tokens[:-1], prompt.tokens[-prompt.answer :]
            words = WORDINGS["passkey"].needle.format(key=run.enc.decode(answer).strip())
            needle = mark_words(run.enc, tokens, words)
            views[length].append(View(torch.tensor([tokens]), prompt.answer, needle))
    return views


@torch.no_grad()
def look(model: GPT, idx: Tensor, rows: Tensor, keep: Callable) -> Iterator[Tensor]:
    """For each layer keep(parts, log_z) -> (H, R, ...) of the queries at `rows` (R,) of idx (1, T).
    parts (H, R, 3, T): prior, content and posterior; log_z (H, R). The prompt streams through the
    model while hooks copy what each attention reads."""
    device, T = model.embedding.weight.device, idx.shape[1]
    inputs: list[list[Tensor]] = [[] for _ in model.blocks]
    hooks = [
        block.norm_attn.register_forward_hook(lambda *args, xs=xs: xs.append(args[-1]))
        for block, xs in zip(model.blocks, inputs, strict=True)
    ]
    prefill(model, idx.to(device), KVCache(model, 1, T))
    for hook in hooks:
        hook.remove()
    layout = model.layout(torch.arange(T, device=device)[None])
    chunks = rows.to(device).split(max(1, SCORES_AT_ONCE // (model.cfg.n_head * T)))
    for block, xs in zip(model.blocks, inputs, strict=True):
        q, k, _ = block.attn.project(torch.cat(xs, dim=1), layout)
        q, k = q.double(), k.double()  # exact enough to show posterior = prior x content x Z
        posteriors = (block.attn.posterior(q, k, layout, chunk) for chunk in chunks)
        kept = [keep(torch.stack(p[:3], dim=-2)[0], p.log_z[0]).cpu() for p in posteriors]
        yield torch.cat(kept, dim=1)


def weigh_needle(model: GPT, view: View) -> Tensor:
    """(3, L, H): the needle's mass in prior, content and posterior, mean over the answer."""
    rows = torch.arange(len(view.needle))[-view.answers :]
    masses = look(model, view.idx, rows, lambda parts, _: parts[..., view.needle].sum(-1))
    return torch.stack([mass.mean(1) for mass in masses]).permute(2, 0, 1)


def rank_heads(masses: Tensor) -> list[Head]:
    """By the posterior's mass on the needle, the largest first; masses (prompts, 3, L, H)."""
    mass = masses[:, 2].mean(0)
    order = mass.flatten().argsort(descending=True, stable=True)
    return [divmod(i, mass.shape[1]) for i in order.tolist()]


def point_at_needle(axis, needle: Tensor) -> None:
    """A mark at the upper edge for every place of it."""
    places = find_spans(needle).mean(1)
    edge = {"transform": axis.get_xaxis_transform(), "clip_on": False}
    axis.plot(places, np.ones(len(places)), "kv", **edge)


def bin_keys(p: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(..., T) -> the edges of at most BINS groups of keys, and the largest value in each."""
    edges = np.unique(np.linspace(0, p.shape[-1], BINS + 1).astype(int))
    return edges, np.maximum.reduceat(p.numpy(), edges[:-1], axis=-1).clip(min=FLOOR)


def label_tokens(enc, tokens: Tensor) -> list[str]:
    """Axis labels in characters that the font has, with visible spaces."""
    pieces = [enc.decode_single_token_bytes(token) for token in tokens.tolist()]
    return [ascii(x.decode("utf-8", "replace"))[1:-1].replace(" ", "\u2423") for x in pieces]


def prompt_curves(run: Run, view: View, parts: dict[Head, Tensor], log_z: list[Tensor]) -> Figure:
    """The last row of some heads, over the whole context and token by token at the needle."""
    figure, axes = panels(len(parts), 2, 8, 2.8, sharey=True)
    T, (begin, end) = len(view.needle), find_spans(view.needle)[0]
    near = np.arange(max(0, begin - 10), min(T, end + 10, begin + 70))
    tokens = label_tokens(run.enc, view.idx[0, near])
    for ((layer, h), p), (whole, zoom) in zip(parts.items(), axes, strict=True):
        edges, highest = bin_keys(p[-1])
        for i, (name, line) in enumerate(PARTS.items()):
            label = f"{name}:\n{p[-1, i, view.needle].sum():.2g} on the needle"
            whole.stairs(highest[i], edges, baseline=None, label=label, **line)
            zoom.plot(near, p[-1, i, near].clamp(min=FLOOR), **line)
        point_at_needle(whole, view.needle)
        whole.set(yscale="log", ylim=(FLOOR, 2), xlabel="position of the key (tokens)")
        whole.set_ylabel("probability, last query")
        coupling = f"ln Z = {log_z[layer][h, -1]:.2f} nats, ln n = {math.log(T):.2f}"
        whole.set_title(f"head {layer}.{h}: {coupling}", fontsize=9)
        zoom.legend(*whole.get_legend_handles_labels(), fontsize=8, **BESIDE)
        zoom.axvspan(begin - 0.5, min(end, near[-1] + 1) - 0.5, color="0.9")
        zoom.set_xticks(near, tokens, fontsize=6, parse_math=False)
        zoom.tick_params(axis="x", rotation=0 if run.enc.name == "bytes" else 90)
        zoom.set(xlabel="the prompt, token by token; the needle in grey")
    return figure


def prompt_maps(run: Run, view: View, parts: dict[Head, Tensor]) -> Figure:
    """The last rows of some heads: where question and answer look."""
    figure, axes = panels(len(parts), len(PARTS), 5, 3, sharex=True, sharey=True)
    rows = len(next(iter(parts.values())))
    for ((layer, h), p), line in zip(parts.items(), axes, strict=True):
        edges, highest = bin_keys(p)
        for i, (name, axis) in enumerate(zip(PARTS, line, strict=True)):
            colors = {"norm": LogNorm(1e-5, 1), "cmap": "cividis"}
            mesh = axis.pcolormesh(edges, np.arange(rows + 1), highest[:, i], **colors)
            point_at_needle(axis, view.needle)
            axis.set_title(f"head {layer}.{h}: {name}", fontsize=9)
            axis.tick_params(axis="y", labelsize=7)
    tokens = label_tokens(run.enc, view.idx[0, -rows:])
    axes[0, 0].set_yticks(np.arange(rows) + 0.5, tokens, parse_math=False)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("position of the key (tokens); the triangle points at the needle")
    figure.supylabel(f"token at the query (answer: the last {view.answers})")
    figure.colorbar(mesh, ax=axes, label="probability", extend="min")
    return figure


def prompt_log_z(run: Run, view: View, places: Tensor, log_z: list[Tensor]) -> Figure:
    """ln Z of every head along the prompt, against ln n."""
    figure, axes = head_grid(run.model, "position of the query (tokens)", "coupling, ln Z (nats)")
    bound = {"color": PARTS["prior"]["color"], "ls": "--", "label": "ln n, n keys in view"}
    for (layer, h), axis in np.ndenumerate(axes):
        axis.plot(places, log_z[layer][h], "k.", ms=2, label="ln Z")
        axis.plot(places, (places + 1).log(), **bound)
        for place in find_spans(view.needle).mean(1):
            axis.axvline(place, color="0.6", lw=1, zorder=0, label="needle")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = f"{runs.name_of(run.path)}, n = 1 prompt"
    figure.legend(handles[:3], labels[:3], loc="upper center", ncols=3, title=title)
    return figure


def needle_mass(run: Run, masses: dict[int, Tensor], heads: list[Head]) -> Figure:
    """Mass on the needle by length, for some heads; masses[length] (prompts, 3, L, H)."""
    figure, axes = panels(1, len(heads), 4.2, 3.6, sharey=True)
    for (layer, h), axis in zip(heads, axes[0], strict=True):
        curves, colors = {}, []
        for i, (name, line) in enumerate(PARTS.items()):
            values = {n: mass[:, i, layer, h].clamp(min=FLOOR) for n, mass in masses.items()}
            curves[name] = [(n, y.mean(), y.amin(), y.amax()) for n, y in values.items()]
            colors.append(line["color"])
        axis.set_prop_cycle(color=colors)
        runs.draw_curves(axis, curves, run.trained)
        axis.set(yscale="log", xlabel="length of the prompt (tokens)", title=f"head {layer}.{h}")
    axes[0, 0].set_ylabel("mass on the needle")
    axes[0, 0].legend(fontsize=8, loc="lower left")
    about = f"n = {len(next(iter(masses.values())))} prompts a point; bars: lowest to highest"
    figure.suptitle(f"{runs.name_of(run.path)}: {about}; grey: training length", fontsize=9)
    return figure


# Command line -------------------------------------------------------------------------------------


def find_heads(names: tuple[str, ...], model: GPT) -> list[Head]:
    known = [f"{layer}.{h}" for layer, h in np.ndindex(model.cfg.n_layer, model.cfg.n_head)]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no head {unknown[0]}; give layer.head, from 0.0 to {known[-1]}")
    return [divmod(known.index(name), model.cfg.n_head) for name in dict.fromkeys(names)]


def draw_prompt(run: Run, view: View, heads: list[Head], folder: Path) -> None:
    T = len(view.needle)
    places = torch.linspace(0, T - 1, min(T, Z_QUERIES)).round().long()
    log_z = list(look(run.model, view.idx, places, lambda _, log_z: log_z))  # (H, R) by layer
    last = torch.arange(T)[-LAST_QUERIES:]
    parts: dict[Head, Tensor] = dict.fromkeys(heads)  # (R, 3, T) each
    for layer, by_head in enumerate(look(run.model, view.idx, last, lambda parts, _: parts)):
        parts |= {head: by_head[head[1]] for head in heads if head[0] == layer}
    title = f"{runs.name_of(run.path)}, n = 1 prompt of {T:,} tokens"
    title += f", the largest probability in each of {BINS} groups of keys" * (T > BINS)
    for name, figure in (
        ("prompt_curves", prompt_curves(run, view, parts, log_z)),
        ("prompt_maps", prompt_maps(run, view, parts)),
    ):
        figure.suptitle(title)
        save(figure, folder, f"{name}.png")
    save(prompt_log_z(run, view, places, log_z), folder, "prompt_log_z.png")


def draw_run(run: Run, views: dict[int, list[View]], heads: list[Head], cfg: PlotConfig) -> None:
    """A model's pictures, table and record."""
    model, folder, rows = run.model, runs.folder_of(run.path), tabulate_heads(run.model)
    save(learned_priors(model), folder, "learned_priors.png")
    if {"theta_alpha", "theta_beta"} <= set(rows[0]):
        save(learned_heads(rows, model.cfg.n_layer), folder, "learned_heads.png")
    if figure := learned_training(runs.read_records(folder.parent / "log.jsonl")):
        save(figure, folder, "learned_training.png")

    masses: dict[int, Tensor] = {}  # (prompts, 3, L, H) by length
    total, name = sum(len(views[n]) * runs.cost(n) for n in views), runs.name_of(run.path)
    with tqdm(total=total, desc=name, bar_format=runs.BAR, disable=None) as bar:
        for length in views:
            masses[length] = torch.stack([weigh_needle(model, view) for view in views[length]])
            bar.update(len(views[length]) * runs.cost(length))
    longest = max(masses)
    n, heads = len(views[longest]), heads or rank_heads(masses[longest])[:3]
    draw_prompt(run, views[longest][n // 2], heads, folder)
    if len(masses) > 1:
        save(needle_mass(run, masses, heads), folder, "needle_mass.png")

    for row in rows:
        layer, h = map(int, row["head"].split("."))
        row["needle"] = {length: mass[:, 2, layer, h].tolist() for length, mass in masses.items()}
    record = {"metric": "priors", "n": n, "heads": rows, "config": asdict(cfg)}
    runs.append_record(folder / "priors.jsonl", record | runs.origin(run))
    print(format_heads([row | {"needle": np.mean(row["needle"][longest])} for row in rows]))
    print("width: the distance in tokens that holds 90% of the prior of 512 or 8,192 keys in view")
    print(f"needle: the posterior's mass on it, mean over n = {n} prompts of {longest:,} tokens")


def main() -> None:
    (cfg,), paths = configurator.parse([PlotConfig], sys.argv[1:], __doc__, positional="runs")
    with user_errors():  # before the first picture
        configurator.check_folder(THEORY)
        loaded = runs.load_runs(paths, runs.EvalConfig(device=cfg.device))
        plans = [(run, make_views(run, cfg), find_heads(cfg.heads, run.model)) for run in loaded]
    if not paths:
        for draw in (theory_priors, theory_ssmax, theory_fading):
            save(draw(), THEORY, f"{draw.__name__}.png")
    for run, views, heads in plans:
        run.model.to(pick_device(cfg.device)[0])
        draw_run(run, views, heads, cfg)


if __name__ == "__main__":
    configurator.run(main)

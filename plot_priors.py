"""Positional encodings, looked at: priors over distance, what heads have learned, content x prior = posterior.

python plot_priors.py                     # the theory, into out/theory, and the model that comes with the program
python plot_priors.py out/ggd_bam_cpu     # what a model has learned, into out/ggd_bam_cpu/eval
python plot_priors.py out/ggd_bam_cpu --prompt=my.txt --needle="words of it to look for"
python plot_priors.py --readme            # the README's tables and front-page pictures, from the records in results/

The prior is always the one that is added to the scores (s ln n b for GGD with SSMax), and a head is classed by what
this prior does: a negative s turns it round. Saves pictures, prints a table of the heads, appends a record.
"""

import configurator
from configurator import user_errors

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from data import encode_document, read_text, replacing
from device import pick_device
from eval_passkey import PasskeyConfig
from model import GPT, CausalSelfAttention, ModelConfig, Posterior
from needles import WORDINGS, make_prompts
from runs import (
    BAR,
    PRETRAINED,
    STYLES,
    Run,
    aligned,
    append_record,
    cost,
    distinct,
    folder_of,
    load_run,
    name_of,
    origin,
    read_records,
)
from streaming import KVCache, prefill

# ---- posteriors

Head = tuple[int, int]  # layer and head, from 0
PARTS = {  # of a row; content is broad, so that it shows under a posterior that equals it
    "prior": {"linestyle": ":", "color": "#d55e00", "linewidth": 2, "marker": "s", "markersize": 5},
    "content": {
        "linestyle": "-",
        "color": "#56b4e9",
        "linewidth": 4,
        "marker": "o",
        "markersize": 9,
    },
    "posterior": {
        "linestyle": "-",
        "color": "black",
        "linewidth": 1,
        "marker": "D",
        "markersize": 4,
    },
}
BINS = 256  # runs of keys, in pictures of a whole context
LAST_QUERIES = 16  # rows of a heat map
Z_QUERIES = 256  # places along the prompt where ln Z is shown
FLOOR = 1e-6  # smallest probability drawn
SCORES_AT_ONCE = 2**22  # float64: 32 MiB


# Prompts -------------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """A prompt to look at."""

    idx: Tensor  # (1, T): what the model reads, all but the last token of the answer
    answers: int  # how many of the last positions predict a token of the answer
    needle: Tensor  # (T,) bool: the tokens of the needle


def marks(enc: tiktoken.Encoding, tokens: list[int], words: str) -> Tensor:
    """(T,) bool: the tokens that hold a part of these words, wherever they stand. Raises ValueError if nowhere."""
    pieces, wanted = [enc.decode_single_token_bytes(token) for token in tokens], words.encode()
    text, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
    found, at = torch.zeros(len(tokens), dtype=torch.bool), text.find(wanted)
    if at < 0:
        raise ValueError(
            f"needle {words!r} is not in the prompt; give words of it as they are written there"
        )
    while at >= 0:
        after = at + len(wanted)
        found[np.searchsorted(ends, at, "right") : np.searchsorted(ends, after) + 1] = True
        at = text.find(wanted, after)
    return found


def prompt_views(run: Run, file: str, needle: str) -> dict[int, list[View]]:
    """The user's own text, by its length. Raises ValueError or OSError for a file or a needle that cannot be used."""
    text = read_text(file).rstrip("\n")  # an editor's last line break is no part of it
    tokens = encode_document(run.enc, text)
    return {len(tokens): [View(torch.tensor([tokens]), 1, marks(run.enc, tokens, needle))]}


def passkey_views(run: Run, ask: PasskeyConfig) -> dict[int, list[View]]:
    """The prompts of eval_passkey.py by length, shortest first. Raises ValueError for a length that is too short."""
    default = [n for n in (2**k for k in range(8, 13)) if n >= run.trained] + [
        max(8192, run.trained)
    ]
    views: dict[int, list[View]] = {}
    for length in sorted(set(ask.lengths)) or default:
        views[length] = []
        for prompt in make_prompts(run.enc, length, ask.depths, ask.seeds):
            tokens, key = (
                prompt.tokens[:-1],
                run.enc.decode(prompt.tokens[-prompt.answer :]).strip(),
            )
            needle = marks(run.enc, tokens, WORDINGS["passkey"].needle.format(key=key))
            views[length].append(View(torch.tensor([tokens]), prompt.answer, needle))
    return views


# Rows of the posterior -----------------------------------------------------------------------------------------------


def attention_inputs(model: GPT, idx: Tensor) -> list[Tensor]:
    """What the attention of every layer reads, (1, T, C) each, overheard while idx (1, T) streams through the model."""
    heard: list[list[Tensor]] = [[] for _ in model.blocks]
    hooks = [
        block.norm_attn.register_forward_hook(
            lambda _module, _args, x, pieces=pieces: pieces.append(x)
        )
        for block, pieces in zip(model.blocks, heard, strict=True)
    ]
    try:
        prefill(model, idx, KVCache(model, *idx.shape))
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(pieces, dim=1) for pieces in heard]


@torch.no_grad()
def look(
    model: GPT, idx: Tensor, rows: Tensor, keep: Callable[[Posterior], Tensor]
) -> Iterator[Tensor]:
    """For each layer what keep (H, R, T) -> (H, R, ...) takes of these rows; a block of rows at a time."""
    device, T = model.embedding.weight.device, idx.shape[1]
    layout = model.layout(torch.arange(T, device=device)[None])
    parts = rows.to(device).split(max(1, SCORES_AT_ONCE // (model.cfg.n_head * T)))
    for block, x in zip(model.blocks, attention_inputs(model, idx.to(device)), strict=True):
        q, k, _ = block.attn.project(x, layout)
        q, k = q.double(), k.double()  # exact enough to show posterior = prior x content x Z
        found = (block.attn.posterior(q, k, layout, part) for part in parts)
        yield torch.cat([keep(Posterior(*(t[0] for t in p))).cpu() for p in found], dim=1)


def needle_mass(model: GPT, view: View) -> Tensor:
    """(3, L, H): the mass of prior, content and posterior on the needle, mean over the answer positions."""
    needle = view.needle.to(model.embedding.weight.device)
    rows = torch.arange(len(needle) - view.answers, len(needle))

    def on_needle(p: Posterior) -> Tensor:
        return torch.stack([part[..., needle].sum(-1) for part in p[:3]], dim=-1)  # (H, R, 3)

    return torch.stack([mass.mean(1) for mass in look(model, view.idx, rows, on_needle)]).permute(
        2, 0, 1
    )


def needle_masses(run: Run, views: dict[int, list[View]]) -> dict[int, Tensor]:
    """The same by length: (prompts, 3, L, H) each."""
    masses: dict[int, Tensor] = {}
    work = sum(len(some) * cost(n) for n, some in views.items())
    with tqdm(total=work, desc=name_of(run.path), bar_format=BAR, disable=None) as bar:
        for n, some in views.items():
            masses[n] = torch.stack([needle_mass(run.model, view) for view in some])
            bar.update(len(some) * cost(n))
    return masses


def most_retrieving(masses: Tensor, show: int) -> list[Head]:
    """The heads whose posterior has the most mass on the needle; masses (prompts, 3, L, H)."""
    posterior = masses[:, 2].mean(0)
    order = posterior.flatten().argsort(descending=True, stable=True)[:show]
    return [divmod(i, posterior.shape[1]) for i in order.tolist()]


# Pictures ------------------------------------------------------------------------------------------------------------


def has_prior(model: GPT) -> bool:
    return model.blocks[0].attn.prior is not None


def panels(
    rows: int, columns: int, width: float, height: float, **sharing
) -> tuple[Figure, np.ndarray]:
    """A grid of panels of this size in inches. A bare Figure needs no display and leaves no state behind."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def save(figure: Figure, folder: Path, name: str) -> None:
    with user_errors():
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / name) as file:
        figure.savefig(file, format="png", dpi=150)
    print(f"saved {folder / name}", flush=True)


def head_grid(model: GPT, xlabel: str, ylabel: str) -> tuple[Figure, np.ndarray]:
    """A panel a head, a row a layer. The margins, in inches, are fixed: to lay out 192 panels takes a minute."""
    layers, heads = model.cfg.n_layer, model.cfg.n_head
    width, height = 1.8 * heads + 1, 1.5 * layers + 1.4
    margins = {
        "left": 0.9 / width,
        "right": 1 - 0.1 / width,
        "bottom": 0.6 / height,
        "top": 1 - 0.8 / height,
    }
    grid = margins | {"wspace": 0.08, "hspace": 0.3}
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True, gridspec_kw=grid)
    for (layer, h), axis in np.ndenumerate(axes):
        axis.set_title(f"head {layer}.{h}", fontsize=8, pad=2)
    figure.supxlabel(xlabel, y=0.1 / height)
    figure.supylabel(ylabel, x=0.1 / width)
    return figure, axes


def spans(needle: Tensor) -> np.ndarray:
    """(n, 2): where each run of marked tokens begins and ends."""
    return np.flatnonzero(np.diff(np.pad(needle.numpy().astype(int), 1))).reshape(-1, 2)


def marked(axis: Axes, view: View) -> None:
    """An arrow above every place of the needle."""
    place = {
        "xycoords": axis.get_xaxis_transform(),
        "textcoords": "offset points",
        "annotation_clip": False,
    }
    for begin, end in spans(view.needle):
        axis.annotate(
            "", ((begin + end) / 2, 1.0), (0, 12), arrowprops={"arrowstyle": "-|>"}, **place
        )


def binned(p: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(..., T) -> the edges of at most BINS runs of keys, and the largest value in each run."""
    edges = np.unique(np.linspace(0, p.shape[-1], BINS + 1).astype(int))
    return edges, np.maximum.reduceat(p.numpy(), edges[:-1], axis=-1).clip(min=FLOOR)


def labels_of(enc: tiktoken.Encoding, tokens: Tensor) -> list[str]:
    """Tokens as axis labels, in characters that the font has, with visible spaces."""
    texts = [
        enc.decode_single_token_bytes(token).decode("utf-8", "replace") for token in tokens.tolist()
    ]
    return [ascii(text)[1:-1].replace(" ", "\u2423") for text in texts]


def parts_of(model: GPT) -> list[tuple[int, str, dict[str, Any]]]:
    """Index, name and style of what there is to draw: without a prior, content and posterior."""
    return [
        (i, name, dots) for i, (name, dots) in enumerate(PARTS.items()) if i or has_prior(model)
    ]


def prompt_title(run: Run, T: int, what: str) -> str:
    runs = f", the largest in each of {BINS} runs of keys" if T > BINS else ""
    return f"{name_of(run.path)}: attention of the {what} of {T:,} positions{runs} (n = 1 prompt)"


def prompt_curves(run: Run, view: View, parts: dict[Head, Tensor], log_z: list[Tensor]) -> Figure:
    """The last row of some heads, over the whole context and token by token at the needle; parts[head] (R, 3, T)."""
    figure, axes = panels(len(parts), 2, 8, 2.8, sharey=True)
    T, (begin, end) = len(view.needle), spans(view.needle)[0]
    near = np.arange(max(0, begin - 10), min(T, end + 10, begin + 70))
    for ((layer, h), p), (whole, zoom) in zip(parts.items(), axes, strict=True):
        edges, highest = binned(p[-1])
        for i, name, dots in parts_of(run.model):
            line = {key: dots[key] for key in ("linestyle", "color", "linewidth")}
            mass = p[-1, i, view.needle].sum()
            whole.stairs(
                highest[i], edges, baseline=None, label=f"{name}:\n{mass:.2g} on the needle", **line
            )
            zoom.plot(near, p[-1, i, near].clamp(min=FLOOR), **line)
        marked(whole, view)
        whole.set(
            yscale="log",
            ylim=(FLOOR, 2),
            ylabel="probability",
            xlabel="position of the key (tokens)",
        )
        title = f"head {layer}.{h}: ln Z = {log_z[layer][h, -1]:.2f} nats, ln n = {math.log(T):.2f}"
        whole.set_title(title, fontsize=9, pad=15)
        zoom.legend(
            *whole.get_legend_handles_labels(),
            fontsize=8,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
        zoom.axvspan(begin - 0.5, min(end, near[-1] + 1) - 0.5, color="0.9")
        zoom.set_xticks(near, labels_of(run.enc, view.idx[0, near]), fontsize=6, parse_math=False)
        zoom.tick_params(axis="x", rotation=0 if run.saved["tokenizer"] == "bytes" else 90)
        zoom.set(xlabel="the prompt, token by token; the needle in grey")
    figure.suptitle(prompt_title(run, T, "last"))
    return figure


def prompt_maps(run: Run, view: View, parts: dict[Head, Tensor]) -> Figure:
    """The last rows of some heads: where the question and the answer look; parts[head] (R, 3, T)."""
    drawn = parts_of(run.model)
    figure, axes = panels(len(parts), len(drawn), 5, 3, sharex=True, sharey=True)
    T, rows = len(view.needle), len(next(iter(parts.values())))
    for ((layer, h), p), line in zip(parts.items(), axes, strict=True):
        edges, highest = binned(p)
        for (i, name, _), axis in zip(drawn, line, strict=True):
            image = highest[:, i]
            shown = axis.pcolormesh(
                edges, np.arange(rows + 1), image, norm=LogNorm(1e-5, 1), cmap="cividis"
            )
            marked(axis, view)
            axis.set_title(f"head {layer}.{h}: {name}", fontsize=9, pad=15)
            axis.tick_params(axis="y", labelsize=7)
    axes[0, 0].set_yticks(
        np.arange(rows) + 0.5, labels_of(run.enc, view.idx[0, -rows:]), parse_math=False
    )
    axes[0, 0].invert_yaxis()
    figure.supxlabel("position of the key (tokens); the arrow points at the needle")
    figure.supylabel(f"token at the query (answer: the last {view.answers})")
    figure.colorbar(shown, ax=axes, label="probability", extend="min")
    figure.suptitle(prompt_title(run, T, f"last {rows}"))
    return figure


def prompt_log_z(run: Run, view: View, places: Tensor, log_z: list[Tensor]) -> Figure:
    """ln Z of every head along the prompt, against ln n; log_z[layer] (H, R)."""
    figure, axes = head_grid(run.model, "position of the query (tokens)", "coupling, ln Z (nats)")
    for (layer, h), axis in np.ndenumerate(axes):
        axis.plot(places, log_z[layer][h], "k.", markersize=2, label="ln Z")
        axis.plot(
            places,
            (places + 1).log(),
            color="#d55e00",
            linestyle="--",
            label="ln n, n keys in view",
        )
        for begin, end in spans(view.needle):
            axis.axvline((begin + end) / 2, color="0.6", linewidth=1, zorder=0, label="needle")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles[:3],
        labels[:3],
        loc="upper center",
        ncols=3,
        title=f"{name_of(run.path)}, n = 1 prompt",
    )
    return figure


def needle_by_length(run: Run, masses: dict[int, Tensor], heads: list[Head]) -> Figure:
    """Mass on the needle by length, for some heads; masses[length] (prompts, 3, L, H)."""
    figure, axes = panels(1, len(heads), 4.2, 3.6, sharey=True)
    for (layer, h), axis in zip(heads, axes[0], strict=True):
        for i, name, dots in parts_of(run.model):
            y = torch.stack([mass[:, i, layer, h] for mass in masses.values()]).clamp(
                min=FLOOR
            )  # (lengths, prompts)
            bars = torch.stack((y.mean(1) - y.amin(1), y.amax(1) - y.mean(1)))
            axis.errorbar(list(masses), y.mean(1), bars, capsize=5, label=name, **dots)
        axis.axvline(run.trained, color="0.6", linewidth=1, zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="length of the prompt (tokens)")
        axis.set_xticks(list(masses), [f"{n:,}" for n in masses], rotation=30)
        axis.minorticks_off()
        axis.set_title(f"head {layer}.{h}", fontsize=10)
    axes[0, 0].set_ylabel("mass on the needle")
    axes[0, 0].legend(fontsize=8, loc="lower left")
    about = f"n = {len(next(iter(masses.values())))} prompts a point; bars: lowest to highest; grey: training length"
    figure.suptitle(f"{name_of(run.path)}: {about}", fontsize=9)
    return figure


def draw_prompt(run: Run, view: View, heads: list[Head], folder: Path) -> None:
    T = len(view.needle)
    places, last = (
        torch.linspace(0, T - 1, min(T, Z_QUERIES)).round().long(),
        torch.arange(max(0, T - LAST_QUERIES), T),
    )
    log_z = list(look(run.model, view.idx, places, lambda p: p.log_z))
    parts: dict[Head, Tensor] = dict.fromkeys(heads)
    for layer, rows in enumerate(
        look(run.model, view.idx, last, lambda p: torch.stack(p[:3], dim=-2))
    ):
        parts |= {head: rows[head[1]] for head in heads if head[0] == layer}
    save(prompt_curves(run, view, parts, log_z), folder, "prompt_curves.png")
    save(prompt_maps(run, view, parts), folder, "prompt_maps.png")
    if has_prior(run.model):
        save(prompt_log_z(run, view, places, log_z), folder, "prompt_log_z.png")


# ---- plot_priors

BETAS = (2.0, 1.0, 0.5, 0.0, -0.3, -1.0)
WIDTHS = (512, 8192)  # keys in view, for the effective widths and the grid of priors
LINES = ("-", "--", "-.", ":", (0, (8, 3)), (0, (5, 2, 1, 2, 1, 2)))


@dataclass
class PlotConfig:
    """What to draw. Raises ValueError, in one sentence, if it makes no sense."""

    lengths: tuple[
        int, ...
    ] = ()  # tokens of the passkey prompts; the longest is drawn; none given: 8192 and its
    # halves down to the training length
    depths: int = 5  # prompts per length, the needle at equidistant depths; the middle one is drawn
    seed: int = 1  # draws the keys
    prompt: str = ""  # a text file to look at instead; what follows its last token is the answer
    needle: str = ""  # with prompt: the words of it to mark
    heads: tuple[
        str, ...
    ] = ()  # layer.head to draw, counted from 0, such as 2.3; none given: the most retrieving
    show: int = 3  # how many heads are drawn if none is named
    readme: bool = False  # write the README's tables and pictures, and nothing else
    theory_dir: str = (
        "out/theory"  # folder for the theory; the pictures of a run go into its own folder, eval
    )
    device: str = "auto"  # auto, cpu, cuda, ...

    def __post_init__(self):
        self.passkey()  # refuses lengths, depths and seeds that make no sense
        if self.show < 1:
            raise ValueError(f"show is {self.show}; it must be at least 1")
        if bool(self.prompt) != bool(self.needle):
            raise ValueError(
                "prompt and needle go together: give a text file, and words of it to mark"
            )

    def passkey(self) -> PasskeyConfig:
        return PasskeyConfig(lengths=self.lengths, depths=self.depths, seeds=(self.seed,))


# Priors --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def acting_prior(attn: CausalSelfAttention, n: int) -> Tensor:
    """What is added to the scores of a query that sees n keys: (H, n) nats by distance, float64; 0 without a prior."""
    prior = attn.log_prior(n)
    if prior is None:
        return torch.zeros(attn.cfg.n_head, n, dtype=torch.float64)
    return prior.double().cpu() * attn.ssmax(torch.tensor(math.log(n), dtype=torch.float64))[1]


def effective_width(prior: Tensor) -> int:
    """The distance, in tokens, within which 90% of the normalised prior lies; prior (n,) nats."""
    return int((prior.softmax(-1).cumsum(-1) < 0.9).sum())


def class_of(prior: Tensor, theta_beta: float) -> str:
    """The class of a head by what its acting prior (n,) does, with the paper's border at theta_beta = -0.6.

    A prior that falls from its centre, the own token or the one that mu names, is local; the uniform one counts as
    retrieval, as theta_beta = 0 does in the paper. s < 0, which shows in a positive sum, turns theta_beta < 0 into
    local, and theta_beta > 0 into a prior that rises up to the beginning of the text: farthest."""
    if prior.min() == prior.max():
        return "retrieval"
    if (theta_beta > 0) == (prior.sum() < 0).item():
        return "local"
    return "farthest" if theta_beta > 0 else "aggressive" if theta_beta < -0.6 else "retrieval"


def heads_table(model: GPT) -> list[dict[str, Any]]:
    """One row a head. alpha, in tokens, is None where beta = 0 has none, or where it is beyond any float."""
    values, rows = model.prior_values(), []
    for layer, block in enumerate(model.blocks):
        priors = {n: acting_prior(block.attn, n) for n in WIDTHS}
        for h in range(model.cfg.n_head):
            row = {"head": f"{layer}.{h}"} | {name: values[name][layer][h] for name in values}
            if model.cfg.pe == "alibi":
                row["alpha"] = 1 / block.attn.prior.slopes[h].item()
            elif model.cfg.pe == "ggd":
                exponent = -row["theta_alpha"] / (row["theta_beta"] or math.nan)
                row["alpha"] = math.exp(exponent) if abs(exponent) < 700 else None
            beta = row.get("theta_beta", 1.0)
            row["class"] = class_of(priors[WIDTHS[0]][h], beta) if has_prior(model) else "uniform"
            rows.append(
                row | {f"width_{n}": effective_width(prior[h]) for n, prior in priors.items()}
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text; theta_mu only where it is not 0."""
    names = [name for name in rows[0] if name != "theta_mu" or any(row[name] for row in rows)]
    cells = [
        [f"{x:.4g}" if isinstance(x := row[name], float) else str(x) for name in names]
        for row in rows
    ]
    return aligned([names, *cells]).replace("None", "   -")


# Pictures of priors --------------------------------------------------------------------------------------------------


def style(i: int, n: int, dots: int = 0) -> dict[str, Any]:
    """Curve i of n, told apart in grey too; a marker every `dots` points. The brightest yellow would fade on paper."""
    marker = (
        {"marker": STYLES[i % len(STYLES)][0], "markevery": dots, "markersize": 4} if dots else {}
    )
    return {
        "color": colormaps["cividis"](0.85 * i / max(1, n - 1)),
        "linestyle": LINES[i % len(LINES)],
    } | marker


def spaced(n: int) -> np.ndarray:
    """Distances 0 ... n - 1, dense enough for a curve on a linear and on a logarithmic axis."""
    return np.unique(
        np.concatenate(([0], np.geomspace(1, n - 1, 300), np.linspace(0, n - 1, 300))).astype(int)
    )


def distance_axis(axis: Axes, n: int, log: bool) -> None:
    if log:
        axis.set_xscale(
            "symlog", linthresh=1, linscale=0.3
        )  # logarithmic from 1 token on, with room for 0
    axis.set(xlim=(0, n - 1), xlabel="distance (tokens)")


def layer_of(pe: str, heads: int, ssmax: bool = False, **thetas) -> CausalSelfAttention:
    """An attention layer with these priors and s = 1, as a model has it."""
    return CausalSelfAttention(
        ModelConfig(pe=pe, n_head=heads, n_embd=2 * heads, ssmax=ssmax, **thetas)
    )


def ggd_priors(alpha: float, n: int, ssmax: bool = False) -> Tensor:
    """(BETAS, n): the acting priors at the scale alpha (tokens), the distance at which b = -1."""
    thetas = tuple(-beta * math.log(alpha) for beta in BETAS)
    return acting_prior(layer_of("ggd", len(BETAS), ssmax, theta_alpha=thetas, theta_beta=BETAS), n)


def theory_priors(n: int = 512) -> Figure:
    """Log-prior and normalised prior by distance, for every beta at three alphas; ALiBi and NoPE as points on top."""
    figure, axes = panels(4, 3, 4.6, 3.3)
    x = spaced(n)
    points = x[np.searchsorted(x, np.geomspace(1, n - 1, 12).astype(int))]
    alibi = acting_prior(layer_of("alibi", 8), n)
    nope = acting_prior(layer_of("nope", 1), n)[0]
    for alpha, column in zip((2, 16, 128), axes.T, strict=True):
        slope = alibi[int(math.log2(alpha)) - 1]  # of eight heads, the one whose slope is 1 / alpha
        for row, axis in enumerate(column):
            shape = (lambda b: b.softmax(-1)) if row > 1 else (lambda b: b - b.max())
            for i, (beta, b) in enumerate(zip(BETAS, ggd_priors(alpha, n), strict=True)):
                axis.plot(x, shape(b)[x], label=f"$\\beta$ = {beta:g}", **style(i, len(BETAS)))
            axis.plot(
                points,
                shape(slope)[points],
                "k^",
                fillstyle="none",
                label="ALiBi, slope 1/$\\alpha$",
            )
            axis.plot(points, shape(nope)[points], "ko", fillstyle="none", label="NoPE")
            distance_axis(axis, n, log=row % 2 == 1)
            axis.set_title(f"$\\alpha$ = {alpha} tokens", fontsize=10)
            axis.set(ylim=(-10, 0.5), ylabel="log-prior below its maximum (nats)")
            if row > 1:
                axis.set(yscale="log", ylim=(1e-5, 1.2), ylabel="prior p(distance)")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside right upper", handlelength=3.5
    )
    figure.suptitle(
        f"Generalized Gaussian priors over the {n} keys that a query sees, without SSMax"
    )
    return figure


def theory_ssmax(alpha: float = 16) -> Figure:
    """Where the prior's mass lies at three lengths, with SSMax and without."""
    figure, axes = panels(2, 3, 4.6, 3.3)
    lengths = (512, 8192, 524_288)
    for ssmax, name, line in ((False, "plain", "--"), (True, "SSMax, s = 1", "-")):
        for i, n in enumerate(lengths):
            mass = ggd_priors(alpha, n, ssmax).softmax(-1).cumsum(-1)
            x = np.unique(np.geomspace(1, n, 300).astype(int)) - 1
            for h, axis in enumerate(axes.flat):
                axis.plot(
                    x,
                    mass[h, x],
                    label=f"n = {n:,}, {name}",
                    **style(i, 3, dots=25) | {"linestyle": line},
                )
    for beta, axis in zip(BETAS, axes.flat, strict=True):
        distance_axis(axis, lengths[-1], log=True)
        axis.set(
            ylim=(-0.03, 1.03),
            ylabel="prior mass within the distance",
            title=f"$\\beta$ = {beta:g}",
        )
    axes[0, 0].legend(fontsize=7, loc="lower right", handlelength=4)
    figure.suptitle(f"SSMax multiplies the log-prior by s ln n ($\\alpha$ = {alpha:g} tokens)")
    return figure


def theory_fading() -> Figure:
    """The weight of one key whose score is g nats above n - 1 equal ones: a softmax of two, as a sigmoid."""
    figure, axes = panels(1, 1, 8, 4)
    n = torch.logspace(math.log10(2), 6, 200, dtype=torch.float64).round().unique()
    for name, line, scale in (("plain", "--", 1.0), ("SSMax, s = 1", "-", n.log())):
        for i, g in enumerate((0.5, 1.0, 2.0, 4.0)):
            weight = (scale * g - (n - 1).log()).sigmoid()
            axes[0, 0].plot(
                n, weight, label=f"g = {g:g}, {name}", **style(i, 4, dots=25) | {"linestyle": line}
            )
    axes[0, 0].set(
        xscale="log",
        xlabel="keys in view, n (tokens)",
        ylabel="weight of the key",
        ylim=(-0.03, 1.03),
    )
    axes[0, 0].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=4)
    figure.suptitle(
        "A key g nats above all others: attention fades with n; with SSMax only where g < 1/s",
        fontsize=10,
    )
    return figure


def learned_heads(rows: list[dict[str, Any]], n_layer: int) -> Figure:
    """theta_alpha over theta_beta, one dot a head (the paper's Figure 6), and how many heads do what."""
    figure, axes = panels(1, 1, 8, 5)
    axis = axes[0, 0]
    for layer in range(n_layer):
        dot = style(layer, n_layer, dots=1) | {"linestyle": "", "markersize": 8}
        axis.plot([], [], label=f"layer {layer}", **dot)
        for row in rows:
            if row["head"].startswith(f"{layer}."):
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
    turned = f"; hollow: s < 0, turned round; farthest: {count['farthest']}" * any(
        row.get("s", 1) < 0 for row in rows
    )
    axis.set_title(f"n = {len(rows)} heads, counted by what they do{turned}", fontsize=10)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def learned_priors(model: GPT) -> Figure:
    """Every head's acting prior in nats above the uniform one, at two lengths."""
    figure, axes = head_grid(model, "distance (tokens)", "log-prior above uniform (nats)")
    for layer, block in enumerate(model.blocks):
        for n, line in zip(WIDTHS, ("--", "-"), strict=True):
            above, x = acting_prior(block.attn, n).log_softmax(-1) + math.log(n), spaced(n)
            for h, axis in enumerate(axes[layer]):
                axis.plot(
                    x,
                    above[h, x].clamp(min=-30),
                    f"k{line}",
                    linewidth=1,
                    label=f"n = {n:,} keys in view",
                )
    distance_axis(axes[0, 0], WIDTHS[-1], log=True)
    axes[0, 0].set(
        ylim=(-9.5, 9.5), xlabel="", xticks=(0, 10, 1000), xticklabels=("0", "10", "1,000")
    )
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncols=2)
    return figure


def learned_training(log: list[dict[str, Any]]) -> Figure | None:
    """theta and s of every head over the training steps; None if the log has none. theta_mu only where it is not 0."""
    names = [
        name for name in ("theta_alpha", "theta_beta", "theta_mu", "s") if log and name in log[0]
    ]
    curves = {
        name: np.array([record[name] for record in log]) for name in names
    }  # (records, layers, heads)
    curves = {name: values for name, values in curves.items() if name != "theta_mu" or values.any()}
    if not curves:
        return None
    figure, axes = panels(1, len(curves), 4.5, 3.6)
    for axis, (name, values) in zip(axes[0], curves.items(), strict=True):
        for layer in range(values.shape[1]):
            lines = axis.plot(
                [r["step"] for r in log], values[:, layer], **style(layer, values.shape[1])
            )
            lines[0].set_label(f"layer {layer}")
        axis.set(xlabel="training step", ylabel=f"{name} (no unit), a line a head")
    axes[0, -1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=3.5)
    return figure


# A run ---------------------------------------------------------------------------------------------------------------


def named_heads(cfg: PlotConfig, model: GPT) -> list[Head]:
    """The heads that the user names. Raises ValueError for one that is not there."""
    there = {
        f"{layer}.{h}": (layer, h)
        for layer in range(model.cfg.n_layer)
        for h in range(model.cfg.n_head)
    }
    if unknown := [name for name in cfg.heads if name not in there]:
        raise ValueError(f"no head {unknown[0]}; give layer.head, from 0.0 to {list(there)[-1]}")
    return [there[name] for name in dict.fromkeys(cfg.heads)]


def load(
    path: str, cfg: PlotConfig, device: torch.device
) -> tuple[Run, dict[int, list[View]], list[Head]]:
    """A run, its prompts by length, the heads named. Raises ValueError or OSError, in one sentence, if one is amiss."""
    run = load_run(path, device)
    views = (
        prompt_views(run, cfg.prompt, cfg.needle)
        if cfg.prompt
        else passkey_views(run, cfg.passkey())
    )
    return run, views, named_heads(cfg, run.model)


def draw_learned(run: Run, rows: list[dict[str, Any]], folder: Path) -> None:
    """The prior of every head, its two numbers, and theta and s over the training steps, where there are such."""
    if has_prior(run.model):
        save(learned_priors(run.model), folder, "learned_priors.png")
    else:
        print(
            f"{run.path}: {run.model.cfg.pe} adds no prior to the scores, so posterior = content and ln Z = ln n"
        )
    if run.model.cfg.pe == "ggd":
        save(learned_heads(rows, run.model.cfg.n_layer), folder, "learned_heads.png")
    if figure := learned_training(read_records(folder.parent / "log.jsonl")):
        save(figure, folder, "learned_training.png")


def draw_run(path: str, cfg: PlotConfig, device: torch.device) -> None:
    """All pictures of one run, the table, and the record in eval/priors.jsonl."""
    with user_errors():
        run, views, heads = load(path, cfg, device)
    folder, rows = folder_of(path), heads_table(run.model)
    draw_learned(run, rows, folder)
    masses = needle_masses(run, views)
    longest = max(masses)
    heads = heads or most_retrieving(masses[longest], cfg.show)
    draw_prompt(run, views[longest][len(views[longest]) // 2], heads, folder)
    if len(masses) > 1:
        save(needle_by_length(run, masses, heads), folder, "needle_mass.png")
    for row, (layer, h) in zip(
        rows, np.ndindex(run.model.cfg.n_layer, run.model.cfg.n_head), strict=True
    ):
        row["needle"] = {
            n: mass[:, 2, layer, h].tolist() for n, mass in masses.items()
        }  # a number a prompt
    n = len(masses[longest])
    record = {"metric": "priors", "n": n, "heads": rows, "config": asdict(cfg)}
    append_record(folder / "priors.jsonl", record | origin(run))
    print(table([row | {"needle": np.mean(row["needle"][longest])} for row in rows]))
    print(
        "width: the distance in tokens that holds 90% of the prior where 512 or 8,192 keys are in view"
    )
    print(
        f"needle: the mass of the posterior on it, mean over n = {n} prompts of {longest:,} tokens"
    )


def main() -> None:
    (cfg,), runs = configurator.parse([PlotConfig], sys.argv[1:], __doc__, positional="runs")
    with user_errors():
        configurator.check_folder(Path(cfg.theory_dir))
        device, _ = pick_device(cfg.device)
        if cfg.readme:
            import study  # the study's scripts, which nothing else here needs

            return study.write()
        theory, runs = not runs, distinct(runs or [str(PRETRAINED)])
        for path in runs:  # all that cannot work shows before the first picture
            load(path, cfg, torch.device("cpu"))
    if theory:
        for name, draw in (
            ("priors", theory_priors),
            ("ssmax", theory_ssmax),
            ("fading", theory_fading),
        ):
            save(draw(), Path(cfg.theory_dir), f"theory_{name}.png")
    for path in runs:
        draw_run(path, cfg, device)


if __name__ == "__main__":
    configurator.run(main)

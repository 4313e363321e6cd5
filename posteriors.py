"""Content x prior = posterior on a real prompt: what plot_priors.py shows of the rows of attention over a long text.

The last rows of some heads, taken apart; the mass that a head puts on a needle, by length; and ln Z of every head along
the prompt, which is how the content p and the prior q of a row agree over the n keys it sees: Z = 1 / sum_j p_j q_j.

    ln Z >= 0      the sum is at most max_j p_j <= 1; it is 1 only where both put everything on the same key
    ln Z = ln n    where p or q is uniform, because the other one sums to 1

Since p and q have the mean 1/n, sum_j p_j q_j = 1/n + n cov(p, q): ln Z is below ln n exactly where content and prior
agree better than by chance, and grows above it without bound the more content has to fight the prior.
"""

from configurator import user_errors

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from eval_passkey import WORDINGS, PasskeyConfig, cost, make_prompts, texts_for
from model import GPT, CausalSelfAttention, Layout, Posterior, reference_posterior
from records import BAR, Run, name_of
from shards import replacing
from streaming import KVCache, prefill
from tokenizer import encode_document

Head = tuple[int, int]  # layer and head, from 0
PARTS = {  # of a row; content is broad, so that it shows under a posterior that equals it
    "prior": {"linestyle": ":", "color": "#d55e00", "linewidth": 2, "marker": "s", "markersize": 5},
    "content": {"linestyle": "-", "color": "#56b4e9", "linewidth": 4, "marker": "o", "markersize": 9},
    "posterior": {"linestyle": "-", "color": "black", "linewidth": 1, "marker": "D", "markersize": 4},
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
        raise ValueError(f"needle {words!r} is not in the prompt; give words of it as they are written there")
    while at >= 0:
        after = at + len(wanted)
        found[np.searchsorted(ends, at, "right") : np.searchsorted(ends, after) + 1] = True
        at = text.find(wanted, after)
    return found


def prompt_views(run: Run, file: str, needle: str) -> dict[int, list[View]]:
    """The user's own text, by its length. Raises ValueError or OSError for a file or a needle that cannot be used."""
    ask = PasskeyConfig(filler=str(Path(file).resolve()))  # read as a filler is; resolved, it cannot be one's name
    text = texts_for(run, ask).filler.rstrip("\n")  # an editor's last line break is no part of it
    tokens = encode_document(run.enc, text)
    return {len(tokens): [View(torch.tensor([tokens]), 1, marks(run.enc, tokens, needle))]}


def passkey_views(run: Run, ask: PasskeyConfig) -> dict[int, list[View]]:
    """The prompts of eval_passkey.py by length, shortest first. Raises ValueError for a length that is too short."""
    default = [n for n in (2**k for k in range(8, 13)) if n >= run.trained] + [max(8192, run.trained)]
    views: dict[int, list[View]] = {}
    for length in sorted(set(ask.lengths)) or default:
        views[length] = []
        for prompt in make_prompts(run.enc, texts_for(run, ask), ask, length):
            tokens, key = prompt.tokens[:-1], run.enc.decode(prompt.tokens[-prompt.answer :]).strip()
            needle = marks(run.enc, tokens, WORDINGS[ask.wording].needle.format(key=key))
            views[length].append(View(torch.tensor([tokens]), prompt.answer, needle))
    return views


# Rows of the posterior -----------------------------------------------------------------------------------------------


def attention_inputs(model: GPT, idx: Tensor) -> list[Tensor]:
    """What the attention of every layer reads, (1, T, C) each, overheard while idx (1, T) streams through the model."""
    heard: list[list[Tensor]] = [[] for _ in model.blocks]
    hooks = [
        block.norm_attn.register_forward_hook(lambda _module, _args, x, pieces=pieces: pieces.append(x))
        for block, pieces in zip(model.blocks, heard, strict=True)
    ]
    try:
        prefill(model, idx, KVCache(model, *idx.shape))
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(pieces, dim=1) for pieces in heard]


def posterior_rows(attn: CausalSelfAttention, q: Tensor, k: Tensor, layout: Layout, rows: Tensor) -> Posterior:
    """Theorem 1 for the queries at the positions `rows` (R,) of q, k (1, H, T, D): (H, R, T) each, ln Z (H, R).

    The scores that the model computes, in float64: a float32 sum of content and a large log-prior is not exact enough
    to show that posterior = prior x content x Z."""
    T = k.shape[2]
    distance = rows[:, None] - torch.arange(T, device=k.device)  # (R, T)
    mask = torch.zeros_like(distance, dtype=torch.float64).masked_fill_(distance < 0, -math.inf)
    content, prior = q[0][:, rows].double() @ k[0].double().transpose(-2, -1), attn.log_prior(T)
    bias = None if prior is None else prior.double()[:, distance.clamp(min=0)]
    scale = layout.log_n[0][:, rows].double() if attn.prior_has_row_scale else None
    return reference_posterior(content, bias, scale, mask)


@torch.no_grad()
def look(model: GPT, idx: Tensor, rows: Tensor, keep: Callable[[Posterior], Tensor]) -> Iterator[Tensor]:
    """For each layer what keep (H, R, T) -> (H, R, ...) takes of these rows; a block of rows at a time."""
    device, T = model.embedding.weight.device, idx.shape[1]
    layout = model.layout(torch.arange(T, device=device)[None])
    parts = rows.to(device).split(max(1, SCORES_AT_ONCE // (model.cfg.n_head * T)))
    for block, x in zip(model.blocks, attention_inputs(model, idx.to(device)), strict=True):
        q, k, _ = block.attn.project(x, layout)
        yield torch.cat([keep(posterior_rows(block.attn, q, k, layout, part)).cpu() for part in parts], dim=1)


def needle_mass(model: GPT, view: View) -> Tensor:
    """(3, L, H): the mass of prior, content and posterior on the needle, mean over the answer positions."""
    needle = view.needle.to(model.embedding.weight.device)
    rows = torch.arange(len(needle) - view.answers, len(needle))

    def on_needle(p: Posterior) -> Tensor:
        return torch.stack([part[..., needle].sum(-1) for part in p[:3]], dim=-1)  # (H, R, 3)

    return torch.stack([mass.mean(1) for mass in look(model, view.idx, rows, on_needle)]).permute(2, 0, 1)


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
    return model.cfg.pe in ("ggd", "alibi")


def panels(rows: int, columns: int, width: float, height: float, **sharing) -> tuple[Figure, np.ndarray]:
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
    margins = {"left": 0.9 / width, "right": 1 - 0.1 / width, "bottom": 0.6 / height, "top": 1 - 0.8 / height}
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
    place = {"xycoords": axis.get_xaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    for begin, end in spans(view.needle):
        axis.annotate("", ((begin + end) / 2, 1.0), (0, 12), arrowprops={"arrowstyle": "-|>"}, **place)


def binned(p: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(..., T) -> the edges of at most BINS runs of keys, and the largest value in each run."""
    edges = np.unique(np.linspace(0, p.shape[-1], BINS + 1).astype(int))
    return edges, np.maximum.reduceat(p.numpy(), edges[:-1], axis=-1).clip(min=FLOOR)


def labels_of(enc: tiktoken.Encoding, tokens: Tensor) -> list[str]:
    """Tokens as axis labels, in characters that the font has, with visible spaces."""
    texts = [enc.decode_single_token_bytes(token).decode("utf-8", "replace") for token in tokens.tolist()]
    return [ascii(text)[1:-1].replace(" ", "\u2423") for text in texts]


def parts_of(model: GPT) -> list[tuple[int, str, dict[str, Any]]]:
    """Index, name and style of what there is to draw: without a prior, content and posterior."""
    return [(i, name, dots) for i, (name, dots) in enumerate(PARTS.items()) if i or has_prior(model)]


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
            whole.stairs(highest[i], edges, baseline=None, label=f"{name}:\n{mass:.2g} on the needle", **line)
            zoom.plot(near, p[-1, i, near].clamp(min=FLOOR), **line)
        marked(whole, view)
        whole.set(yscale="log", ylim=(FLOOR, 2), ylabel="probability", xlabel="position of the key (tokens)")
        title = f"head {layer}.{h}: ln Z = {log_z[layer][h, -1]:.2f} nats, ln n = {math.log(T):.2f}"
        whole.set_title(title, fontsize=9, pad=15)
        zoom.legend(*whole.get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
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
            shown = axis.pcolormesh(edges, np.arange(rows + 1), image, norm=LogNorm(1e-5, 1), cmap="cividis")
            marked(axis, view)
            axis.set_title(f"head {layer}.{h}: {name}", fontsize=9, pad=15)
            axis.tick_params(axis="y", labelsize=7)
    axes[0, 0].set_yticks(np.arange(rows) + 0.5, labels_of(run.enc, view.idx[0, -rows:]), parse_math=False)
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
        axis.plot(places, (places + 1).log(), color="#d55e00", linestyle="--", label="ln n, n keys in view")
        for begin, end in spans(view.needle):
            axis.axvline((begin + end) / 2, color="0.6", linewidth=1, zorder=0, label="needle")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles[:3], labels[:3], loc="upper center", ncols=3, title=f"{name_of(run.path)}, n = 1 prompt")
    return figure


def needle_by_length(run: Run, masses: dict[int, Tensor], heads: list[Head]) -> Figure:
    """Mass on the needle by length, for some heads; masses[length] (prompts, 3, L, H)."""
    figure, axes = panels(1, len(heads), 4.2, 3.6, sharey=True)
    for (layer, h), axis in zip(heads, axes[0], strict=True):
        for i, name, dots in parts_of(run.model):
            y = torch.stack([mass[:, i, layer, h] for mass in masses.values()]).clamp(min=FLOOR)  # (lengths, prompts)
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
    places, last = torch.linspace(0, T - 1, min(T, Z_QUERIES)).round().long(), torch.arange(max(0, T - LAST_QUERIES), T)
    log_z = list(look(run.model, view.idx, places, lambda p: p.log_z))
    parts: dict[Head, Tensor] = dict.fromkeys(heads)
    for layer, rows in enumerate(look(run.model, view.idx, last, lambda p: torch.stack(p[:3], dim=-2))):
        parts |= {head: rows[head[1]] for head in heads if head[0] == layer}
    save(prompt_curves(run, view, parts, log_z), folder, "prompt_curves.png")
    save(prompt_maps(run, view, parts), folder, "prompt_maps.png")
    if has_prior(run.model):
        save(prompt_log_z(run, view, places, log_z), folder, "prompt_log_z.png")

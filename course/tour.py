# %% [markdown]
# A tour of nanoBAM, in a minute: `python course/tour.py`, or cell by cell in an editor that knows
# `# %%`. It uses the included model, which read 256 bytes at a time when it was trained. The page
# with everything that is shown here is out/tour/index.html.

# %% What is needed
import html
import math
import sys
import time
from pathlib import Path

ROOT = Path(globals().get("__file__", "course/tour.py")).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from matplotlib.figure import Figure

from model import GGDPrior, ModelConfig
from needles import make_prompts
from plot_priors import acting_prior, classify
from runs import PRETRAINED, EvalConfig, load_run
from streaming import KVCache, generate

OUT = Path("out/tour")
OUT.mkdir(parents=True, exist_ok=True)
PAGE = []


def tell(text: str) -> None:
    print(text + "\n")
    PAGE.append(f"<p>{html.escape(text)}</p>")


def show(figure: Figure, name: str) -> None:
    figure.savefig(OUT / f"{name}.png", dpi=110)
    PAGE.append(f'<img src="{name}.png" alt="{name}">')


def answer(run, prompt, cache=None) -> tuple[str, str]:
    """The key that was hidden, and what the model says when it is asked."""
    tokens, n = torch.tensor([prompt.tokens]), prompt.answer
    said = generate(run.model, tokens[:, :-n], n, cache=cache)
    return run.enc.decode(prompt.tokens[-n:]), run.enc.decode(said[0].tolist())


# %% 1. A key in 4,096 bytes, 16 times the training length
run = load_run(str(PRETRAINED))
prompt = make_prompts(run.enc, 4096, depths=5)[2]
text = run.enc.decode(prompt.tokens)
place = text.index("The pass key is")
tell(f"1. 4,096 bytes: ...{text[place - 60 : place + 80]}... and the end: ...{text[-45:-6]}")
hidden, said = answer(run, prompt)
tell(f"The key is{hidden}. The model, which never read more than 256 bytes at once, says{said}.")

# %% 2. Three tokens by hand: a posterior is likelihood times prior
torch.set_printoptions(precision=2, sci_mode=False)
content = torch.tensor([0.6, 0.3, 0.1])  # p(key | what it says): softmax of the content scores
prior = torch.tensor([0.1, 0.2, 0.7])  # p(key | where it is): softmax of the bias
product = content * prior
scores = content.log() + prior.log()  # attention adds a bias to a score ...
posterior = scores.softmax(0)  # ... and softmax multiplies and normalises: Bayes' rule
assert torch.allclose(posterior, product / product.sum())
tell(f"2. Content times prior is {product}, and times Z = {1 / product.sum():.2f}")
tell(f"it is the attention {posterior}.")

# %% 3. One dial: theta_beta from 2 to -1
betas = (2.0, 1.0, 0.5, 0.0, -0.5, -1.0)
shape = {"n_head": len(betas), "n_embd": 2 * len(betas)}
alphas = tuple(-b * math.log(10) for b in betas)  # b = -1 at the distance 10
dial = GGDPrior(ModelConfig(theta_alpha=alphas, theta_beta=betas, **shape))(200)
figure = Figure(figsize=(8, 4), layout="constrained")
axis = figure.add_subplot(xlabel="distance in tokens", ylabel="prior of 200 keys", yscale="log")
for beta, row in zip(betas, dial, strict=True):
    axis.plot(row.softmax(-1).detach().clamp(min=1e-6), label=f"theta_beta = {beta:g}")
axis.set_ylim(1e-6, 1)
figure.legend(loc="outside right center")
show(figure, "dial")
tell("3. theta_beta > 0 looks near (2 Gaussian, 1 ALiBi), 0 anywhere, < 0 anywhere but near.")

# %% 4. The heads that were learned
blocks, n = run.model.blocks, 4096
figure = Figure(figsize=(8, 4), layout="constrained")
axis = figure.add_subplot(xlabel="distance in bytes", ylabel="prior of 4,096 keys", yscale="log")
far = []  # (layer, head, theta_beta) of the heads that are not local
for layer, block in enumerate(blocks):
    betas = run.model.prior_values()["theta_beta"][layer]
    for head, (row, beta) in enumerate(zip(acting_prior(block.attn, n), betas, strict=True)):
        local = classify(row, beta) == "local"
        far += [] if local else [(layer, head, beta)]
        style = {"color": f"C{layer}", "ls": ":" if local else "-"}
        axis.plot(range(1, n + 1), row.softmax(-1).detach().clamp(min=1e-9), **style)
axis.set(xscale="log", ylim=(1e-9, 1), title="a colour a layer; solid: looks far, dotted: local")
show(figure, "heads")
names = ", ".join(f"{layer}.{head} (theta_beta {beta:.2f})" for layer, head, beta in far)
tell(f"4. {len(blocks) * len(betas) - len(far)} of the heads are local. These look far: {names}.")


# %% 5. The row that answers, as content x prior x Z
def last_row(layer: int):
    """Posterior of the query that predicts the key's first digit, in the layer's heads."""
    idx = torch.tensor([prompt.tokens[: 1 - prompt.answer]])  # up to the space before the key
    at = torch.arange(idx.shape[1])[None]
    x, layout = run.model.embed(idx, at), run.model.layout(at)
    for block in blocks[:layer]:
        x = block(x, layout)
    attn = blocks[layer].attn
    q, k, _ = attn.project(blocks[layer].norm_attn(x), layout)
    return attn.posterior(q.float(), k.float(), layout, at[0, -1:])


needle = range(place, place + 16 + len(hidden))
with torch.no_grad():
    mass = {(la, h): last_row(la).posterior[0, h, 0, needle].sum().item() for la, h, _ in far}
layer, head = max(mass, key=mass.get)
with torch.no_grad():
    row = last_row(layer)
figure = Figure(figsize=(8, 5), layout="constrained")
for i, name in enumerate(("content", "prior", "posterior")):
    axis = figure.add_subplot(3, 1, i + 1, ylabel=name, yscale="log")
    axis.plot(getattr(row, name)[0, head, 0].clamp(min=1e-8), lw=0.7)
    axis.axvspan(needle.start, needle.stop, color="C1", alpha=0.4)
axis.set_xlabel(f"byte of the text (coloured: the needle); head {layer}.{head}")
show(figure, "posterior")
log_z, flat = row.log_z[0, head, 0].item(), math.log(row.prior.shape[-1])
tell(f"5. Head {layer}.{head} puts {mass[layer, head]:.0%} of its attention on the needle.")
tell(f"ln Z = {log_z:.2f} nats; if the prior is flat, ln n = {flat:.2f}: the content decides.")

# %% 6. Turn the dial of that head after training
for value in (0.0, 0.1, 0.3):
    change = f"{layer}.{head}.theta_beta={value}"
    turned = load_run(str(PRETRAINED), cfg=EvalConfig(set=(change,)))
    pairs = [answer(turned, p) for p in make_prompts(run.enc, 2048, depths=5)]
    found = sum(hidden == said for hidden, said in pairs)
    tell(f"6. With --set={change} it finds {found} of 5 keys in 2,048 bytes.")

# %% 7. 256,000 bytes, a thousand times the training length
began, length = time.perf_counter(), 256_000
prompt = make_prompts(run.enc, length, depths=5)[2]
cache = KVCache(run.model, 1, length)
hidden, said = answer(run, prompt, cache)
skipped, seconds = cache.skipped().mean().item(), time.perf_counter() - began
tell(f"7. {length:,} bytes: the key is{hidden}, the model says{said}, after {seconds:.0f} seconds.")
tell(f"{skipped:.0%} of the blocks of keys were skipped: the prior proves them too small to count.")

# %% The page
style = "body {max-width: 50em; margin: auto; font-family: sans-serif} img {max-width: 100%}"
page = f"<!doctype html><meta charset=utf-8><title>nanoBAM</title><style>{style}</style>"
(OUT / "index.html").write_text(page + "\n".join(PAGE), encoding="utf-8")
print(f"saved {OUT / 'index.html'}")

"""The numbers of a course: every student has others, drawn from a hash of the name.

The truth is computed when it is needed, by brute force and with the repository's own functions. No
answer is stored.
"""

import hashlib
import math
import random
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch

import eval_passkey
import model as M
import needles
import plot_priors
import runs
import streaming

# as the repository has them, whatever is laid over it later
ANGLES, POSTERIOR, ALIBI, GGD = M.angles, M.reference_posterior, M.AlibiPrior, M.GGDPrior
WILSON, FIND, WIDTH = runs.wilson, eval_passkey.find_answers, plot_priors.effective_width


class Question(NamedTuple):
    key: str  # exercise and letter
    text: str
    truth: Callable[[], float]
    near: float  # how far off an answer may be: this share of the truth
    slack: int  # or this much


def log_z(p: float) -> float:
    content, prior = torch.tensor([[p, 1 - p], [1 - p, p]], dtype=torch.float64).log()
    one, mask = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, 2)
    return POSTERIOR(content[None, None, None], prior[None, None], one, mask.double()).log_z.item()


def first_useless(dtype: torch.dtype) -> float:
    """The least disagreement, to 0.01 nats, whose product of two factors e^-g and 1 is 0."""
    g = torch.arange(1, 80_000, dtype=torch.float64) / 100
    return g[g.neg().exp().to(dtype) == 0][0].item()


def ggd(alpha: float, beta: float, n: int) -> torch.Tensor:
    return GGD(M.ModelConfig(n_head=1, n_embd=2, theta_alpha=(alpha,), theta_beta=(beta,)))(n)[0]


def alibi(n_head: int, n: int) -> torch.Tensor:
    return ALIBI(M.ModelConfig(pe="alibi", n_head=n_head, n_embd=2 * n_head))(n).double()


def share_width(n_head: int, head: int, share: float) -> int:
    return int((alibi(n_head, 200_000)[head].softmax(-1).cumsum(-1) < share).sum())


def reach(power: int, nats: float) -> int:
    """The least w beyond which all keys together stay below 1% when the content favours them."""
    b = -(2.0**-power) * torch.arange(400_000, dtype=torch.float64)
    far, near = (b + nats).exp().flip(0).cumsum(0).flip(0), (b - nats).exp().cumsum(0)
    share = far[1:] / (far[1:] + near[:-1])  # the keys beyond w against those up to w
    return int((share >= 0.01).sum())


def unit_theta_alpha(beta: float, distance: int) -> float:
    """The theta_alpha with b = -1 at this distance, mu = 0."""
    return -beta * math.log(distance)


def half_silenced(beta: float, scale: float) -> int:
    """How many distances from 1 on have less than half the weight of a key infinitely far away."""
    return int((scale * ggd(0.0, beta, 100_000)[1:] < -math.log(2)).sum())


def own_token_gradient(beta: float, by: str) -> float:
    cfg = M.ModelConfig(n_head=1, n_embd=2, theta_beta=(beta,))
    prior = GGD(cfg)
    prior(1)[0, 0].backward()
    return getattr(prior, f"theta_{by}").grad.item()


def clamp_border(alpha: float) -> float:
    """The largest theta_beta, to 0.001, at which the own token's b lies on the tangent."""
    betas = -torch.arange(1, 8000, dtype=torch.float64) / 1000
    x = alpha + betas * math.log(M.EPSILON)
    return betas[x > M.MAX_EXPONENT][0].item()


def float32_error(position: int, channels: int, pair: int) -> float:
    exact = ANGLES(torch.tensor([position]), channels, M.ROPE_THETA)[0, pair].item()
    rate = torch.tensor(M.ROPE_THETA, dtype=torch.float32) ** (-2 * pair / channels)
    return abs((torch.tensor(float(position), dtype=torch.float32) * rate).item() - exact)


def slow_pairs(channels: int, window: int) -> int:
    return int((ANGLES(torch.tensor([window]), channels, M.ROPE_THETA)[0] < 2 * math.pi).sum())


def fading(g: float) -> int:
    """The least n at which a key g nats above n - 1 equal ones has less than half of the weight."""
    n = torch.arange(2, 2_000_000, dtype=torch.float64)
    return int(n[(g - (n - 1).log()).sigmoid() < 0.5][0])


def half_width(beta: float, alpha: float, s: float, n: int) -> float:
    """Where b times s ln n is -1, by bisection: alpha_eff."""
    low, high = 1e-6, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if s * math.log(n) * (middle / alpha) ** beta > 1 else (middle, high)
        )
    return low


def bisection_steps(words: int) -> int:
    return math.ceil(math.log2(words + 1))


def needed_right(n: int, bound: float) -> int:
    return next(k for k in range(n + 1) if WILSON(k, n)[0] > bound)


def needed_n(bound: float) -> int:
    return next(n for n in range(1, 100_000) if WILSON(n, n)[0] > bound)


@cache
def keys_found(change: str, length: int) -> int:
    """Of ten keys, how many the included model finds after one of its numbers has been set."""
    run = runs.load_run(str(runs.PRETRAINED), cfg=runs.EvalConfig(set=(change,)))
    prompts = needles.make_prompts(run.enc, length, depths=10)
    reader = streaming.Reader(run.model, length)
    return sum(FIND(lambda tokens, n: reader.score(tokens, n)[1], prompts))


def retrieval_heads() -> list[str]:
    """LAYER.HEAD of the heads of the included model that look far: theta_beta below 0."""
    betas = runs.load_run(str(runs.PRETRAINED)).model.prior_values()["theta_beta"]
    return [f"{i}.{h}" for i, row in enumerate(betas) for h, b in enumerate(row) if b < 0]


def questions(name: str) -> list[Question]:
    """A student's sheet: always the same for the same name."""
    draw = random.Random(int(hashlib.sha256(name.strip().lower().encode()).hexdigest(), 16))
    sheet: list[Question] = []

    def ask(key: str, text: str, truth: Callable, *given, near: float = 0.01, slack: int = 0):
        sheet.append(Question(key, text, partial(truth, *given), near, slack))

    p = draw.randint(55, 97) / 100
    ask("1a", f"Two keys, content ({p}, {1 - p:.2f}), prior the other way round: ln Z?", log_z, p)
    kind = draw.choice(["float16", "bfloat16", "float32", "float64"])
    text = f"Content (1, e^-g), prior (e^-g, 1), {kind}: from which g on are both products 0?"
    ask("1b", text, first_useless, getattr(torch, kind), near=0.03)

    heads, share = draw.choice([4, 8, 16]), draw.choice([50, 80, 90, 95, 99])
    text = f"ALiBi, {heads} heads, n large: the distance that holds {share}% of the prior of the"
    ask("2a", f"{text} steepest head?", share_width, heads, 0, share / 100, near=0)
    ask("2b", f"{text} flattest head?", share_width, heads, heads - 1, share / 100, near=0.005)
    power, nats = draw.randint(4, 9), draw.randint(2, 8)
    text = f"Slope 2^-{power}, content within +-{nats} nats: the least w such that all keys further"
    ask("2c", f"{text} away than w together have less than 1%?", reach, power, nats)

    beta, place = draw.choice([0.5, 1.5, 2.0, 3.0, 4.0]), draw.randint(3, 60)
    text = f"Which theta_alpha gives b = -1 at the distance {place}, for theta_beta = {beta}?"
    ask("3a", text, unit_theta_alpha, beta, place)
    low, scale = -draw.randint(30, 90) / 100, draw.randint(2, 6)
    text = f"theta_alpha = 0, theta_beta = {low}: how many distances from 1 on weigh less than half"
    ask("3b", f"{text} of a key infinitely far away?", half_silenced, low, 1.0, near=0)
    ask("3c", f"The same where s ln n = {scale}?", half_silenced, low, float(scale), near=0)

    steep = -draw.randint(11, 130) / 100
    text = f"theta_alpha = 0, theta_beta = {steep}: at the own token, what is db/dtheta_"
    ask("4a", f"{text}alpha?", own_token_gradient, steep, "alpha")
    ask("4b", f"{text}beta?", own_token_gradient, steep, "beta")
    alpha = draw.randint(-30, 60) / 10
    text = f"theta_alpha = {alpha}: below which theta_beta does the clamp act at the own token?"
    ask("4c", text, clamp_border, alpha)

    channels, window = draw.choice([32, 48, 64, 128]), draw.choice([128, 256, 512, 1024, 4096])
    text = f"Heads of {channels} channels, windows of {window}: how many pairs complete no turn?"
    ask("5a", text, slow_pairs, channels, window, near=0)
    position = draw.randint(500_000, 999_999)
    text = f"{channels} channels, position {position:,}: the second pair's angle in float32 is off"
    ask("5b", f"{text} by how many radians?", float32_error, position, channels, 1, near=0.3)

    g, s = draw.randint(20, 99) / 10, draw.randint(10, 40) / 100
    text = f"A key {g} nats above all others, plain softmax: from which n on has it less than half?"
    ask("6a", text, fading, g, near=0)
    beta, alpha, n = draw.choice([1.0, 2.0, 8.0]), draw.randint(4, 20), 2 ** draw.randint(9, 20)
    text = f"A head with alpha = {alpha}, beta = {beta}, s = {s}: alpha_eff at n = {n:,}?"
    ask("6b", text, half_width, beta, alpha, s, n)

    words = draw.randint(10_000, 2_000_000)
    text = f"A cut of a filler of {words:,} words, found by bisection of the words: how many steps"
    ask("7a", f"{text} at most?", bisection_steps, words, slack=1)

    n, bound = draw.choice([40, 50, 60, 80, 120]), draw.choice([80, 85, 90])
    text = f"How many of {n} must be right for a lower bound above {bound}%?"
    ask("8a", text, needed_right, n, bound / 100, near=0)
    bound = draw.choice([97, 98, 99, 99.5])
    ask("8b", f"The least n of n for a lower bound above {bound}%?", needed_n, bound / 100, near=0)

    head, length = draw.choice(retrieval_heads()), draw.choice([1024, 2048])
    values = draw.choice([0, 0.3, 0.6]), draw.choice([1, 1.5, 2])
    for letter, value in zip("ab", values, strict=True):
        change = f"{head}.theta_beta={value}"
        text = (
            f"eval_passkey.py --depths=10 --lengths={length} --set={change}: how many keys of 10?"
        )
        ask(f"9{letter}", text, keys_found, change, length, slack=1)
    return sheet

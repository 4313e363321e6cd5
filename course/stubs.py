"""mine.py: what you hand in. Fill in the bodies, in any order; keep names and arguments.

Beside these you may import and use everything in the repository that is not the answer itself.
"""

import torch

import model

NAME = ""  # yours, as you gave it to `grade.py sheet`
ANSWERS = {  # the numbers of your sheet: "1a": 0.25, ...
}


# Exercise 1 -------------------------------------------------------------------


def reference_posterior(scores, prior, row_scale, mask):
    """scores (B, H, R, S): content scores in nats; prior (H, R, S) or None: log-prior, which
    row_scale (B or 1, 1, R, 1) multiplies; mask (B or 1, 1, R, S): 0 or -inf. Returns a
    model.Posterior: prior, content and posterior (B, H, R, S) as probabilities, and log_z
    (B, H, R), finite however much content and prior disagree. All in the scores' number format."""
    raise NotImplementedError


# Exercise 2 -------------------------------------------------------------------


def alibi_slopes(n_head):
    """(H,) float32, largest first for a power of two; model.py's docstring has the rule."""
    raise NotImplementedError


class AlibiPrior(model.AlibiPrior):
    def forward(self, n):
        """(H, n): log-prior at the distances 0 ... n - 1. self.slopes is (H,)."""
        raise NotImplementedError


# Exercise 3 -------------------------------------------------------------------


class GGDPrior(model.GGDPrior):
    def forward(self, n):
        """(H, n) float64: log-prior at the distances 0 ... n - 1, from self.theta_alpha,
        self.theta_beta, self.theta_mu, each (H,). mu = e^t - e^-t, with t = theta_mu clamped to
        +-MAX_EXPONENT. The power's base is |d - mu| + EPSILON. Where e^x would pass e^MAX_EXPONENT
        its tangent there is taken. Values and gradients stay finite up to |theta| = 10,000."""
        raise NotImplementedError


# Exercise 4 -------------------------------------------------------------------


class GGDPriorByHand(model.GGDPrior):
    def forward(self, n):
        """The same, through a torch.autograd.Function of yours with its own derivatives."""
        raise NotImplementedError


# Exercise 5 -------------------------------------------------------------------


def angles(positions, channels, base):
    """(..., T) -> (..., T, channels / 2), in radians. Exact at a million positions."""
    raise NotImplementedError


def rotate(x, cos, sin):
    """x (B, H, T, D), cos and sin (B, 1, T, D / 2) -> like x, in x's number format. Which channels
    form a pair, and which way they turn, is in model.py's docstring."""
    raise NotImplementedError


# Exercise 6 -------------------------------------------------------------------


class CausalSelfAttention(model.CausalSelfAttention):
    def project(self, x, layout):
        """x (B, T, C) -> q, k, v, each (B, H, T, D): q . k is the content score, with all that
        multiplies it. The columns of self.qkv are all heads of q, then of k, then of v."""
        raise NotImplementedError


# Exercise 7 -------------------------------------------------------------------


def passkey_prompt(enc, length, depth, key, wording, filler, description=""):
    """A needles.Prompt of exactly `length` tokens. The filler is repeated and cut. The needle is at
    `depth` of it, from 0 to 1, between two words where a space is near. ValueError with
    "at least N" where `length` is too short."""
    raise NotImplementedError


# Exercise 8 -------------------------------------------------------------------


def find_answers(scorer, prompts):
    """A bool a prompt: is each token of its answer the most likely one? scorer(tokens, n_last) of a
    prompt's tokens is a tensor of the most likely ones in place of the last n_last."""
    raise NotImplementedError


def wilson(correct, n, z=1.96):
    """(low, high): all p with |p - correct / n| <= z sqrt(p (1 - p) / n)."""
    raise NotImplementedError


# Exercise 10 ------------------------------------------------------------------


class MyPrior(torch.nn.Module):
    """Any log-prior: at most 40 lines, and four learned numbers a head, named theta_..."""

    takes_ssmax = True  # does s ln n multiply it, as it does the content?

    def __init__(self, cfg, layer=0):
        super().__init__()

    def forward(self, n):
        """(H, n): log-prior at the distances 0 ... n - 1."""
        raise NotImplementedError

"""course/: the repository's bodies get all points, empty stubs none, wrong bodies are caught."""

import inspect
from pathlib import Path

import eval_passkey
import model
import needles
import runs

ROOT = Path(__file__).resolve().parent.parent
STUBS = (ROOT / "course" / "stubs.py").read_text(encoding="utf-8")

# exercise 4 and 10 are not in the repository
BY_HAND = '''
class Power(torch.autograd.Function):
    """b = -e^x, x = theta_alpha + theta_beta ln(|d - mu| + EPSILON), with its tangent far up."""

    @staticmethod
    def forward(ctx, theta_alpha, theta_beta, theta_mu, n):
        a, beta, m = (t.double()[:, None] for t in (theta_alpha, theta_beta, theta_mu))
        m = m.clamp(-MAX_EXPONENT, MAX_EXPONENT)
        offset = -torch.arange(n, dtype=torch.float64) - 2 * torch.sinh(m)
        log = (offset.abs() + EPSILON).log()
        x = a + beta * log
        e = x.clamp(max=MAX_EXPONENT).exp()
        ctx.save_for_backward(offset, log, e, beta, m)
        return -e * (1 + x - x.clamp(max=MAX_EXPONENT))

    @staticmethod
    def backward(ctx, grad):
        offset, log, e, beta, m = ctx.saved_tensors
        by_mu = e * beta / (offset.abs() + EPSILON) * offset.sign() * 2 * torch.cosh(m)
        terms = -grad * e, -grad * e * log, grad * by_mu
        return *(t.sum(1).float() for t in terms), None


class GGDPriorByHand(model.GGDPrior):
    def forward(self, n):
        return Power.apply(self.theta_alpha, self.theta_beta, self.theta_mu, n)


class MyPrior(torch.nn.Module):
    takes_ssmax = True

    def __init__(self, cfg, layer=0):
        super().__init__()
        self.theta_slope = torch.nn.Parameter(torch.zeros(cfg.n_head))

    def forward(self, n):
        return -self.theta_slope.exp()[:, None] * torch.arange(n).log1p()
'''


def solution() -> str:
    """mine.py with the repository's bodies."""
    parts = ["from math import *\nimport math\nfrom model import *\nimport model, needles, torch"]
    parts += ["from needles import *\nfrom eval_passkey import *\nfrom data import encode_document"]
    for function in (
        model.reference_posterior,
        model.alibi_slopes,
        model.angles,
        model.rotate,
        needles.passkey_prompt,
        eval_passkey.find_answers,
        runs.wilson,
    ):
        parts.append(inspect.getsource(function))
    for method in (
        model.AlibiPrior.forward,
        model.GGDPrior.forward,
        model.CausalSelfAttention.project,
    ):
        name = method.__qualname__.split(".")[0]
        parts.append(f"class {name}(model.{name}):\n{inspect.getsource(method)}")
    return "\n\n".join([*parts, BY_HAND])


if __name__ == "__main__":
    print(solution())

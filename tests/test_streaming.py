"""streaming.py computes what model.py computes."""

import pytest
import torch
from conftest import ENCODINGS, make_model

import streaming as S


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several chunks and several blocks of queries, also for short texts."""
    monkeypatch.setattr(S, "CHUNK_TOKENS", 80)
    monkeypatch.setattr(S, "BLOCK", 16)


def tokens(T, B=2):
    return torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("window", [None, 20, 0])
@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_streamed_logits_equal_full_ones(pe, ssmax, window):
    model, idx = make_model(pe, ssmax, block_size=16), tokens(150)
    full = model(idx, window=window)
    for chunk in (1, 7, 64, 150):
        cache = S.KVCache(model, 2, 150)
        parts = [S.prefill(model, part, cache, part.shape[1], window) for part in idx.split(chunk, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_score_equals_full_logits(pe, ssmax):
    model, idx = make_model(pe, ssmax), tokens(130)
    full = model(idx)[:, :-1].log_softmax(-1)
    expected = full.gather(-1, idx[:, 1:, None]).squeeze(-1)
    for n_last in (1, 5, 129):
        log_p, best = S.score(model, idx, n_last)
        torch.testing.assert_close(log_p, expected[:, -n_last:], atol=1e-4, rtol=1e-4)
        assert torch.equal(best, full[:, -n_last:].argmax(-1))


def test_score_goes_on_from_a_cache():
    model, idx = make_model("ggd", True), tokens(100)
    cache = S.KVCache(model, 2, 100)
    S.prefill(model, idx[:, :60], cache)
    log_p, best = S.score(model, idx[:, 60:], 10, cache)
    expected = S.score(model, idx, 10)
    torch.testing.assert_close(log_p, expected[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(best, expected[1]) and cache.used == 99


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_greedy_generation_is_argmax_of_full_logits(pe, ssmax):
    model, idx = make_model(pe, ssmax), tokens(30)
    new = S.generate(model, idx, 6)
    text = idx
    for _ in range(6):
        text = torch.cat((text, model(text)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(new, text[:, 30:])


def test_generation_stops_and_samples_by_seed():
    model, idx = make_model("ggd", True), tokens(30, B=1)
    first = S.generate(model, idx, 1).item()
    assert S.generate(model, idx, 6, stop=first).tolist() == [[first]]
    drawn = [S.generate(model, idx, 12, 1.0, generator=torch.Generator().manual_seed(s)).tolist() for s in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_prior_strip_is_the_prior_by_distance():
    prior, S_ = -torch.arange(9.0).square()[None] * torch.tensor([[1.0], [0.5]]), 9
    for log_n in (None, torch.tensor([[3.0], [2.0], [1.0], [0.5]])):
        strip = S.prior_strip(prior, 4, log_n)
        for r in range(4):
            for j in range(S_):
                i, scale = S_ - 1 - r, 1.0 if log_n is None else log_n[r, 0]
                expected = prior[:, i - j] * scale if j <= i else torch.full((2,), -torch.inf)
                assert torch.equal(strip[:, r, j], expected)


def test_first_query_is_exact_where_ln_n_is_0():
    """ln 1 = 0 must not meet -inf."""
    model = make_model("ggd", True)
    logits = S.prefill(model, tokens(1), S.KVCache(model, 2, 1), 1)
    torch.testing.assert_close(logits, model(tokens(1)), atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused():
    model, idx = make_model("nope", False), tokens(20)
    with pytest.raises(ValueError, match="do not fit"):
        S.prefill(model, idx, S.KVCache(model, 2, 19))
    with pytest.raises(ValueError, match="wanted"):
        S.prefill(model, idx, S.KVCache(model, 2, 20), wanted=21)
    with pytest.raises(ValueError, match="n_last"):
        S.score(model, idx, 20)

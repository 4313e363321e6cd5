"""Content x prior = posterior on a prompt: rows are those of the model and obey Theorem 1, the needle is marked."""

import pytest
import torch
from conftest import ENCODINGS, make_model

import plot_priors as P
import streaming
from data import encode_document, get_tokenizer
from eval_passkey import PasskeyConfig
from runs import Run


def text(T=100):
    return torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(0))


def all_of(p):
    """(..., T, 4): prior, content, posterior, ln Z."""
    return torch.stack((*p[:3], p.log_z[..., None].expand_as(p.prior)), dim=-1)


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_rows_are_those_of_the_model_and_obey_theorem_1(pe, ssmax, monkeypatch):
    """In several chunks and in several blocks of rows."""
    monkeypatch.setattr(streaming, "CHUNK_TOKENS", 40)
    monkeypatch.setattr(P, "SCORES_AT_ONCE", 4 * 100 * 3)
    model, idx, rows = make_model(pe, ssmax), text(), torch.tensor([0, 1, 7, 50, 98, 99])
    for got, expected in zip(P.look(model, idx, rows, all_of), model.posteriors(idx), strict=True):
        torch.testing.assert_close(got.float(), all_of(expected)[0][:, rows], rtol=1e-3, atol=1e-3)
        prior, content, posterior, log_z = got.unbind(-1)
        for part in (prior, content, posterior):
            torch.testing.assert_close(
                part.sum(-1), torch.ones(4, 6, dtype=torch.float64), rtol=0, atol=1e-9
            )
        torch.testing.assert_close(prior * content * log_z.exp(), posterior, rtol=0, atol=1e-9)


def test_log_z_is_ln_n_where_the_prior_is_uniform():
    """theta = 0, and its bound: never below 0, whatever the prior."""
    rows = torch.arange(100)
    for log_z in P.look(
        make_model("ggd", True, theta_beta=(0.0,)), text(), rows, lambda p: p.log_z
    ):
        torch.testing.assert_close(log_z, (rows + 1).double().log().expand(4, -1))
    for log_z in P.look(make_model("ggd", True), text(), rows, lambda p: p.log_z):
        assert log_z.min() >= -1e-12 and (log_z - (rows + 1).log()).abs().max() > 0.1


def test_marks_are_the_tokens_that_hold_the_words(enc):
    tokens = encode_document(enc, "Größe: a pass key is 12345, 東京. The pass key is 12345")
    marked = P.marks(enc, tokens, "pass key is 12345")
    found = [enc.decode([tokens[i] for i in range(begin, end)]) for begin, end in P.spans(marked)]
    assert [words.strip() for words in found] == ["pass key is 12345"] * 2
    assert (
        enc.decode([tokens[i] for i in torch.nonzero(P.marks(enc, tokens, "京")).flatten()]).strip(
            " "
        )
        == "京"
    )
    assert P.marks(enc, tokens, "12345").tolist()[-1] and not P.marks(enc, tokens, "Größe")[0]
    with pytest.raises(ValueError, match="is not in the prompt"):
        P.marks(enc, tokens, "54321")


def test_passkey_views_mark_the_needle_and_ask_for_the_answer():
    run = Run("", make_model("ggd", True), {"tokenizer": "bytes"}, get_tokenizer("bytes"))
    views = P.passkey_views(run, PasskeyConfig(lengths=(300, 200), depths=3))
    assert list(views) == [200, 300] and [len(some) for some in views.values()] == [3, 3]
    for view in views[300]:
        assert view.idx.shape == (1, 299) and view.answers == 6
        needle = run.enc.decode(view.idx[0, view.needle].tolist())
        key = needle.split()[4].strip(".")
        assert needle == f"The pass key is {key}. Remember it. {key} is the pass key."
        assert run.enc.decode(view.idx[0, -5:].tolist()) == f" {key[:4]}"
    default = P.passkey_views(run, PasskeyConfig(depths=1))
    assert list(default) == [256, 512, 1024, 2048, 4096, 8192]


def test_mass_on_the_needle_and_the_heads_that_retrieve():
    model, idx = make_model("ggd", True), text()
    needle = torch.zeros(100, dtype=torch.bool)
    needle[30:40] = True
    mass = P.needle_mass(model, P.View(idx, 3, needle))
    for layer, whole in enumerate(model.posteriors(idx)):
        for i, part in enumerate(whole[:3]):
            expected = part[0, :, -3:, 30:40].sum(-1).mean(-1)
            torch.testing.assert_close(mass[i, layer].float(), expected, rtol=1e-3, atol=1e-5)
    masses = torch.zeros(2, 3, 2, 4)
    masses[:, 2, 1, 2], masses[:, 2, 0, 3], masses[0, 2, 0, 1] = 0.9, 0.5, 0.6
    assert P.most_retrieving(masses, 3) == [(1, 2), (0, 3), (0, 1)]


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def stop(file, **options):
        file.write(b"half of a picture")
        raise KeyboardInterrupt

    figure, _ = P.panels(1, 1, 1, 1)
    P.save(figure, tmp_path / "eval", "a.png")
    before = (tmp_path / "eval/a.png").read_bytes()
    monkeypatch.setattr(figure, "savefig", stop)
    with pytest.raises(KeyboardInterrupt):
        P.save(figure, tmp_path / "eval", "a.png")
    assert [file.read_bytes() for file in (tmp_path / "eval").iterdir()] == [before]

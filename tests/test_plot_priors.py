"""Pictures: a prior is drawn as the model adds it to its scores, and a head's class says what that
does. Posteriors on a prompt are the model's and obey Theorem 1, and the needle is marked."""

import json
import math

import pytest
import reference
import torch
from conftest import ENCODINGS, make_model, posteriors

import model as M
import plot_priors as P
import runs
import streaming
from data import encode_document, get_tokenizer
from runs import save_checkpoint


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_acting_prior_is_what_a_row_adds_to_its_scores(pe, ssmax):
    model = make_model(pe, ssmax)
    p = {name: x.detach() for name, x in reference.parameters(model).items()}
    x = torch.randn(
        12, model.cfg.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    for layer, block in enumerate(model.blocks):
        for h, i, js, _, prior, _ in reference.attention_rows(model.cfg, p, layer, x, [0] * len(x)):
            drawn = P.acting_prior(block.attn, i + 1)[h, [i - j for j in js]]
            torch.testing.assert_close(drawn, prior, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize(("pe", "ssmax"), [("alibi", True), ("ggd", False), ("ggd", True)])
def test_curves_in_the_grid_are_the_acting_priors(pe, ssmax):
    model = make_model(pe, ssmax, n_layer=1)
    p, axes = reference.parameters(model), P.learned_priors(model).axes
    for h in range(model.cfg.n_head):
        for n, line in zip(P.WIDTHS, axes[h].lines, strict=True):
            scale = p["blocks.0.attn.s"][h] * math.log(n) if ssmax and pe == "ggd" else 1.0
            scores = reference.log_prior(model.cfg, p, 0, h, torch.arange(n).double()) * scale
            above = (scores.detach().log_softmax(-1) + math.log(n)).clamp(min=-30)
            x, y = map(torch.from_numpy, line.get_data())
            torch.testing.assert_close(y, above[x], rtol=1e-3, atol=1e-3)


def one_head(theta_alpha, theta_beta, s):
    model = make_model(
        "ggd", True, n_layer=1, n_head=1, theta_alpha=(theta_alpha,), theta_beta=(theta_beta,)
    )
    with torch.no_grad():
        model.blocks[0].attn.s.fill_(s)
    return model


@pytest.mark.parametrize(
    ("theta_alpha", "theta_beta", "s", "name"),
    [
        (0.0, 0.0, 1.0, "retrieval"),  # uniform
        (0.0, 0.0, -1.0, "retrieval"),
        (0.0, 0.01, 1.0, "local"),
        (-16.6, 8.0, 0.1, "local"),
        (0.0, -0.59, 1.0, "retrieval"),
        (0.0, -0.61, 1.0, "aggressive"),
        (0.3, -6.4, 0.1, "aggressive"),
        (0.0, -0.3, -0.2, "local"),  # a negative s turns them round
        (0.0, -2.0, -0.2, "local"),
        (-3.0, 0.8, -0.2, "farthest"),
    ],
)
def test_classes_by_what_a_head_does(theta_alpha, theta_beta, s, name):
    (row,) = P.tabulate_heads(one_head(theta_alpha, theta_beta, s))
    assert row["class"] == name
    if theta_beta:
        assert row["alpha"] == pytest.approx(math.exp(-theta_alpha / theta_beta), rel=1e-5)
    else:
        assert row["alpha"] is None


@pytest.mark.parametrize(
    ("theta_beta", "s", "mu", "name"),
    [
        (1.0, 1.0, -300.0, "local"),  # around the token 300 back
        (1.0, 1.0, -255.5, "local"),  # in the middle of the 512 keys in view: as much at either end
        (1.0, 1.0, -1000.0, "local"),  # a peak out of view
        (-0.3, 1.0, -300.0, "retrieval"),
        (-1.0, 1.0, -300.0, "aggressive"),
        (1.0, -0.2, -300.0, "farthest"),
        (-0.3, -0.2, -300.0, "local"),
    ],
)
def test_classes_do_not_depend_on_where_the_centre_is(theta_beta, s, mu, name):
    model = make_model(
        "ggd", True, n_layer=1, n_head=1, theta_beta=(theta_beta,), theta_mu=(math.asinh(mu / 2),)
    )
    with torch.no_grad():
        model.blocks[0].attn.s.fill_(s)
    assert P.tabulate_heads(model)[0]["class"] == name


def test_effective_width():
    """Closed forms: uniform, geometric, and two heads turned round: only itself, only the first."""
    uniform = make_model("nope", True)
    assert P.tabulate_heads(uniform)[0]["width_512"] == math.ceil(0.9 * 512) - 1
    for row, slope in zip(
        P.tabulate_heads(make_model("alibi", True)), (1 / 4, 1 / 16, 1 / 64), strict=False
    ):
        assert row["width_8192"] == math.ceil(math.log(10) / slope) - 1
    assert P.tabulate_heads(one_head(0.0, -2.0, -0.5))[0]["width_512"] == 0
    assert P.tabulate_heads(one_head(0.0, 1.0, -0.5))[0]["width_512"] == 511


def test_alpha_beyond_any_float_is_left_out():
    (row,) = P.tabulate_heads(one_head(1.0, -1e-4, 1.0))
    assert row["alpha"] is None and "-" in P.format_heads([row])


def test_special_cases_lie_on_the_curves_of_the_theory():
    figure = P.theory_priors()
    for axis in figure.axes:
        lines = {line.get_label(): line for line in axis.lines}
        for point, curve in (
            ("ALiBi, slope 1/$\\alpha$", "$\\beta$ = 1"),
            ("NoPE", "$\\beta$ = 0"),
        ):
            x = torch.from_numpy(lines[curve].get_xdata())
            y = torch.from_numpy(lines[curve].get_ydata())
            at = torch.searchsorted(x, torch.from_numpy(lines[point].get_xdata()))
            torch.testing.assert_close(
                torch.from_numpy(lines[point].get_ydata()), y[at], rtol=1e-3, atol=1e-6
            )


def test_fading_is_the_softmax_of_one_key_above_the_others():
    for line in P.theory_fading().axes[0].lines:
        g, ssmax = float(line.get_label().split()[2].strip(",")), "SSMax" in line.get_label()
        for n, weight in list(zip(*line.get_data(), strict=True))[:100:9]:
            scores = torch.tensor([g] + [0.0] * (int(n) - 1), dtype=torch.float64) * (
                math.log(n) if ssmax else 1
            )
            assert weight == pytest.approx(scores.softmax(0)[0].item(), abs=1e-12)


def text(T=100):
    return torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(0))


def all_of(parts, log_z):
    """(H, R, 4, T): prior, content, posterior, ln Z."""
    return torch.cat((parts, log_z[..., None, None].expand_as(parts[:, :, :1])), dim=-2)


@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_rows_are_those_of_the_model_and_obey_theorem_1(pe, ssmax, monkeypatch):
    """In several chunks and in several blocks of rows."""
    monkeypatch.setattr(streaming, "CHUNK_TOKENS", 40)
    monkeypatch.setattr(P, "SCORES_AT_ONCE", 4 * 100 * 3)
    model, idx, rows = make_model(pe, ssmax), text(), torch.tensor([0, 1, 7, 50, 98, 99])
    for got, expected in zip(P.look(model, idx, rows, all_of), posteriors(model, idx), strict=True):
        own = all_of(torch.stack(expected[:3], dim=-2)[0], expected.log_z[0])[:, rows]
        torch.testing.assert_close(got.float(), own, rtol=1e-3, atol=1e-3)
        prior, content, posterior, log_z = got.unbind(-2)
        for part in (prior, content, posterior):
            ones = torch.ones(4, 6, dtype=torch.float64)
            torch.testing.assert_close(part.sum(-1), ones, rtol=0, atol=1e-9)
        torch.testing.assert_close(prior * content * log_z.exp(), posterior, rtol=0, atol=1e-9)


def test_log_z_is_ln_n_where_the_prior_is_uniform():
    """theta = 0, and its bound: never below 0, whatever the prior."""
    rows = torch.arange(100)
    uniform = make_model("ggd", True, theta_beta=(0.0,))
    for log_z in P.look(uniform, text(), rows, lambda _, log_z: log_z):
        torch.testing.assert_close(log_z, (rows + 1).double().log().expand(4, -1))
    for log_z in P.look(make_model("ggd", True), text(), rows, lambda _, log_z: log_z):
        assert log_z.min() >= -1e-12 and (log_z - (rows + 1).log()).abs().max() > 0.1


def test_marks_are_the_tokens_that_hold_the_words(enc):
    tokens = encode_document(enc, "Größe: a pass key is 12345, 東京. The pass key is 12345")
    marked = P.mark_words(enc, tokens, "pass key is 12345")
    words = [enc.decode(tokens[begin:end]).strip() for begin, end in P.find_spans(marked)]
    assert words == ["pass key is 12345"] * 2
    last = torch.tensor(tokens)[P.mark_words(enc, tokens, "京")]
    assert enc.decode(last.tolist()).strip(" ") == "京"
    assert P.mark_words(enc, tokens, "12345")[-1] and not P.mark_words(enc, tokens, "Größe")[0]
    with pytest.raises(ValueError, match="is not in the prompt"):
        P.mark_words(enc, tokens, "54321")


def test_passkey_views_mark_the_needle_and_ask_for_the_answer():
    run = runs.Run("", make_model("ggd", True), {"tokenizer": "bytes"}, get_tokenizer("bytes"))
    views = P.make_views(run, P.PlotConfig(lengths=(300, 200)))
    assert list(views) == [200, 300] and [len(some) for some in views.values()] == [5, 5]
    for view in views[300]:
        assert view.idx.shape == (1, 299) and view.answers == 6
        needle = run.enc.decode(view.idx[0, view.needle].tolist())
        key = needle.split()[4].strip(".")
        assert needle == f"The pass key is {key}. Remember it. {key} is the pass key."
        assert run.enc.decode(view.idx[0, -5:].tolist()) == f" {key[:4]}"
    default = P.make_views(run, P.PlotConfig())
    assert list(default) == [256, 512, 1024, 2048, 4096, 8192]


def test_mass_on_the_needle_and_the_heads_that_retrieve():
    model, idx = make_model("ggd", True), text()
    needle = torch.zeros(100, dtype=torch.bool)
    needle[30:40] = True
    mass = P.weigh_needle(model, P.View(idx, 3, needle))
    for layer, whole in enumerate(posteriors(model, idx)):
        for i, part in enumerate(whole[:3]):
            expected = part[0, :, -3:, 30:40].sum(-1).mean(-1)
            torch.testing.assert_close(mass[i, layer].float(), expected, rtol=1e-3, atol=1e-5)
    masses = torch.zeros(2, 3, 2, 4)
    masses[:, 2, 1, 2], masses[:, 2, 0, 3], masses[0, 2, 0, 1] = 0.9, 0.5, 0.6
    assert P.rank_heads(masses)[:3] == [(1, 2), (0, 3), (0, 1)]


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


def save_run(folder, model):
    folder.mkdir()
    save_checkpoint(folder / "last.pt", model.checkpoint() | {"tokenizer": "bytes", "step": 1})
    return folder


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["plot_priors.py", *map(str, arguments)])
    monkeypatch.setattr(P, "DEPTHS", 2)
    P.main()


def pictures(folder):
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.glob("*.png"))
    return {file.stem for file in folder.glob("*.png")}


def test_a_model_with_a_prior(run, monkeypatch, capsys):
    values = make_model("ggd", True).prior_values()
    log = [json.dumps({"step": step, "loss": 1.0} | values) for step in (10, 20)]
    (run / "log.jsonl").write_text("\n".join(log), encoding="utf-8")
    call(monkeypatch, run, "--lengths=150,200", "--heads=1.3,0.0")
    shapes = {"learned_priors", "learned_heads", "learned_training"}
    prompts = {"prompt_curves", "prompt_maps", "prompt_log_z", "needle_mass"}
    assert pictures(run / "eval") == shapes | prompts
    (record,) = runs.read_records(run / "eval/priors.jsonl")
    assert record["n"] == 2 and record["config"]["heads"] == ["1.3", "0.0"]
    assert len(record["heads"]) == 8
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for row in record["heads"]:
        assert list(row["needle"]) == ["150", "200"]
        assert all(0 <= x <= 1 for x in row["needle"]["200"])
        assert row["class"] in lines[row["head"]]


class CauchyPrior(torch.nn.Module):
    takes_ssmax = True

    def __init__(self, cfg, layer=0):
        super().__init__()
        self.theta_width = torch.nn.Parameter(torch.linspace(0, 3, cfg.n_head))

    def forward(self, n):
        distance = torch.arange(n, device=self.theta_width.device)
        return -torch.log1p((distance / self.theta_width.exp()[:, None]).square())


def test_a_new_prior_is_drawn_and_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(M.PRIORS, "cauchy", CauchyPrior)
    monkeypatch.setattr(M, "ENCODINGS", (*M.ENCODINGS, "cauchy"))
    run = save_run(tmp_path / "run", model := make_model("cauchy", True))
    log = [json.dumps({"step": step} | model.prior_values()) for step in (10, 20)]
    (run / "log.jsonl").write_text("\n".join(log), encoding="utf-8")
    axes = P.learned_training(runs.read_records(run / "log.jsonl")).axes
    assert [axis.get_ylabel().split()[0] for axis in axes] == ["theta_width", "s"]
    call(monkeypatch, run, "--lengths=150")
    assert "head  theta_width" in capsys.readouterr().out
    (record,) = runs.read_records(run / "eval/priors.jsonl")
    names = "head theta_width s width_512 width_8192 needle"
    assert list(record["heads"][0]) == names.split()
    learned = {"learned_priors", "learned_training"}
    assert pictures(run / "eval") == learned | {"prompt_curves", "prompt_maps", "prompt_log_z"}


@pytest.mark.parametrize("pe", ["nope", "sinusoidal", "rope", "alibi"])
def test_every_encoding_on_a_prompt_of_ones_own(pe, tmp_path, monkeypatch):
    """Without a prior of its own a model has the uniform one."""
    run = save_run(tmp_path / "run", make_model(pe, pe == "alibi"))
    own = "The word is banana.\nWhat is the word? It is\n"
    (tmp_path / "own.txt").write_text(own, encoding="utf-8")
    call(monkeypatch, run, f"--prompt={tmp_path / 'own.txt'}", "--needle=banana")
    prompts = {"prompt_curves", "prompt_maps", "prompt_log_z"}
    assert pictures(run / "eval") == {"learned_priors"} | prompts


def test_without_a_run_the_theory_and_the_model_that_comes_along(run, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PRETRAINED", run)
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "--lengths=128")
    assert pictures(tmp_path / "out/theory") == {"theory_priors", "theory_ssmax", "theory_fading"}
    assert {"learned_priors", "learned_heads", "prompt_maps"} <= pictures(run / "eval")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing",), "no checkpoint missing"),
        (("RUN", "--lengths=50"), "needs at least"),
        (("RUN", "--heads=2.0"), "no head 2.0; give layer.head, from 0.0 to 1.3"),
        (("RUN", "--prompt=no_such_file.txt", "--needle=a"), "no_such_file.txt"),
        (("RUN", "--prompt=RUN/own.txt", "--needle=b"), "'b' is not in the prompt"),
        (
            ("RUN", "--prompt=RUN/empty.txt", "--needle=b"),
            "empty.txt has no text; choose another file",
        ),
        (("RUN", "--prompt=RUN/own.txt"), "go together"),
        (("RUN", "--head=0.0"), "did you mean 'heads'"),
    ],
)
def test_errors_are_one_sentence_and_come_before_any_picture(
    run, monkeypatch, capsys, arguments, message
):
    for name, content in (("own", "a"), ("empty", "\n")):
        (run / f"{name}.txt").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *(word.replace("RUN", str(run)) for word in arguments))
    printed = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and message in printed
    assert printed.startswith("error: ") and "\n" not in printed
    assert not (run / "eval").exists()

"""Pictures of priors: what is drawn is what the model adds to its scores, and heads are classed by what that does."""

import json
import math

import pytest
import reference
import torch
from conftest import ENCODINGS, make_model

import plot_priors as P
import runs as records
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
            expected = (scores.detach().log_softmax(-1) + math.log(n))[line.get_xdata()].clamp(
                min=-30
            )
            torch.testing.assert_close(
                torch.from_numpy(line.get_ydata()), expected, rtol=1e-3, atol=1e-3
            )


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
    (row,) = P.heads_table(one_head(theta_alpha, theta_beta, s))
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
    assert P.heads_table(model)[0]["class"] == name


def test_effective_width():
    """Closed forms: the uniform prior, a geometric one, a head turned round that sees only itself, and the reverse."""
    uniform = make_model("nope", True)
    assert P.heads_table(uniform)[0]["width_512"] == math.ceil(0.9 * 512) - 1
    for row, slope in zip(
        P.heads_table(make_model("alibi", True)), (1 / 4, 1 / 16, 1 / 64), strict=False
    ):
        assert row["width_8192"] == math.ceil(math.log(10) / slope) - 1
    assert P.heads_table(one_head(0.0, -2.0, -0.5))[0]["width_512"] == 0
    assert P.heads_table(one_head(0.0, 1.0, -0.5))[0]["width_512"] == 511


def test_alpha_beyond_any_float_is_left_out():
    (row,) = P.heads_table(one_head(1.0, -1e-4, 1.0))
    assert row["alpha"] is None and "-" in P.table([row])


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


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "run", make_model("ggd", True))


def save_run(folder, model):
    folder.mkdir()
    save_checkpoint(folder / "last.pt", model.checkpoint() | {"tokenizer": "bytes", "step": 1})
    return folder


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["plot_priors.py", *map(str, arguments)])
    P.main()


def pictures(folder):
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.glob("*.png"))
    return {file.stem for file in folder.glob("*.png")}


def test_a_model_with_a_prior(run, monkeypatch, capsys):
    values = {name: v for name, v in make_model("ggd", True).prior_values().items()}
    log = [json.dumps({"step": step, "loss": 1.0} | values) for step in (10, 20)]
    (run / "log.jsonl").write_text("\n".join(log), encoding="utf-8")
    call(monkeypatch, run, "--lengths=150,200", "--depths=2", "--heads=1.3,0.0")
    shapes = {"learned_priors", "learned_heads", "learned_training"}
    assert pictures(run / "eval") == shapes | {
        "prompt_curves",
        "prompt_maps",
        "prompt_log_z",
        "needle_mass",
    }
    (record,) = records.read_records(run / "eval/priors.jsonl")
    printed = capsys.readouterr().out
    assert (
        record["n"] == 2
        and record["config"]["heads"] == ["1.3", "0.0"]
        and len(record["heads"]) == 8
    )
    for row in record["heads"]:
        assert list(row["needle"]) == ["150", "200"] and all(
            0 <= x <= 1 for x in row["needle"]["200"]
        )
        assert any(
            line.split()[:1] == [row["head"]] and row["class"] in line
            for line in printed.splitlines()
        )


@pytest.mark.parametrize("pe", ["nope", "sinusoidal", "rope", "alibi"])
def test_every_encoding_on_a_prompt_of_ones_own(pe, tmp_path, monkeypatch, capsys):
    """Without a prior there is nothing to draw of it, and the program says so."""
    run = save_run(tmp_path / "run", make_model(pe, pe == "alibi"))
    (tmp_path / "own.txt").write_text(
        "The word is banana.\nWhat is the word? It is\n", encoding="utf-8"
    )
    call(monkeypatch, run, f"--prompt={tmp_path / 'own.txt'}", "--needle=banana", "--show=1")
    assert (f"{pe} adds no prior" in capsys.readouterr().out) == (pe != "alibi")
    priors = {"learned_priors", "prompt_log_z"} if pe == "alibi" else set()
    assert pictures(run / "eval") == {"prompt_curves", "prompt_maps"} | priors


def test_without_a_run_the_theory_and_the_model_that_comes_along(run, tmp_path, monkeypatch):
    monkeypatch.setattr(P, "PRETRAINED", run)
    call(monkeypatch, f"--theory_dir={tmp_path / 'a' / 'b'}", "--lengths=128", "--depths=1")
    assert pictures(tmp_path / "a" / "b") == {"theory_priors", "theory_ssmax", "theory_fading"}
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
        (("RUN", "--depths=0"), "depths is 0"),
        (("RUN", "--show=0"), "show is 0"),
        (("RUN", "--head=0.0"), "did you mean 'heads'"),
        (("--theory_dir=RUN/last.pt",), "is a file where a folder is needed"),
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
    assert (
        stopped.value.code == 2
        and message in printed
        and printed.startswith("error: ")
        and "\n" not in printed
    )
    assert not (run / "eval").exists()

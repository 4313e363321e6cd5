"""bench.py: every row is the model that it says, and one failing row costs no other."""

import numpy as np
import pytest
import torch
from conftest import make_model

import bench as B
import model as M
from runs import read_records, save_checkpoint


def test_plain_attention_is_that_of_the_model_without_a_prior(float64):
    model, idx = make_model("nope", False).double(), torch.arange(40)[None]
    expected, model.attention = model(idx), "plain"
    assert not torch.equal(model(idx), expected)
    torch.testing.assert_close(model(idx), expected, atol=1e-10, rtol=0)


def test_rows_on_cuda_hold_the_ten_encodings_between_two_plain_ones():
    rows = B.list_cases(B.BenchConfig(), cuda=True)
    assert rows[0] == rows[-1] == B.Case("nope", "plain", True)
    assert [r.encoding for r in rows[1:11]] == list(B.ENCODINGS) and {
        r.attention for r in rows[1:11]
    } == {"fused"}
    assert {(r.attention, r.compiled, r.packed) for r in rows[11:-1]} == {
        ("fused", True, True), ("reference", True, False), ("reference", False, False)
    }  # fmt: skip


def test_command_line(tmp_path, monkeypatch, capsys):
    config = tmp_path / "tiny.py"
    config.write_text(
        "vocab_size, n_layer, n_head, n_embd, block_size, batch_size = 257, 1, 2, 16, 32, 4\n"
        "virtual_length = 8.0  # as the quick start's; no way of measuring has it"
    )
    arguments = [config, "--encodings=alibi,ggd-ssmax", "--steps=1", "--warmup=0", "--device=cpu"]
    monkeypatch.setattr(
        "sys.argv", ["bench.py", *map(str, arguments), f"--records={tmp_path / 'new/bench.jsonl'}"]
    )
    whole = B.measure

    def measure(case, *rest):
        if case.encoding == "alibi":
            raise RuntimeError("no such kernel\nhere")
        return whole(case, *rest)

    monkeypatch.setattr(B, "measure", measure)
    B.main()
    printed = capsys.readouterr().out
    assert "4 x 32 tokens a step" in printed and "RuntimeError: no such kernel" in printed
    records = read_records(tmp_path / "new/bench.jsonl")
    assert [r["case"].split(", ")[1] for r in records] == ["nope", "alibi", "ggd-ssmax", "nope"]
    assert (
        records[2]["tokens_per_second"] > 0
        and records[2]["bytes"] is None
        and "error" in records[1]
        and "error" not in records[0]
    )
    table = [line.split() for line in printed.splitlines()[-4:]]
    assert table[0][-4] == "1.00"


def test_ways_to_score_a_long_text_agree():
    """All but the one without a prior, which agrees where there is none. dense: the forward."""
    idx = torch.randint(0, 256, (1, 700), generator=torch.Generator().manual_seed(0))
    for pe, ssmax in (("ggd", True), ("ggd", False), ("alibi", True), ("rope", False)):
        model = make_model(pe, ssmax)
        expected = model(idx[:, :-1])[:, -9:].argmax(-1)
        for way in ("dense", "exact", "skipping"):
            assert torch.equal(B.answer(way, model, idx, 9)[0], expected), (pe, way)
        assert torch.equal(B.answer("plain", model, idx, 9)[0], expected) == (pe == "rope"), pe


def test_streaming_command_line(tmp_path, monkeypatch, capsys):
    model = make_model("ggd", True, theta_alpha=(0.0,), theta_beta=(1.0,), n_head=2)
    save_checkpoint(tmp_path / "last.pt", model.checkpoint() | {"tokenizer": "bytes", "step": 1})
    monkeypatch.setattr(B, "in_a_process", B.time_way)
    options = ["--streaming", "--lengths=600,1500", f"--records={tmp_path / 'bench.jsonl'}"]
    monkeypatch.setattr("sys.argv", ["bench.py", str(tmp_path), *options])
    B.main()
    printed = capsys.readouterr().out
    assert "layer 1:" in printed and printed.count("skipping") == 4 and printed.count("dense") == 4
    records = read_records(tmp_path / "bench.jsonl")
    assert [r["way"] for r in records] == [*B.WAYS, *B.WAYS]
    assert all(r["seconds"] > 0 and r["length"] in (600, 1500) for r in records)
    assert (
        np.shape(records[-1]["skipped_blocks"]) == (2, 2)
        and np.min(records[-1]["skipped_blocks"]) > 0
    )


def test_a_clock_that_does_not_move_is_no_division_by_zero(monkeypatch):
    monkeypatch.setattr(B.time, "perf_counter", lambda: 5.0)
    shape = M.ModelConfig(vocab_size=257, n_layer=1, n_head=2, n_embd=16, block_size=32)
    cfg = B.BenchConfig(batch_size=1, steps=1, warmup=0)
    case, cpu = B.Case("nope", "plain", False), torch.device("cpu")
    assert B.measure(case, shape, cfg, cpu, torch.float32)["bytes"] is None
    record = {"way": "exact", "length": 256, "seconds": 0.0, "bytes": None, "skipped_blocks": None}
    assert B.format_way(record, record)[2:5] == ["0.00", "0.0000", ""]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--encodings=rpoe", "encodings names rpoe"),
        ("--steps=0", "at least 1"),
        ("none.py", "none.py: no such file"),
        ("--streaming", "name its folder"),
        ("--ways=dens", "ways names dens"),
    ],
)
def test_errors_are_one_sentence(monkeypatch, capsys, word, message):
    monkeypatch.setattr("sys.argv", ["bench.py", word])
    with pytest.raises(SystemExit) as stopped:
        B.main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err

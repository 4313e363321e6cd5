"""report.py: tables from written-out records, and their place in a README."""

import pytest

import study as R
from runs import append_record

SIZE = {"model_config": {"block_size": 256}, "step": 800, "train_config": {"tokens_per_step": 2048}}


def training(variant, seed, loss, rate=1.0, chosen=True):
    return {
        "metric": "training",
        "variant": variant,
        "rate": rate,
        "seed": seed,
        "loss": loss,
        "chosen": chosen,
    } | SIZE


def passkey(variant, seed, length, correct, filler="passkey", wording="passkey"):
    config = {"filler": filler, "wording": wording}
    about = {
        "metric": "passkey",
        "variant": variant,
        "seed": seed,
        "length": length,
        "config": config,
    }
    return about | {
        "correct": correct,
        "n": 20,
        "interval_95": [correct / 20 - 0.1, correct / 20 + 0.1],
    }


def perplexity(variant, seed, context, value):
    config = {"context": context}
    return {
        "metric": "perplexity",
        "variant": variant,
        "seed": seed,
        "config": config,
        "n": 9,
        "perplexity": value,
    }


def ruler(variant, seed, length, correct, tokens_right):
    about = {"metric": "ruler", "variant": variant, "seed": seed, "length": length, "n": 20}
    return about | {"correct": correct, "tokens_right": tokens_right}


STUDY = [
    training("ggd_ssmax", 1, 1.5),
    training("ggd_ssmax", 1, 1.8, rate=3.0, chosen=False),
    training("ggd_ssmax", 2, 1.6),
    training("rope", 1, 2.0, rate=3.0),
    training("s_1", 1, 1.7),
    passkey("ggd_ssmax", 1, 256, 20),
    passkey("ggd_ssmax", 2, 256, 20),
    passkey("ggd_ssmax", 1, 4096, 20),
    passkey("ggd_ssmax", 2, 4096, 17),
    passkey("ggd_ssmax", 1, 4096, 10, filler="unseen"),
    passkey("rope", 1, 256, 19),
    passkey("rope", 1, 4096, 0),
    passkey("s_1", 1, 256, 5),
    perplexity("ggd_ssmax", 1, 256, 4.0),
    perplexity("ggd_ssmax", 2, 256, 5.0),
    perplexity("rope", 1, 256, 4.25),
    {
        "metric": "perplexity",
        "variant": "rope",
        "seed": 1,
        "config": {"length": 4096},
        "nll": [1.0],
    },
    ruler("ggd_ssmax", 1, 2048, 10, 0.5),
    {"metric": "ruler", "variant": "rope", "seed": 1, "length": 1024, "n": 0},
]


def test_passkey_table():
    assert R.passkey_table(STUDY).splitlines() == [
        "| encoding | seeds | rate | loss | 256 (1x) | 4,096 (16x) | unseen filler, 4,096 (16x) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| RoPE | 1 | x3 | 2.00 | 95 | 0 |  |",
        "| GGD-BAM, SSMax | 2 | x1 | 1.55 [1.50, 1.60] | 100 | 92 [85, 100] | 50 |",
    ]


def test_other_tables_of_the_study():
    assert R.perplexity_table(STUDY).splitlines()[2:] == [
        "| RoPE | 4.25 |",
        "| GGD-BAM, SSMax | 4.50 [4.00, 5.00] |",
    ]
    assert R.ruler_table(STUDY).splitlines()[-1] == "| GGD-BAM, SSMax | 50 / 50 |"
    assert R.rates_table(STUDY).splitlines()[2:] == [
        "| RoPE |  | 2.000 |",
        "| GGD-BAM, SSMax | 1.500 | 1.800 |",
    ]
    assert R.ablation_table(STUDY).splitlines()[2:] == [
        "| nothing changed | 1.50 | 20 [90, 110] |",
        "| s = 1 at the start (the paper) | 1.70 | 5 [15, 35] |",
    ]


def test_the_papers_start_has_the_last_row():
    study = [training("start_uniform", 1, 2.5), *STUDY, passkey("start_uniform", 1, 256, 1)]
    labels = [row.split(" | ")[0][2:] for row in R.passkey_table(study).splitlines()[2:]]
    assert labels == ["RoPE", "GGD-BAM, SSMax", "GGD-BAM, SSMax, uniform start"]


def test_default_table_has_a_row_a_seed_and_the_n_of_every_column():
    records = [
        passkey("", 0, 256, 20),
        passkey("", 0, 256, 18),
        passkey("", 0, 1024, 3, "unseen", "reworded"),
    ]
    for record, seed in zip(records, (1, 2, 1), strict=True):
        record |= {"train_config": {"seed": seed}, "training_length": 256}
    assert R.default_table(records).splitlines() == [
        "| training seed | 256 (1x) | both, 1,024 (4x) |",
        "| --- | --- | --- |",
        "| n | 20 | 20 |",
        "| 1 | 20 [90, 110] | 3 [5, 25] |",
        "| 2 | 18 [80, 100] |  |",
    ]


def test_streaming_table_leaves_out_what_was_not_measured():
    records = [
        {"way": "exact", "length": 2048, "seconds": 1.234, "bytes": 5e6},
        {"way": "dense", "length": 2048, "seconds": 10.0, "bytes": 9e6},
        {"way": "exact", "length": 4096, "seconds": 2.5, "bytes": 6e6},
    ]
    assert R.streaming_table(records).splitlines()[2:] == [
        "| 2,048 | 10.00 | 1.23 | 9 | 5 |",
        "| 4,096 |  | 2.50 |  | 6 |",
    ]


def test_tables_go_between_their_lines_and_nothing_else_changes():
    text = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\nc\n"
    expected = "a\n<!-- one -->\n1 \\1\n<!-- end -->\nb\n<!-- two -->\n2\n<!-- end -->\nc\n"
    assert R.filled(text, {"one": "1 \\1", "two": "2"}) == expected
    with pytest.raises(ValueError, match="<!-- three -->"):
        R.filled(text, {"three": ""})


def test_the_pictures_show_the_numbers_of_the_tables():
    left, right = R.passkey_picture(
        [STUDY, [training("nope", 1, 2.0), passkey("nope", 1, 256, 19)]]
    ).axes
    rope, _, full, seeds, *_ = left.lines
    assert [rope.get_label(), full.get_label()] == ["RoPE", "GGD-BAM, SSMax"]
    assert right.lines[0].get_ydata().tolist() == [95]
    assert (
        left.get_title()
        == "1.6M bytes of training\nmean, and a dot a training seed (of 1 to 2), n = 20"
    )
    assert (
        right.get_title()
        == "1.6M bytes of training\nmean, and a dot a training seed (of 1), n = 20"
    )
    assert rope.get_ydata().tolist() == [95, 0] and full.get_ydata().tolist() == [100, 92.5]
    assert seeds.get_ydata().tolist() == [100, 100, 100, 85]
    assert R.perplexity_picture([STUDY]).axes[0].lines[2].get_ydata().tolist() == [4.5]


def test_the_readme_has_what_its_records_say():
    """README.md was made from results/: whoever changes one of them calls plot_priors.py --readme."""
    text = (R.ROOT / "README.md").read_text(encoding="utf-8")
    assert R.filled(text, R.tables(R.ROOT)) == text


def test_who_evaluates_twice_sees_the_newer_number(tmp_path, monkeypatch):
    """In every table; another seed, test or length is no second time, and a window of attention another test."""
    monkeypatch.setattr(
        R,
        "SOURCES",
        {"study.jsonl": R.SOURCES["study.jsonl"], "one.jsonl": {"one": R.default_table}},
    )
    about = {"training_length": 256, "train_config": {"seed": 1}}
    one = [passkey("", 0, 256, correct) | about for correct in (20, 18, 1)]
    one[0]["config"] = one[0]["config"] | {
        "depths": 20
    }  # who changes that asks the same of the same cell
    one[2]["config"] = one[2]["config"] | {"window_attention": 64}
    for changes in ({"digits": 7}, {"set": ["2.1.theta_beta=0"]}):  # nor are these
        one.append(passkey("", 0, 256, 2) | about)
        one[-1]["config"] = one[-1]["config"] | changes
    old = [
        passkey("ggd_ssmax", 2, 4096, 0),
        perplexity("rope", 1, 256, 9.0),
        ruler("ggd_ssmax", 1, 2048, 0, 0.0),
    ]
    old += [passkey("s_1", 1, 256, 0), training("rope", 1, 9.0, rate=3.0)]
    for name, records in (("one.jsonl", one), ("study.jsonl", [*old, *STUDY])):
        for record in records:
            append_record(tmp_path / "results" / name, record)
    tables = R.tables(tmp_path)
    assert tables["one"].splitlines()[3:] == ["| 1 | 18 [80, 100] |"]
    assert {k: v for k, v in tables.items() if k != "one"} == {
        name: make(STUDY) for name, make in R.SOURCES["study.jsonl"].items()
    }


def test_missing_records_leave_the_readme_alone(tmp_path):
    (tmp_path / "README.md").write_text("text")
    with pytest.raises(ValueError, match="has no records"):
        R.write(tmp_path)
    assert (tmp_path / "README.md").read_text() == "text"

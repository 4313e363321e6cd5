"""Perplexity, ARC and MMLU: the harness's own numbers, oracles, the command line."""

import json
import math
import os
import random
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import ENCODINGS, make_model

import data as shards
import eval_downstream as E
import runs as records
import streaming
from data import get_tokenizer
from model import GPT, ModelConfig
from runs import save_checkpoint

# Rows written for these tests, in the schemas of allenai/ai2_arc and cais/mmlu.
ARC = [
    (
        "What do plants take in from the air?",
        ["carbon dioxide", "iron", "sugar", "helium"],
        "ABCD",
        "A",
    ),
    ("Which of these is a mammal? ", ["a trout", "a whale", "a wren", "a toad"], "1234", "2"),
    (
        "Ice melts at 0 °C. At which of these does it stay solid?",
        ["–5 °C", "5 °C", "50 °C"],
        "ABC",
        "A",
    ),
    (
        "Where does a café au lait get its colour from?",
        ["milk", "naïveté", "crème brûlée", "ice", "salt"],
        "12345",
        "1",
    ),
    ("  How many moons has Mercury?\n", ["None", "NA", "1", "2"], "ABCD", "A"),
    (
        'She said: "It\'s {{hot}}." What did she feel?\nChoose.',
        ["heat ", " cold", "both", "n/a"],
        "ABCD",
        "A",
    ),
    (
        "Was ist größer als ein Haus?",
        ["Ein Ei", "Ein Übel — 東京", "Ein Hügel", "Nichts", "Null"],
        "ABCDE",
        "C",
    ),
    ("2 + 2 =", ["4", "22", "four"], "123", "1"),
]
MMLU = [
    (
        "high_school_chemistry",
        " Which gas is heavier than air?  ",
        ["Helium", "Hydrogen", "Argon", "None"],
        2,
    ),
    (
        "high_school_chemistry",
        "Naming CH4:\nwhich is right?",
        ["methane", "éthane", "NA", "methane "],
        0,
    ),
    (
        "high_school_world_history",
        "Who ruled first?\t",
        ["Augustus", "Nero", "  Tiberius", "null"],
        0,
    ),
    ("high_school_world_history", "In which year?", ["1066", "1492", "1789", "1914"], 1),
]
EXAMPLES = [
    ("high_school_chemistry", "Which is a metal? ", ["Sulfur", "Zinc", "Neon", "None of them"], 1),
    (
        "high_school_world_history",
        "Where is the façade of Petra?",
        ["Jordan", "Perú", "Oman", "NA"],
        0,
    ),
]


def load(task, data_dir="", num_fewshot=None, limit=0):
    """Subject -> its questions."""
    num_fewshot = E.TASKS[task].shots if num_fewshot is None else num_fewshot
    return E.load_questions(task, num_fewshot, limit, str(data_dir))


def silent(done):
    """No progress bar."""


def write_rows(folder):
    """The rows as files of the hub's schemas."""
    arc = [
        {
            "id": str(i),
            "question": q,
            "choices": {"text": texts, "label": list(labels)},
            "answerKey": key,
        }
        for i, (q, texts, labels, key) in enumerate(ARC)
    ]
    mmlu, dev = (
        [
            {"question": q, "subject": s, "choices": choices, "answer": gold}
            for s, q, choices, gold in rows
        ]
        for rows in (MMLU, EXAMPLES)
    )
    for name, rows in (("ARC-Easy_test", arc), ("test", mmlu), ("dev", dev)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def frozen_model(tokenizer):
    """The same weights everywhere: NumPy promises never to change this generator's numbers."""
    vocab, width = {"bytes": (257, 32), "gpt2": (50257, 16)}[tokenizer]
    model = GPT(ModelConfig(vocab_size=vocab, n_layer=2, n_head=4, n_embd=width, block_size=64))
    random = np.random.RandomState(7)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            scale = 1.5 * width**-0.5 if p.dim() == 2 else 0.3
            p.copy_(torch.from_numpy(random.randn(*p.shape) * scale + ("norm" in name)))
    return model.eval()


# What lm-evaluation-harness 0.4.13 says of these rows and the models of frozen_model(): right
# answers by acc and by acc_norm, and the log-likelihood of every choice. Prompts begin with
# <|endoftext|> and have no example; those of mmlu begin without it and have one example.
HARNESS = {
    ("bytes", "arc_easy"): (
        1,
        3,
        [
            [-109.1232, -35.5004, -49.6942, -46.5123],
            [-57.4067, -57.5667, -51.0846, -51.2945],
            [-65.2561, -44.0873, -51.5071],
            [-39.1802, -70.7015, -118.7773, -30.9251, -45.0778],
            [-38.0338, -25.4127, -16.7311, -18.2398],
            [-37.9337, -38.4207, -35.0334, -26.3943],
            [-57.8989, -140.4877, -82.1996, -51.1793, -27.3540],
            [-13.6753, -15.5974, -31.7021],
        ],
    ),
    ("bytes", "mmlu_continuation"): (
        1,
        2,
        [
            [-45.6724, -61.0118, -40.6220, -33.6674],
            [-51.8516, -47.1677, -19.1416, -60.8414],
            [-66.1971, -32.7203, -72.2835, -26.7030],
            [-34.8658, -33.6679, -36.4298, -37.8908],
        ],
    ),
    ("bytes", "mmlu"): (
        0,
        0,
        [
            [-15.7564, -14.2189, -15.7947, -15.5362],
            [-19.1144, -18.8036, -16.7359, -14.6091],
            [-18.8341, -17.3372, -16.0968, -14.6349],
            [-19.5109, -17.8142, -16.9234, -14.9524],
        ],
    ),
    ("gpt2", "arc_easy"): (
        1,
        2,
        [
            [-28.3501, -10.4109, -11.8020, -10.4003],
            [-26.0936, -26.6762, -43.5248, -34.3779],
            [-44.6941, -34.8765, -36.2816],
            [-11.9069, -47.1029, -84.2153, -12.7473, -12.2436],
            [-12.7962, -13.5037, -13.9602, -12.6865],
            [-27.6567, -23.7607, -11.0145, -34.7156],
            [-48.9207, -131.4993, -59.9134, -23.2468, -11.2685],
            [-14.3366, -13.4672, -13.1038],
        ],
    ),
    ("gpt2", "mmlu_continuation"): (
        1,
        3,
        [
            [-28.9745, -21.2400, -12.0821, -11.2596],
            [-11.9078, -34.5568, -14.2801, -25.2416],
            [-13.2043, -12.6706, -59.1965, -14.3320],
            [-28.3452, -30.8608, -26.0825, -12.8145],
        ],
    ),
    ("gpt2", "mmlu"): (
        0,
        0,
        [
            [-14.8474, -14.6996, -14.4423, -11.9280],
            [-14.5801, -13.6578, -13.9240, -11.3465],
            [-10.5554, -13.6072, -14.2929, -10.3467],
            [-10.1038, -12.7946, -15.4491, -9.5888],
        ],
    ),
}


@pytest.fixture(autouse=True)
def gpt2_files(monkeypatch):
    if "NANOBAM_TEST_DATA" in os.environ:
        monkeypatch.setenv(
            "TIKTOKEN_CACHE_DIR",
            str(Path(os.environ["NANOBAM_TEST_DATA"], "gpt2_bpe/tiktoken_cache")),
        )


def get_enc(name):
    if name == "gpt2" and "NANOBAM_TEST_DATA" not in os.environ:
        pytest.skip("NANOBAM_TEST_DATA is not set: no GPT-2 vocabulary without a network")
    return get_tokenizer(name)


def make_run(model, tokenizer="bytes"):
    return records.Run("run", model, {"tokenizer": tokenizer}, get_enc(tokenizer))


@pytest.mark.parametrize(("tokenizer", "task"), HARNESS)
def test_the_harness_says_the_same(tokenizer, task, tmp_path):
    run = make_run(frozen_model(tokenizer), tokenizer)
    letters = task == "mmlu"
    cfg = E.DownstreamConfig(bos=not letters)
    found, groups = [], []
    for questions in load(task, write_rows(tmp_path), int(letters)).values():
        prompts = [E.encode_question(run.enc, q, cfg.bos) for q in questions]
        found += E.score_prompts(run, prompts, silent)
        groups.append(E.measure_choices(run, cfg, questions, silent))
    acc, acc_norm, expected = HARNESS[tokenizer, task]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-4)
    result = E.pool_subjects(groups)
    assert (result["n"], result["right"], result["right_norm"]) == (len(expected), acc, acc_norm)
    assert result["chance"] == pytest.approx(np.mean([1 / len(row) for row in expected]))


def test_pooled_standard_error_is_the_harness_s():
    groups = [
        {"n": n, "right": right, "right_norm": 0, **ZEROS}
        for right, n in ((3, 10), (40, 100), (12, 25))
    ]
    result = E.pool_subjects(groups)
    assert result["acc"] == pytest.approx(55 / 135) and result["n"] == 135
    assert result["acc_stderr"] == pytest.approx(
        0.042600643361512924, rel=1e-12
    )  # its pooled_sample_stderr
    alone = E.pool_subjects(groups[:1])
    assert alone["acc_stderr"] == pytest.approx(math.sqrt(0.3 * 0.7 / 9))
    assert E.pool_subjects([{**groups[0], "n": 1, "right": 1}])["acc_stderr"] is None


ZEROS = {"guessed": 0.0, "longer": 0, "chosen": [0], "gold": [0]}


def test_prompts_to_the_letter(tmp_path):
    first = load("mmlu", write_rows(tmp_path), 1)["high_school_chemistry"][0]
    assert first.context == (
        "The following are multiple choice questions (with answers) about high school chemistry."
        "\n\n"
        "Which is a metal?\nA. Sulfur\nB. Zinc\nC. Neon\nD. None of them\nAnswer: B\n\n"
        "Which gas is heavier than air?\nA. Helium\nB. Hydrogen\nC. Argon\nD. None\nAnswer:"
    )
    assert first.continuations == ["A", "B", "C", "D"] and first.gold == 2
    last = load("mmlu_continuation", tmp_path)["high_school_world_history"][-1]
    begin = "The following are questions (with answers) about high school world history.\n\n"
    assert last == E.Question(
        begin + "Question: In which year?\nAnswer:", ["1066", "1492", "1789", "1914"], 1
    )
    arc = load("arc_easy", tmp_path)[""]
    assert [q.gold for q in arc] == [0, 1, 0, 0, 0, 0, 2, 0]
    assert arc[4] == E.Question(
        "Question:   How many moons has Mercury?\n\nAnswer:", ["None", "NA", "1", "2"], 0
    )


def test_examples_are_drawn_as_the_harness_draws_them(tmp_path):
    """ARC: one generator with seed 1234 draws from the train split for each question in turn."""
    rows = [
        {
            "question": f"Number {i}?",
            "choices": {"text": [f"no {i}", f"yes {i}"], "label": ["A", "B"]},
            "answerKey": "B",
        }
        for i in range(30)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (write_rows(tmp_path) / "ARC-Easy_train.jsonl").write_text("".join(lines), encoding="utf-8")
    found, alone, limited = (
        load("arc_easy", tmp_path, shots, limit)[""] for shots, limit in ((3, 0), (0, 0), (3, 4))
    )
    rng = random.Random(1234)
    drawn = [rng.sample(range(30), 3) for _ in ARC]
    assert drawn[0] != drawn[1] and limited == found[:4]
    for question, bare, indices in zip(found, alone, drawn, strict=True):
        solved = "".join(f"Question: Number {i}?\nAnswer: yes {i}\n\n" for i in indices)
        assert question == bare._replace(context=solved + bare.context)


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_space_at_the_end_of_the_context_belongs_to_the_continuation(tokenizer):
    enc = get_enc(tokenizer)
    for bos in (True, False):
        prompt = E.encode_question(enc, E.Question("One two: \n", ["three", "three "], 0), bos)
        assert [enc.decode(row[prompt.first :]) for row in prompt.rows] == [
            " \n three",
            " \n three ",
        ]
        assert enc.decode(prompt.rows[0][: prompt.first]) == "<|endoftext|>" * bos + "One two:"


def test_letters_are_four_tokens_of_gpt2():
    enc = get_enc("gpt2")
    prompt = E.encode_question(enc, E.Question("Answer:", list("ABCD"), 0), False)
    assert [row[prompt.first :] for row in prompt.rows] == [[317], [347], [327], [360]]


# ---- scoring


def direct(model, prompt):
    """Log-likelihoods of the choices, from all logits of one text at a time."""
    found = []
    for row in prompt.rows:
        log_p = model(torch.tensor([row]))[0].double().log_softmax(-1)
        found.append(sum(log_p[i - 1, row[i]].item() for i in range(prompt.first, len(row))))
    return found


def some_prompts():
    """Questions of very different lengths, with 2 to 5 choices, that share a beginning."""
    rng, enc = np.random.default_rng(0), get_tokenizer("bytes")
    text = "".join(chr(c) for c in rng.integers(97, 123, 4000))
    prompts = []
    for i in range(10):
        choices = [text[c * 40 :][: int(rng.integers(1, 30))] for c in range(2 + i % 4)]
        question = E.Question("A shared beginning. " + text[i * 9 :][: 5 + 9 * i], choices, 0)
        prompts.append(E.encode_question(enc, question, i < 9))
    return prompts


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize(("pe", "ssmax"), ENCODINGS)
def test_sharing_changes_nothing(pe, ssmax, window, monkeypatch):
    model, prompts = make_model(pe, ssmax), some_prompts()[::2]
    model.window = window
    expected = [direct(model, prompt) for prompt in prompts]
    monkeypatch.setattr(streaming, "LOSS_CHUNK", 257 * 40)  # several pieces of logits a batch
    scores = E.score_prompts(make_run(model), prompts, silent)
    for ours, theirs in zip(scores, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-5)


def test_texts_that_share_nothing():
    model = make_model("ggd", True)
    prompts = [some_prompts()[-1], E.Prompt([[5, 6], [5, 7]], 1), E.Prompt([[9, 6, 1], [9, 7]], 1)]
    scores = E.score_prompts(make_run(model), prompts, silent)
    for ours, prompt in zip(scores, prompts, strict=True):
        np.testing.assert_allclose(ours, direct(model, prompt), atol=1e-4)


def test_one_item_scored_three_ways():
    model = make_model("ggd", True)
    question = E.Question("Question: Which of these floats?\nAnswer:", ["a cork", "a stone"], 0)
    prompt = E.encode_question(get_tokenizer("bytes"), question, True)
    ours = E.score_prompts(make_run(model), [prompt], silent)[0]
    for log_p, row in zip(ours, prompt.rows, strict=True):
        idx, targets = torch.tensor([row[:-1]]), torch.tensor([row[1:]])
        targets[:, : prompt.first - 1] = -100
        loss = model(idx, targets).item() * (len(row) - prompt.first)
        cache, one_by_one = E.KVCache(model, 1, len(row)), 0.0
        for i, (token, following) in enumerate(zip(row, row[1:], strict=False), 1):
            logits = streaming.prefill(model, torch.tensor([[token]]), cache, wanted=1)
            one_by_one += (
                logits[0, 0].log_softmax(-1)[following].item() if i >= prompt.first else 0.0
            )
        assert (
            log_p
            == pytest.approx(-loss, abs=1e-5 * len(row))
            == pytest.approx(one_by_one, abs=1e-5 * len(row))
        )


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    model = make_model("ggd", True)
    with torch.no_grad():
        model.head.weight.zero_()
    run, idx = make_run(model), torch.randint(0, 256, (3, 129))
    cfg = E.DownstreamConfig(length=128, average=32, stride=16)
    assert np.exp(E.by_position(run, cfg, idx, silent)["nll"]) == pytest.approx([257] * 4, rel=1e-5)
    result = E.by_context(run, cfg, idx, 64, silent)
    assert result["perplexity"] == pytest.approx(257, rel=1e-5) and result["n"] == 48
    assert result["bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-5)
    prompt = some_prompts()[3]
    expected = [-(len(row) - prompt.first) * math.log(257) for row in prompt.rows]
    (ours,) = E.score_prompts(make_run(model), [prompt], silent)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_oracle_and_a_model_that_likes_the_first_choice(tmp_path, monkeypatch):
    cfg, run = E.DownstreamConfig(), make_run(make_model("nope", False))
    questions = load("arc_easy", write_rows(tmp_path))[""]

    def answers(prefers):
        rows = [
            [-100.0 * (i != prefers(q)) - 1 for i in range(len(q.continuations))] for q in questions
        ]
        monkeypatch.setattr(E, "score_prompts", lambda *rest: [np.array(row) for row in rows])
        return E.measure_choices(run, cfg, questions, silent)

    oracle, first = answers(lambda q: q.gold), answers(lambda q: 0)
    assert oracle["acc"] == oracle["acc_norm"] == 1 and oracle["acc_interval_95"][1] == 1
    assert first["acc"] == first["acc_norm"] == sum(q.gold == 0 for q in questions) / 8
    assert (
        first["chosen"][:2] == [8, 0] and oracle["chosen"] == oracle["gold"] == [6, 1, 1] + [0] * 7
    )


def test_ties_go_to_the_first_and_acc_norm_divides_by_characters():
    question = E.Question("", ["aa", "öö", "aaaaaa", ""], 0)
    assert E.choose(question, np.array([-4.0, -4.0, -9.0, -5.0])) == (0, 2)
    assert E.choose(question, np.array([-4.0, -4.0, -12.0, -3.0])) == (3, 0)


# ---- perplexity


def test_by_position_is_the_cross_entropy_of_one_long_forward():
    model, idx = make_model("ggd", True), torch.randint(0, 256, (2, 97))
    cfg = E.DownstreamConfig(length=96, average=24)
    nll = (
        -model(idx[:, :-1]).double().log_softmax(-1).gather(-1, idx[:, 1:, None]).squeeze(-1)
    )  # (2, 96)
    result = E.by_position(make_run(model), cfg, idx, silent)
    assert result["nll"] == pytest.approx(nll.view(2, 4, 24).mean((0, 2)).tolist(), abs=1e-4)
    assert result["nll_stderr"][1] == pytest.approx(nll[:, 24:48].std().item() / 48**0.5, abs=1e-4)
    assert result["n"] == 192


@pytest.mark.parametrize("window", [0, 10])
def test_by_context_scores_the_same_targets(window):
    model, idx = make_model("rope", False), torch.randint(0, 256, (3, 65))
    cfg, model.window = E.DownstreamConfig(stride=8), window or None
    for context in (8, 30, 64):
        cut = idx[:, -context - 1 :]
        logits = model(cut[:, :-1]).double()
        nll = -logits.log_softmax(-1).gather(-1, cut[:, 1:, None]).squeeze(-1)[:, -8:]
        result = E.by_context(make_run(model), cfg, idx, context, silent)
        assert result["nll"] == pytest.approx(nll.mean().item(), abs=1e-4) and result["n"] == 24
        assert result["perplexity"] == pytest.approx(math.exp(nll.mean().item()), rel=1e-4)
        half = 1.96 * nll.std().item() / 24**0.5
        assert result["interval_95"] == pytest.approx(
            [result["nll"] - half, result["nll"] + half], abs=1e-4
        )


def test_bits_per_byte_count_the_bytes_of_the_targets():
    run = make_run(frozen_model("gpt2"), "gpt2")
    idx = torch.tensor(
        [
            E.encode_document(
                run.enc, "Twelve words, naïve and 東京, that take more bytes than tokens."
            )
        ]
    )
    result = E.by_context(run, E.DownstreamConfig(stride=9), idx, 12, silent)
    size = len(run.enc.decode_bytes(idx[0, -9:].tolist()))
    assert size > 20 and result["bits_per_byte"] == pytest.approx(
        result["nll"] * 9 / math.log(2) / size
    )


def test_windows_slide_inside_documents():
    documents = [np.arange(100, 110), np.arange(200, 203), np.arange(300, 325)]
    idx = E.cut_windows(documents, 4, 3, 99)
    assert idx[:, 0].tolist() == [100, 103, 300, 303, 306, 309, 312, 315, 318] and idx.shape == (
        9,
        5,
    )
    targets = idx[2:, -3:].flatten().tolist()
    assert targets == list(range(302, 323))  # without a gap, none twice
    assert E.cut_windows(documents, 4, 3, 3)[:, 0].tolist() == [100, 306, 318]


def test_default_lengths_are_those_that_the_documents_have():
    for size, length, contexts in (
        (2000, 1024, (64, 128, 256, 512, 1024)),
        (300, 256, (64, 128, 256)),
    ):
        cfg = E.DownstreamConfig()
        for trained in (64, 32):  # the first run's hold for all
            E.fill_lengths(cfg, [np.zeros(size), np.zeros(20)], trained)
            assert (cfg.length, cfg.contexts, cfg.stride) == (length, contexts, 32)


# ---- data


@pytest.mark.skipif("NANOBAM_TEST_DATA" not in os.environ, reason="NANOBAM_TEST_DATA is not set")
def test_the_real_files():
    folder = os.environ["NANOBAM_TEST_DATA"]
    for task in ("arc_easy", "arc_challenge"):
        questions = load(task, folder)[""]
        assert len(questions) == 300 and sorted({len(q.continuations) for q in questions}) == [3, 4]
        assert all(q.context.startswith("Question: ") for q in questions)
    subjects = load("mmlu", folder)
    assert {s: len(q) for s, q in subjects.items()} == dict.fromkeys(subjects, 100) and len(
        subjects
    ) == 6
    assert all(
        q.context.count("Answer:") == 6 for questions in subjects.values() for q in questions
    )
    limited = load("mmlu_continuation", folder, limit=7)
    assert [len(q) for q in limited.values()] == [7] * 6


def test_parquet_and_the_hub_s_names_read_as_jsonl_does(tmp_path):
    write_rows(tmp_path)
    for name, file in (
        ("ARC-Easy_test", "ARC-Easy/test-00000-of-00001"),
        ("test", "all/test-00000-of-00001"),
    ):
        rows = [
            json.loads(line)
            for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        there = tmp_path / "hub" / f"{file}.parquet"
        there.parent.mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(there)
    with pytest.raises(ValueError, match="are both the test split of ARC-Easy"):
        load("arc_easy", tmp_path)
    hub = (tmp_path / "hub").rename(tmp_path.parent / "hub_layout")
    for task in ("arc_easy", "mmlu", "mmlu_continuation"):
        assert load(task, tmp_path, 0) == load(task, hub, 0)


def test_the_hub_is_asked_by_name(monkeypatch):
    asked = []
    rows = [
        {"question": q, "choices": {"text": t, "label": list(k)}, "answerKey": a}
        for q, t, k, a in ARC
    ]
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names, **more: asked.append((names, more)) or rows
    )
    assert len(load("arc_challenge")[""]) == 8
    assert asked == [(("allenai/ai2_arc", "ARC-Challenge"), {"split": "test"})]


# ---- the command line


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save_checkpoint(
        folder / "last.pt", make_model("ggd", True).checkpoint() | {"tokenizer": "bytes", "step": 1}
    )
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data")
    text = " ".join(str(i * i) for i in range(700))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    return folder


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["eval_downstream.py", *map(str, arguments)])
    E.main()


def read(folder, task):
    return records.read_records(folder / "eval" / f"{task}.jsonl")


SHORT = ("--length=256", "--average=64", "--contexts=64,128", "--targets=128", "--documents=2")


def test_command_line_writes_tables_records_and_a_picture(run, tmp_path, monkeypatch, capsys):
    other = tmp_path / "b" / "run"
    other.mkdir(parents=True)
    (other / "last.pt").write_bytes((run / "last.pt").read_bytes())
    arguments = (
        run,
        other,
        f"--source={tmp_path / 'text.txt'}",
        f"--data_dir={tmp_path / 'data'}",
        *SHORT,
    )
    call(monkeypatch, *arguments, "--tasks=perplexity,arc_easy,mmlu", "--num_fewshot=0")
    printed = capsys.readouterr().out
    first = {line.split()[0] for line in printed.splitlines() if line}
    assert first >= {f"{tmp_path.name}/run", "b/run"}
    assert (
        "mmlu mean by size  4" in printed
        and "arc_easy  8" in printed
        and "± one standard error" in printed
    )
    for folder in (run, other):
        curve, *points = read(folder, "perplexity")
        assert (
            len(curve["nll"]) == 4
            and curve["n"] == 512
            and [p["config"]["context"] for p in points] == [64, 128]
        )
        assert (
            all(p["n"] == 128 for p in points) and len({p["config"]["data"] for p in points}) == 1
        )
        assert f"{points[0]['perplexity']:.3f}" in printed
        mmlu = read(folder, "mmlu")
        subjects = ["high_school_chemistry", "high_school_world_history", "mean by size"]
        assert [r["config"]["subject"] for r in mmlu] == subjects
        assert mmlu[2]["n"] == 4 and mmlu[2]["longer"] == 4 and sum(mmlu[2]["chosen"]) == 4
        (arc,) = read(folder, "arc_easy")
        assert arc["training_length"] == 64 and arc["chance"] == pytest.approx(
            (4 / 4 + 2 / 3 + 2 / 5) / 8
        )
    assert (run / "eval/perplexity.png").read_bytes().startswith(b"\x89PNG")


def test_interrupted_and_resumed(run, tmp_path, monkeypatch, capsys):
    whole = E.by_context

    def interrupted(run, cfg, idx, context, *rest):
        if context == 128:
            raise KeyboardInterrupt
        return whole(run, cfg, idx, context, *rest)

    monkeypatch.setattr(E, "by_context", interrupted)
    arguments = (run, f"--source={tmp_path / 'text.txt'}", *SHORT, "--resume")
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *arguments)
    assert (
        stopped.value.code == 130
        and "stopped" in capsys.readouterr().out
        and len(read(run, "perplexity")) == 2
    )
    monkeypatch.setattr(E, "by_context", whole)
    call(monkeypatch, *arguments)
    assert len(read(run, "perplexity")) == 3
    call(monkeypatch, *arguments)
    assert len(read(run, "perplexity")) == 3  # nothing was left to do
    (tmp_path / "text.txt").write_text("another text " * 300, encoding="utf-8")
    call(monkeypatch, *arguments)
    assert len(read(run, "perplexity")) == 6  # of another text nothing was done


def test_shards_and_wikitext_as_sources(run, tmp_path):
    enc = get_tokenizer("bytes")
    documents = [E.encode_document(enc, "word " * n) for n in (100, 3, 60)]
    folder = tmp_path / "shards"
    folder.mkdir()
    shards.write_shard(folder / "x_val_000000.bin", np.array(sum(documents, []), dtype=np.uint16))
    loaded = records.load_run(str(run), torch.device("cpu"))
    found = E.read_documents(loaded, E.DownstreamConfig(source=str(folder)))
    assert [d.tolist() for d in found] == documents
    (folder / "._x_val_000000.bin").write_bytes(b"notes of the system")
    assert len(E.read_documents(loaded, E.DownstreamConfig(source=str(folder)))) == 3
    shards.write_shard(folder / "x_val_000001.bin", np.array([256, 257], dtype=np.uint16))
    with pytest.raises(ValueError, match="has the token id 257, .* knows 257"):
        E.read_documents(loaded, E.DownstreamConfig(source=str(folder)))
    rows = [{"text": ""}, {"text": " = Title = \n"}, {"text": ""}, {"text": " A line . \n"}]
    file = tmp_path / "data/wikitext-2-raw-v1_test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (found,) = E.read_documents(
        loaded, E.DownstreamConfig(source="wikitext", data_dir=str(tmp_path / "data"))
    )
    assert found.tolist() == E.encode_document(enc, " = Title = \n A line . \n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing",), "no checkpoint missing"),
        (("RUN",), "name a text for the perplexity with --source"),
        (("RUN", "--tasks=arc_esay"), "tasks is arc_esay; it may hold perplexity, arc_easy"),
        (("RUN", "--tasks="), "tasks is empty"),
        (("RUN", "--source=TMP/text.txt", "--length=99999"), "are needed; choose another source"),
        (
            ("RUN", "--source=TMP/text.txt", "--length=100", "--average=64"),
            "length 100 is not a multiple of average 64",
        ),
        (("RUN", "--source=TMP/text.txt", "--contexts=64,128", "--stride=65"), "stride is 65"),
        (("RUN", "--source=TMP/latin.txt"), "is not UTF-8 text"),
        (("RUN", "--source=TMP/data"), "no *val_*.bin shards"),
        (("RUN", "--contexts=0"), "contexts is 0; it must be at least 1"),
        (("RUN", "--num_fewshot=-2"), "num_fewshot is -2"),
        (("RUN", "--tasks=arc_challenge", "--data_dir=TMP"), "no ARC-Challenge_test.jsonl"),
        (("RUN", "--tasks=mmlu", "--data_dir=TMP/data"), "has only 1 examples, num_fewshot is 5"),
        (("RUN", "--device=tpu9"), "device"),
        (("RUN", "--lenght=5"), "did you mean 'length'"),
    ],
)
def test_errors_are_one_sentence(run, tmp_path, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        call(
            monkeypatch,
            *(str(run) if a == "RUN" else a.replace("TMP", str(tmp_path)) for a in arguments),
        )
    printed = capsys.readouterr().err.strip()
    assert (
        stopped.value.code == 2
        and message in printed
        and printed.startswith("error: ")
        and "\n" not in printed
    )
    assert not (run / "eval").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"answerKey": "E"},
        {"choices": {"text": ["one"], "label": ["A"]}},
        {"choices": {"text": ["one", None], "label": ["A", "B"]}},
        {"question": None},
        {"choices": None},
    ],
)
def test_a_row_of_another_schema_is_named(tmp_path, change):
    good = {
        "question": "What?",
        "choices": {"text": ["one", "two"], "label": ["A", "B"]},
        "answerKey": "A",
    }
    lines = [json.dumps(row) + "\n" for row in (good, good | change)]
    (tmp_path / "ARC-Easy_test.jsonl").write_text("".join(lines), encoding="utf-8")
    with pytest.raises(
        ValueError, match="row 2 of ARC-Easy test is not of the schema of allenai/ai2_arc"
    ):
        load("arc_easy", tmp_path)


def test_damaged_file_is_named(tmp_path):
    for name, content in (("ARC-Easy_test.parquet", b"PAR1"), ("test.jsonl", b"{broken")):
        (tmp_path / name).write_bytes(content)
    for task, name in (("arc_easy", "ARC-Easy_test.parquet"), ("mmlu_continuation", "test.jsonl")):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            load(task, tmp_path)


@pytest.mark.parametrize("name", ["blank.jsonl", "empty.jsonl", "empty.parquet"])
def test_a_file_without_rows_is_named(tmp_path, name):
    file = tmp_path / f"ARC-Easy_test.{name.split('.')[1]}"
    file.write_text("\n\n" if name == "blank.jsonl" else "", encoding="utf-8")
    if name == "empty.parquet":
        datasets.Dataset.from_dict({"question": [], "answerKey": []}).to_parquet(file)
    with pytest.raises(ValueError, match=f"{file.name} has no rows"):
        load("arc_easy", tmp_path)


def test_without_a_run_the_model_that_comes_along(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "PRETRAINED", run)
    (tmp_path / "text.txt").write_text("some words " * 60, encoding="utf-8")
    call(monkeypatch, f"--source={tmp_path / 'text.txt'}", "--contexts=32")
    assert "perplexity" in capsys.readouterr().out and (run / "eval" / "perplexity.jsonl").exists()


def test_help_lists_every_key(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, "--help")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"--{key}=" in printed for key in E.DownstreamConfig.__dataclass_fields__)

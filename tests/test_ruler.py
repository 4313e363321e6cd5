"""RULER: texts to the letter, exact lengths, needles where they were drawn, an oracle at 100,
and the command line."""

import configurator

import itertools
import os
import random
import re
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model

import eval_ruler as E
import needles as N
import runs as R
from data import get_tokenizer
from model import ModelConfig
from prepare_fineweb import PrepareConfig
from runs import Run, read_records, save_checkpoint
from train import ROOT, TrainConfig

LENGTHS = (512, 1024, 4096, 16_384, 65_536)
TEXT = (
    "Dr. Ångström’s “naïve” café opened at 8! Was it 東京? Nobody knew.\n\n"
    "A heading without a full stop\n\n"
    "Then rain fell,\nand the two of them left: quietly, by the back door. "
    + "It went on (and on), without an end to it, " * 20
    + "as such sentences do.\n" * 2
)


@pytest.fixture
def essay_file(tmp_path):
    file = tmp_path / "essay.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def get_gpt2():
    if "NANOBAM_TEST_DATA" not in os.environ:
        pytest.skip("NANOBAM_TEST_DATA is not set: no GPT-2 vocabulary without a network")
    return get_tokenizer("gpt2")


@pytest.fixture
def essay(essay_file):
    return N.read_essay(str(essay_file))


def test_the_eight_tasks():
    """haystack, key, value; then keys, values of each, queries."""
    assert {name: tuple(task) for name, task in N.TASKS.items()} == {
        "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
        "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
        "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
        "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
        "niah_multikey_2": ("needles", "words", "numbers", 1, 1, 1),
        "niah_multikey_3": ("needles", "uuids", "uuids", 1, 1, 1),
        "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
        "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
    }
    assert N.BUDGET == {"gpt2": 128, "bytes": 512}
    assert [100 * depth for depth in N.DEPTHS] == pytest.approx(
        np.round(np.linspace(0, 100, 40)).tolist()
    )


ONE = (
    "A special magic {number} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {number} afterwards.\n{context}\n"
    "What is the special magic {number} for {query} mentioned in the provided text?"
)
SOME = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n{context}\n"
    "What are all the special magic numbers for {query} mentioned in the provided text?"
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def context_of(sample):
    return "\n".join(sample.prompt.split("\n")[1:-1])


def needle_of(task, needle):
    return f"One of the special magic {N.TASKS[task].value} for {needle.key} is: {needle.value}."


@pytest.mark.parametrize("task", N.TASKS)
def test_texts_to_the_letter(task, essay):
    sample = N.make_sample(task, 1, 2, 2000, get_tokenizer("bytes"), essay)
    keys = [next(n.key for n in sample.needles if n.value == value) for value in sample.values]
    query = keys[0]
    if task == "niah_multiquery":
        query = "{}, {}, {}, and {}".format(*keys)
    several = task in ("niah_multivalue", "niah_multiquery")
    number = "uuid" if task in ("niah_single_3", "niah_multikey_3") else "number"
    form = SOME if several else ONE.replace("{number}", number)
    assert sample.prompt == form.format(context=context_of(sample), query=query)
    end = (
        "numbers for {} mentioned in the provided text are"
        if several
        else "{} for {} mentioned in the provided text is"
    )
    words = [query] if several else [number, query]
    assert sample.prefix == " The special magic " + end.format(*words)
    assert sample.answer == (" {}, {}, {}, and {}" if several else " {}").format(*sample.values)


def test_texts_as_they_are_sent():
    """One prompt written out, so that no test helper stands between it and the eye."""
    sample = N.make_sample("niah_single_1", 42, 0, None, get_tokenizer("bytes"))
    (needle,) = sample.needles
    assert sample.prompt + sample.prefix + sample.answer == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
        f"One of the special magic numbers for {needle.key} is: {needle.value}.\n{NOISE}\n"
        f"What is the special magic number for {needle.key} mentioned in the provided text? "
        f"The special magic number for {needle.key} mentioned in the provided text is "
        f"{needle.value}"
    )


def test_names_are_listed_as_in_ruler():
    assert [N.join_names(list(names)) for names in ("a", "ab", "abcd")] == [
        "a",
        "a, and b",
        "a, b, c, and d",
    ]


def test_essay_is_cut_at_sentence_ends(essay, tmp_path):
    assert essay[:6] == [
        "Dr.",
        "Ångström’s “naïve” café opened at 8!",
        "Was it 東京?",
        "Nobody knew.",
        "A heading without a full stop",
        "Then rain fell, and the two of them left: quietly, by the back door.",
    ]
    assert " ".join(essay) == " ".join(TEXT.split()) and max(map(len, essay)) <= 300
    assert essay[-2:] == ["as such sentences do."] * 2 or essay[-1] == "as such sentences do."
    (tmp_path / "wall.txt").write_text("x" * 1000, encoding="utf-8")
    assert list(map(len, N.read_essay(str(tmp_path / "wall.txt")))) == [300, 300, 300, 100]


def units_of(task, essay, sample, longer):
    """The haystack of a sample, and the unit that would come next, out of a longer sample's."""
    if N.TASKS[task].haystack == "noise":
        return [NOISE] * context_of(sample).count(NOISE), NOISE
    if N.TASKS[task].haystack == "needles":
        lines = [
            [x for x in context_of(s).split("\n") if sample.values[0] not in x]
            for s in (sample, longer)
        ]
        assert lines[1][: len(lines[0])] == lines[0]
        return lines[0], lines[1][len(lines[0])]
    text = context_of(sample)
    for needle in sample.needles:
        text = text.replace(needle_of(task, needle), "", 1)
    told = " ".join(text.split())
    units, size = [], -1
    while size < len(told):
        units.append(essay[len(units) % len(essay)])
        size += len(units[-1]) + 1
    assert " ".join(units) == told
    return units, essay[len(units) % len(essay)]


@pytest.mark.parametrize("task", N.TASKS)
def test_lengths_are_exact_and_needles_are_where_they_were_drawn(task, enc, essay):
    spec, budget = N.TASKS[task], 128 if enc.name == "gpt2" else 512
    joiner = " " if spec.haystack == "essay" else "\n"
    for index, length in enumerate(LENGTHS):
        if length < N.shortest(task, 42, 5, enc, essay):
            assert (
                enc.name == "bytes" and length <= 1024
            )  # the list is in test_cells_that_are_not_available
            continue
        sample = N.make_sample(task, 42, index, length, enc, essay)
        assert sample.tokens == [enc.eot_token, *enc.encode_ordinary(sample.prompt + sample.prefix)]
        units, following = units_of(
            task, essay, sample, N.make_sample(task, 42, index, length + 400, enc, essay)
        )
        room = length - budget - len(sample.tokens)
        assert 0 <= room <= len(enc.encode_ordinary(joiner + following))
        context = list(units)
        for needle in sample.needles[::-1]:
            context.insert(int(len(units) * needle.depth), needle_of(task, needle))
        assert joiner.join(context) == context_of(sample)
        depths = [needle.depth for needle in sample.needles]
        assert len(depths) == spec.keys * spec.values and depths == sorted(depths)
        assert (
            all(0 <= d < 1 for d in depths)
            or set(depths) <= set(N.DEPTHS)
            and len(set(depths)) == len(depths)
        )


def test_cells_that_are_not_available(enc, essay):
    """What each task needs; with GPT-2's tokens no cell of 512 is n/a, with bytes all are, and
    some of 1,024."""
    needs = {task: N.shortest(task, 42, 20, enc, essay) for task in N.TASKS}
    if enc.name == "gpt2":
        assert all(200 < n <= 400 for n in needs.values())
    else:
        assert all(512 < n <= 1300 for n in needs.values())
        assert [task for task, n in needs.items() if n > 1024] == [
            "niah_multikey_1",
            "niah_multikey_3",
            "niah_multivalue",
            "niah_multiquery",
        ]


@pytest.mark.parametrize("task", N.TASKS)
def test_too_short_a_length_says_what_it_needs(task, enc, essay):
    needs = [
        N.shortest(task, 7, i + 1, enc, essay) for i in range(8)
    ]  # of the first i + 1 samples: the maximum
    assert needs == sorted(needs)
    one = len(N.make_sample(task, 7, 3, None, enc, essay).tokens) + N.BUDGET[enc.name]
    assert one <= needs[3]
    with pytest.raises(ValueError, match=f"needs at least {one:,}$"):
        N.make_sample(task, 7, 3, one - 1, enc, essay)
    for length in (one, needs[-1]):
        assert (
            len(N.make_sample(task, 7, 3, length, enc, essay).tokens) <= length - N.BUDGET[enc.name]
        )


def test_noise_unit_has_the_25_tokens_of_the_original(enc):
    assert len(enc.encode_ordinary("\n" + N.NOISE)) == (25 if enc.name == "gpt2" else 90)


@pytest.mark.parametrize("task", N.TASKS)
def test_samples_are_a_function_of_their_arguments(task, essay):
    enc = get_tokenizer("bytes")
    first = N.make_sample(task, 1, 0, 2000, enc, essay)
    assert first == N.make_sample(task, 1, 0, 2000, enc, essay)
    others = [
        N.make_sample(task, seed, index, 2000, enc, essay) for seed, index in ((1, 1), (2, 0))
    ]
    assert len({first.prompt, *(other.prompt for other in others)}) == 3
    longer = N.make_sample(task, 1, 0, 5000, enc, essay)
    assert longer.needles == first.needles and longer.values == first.values


@pytest.mark.parametrize("task", N.TASKS)
def test_keys_and_values(task, essay):
    enc, forms = (
        get_tokenizer("bytes"),
        {"words": r"[a-z]+-[a-z]+", "numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f-]{36}"},
    )
    spec = N.TASKS[task]
    for index in range(20):
        sample = N.make_sample(task, 42, index, 3000, enc, essay)
        keys, values = [n.key for n in sample.needles], [n.value for n in sample.needles]
        assert (
            len(set(keys)) == spec.keys
            and len(set(values)) == len(values) == spec.keys * spec.values
        )
        assert all(re.fullmatch(forms[spec.key], key) for key in keys)
        assert all(re.fullmatch(forms[spec.value], value) for value in values)
        assert all(uuid.UUID(value).version == 4 for value in values if spec.value == "uuids")
        assert len(sample.values) == spec.queries * spec.values and set(sample.values) <= set(
            values
        )
        if task == "niah_multivalue":
            assert sample.values == values  # in reading order
        assert all(sample.prompt.count(value) == 1 for value in values)


def test_keys_are_asked_in_every_place(essay):
    """Neither the first nor the last needle is the one to remember, and depths fill the range
    evenly."""
    enc, places = get_tokenizer("bytes"), [0, 0, 0, 0]
    for index in range(200):
        sample = N.make_sample("niah_multikey_1", 42, index, None, enc, essay)
        places[[n.value for n in sample.needles].index(sample.values[0])] += 1
    assert min(places) > 30
    depths = [N.make_sample("niah_single_1", 42, i, None, enc).needles[0].depth for i in range(400)]
    assert all(60 <= sum(k <= 5 * d < k + 1 for d in depths) <= 100 for k in range(5))


def test_keys_repeat_as_rarely_as_in_ruler():
    """Of the 3,300 needles in 65,536 GPT-2 tokens hardly two have one key, and about 4 share the
    asked first word."""
    assert (
        (len(set(N.ADJECTIVES)), len(set(N.NOUNS)))
        == (len(N.ADJECTIVES), len(N.NOUNS))
        == (912, 6840)
    )
    assert all(re.fullmatch("[a-z]+", word) for word in N.ADJECTIVES + N.NOUNS)
    task, shared = N.TASKS["niah_multikey_2"], []
    for seed in range(10):
        rng, used = random.Random(seed), set()
        _, (asked,) = N.draw_needles(task, rng, used)
        units = itertools.islice(N.haystack(task, rng, used, ()), 3300)
        keys = [re.search(r"for (\S+) is: ", unit)[1] for unit in units]
        assert len(set(keys)) > 3290 and asked not in keys
        shared.append(sum(key.split("-")[0] == asked.split("-")[0] for key in keys))
    assert 2 < np.mean(shared) < 6


def test_a_key_has_about_as_many_tokens_as_in_ruler():
    enc, rng = get_gpt2(), random.Random(0)
    sizes = [len(enc.encode_ordinary(" " + N.draw("words", rng, set()))) for _ in range(2000)]
    assert np.mean(sizes) == pytest.approx(
        5.5, abs=0.1
    )  # as the docstring of make_sample says; RULER's have 4.6


def test_a_haystack_of_needles_never_tells_what_is_asked(monkeypatch):
    """Not even with so few pairs of words that it tells every other many times: the question has
    one answer."""
    monkeypatch.setattr(N, "ADJECTIVES", ["red", "blue"])
    monkeypatch.setattr(N, "NOUNS", ["cat", "dog", "owl"])
    for index in range(5):
        sample = N.make_sample("niah_multikey_2", 42, index, 10_000, get_tokenizer("bytes"))
        told = re.findall(r"numbers for (\S+) is: (\d+)\.", sample.prompt)
        (needle,) = sample.needles
        assert len(told) > 100 and len({key for key, _ in told}) == 6
        assert [pair for pair in told if pair[0] == needle.key] == [(needle.key, sample.values[0])]


def test_string_match_all():
    """RULER's rule: each value as a part of the text, whatever its case."""
    values = ["1234567", "AB-cd"]
    assert E.string_match_all("it is 1234567, I think", values) == 0.5
    assert E.string_match_all("x1234567890ab-CD", values) == 1
    assert E.string_match_all("123456 7 abcd", values) == 0
    assert E.string_match_all("", values) == 0


def outcomes_of(monkeypatch, enc, samples, say, forced):
    """What ask() makes of a model that says say(sample) and finds forced(answer) the most likely
    tokens."""
    run, queue = Run("", make_model("nope", False), {}, enc), list(samples)

    def generate(model, idx, new, stop, cache):
        assert idx.tolist() == [queue[0].tokens[-1:]] and cache.used == len(queue[0].tokens) - 1
        assert new == N.BUDGET[enc.name] and stop == enc.eot_token
        return torch.tensor([enc.encode_ordinary(say(queue.pop(0)))[:new]])

    def score(model, idx, n_last, cache):
        cache.used = idx.shape[1] - 1
        answer = idx[:, -n_last:]
        assert enc.decode(answer[0].tolist()) == queue[0].answer
        return torch.full(answer.shape, -0.5), forced(answer)

    monkeypatch.setattr(E, "generate", generate)
    monkeypatch.setattr(E, "score", score)
    return E.count_outcomes([E.ask(run, sample) for sample in samples])


@pytest.mark.parametrize("task", N.TASKS)
def test_oracle_constant_and_half(task, enc, essay, monkeypatch):
    length = 1300
    samples = [N.make_sample(task, 42, index, length, enc, essay) for index in range(8)]

    def wrong_at(place):
        return lambda answer: answer + (torch.arange(answer.shape[1]) == place % answer.shape[1])

    def half(sample):
        """Half of the values; of a single one, in every other sample."""
        if len(sample.values) > 1:
            return " and ".join(sample.values[:2])
        return (
            sample.values[0].upper() if samples.index(sample) % 2 else sample.values[0][:-1] + "x"
        )

    oracle = outcomes_of(
        monkeypatch, enc, samples, lambda s: s.answer + ". And so on.", lambda answer: answer
    )
    assert (oracle["correct"], oracle["exact"], oracle["tokens_right"], oracle["n"]) == (8, 8, 1, 8)
    assert oracle["nats_per_token"] == 0.5 and oracle["interval_95"][1] == 1
    constant = outcomes_of(
        monkeypatch, enc, samples, lambda s: " 0000000", lambda answer: answer * 0
    )
    assert (constant["correct"], constant["exact"], constant["interval_95"][0]) == (0, 0, 0)
    tokens = sum(
        len(E.encode_document(enc, s.prompt + s.prefix + s.answer)) - len(s.tokens) for s in samples
    )
    for place in (0, 1, -1):
        one = outcomes_of(monkeypatch, enc, samples, lambda s: s.answer, wrong_at(place))
        assert one["exact"] == 0 and one["tokens_right"] == pytest.approx(1 - 8 / tokens, abs=1e-4)
    halves = outcomes_of(monkeypatch, enc, samples, half, wrong_at(-1))
    assert halves["correct"] == 4 and halves["exact"] == 0 and 0 < halves["tokens_right"] < 1
    assert halves["interval_95"] == pytest.approx(
        [0.2152, 0.7848], abs=1e-4
    )  # Wilson's of 4 in 8, by hand


def test_every_token_the_most_likely_is_greedy_decoding(monkeypatch):
    """The teacher-forced score of a model's own greedy continuation is right at every token, up
    to a changed one."""
    monkeypatch.setitem(N.BUDGET, "bytes", 16)
    enc, model = get_tokenizer("bytes"), make_model("ggd", True)
    with torch.no_grad():
        model.head.weight[127:] = model.head.weight[:32] = 0  # says only what is a text by itself
    for index in range(3):
        sample = N.make_sample("niah_single_1", 1, index, None, enc)
        text = enc.decode(E.generate(model, torch.tensor([sample.tokens]), 6)[0].tolist())
        assert len(text) == 6 and text.isascii() and text.isprintable()
        outcome = E.ask(Run("", model, {}, enc), sample._replace(answer=text, values=[text]))
        assert outcome.score == 1 and outcome.right == [True] * 6 and outcome.nats > 0
        other = text[:2] + ("x" if text[2] != "x" else "y") + text[3:]
        outcome = E.ask(
            Run("", model, {}, enc), sample._replace(answer=other, values=[other + "z" * 16])
        )
        assert outcome.score == 0 and outcome.right[:3] == [True, True, False]


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["eval_ruler.py", *map(str, arguments)])
    E.main()


SMALL = ("--samples=2", "--lengths=512,1000,1050", "--tasks=niah_single_1,niah_multivalue")


@pytest.fixture
def quick(monkeypatch):
    """The whole way, but for the 512 tokens that are generated for each prompt."""
    asked = []

    def generate(model, idx, new, stop, cache):
        asked.append(cache.used)
        return idx

    monkeypatch.setattr(E, "generate", generate)
    return asked


def test_command_line_writes_table_records_and_picture(
    run, tmp_path, essay_file, monkeypatch, capsys, quick
):
    other = tmp_path / "b" / "run"
    other.mkdir(parents=True)
    (other / "last.pt").write_bytes((run / "last.pt").read_bytes())
    call(monkeypatch, run, other, *SMALL, f"--haystack_file={essay_file}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if ", n = 2: " in line] == [
        f"{tmp_path.name}/run",
        "b/run",
    ]
    assert lines[1].split() == ["task", "512", "1,000", "1,050"]
    assert (
        lines[2].count("0% [0, 66] / 0% / ") == 2 and lines[2].count("n/a: needs at least 9") == 1
    )
    assert (
        lines[3].split()[0] == "niah_multivalue"
        and lines[3].count("n/a: needs at least 1,113 tokens") == 3
    )
    for folder in (run, other):
        found = read_records(folder / "eval/ruler.jsonl")
        assert [(r["task"], r["length"], r["n"]) for r in found] == [
            *(("niah_single_1", length, n) for length, n in ((512, 0), (1000, 2), (1050, 2))),
            *(("niah_multivalue", length, 0) for length in (512, 1000, 1050)),
        ]
        assert all(r["metric"] == "ruler" and r["config"]["answer_tokens"] == 512 for r in found)
        assert found[0]["config"]["haystack"] == "noise" and found[0]["training_length"] == 128
        assert re.fullmatch(r"essay, sha256 [0-9a-f]{12}", found[-1]["config"]["haystack"])
        assert all(900 < r["needs"] < 1200 and "correct" not in r for r in found if not r["n"])
    assert (run / "eval/ruler.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_generates_for_itself(run, monkeypatch, capsys):
    monkeypatch.setitem(N.BUDGET, "bytes", 16)
    call(monkeypatch, run, "--tasks=niah_single_1", "--samples=1", "--lengths=1000")
    (record,) = read_records(run / "eval/ruler.jsonl")
    assert record["n"] == 1 and record["correct"] in (0, 1) and record["seconds"] > 0
    assert "saved " in capsys.readouterr().out


def test_resume_goes_on_behind_the_finished_cells(run, essay_file, monkeypatch, capsys, quick):
    whole, limit = E.ask, 3

    def interrupted(*arguments):
        if len(quick) == limit:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(E, "ask", interrupted)
    arguments = (run, *SMALL, f"--haystack_file={essay_file}")
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *arguments)
    assert stopped.value.code == 130
    printed = capsys.readouterr().out
    assert "stopped" in printed and "1,000" in printed and "1,050" not in printed
    assert [r["length"] for r in read_records(run / "eval/ruler.jsonl")] == [512, 1000]
    monkeypatch.setattr(E, "ask", whole)
    call(monkeypatch, *arguments, "--resume")
    assert len(quick) == limit + 2  # the two samples of the cell that was cut short
    assert len(read_records(run / "eval/ruler.jsonl")) == 6
    call(monkeypatch, *arguments, "--resume")
    assert len(quick) == limit + 2 and len(read_records(run / "eval/ruler.jsonl")) == 6
    call(monkeypatch, *arguments, "--resume", "--seed=1")  # another cell
    assert len(quick) == limit + 6
    model = make_model("alibi", False, block_size=128)
    save_checkpoint(run / "last.pt", model.checkpoint() | {"tokenizer": "bytes", "step": 1})
    call(monkeypatch, *arguments, "--resume")  # other weights
    assert len(quick) == limit + 10


def test_resume_computes_anew_what_other_texts_had(run, essay_file, monkeypatch, quick):
    """Another essay under the same name, and keys of other words, are another test."""
    arguments = (run, "--tasks=niah_single_2", "--samples=1", "--lengths=1100", "--resume")
    for change, asked in ((None, 1), (None, 1), ("essay", 2), ("words", 3)):
        if change == "essay":
            essay_file.write_text(TEXT + "One more.", encoding="utf-8")
        if change == "words":
            monkeypatch.setattr(E, "NOUNS", N.NOUNS[1:])
        call(monkeypatch, *arguments, f"--haystack_file={essay_file}")
        assert len(quick) == asked


def test_only_lengths_that_hold_no_prompt_are_an_error(run, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run, "--tasks=niah_multikey_3", "--lengths=1,128")
    printed = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and printed.startswith("error: ") and "\n" not in printed
    assert "lengths end at 128, and these tasks need at least 1,069 tokens" in printed
    assert not (run / "eval").exists()


def test_default_lengths_are_multiples_of_the_training_length(run, monkeypatch, capsys, quick):
    call(monkeypatch, run, "--tasks=niah_single_1", "--samples=1")
    header = next(
        line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["task"]
    )
    assert header.split()[1:] == ["128", "256", "512", "1,024", "2,048"]


def test_without_a_run_the_model_that_comes_along(run, monkeypatch, capsys, quick):
    monkeypatch.setattr(R, "PRETRAINED", run)
    call(monkeypatch, "--dry_run", "--tasks=niah_single_1")
    assert capsys.readouterr().out.startswith("==== niah_single_1 at 1,024 tokens: prompt ")
    call(monkeypatch, "--tasks=niah_single_1", "--lengths=1024", "--samples=1")
    assert [record["n"] for record in read_records(run / "eval" / "ruler.jsonl")] == [1]


def test_dry_run(run, enc, essay_file, monkeypatch, capsys):
    options = ("--dry_run", f"--haystack_file={essay_file}")
    call(monkeypatch, *options, f"--tokenizer={enc.name}", "--lengths=512,1050")
    printed = capsys.readouterr().out
    held = 8 if enc.name == "gpt2" else 4
    assert (
        printed.count("==== niah_") == 8
        and printed.count("mentioned in the provided text?") == held
    )
    for head in re.findall(r"at (\S+) tokens: prompt (\S+) \+ answer (\S+) = (\S+)", printed):
        length, prompt, budget, total = (int(x.replace(",", "")) for x in head)
        assert (
            length in (512, 1050)
            and prompt + budget == total <= length
            and budget == N.BUDGET[enc.name]
        )
    assert ("niah_multiquery: n/a: needs at least 1,2" in printed) == (enc.name == "bytes")
    call(monkeypatch, *options, f"--tokenizer={enc.name}")
    assert capsys.readouterr().out.count("mentioned in the provided text?") == 8
    call(monkeypatch, run, *options, "--tasks=niah_single_1")
    assert capsys.readouterr().out.startswith("==== niah_single_1 at 1,024 tokens: prompt ")
    assert not (run / "eval").exists()


def test_the_default_haystack_is_in_the_working_folder_or_beside_the_program(tmp_path, monkeypatch):
    """As everything that prepare_fineweb.py and train.py name; what the advice makes is the
    quick start's data."""
    monkeypatch.setattr(N, "__file__", str(tmp_path / "program/needles.py"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(
        ValueError, match="work/data/pydocs/pydocs.txt nor .*program/data/pydocs/pydocs.txt"
    ) as told:
        N.read_essay("")
    command = str(told.value).partition("prepare_fineweb.py ")[2].split()
    (_, cfg), _ = configurator.parse(
        [ModelConfig, TrainConfig], [str(ROOT / "config/ggd_bam_cpu.py")], "", "config"
    )
    advised, wanted = (
        configurator.parse([PrepareConfig], words, "")[0][0]
        for words in (command, cfg.prepare.split())
    )
    assert advised == wanted and Path(advised.out_dir) == Path(cfg.data) == N.HAYSTACK.parent
    for place in ("program", "work"):
        (tmp_path / place / "data/pydocs").mkdir(parents=True)
        (tmp_path / place / "data/pydocs/pydocs.txt").write_text(f"In {place}.", encoding="utf-8")
        assert N.read_essay("") == [f"In {place}."]


def test_the_default_haystack_is_missing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(N, "HAYSTACK", tmp_path / "none.txt")
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run)
    printed = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and "\n" not in printed and "none.txt" in printed
    assert "python prepare_fineweb.py --source=pydocs" in printed and "--haystack_file" in printed
    assert N.shortest("niah_single_1", 1, 1, get_tokenizer("bytes"), []) > 0  # noise needs no file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokenizer=gpt2",), "tokenizer is for --dry_run"),
        (("RUN", "--tokenizer=gpt2"), "tokenizer"),
        (("RUN", "--dry_run", "--tokenizer=bytes"), "tokenizer"),
        (("missing", "--tasks=niah_single_1"), "no checkpoint missing"),
        (("RUN", "--tasks=niah_single_4"), "niah_single_4; choose from niah_single_1"),
        (("RUN", "--tasks="), "tasks"),
        (("RUN", "--samples=0"), "samples is 0"),
        (("RUN", "--lengths=0"), "lengths is 0"),
        (("RUN", "--lengths=256,99999999999"), "lengths is 99999999999"),
        (("RUN", "--lenths=50"), "did you mean 'lengths'"),
        (("RUN", "--haystack_file=no_such.txt"), "no_such.txt"),
        (("RUN", "--haystack_file=EMPTY"), "has no text"),
        (("RUN", "--haystack_file=LATIN"), "is not UTF-8"),
        (("RUN", "--haystack_file=FOLDER"), "is a directory"),
        (("RUN", "--device=tpu9", "--tasks=niah_single_1"), "device"),
    ],
)
def test_errors_are_one_sentence(run, tmp_path, monkeypatch, capsys, arguments, message):
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("Übel.".encode("latin-1"))
    places = {
        "RUN": run,
        "EMPTY": tmp_path / "empty.txt",
        "LATIN": tmp_path / "latin.txt",
        "FOLDER": tmp_path,
    }
    for name, place in places.items():
        arguments = [str(argument).replace(name, str(place)) for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *arguments)
    printed = capsys.readouterr().err.strip()
    assert (
        stopped.value.code == 2
        and message in printed
        and printed.startswith("error: ")
        and "\n" not in printed
    )
    assert not (run / "eval").exists()


def test_all_runs_are_checked_before_the_first_is_tested(run, tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    save_checkpoint(
        bad / "last.pt", torch.load(run / "last.pt", weights_only=True) | {"tokenizer": "nonsense"}
    )
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run, bad, "--tasks=niah_single_1")
    assert stopped.value.code == 2 and "unknown tokenizer" in capsys.readouterr().err
    assert not (run / "eval").exists()


def test_help_lists_every_key(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, "--help")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"--{key}=" in printed for key in E.RulerConfig.__dataclass_fields__)

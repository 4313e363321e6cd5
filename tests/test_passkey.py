"""The passkey test: exact lengths, an oracle at 100%, a constant at 0%, and the command line
from end to end."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import make_model

import eval_passkey as E
import needles as N
import runs as R
import streaming
from data import EOT, get_tokenizer


@pytest.mark.parametrize("wording", N.WORDINGS)
@pytest.mark.parametrize("filler", [*N.FILLERS, "corpus"])
def test_lengths_are_exact_and_the_prompt_is_a_prefix(enc, wording, filler):
    text = N.FILLERS.get(
        filler, "Ein Übel — “naïve” café, 東京の空.\nSecond line; more words here, and 42 of them. "
    )
    rng = np.random.default_rng(0)
    for length in (180, 181, 256, 1023, 4096):
        for depth in (0, 0.1, 0.5, 0.83, 1):
            key = int(rng.integers(10_000, 100_000))
            prompt = N.passkey_prompt(enc, length, depth, key, N.WORDINGS[wording], text)
            assert len(prompt.tokens) == length and prompt.tokens[0] == enc.eot_token
            assert prompt.tokens.count(enc.eot_token) == 1
            whole, answer = enc.decode(prompt.tokens), enc.decode(prompt.tokens[-prompt.answer :])
            assert answer == f" {key}" and whole.count(str(key)) >= 2
            assert [
                enc.eot_token,
                *enc.encode_ordinary(whole[len(EOT) : -len(answer)]),
            ] == prompt.tokens[: -prompt.answer]
            if length > 4000:
                place = whole.index(N.WORDINGS[wording].needle.format(key=key)[:10]) / len(whole)
                assert place == pytest.approx(depth, abs=0.12) and abs(prompt.depth - depth) < 0.05


def test_depth_is_kept_in_a_filler_without_spaces(enc):
    for depth in (0, 0.3, 0.6, 1):
        prompt = N.passkey_prompt(enc, 2000, depth, 12345, N.WORDINGS["passkey"], "abcdefghij" * 9)
        assert len(prompt.tokens) == 2000 and prompt.depth == pytest.approx(depth, abs=0.01)


def test_a_million_tokens_take_a_few_encodings(enc, monkeypatch):
    """Each is a fraction of a second, and so is a prompt; with gpt2 a quarter of it, to keep the
    test short."""
    calls, encode = [], N.encode_document
    monkeypatch.setattr(
        N, "encode_document", lambda *arguments: calls.append(1) or encode(*arguments)
    )
    length = 2**20 if enc.name == "bytes" else 2**18
    prompt = N.passkey_prompt(enc, length, 0.3, 12345, N.WORDINGS["passkey"], N.FILLERS["passkey"])
    assert (
        len(prompt.tokens) == length
        and prompt.depth == pytest.approx(0.3, abs=1e-4)
        and len(calls) <= 10
    )


def test_answer_tokens(enc):
    prompt = N.passkey_prompt(enc, 300, 0.5, 12345, N.WORDINGS["passkey"], N.FILLERS["passkey"])
    assert prompt.answer == (6 if enc.name == "bytes" else len(enc.encode_ordinary(" 12345")))


def test_too_short_a_length_says_what_it_needs(enc):
    needs = N.shortest_prompt(enc, 12345, N.WORDINGS["passkey"], N.DESCRIPTION)
    arguments = 0.5, 12345, N.WORDINGS["passkey"], N.FILLERS["passkey"], N.DESCRIPTION
    with pytest.raises(ValueError, match=f"at least {needs}"):
        N.passkey_prompt(enc, needs - 1, *arguments)
    assert len(N.passkey_prompt(enc, needs, *arguments).tokens) == needs


def test_oracle_constant_and_one_wrong_token(enc):
    prompts = N.make_prompts(enc, 300, depths=5, seeds=(1, 2), description="false")
    assert len({tuple(p.tokens) for p in prompts}) == 10

    def wrong_at(place):  # from the end; nothing is wrong if it is before the answer
        return lambda tokens, n: torch.tensor(tokens[-n:]) + (torch.arange(-n, 0) == place)

    assert all(E.find_answers(lambda tokens, n: torch.tensor(tokens[-n:]), prompts))
    longest = max(p.answer for p in prompts)
    for place in range(-longest - 1, 0):  # from the token before the longest answer
        assert E.find_answers(wrong_at(place), prompts) == [p.answer < -place for p in prompts]
    assert not any(E.find_answers(lambda tokens, n: torch.full((n,), 7), prompts))


def test_prompts_are_a_function_of_seed_and_length():
    enc = get_tokenizer("bytes")
    first, again, other = (N.make_prompts(enc, 256, seeds=(s,)) for s in (3, 3, 4))
    assert first == again != other


def test_keys_and_depths_belong_together():
    """Depth by depth, then seed by seed; the keys of a seed do not depend on the other seeds."""
    enc = get_tokenizer("bytes")
    both = N.make_prompts(enc, 500, seeds=(3, 4), depths=5)
    depths = [p.depth for p in both]
    assert depths == sorted(depths) and depths[0] == depths[1] < depths[2]
    alone = [N.make_prompts(enc, 500, seeds=(s,), depths=5) for s in (3, 4)]
    assert [p.tokens for p in both] == [p.tokens for pair in zip(*alone, strict=True) for p in pair]
    cfg, answers = E.PasskeyConfig(seeds=(3, 4), depths=5), [True, False] * 2 + [False] * 6
    assert E.count_answers(answers, cfg)["by_depth"] == [0.5, 0.5, 0, 0, 0]


def test_shared_beginnings_change_no_answer_and_save_half_of_the_work(monkeypatch):
    model = make_model("ggd", True)
    prompts = N.make_prompts(get_tokenizer("bytes"), 900, seeds=(1, 2), depths=12)
    alone = [streaming.score(model, torch.tensor([p.tokens]), p.answer) for p in prompts]
    done, passed, forward = [], [], streaming.forward_chunk

    def counted(model, idx, *rest):
        passed.append(idx.numel())
        return forward(model, idx, *rest)

    monkeypatch.setattr(streaming, "forward_chunk", counted)
    monkeypatch.setattr(streaming, "PIECE", 200)
    reader = streaming.Reader(model, 899)
    for prompt, (log_p, best) in zip(prompts, alone, strict=True):
        together = reader.score(prompt.tokens, prompt.answer, lambda *step: done.append(step))
        torch.testing.assert_close(together[0], log_p[0], atol=1e-4, rtol=0)
        assert torch.equal(together[1], best[0])
        steps = [done.pop(0) for _ in range(len(done))]  # without a gap, from 0 to the end
        assert steps[0][0] == 0 and steps[-1][1] == 900
        assert [end for _, end in steps[:-1]] == [begin for begin, _ in steps[1:]]
    assert 0.45 < sum(passed) / (24 * 899) < 0.6


def test_a_text_that_shares_nothing_or_all_but_its_answer():
    model = make_model("ggd", True)
    reader, texts = streaming.Reader(model, 50), torch.randint(256, (3, 40)).tolist()
    for tokens, n in ((texts[0], 5), (texts[1], 5), (texts[1][:-2] + texts[2][:2], 2), ([7, 8], 1)):
        expected = streaming.score(model, torch.tensor([tokens]), n)
        torch.testing.assert_close(reader.score(tokens, n)[0], expected[0][0], atol=1e-4, rtol=0)


def test_exercises_never_hold_the_texts_that_test_generalisation():
    """No word of the reworded needle's name and of the vault's frame, and no sentence of the
    unseen filler."""
    frames = " ".join(text for frame in N.EXERCISE_FRAMES for text in frame).lower()
    assert not any(word in frames for word in N.HELD_OUT_WORDS)
    vault = set(
        re.findall(
            r"\w+", " ".join([N.WORDINGS["vault"].needle, N.WORDINGS["vault"].question]).lower()
        )
    )
    assert vault - N.HELD_OUT_WORDS == {"key", "the", "is", "by"}
    enc = get_tokenizer("bytes")
    windows = list(
        N.exercise_windows(np.random.default_rng(0), 300, 256, enc, "Lorem ipsum dolor. " * 300)
    )
    text = "".join(enc.decode(w) for w in windows)
    assert all(len(w) == 256 and w[0] == 256 for w in windows)
    assert text.count("The pass key is") > 100 and text.count("The grass") > 50
    assert not any(
        f"the {a} {b} is" in text.lower()
        for a in ("secret", "number")
        for b in ("secret", "number")
    )
    assert not any(sentence in text for sentence in N.FILLERS["unseen"].split(".")[:-1])


def test_exercises_have_every_frame_and_every_number_of_digits():
    """3 to 8 digits in every frame; half of those in the passkey's own wording and more have
    five."""
    rng, frames, digits = np.random.default_rng(0), set(), {True: [], False: []}
    for _ in range(600):
        one = N.random_exercise(rng, 256, "Lorem ipsum dolor. " * 300, ["name"])
        digits[one["wording"] == N.WORDINGS["passkey"]].append(len(str(one["key"])))
        frames.add((one["wording"].needle, one["wording"].question))
    expected = {
        tuple(text.replace("{name}", "name name") for text in frame) for frame in N.EXERCISE_FRAMES
    }
    own = N.WORDINGS["passkey"]
    assert frames == expected | {(own.needle, own.question)}
    assert set(digits[True]) == set(digits[False]) == {3, 4, 5, 6, 7, 8}
    assert np.mean(np.array(digits[True]) == 5) == pytest.approx(1 / 2 + 1 / 12, abs=0.1)
    assert np.mean(np.array(digits[False]) == 5) == pytest.approx(1 / 6, abs=0.1)


def test_keys_have_the_digits_that_are_asked():
    enc = get_tokenizer("bytes")
    for digits in (1, 3, 8, 18):
        prompts = N.make_prompts(enc, 512, digits=digits)
        assert {p.answer for p in prompts} == {digits + 1}, "and a space"


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["eval_passkey.py", *map(str, arguments)])
    E.main()


def test_command_line_writes_table_record_and_pictures(run, tmp_path, monkeypatch, capsys):
    other = tmp_path / "b" / "run"
    other.mkdir(parents=True)
    (other / "last.pt").write_bytes((run / "last.pt").read_bytes())
    call(monkeypatch, run, other, "--depths=3", "--seeds=1,2", "--lengths=300,128")
    printed = capsys.readouterr().out
    assert "0% [0, 39]" in printed and printed.index("128") < printed.index("300")
    assert [line.split()[0] for line in printed.splitlines()[:3]] == [
        "run",
        f"{tmp_path.name}/run",
        "b/run",
    ]
    for folder in (run, other):
        records = [
            json.loads(line)
            for line in (folder / "eval/passkey.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert [r["length"] for r in records] == [128, 300] and all(
            r["n"] == 6 and r["correct"] == 0 for r in records
        )
        assert records[0]["training_length"] == 128 and records[0]["config"]["description"] is False
    for picture in ("passkey.png", "passkey_depth.png"):
        assert (run / "eval" / picture).read_bytes().startswith(b"\x89PNG")


def test_default_lengths_are_multiples_of_the_training_length(run, monkeypatch, capsys):
    call(monkeypatch, run / "last.pt", "--depths=1")
    header = next(
        line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["run"]
    )
    assert header.split()[1:] == ["128", "256", "512", "1,024", "2,048"]


def test_interrupted_run_keeps_finished_lengths(run, monkeypatch, capsys):
    whole = E.find_answers

    def interrupted(scorer, prompts, *rest):
        if len(prompts[0].tokens) == 300:
            raise KeyboardInterrupt
        return whole(scorer, prompts, *rest)

    monkeypatch.setattr(E, "find_answers", interrupted)
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run, "--depths=2", "--lengths=128,300")
    assert stopped.value.code == 130
    assert len((run / "eval/passkey.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert "stopped" in capsys.readouterr().out


def test_resume_takes_over_what_is_the_same_and_only_that(run, monkeypatch, capsys):
    computed, whole = [], E.find_answers

    def noted(scorer, prompts, *rest):
        computed.append(len(prompts[0].tokens))
        return whole(scorer, prompts, *rest)

    monkeypatch.setattr(E, "find_answers", noted)
    monkeypatch.setattr(E, "draw", lambda *arguments: [])
    call(monkeypatch, run, "--depths=2", "--lengths=128")
    call(monkeypatch, run, "--depths=2", "--lengths=128,300", "--resume")
    assert computed == [128, 300]
    header = next(line for line in capsys.readouterr().out.splitlines() if "300" in line)
    assert header.split() == ["run", "128", "300"]
    for change in ("--depths=3", "--exact", "--seeds=2", "--window_attention=50"):
        call(monkeypatch, run, "--depths=2", "--lengths=128", "--resume", change)
    assert computed == [128, 300] + 4 * [128]
    call(monkeypatch, run, "--depths=2", "--lengths=128")
    R.save_checkpoint(
        run / "last.pt", make_model("ggd", False).checkpoint() | {"tokenizer": "bytes", "step": 1}
    )
    call(monkeypatch, run, "--depths=2", "--lengths=128", "--resume")
    assert computed == [128, 300] + 6 * [128]


def test_resume_computes_anew_what_another_filler_had(run, tmp_path, monkeypatch):
    """A file under the same name with another text is another test; as it was, the records know
    it."""
    monkeypatch.setattr(E, "draw", lambda *arguments: [])
    file, counts = tmp_path / "fill.txt", []
    for text in ("One two three. ", "Four five six. ", "One two three. "):
        file.write_text(text, encoding="utf-8")
        call(monkeypatch, run, "--depths=1", "--lengths=200", f"--filler={file}", "--resume")
        counts.append(len((run / "eval/passkey.jsonl").read_text(encoding="utf-8").splitlines()))
    assert counts == [1, 2, 2]


def test_too_long_for_the_memory_is_told_before_the_work(run, monkeypatch, capsys):
    monkeypatch.setattr("os.sysconf", lambda name: 2**10)  # a machine of 1 MiB
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run, "--depths=1", "--lengths=128,1048576", "--device=cpu")
    printed = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and "choose a shorter length" in printed and "\n" not in printed
    assert not (run / "eval").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing",), "no checkpoint missing"),
        (("RUN", "--lengths=50"), "needs at least"),
        (("RUN", "--lenths=50"), "did you mean 'lengths'"),
        (("RUN", "--filler=no_such_file.txt"), "no_such_file.txt"),
        (("RUN", "--device=tpu9"), "device"),
        (("RUN", "--seeds=1,1"), "seeds"),
        (("RUN", "--lengths=256,99999999999"), "lengths is 99999999999"),
    ],
)
def test_errors_are_one_sentence(run, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *(run if a == "RUN" else a for a in arguments))
    printed = capsys.readouterr().err.strip()
    assert (
        stopped.value.code == 2
        and message in printed
        and printed.startswith("error: ")
        and "\n" not in printed
    )
    assert not (run / "eval").exists()


def test_the_model_that_comes_along_finds_keys_far_past_its_training_length():
    """Every depth at 4,096 bytes, trained on 256; in words and a filler that it never saw."""
    run = R.load_run(str(R.PRETRAINED))
    assert run.trained == 256
    prompts = N.make_prompts(
        run.enc, 4096, depths=5, wording="reworded", filler=N.FILLERS["unseen"]
    )
    reader = streaming.Reader(run.model, 4095)
    assert all(E.find_answers(lambda tokens, n: reader.score(tokens, n)[1], prompts))


def test_without_a_run_the_model_that_comes_along(run, monkeypatch, capsys):
    monkeypatch.setattr(R, "PRETRAINED", run)
    call(monkeypatch, "--lengths=128", "--depths=1")
    assert "128" in capsys.readouterr().out and (run / "eval" / "passkey.jsonl").exists()


def test_all_runs_are_checked_before_the_first_is_tested(run, tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    for change, message in (
        ({"tokenizer": "nonsense"}, "unknown tokenizer"),
        ({"model_config": {"n_layers": 3}}, "is not a checkpoint (KeyError)"),
        ({"model_config": {"n_layers": 3, "block_size": 128}}, "no model of this version"),
        ({"model_config": {"n_layer": "3", "block_size": 128}}, "no model of this version"),
        ({"model_config": None}, "is not a checkpoint (TypeError)"),
        ({"model_config": [1]}, "is not a checkpoint (TypeError)"),
        ({"model": {}}, "no model of this version"),
        ({"model": None}, "no model of this version"),
        ({"model": {1: 2}}, "no model of this version"),
    ):
        R.save_checkpoint(bad / "last.pt", torch.load(run / "last.pt", weights_only=True) | change)
        with pytest.raises(SystemExit) as stopped:
            call(monkeypatch, run, bad, "--lengths=200", "--depths=1")
        printed = capsys.readouterr().err.strip()
        assert stopped.value.code == 2 and message in printed and "\n" not in printed
    (run / "eval").touch()
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run, "--lengths=200", "--depths=1")
    assert (
        stopped.value.code == 2 and "is a file where a folder is needed" in capsys.readouterr().err
    )


def test_help_lists_every_key(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, "--help")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"--{key}=" in printed for key in E.PasskeyConfig.__dataclass_fields__)

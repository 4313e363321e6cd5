"""
Retrieval exercises: documents in the form of the passkey test, for the training windows of prepare_fineweb.py.
"""

import re
import unicodedata
from collections.abc import Iterator

import numpy as np
import tiktoken

# the test's own texts and prompts, so that the two cannot drift apart
from eval_passkey import FILLERS, WORDINGS, Wording, passkey_prompt, shortest_prompt
from tokenizer import EOT

# Besides the passkey's own wording: statements and questions of like and unlike shape, so that a model learns to look
# for what is asked and not for one sentence. The answer is " {key}".
EXERCISE_FRAMES = (
    ("The {name} is {key}. Remember it. {key} is the {name}.", "What is the {name}? The {name} is"),
    ("Note that the {name} is {key}.", "Tell me the {name}. The {name} is"),
    ("From today on the {name} is {key}, and no other.", "I forgot the {name}. The {name} is"),
    ("{name} = {key};", "{name} ="),
    ("{name}: {key}", "{name}:"),
    ("- {name}, {key}", "- {name},"),
    ("set {name} to {key}", "set {name} to"),
    ("Q: {name}? A: {key}.", "Q: {name}? A:"),
    ("<{name}> {key} </{name}>", "<{name}>"),
    ("The code of {name} has changed to {key}.", "Which code has {name}? The code is"),
    ("We saw {name} on page {key}.", "Where did we see {name}? On page"),
    ("In room {key} you will find {name}.", "Looking for {name}? Go to room"),
    ("Dial {key} for {name}.", "For {name} you dial"),
    ("{key} is the price of {name}.", "{name} costs"),
)
EXERCISE_PASSKEYS = 0.4  # share of the exercises that have the passkey's own wording
EXERCISE_PAIRS = 0.4  # share of the exercise windows that hold two short ones, if they fit, instead of a long one
EXERCISE_DIGITS = (3, 8)  # of the keys, from ... to; half of those in the passkey's own wording have its five
HELD_OUT_WORDS = {"secret", "number", "vault", "opens", "opened"}  # in no name: eval_passkey.py's other wordings


def random_exercise(rng: np.random.Generator, window: int, corpus_text: str, words: list[str]) -> dict:
    """Arguments of passkey_prompt but for the length: some have the passkey's own wording, the others ask for a name of
    two random words of the corpus; half have the passkey's own filler, the others are hidden in corpus text."""
    name = " ".join(words[rng.integers(len(words))] for _ in range(2))
    wording = Wording(*(t.replace("{name}", name) for t in EXERCISE_FRAMES[rng.integers(len(EXERCISE_FRAMES))]))
    digits = int(rng.integers(EXERCISE_DIGITS[0], EXERCISE_DIGITS[1] + 1))
    if rng.random() < EXERCISE_PASSKEYS:
        wording, digits = WORDINGS["passkey"], 5 if rng.random() < 0.5 else digits
    begin = int(rng.integers(max(1, len(corpus_text) - 8 * window)))
    return {
        "depth": rng.random(),
        "key": int(rng.integers(10 ** (digits - 1), 10**digits)),
        "wording": wording,
        "filler": FILLERS["passkey"] if rng.random() < 0.5 else corpus_text[begin : begin + 8 * window],
    }


def name_words(text: str) -> list[str]:
    """The words that names are made of: a text's lower-case English ones or, if they are the fewer, its words in any
    script. Of these the first 8 bytes, which are as short in tokens; without spaces, as in Chinese, of each clause."""
    plain, lower = set(re.findall(r"\b[a-z]{3,8}\b", text)), text.lower()
    others = {ord(c): " " for c in set(lower) if unicodedata.category(c)[0] not in "LM"}  # no letters, no marks on them
    runs = {run.encode()[:8].decode(errors="ignore") for run in lower.translate(others).split() if len(run) > 1}
    words = (plain if 2 * len(plain) >= len(runs) else runs) - HELD_OUT_WORDS
    if not words:
        raise ValueError("the text has no words, of which exercises make names; use --retrieval_fraction=0")
    return sorted(words)


def exercise_windows(
    rng: np.random.Generator, count: int, window: int, enc: tiktoken.Encoding, corpus_text: str
) -> Iterator[list[int]]:
    """`count` lists of `window` ids, each filled exactly by one long retrieval exercise or by two short ones.

    An exercise is a document in the form of the passkey test: filler, needle, filler, question, answer.
    """
    words = name_words(corpus_text)
    for _ in range(count):
        most = 2 if rng.random() < EXERCISE_PAIRS else 1
        chosen, room = [], window
        while len(chosen) < most:
            one = random_exercise(rng, window, corpus_text, words)
            shortest = shortest_prompt(enc, one["key"], one["wording"])
            if shortest > room:
                break
            chosen.append((shortest, one))
            room -= shortest
        if not chosen:
            raise ValueError(
                f"a window of {window} tokens cannot hold an exercise of {shortest}; set a larger --window"
            )
        shares = rng.multinomial(room, [1 / len(chosen)] * len(chosen)).tolist()  # the room that is left, for filler
        lengths = [shortest + share for (shortest, _), share in zip(chosen, shares, strict=True)]
        prompts = [passkey_prompt(enc, n, **one) for n, (_, one) in zip(lengths, chosen, strict=True)]
        yield [token for prompt in prompts for token in prompt.tokens]


def pack_windows(corpus: np.ndarray, enc: tiktoken.Encoding, window: int, fraction: float, seed: int) -> np.ndarray:
    """Whole windows in random order: this fraction of them are exercises, the others cut the corpus in a row."""
    stretches = -(-len(corpus) // window)  # rounded up, so that the last tokens are in it
    exercises = round(stretches * fraction / (1 - fraction))
    rng = np.random.default_rng([seed, 1])
    rows = np.empty((stretches + exercises, window), dtype=np.uint16)
    rows[:stretches] = np.resize(corpus, (stretches, window))  # np.resize begins again at the end
    text = enc.decode(corpus.tolist()).replace(EOT, "\n\n")
    for i, ids in enumerate(exercise_windows(rng, exercises, window, enc, text), start=stretches):
        assert len(ids) == window and ids[0] == enc.eot_token, f"got {len(ids)} ids from {ids[:1]}, expected {window}"
        rows[i] = ids
    print(f"packed {stretches:,} windows of text and {exercises:,} retrieval exercises")
    return np.append(rows[rng.permutation(len(rows))], np.uint16(enc.eot_token))  # the last window's last target

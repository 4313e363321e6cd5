"""RULER's eight needle-in-a-haystack tasks as prompts: a pure function of task, seed, index, length and tokenizer.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv 2404.06654).
"""

import itertools
import math
import random
import re
import textwrap
import unicodedata
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tiktoken

from data import EOT, encode_document, read_text

# ---- passkey

# The texts of Mohtashami & Jaggi, "Landmark Attention" (2023), as the BAM paper uses them.
DESCRIPTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there. "
)


@dataclass(frozen=True)
class Wording:
    """How the needle is told and asked for; the answer is " {key}"."""

    needle: str
    question: str


WORDINGS = {
    "passkey": Wording(
        "The pass key is {key}. Remember it. {key} is the pass key.",
        "What is the pass key? The pass key is",
    ),
    # for models trained on exercises: no such sentence, and neither "secret" nor "number" is among them
    "reworded": Wording(
        "Keep this in mind: the secret number is {key}. Do not lose {key}.",
        "Which secret number was given? The secret number is",
    ),
    # the frame that is held out: of another shape, and no exercise has its words
    "vault": Wording("{key} opens the vault.", "The vault is opened by"),
}
FILLERS = {
    "passkey": "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ",
    # for models trained on exercises: this text is in none of them
    "unseen": "A boat drifts past the old mill. Three geese sleep on the bank. Nobody rings the bell. "
    "Far off a dog barks twice, then rain begins to fall on the tin roofs. ",
}


class Prompt:
    """One document: tokens (<|endoftext|>, prompt, answer), how many of the last are the answer, the real depth."""

    def __init__(self, tokens: list[int], answer: int, depth: float):
        self.tokens, self.answer, self.depth = tokens, answer, depth


def prompt_text(key: int, wording: Wording, before: str = "", after: str = "") -> str:
    """Prompt and answer as one text, so that no token spans a border that the tokenizer would not see."""
    return f"{before}{wording.needle.format(key=key)} {after} {wording.question} {key}"


def shortest_prompt(
    enc: tiktoken.Encoding, key: int, wording: Wording, description: str = ""
) -> int:
    """Tokens of the prompt without filler, <|endoftext|> and answer included."""
    return len(encode_document(enc, prompt_text(key, wording, before=description)))


def passkey_prompt(
    enc: tiktoken.Encoding,
    length: int,
    depth: float,
    key: int,
    wording: Wording,
    filler: str,
    description: str = "",
) -> Prompt:
    """A prompt of exactly `length` tokens with <|endoftext|> and answer, the needle at `depth` (0 to 1) of the filler.

    The filler is repeated as needed and cut, as in Landmark, where the length is reached; the needle stands between two
    of its words, where there is a space nearby. Raises ValueError if `length` cannot hold the prompt.
    """
    minimum = shortest_prompt(enc, key, wording, description)
    if length < minimum:
        raise ValueError(
            f"a length of {length} tokens cannot hold the prompt; it needs at least {minimum}"
        )
    filler *= math.ceil(8 * length / len(filler))  # enough for eight characters a token
    answer = len(enc.encode_ordinary(f"{wording.question} {key}")) - len(
        enc.encode_ordinary(wording.question)
    )

    def build(chars: int, pad: str = "") -> Prompt:
        place = round(depth * chars)
        cut = filler.rfind(" ", max(0, place - 50), place) + 1 or place if depth < 1 else chars
        text = prompt_text(key, wording, description + filler[:cut], filler[cut:chars] + pad)
        return Prompt(encode_document(enc, text), answer, cut / max(1, chars))

    low, high, chars = (
        (0, minimum),
        None,
        length - minimum,
    )  # (characters, tokens) too few, too many, to try
    while high is None or high[0] - low[0] > 1:
        prompt = build(chars)
        tokens = len(prompt.tokens)
        if tokens == length:
            return prompt
        low, high = ((chars, tokens), high) if tokens < length else (low, (chars, tokens))
        (a, m), (b, n) = (
            low,
            high or (2 * low[0] + 2, 2 * low[1] - minimum + 2),
        )  # go on along the line through both
        chars = a + max(1, min(b - a - 1, round((length - m) * (b - a) / (n - m))))
        if chars > len(filler):
            break
    # one more character is too many where it is several tokens: spaces fill the gap
    padded = (build(low[0], " " * spaces) for spaces in range(1, 17))
    if prompt := next((p for p in padded if len(p.tokens) == length), None):
        return prompt
    raise ValueError(f"no cut of the filler makes exactly {length} tokens; choose another length")


# ---- exercises

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
EXERCISE_DIGITS = (
    3,
    8,
)  # of the keys, from ... to; half of those in the passkey's own wording have its five
HELD_OUT_WORDS = {
    "secret",
    "number",
    "vault",
    "opens",
    "opened",
}  # in no name: eval_passkey.py's other wordings


def random_exercise(
    rng: np.random.Generator, window: int, corpus_text: str, words: list[str]
) -> dict:
    """Arguments of passkey_prompt but for the length: some have the passkey's own wording, the others ask for a name of
    two random words of the corpus; half have the passkey's own filler, the others are hidden in corpus text."""
    name = " ".join(words[rng.integers(len(words))] for _ in range(2))
    wording = Wording(
        *(t.replace("{name}", name) for t in EXERCISE_FRAMES[rng.integers(len(EXERCISE_FRAMES))])
    )
    digits = int(rng.integers(EXERCISE_DIGITS[0], EXERCISE_DIGITS[1] + 1))
    if rng.random() < EXERCISE_PASSKEYS:
        wording, digits = WORDINGS["passkey"], 5 if rng.random() < 0.5 else digits
    begin = int(rng.integers(max(1, len(corpus_text) - 8 * window)))
    return {
        "depth": rng.random(),
        "key": int(rng.integers(10 ** (digits - 1), 10**digits)),
        "wording": wording,
        "filler": FILLERS["passkey"]
        if rng.random() < 0.5
        else corpus_text[begin : begin + 8 * window],
    }


def name_words(text: str) -> list[str]:
    """The words that names are made of: a text's lower-case English ones or, if they are the fewer, its words in any
    script. Of these the first 8 bytes, which are as short in tokens; without spaces, as in Chinese, of each clause."""
    plain, lower = set(re.findall(r"\b[a-z]{3,8}\b", text)), text.lower()
    others = {
        ord(c): " " for c in set(lower) if unicodedata.category(c)[0] not in "LM"
    }  # no letters, no marks on them
    runs = {
        run.encode()[:8].decode(errors="ignore")
        for run in lower.translate(others).split()
        if len(run) > 1
    }
    words = (plain if 2 * len(plain) >= len(runs) else runs) - HELD_OUT_WORDS
    if not words:
        raise ValueError(
            "the text has no words, of which exercises make names; use --retrieval_fraction=0"
        )
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
        shares = rng.multinomial(
            room, [1 / len(chosen)] * len(chosen)
        ).tolist()  # the room that is left, for filler
        lengths = [shortest + share for (shortest, _), share in zip(chosen, shares, strict=True)]
        prompts = [
            passkey_prompt(enc, n, **one) for n, (_, one) in zip(lengths, chosen, strict=True)
        ]
        yield [token for prompt in prompts for token in prompt.tokens]


def pack_windows(
    corpus: np.ndarray, enc: tiktoken.Encoding, window: int, fraction: float, seed: int
) -> np.ndarray:
    """Whole windows in random order: this fraction of them are exercises, the others cut the corpus in a row."""
    stretches = -(-len(corpus) // window)  # rounded up, so that the last tokens are in it
    exercises = round(stretches * fraction / (1 - fraction))
    rng = np.random.default_rng([seed, 1])
    rows = np.empty((stretches + exercises, window), dtype=np.uint16)
    rows[:stretches] = np.resize(corpus, (stretches, window))  # np.resize begins again at the end
    text = enc.decode(corpus.tolist()).replace(EOT, "\n\n")
    for i, ids in enumerate(exercise_windows(rng, exercises, window, enc, text), start=stretches):
        assert len(ids) == window and ids[0] == enc.eot_token, (
            f"got {len(ids)} ids from {ids[:1]}, expected {window}"
        )
        rows[i] = ids
    print(f"packed {stretches:,} windows of text and {exercises:,} retrieval exercises")
    return np.append(
        rows[rng.permutation(len(rows))], np.uint16(enc.eot_token)
    )  # the last window's last target


# ---- needles

HAYSTACK = Path("data/pydocs/pydocs.txt")  # in the working folder, or else beside this program
BUDGET = {
    "gpt2": 128,
    "bytes": 512,
}  # tokens generated for each prompt, a part of its length; RULER's is 128
DEPTHS = [
    round(100 * i / 39) / 100 for i in range(40)
]  # of needles in an essay: RULER's, in whole percents
SENTENCE = 300  # characters at most: a longer one is cut at a space
JOINERS = {
    "noise": "\n",
    "essay": " ",
    "needles": "\n",
}  # what stands between two units of a haystack


class Task(NamedTuple):
    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"]
    value: Literal["numbers", "uuids"]
    keys: int = 1
    values: int = 1  # of each key; every value is told by a needle of its own
    queries: int = 1  # how many of the keys are asked


TASKS = {
    "niah_single_1": Task("noise", "words", "numbers"),
    "niah_single_2": Task("essay", "words", "numbers"),
    "niah_single_3": Task("essay", "words", "uuids"),
    "niah_multikey_1": Task("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Task("needles", "words", "numbers"),
    "niah_multikey_3": Task("needles", "uuids", "uuids"),
    "niah_multivalue": Task("essay", "words", "numbers", values=4),
    "niah_multiquery": Task("essay", "words", "numbers", keys=4, queries=4),
}

# RULER's texts to the letter: the prompt, and the beginning of the answer behind it; {kind} is number or uuid
PLURAL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {query} mentioned in the provided text?",
    " The special magic {kind}s for {query} mentioned in the provided text are",
)
SINGULAR = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
NOISE = FILLERS["passkey"].strip()  # RULER's five sentences are the passkey's

# A key of words is one of each, with a hyphen between them. A word is a stem and an end: few parts make as many keys as
# RULER has, and the same on every machine.
STEMS = """
amber apple ash axe bay bean bear bee bone bow bread brush button cake camp cart castle cave city clay clock cloud coal
coral corn cow cream crow day deck deer desert dragon dream dust earth east fern fig fire flame forest fox frog frost
fruit garden gold grain hail hammer hawk helm hill honey horse ice iron ivory knife lace lake lamp lemon lime lion maple
marsh mast mint mist moon moss mud night oak oil orange owl paper pearl pine plum raft rain raven rice river root
rose ruby sand sea seed shell silk silver smoke snow spring star steam steel storm stream sword vine wagon water wave
wheat wine winter wolf"""
NOUN_ENDS = """
bed bell bird boat book box bridge cap case coat craft cup door field fish flower fold ford gate glass guard hall hook
house land lane leaf light line lock mark mill path pin plate point pond port ring road rock row ship side song stem
stick stone top tower track tree wall way web well wheel wing work yard"""
ADJECTIVE_ENDS = "born bound free less like made proof ward"
ADJECTIVES = [a + b for a in STEMS.split() for b in ADJECTIVE_ENDS.split()]
NOUNS = [a + b for a in STEMS.split() for b in NOUN_ENDS.split()]


class Needle(NamedTuple):
    key: str
    value: str
    depth: float  # 0 to 1: of n units of haystack, int(n * depth) stand before it


class Sample(NamedTuple):
    prompt: str
    prefix: str  # the beginning of the answer, given to the model
    values: list[str]  # what is expected
    answer: str  # the same as text that goes on behind the prefix
    needles: list[Needle]  # in reading order
    tokens: list[int]  # of <|endoftext|>, prompt and prefix


def read_essay(file: str) -> list[str]:
    """The sentences of a text file (none named: HAYSTACK) with single spaces; blank lines end sentences too.

    Raises ValueError or OSError, in one sentence, for a file that is missing, no text or empty.
    """
    places = [Path(file)] if file else [HAYSTACK, Path(__file__).resolve().parent / HAYSTACK]
    if not (path := next((place for place in places if place.exists()), None)):
        command = "python prepare_fineweb.py --source=pydocs --retrieval_fraction=0.85"  # the quick start's data
        looked = " nor ".join(dict.fromkeys(str(place.absolute()) for place in places))
        raise ValueError(
            f"there is no {looked}; name a text with --haystack_file, or make the default one: {command}"
        )
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n", read_text(path))
    wrapped = (
        textwrap.wrap(" ".join(part.split()), SENTENCE, break_on_hyphens=False) for part in parts
    )
    return list(itertools.chain(*wrapped))


def draw(kind: str, rng: random.Random, used: set[str]) -> str:
    """A key or value that is not in `used`, which it joins."""
    if kind == "words":
        drawn = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    elif kind == "numbers":
        drawn = str(rng.randrange(10**6, 10**7))
    else:
        drawn = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if drawn in used:
        return draw(kind, rng, used)
    used.add(drawn)
    return drawn


def draw_needles(task: Task, rng: random.Random, used: set[str]) -> tuple[list[Needle], list[str]]:
    """The needles in reading order, and the keys that are asked; their keys and values join `used`."""
    keys = [draw(task.key, rng, used) for _ in range(task.keys)]
    told = rng.sample(keys * task.values, task.keys * task.values)
    depths = sorted(
        rng.sample(DEPTHS, len(told)) if task.haystack == "essay" else [rng.random() for _ in told]
    )
    needles = [
        Needle(key, draw(task.value, rng, used), depth)
        for key, depth in zip(told, depths, strict=True)
    ]
    return needles, rng.sample(keys, task.queries)


def needle_text(task: Task, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value[:-1], key=key, value=value)


def haystack(task: Task, rng: random.Random, used: set[str], essay: Sequence[str]) -> Iterator[str]:
    """Units without end: noise lines, the essay's sentences again and again, or needles without what is in `used`."""
    if task.haystack == "noise":
        return itertools.repeat(NOISE)
    if task.haystack == "essay":
        return itertools.cycle(essay)
    return (
        needle_text(task, *(draw(k, rng, set(used)) for k in (task.key, task.value)))
        for _ in itertools.count()
    )


def listed(names: list[str]) -> str:
    """a / a, and b / a, b, and c: as RULER joins its queries."""
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]


def build(
    task: Task, needles: list[Needle], asked: list[str], units: list[str], enc: tiktoken.Encoding
) -> Sample:
    """Hide the needles in these units and put the question behind them."""
    values = [needle.value for key in asked for needle in needles if needle.key == key]
    context = list(units)
    for needle in reversed(needles):  # from behind, so that the places before stay what they are
        context.insert(int(len(units) * needle.depth), needle_text(task, needle.key, needle.value))
    words = {
        "kind": task.value[:-1],
        "query": listed(asked),
        "context": JOINERS[task.haystack].join(context),
    }
    prompt, prefix = (text.format(**words) for text in (SINGULAR if len(values) == 1 else PLURAL))
    return Sample(
        prompt, prefix, values, f" {listed(values)}", needles, encode_document(enc, prompt + prefix)
    )


def make_sample(
    name: str,
    seed: int,
    index: int,
    length: int | None,
    enc: tiktoken.Encoding,
    essay: Sequence[str] = (),
) -> Sample:
    """Sample number `index` of a task, a pure function of its arguments; `essay` is what read_essay() returns.

    Tokens and the answer's BUDGET take at most `length`, and would take more with one more unit of haystack; length
    None: one unit. Raises ValueError if one unit does not fit. Differences from RULER:
    - <|endoftext|> stands before the prompt, as before every training document, and counts;
    - the budget is four times as large for bytes, since a GPT-2 token holds about four;
    - every sample is filled by itself, an essay by sentences of at most SENTENCE characters. RULER searches one number
      of units for all samples and shortens one that is too long, an essay by 500 words at a time, so that a prompt may
      fill little more than half of the length; where a length holds none it never ends;
    - the needles of every sample are shuffled anew; RULER has one permutation for all;
    - keys and values are all different, and a haystack of needles tells none of those asked, as RULER's by chance may;
    - the values of one key are expected in reading order (only the teacher-forced score sees it);
    - the essay is another, since RULER's are not free to copy, and so are the words: 912 x 6,840 as against its
      912 x 6,782 from a package, but built of parts, so that words of one stem look alike, and a key takes 5.5 GPT-2
      tokens as against 4.6.
    """
    task, rng, used = TASKS[name], random.Random(f"{name} {seed} {index}"), set()
    needles, asked = draw_needles(task, rng, used)
    more = haystack(task, rng, used, essay)
    units = [next(more)]
    sample = build(task, needles, asked, units, enc)
    if length is None:
        return sample
    room, tokens = length - BUDGET[enc.name], len(sample.tokens)
    if tokens > room:
        raise ValueError(
            f"{length:,} tokens cannot hold this {name}; it needs at least {tokens + BUDGET[enc.name]:,}"
        )
    while (
        tokens <= room
    ):  # count unit by unit to come near, then let the tokens of the whole text decide
        units.append(next(more))
        tokens += len(enc.encode_ordinary(JOINERS[task.haystack] + units[-1]))
    while len((sample := build(task, needles, asked, units, enc)).tokens) <= room:
        units.append(next(more))
    while len(sample.tokens) > room:
        units.pop()
        sample = build(task, needles, asked, units, enc)
    return sample


def shortest(
    name: str, seed: int, samples: int, enc: tiktoken.Encoding, essay: Sequence[str]
) -> int:
    """The least length in tokens, the answer's budget included, that holds all of a task's samples."""
    return BUDGET[enc.name] + max(
        len(make_sample(name, seed, i, None, enc, essay).tokens) for i in range(samples)
    )

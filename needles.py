"""Every prompt: the passkey test, the exercises of the training text, RULER's needle tasks.

Each is a pure function of its arguments, exact to the token.
"""

import itertools
import math
import random
import re
import textwrap
import unicodedata
import uuid
from collections.abc import Iterator, Sequence
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


class Wording(NamedTuple):
    """How the needle is told and asked for. The answer is " {key}"."""

    needle: str
    question: str


WORDINGS = {
    "passkey": Wording(
        "The pass key is {key}. Remember it. {key} is the pass key.",
        "What is the pass key? The pass key is",
    ),
    # for models trained on exercises, which have neither this sentence nor "secret" nor "number"
    "reworded": Wording(
        "Keep this in mind: the secret number is {key}. Do not lose {key}.",
        "Which secret number was given? The secret number is",
    ),
    # held out whole: no exercise has this shape or these words
    "vault": Wording("{key} opens the vault.", "The vault is opened by"),
}
FILLERS = {
    "passkey": "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    "There and back again. ",
    # in no exercise
    "unseen": "A boat drifts past the old mill. Three geese sleep on the bank. Nobody rings the "
    "bell. Far off a dog barks twice, then rain begins to fall on the tin roofs. ",
}


class Prompt(NamedTuple):
    tokens: list[int]  # <|endoftext|>, prompt, answer
    answer: int  # how many of the last tokens are the answer
    depth: float  # of the needle in the filler, 0 to 1


def prompt_text(key: int, wording: Wording, before: str = "", after: str = "") -> str:
    """Prompt and answer as one text, so that tokens span the borders as they do in training."""
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
    """A prompt of exactly `length` tokens, <|endoftext|> and answer included.

    The filler is repeated and cut where the length is reached, as in Landmark. The needle stands
    at `depth` (0 to 1) of it, between two of its words where a space is near.
    """
    minimum = shortest_prompt(enc, key, wording, description)
    if length < minimum:
        raise ValueError(
            f"a length of {length} tokens cannot hold the prompt; it needs at least {minimum}"
        )
    filler *= math.ceil(8 * length / len(filler))  # enough for eight characters a token
    question = len(enc.encode_ordinary(wording.question))
    answer = len(enc.encode_ordinary(f"{wording.question} {key}")) - question

    def build(chars: int, pad: str = "") -> Prompt:
        place = round(depth * chars)
        cut = filler.rfind(" ", max(0, place - 50), place) + 1 or place if depth < 1 else chars
        text = prompt_text(key, wording, description + filler[:cut], filler[cut:chars] + pad)
        return Prompt(encode_document(enc, text), answer, cut / max(1, chars))

    # Each bound is (characters, tokens). The next guess lies on the line through both.
    low, high, chars = (0, minimum), None, length - minimum
    while (high is None or high[0] - low[0] > 1) and chars <= len(filler):
        prompt = build(chars)
        tokens = len(prompt.tokens)
        if tokens == length:
            return prompt
        low, high = ((chars, tokens), high) if tokens < length else (low, (chars, tokens))
        a, m = low
        b, n = high or (2 * a + 2, 2 * m - minimum + 2)
        chars = a + max(1, min(b - a - 1, round((length - m) * (b - a) / (n - m))))
    # where one more character is several tokens too many, spaces fill the gap
    padded = (build(low[0], " " * spaces) for spaces in range(1, 17))
    if prompt := next((p for p in padded if len(p.tokens) == length), None):
        return prompt
    raise ValueError(f"no cut of the filler makes exactly {length} tokens; choose another length")


def describe(enc: tiktoken.Encoding, choice: str) -> str:
    """The paper's description of the task; auto: none for bytes, where it takes 167 tokens."""
    return DESCRIPTION if choice == "true" or choice == "auto" and enc.name != "bytes" else ""


def make_prompts(
    enc: tiktoken.Encoding,
    length: int,
    depths: int = 20,
    seeds: Sequence[int] = (1,),
    digits: int = 5,
    wording: str = "passkey",
    filler: str = FILLERS["passkey"],
    description: str = "auto",
) -> list[Prompt]:
    """The passkey test at one length, depth by depth and seed by seed."""
    least, about = 10 ** (digits - 1), describe(enc, description)
    rngs = [np.random.default_rng((seed, length)) for seed in seeds]
    keys = np.transpose([rng.integers(least, 10 * least, size=depths) for rng in rngs])
    return [
        passkey_prompt(enc, length, depth, int(key), WORDINGS[wording], filler, about)
        for depth, row in zip(np.linspace(0, 1, depths), keys, strict=True)
        for key in row
    ]


# ---- exercises

# Statements and questions of like and unlike shape, so that a model learns to look for what is
# asked and not for one sentence. The answer is " {key}".
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
EXERCISE_PASSKEYS = 0.4  # share of the exercises in the passkey's own wording
EXERCISE_PAIRS = 0.4  # share of the windows with two short exercises, if they fit, not a long one
EXERCISE_DIGITS = (3, 8)  # of the keys; half of those in the passkey's own wording have its five
HELD_OUT_WORDS = {"secret", "number", "vault", "opens", "opened"}  # in no name: for WORDINGS


def random_exercise(
    rng: np.random.Generator, window: int, corpus_text: str, words: list[str]
) -> dict:
    """Arguments of passkey_prompt but the length. Some have the passkey's own wording, the others
    ask for a name of two words. Half have the passkey's own filler, the others corpus text."""
    name = " ".join(words[rng.integers(len(words))] for _ in range(2))
    frame = EXERCISE_FRAMES[rng.integers(len(EXERCISE_FRAMES))]
    wording = Wording(*(text.replace("{name}", name) for text in frame))
    digits = int(rng.integers(EXERCISE_DIGITS[0], EXERCISE_DIGITS[1] + 1))
    if rng.random() < EXERCISE_PASSKEYS:
        wording, digits = WORDINGS["passkey"], 5 if rng.random() < 0.5 else digits
    begin = int(rng.integers(max(1, len(corpus_text) - 8 * window)))
    text = corpus_text[begin : begin + 8 * window]
    return {
        "depth": rng.random(),
        "key": int(rng.integers(10 ** (digits - 1), 10**digits)),
        "wording": wording,
        "filler": FILLERS["passkey"] if rng.random() < 0.5 else text,
    }


def name_words(text: str) -> list[str]:
    """The words that names are made of: a text's lower-case English ones or, if they are fewer, its
    words in any script. Of these the first 8 bytes, to be short in tokens. Without spaces, as in
    Chinese, a clause counts as a word."""
    plain, lower = set(re.findall(r"\b[a-z]{3,8}\b", text)), text.lower()
    # all but letters and the marks on them
    others = {ord(c): " " for c in set(lower) if unicodedata.category(c)[0] not in "LM"}
    clauses = [clause for clause in lower.translate(others).split() if len(clause) > 1]
    starts = {clause.encode()[:8].decode(errors="ignore") for clause in clauses}
    words = (plain if 2 * len(plain) >= len(starts) else starts) - HELD_OUT_WORDS
    if not words:
        raise ValueError(
            "the text has no words, of which exercises make names; use --retrieval_fraction=0"
        )
    return sorted(words)


def exercise_windows(
    rng: np.random.Generator, count: int, window: int, enc: tiktoken.Encoding, corpus_text: str
) -> Iterator[list[int]]:
    """`count` lists of `window` ids, each filled exactly by one long exercise or two short ones.

    An exercise is a document like the passkey test: filler, needle, filler, question, answer.
    """
    words = name_words(corpus_text)
    for _ in range(count):
        most = 2 if rng.random() < EXERCISE_PAIRS else 1
        chosen, room = [], window
        while len(chosen) < most:
            one = random_exercise(rng, window, corpus_text, words)
            least = shortest_prompt(enc, one["key"], one["wording"])
            if least > room:
                break
            chosen.append((least, one))
            room -= least
        if not chosen:
            raise ValueError(
                f"a window of {window} tokens cannot hold an exercise of {least}; "
                "set a larger --window"
            )
        # filler takes the room that is left
        shares = rng.multinomial(room, [1 / len(chosen)] * len(chosen)).tolist()
        pairs = zip(chosen, shares, strict=True)
        prompts = [passkey_prompt(enc, least + share, **one) for (least, one), share in pairs]
        yield [token for prompt in prompts for token in prompt.tokens]


def pack_windows(
    corpus: np.ndarray, enc: tiktoken.Encoding, window: int, fraction: float, seed: int
) -> np.ndarray:
    """Windows in random order: this fraction are exercises, the others cut the corpus in a row."""
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
    mixed = rows[rng.permutation(len(rows))]
    return np.append(mixed, np.uint16(enc.eot_token))  # the last window's last target


# ---- RULER

# The needle tasks of Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
# Language Models?" (arXiv 2404.06654)
HAYSTACK = Path("data/pydocs/pydocs.txt")  # in the working folder, or else beside this program
BUDGET = {"gpt2": 128, "bytes": 512}  # tokens generated, a part of a prompt's length; RULER's: 128
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # of needles in an essay: RULER's
SENTENCE = 300  # characters at most: a longer one is cut at a space
JOINERS = {"noise": "\n", "essay": " ", "needles": "\n"}  # between two units of a haystack


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

# RULER's texts to the letter: the prompt, and the beginning of the answer. {kind}: number or uuid
PLURAL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {query} mentioned in the provided text?",
    " The special magic {kind}s for {query} mentioned in the provided text are",
)
SINGULAR = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
NOISE = FILLERS["passkey"].strip()  # RULER's five sentences are the passkey's

# A key of words is an adjective, a hyphen and a noun, each a stem and an end: few parts make as
# many keys as RULER has, and the same on every machine.
STEMS = """
amber apple ash axe bay bean bear bee bone bow bread brush button cake camp cart castle cave city
clay clock cloud coal coral corn cow cream crow day deck deer desert dragon dream dust earth east
fern fig fire flame forest fox frog frost fruit garden gold grain hail hammer hawk helm hill
honey horse ice iron ivory knife lace lake lamp lemon lime lion maple marsh mast mint mist moon
moss mud night oak oil orange owl paper pearl pine plum raft rain raven rice river root rose ruby
sand sea seed shell silk silver smoke snow spring star steam steel storm stream sword vine wagon
water wave wheat wine winter wolf"""
NOUN_ENDS = """
bed bell bird boat book box bridge cap case coat craft cup door field fish flower fold ford gate
glass guard hall hook house land lane leaf light line lock mark mill path pin plate point pond
port ring road rock row ship side song stem stick stone top tower track tree wall way web well
wheel wing work yard"""
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
    answer: str  # the same as text that continues the prefix
    needles: list[Needle]  # in reading order
    tokens: list[int]  # of <|endoftext|>, prompt and prefix


def read_essay(file: str) -> list[str]:
    """The sentences of a text file (none named: HAYSTACK) with single spaces. Blank lines end
    sentences too."""
    places = [Path(file)] if file else [HAYSTACK, Path(__file__).resolve().parent / HAYSTACK]
    if not (path := next((place for place in places if place.exists()), None)):
        looked = " nor ".join(dict.fromkeys(str(place.absolute()) for place in places))
        raise ValueError(
            f"there is no {looked}; name a text with --haystack_file, or make the default one: "
            "python prepare_fineweb.py --source=pydocs --retrieval_fraction=0.85"
        )  # which makes the quick start's data
    parts = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", read_text(path))]
    wrapped = (textwrap.wrap(part, SENTENCE, break_on_hyphens=False) for part in parts)
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
    """The needles in reading order, and the keys that are asked. Keys and values join `used`."""
    keys = [draw(task.key, rng, used) for _ in range(task.keys)]
    told = rng.sample(keys * task.values, task.keys * task.values)
    essay = task.haystack == "essay"
    depths = sorted(rng.sample(DEPTHS, len(told)) if essay else [rng.random() for _ in told])
    pairs = zip(told, depths, strict=True)
    needles = [Needle(key, draw(task.value, rng, used), depth) for key, depth in pairs]
    return needles, rng.sample(keys, task.queries)


def needle_text(task: Task, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value[:-1], key=key, value=value)


def haystack(task: Task, rng: random.Random, used: set[str], essay: Sequence[str]) -> Iterator[str]:
    """Units without end: noise, the essay's sentences, or needles that are not in `used`."""
    if task.haystack == "noise":
        yield from itertools.repeat(NOISE)
    if task.haystack == "essay":
        yield from itertools.cycle(essay)
    while True:
        yield needle_text(task, *(draw(kind, rng, set(used)) for kind in (task.key, task.value)))


def join_names(names: list[str]) -> str:
    """a / a, and b / a, b, and c: as RULER joins its queries."""
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]


def hide(
    task: Task, needles: list[Needle], asked: list[str], units: list[str], enc: tiktoken.Encoding
) -> Sample:
    """Hide the needles in these units and put the question after them."""
    values = [needle.value for key in asked for needle in needles if needle.key == key]
    context = list(units)
    for needle in reversed(needles):  # from the end, so that the places before stay what they are
        context.insert(int(len(units) * needle.depth), needle_text(task, needle.key, needle.value))
    text = JOINERS[task.haystack].join(context)
    words = {"kind": task.value[:-1], "query": join_names(asked), "context": text}
    prompt, prefix = (part.format(**words) for part in (SINGULAR if len(values) == 1 else PLURAL))
    tokens = encode_document(enc, prompt + prefix)
    return Sample(prompt, prefix, values, f" {join_names(values)}", needles, tokens)


def make_sample(
    name: str,
    seed: int,
    index: int,
    length: int | None,
    enc: tiktoken.Encoding,
    essay: Sequence[str] = (),
) -> Sample:
    """Sample number `index` of a task. `essay` is what read_essay() returns.

    Its tokens and the answer's BUDGET take at most `length`, and would take more with another unit
    of haystack. Length None: one unit. Differences from RULER:
    - <|endoftext|> stands before the prompt, as before every training document, and counts;
    - the budget is four times as large for bytes, since a GPT-2 token holds about four;
    - every sample is filled by itself, an essay by sentences of at most SENTENCE characters. RULER
      searches one number of units for all samples and shortens one that is too long, an essay by
      500 words at a time, so that a prompt may fill little more than half of the length; where a
      length holds none it never ends;
    - every sample shuffles its needles itself; RULER has one permutation for all;
    - keys and values are all different, and a haystack of needles tells none of those asked, as
      RULER's by chance may;
    - the values of one key are expected in reading order (only the teacher-forced score sees it);
    - the essay is another, since RULER's are not free to copy, and so are the words: 912 x 6,840
      and not 912 x 6,782 from a package, but built of parts, so that words of one stem look alike,
      and a key takes 5.5 GPT-2 tokens where RULER's takes 4.6.
    """
    task, rng, used = TASKS[name], random.Random(f"{name} {seed} {index}"), set()
    needles, asked = draw_needles(task, rng, used)
    more = haystack(task, rng, used, essay)
    units = [next(more)]
    sample = hide(task, needles, asked, units, enc)
    if length is None:
        return sample
    room, tokens = length - BUDGET[enc.name], len(sample.tokens)
    if tokens > room:
        needs = tokens + BUDGET[enc.name]
        raise ValueError(f"{length:,} tokens cannot hold this {name}; it needs at least {needs:,}")
    # count unit by unit to come near, then let the tokens of the whole text decide
    while tokens <= room:
        units.append(next(more))
        tokens += len(enc.encode_ordinary(JOINERS[task.haystack] + units[-1]))
    while len((sample := hide(task, needles, asked, units, enc)).tokens) <= room:
        units.append(next(more))
    while len(sample.tokens) > room:
        units.pop()
        sample = hide(task, needles, asked, units, enc)
    return sample


def shortest(
    name: str, seed: int, samples: int, enc: tiktoken.Encoding, essay: Sequence[str]
) -> int:
    """The least length in tokens, the answer's budget included, that holds all samples."""
    made = (make_sample(name, seed, i, None, enc, essay) for i in range(samples))
    return BUDGET[enc.name] + max(len(sample.tokens) for sample in made)

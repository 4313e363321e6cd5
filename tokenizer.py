"""
Names to tiktoken encodings.

"gpt2"   the BPE of GPT-2, 50,257 ids; tiktoken fetches its two files at the first use
"bytes"  one id a byte of UTF-8 and <|endoftext|> = 256: 257 ids, nothing to download, a model small enough for a laptop
"""

import re
from collections.abc import Iterator

import tiktoken

EOT = "<|endoftext|>"

# Bytes are never merged, so how the text is cut into pieces changes no id: 64 characters was fastest.
BYTES_PATTERN = r"(?s:.{1,64})"

# tiktoken's regex overflows its stack inside runs of about a million spaces (a panic that `except Exception` misses),
# and merging one huge piece is slow. No text written by a person has such a run, so its cut changes no usual document.
LONG_RUN = re.compile(r"\s{4096}|\S{4096}")


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The encoding called `name`: "gpt2" or "bytes"."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=BYTES_PATTERN, mergeable_ranks=ranks, special_tokens={EOT: 256})
    if name == "gpt2":
        return load_gpt2()
    raise ValueError(f'unknown tokenizer {name!r}: expected "gpt2" or "bytes"')


def load_gpt2() -> tiktoken.Encoding:
    """GPT-2's BPE from tiktoken's cache, or from the network."""
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a damaged download is a ValueError
        raise OSError(
            "the gpt2 tokenizer's files are not cached and could not be fetched: connect to the network once, "
            "or set TIKTOKEN_CACHE_DIR to a folder that holds them"
        ) from error


def encode_document(enc: tiktoken.Encoding, text: str) -> list[int]:
    """<|endoftext|> and the ids of `text`. The marker's characters inside the text are encoded as ordinary text."""
    ids = [enc.eot_token]
    for piece in split_long_runs(replace_surrogates(text)):
        ids += enc.encode_ordinary(piece)
    return ids


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs and put U+FFFD for lone ones, which UTF-8 cannot hold (JSON escapes can produce both)."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def split_long_runs(text: str) -> Iterator[str]:
    """Pieces of `text`, cut inside very long runs of spaces or of non-spaces; joined they are `text`."""
    start = 0
    for run in LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]

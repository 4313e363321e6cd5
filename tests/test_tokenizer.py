from pathlib import Path

import pytest
import requests
import tiktoken

from data import EOT, LONG_RUN, encode_document, get_tokenizer

TEXTS = {
    "empty": "",
    "newlines": "a\nb\r\n\n\tc  d \n",
    "separators": "a\u2028b\u2029c\x85d\x0be\x1cf\x00g",
    "unicode": "naïve 漢字 \U0001f600 e\u0301 \ufeff \U0010ffff",
    "marker": f"one {EOT} two",
    "spaces": " " * 200_000,
    "letters": "a" * 200_000,
    "panic": " " * 1_500_000 + "x",  # tiktoken alone overflows its stack here
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_decoding_restores_the_text(enc, text):
    ids = encode_document(enc, text)
    assert ids[0] == enc.eot_token
    assert enc.eot_token not in ids[1:], "the marker inside a text is no boundary"
    assert enc.decode(ids[1:]) == text


def test_surrogates_are_joined_or_replaced(enc):
    text = "a\ud800b \udc00 \ud83d\ude00"
    assert enc.decode(encode_document(enc, text)[1:]) == "a\ufffdb \ufffd \U0001f600"


def test_usual_text_is_encoded_as_by_tiktoken(enc):
    text = Path(__file__).read_text(encoding="utf-8")
    assert encode_document(enc, text) == [enc.eot_token, *enc.encode_ordinary(text)]


def test_bytes_are_their_own_ids():
    enc = get_tokenizer("bytes")
    assert enc.n_vocab == 257 and enc.eot_token == 256
    assert enc.encode_ordinary(TEXTS["unicode"]) == list(TEXTS["unicode"].encode())
    assert enc.encode(EOT, allowed_special="all") == [256]


@pytest.mark.parametrize("enc", ["gpt2"], indirect=True)
def test_gpt2_ids(enc):
    assert enc.n_vocab == 50257 and enc.eot_token == 50256
    assert enc.encode_ordinary("hello world") == [31373, 995]


def test_only_long_runs_are_cut():
    assert not LONG_RUN.search("a" * 4095 + " b")
    assert len(LONG_RUN.findall("x " + "a" * 10_000)) == 2


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="unknown tokenizer 'gpt4'"):
        get_tokenizer("gpt4")


def test_gpt2_without_files_and_network_says_what_to_do(monkeypatch, tmp_path):
    def no_network(*args, **kwargs):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # an earlier test may have loaded it
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(OSError, match="connect to the network once, or set TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")

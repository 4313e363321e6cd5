"""course/README.md speaks of functions that exist, and its commands of tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "course" / "README.md").read_text(encoding="utf-8")


def test_every_function_is_where_the_page_says():
    found = re.findall(r"((?:`[\w.]+`,\s+|`[\w.]+`\s+and\s+)*`[\w.]+`)\s+\((\w+\.py)\)", PAGE)
    assert len(found) >= 8
    for names, file in found:
        text = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"^ *(def|class) {part}\b|^{part} = ", text, re.M), (
                    f"no {name} in {file}"
                )


def test_every_word_of_every_command_selects_a_test():
    commands = re.findall(
        r'^pytest -q (?:--tb=line )?--mine=mine.py (.+) -k "?([\w ]+)"?$', PAGE, re.M
    )
    assert len(commands) == PAGE.count("\n```\npytest") - 1 == 8
    for files, words in commands:
        pattern = re.sub(
            r"\{(.*)\}", lambda m: f"({m[1].replace(',', '|')})", files.replace(" ", "|")
        )
        chosen = [f for f in (ROOT / "tests").iterdir() if re.fullmatch(pattern, f"tests/{f.name}")]
        text = "".join(f.read_text(encoding="utf-8") for f in chosen)
        for word in words.split(" or "):
            assert re.search(rf"^def test_\w*{word}", text, re.M), f"{word} selects no test"

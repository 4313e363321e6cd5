"""A config file and --key=value words become checked dataclasses; --help lists every key.

A config class is a plain dataclass. The comment behind a field is its documentation, and --help prints it:

    n_layer: int = 12  # number of Transformer blocks

Later wins: the default in the class, the base of the config file, the config file, the command line from left to right.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import shlex
import signal
import sys
import textwrap
import tokenize
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

TYPES = {
    int: "an int",
    float: "a finite number",
    str: "a string",
    bool: "true or false",
}  # as errors name them
BOOLS = {"true": True, "1": True, "false": False, "0": False}
HELP_WIDTH, HELP_COLUMN = 100, 32  # in characters; the meanings begin at HELP_COLUMN

# The scripts beside this file import it first. From here on Ctrl-C ends them without a traceback of
# whatever they import next; run() takes over.
script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
ours = script.resolve().parent == Path(__file__).resolve().parent
if ours and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def fail(message: str, status: int = 2) -> NoReturn:
    """End the program as a user's mistake does: one sentence on stderr, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def run(main: Callable[[], None]) -> None:
    """Call a script's main(). Ctrl-C, a reader that has gone (`| head`), a full disk and a folder of
    another user end it without a traceback."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # set above, for the time of the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console that lacks a character shows "?"
        sys.stdout.reconfigure(errors="replace")
    try:
        with user_errors((OSError,)):
            main()
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # ends like Ctrl-C: finished work is on disk
        raise SystemExit(130) from None
    finally:
        say("", end="")


def say(line: str, end: str = "\n") -> bool:
    """Print at once. False if the output has nowhere to go any more: then the rest is dropped."""
    try:
        print(line, end=end, flush=True)
    except OSError:  # would come again when Python flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def check_folder(path: Path) -> None:
    """ValueError if no folder can be made or written to at `path`. Makes nothing."""
    there = next((p for p in (path, *path.parents) if p.exists()), None)
    if there is not None and not there.is_dir():
        raise ValueError(f"{there} is a file where a folder is needed; choose another path")
    if there is not None and not os.access(there, os.W_OK):
        raise ValueError(f"{there} may not be written to; choose another path")


@contextlib.contextmanager
def user_errors(kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Turn errors of these kinds into fail(). Wrap only what reads a user's input: elsewhere a
    ValueError is our bug."""
    try:
        yield
    except BrokenPipeError:  # no mistake: run() ends quietly
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.filename is not None:
            fail(f"{error.filename}: {(error.strerror or type(error).__name__).lower()}")
        fail(" ".join(str(error).splitlines()) or type(error).__name__)


def field_types(classes: list[type]) -> dict[str, Any]:
    """Field name -> type, over all the classes."""
    kinds: dict[str, Any] = {}
    for cls in classes:
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            name, kind = f"{cls.__name__}.{field.name}", hints[field.name]
            item = get_args(kind)[0] if get_origin(kind) is tuple else kind
            assert item in TYPES or get_origin(kind) is Literal, f"{name}: unsupported type {kind}"
            assert field.default is not dataclasses.MISSING, (
                f"{name}: a default is needed, and no factory for it"
            )
            assert field.name not in {*kinds, "base", "help"}, f"{name}: the name is taken"
            kinds[field.name] = kind
    return kinds


def expected(kind: Any) -> str:
    """How an error names a type."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return (
        f"{get_args(kind)[0].__name__}s separated by commas"
        if get_origin(kind) is tuple
        else TYPES[kind]
    )


def fits(value: Any, kind: Any) -> bool:
    """Is a Python value of this field type?"""
    if get_origin(kind) is tuple:
        return all(fits(item, get_args(kind)[0]) and item != "" for item in value)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:  # the comparison is false for nan, inf and ints that no float can hold
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind  # not isinstance, to which a bool is an int


def check(value: Any, kind: Any) -> Any:
    """The value as the field wants it: a list or a lone value becomes a tuple, an int a float."""
    if get_origin(kind) is tuple and not isinstance(value, tuple):
        value = tuple(value) if isinstance(value, list) else (value,)
    if not fits(value, kind):
        raise ValueError(f"expected {expected(kind)}")
    if kind is str:
        return expand(value)
    if get_origin(kind) is tuple:
        return tuple(check(item, get_args(kind)[0]) for item in value)
    return float(value) if kind is float else value


def expand(text: str) -> str:
    """A path in the home folder, written out: shells leave the one in --key=~/path alone."""
    return os.path.expanduser(text) if text[:2] in ("~", "~/", "~\\") else text


def from_text(text: str, kind: Any) -> Any:
    """The Python value that a command-line word spells; the word itself where it spells none, for check() to refuse."""
    if get_origin(kind) is tuple:
        return (
            tuple(from_text(part.strip(), get_args(kind)[0]) for part in text.split(","))
            if text
            else ()
        )
    if kind is bool:
        return BOOLS.get(text.lower(), text)
    try:
        if (
            kind is int and "e" in text.lower() and float(text).is_integer()
        ):  # 1e6 is a million steps, 1.0 is a slip
            return int(float(text))
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def unknown_key(key: str, kinds: dict[str, Any]) -> ValueError:
    """The error that names the nearest key."""
    nearest = difflib.get_close_matches(key, kinds, n=1, cutoff=0.5)
    return ValueError(
        f"unknown key '{key}'; " + (f"did you mean '{nearest[0]}'?" if nearest else "see --help")
    )


def execute(path: Path) -> dict[str, Any]:
    """The names that a config file leaves behind; an error in it is told as one sentence with its line number."""
    source = path.read_bytes()
    namespace: dict[str, Any] = {"__file__": str(path)}
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), namespace)
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        text = (
            error.msg if isinstance(error, SyntaxError) else error
        )  # str() would repeat the file and the line
        raise ValueError(f"{path}, line {line or '?'}: {type(error).__name__}: {text}") from error
    return namespace


def load_file(path: Path, kinds: dict[str, Any], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The checked values of a config file on top of its base's; `above` are the files whose base this is."""
    if path.resolve() in [file.resolve() for file in above]:
        raise ValueError(
            f"base goes in a circle: {' -> '.join(map(str, (*above, path)))}; remove one of them"
        )
    names = execute(path)
    values: dict[str, Any] = {}
    if "base" in names:
        base = names.pop("base")
        if not isinstance(base, str) or not (path.parent / base).is_file():
            raise ValueError(
                f"{path}: base = {base!r}: expected the path of a config file, relative to this one"
            )
        values = load_file(path.parent / base, kinds, (*above, path))
    for key, value in names.items():
        if key.startswith("_") or isinstance(value, ModuleType):
            continue
        if key not in kinds:
            raise ValueError(f"{path}: {unknown_key(key, kinds)}")
        try:
            values[key] = check(value, kinds[key])
        except ValueError as error:
            raise ValueError(f"{path}: {key} = {value!r}: {error}") from None
    return values


def read_option(word: str, following: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """One --key=value; `following` is the word after it, to explain what to write instead of --key value."""
    key, equals, text = word.removeprefix("--").partition("=")
    if key not in kinds:
        raise ValueError(f"{word}: {unknown_key(key, kinds)}")
    if equals:
        try:
            return {key: check(from_text(text, kinds[key]), kinds[key])}
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
    if kinds[key] is bool and following.lower() not in BOOLS:
        return {key: True}
    value = "VALUE" if following.startswith("--") else following or "VALUE"
    raise ValueError(
        f"{word}: expected {expected(kinds[key])} behind an equals sign; write {word}={value}"
    )


def parse(
    classes: list[type], argv: list[str], doc: str | None, positional: str | None = None
) -> tuple[list[Any], Any]:
    """One instance per dataclass, and what the words without dashes say.

    argv has no program name; doc is the script's docstring. positional "config": at most one word, a config file, is
    allowed, and its path or None is returned; another name, such as "runs": any number, returned as a list; None: none.
    A user's mistake is told in one sentence and exits with status 2; --help exits with status 0.
    """
    kinds = field_types(classes)
    wants_help = "--help" in argv or "-h" in argv
    words = [expand(word) for word in argv if not word.startswith("-")]
    options: dict[str, Any] = {}
    with user_errors():
        for word, following in zip(argv, [*argv, ""][1:], strict=True):
            if word.startswith("-") and not wants_help:
                options.update(read_option(word, following, kinds))
        if len(words) > {None: 0, "config": 1}.get(positional, len(words)):
            wanted = "at most one config file and" if positional else "only"
            raise ValueError(f"{' '.join(words)}: expected {wanted} --key=value")
        values = load_file(Path(words[0]), kinds) if positional == "config" and words else {}
    if wants_help:
        print(help_text(classes, kinds, values, doc, positional))
        raise SystemExit(0)
    values.update(options)
    own = [{field.name for field in dataclasses.fields(cls)} & values.keys() for cls in classes]
    with user_errors():  # a __post_init__ may refuse a combination of values
        instances = [
            cls(**{key: values[key] for key in keys})
            for cls, keys in zip(classes, own, strict=True)
        ]
    return instances, {None: None, "config": words[0] if words else None}.get(positional, words)


def meanings(cls: type) -> dict[str, str]:
    """Field name -> the comment that begins behind the field and goes on in comment-only lines directly below it."""
    found = meanings(cls.__base__) if dataclasses.is_dataclass(cls.__base__) else {}
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            row, texts = node.end_lineno, []
            while row in comments and (not texts or comments[row].line.lstrip().startswith("#")):
                texts.append(comments[row].string.lstrip("#").strip())
                row += 1
            found[node.target.id] = " ".join(texts)
    return found


def help_entry(key: str, kind: Any, default: Any, meaning: str) -> str:
    """One key: the word that sets it to its default, (its type), its meaning."""
    text = ",".join(map(str, default)) if get_origin(kind) is tuple else str(default)
    head = f"  --{key}={text.lower() if kind is bool else shlex.quote(text)}"
    margin = " " * HELP_COLUMN
    body = f"({expected(kind) if get_origin(kind) else kind.__name__}) {meaning}"
    body = textwrap.fill(
        body, HELP_WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
    return head + (body[len(head) :] if len(head) < HELP_COLUMN - 1 else "\n" + body)


def help_text(
    classes: list[type],
    kinds: dict[str, Any],
    values: dict[str, Any],
    doc: str | None,
    positional: str | None,
) -> str:
    """All that --help prints; `values` come from a config file and stand in for the defaults."""
    words = {None: "", "config": "[CONFIG.py] "}.get(positional, f"[{positional} ...] ")
    blocks = [
        textwrap.fill(inspect.cleandoc(doc or "").split("\n\n")[0], HELP_WIDTH),
        f"usage: python {Path(sys.argv[0]).name} {words}[--key=value ...]",
        "Each key with its default, (its type) and its meaning; for a bool, --key means --key=true.",
    ]
    for cls in classes:
        comments, lines = meanings(cls), [cls.__name__]
        for field in dataclasses.fields(cls):
            default = values.get(field.name, field.default)
            lines.append(help_entry(field.name, kinds[field.name], default, comments[field.name]))
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block)

"""A config file and --key=value words become checked dataclasses; --help lists every key.

A config class is a plain dataclass. The comment after a field is what --help says about it:

    n_layer: int = 12  # number of blocks

A config file is Python that assigns to such names; `base = "other.py"` takes over another file's.
Later wins: the default in the class, the base, the config file, the command line.
Every mistake of a user is one sentence on stderr and the exit status 2.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

TYPES = {int: "an int", float: "a finite number", str: "a string", bool: "true or false"}
BOOLS = {"true": True, "1": True, "false": False, "0": False}

# The scripts beside this file import it first. From here on Ctrl-C ends them without a traceback of
# whatever they import next; run() takes over.
script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
ours = script.resolve().parent == Path(__file__).resolve().parent
if ours and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# ---- the end of a program


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def run(main: Callable[[], None]) -> None:
    """Call a script's main(). Ctrl-C, a closed pipe (`| head`), a full disk and a folder of another
    user end it without a traceback."""
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
    """Print at once. False if nobody reads the output any more: then the rest is dropped."""
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


# ---- values


def describe(kind: Any) -> str:
    """A field's type in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return f"{get_args(kind)[0].__name__}s separated by commas"
    return TYPES[kind]


def read_word(text: str, kind: Any) -> Any:
    """The value that text on the command line spells. If it spells none, the text itself."""
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return [read_word(part.strip(), item) for part in text.split(",")] if text else []
    if kind is bool:
        return BOOLS.get(text.lower(), text)
    try:
        if kind is int and "e" in text.lower() and float(text).is_integer():
            return int(float(text))  # 1e6 is a million steps; 1.0 would be a slip
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def fits(value: Any, kind: Any) -> bool:
    """Is a Python value of this type, which is no tuple?"""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:  # the comparison is false for nan, inf and ints that no float can hold
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind  # not isinstance, to which a bool is an int


def check(value: Any, kind: Any, source: str) -> Any:
    """The value as a field of this type holds it; `source` is where a user wrote it."""
    is_tuple = get_origin(kind) is tuple
    item = get_args(kind)[0] if is_tuple else kind
    values = value if is_tuple and isinstance(value, list | tuple) else [value]
    if not all(fits(v, item) for v in values) or is_tuple and "" in values:
        raise ValueError(f"{source}: expected {describe(kind)}")
    # an int is a float too; and shells leave the ~ in --key=~/path alone
    convert = {float: float, str: os.path.expanduser}.get(item, lambda v: v)
    return tuple(map(convert, values)) if is_tuple else convert(value)


def unknown_key(source: str, key: str, kinds: dict[str, Any]) -> ValueError:
    nearest = difflib.get_close_matches(key, kinds, n=1, cutoff=0.5)
    advice = f"did you mean '{nearest[0]}'?" if nearest else "see --help"
    return ValueError(f"{source}: unknown key '{key}'; {advice}")


# ---- a config file


def execute(path: Path) -> dict[str, Any]:
    """The names that a config file leaves. ValueError with the line where it fails."""
    source, names = path.read_bytes(), {"__file__": str(path)}
    try:
        exec(compile(source, str(path), "exec"), names)
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        calls = [c for c in traceback.extract_tb(error.__traceback__) if c.filename == str(path)]
        line = calls[-1].lineno if calls else getattr(error, "lineno", "?")
        text = getattr(error, "msg", error)  # a SyntaxError's str() repeats the file and the line
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {text}") from error
    return names


def read_file(path: Path, kinds: dict[str, Any], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A config file's values on top of its base's; `above` are the files based on this one."""
    if path.resolve() in above:
        raise ValueError(f"{path}: base goes in a circle; remove one of its bases")
    kinds, values = kinds | {"base": str}, {}
    for key, value in execute(path).items():
        if key.startswith("_") or isinstance(value, ModuleType):
            continue
        if key not in kinds:
            raise unknown_key(str(path), key, kinds)
        values[key] = check(value, kinds[key], f"{path}: {key} = {value!r}")
    if "base" in values:
        base = path.parent / values.pop("base")
        values = read_file(base, kinds, (*above, path.resolve())) | values
    return values


# ---- the command line


def meanings(cls: type) -> dict[str, str]:
    """Field name -> the comment after it, with the comment lines directly below."""
    texts = meanings(cls.__base__) if dataclasses.is_dataclass(cls.__base__) else {}
    source = textwrap.dedent(inspect.getsource(cls))
    lines = [line.strip() for line in source.split("\n")]
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            comment = lines[node.end_lineno - 1].partition("  # ")[2]
            below = itertools.takewhile(lambda line: line[:1] == "#", lines[node.end_lineno :])
            texts[node.target.id] = " ".join([comment, *(line.strip("# ") for line in below)])
    return texts


class Formatter(argparse.HelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        return f"{action.option_strings[0]}={action.metavar}"  # argparse has a space there


def make_parser(classes: list[type], doc: str | None, words: str, values: dict[str, Any]):
    """One option per field, a group per class. `values` take the place of the fields' defaults."""
    parser = argparse.ArgumentParser(
        usage=f"python {Path(sys.argv[0]).name} {words}[--key=value ...]",
        description=(doc or "").split("\n\n")[0],
        formatter_class=Formatter,
        epilog="Each key stands with its default. --key alone means --key=true.",
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    parser.error = lambda message: fail(f"{message}; write --key=value")
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    for cls in classes:
        group, texts = parser.add_argument_group(cls.__name__), meanings(cls)
        for key, kind in get_type_hints(cls).items():
            default = values.get(key, getattr(cls, key))
            default = ",".join(map(str, default)) if get_origin(kind) is tuple else str(default)
            group.add_argument(
                f"--{key}",
                metavar=default.lower() if kind is bool else shlex.quote(default),
                help=f"({describe(kind)}) {texts[key]}".replace("%", "%%"),
            )
    return parser


def parse(
    classes: list[type], argv: list[str], doc: str | None, positional: str | None = None
) -> tuple[list[Any], list[str]]:
    """One instance per dataclass, and the words that are no options.

    argv has no program name; doc is the script's docstring. positional allows words and names them
    in --help: "config" is at most one, a config file that is read here.
    """
    usage = {None: "", "config": "[CONFIG.py] "}.get(positional, f"[{positional} ...] ")
    kinds = {key: kind for cls in classes for key, kind in get_type_hints(cls).items()}
    flags = [f"--{key}" for key, kind in kinds.items() if kind is bool]
    argv = [
        f"{word}=true" if word in flags and following.lower() not in BOOLS else word
        for word, following in itertools.zip_longest(argv, argv[1:], fillvalue="")
    ]
    given, rest = make_parser(classes, doc, usage, {}).parse_known_args(argv)
    given, words = vars(given), [os.path.expanduser(x) for x in rest if not x.startswith("-")]
    wants_help = given.pop("help", False)
    with user_errors():
        for word in rest:
            if word.startswith("-") and not wants_help:
                raise unknown_key(word, word.partition("=")[0].removeprefix("--"), kinds)
        if len(words) > {None: 0, "config": 1}.get(positional, len(words)):
            wanted = "at most one config file and" if positional else "only"
            raise ValueError(f"{' '.join(words)}: expected {wanted} --key=value")
        values = read_file(Path(words[0]), kinds) if positional == "config" and words else {}
        for key, text in given.items():
            values[key] = check(read_word(text, kinds[key]), kinds[key], f"--{key}={text}")
        if wants_help:
            print(make_parser(classes, doc, usage, values).format_help(), end="")
            raise SystemExit(0)
        instances = [
            cls(**{key: values[key] for key in get_type_hints(cls) if key in values})
            for cls in classes
        ]
    return instances, words

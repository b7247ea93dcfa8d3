r"""Values in call formats without types: text if a string is meant, and JSON otherwise.

    <parameter=city>\nRome\n</parameter>\n<parameter=nights>\n2\n</parameter>\n

A text is read by the types that its schema allows (`types_of`, `read_value`), and a grammar allows
the texts that are read as a valid value (`value_grammar`). A string that reads as a value of
another allowed type cannot be written in such a format, so the grammar does not allow it: "5" for
a string or an integer, "null" for an optional string. Beside lists, objects and numbers with
bounds, a string cannot begin as these do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import unquote

from tuner.encoding import json_text, kept_json
from tuner.engines.grammar_text import compile_limits
from tuner.gateway.families.literals import DECODER, Literals
from tuner.gateway.request_error import Path, RequestError, shown

# Reading.

Schema = Any  # a mapping, True or False; anything where a request is wrong
Types = frozenset[str]

_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_EXPONENT = r"(?:[eE][+-]?[0-9]+)?"
# How the text of a type looks, in regular expressions that Python and llguidance share. Only such
# text is read as the type.
_SHAPES = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": rf"{_INTEGER}(?:\.0+)?{_EXPONENT}",
    "number": rf"{_INTEGER}(?:\.[0-9]+)?{_EXPONENT}",
    "array": r"\[(?s:.*)\]",
    "object": r"\{(?s:.*)\}",
}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def read_value(text: str, types: Types | None) -> str:
    """The value of a text, as JSON text.

    JSON of an allowed type stays as the model wrote it, and Python's notation of one is written as
    JSON, as templates write both. Everything else is a string.

    Args:
        text: The text between the value's tags.
        types: The allowed types from `types_of`; None for text alone.
    """
    written = text.strip(" \t\n\r")
    for name in (types or frozenset()) & _SHAPES.keys():
        found = _json_of(written) if re.fullmatch(_SHAPES[name], written) else None
        if found is not None and type_of(DECODER.decode(found)) in _CONTAINED[name]:
            return found
    return kept_json(text)


def _json_of(text: str) -> str | None:
    """JSON, or a value in Python's notation as JSON; None for other text."""
    text = _WORDS.get(text, text)
    try:
        DECODER.decode(text)
    except RecursionError:
        return None
    except ValueError:
        literals = Literals(text, python=True, words=False)
        try:
            value, end = literals.value(0)
        except ValueError:
            return None
        return kept_json(value) if end == len(text) else None
    return text


JSON_TYPES: Types = frozenset({*_SHAPES, "string"})
_CONTAINED: Mapping[str, Types] = {
    **{name: frozenset({name}) for name in JSON_TYPES},
    "number": frozenset({"number", "integer"}),
}


def type_of(value: Any) -> str:
    """The narrowest JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def types_of(schema: Schema, root: Schema) -> Types | None:
    """The JSON types that a schema allows; None if it does not restrict them.

    Args:
        schema: A schema.
        root: The schema that it is part of, in which references are looked up.
    """
    try:
        return _types(schema, root, {})
    except RecursionError:
        return None


def _types(schema: Schema, root: Schema, known: dict[str, Types | None]) -> Types | None:
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping):
        return None
    limits: list[Types | None] = []
    if (declared := _declared(schema)) is not None:
        limits.append(frozenset().union(*(_CONTAINED.get(name, {name}) for name in declared)))
    limits += [frozenset(map(type_of, words)) for words in _word_lists(schema)]
    limits += [_types(inner, root, known) for inner in _listed(schema, "allOf")]
    for options in _unions(schema):
        branches = [_types(inner, root, known) for inner in options]
        limits.append(None if None in branches else frozenset().union(*filter(None, branches)))
    if (reference := _reference(schema)) is not None:
        if reference not in known:
            known[reference] = frozenset()  # of a union that contains itself: the other branches
            known[reference] = _types(resolved(reference, root), root, known)
        limits.append(known[reference])
    stated = [limit for limit in limits if limit is not None]
    return frozenset.intersection(*stated) if stated else None


# Parts of a schema. Requests may have anything in these places.


def _declared(schema: Mapping[str, Any]) -> list[str] | None:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    return [x for x in names if isinstance(x, str)] if isinstance(names, list) else None


def _word_lists(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    if isinstance(schema.get("enum"), list):
        yield schema["enum"]
    if "const" in schema:
        yield [schema["const"]]


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _unions(schema: Mapping[str, Any]) -> list[list[Any]]:
    # In `json_schema`, the branches of a `oneOf` exclude each other.
    return [options for key in ("anyOf", "oneOf") if (options := _listed(schema, key))]


def _reference(schema: Mapping[str, Any]) -> str | None:
    found = schema.get("$ref")
    return found if isinstance(found, str) else None


def resolved(reference: str, root: Schema) -> Schema:
    """The schema that a reference within `root` names; None if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = root
    for part in unquote(reference).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and part.isdigit() and int(part) < len(target):
            target = target[int(part)]
        else:
            target = target.get(part) if isinstance(target, Mapping) else None
    return target


def items_of(schema: Schema, root: Schema) -> Schema:
    """The schema of an array's items."""
    found = [part["items"] for part in _parts(schema, root) if "items" in part]
    return {"allOf": found} if found else True


@dataclass(frozen=True)
class Parameters:
    """The parameters of a tool.

    Attributes:
        named: Schemas of those with a name, in the order of the tool's schema.
        required: Names of those that every call has.
        other: Schema of any others; False if there are none, or none are described.
    """

    named: Mapping[str, Schema]
    required: frozenset[str]
    other: Schema

    def types_of(self, name: str, root: Schema) -> Types | None:
        """The JSON types of a parameter; None if they are not restricted."""
        return types_of(self.named.get(name, self.other), root)


def parameters_of(schema: Schema, root: Schema) -> Parameters:
    """The parameters by a tool's schema, including what it refers to and combines."""
    named: dict[str, list[Schema]] = {}
    required: list[str] = []
    other: Schema = True
    closed = False
    for part in _parts(schema, root):
        properties = part.get("properties")
        for name, one in (properties if isinstance(properties, Mapping) else {}).items():
            named.setdefault(name, []).append(one)
        required += [name for name in _listed(part, "required") if isinstance(name, str)]
        other = part.get("additionalProperties", True) if other is True else other
        closed = closed or "properties" in part
    for name in required:
        named.setdefault(name, [other])
    return Parameters(
        {name: many[0] if len(many) == 1 else {"allOf": many} for name, many in named.items()},
        frozenset(required),
        False if other is True and closed else other,
    )


def _parts(schema: Schema, root: Schema) -> Iterator[Mapping[str, Any]]:
    """The schemas that all hold where `schema` holds."""
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, Mapping):
            yield part
            reference = _reference(part)
            if reference is not None and reference not in seen:
                seen.add(reference)
                waiting.append(resolved(reference, root))
            waiting += _listed(part, "allOf")


def callable_parameters(schema: Schema, path: Path, root: Schema) -> Parameters:
    """The parameters for a grammar that has each of them alone, in their order.

    Raises:
        RequestError: 400 that names a keyword that says more about them together.
    """
    parameters = parameters_of(schema, root)
    for part in _parts(schema, root):
        held = {
            "minProperties": part.get("minProperties", 0) <= len(parameters.required),
            "maxProperties": part.get("maxProperties", math.inf) >= len(parameters.named) > 0,
        }
        for keyword in ("anyOf", "oneOf", "enum", "const", "patternProperties", *held):
            if keyword in part and not held.get(keyword):
                fix = "say in 'properties' and 'required' what the arguments are"
                raise unenforced(part[keyword], (*path, keyword), fix)
    return parameters


# Grammars.

# JSON on one line, with or without a space after commas and colons. More white space is never
# needed, and a small model could continue it forever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def json_schema(schema: dict[str, Any], path: Path) -> str:
    """A JSON schema for a grammar, after `%json`, checked to compile.

    Raises:
        RequestError: 400 that names `path`, with the library's message.
    """
    try:
        text = json_text({**schema, "x-guidance": _SPACING})
        problem = _schema_problem(text)
    except RecursionError:
        problem = "it is nested too deeply"
    if problem is not None:
        raise RequestError(
            f" cannot be turned into a grammar: {problem}; simplify the schema",
            path=path,
            begins=True,
        )
    return text


@lru_cache(maxsize=1024)
def _schema_problem(schema: str) -> str | None:
    """Why a JSON schema cannot be turned into a grammar; None if it can."""
    # imported here: a process that only parses requests needs none
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(
        f"start: %json {schema}", limits=compile_limits()
    )
    return messages[0].split("\n<")[0].strip()[:300] if failed else None


def literal(text: str) -> str:
    """A text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


class ValueRules(Protocol):
    """The rules that a value's grammar needs, of `grammars.Rules`."""

    def fresh(self, prefix: str, body: str) -> str: ...
    def json(self, schema: str) -> str: ...
    def tag(self, text: str) -> str: ...
    def ended(
        self, text: str, tag: str, *, without: Sequence[str], unlike: str, words: str
    ) -> str: ...


def value_grammar(
    rules: ValueRules,
    schema: Schema,
    root: Schema,
    path: Path,
    *,
    end: str,
    without: Sequence[str] = (),
) -> str:
    """An expression for a value that `read_value` reads as valid, and the end of its tag.

    Args:
        schema: The value's schema, part of `root`.
        root: A tool's schema that `json_schema` accepts.
        path: The place of `schema` in the request, for messages.
        end: What follows the value. Text does not contain it.
        without: Other tags that text does not contain.

    Raises:
        RequestError: 400 that names the field that cannot be enforced.
    """
    types = types_of(schema, root)
    texts = _texts(rules, schema, root, path, {})
    if types is None:  # read as text
        texts = {"string": texts["string"]}
    if "string" not in texts:
        return f"{rules.json(json_schema(standalone(schema, root), path))} {rules.tag(end)}"
    others = sorted(types - {"string"}) if types else []
    # JSON in a separate rule: the first character decides between it and text, since the longest
    # match wins.
    nested = [name for name in others if texts.get(_kind(name), "") is None]
    others_begin = [
        _BEGINNINGS[_kind(name)] if name in nested else f"(?:{_SHAPES[name]}){_SPACE}"
        for name in others
    ]
    words = [word for kind, word in texts.items() if kind != "string" and word is not None]
    text = rules.ended(
        str(texts["string"]),
        end,
        without=without,
        unlike=f"/{_SPACE}(?:{'|'.join(others_begin)})/" if others else "",
        words=" | ".join(words),
    )
    if not nested:
        return text
    narrowed = {"allOf": [schema, {"type": nested}]}
    value = rules.json(json_schema(standalone(narrowed, root), path))
    return f"({text} | {value} {rules.tag(end)})"


_SPACE = r"[ \t\n\r]*"
ANY_TEXT = "/(?s:.*)/"
_BEGINNINGS = {"array": r"\[(?s:.*)", "object": r"\{(?s:.*)", "number": r"[0-9\-](?s:.*)"}
# Terminals for the values of a type; None for those that only JSON by a schema can hold.
_Texts = dict[str, str | None]
_ANYTHING: _Texts = {
    "string": ANY_TEXT,
    "null": "/null/",
    "boolean": "/true|false/",
    "number": rf"/{_INTEGER}(?:\.[0-9]+)?{_EXPONENT}/",
    "array": None,
    "object": None,
}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


def _kind(name: str) -> str:
    return "number" if name == "integer" else name


def _texts(
    rules: ValueRules, schema: Schema, root: Schema, path: Path, known: dict[str, _Texts]
) -> _Texts:
    """A schema's values as texts, by type."""
    found = dict(_ANYTHING)
    if schema is False:
        return {}
    if not isinstance(schema, Mapping):
        return found
    if (declared := _declared(schema)) is not None:
        kinds: _Texts = {_kind(name): _ANYTHING.get(_kind(name)) for name in declared}
        if "integer" in declared and "number" not in declared:
            kinds["number"] = f"/{_INTEGER}/"
        found = _both(found, kinds)
    for words in _word_lists(schema):
        found = _both(found, _either(*({_kind(type_of(word)): _word(word)} for word in words)))
    if _BOUNDS & schema.keys():
        found = _both(found, {**_ANYTHING, "number": None})
    for limit in _string_limits(schema, path) if "string" in found else ():
        found = _both(found, {**_ANYTHING, "string": limit})
    for index, inner in enumerate(_listed(schema, "allOf")):
        found = _both(found, _texts(rules, inner, root, (*path, "allOf", index), known))
    for options in _unions(schema):
        key = "anyOf" if options is schema.get("anyOf") else "oneOf"
        branches = (
            _texts(rules, inner, root, (*path, key, index), known)
            for index, inner in enumerate(options)
        )
        found = _both(found, _either(*branches))
    if (reference := _reference(schema)) is not None:
        if reference not in known:
            known[reference] = {}
            target = _texts(rules, resolved(reference, root), root, path, known)
            if (text := target.get("string")) is not None:
                target["string"] = rules.fresh("STRING", text)
            known[reference] = target
        found = _both(found, known[reference])
    return found


def _word(word: Any) -> str | None:
    if isinstance(word, (list, dict)):
        return None
    return literal(word if isinstance(word, str) else json.dumps(word))


def _both(one: _Texts, other: _Texts) -> _Texts:
    return {kind: _also(kind, one[kind], other[kind]) for kind in one if kind in other}


def _also(kind: str, one: str | None, other: str | None) -> str | None:
    if one is None or other is None:
        return None
    if one == other or other == _ANYTHING[kind]:
        return one
    return other if one == _ANYTHING[kind] else f"({one}) & ({other})"


def _either(*options: _Texts) -> _Texts:
    found: _Texts = {}
    for option in options:
        for kind, text in option.items():
            old = found.get(kind, text)
            found[kind] = text if text == old else f"{old} | {text}" if text and old else None
    return found


def _string_limits(schema: Mapping[str, Any], path: Path) -> Iterator[str]:
    if "minLength" in schema or "maxLength" in schema:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        yield f"/(?s:.{{{least},{'' if most is None else int(most)}}})/"
    if "pattern" in schema:
        yield _searched(schema["pattern"], (*path, "pattern"))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise unenforced(
                schema["format"], (*path, "format"), f"use one of {', '.join(_FORMATS)}"
            )
        yield _terminal(_FORMATS[schema["format"]])


def unenforced(value: Any, path: Path, fix: str) -> RequestError:
    return RequestError(
        f" is {shown(value)}, which this model's call format cannot enforce: {fix}",
        path=path,
        begins=True,
    )


def standalone(schema: Schema, root: Schema) -> dict[str, Any]:
    """A schema together with what it refers to in `root`."""
    names: dict[str, str] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(item) for item in part]
        if not isinstance(part, dict):
            return part
        return {
            key: f"#/$defs/{names.setdefault(value, str(len(names)))}"
            if key == "$ref" and isinstance(value, str)
            else moved(value)
            for key, value in part.items()
        }

    found: dict[str, Any] = {"allOf": [False]} if schema is False else moved(schema)
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):
        reference, name = list(names.items())[len(definitions)]
        definitions[name] = moved(resolved(reference, root))
    return {**found, "$defs": definitions} if definitions else found


# Patterns are searched for, in JSON Schema, and terminals match as a whole.

_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_STARTS, _ENDS = ("^", r"\A"), ("$", r"\z")
_FLAGS = re.compile(r"\(\?([isu]+)\)")
_GROUP = re.compile(r"\((?:\?:)?")
_CLASSES = {"d": "0-9", "w": "0-9a-zA-Z_"}


def _searched(pattern: str, path: Path, flags: str = "") -> str:
    """A terminal for the texts in which a pattern is found.

    Raises:
        RequestError: 400: the pattern has anchors elsewhere than at its ends.
    """
    if leading := _FLAGS.match(pattern):
        flags, pattern = flags + leading[1], pattern[leading.end() :]
    pieces = _PIECES.findall(pattern)
    if not any(piece in (*_STARTS, *_ENDS) for piece in pieces):
        return f"{ANY_TEXT} {_terminal(pattern, flags)} {ANY_TEXT}"
    options = _options(pieces)
    if len(options) > 1:
        return " | ".join(_searched("".join(option), path, flags) for option in options)
    group = _GROUP.match(pattern)
    if group and _encloses(pieces):
        return _searched(pattern[group.end() : -1], path, flags)
    start, end = pieces[0] in _STARTS, pieces[-1] in _ENDS
    inner = pieces[int(start) : len(pieces) - int(end)]
    if any(piece in (*_STARTS, *_ENDS) for piece in inner):
        raise unenforced(pattern, path, "move '^' and '$' to the beginning and the end")
    before, after = "" if start else ANY_TEXT, "" if end else ANY_TEXT
    return f"{before} {_terminal(''.join(inner), flags)} {after}".strip()


def _options(pieces: list[str]) -> list[list[str]]:
    """The alternatives of a pattern."""
    options: list[list[str]] = [[]]
    depth = 0
    for piece in pieces:
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            options.append([])
        else:
            options[-1].append(piece)
    return options


def _encloses(pieces: list[str]) -> bool:
    """Whether the first parenthesis is closed by the last."""
    depth = 0
    for position, piece in enumerate(pieces):
        depth += (piece == "(") - (piece == ")")
        if depth == 0:
            return position == len(pieces) - 1
    return False


def _terminal(pattern: str, flags: str = "") -> str:
    """A pattern as a terminal, with JSON Schema's meaning of `\\d` and `\\w`: ASCII alone."""

    def piece(match: re.Match[str]) -> str:
        text = match[0]
        if (name := text[1:].lower()) in _CLASSES:
            return f"[{'^' if text[1].isupper() else ''}{_CLASSES[name]}]"
        return {"/": r"\/", "\n": r"\n", "\r": r"\r", r"\n": r"\n"}.get(text, text)

    written = re.sub(r"\\.|[/\n\r]", piece, pattern, flags=re.DOTALL)
    if not written:
        return '""'
    return f"/(?{flags}:{written})/"


def _formats() -> dict[str, str]:
    """Regular expressions of the formats that llguidance enforces in JSON."""
    year = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
    leap = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
    date = (
        f"(?:{year}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
        f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{leap})"
    )
    hours = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
    time = rf"{hours}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+\-]{hours})"
    hour, minute, second, year_, month, day, week = (f"[0-9]{{1,6}}{x}" for x in "HMSYMDW")
    clock = f"T(?:{hour}(?:{minute}(?:{second})?)?|{minute}(?:{second})?|{second})"
    days = f"(?:{year_}(?:{month}(?:{day})?)?|{month}(?:{day})?|{day})"
    byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    ipv4 = rf"(?:{byte}\.){{3}}{byte}"
    word = "[0-9a-fA-F]{1,4}"
    ipv6 = "|".join(
        [
            f"(?:{word}:){{7}}{word}",
            f"(?:{word}:){{1,7}}:",
            *(f"(?:{word}:){{1,{7 - n}}}(?::{word}){{1,{n}}}" for n in range(1, 7)),
            f":(?:(?::{word}){{1,7}}|:)",
        ]
    )
    label = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
    atom = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
    byte_code = "%[0-9a-fA-F]{2}"
    name = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|{byte_code})"
    letter = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|{byte_code})"
    host = rf"(?:(?:{name}|:)*@)?(?:\[(?:{ipv6})\]|{name}*)"
    return {
        "date": date,
        "time": time,
        "date-time": f"{date}[tT]{time}",
        "duration": f"P(?:{days}(?:{clock})?|{clock}|{week})",
        "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "ipv4": ipv4,
        "ipv6": ipv6,
        "hostname": rf"{label}(?:\.{label})*",
        "email": rf"{atom}(?:\.{atom})*@{label}(?:\.{label})+",
        "uri": (
            rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:\/\/{host}(?::[0-9]*)?(?:\/{letter}*)*"
            rf"|\/?(?:{letter}+(?:\/{letter}*)*)?)"
            rf"(?:\?(?:{letter}|[\/?])*)?(?:\#(?:{letter}|[\/?])*)?"
        ),
        "unknown": "(?s:.*)",
    }


_FORMATS = _formats()

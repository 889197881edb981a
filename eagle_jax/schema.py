"""What configs are made of: checked sections, the types of their values, and both explained in words.

Pydantic does the checking; this module turns its findings into one line that names the key, what was given
and what is allowed, and the models into the text of `--help`. It knows no particular config.
"""

import difflib
import os
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from eagle_jax.errors import ConfigError


class Section(BaseModel):
    """A mapping of a config: unknown keys are errors, and what has been checked does not change.

    Where a key may hold one of several sections, each has a field `kind` that tells them apart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    also_accepts: ClassVar[tuple[str, ...]] = ()
    """Keys that are rewritten into others before they are checked, hence not fields."""


def _reject_bool(value: Any) -> Any:
    # To Python, and so to pydantic, true is the number 1.
    if isinstance(value, bool):
        raise PydanticCustomError("bool_for_number", "a number is expected")
    return value


Int = Annotated[int, BeforeValidator(_reject_bool)]
PositiveInt = Annotated[Int, Field(ge=1)]
NaturalInt = Annotated[Int, Field(ge=0)]
Float = Annotated[float, BeforeValidator(_reject_bool), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1)]

S = TypeVar("S", bound=Section)


def no_source(key: str) -> str:
    """For configs that come from Python: there is no file to name."""
    return ""


def parse(schema: type[S], data: Any, *, prefix: str = "", source: Callable[[str], str] = no_source) -> S:
    """Check `data` against a section.

    Args:
        schema: the section, for instance `SpeculativeConfig`.
        data: a mapping, as YAML gives it, or an instance of the section.
        prefix: what the mapping itself is called in messages, for instance `speculative_config`.
        source: what to put before a message about the given key, for instance the file's name.

    Raises:
        ConfigError: in one line, every key that is wrong.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        messages = [_explain(schema, dict(e), prefix, source) for e in error.errors(include_url=False)]
        raise ConfigError("; ".join(dict.fromkeys(messages))) from None


class Key(NamedTuple):
    """One key of a config: dotted name, field, and the `kind` of section that it belongs to, if any."""

    name: str
    field: FieldInfo
    kind: str


def walk(schema: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key of a config, depth first."""
    for name, field in schema.model_fields.items():
        key = prefix + name
        yield Key(key, field, "")
        alternatives = _sections(field.annotation)
        for section in alternatives:
            for below in walk(section, f"{key}."):
                if not below.name.endswith(".kind"):
                    kind = _kind(section) if len(alternatives) > 1 else ""
                    yield below._replace(kind=below.kind or kind)


def describe_keys(schema: type[Section], width: int = 100) -> str:
    """Every key with its meaning, what it may hold and its default, as text for `--help`."""
    lines = []
    for name, field, kind in walk(schema):
        sections = _sections(field.annotation)
        facts = [] if sections else [_expected(field.annotation, field.metadata)]
        if len(sections) != 1 or field.default is None:  # a section's keys tell their own defaults
            facts.append(_default(field))
        note = f" [{'; '.join(facts)}]" if facts else ""
        lines.append(f"  {name}" + (f" (kind: {kind})" if kind else ""))
        indent = " " * 6
        lines += textwrap.wrap(
            f"{field.description}{note}", width, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join(lines)


def show(value: Any) -> str:
    """A value as a user would write it, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        default = default.model_dump()
    if isinstance(default, tuple):
        default = list(default)
    text = yaml.safe_dump(default, default_flow_style=True, sort_keys=False, width=1000)
    return "default " + text.removesuffix("...\n").strip().replace(os.path.expanduser("~"), "~")


# The functions below read type annotations: a field's bounds and alternatives stand there, and only there.


def _sections(annotation: Any) -> list[type[Section]]:
    """The sections among an annotation's alternatives."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return [section for argument in get_args(annotation) for section in _sections(argument)]
    return []


def _kind(section: type[Section]) -> str:
    return str(section.model_fields["kind"].default)


def _plain(annotation: Any) -> Any:
    return _plain(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def _item(annotation: Any) -> Any:
    """The type of a list's items, whatever wraps the list."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    return next((found for a in get_args(annotation) if (found := _item(a)) is not None), None)


def _bounds(metadata: Sequence[Any]) -> str:
    words = []
    for bound in [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]:
        match bound:
            case annotated_types.Ge():
                words.append(f"at least {bound.ge}")
            case annotated_types.Gt():
                words.append(f"above {bound.gt}")
            case annotated_types.Le():
                words.append(f"at most {bound.le}")
            case annotated_types.Lt():
                words.append(f"below {bound.lt}")
            case annotated_types.MinLen():
                words.append("not empty")
    return ", " + " and ".join(words) if words else ""


def _expected(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a key may hold, in words: `a whole number, at least 1, or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _expected(arguments[0], [*arguments[1:], *metadata])
    sections = _sections(annotation)
    if len(sections) > 1:
        shapes = [
            ", ".join([f"kind: {_kind(s)}", *(k for k in s.model_fields if k != "kind")]) for s in sections
        ]
        return " or ".join(f"{{{shape}}}" for shape in shapes)
    if origin in (Union, types.UnionType):
        words = [_expected(a, metadata) for a in arguments if a is not type(None)]
        return " or ".join(words) + (", or null" if type(None) in arguments else "")
    if sections:
        return f"a mapping with the keys {', '.join(sections[0].model_fields)}"
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        items = {int: "whole numbers", str: "texts"}.get(_plain(arguments[0]), "lists")
        return f"a list of {items}" + _bounds(metadata)
    if origin is dict:
        return "a mapping"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names[annotation] + _bounds(metadata)


def _explain(schema: type[Section], error: dict[str, Any], prefix: str, source: Callable[[str], str]) -> str:
    """One pydantic error in our words."""
    key, parent, alternatives = prefix, schema, [schema]
    annotation: Any = schema
    metadata: Sequence[Any] = ()
    for part in error["loc"]:
        if len(alternatives) > 1 and part in map(_kind, alternatives):
            alternatives = [
                section for section in alternatives if _kind(section) == part
            ]  # no key, but a choice
            annotation = alternatives[0]
        elif isinstance(part, int):
            key += f"[{part}]"
            annotation, metadata, alternatives = _item(annotation), (), []
        else:
            key = f"{key}.{part}" if key else part
            parent = alternatives[0] if alternatives else parent
            field = parent.model_fields.get(part)
            annotation, metadata = (field.annotation, field.metadata) if field else (None, ())
            alternatives = _sections(annotation)

    given, name = error.get("input"), key or "the config"
    match error["type"]:
        case "extra_forbidden":
            text = f"{key}: unknown key; {_suggest(schema, parent, error['loc'][-1], key, prefix)}"
        case "missing":
            text = f"{key} is missing; expected {_expected(annotation, metadata)}"
        case "value_error":  # raised by a check of a section's own, which says it all
            text = (f"{key}: " if key else "") + str(error["ctx"]["error"])
        case "union_tag_invalid":
            kinds = ", ".join(map(_kind, alternatives))
            text = f"{key}.kind: got {show(given['kind'])}; expected one of {kinds}"  # type: ignore[index]
        case "union_tag_not_found" if isinstance(given, dict):
            text = f"{key}: got {show(given)} without its kind; expected {_expected(annotation, metadata)}"
        case _ if annotation is None:
            text = f"{name}: got {show(given)}; {error['msg'][0].lower()}{error['msg'][1:]}"
        case _:
            text = f"{name}: got {show(given)}; expected {_expected(annotation, metadata)}"
    return source(key) + text


def _suggest(schema: type[Section], parent: type[Section], name: str, key: str, prefix: str) -> str:
    """The nearest legal key, here or elsewhere (`temperature` is `sampling.temperature`), and all of them."""
    siblings = [*(parent.model_fields), *parent.also_accepts]
    allowed = f"allowed: {', '.join(siblings)}"
    stem = key[: len(key) - len(name)]
    likeness = {stem + other: _likeness(name, other) + 0.05 for other in siblings}
    for other, _, kind in walk(schema):
        path = f"{prefix}.{other}" if prefix else other
        if path == key:
            return f"it belongs to {{kind: {kind}}}; {allowed}"
        likeness.setdefault(path, _likeness(name, other.rpartition(".")[2]))
    nearest = max(likeness, key=likeness.__getitem__)
    return (f"did you mean {nearest}? " if likeness[nearest] >= 0.65 else "") + allowed


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()

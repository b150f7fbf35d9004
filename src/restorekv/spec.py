"""Specs: a name with settings, such as "kvzip:chunk=512,sinks=0", for evictors, allocations,
methods and benchmarks.

Whatever has a spec is a frozen dataclass. Its fields of type int, float, bool and str are its
settings.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from difflib import get_close_matches
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, TypeVar, get_type_hints

from restorekv.errors import RestoreKVError, join_words, summarize_error, warn

Named = TypeVar("Named")
_SOURCE_DIGEST = re.compile(r"#[0-9a-f]{12}$")
# To guess which arguments a wrong name means: the fewest letters of a name that is part of an
# argument, the most arguments that a hint lists, and the similarity of a misspelling (difflib's,
# from 0 to 1; "temp" and "stream" have 0.6).
SHORTEST_WORD = 3
MOST_MEANT = 3
MISSPELLED = 0.75
_PLACEHOLDERS = {int: "NUMBER", float: "NUMBER", bool: "true|false", str: "TEXT"}


def parse_spec(
    text: str,
    classes: Mapping[str, type[Named]],
    what: str,
    presets: Iterable[str] = (),
    bases: tuple[type, ...] = (),
) -> Named:
    """Return an object of the class that the spec names.

    Args:
        text: The spec. A digest that `digest_source` made may follow; it is ignored.
        classes: The classes by name.
        what: What error messages call such an object.
        presets: Further names that users may give, for the message about an unknown name; callers
            replace them by specs before this is called.
        bases: A class must be derived from one of these, be registered under its own name, and get
            a value for every field; () checks none of that.

    Raises:
        RestoreKVError: A name or setting is unknown, a setting is given twice, a value has another
            type, or the class fails the check for `bases`.
    """
    load_waiting()
    name, _, rest = _SOURCE_DIGEST.sub("", text).partition(":")
    if name not in classes:
        raise RestoreKVError(explain_unknown(what, name, [*presets, *classes]))
    if bases:
        _check_class(name, classes[name], what, bases)
    types = _list_settings(classes[name])
    settings = {}
    for item in filter(None, map(str.strip, rest.split(","))):
        key, _, value = item.partition("=")
        if key not in types:
            examples = [
                f"{setting}={_PLACEHOLDERS[kind]}" for setting, kind in sorted(types.items())
            ]
            fix = f"give {', '.join(examples)}" if examples else "it takes none"
            if _lacks_decorator(classes[name], key):
                fix = "put @dataclass(frozen=True) over its class, which makes fields settings"
            raise RestoreKVError(f"{name} has no setting {item!r}; {fix}.")
        if key in settings:
            raise RestoreKVError(f"{name} is given {key} twice; give each setting once.")
        try:
            settings[key] = _parse_setting(types[key], value)
        except (KeyError, ValueError):
            raise RestoreKVError(
                f"{name} takes {key}={_PLACEHOLDERS[types[key]]}, not {value!r}."
            ) from None
    if bases:
        _check_all_given(name, classes[name], what, settings)
    return classes[name](**settings)


def _check_class(name: str, kind: Any, what: str, bases: tuple[type, ...]) -> None:
    """Refuse what is not derived from one of `bases`, and a class that is registered under another
    name than its own.
    """
    if not (isinstance(kind, type) and issubclass(kind, bases)):
        raise RestoreKVError(
            f"The {what} {name!r} is not a class that is derived from "
            f"{bases[0].__module__}.{bases[0].__name__}; derive it."
        )
    own_name = getattr(kind, "name", None)
    if own_name == name:
        return
    # Cache files and results would record the class's own name, which may be another class's.
    says = "has no name" if own_name is None else f"has the name {own_name!r}"
    raise RestoreKVError(
        f"The {what} {name!r} is registered under that name, and its class {kind.__name__} {says}, "
        f"which records would hold; write name: ClassVar[str] = {name!r} into it, or register it "
        "under its own name."
    )


def _check_all_given(name: str, kind: type, what: str, settings: Iterable[str]) -> None:
    """Refuse a spec without a value for a field that has no default."""
    for field in fields(kind):
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if field.init and not has_default and field.name not in settings:
            raise RestoreKVError(
                f"The {what} {name!r} needs a value of {field.name}, whose field in "
                f"{kind.__name__} has no default; write {name}:{field.name}=VALUE, or give the "
                "field a default."
            )


def _lacks_decorator(kind: type, setting: str) -> bool:
    """Return whether a class has a field for the setting and is not itself a dataclass."""
    annotations = vars(kind).get("__annotations__", {})
    return setting in annotations and "__dataclass_fields__" not in vars(kind)


def explain_unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence about an unknown name, with the known name that is most like it."""
    names = list(known)
    own = ""
    if what in ("evictor", "benchmark"):
        own = ", or register your own in the program that runs"
    if what == "benchmark" and name.lower().endswith((".json", ".jsonl")):
        own += f"; texts and questions of yours are lines:path={name}"
    return (
        f"There is no {what} {name!r}{hint_near_name(name, names)}; use one of "
        f"{', '.join(names)}{own}."
    )


def hint_near_name(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean kvzip?)" with the known name that is most like a name, or ""."""
    near = find_near_name(name, known)
    return f" (did you mean {near}?)" if near and near != name else ""


def find_near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a name, None if none is like it."""
    # Capitals do not matter for a guess: papers write H2O and SnapKV.
    by_small_letters = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), by_small_letters, 1)
    return by_small_letters[near[0]] if near else None


def suggest_argument(name: str, known: Sequence[str], other_names: Mapping[str, str]) -> str:
    """Return what to write instead of an argument that a function does not have.

    Args:
        name: The argument.
        known: The arguments that the function has.
        other_names: What to write instead, by names that other libraries use or that belong
            elsewhere.
    """
    if name in other_names:
        return other_names[name]
    near = find_meant_arguments(name, known)
    if near:
        return f"did you mean {join_words(near, 'or')}?"
    return f"use some of {', '.join(known)}."


def find_meant_arguments(name: str, known: Iterable[str]) -> list[str]:
    """Return the arguments that a user may have meant by a name: those with a word that begins with
    it ("temp", "penalty"), or else the one that it misspells.
    """
    name = name.lower()
    meant = []
    for each in known:
        words = each.split("_")
        starts_one = each.startswith(name) or any(word.startswith(name) for word in words)
        if len(name) >= SHORTEST_WORD and starts_one:
            meant.append(each)
    # A list of more than a few is not a hint.
    if 0 < len(meant) <= MOST_MEANT:
        return meant
    return get_close_matches(name, known, 1, MISSPELLED)


def drop_gate(spec: str) -> str:
    """Return an evictor's spec without its `gate` setting: a file's name if a user wrote the spec,
    a hash if it comes from a record.
    """
    name, _, settings = spec.partition(":")
    kept = []
    for setting in settings.split(","):
        key = setting.partition("=")[0].strip()
        if key not in ("gate", ""):
            kept.append(setting)
    return f"{name}:{','.join(kept)}" if kept else name


def split_specs(text: str) -> list[str]:
    """Split specs that commas separate, as in "kvzip,snapkv:window=64,kernel=5,h2o".

    Settings are separated by commas too: a part with "=" but without a name before it belongs to
    the spec before.
    """
    specs: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        names_a_spec = "=" not in part.partition(":")[0]
        if names_a_spec or not specs:
            specs.append(part)
        else:
            specs[-1] += f",{part}"
    return specs


def format_spec(name: str, instance: Any) -> str:
    """Return the shortest spec of `instance`, which leaves out settings at their defaults."""
    settable = _list_settings(type(instance))
    changed = []
    for field in fields(instance):
        value = getattr(instance, field.name)
        if field.name not in settable or value == field.default:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        changed.append(f"{field.name}={text}")
    return f"{name}:{','.join(changed)}" if changed else name


def _list_settings(cls: type) -> dict[str, type]:
    """Return the fields that a spec can set, with their types."""
    hints = get_type_hints(cls)
    return {
        field.name: hints[field.name] for field in fields(cls) if hints[field.name] in _PLACEHOLDERS
    }


def _parse_setting(kind: type, value: str) -> Any:
    """Convert a setting's text to its type; raise KeyError or ValueError."""
    if kind is bool:
        return {"true": True, "false": False}[value]
    if not value or (kind is int and not value.isdecimal()):
        raise ValueError(value)
    return kind(value)


def register_entry_points(group: str, classes: dict[str, type]) -> None:
    """Add the classes that installed packages name as entry points of a group, each under its own
    `name`.

    One that cannot be loaded is left out with a warning.
    """
    _waiting.extend((entry, classes) for entry in entry_points(group=group))
    load_waiting()


# Entry points that are not loaded yet, each with the classes that it is to be added to.
_waiting: list[tuple[EntryPoint, dict[str, type]]] = []


def load_waiting() -> None:
    """Load the waiting entry points, except those in modules that are still being imported.

    Such a module imports this package to derive its classes from ours; they do not exist before its
    import ends.
    """
    # Loading one may import the modules of others, so all are looked through again each time.
    while ready := [each for each in _waiting if not _is_being_imported(each[0].module)]:
        _waiting.remove(ready[0])
        _load_entry_point(*ready[0])


def _is_being_imported(module: str) -> bool:
    found = sys.modules.get(module)
    return bool(getattr(getattr(found, "__spec__", None), "_initializing", False))


def _load_entry_point(entry: EntryPoint, classes: dict[str, type]) -> None:
    """Add the class of an entry point, or warn."""
    try:
        found = entry.load()
        if classes.setdefault(found.name, found) is not found:
            raise ValueError(
                f"the name {found.name!r} of its class is taken; give it another `name`"
            )
    except Exception as error:  # another package's code may raise anything
        reason = summarize_error(error) or type(error).__name__
        warn(
            f"{entry.value}, an entry point of {entry.group}, cannot be loaded ({reason}); fix or "
            "remove its package."
        )


def digest_source(cls: type) -> str:
    """Return "#" and 12 hex digits that identify the source of a class from outside this package,
    because its name stays the same when its code changes.

    For our own classes, return ""; records of results hold their `digest_code` separately.
    """
    if _is_own(cls.__module__):
        return ""
    digest = digest_code(cls, own=False)
    return digest and f"#{digest}"


def digest_code(cls: type, own: bool = True) -> str:
    """Return 12 hex digits that identify the files that define a class and its bases, or "" if
    there is no source, as in a shell.

    Helpers in these files count too; what they import from other files does not. `own` says whether
    files of this package count.
    """
    digest = hashlib.sha256()
    found = False
    seen = set()
    for base in cls.__mro__:
        name = base.__module__
        if name in seen or name in ("builtins", "abc", "typing") or (_is_own(name) and not own):
            continue
        source = _read_source(base)
        if source:
            found = True
            digest.update(source.encode() + b"\0")
        # The classes of a notebook have no file.
        if name != "__main__":
            seen.add(name)
    return digest.hexdigest()[:12] if found else ""


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "restorekv"


def _read_source(cls: type) -> str:
    """Return the source of the file that defines a class, or of the class alone."""
    for thing in (sys.modules.get(cls.__module__), cls):
        if thing is None:
            continue
        try:
            return inspect.getsource(thing)
        except (OSError, TypeError):  # no file, as in a shell
            continue
    return ""


def list_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the packages that are installed."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions

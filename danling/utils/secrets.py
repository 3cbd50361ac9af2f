"""What must not be written down: text under names of secrets, and lines of a patch that look like one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_NAMES = frozenset(
    {
        "token",
        "api_key",
        "password",
        "passwd",
        "secret",
        "credential",
        "credentials",
        "private_key",
        "access_key",
        "authorization",
    }
)
_ENDINGS = ("_token", "_api_key", "_password", "_secret", "_private_key", "_access_key")
_SHORTEST = 6

LEFT_OUT = "[left out: it looks like a secret]"
"""Replaces a line of a patch."""


def names_secret(key: str, listed: Collection[str] = ()) -> bool:
    """Whether a dotted key names a secret, by its last name.

    `token`, `api_key`, `password`, `passwd`, `secret`, `credential`, `credentials`, `private_key`, `access_key` and `authorization` do,
    and what ends in `_token`, `_api_key`, `_password`, `_secret`, `_private_key` or `_access_key`. `pad_token_id`, `num_tokens` and
    `tokenizer` do not.
    """
    name = key.rpartition(".")[2]
    lower = name.lower().replace("-", "_")
    return lower in _NAMES or lower.endswith(_ENDINGS) or name in listed or key in listed


def without_secrets(settings: Mapping[str, object], listed: Collection[str] = ()) -> dict[str, Any]:
    """Return settings without the text under keys that name a secret, and with `hide_in_text` applied to any other text."""
    kept: dict[str, Any] = _without(settings, "", listed, False, set())
    return kept


def secret_values(settings: Mapping[str, object], listed: Collection[str] = ()) -> set[str]:
    """Return the texts that `without_secrets` leaves out, less those too short to be told from other text."""
    found: set[str] = set()
    _without(settings, "", listed, False, found)
    return {text for text in found if len(text) >= _SHORTEST}


_GONE = object()


def _without(
    value: object, key: str, listed: Collection[str], is_secret: bool, found: set[str]
) -> Any:
    """Return a value without the texts under keys that name a secret, which are added to `found`."""
    if isinstance(value, Mapping):
        items = {}
        for name, item in value.items():
            inner = f"{key}.{name}" if key else str(name)
            items[name] = _without(
                item, inner, listed, is_secret or names_secret(inner, listed), found
            )
        return {name: item for name, item in items.items() if item is not _GONE}
    if isinstance(value, (list, tuple)):
        # An entry has the name of its list.
        entries = [_without(entry, key, listed, is_secret, found) for entry in value]
        return [entry for entry in entries if entry is not _GONE]
    if isinstance(value, str) and is_secret:
        found.add(value)
        return _GONE
    if isinstance(value, str):
        shown = hide_in_text(value)
        if shown != value:
            found.add(value)
        return shown
    return value


# Texts that look like a secret, whatever their name

HIDDEN = "[secret]"
"""Replaces a part of a text."""
_TOKENS = (
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{8,}"
    r"|sk-(?:(?:proj|ant|svcacct|admin)-[\w-]{16,}|[A-Za-z0-9]{32,})|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}(?:\.[\w-]+)?)"
)
_USER = r"(://)[^/\s:@'\"]*:[^/\s@'\"]+@"
"""Name and password in a URL."""
_QUERY = (
    r"(?i)([?&](?:[\w.-]*(?:token|secret|signature|password|credential|(?:access|api|account|private)[_-]?key(?:[_-]?id)?)|sig)="
    r"|[?&]key=(?=[^&\s]{16}))[^&\s'\"]+"
)
_HEADER = r"(?i)(\bauthorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+(?=\S*\d))[\w+/=.~-]{8,}"
_PRIVATE = r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
_IN_TEXT = (
    (re.compile(_USER), rf"\1{HIDDEN}@"),
    (re.compile(_QUERY), rf"\1{HIDDEN}"),
    (re.compile(_HEADER), rf"\1{HIDDEN}"),
    (re.compile(_PRIVATE), HIDDEN),
    (re.compile(_TOKENS), HIDDEN),
)


def hide_in_text(text: str) -> str:
    """Return a text in which passwords and keys of URLs, headers of authorization, private keys and tokens of known forms are hidden."""
    for form, shown in _IN_TEXT:
        text = form.sub(shown, text)
    return text


def received(name: object, value: object, listed: Collection[str] = ()) -> str:
    """Return `name=value` for an error, in which nothing that is secret is shown."""
    shown = without_secrets({str(name): value}, listed)
    return f"{name}={shown[str(name)]!r}" if str(name) in shown else f"{name}='...'"


_WORDS = (
    *("token", "api[_-]key", "password", "passwd", "secret", "credentials?"),
    *("private[_-]key", "access[_-]key", "authorization"),
)
# A value that was cut where it is too long to be shown has no closing quote.
_QUOTED_TEXT = r"""(?: '[^']*? (?: ' | \.{3} ) | "[^"]*? (?: " | \.{3} ) )"""


def hide_secrets(text: str, listed: Collection[str] = ()) -> str:
    """Return a line for people in which the text of keys that name a secret is not shown."""
    own = [rf"(?<!\w){re.escape(key.rpartition('.')[2])}" for key in listed]
    name = rf"""(?: {" | ".join([*_WORDS, *own])} )"""
    in_code = re.compile(rf"""(?ix) ( {name} ['")\]]* \s* [=:]\s* ) {_QUOTED_TEXT}""")
    as_option = re.compile(rf"(?ix) ( ^ -- \S*? {name} (?: \s+ | = ) ) .+")
    return hide_in_text(as_option.sub(r"\1'...'", in_code.sub(r"\1'...'", text)))


# Patches

_NAME = rb"(?:token|api[_-]?key|password|passwd|secret|credentials?|access[_-]?key|private[_-]?key)[\"'\]]*"
_QUOTED = re.compile(rb"(?i)" + _NAME + rb"\s*(?::\s*\w+\s*=|:?=|:)\s*[a-z]{0,2}[\"'][^\"'\s]{6,}")
_BARE = re.compile(
    rb"(?i)" + _NAME + rb"(?:\s*[:=]\s*|\s+)(?=[^\s\"']*[0-9])[\w+/=.-]{8,}(?![\w(\[.])"
)
# In files of settings a value needs no quotes; in a program it would be a name.
_SETTING = re.compile(rb"(?i)" + _NAME + rb"\s*[:=]\s*[^\s\"'${]{6,}\s*$")
_PROGRAM = re.compile(rb"\.(?:py|pyi|ipynb|js|ts|c|h|cc|cpp|cu|cuh|go|rs|java|jl|lua|r|R|md|rst)$")
_KNOWN = re.compile(
    rb"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abeoprs]-[\w-]{8,}"
    rb"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}|://[^/\s:@]+:[^/\s@]+@"
)
"""As `_TOKENS`, and wider: a line of a patch that goes for nothing costs little, a setting that is changed costs a run."""
_KEY_BEGINS, _KEY_ENDS = (
    re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY"),
    re.compile(rb"-----END [A-Z ]*PRIVATE KEY"),
)
_FILE_OF_SECRETS = re.compile(
    rb"(?i)(?:^|/)(?:\.env(?:\.[\w-]+)?|\.netrc|\.pypirc|\.npmrc|id_(?:rsa|dsa|ecdsa|ed25519)"
    rb"|[^/]*(?:credentials?|secrets?)[^/.]*(?:\.(?:json|ya?ml|toml|ini|cfg|txt|env))?|[^/]*\.(?:pem|key|p12|pfx|keystore|jks))$"
)
_FILE = re.compile(rb"diff --git a/.* b/(.*)$")


def redact_patch(patch: bytes, values: Collection[str] = ()) -> tuple[bytes, int]:
    """Return a patch of `git diff` with every line that looks like a secret replaced, and how many those are.

    A line goes that gives a value to a name of a secret, has the form of a known kind of token, is part of a private key, holds one of
    the values, or belongs to a file that is there to hold secrets (`.env`, `*.pem`, `credentials.json`, ...). The number of lines and
    what each does stay as they are. What looks like nothing known is not found: a patch is no place for secrets.
    """
    forbidden = [value.encode() for value in values]
    kept: list[bytes] = []
    found = 0
    hidden_file = in_key = in_body = binary = False
    patterns: tuple[re.Pattern[bytes], ...] = ()
    for line in patch.split(b"\n"):
        header = _FILE.match(line)
        if header:
            name = header[1].strip(b'"')
            hidden_file = bool(_FILE_OF_SECRETS.search(name))
            in_key = False
            in_body = False
            binary = False
            patterns = (
                (_KNOWN, _QUOTED, _BARE)
                if _PROGRAM.search(name)
                else (_KNOWN, _QUOTED, _BARE, _SETTING)
            )
        elif line.startswith((b"@@ ", b"GIT binary patch")):
            in_body = True
            binary = line.startswith(b"G")
            # git repeats the last unchanged line of a function behind the numbers.
            numbers, _, context = line.partition(b" @@")
            if _is_secret(context, forbidden, patterns):
                line = numbers + b" @@"
                found += 1
        elif in_body and line:
            in_key = not binary and (in_key or bool(_KEY_BEGINS.search(line)))
            if hidden_file or in_key or (not binary and _is_secret(line[1:], forbidden, patterns)):
                in_key = in_key and not _KEY_ENDS.search(line)
                line = line[:1] + LEFT_OUT.encode()
                found += 1
        kept.append(line)
    return b"\n".join(kept), found


def _is_secret(
    text: bytes, forbidden: Collection[bytes], patterns: Collection[re.Pattern[bytes]]
) -> bool:
    has_value = any(value in text for value in forbidden)
    return has_value or any(pattern.search(text) for pattern in patterns)

"""Types of single settings. They are strict (text is not a number, true is not 1); errors say which values are valid."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from spes_p2p.config.addresses import is_host
from spes_p2p.config.problems import broken_rule
from spes_p2p.messages.fields import LONGEST_NAME, LONGEST_WORD, is_display_name

Seed = Annotated[int, Field(strict=True, ge=-(10**18), le=10**18)]
Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, gt=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0)]
Text = Annotated[str, Field(min_length=1)]
CodecName = Literal["none", "fp16", "int8", "int4", "ternary", "sparse16", "sparse", "sparse64"]
CODEC_NAMES: tuple[str, ...] = get_args(CodecName)
"""none is float32; int8, int4 and ternary share a scale in blocks; sparse sends one value of 32 a round,
sparse16 and sparse64 one of 16 or 64."""
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]


def checked(rule: str, holds: Callable[[str], object]) -> AfterValidator:
    """Return a validator that rejects text for which `holds` is false, with `rule` as the error."""

    def check(value: str) -> str:
        if not holds(value):
            raise broken_rule(rule)
        return value

    return AfterValidator(check)


def _is_multiaddr(address: str) -> bool:
    match = re.fullmatch(r"/(ip4|ip6|dns|dns4|dns6)/([^/\s]+)/(tcp|udp)/(\d{1,5})(/\S+)?", address)
    return match is not None and int(match[4]) <= 65535 and is_host(match[1], match[2])


_NOBODY_DIALS = re.compile(r"/ip4/0\.0\.0\.0/|/ip6/::/|/\w+/[^/]+/\w+/0+(/|\Z)")
"""Every interface, or any free port."""


def _auto_or_positive(value: object) -> object:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number == "auto" or (isinstance(number, int) and not isinstance(number, bool) and number > 0):
        return number
    raise broken_rule("must be auto or a whole number greater than 0")


CampaignName = Annotated[str, checked(
    "must be 1 to 63 letters (a to z), digits, '.', '_' or '-', and begin with a letter or digit",
    re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}").fullmatch)]
SourceName = Annotated[str, checked(
    "must be 1 to 32 letters, digits, '_' or '-', and begin with a letter or digit",
    re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}").fullmatch)]
TaskName = Annotated[str, checked(
    "must be the name of an lm-eval task, such as arc_easy, or with its few-shot examples, such as piqa:5",
    re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(:[0-9]{1,2})?").fullmatch)]
Prompt = Annotated[str, checked(
    f"must be 1 to {LONGEST_WORD} characters in one line", lambda text: text.isprintable() and 0 < len(text) <= LONGEST_WORD)]
DisplayName = Annotated[str, checked(
    f"must be 1 to {LONGEST_NAME} letters, digits, spaces, hyphens, '_', '.' or apostrophes, with a letter among them",
    is_display_name)]
Multiaddr = Annotated[str, checked("must be a multiaddress such as /ip4/0.0.0.0/tcp/31337", _is_multiaddr)]
DialledAddr = Annotated[str, checked(
    "must be a multiaddress at which others reach this machine, such as /ip4/203.0.113.7/tcp/31337",
    lambda address: _is_multiaddr(address) and not _NOBODY_DIALS.match(address))]
IPAddress = Annotated[str, checked(
    "must be an address of this machine such as 127.0.0.1, or 0.0.0.0 for all of them",
    lambda host: is_host("ip6" if ":" in host else "ip4", host))]
Devices = Annotated[str, checked(
    "must be auto, all, cpu, or numbers of GPUs such as 0,1,2,3",
    re.compile(r"auto|all|cpu(,cpu)*|\d{1,4}(,\d{1,4})*").fullmatch)]
AutoOrPositive = Annotated[Literal["auto"] | Positive, BeforeValidator(_auto_or_positive)]

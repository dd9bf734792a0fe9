"""Types of single settings: strict (text is no number, true is not 1), each with what would be right in its error."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from spes_p2p.addresses import is_host
from spes_p2p.config_problems import broken_rule

Whole = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, gt=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0)]
Text = Annotated[str, Field(min_length=1)]
CodecName = Literal["none", "bf16", "fp16", "int8", "int4"]
CODEC_NAMES: tuple[str, ...] = get_args(CodecName)
"""none is float32; int8 and int4 share a scale in blocks."""
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]


def _campaign_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", name):
        raise broken_rule("must be 1 to 63 letters, digits, '.', '_' or '-', and begin with a letter or digit")
    return name


def _multiaddr(address: str) -> str:
    match = re.fullmatch(r"/(ip4|ip6|dns|dns4|dns6)/([^/\s]+)/(tcp|udp)/(\d{1,5})(/\S+)?", address)
    if not match or int(match[4]) > 65535 or not is_host(match[1], match[2]):
        raise broken_rule("must be a multiaddress such as /ip4/0.0.0.0/tcp/31337")
    return address


def _ip_address(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise broken_rule("must be an address of this machine such as 127.0.0.1, or 0.0.0.0 for all of them") from None
    return host


def _expert_capacity(value: object) -> object:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number == "auto" or (isinstance(number, int) and not isinstance(number, bool) and number > 0):
        return number
    raise broken_rule("must be auto or a whole number greater than 0")


CampaignName = Annotated[str, AfterValidator(_campaign_name)]
Multiaddr = Annotated[str, AfterValidator(_multiaddr)]
IPAddress = Annotated[str, AfterValidator(_ip_address)]
ExpertCapacity = Annotated[Literal["auto"] | int, BeforeValidator(_expert_capacity)]

"""Types of the records' fields, each with its bound: `unpack` reads nothing beyond them.

Bounds are generous: they keep arithmetic on numbers and work on lists safe. The frame limit bounds the bytes in any case.
"""

from __future__ import annotations

import math
import unicodedata
from typing import Annotated

from annotated_types import Ge, Le, MaxLen, Predicate

MAX_MEMBERS = 2**10
"""Members of a round. A plan grows with members times experts; one frame holds 1024 members with 512 experts."""
MAX_EXPERTS = 2**12
"""Experts a layer; the largest published models have some hundreds."""
MAX_LAYERS = 2**9
MAX_PARTS = 2**20
"""Parts of a model: 10^12 parameters in parts of 2^20."""
MAX_INTERVALS = 2**12
"""Sample intervals in a cursor or of one peer; a plan assigns a few per member and round (`slices.MAX_RETURNED`)."""
MAX_REVISIONS = 2**6
"""Part tables of one round. Each costs at least one member, and the exchange timeout allows a few."""
UPDATES_PER_SIGNATURE = 2**3
"""Encoded updates under one signature of their contributor. A reducer uses none without it, so a contributor that is lost
costs at most this many. A signature has 648 bytes."""
MAX_UNANSWERED = 2**3
"""Reducers that a member names as silent in one announcement. It checks one or two in a round."""
MAX_AUDITS = 2**3
"""Audits in one announcement. A member makes one in some rounds, and repeats it until a commit has it."""
MAX_VERDICTS = 2**6
"""Verdicts in one commit; others wait for the next one."""
MAX_ROOTS = 2**16
"""Manifest roots of one round: members times revisions, within a frame."""
MAX_HELPERS = 2**6
MAX_ELECTORATE = 2**4
"""Electors of a round; seven are chosen."""
MAX_CHANGES = 2**8
"""Schedule changes in the life of a campaign."""
MAX_BANNED = 2**8
"""Banned peers. Every commit carries the list; a campaign that needs more should admit by invitation."""
MAX_ARCHIVED = 2**16
"""Rounds whose bases a peer keeps."""
MAX_PAST = 2**10
"""Rounds before a milestone to which a rollback may go back: 75 KB."""
MAX_SERVED = 2**16
"""Peers with rounds of service in a milestone: 4 MB."""
MAX_PAGE = 2**8
"""Certified commits or round records in one answer."""
MAX_ADDRESSES = 2**4
MAX_STAGES = 2**6
"""Stages of a round, or reasons for failed attempts, in a status."""
MAX_TASK_SCORES = 2**6
"""Results of lm-eval tasks in a status: a campaign has at most 32 tasks, most with two metrics."""
MAX_NAMES = 2**7
"""New names in one round record; others wait for the next rounds. Bounds what renaming costs in journals."""
MAX_PROMPTS = 2**2
"""Prompts of a campaign, whose continuations stand in status and history."""
LONGEST_CONTINUATION = 400
"""Characters of one: 40 tokens rarely have more than 250."""
LONGEST_WORD = 200
LONGEST_NAME = 24

PeerId = Annotated[str, MaxLen(128)]
"""A libp2p id is a multihash in base58: 46 characters for RSA, 52 for Ed25519."""
Digest = Annotated[str, MaxLen(64)]
"""32 bytes in hex: id of a record, hash of a file, digest of a base; empty for none."""
Incarnation = Annotated[str, MaxLen(32)]
"""Id of an elector's vote file: 8 bytes in hex."""
Mask = Annotated[bytes, MaxLen(MAX_MEMBERS // 8)]
"""Members, one bit each, member 0 in the lowest bit of the first byte; empty for none."""
Root = Annotated[bytes, MaxLen(32)]
"""A sha256; empty for none."""
Signature = Annotated[bytes, MaxLen(2**11)]
"""Length (2 bytes), RSA key of at most 4096 bits (550), its signature (512) of an Ed25519 key (32), and that key's (64)."""
Word = Annotated[str, MaxLen(LONGEST_WORD), Predicate(str.isprintable)]
"""Short text from another peer, without control characters that could corrupt a terminal."""

Continuation = Annotated[str, MaxLen(LONGEST_CONTINUATION), Predicate(str.isprintable)]
"""What the model wrote after a prompt, in one line without control characters."""
Continuations = Annotated[tuple[Continuation, ...], MaxLen(MAX_PROMPTS)]
"""Of the campaign's prompts, in their order."""


def is_display_name(text: str) -> bool:
    """Whether a peer may call itself so: letters, marks and digits of any script, and " -_.'" between them.

    That leaves nothing that means anything to a terminal, to HTML or to Markdown.
    """
    kinds = {unicodedata.category(character)[0] for character in text if character not in " -_.'"}
    return len(text) <= LONGEST_NAME and text == text.strip() and kinds <= {"L", "M", "N"} and "L" in kinds


Name = Annotated[str, MaxLen(LONGEST_NAME), Predicate(lambda text: not text or is_display_name(text))]
"""What a peer calls itself or its team; empty for nothing. Not unique: people are shown the id with it."""
Address = Annotated[str, MaxLen(2**9), Predicate(str.isprintable)]
"""A multiaddr; one through a relay names two peers."""
Text = Annotated[str, MaxLen(2**10)]

Count = Annotated[int, Ge(0), Le(2**63 - 1)]
Tokens = Annotated[int, Ge(0), Le(2**48)]
"""Tokens of a peer or round: 2.8 * 10^14 exceeds any corpus, and sums of a thousand stay below 2^63."""
Round = Annotated[int, Ge(-1), Le(2**40)]
"""-1: before the first, or none."""
Term = Annotated[int, Ge(0), Le(2**40)]
Steps = Annotated[int, Ge(0), Le(2**40)]
Version = Annotated[int, Ge(0), Le(2**31 - 1)]
MemberIndex = Annotated[int, Ge(0), Le(MAX_MEMBERS - 1)]
ExpertIndex = Annotated[int, Ge(0), Le(MAX_EXPERTS - 1)]
ExpertCount = Annotated[int, Ge(0), Le(MAX_EXPERTS)]
PartIndex = Annotated[int, Ge(0), Le(MAX_PARTS - 1)]
RevisionNumber = Annotated[int, Ge(0), Le(MAX_REVISIONS)]
RootIndex = Annotated[int, Ge(0), Le(MAX_ROOTS - 1)]
Lane = Annotated[int, Ge(0), Le(2**8)]
PieceIndex = Annotated[int, Ge(0), Le(2**40)]
Position = Annotated[int, Ge(0), Le(2**53)]
"""A sample's place in a pass over the corpus; exact as a float too."""
Port = Annotated[int, Ge(0), Le(2**16 - 1)]
FrameKind = Annotated[int, Ge(0), Le(2**8 - 1)]

Seconds = Annotated[float, Ge(0), Le(1e9)]
"""Thirty years."""
UnixTime = Annotated[float, Ge(0), Le(1e11)]
Rate = Annotated[float, Ge(0), Le(1e15)]
"""Tokens, bytes or operations a second."""
Share = Annotated[float, Ge(0), Le(1e18)]
"""A ratio of times: a straggler's 10^9 seconds over a quorum's nanosecond."""
Loss = Annotated[float, Ge(-1e15), Le(1e15)]
"""Nats per token; token-weighted sums stay finite."""


def is_real(number: float) -> bool:
    """Whether others read this measurement."""
    return math.isnan(number) or abs(number) <= 1e15


Real = Annotated[float, Predicate(is_real)]
"""A measurement; NaN when unknown."""

Addresses = Annotated[tuple[Address, ...], MaxLen(MAX_ADDRESSES)]
Archived = Annotated[tuple[Round, ...], MaxLen(MAX_ARCHIVED)]
Electorate = Annotated[tuple[PeerId, ...], MaxLen(MAX_ELECTORATE)]
Experts = Annotated[tuple[ExpertIndex, ...], MaxLen(MAX_EXPERTS)]
Donors = Annotated[tuple[Annotated[tuple[Experts, ...], MaxLen(MAX_EXPERTS)], ...], MaxLen(MAX_LAYERS)]
"""Donors of each expert in each layer, `[layers][experts][k]`."""
Lost = Annotated[tuple[Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)], ...], MaxLen(MAX_REVISIONS)]
"""Members lost before each revision of the part table."""
Peers = Annotated[tuple[PeerId, ...], MaxLen(MAX_MEMBERS)]
Roots = Annotated[tuple[Root, ...], MaxLen(MAX_ROOTS)]
Routed = Annotated[tuple[Tokens, ...], MaxLen(MAX_EXPERTS)]
"""Tokens by expert."""

"""The methods that a peer serves, each with its request and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spes_p2p.messages.compact import BRIEF_BYTES
from spes_p2p.messages.content import ContentKind
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind
from spes_p2p.messages.refusals import LONGEST_REFUSAL

PROTOCOL_VERSION = 10
"""Counts from the first tagged release: until 0.1.0 is tagged, the number stays even when the wire changes, and all peers of a
swarm run the same commit. After that, the first change since a release of a message that an older peer must understand raises
it, together with `__version__`."""
OLDEST_PROTOCOL = 10
"""The oldest version that this program still speaks; older peers are refused. Only the newer of two peers can know this, so no
peer refuses one of a newer version."""

ROUND, PREPARE, ACCEPT, DECIDE, COMMITS = "round", "prepare", "accept", "decide", "commits"
PING, LEAVE, REFORM, CONTROL = "ping", "leave", "reform", "control"
MILESTONE = "milestone"
PUSH, PULL, CAMPAIGN, SNAPSHOT = "push", "pull", "campaign", "snapshot"
INPUTS, ACCUSE = "inputs", "accuse"
STATUS, HISTORY, CLOCK, DIAL_BACK, SPEED = "status", "history", "clock", "dial_back", "speed"


SMALL = 2**12
"""Bytes of a record of a few ids and numbers."""
LISTS = 2**21
"""Bytes of a record with MAX_ARCHIVED rounds, or of a list that people see."""
WHOLE = MAX_FRAME_BYTES
"""Bytes of a proposal, a commit, certified commits or a manifest, which grow with members and parts."""
ORDER = 2**19
"""Bytes of a control record with MAX_CHANGES changes of the schedule."""
WORK = 2**18
"""Bytes of an announcement: MAX_EXPERTS token counts (37 KB), archived rounds, and MAX_INTERVALS sample intervals (115 KB)."""
PART = 2**20 + 2**12
"""Bytes of an encoded part with its index and tokens."""
UPDATE = 2**19 + 2**12
"""Bytes of the longest part of an update (`rounds/parts.py`) with its index and tokens. A report of 1,600 reduced parts among
1,024 members fits, or of 7,000 among 32; a proof with the inputs of 400 members; and a commit of 1,024 with 64 experts each."""
CHUNK = 2**18
"""Bytes of a chunk of a piece, or of a speed measurement."""
PAGE = 5 * 2**18
"""Bytes of a page of certified commits or round records, compressed or not; its sender fills it with some 1 MiB."""


@dataclass(frozen=True)
class Method:
    """One kind of stream."""

    name: str
    asked_by: str
    request: str
    """Sent by the peer that opens the stream."""
    answer: str
    """Sent back."""
    request_bytes: int = SMALL
    """The longest request that the asked peer accepts."""
    answer_bytes: int = SMALL
    """The longest answer that the asking peer accepts."""
    further: Mapping[int, int] = field(default_factory=dict)
    """Longest bodies of further frames from the asking peer, by kind; of others, SMALL."""
    answers: Mapping[int, int] = field(default_factory=dict)
    """The same for frames to the asking peer."""
    outsider_bytes: int = PAGE
    """The longest frame to the asking peer from one that takes no part in the rounds."""
    stranger_bytes: int = UPDATE
    """The longest frame from an asking member for which the owner of an open campaign does not vouch."""
    is_paced: bool = True
    """Whether the bounds of outsiders on pace and frames apply (`net/shares.py`)."""

    def longest(self, kind: int, to_asker: bool) -> int:
        """Return the bytes that the body of a frame may have. A longer one is refused before it is read."""
        if kind == Kind.MESSAGE:
            return self.answer_bytes if to_asker else self.request_bytes
        if kind == Kind.REFUSAL:
            return LONGEST_REFUSAL
        return (self.answers if to_asker else self.further).get(kind, SMALL)


def _pieces(kind: ContentKind, asked_by: str, what: str) -> Method:
    return Method(kind, asked_by, "PiecesRequest", f"CONTENT with {what}", answers={Kind.CONTENT: CHUNK})


METHODS = {
    method.name: method
    for method in (
        Method(CAMPAIGN, "anybody", "CampaignRequest", "CampaignRecord", answer_bytes=WHOLE),
        Method(STATUS, "anybody", "empty", "a msgpack mapping (`PeerStatus`)", answer_bytes=LISTS),
        Method(HISTORY, "anybody", "HistoryRequest", "a zstd frame of a HistoryPage", answer_bytes=LISTS),
        Method(COMMITS, "members", "CommitsRequest", "a zstd frame of a Decide: certificates, at most 200", answer_bytes=WHOLE),
        Method(MILESTONE, "members", "MilestoneRequest", "Milestone", answer_bytes=WHOLE, outsider_bytes=WHOLE),
        Method(PING, "members", "Ping", "Pong"),
        Method(LEAVE, "members", "Signed with a Leave", "empty", request_bytes=WORK),
        Method(REFORM, "trainers, at helpers", "ReformRequest", "Decide", answer_bytes=WHOLE),
        Method(ROUND, "members, at the coordinator",
               "Signed with an Announcement, later REPORT with a Report (its Signed holds a Staged), or "
               "STALLED with a Stalled; BRIEF with a Brief in place of announcement or report",
               "PROPOSAL with a Proposal, meanwhile REVISION with a Revision, then DECIDED with a CertifiedCommit; "
               "PASSED with a Passed or COMPACT with a Compact in place of proposal or commit; "
               "IN_FULL in answer to a Brief or REPORT",
               request_bytes=WORK, further={Kind.REPORT: WHOLE, Kind.BRIEF: BRIEF_BYTES},
               answers={Kind.PROPOSAL: WHOLE, Kind.DECIDED: WHOLE, Kind.COMPACT: WHOLE, Kind.REVISION: LISTS}),
        Method(CONTROL, "anybody", "ControlRequest", "Known", request_bytes=ORDER, answer_bytes=LISTS),
        Method(PREPARE, "the coordinator, at electors", "Prepare", "Promise", answer_bytes=WHOLE),
        Method(ACCEPT, "the coordinator, at electors",
               "Accept (its evidence is an Evidence); PASSED with a Passed or COMPACT with a Compact in its place", "Vote",
               request_bytes=WHOLE, further={Kind.COMPACT: WHOLE}, stranger_bytes=SMALL),
        Method(DECIDE, "the coordinator, at members", "Decide", "empty", request_bytes=WHOLE),
        Method(PUSH, "contributors, at reducers",
               "PushHeader, then PART with an encoded update each, after at most 8 of them PUSHED with a Signed (it holds a "
               "Pushed), END", "empty", further={Kind.PART: PART}),
        Method(PULL, "members", "PullRequest",
               "PART with a result each; after those of lane 0 MANIFEST with a Manifest",
               answers={Kind.PART: PART, Kind.MANIFEST: WHOLE}),
        Method(INPUTS, "a member that checks a reducer", "InputsRequest", "Inputs", answer_bytes=WHOLE),
        Method(ACCUSE, "members", "WrongSum", "empty", request_bytes=WHOLE),
        Method(SNAPSHOT, "joiners", "SnapshotRequest", "SnapshotInfo"),
        _pieces("file", "anybody", "a tokenizer or manifest, by its sha256"),
        _pieces("base_hashes", "joiners", "the BLAKE3 of each piece of a base, 32 bytes each, by commit"),
        _pieces("base", "joiners", "pieces of a base, packed float32, by commit"),
        _pieces("token_hashes", "trainers", "the sha256 of each piece of a token file, 32 bytes each, by root"),
        _pieces("tokens", "trainers", "pieces of a token file, by root"),
        _pieces("plan", "late members, electors", "a Proposal, by its id"),
        _pieces("manifests", "late members, electors", "Manifests of a plan, by revision * members + reducer"),
        _pieces("parts", "late members", "encoded results of a plan, by index of the part"),
        _pieces("record", "members, electors", "a proposal, commit or Accept as the coordinator sends it, 4 KiB each, behind "
                "the sha256 of the next piece; by that of the first"),
        _pieces("updates", "members that check a reducer", "encoded updates of a plan, by part * 1024 + contributor"),
        _pieces("proof", "members", "a WrongSum, by its id"),
        _pieces("moments", "a member that audits the asked one", "the BLAKE3 of each further piece, then the optimizer's state "
                "before a phase (`training/moments.py`), by its digest"),
        Method(CLOCK, "`doctor`", "empty", "Clock"),
        Method(DIAL_BACK, "`doctor`", "DialBackRequest", "DialBack", answer_bytes=LISTS),
        Method(SPEED, "`doctor`", "SpeedRequest", "CONTENT one way, END, then Moved", further={Kind.CONTENT: CHUNK},
               answers={Kind.CONTENT: CHUNK}, is_paced=False),
    )
}

UNBOUNDED = Method("", "", "", "", request_bytes=WHOLE, answer_bytes=WHOLE, further={Kind.CONTENT: WHOLE})
"""Limits of a method that is not in the table."""

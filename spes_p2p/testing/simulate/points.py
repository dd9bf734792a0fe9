"""The named points of a round at which a fault can strike, recognized by the peers' frames, writes and events."""

from __future__ import annotations

import difflib
import re

from spes_p2p.messages.codec import unpack
from spes_p2p.messages.compact import Brief, Compact
from spes_p2p.messages.framing import Kind
from spes_p2p.observe.events import Event, StateEntered
from spes_p2p.testing.memory_state import Frame

IMMEDIATELY = "start"
"""Not a point: strike as soon as the previous round is committed."""

POINTS = {
    IMMEDIATELY: "a peer has committed the previous round",
    "training": "it starts the phase's local steps",
    "announce": "it sends its announcement to the coordinator",
    "prepare": "as coordinator, it asks an elector for a promise",
    "promise": "as elector, it answers with its promise, already on disk",
    "plan": "as coordinator, it sends the plan to a member",
    "push": "it sends an update to a reducer",
    "reduce": "as reducer, it sends a result or its manifest",
    "pull": "it requests results",
    "stage": "it writes the results to its disk",
    "staged": "it reports what it staged",
    "accept": "as coordinator, it asks an elector for a vote",
    "vote": "as elector, it answers with its vote, already on disk",
    "decide": "as coordinator, it sends the decision to an elector outside the round",
    "decided": "as coordinator, it sends a member the decided commit",
    "record": "as elector, it writes a promise or vote to its disk",
    "log": "it appends a certificate to its log",
    "apply": "it starts to apply a decided commit",
    "save": "it writes its base to its disk",
    "checkpoint": "it writes its checkpoint to its disk",
    "download": "it starts or continues to download a base",
    "donate": "as donor, it sends a piece of a base",
    "replay": "it serves the results of an earlier round",
    "leave": "it announces that it leaves",
}
"""What a peer is about to do at each point."""

_REQUESTS = {
    "prepare": "prepare", "accept": "accept", "push": "push", "pull": "pull", "decide": "decide", "leave": "leave",
    "base": "download", "base_hashes": "download", "snapshot": "download",
}
_ANSWERS = {"prepare": "promise", "accept": "vote", "pull": "reduce", "base": "donate", "plan": "replay"}
_ROUND_ANSWERS: dict[int, str] = {Kind.PROPOSAL: "plan", Kind.DECIDED: "decided"}
_ROUND_REQUESTS: dict[int, str] = {Kind.MESSAGE: "announce", Kind.REPORT: "staged"}
_FORMS: dict[int, type[Compact | Brief]] = {Kind.COMPACT: Compact, Kind.BRIEF: Brief}
"""Of frames in place of others."""
_WRITES = {"results": "stage", "votes": "record", "commits": "log", "base": "save", "checkpoint": "checkpoint"}
"""By the first word of the blob's name."""
_STATES = {"training": "training", "applying": "apply", "downloading": "download"}


def point_of_frame(frame: Frame) -> str | None:
    """Return the point that a frame's sender has reached; None for heartbeats, refusals and streams outside of rounds."""
    if frame.kind in (Kind.HEARTBEAT, Kind.REFUSAL):
        return None
    if frame.method != "round":
        return (_ANSWERS if frame.is_answer else _REQUESTS).get(frame.method)
    form = _FORMS.get(frame.kind)
    kind = frame.kind if form is None else unpack(form, frame.body).kind
    return (_ROUND_ANSWERS if frame.is_answer else _ROUND_REQUESTS).get(kind)


def point_of_write(blob: str) -> str | None:
    """Return the point of a write to this blob or log."""
    return _WRITES.get(re.split(r"[-.]", blob)[0])


def point_of_event(event: Event) -> str | None:
    """Return the point of an event."""
    return _STATES.get(event.name) if isinstance(event, StateEntered) else None


def known_point(name: str) -> str:
    """Return the name, or raise ValueError with advice if there is no such point."""
    if name not in POINTS:
        close = difflib.get_close_matches(name, POINTS, n=1)
        raise ValueError(f"did you mean '{close[0]}'?" if close else f"must be one of {', '.join(POINTS)}")
    return name

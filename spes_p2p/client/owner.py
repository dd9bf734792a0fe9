"""`spes-p2p control`: query the state of the campaign, sign the owner's order, send it to all peers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.campaign.orders import CampaignView, MakeControl, revoked, unreached
from spes_p2p.client.connection import SwarmConnection, connect
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.control import describe_news, is_signed, is_stopped, number_of, owner_of, signed
from spes_p2p.consensus.milestone import may_roll_back
from spes_p2p.consensus.output import Identity
from spes_p2p.errors import UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Commit, Control, ControlRequest, Known
from spes_p2p.messages.methods import CONTROL
from spes_p2p.net.identity import RSAIdentity


@dataclass(frozen=True)
class GivenOrder:
    """An order that at least one peer accepted."""

    control: Control
    accepted: int
    """Peers that accepted the order; they pass it on to the others."""
    peers: int
    round: int
    """The newest committed round at that time."""
    news: str
    """What it changes, in words."""
    revoked: str
    """The earlier order that it takes back before that took effect, in words; "" for none."""
    unreached: str
    """What of it is never in effect, in words; "" for nothing."""


async def give_order(addresses: Sequence[str], key: Path, make: MakeControl, spare: Sequence[str]) -> GivenOrder:
    """Sign the record that `make` returns and send it to every peer. Raises UserError.

    `spare`: addresses for when nobody listens at the others.
    """
    owner = owner_key(key)
    async with connect(addresses, spare=spare) as swarm:
        config = (await swarm.files()).campaign.config
        require_owner(config.name, swarm.genesis, owner, key)
        known = await _ask_all(swarm, None)
        await swarm.learn_commits({peer: each.round for peer, each in known.items()})
        standing = _view(swarm.log, owner, config, known, addresses[0])
        control = signed(make(standing), owner)
        answers = await _ask_all(swarm, control)
    accepted = _accepted(control, answers.values(), swarm.genesis, owner, addresses[0])
    news = describe_news(control, standing.newest, standing.round)
    taken_back, late = revoked(control, standing), unreached(control, standing)
    return GivenOrder(control, accepted, len(answers), max(standing.round, 0), news, taken_back, late)


def owner_key(path: Path) -> RSAIdentity:
    """Read the owner's key. Raises UserError."""
    advice = "give the identity.key of the bootstrap peer that started the campaign"
    if not path.is_file():
        raise UserError(f"--key {path}: {'is no regular' if path.exists() else 'no such'} file; {advice}")
    try:
        return RSAIdentity(path)
    except UserError:
        raise UserError(f"--key {path}: not a peer's key; {advice}") from None


def require_owner(campaign: str, genesis: Commit, key: RSAIdentity, path: Path) -> None:
    """Raise UserError unless the key at `path` is that of the owner of this campaign."""
    owner = owner_of(genesis)
    if key.peer_id != owner:
        raise UserError(
            f"--key {path}: the key of {key.peer_id}, but the owner of campaign {campaign} is {owner}; give the identity.key "
            "of the bootstrap peer that started it"
        )


def _view(log: CommitLog, identity: Identity, config: CampaignConfig, known: Mapping[str, Known], address: str) -> CampaignView:
    """Merge what the peers know with the certified commits. Raises UserError if no peer answers or no more orders are accepted.

    Who keeps the base for a rollback is known by the word of those that the owner vouches for: helpers and electors, and among
    friends the members.
    """
    if not known:
        raise UserError(f"{address}: connected, but no peer of the campaign answers; try again in a moment")
    genesis, last = log.genesis, log.last
    told = [each.newest for each in known.values() if each.newest is not None and is_signed(each.newest, genesis, identity)]
    newest = max((*told, last.control), key=number_of)
    if is_stopped(newest) and number_of(newest) <= number_of(last.control):
        raise UserError("the campaign is stopped permanently; export its model with spes-p2p export")
    vouched = {*last.helpers, *last.electorate, *(last.members if config.admission == "friends" else ())}
    archived = sorted({kept for peer in vouched & known.keys() for kept in known[peer].archived})
    is_pending = newest is not None and newest.number > number_of(last.control)
    # Without its base a rollback would wait for ever, and every other order with it.
    if newest is not None and is_pending and newest.rollback in archived and may_roll_back(newest.rollback, last.round):
        raise UserError(f"the rollback to round {newest.rollback} is still pending; repeat the order after the next round")
    return CampaignView(
        genesis.campaign, owner_of(genesis), config, newest, last.round, last.step, tuple(archived), last.excluded,
        last.control, last.trusted,
    )


def _accepted(control: Control, answers: Collection[Known], genesis: Commit, identity: Identity, address: str) -> int:
    """Return how many peers have the order. Raises UserError if none has, or some have another one of the same number."""
    accepted = sum(answer.newest == control for answer in answers)
    if not accepted:
        raise UserError(f"{address}: no peer accepted the order; check spes-p2p status, then repeat it")
    newest = [answer.newest for answer in answers if answer.newest is not None and answer.newest != control]
    if any(other.number == control.number and is_signed(other, genesis, identity) for other in newest):
        raise UserError(f"{address}: another order {control.number} was given at the same time, and only one of both takes "
                        "effect; check spes-p2p status after the next round, then repeat what is missing")
    return accepted


async def _ask_all(swarm: SwarmConnection, control: Control | None) -> dict[str, Known]:
    """Send the record to all peers; return what each answering peer knows."""
    return await swarm.ask_peers(CONTROL, pack(ControlRequest(control)), lambda reply: unpack(Known, reply))

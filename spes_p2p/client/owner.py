"""The owner of a campaign gives an order (`spes-p2p control`): asks what holds, signs a record, hands it to everybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.campaign.orders import MakeControl, Standing
from spes_p2p.client.visitor import Visit, visiting
from spes_p2p.consensus.control import is_signed, is_stopped, number_of, owner_of, signed
from spes_p2p.errors import UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Control, ControlRequest, Known
from spes_p2p.messages.methods import CONTROL
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.rounds.schedule import scheduled


@dataclass(frozen=True)
class Given:
    """An order that was given."""

    control: Control
    taken: int
    """Peers that have it now; the others learn it from them."""
    peers: int
    round: int
    """The newest that anybody had committed by then."""


async def give_order(addresses: Sequence[str], key: Path, make: MakeControl) -> Given:
    """Sign what `make` says and hand it to every peer of the campaign at these addresses. Raises UserError."""
    owner = _owner_key(key)
    async with visiting(addresses) as visit:
        _require_owner(visit, owner, key)
        known = await _ask_all(visit, None)
        standing = _standing(visit, known, addresses[0])
        control = signed(make(standing), owner)
        answers = await _ask_all(visit, control)
    taken = sum(answer.newest == control for answer in answers)
    if not taken:
        raise UserError(f"{addresses[0]}: nobody took the order; see spes-p2p status, then give it again")
    return Given(control, taken, len(answers), max(standing.round, 0))


def _owner_key(path: Path) -> RSAIdentity:
    advice = "give the identity.key of the bootstrap peer that began the campaign"
    if not path.is_file():
        raise UserError(f"--key {path}: no such file; {advice}")
    try:
        return RSAIdentity(path)
    except UserError:
        raise UserError(f"--key {path}: not a peer's key; {advice}") from None


def _require_owner(visit: Visit, key: RSAIdentity, path: Path) -> None:
    owner = owner_of(visit.genesis)
    if key.peer_id != owner:
        name = visit.files.campaign.config.name
        raise UserError(
            f"--key {path}: the key of {key.peer_id}, but campaign {name} takes orders of {owner} only; give the identity.key "
            "of the bootstrap peer that began it"
        )


def _standing(visit: Visit, known: Sequence[Known], address: str) -> Standing:
    """Put together what the peers know. Raises UserError when nobody answers or no order makes sense any more."""
    if not known:
        raise UserError(f"{address}: reached, but no peer of the campaign answers; try again in a moment")
    genesis, identity = visit.genesis, visit.world.identity
    valid = [each.newest for each in known if each.newest is not None and is_signed(each.newest, genesis, identity)]
    newest = max(valid, key=number_of, default=None)
    applied = max(each.applied for each in known)
    if is_stopped(newest) and number_of(newest) <= applied:
        raise UserError("the campaign is stopped, for good; what it learned is exported with spes-p2p export")
    config, round_number = visit.files.campaign.config, max(each.round for each in known)
    if max(each.step for each in known) >= scheduled(config, newest, round_number + 1).training.total_steps:
        raise UserError("the campaign is complete; there is nothing left to order")
    if newest is not None and newest.rollback >= 0 and newest.number > applied:
        raise UserError(f"the rollback to round {newest.rollback} is not done yet; give the order again after the next round")
    archived = sorted({kept for each in known for kept in each.archived})
    return Standing(genesis.campaign, config, newest, round_number, tuple(archived))


async def _ask_all(visit: Visit, control: Control | None) -> list[Known]:
    """What every peer that answers knows, after it got this record."""
    answers = await visit.ask_everybody(CONTROL, pack(ControlRequest(control)), lambda reply: unpack(Known, reply))
    return list(answers.values())
